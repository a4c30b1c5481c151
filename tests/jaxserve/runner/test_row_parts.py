"""A pool that is split by rows: each part's share of an iteration, and whole engines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup
from jaxserve.planning import hlo
from jaxserve.runner.row_parts import copies_of_part, of_part
from pallas_kernels.api import AttentionBatch
from tests.jaxserve.runner.test_meshes import check_same, config_of, make, settings

SIZE, BLOCKS, COLUMNS, TOKENS = 4, 6, 5, 24
RULES = """
    [mesh]
    attn = {rows}
    tensor = {tensor}
    [axes]
    vocab = ["tensor", "attn"]
    ffn = ["tensor", "attn"]
    [pool]
    rows = "attn"
"""
BY_ALL = '[parameters."layers.*.out.kernel"]\nheads = ["tensor", "attn"]\n'  # the output is split over all devices


def batch_of(chunks: list[tuple[int, int, list[int]]], count: int) -> AttentionBatch:
    """Chunks (start, length, table), then empty ones: `count` in all."""
    lengths = [length for _, length, _ in chunks] + [0] * (count - len(chunks))
    owners = np.repeat(np.arange(count), lengths)
    positions = np.concatenate([np.arange(start, start + length) for start, length, _ in chunks])
    tables = np.zeros((count, COLUMNS), np.int32)
    for index, (_, _, table) in enumerate(chunks):
        tables[index, : len(table)] = table
    kv_lens = [start + length for start, length, _ in chunks] + [0] * (count - len(chunks))
    return AttentionBatch(
        query_offsets=jnp.cumulative_sum(jnp.array(lengths, jnp.int32), include_initial=True),
        kv_lens=jnp.array(kv_lens, jnp.int32),
        block_tables=jnp.array(tables),
        token_chunk=jnp.pad(jnp.array(owners, jnp.int32), (0, TOKENS - len(owners))),
        positions=jnp.pad(jnp.array(positions, jnp.int32), (0, TOKENS - len(owners))),
    )


@pytest.mark.parametrize("seed", range(6))
def test_each_part_has_its_own_chunks_in_order(seed: int) -> None:
    draw, chunks = Random(seed), []
    for index in range(6):
        length, part = 1 if index < 3 else draw.randint(2, 5), draw.randrange(3)
        start = draw.randint(0, COLUMNS * SIZE - length)
        table = [part * BLOCKS + draw.randrange(BLOCKS) for _ in range(-(-(start + length) // SIZE))]
        if len(table) > 1 and draw.random() < 0.5:
            table[0] = draw.randrange(3 * BLOCKS)  # behind a window: of another row by now
        chunks.append((start, length, table))
    whole = batch_of(chunks, 8)
    flat = np.cumsum([0, *(length for _, length, _ in chunks)])
    seen: Counter[int] = Counter()
    for part in range(3):
        own, tokens, places = of_part(whole, part, BLOCKS, SIZE)
        mine = [index for index, (_, _, table) in enumerate(chunks) if table[-1] // BLOCKS == part]
        kept = [chunks[index] for index in mine]
        expected = batch_of([(start, length, [0] * len(table)) for start, length, table in kept] or [(0, 0, [])], 8)
        used = int(expected.query_offsets[-1])
        assert own.query_offsets.tolist() == expected.query_offsets.tolist()
        assert own.kv_lens.tolist() == expected.kv_lens.tolist()
        assert own.token_chunk[:used].tolist() == expected.token_chunk[:used].tolist()
        assert own.positions.tolist() == expected.positions.tolist()
        for row, (_, _, table) in zip(own.block_tables, kept, strict=False):
            assert row[1 : len(table)].tolist() == [block - part * BLOCKS for block in table[1:]]
        assert 0 <= own.block_tables.min() <= own.block_tables.max() < BLOCKS
        sources = [token for index in mine for token in range(flat[index], flat[index + 1])]
        assert tokens[:used].tolist() == sources
        assert {token: place for token, place in enumerate(places.tolist()) if place < TOKENS} == {
            token: place for place, token in enumerate(sources)
        }
        seen.update(sources)
    assert seen == Counter(range(flat[-1]))


def test_copies_of_other_parts_change_nothing() -> None:
    copies = jnp.array([[1, 2], [6, 8], [9, 8], [14, 12], [-1, -1], [-1, -1]])  # two groups: of 6 and 5 blocks a part
    sizes = jnp.array([6, 5] * 3)[:, None]
    assert copies_of_part(copies, 0, sizes).tolist() == [[1, 2], [0, 0], [0, 0], [0, 0], [-1, -1], [-1, -1]]
    assert copies_of_part(copies, 1, sizes).tolist() == [[0, 0], [1, 3], [3, 2], [0, 0], [-1, -1], [-1, -1]]
    assert copies_of_part(copies, 3, sizes).tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [-1, -1], [-1, -1]]


@pytest.fixture
def rules(tmp_path):
    """Writes a spec file; returns its path."""

    def write(rows: int, tensor: int, more: str = "") -> str:
        file = tmp_path / "rows.toml"
        file.write_text(RULES.format(rows=rows, tensor=tensor) + more)
        return str(file)

    return write


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "sizes", "more", "slots"),
    [("llama", (4, 2), BY_ALL, 352), ("bloom", (2, 4), "", 176), ("gemma2", (2, 2), BY_ALL, 176)],
)
def test_rows_on_devices_of_their_own_answer_as_one(family, sizes, more, slots, rules) -> None:
    engine = make(family, 2, settings("grow", sharding=rules(*sizes, more), slots=slots))
    check_same(engine, family, 2)
    (stage,) = engine._loops[0].pipeline.stages
    for leaf in jax.tree.leaves(stage.pool):
        assert leaf.shape[0] == sizes[0] * leaf.sharding.shard_shape(leaf.shape)[0]
        assert len({str(shard.index) for shard in leaf.addressable_shards}) == sizes[0] * sizes[1]  # no copies
    assert engine.report.request_slots == slots // sizes[0]
    assert engine.load().preemptions > 0


@pytest.mark.long
def test_two_stages_with_rows_drafts_and_shared_prompts(rules) -> None:
    config = settings("reserve", stages=2, sharding=rules(2, 2, BY_ALL), slots=320, speculate="ngram", scoring=False)
    engines = [make("llama", 2, each) for each in (config, settings("reserve", slots=320, scoring=False))]
    prompt = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7)
    sampling = {"max_tokens": 20, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    found = [[each.token_ids for each in engine.generate([prompt], n=3, **sampling)] for engine in engines]
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("part", ["rows", "slots"])
def test_a_beam_search_finds_what_one_device_finds(part, rules) -> None:
    file = Path(rules(2, 2, BY_ALL))
    file.write_text(file.read_text().replace("rows =", f"{part} ="))
    prompt = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7)
    found = [
        make("llama", 2, each).beam_search(prompt, n=6, max_tokens=8)
        for each in (settings("grow", slots=320), settings("grow", slots=320, sharding=str(file)))
    ]
    one, other = ([each.token_ids for each in beams] for beams in found)
    assert one == other
    assert len(set(map(tuple, one))) == 6


def test_a_program_exchanges_attention_once(rules) -> None:
    config = settings("grow", sharding=rules(2, 2, BY_ALL), slots=320, attention="xla")
    ((stage,),), _ = startup.replica_programs(config, models.build(config_of("llama", 2)))
    text = stage.lower_forward(12, 80).compile().as_text() or ""
    assert Counter((each.kind, each.group) for each in hlo.collectives(text) for _ in range(each.times)) == {
        ("all-reduce", 4): 1 + 2 * 2,
        ("reduce-scatter", 2): 2,
    }
    assert not hlo.collectives(stage.lower_copy(80).compile().as_text() or "")


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ('heads = "attn"', {}, r"the pool: logical axes 'rows' and 'heads' are both on mesh axis 'attn'"),
        (
            'heads = "atn"',
            {},
            r"logical axis 'heads' goes to 'atn', which is not an axis of the mesh; did you mean 'attn'",
        ),
        ("", {"host_cache": 1 << 20}, r"host_cache is 1048576; with rows of the pool on attn there is none"),
        (
            '[axes]\nkv_heads = ["tensor", "attn"]',
            {},
            r"layers.0.qkv.kernel: axis 'kv_heads' of size 2 does not divide",
        ),
    ],
)
def test_what_does_not_go_with_rows_is_refused(more, changes, message, rules) -> None:
    file = rules(2, 2)
    text = RULES.format(rows=2, tensor=2)
    with open(file, "w") as out:
        out.write(text.replace("[axes]", more) if more.startswith("[axes]") else text + more)
    with pytest.raises(ValueError, match=message):
        startup.replica_programs(settings("grow", sharding=file, **changes), models.build(config_of("llama", 2)))
