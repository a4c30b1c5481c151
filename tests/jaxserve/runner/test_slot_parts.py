"""A pool whose blocks have their slots on several devices: whole engines answer as one device does."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import pytest

from jaxserve import models, startup
from jaxserve.planning import hlo
from tests.jaxserve.runner.test_meshes import check_same, config_of, make, settings

RULES = """
    [mesh]
    context = {context}
    tensor = {tensor}
    [axes]
    vocab = ["tensor", "context"]
    ffn = ["tensor", "context"]
    [pool]
    slots = "context"
"""
BY_HEAD = '[parameters."layers.*.out.kernel"]\nheads = ["tensor", "context"]\n'  # the output is split over all devices
BY_TOKEN = '[axes]\nvocab = "tensor"\nffn = "tensor"\n[activations]\ntokens = "context"\n'  # as the hidden states are


@pytest.fixture
def rules(tmp_path):
    """Writes a spec file; returns its path."""

    def write(context: int, tensor: int, more: str = "") -> str:
        file, text = tmp_path / "slots.toml", RULES.format(context=context, tensor=tensor)
        head, _, pool = text.partition("[axes]")
        file.write_text(f"{head}{more}[pool]{pool.partition('[pool]')[2]}" if "[axes]" in more else text + more)
        return str(file)

    return write


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "sizes", "stages", "more", "block"),
    [
        ("llama", (2, 2), 2, BY_HEAD, 4),
        ("bloom", (4, 2), 1, "", 8),
        ("gemma2", (2, 2), 1, BY_TOKEN, 4),
        ("gpt_oss", (3, 1), 1, BY_TOKEN, 6),
    ],
)
def test_slots_on_devices_of_their_own_answer_as_one(family, sizes, stages, more, block, rules) -> None:
    config = settings("grow", stages=stages, sharding=rules(*sizes, more), slots=88, block_size=block)
    engine = make(family, 2, config)
    check_same(engine, family, 2)
    for stage in engine._loops[0].pipeline.stages:
        for leaf in jax.tree.leaves(stage.pool):
            assert leaf.shape[0] == leaf.sharding.shard_shape(leaf.shape)[0]
            assert (
                leaf.size == sizes[0] * min(sizes[1], config_of(family, 2).num_kv_heads) * leaf.addressable_data(0).size
            )
    assert engine.load().preemptions > 0


@pytest.mark.long
def test_slots_and_rows_drafts_shared_prompts_and_a_host_cache(rules) -> None:
    file = rules(2, 2)
    with open(file) as spec:
        text = spec.read()
    with open(file, "w") as spec:
        spec.write(text.replace("tensor = 2", "tensor = 2\nattn = 2") + 'rows = "attn"\n')
    one = settings("reserve", slots=320, scoring=False)
    prompt = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7)
    sampling = {"max_tokens": 20, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    changes = ({}, {"sharding": file, "speculate": "ngram"}, {"sharding": rules(4, 1), "host_cache": 1 << 20})
    found = [
        [
            each.token_ids
            for each in make("llama", 2, dataclasses.replace(one, **each)).generate([prompt], n=3, **sampling)
        ]
        for each in changes
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("more", "kind"), [("", "all-reduce"), (BY_HEAD, "reduce-scatter")])
def test_a_program_exchanges_attention_twice(rules, more, kind) -> None:
    config = settings("grow", sharding=rules(2, 2, more), slots=320, attention="xla")
    ((stage,),), _ = startup.replica_programs(config, models.build(config_of("llama", 2)))
    text = stage.lower_forward(12, 80).compile().as_text() or ""
    found = Counter((each.kind, each.group) for each in hlo.collectives(text) for _ in range(each.times))
    assert found == Counter({("all-gather", 2): 2, (kind, 2): 2}) + Counter(
        {("all-reduce", 4): 1 + 2 * (2 if more else 1)} | ({} if more else {("all-reduce", 2): 2})
    )
    assert not hlo.collectives(stage.lower_copy(80).compile().as_text() or "")


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ('heads = "context"', {}, r"the pool: logical axes 'heads' and 'slots' are both on mesh axis 'context'"),
        ('rows = "context"', {}, r"the pool: logical axes 'rows' and 'slots' are both on mesh axis 'context'"),
        ("", {"block_size": 3}, r"block_size is 3; with slots of the pool on context it must be a multiple of 2"),
        ("", {"attention": "cpu"}, r"'cpu' cannot serve: slots of a block on several devices; xla and tpu serve"),
    ],
)
def test_what_does_not_go_with_slots_is_refused(more, changes, message, rules) -> None:
    file = rules(2, 2, more)
    with pytest.raises(ValueError, match=message):
        startup.replica_programs(settings("grow", sharding=file, **changes), models.build(config_of("llama", 2)))
