"""What-ifs small enough to compile in a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.planning import model_catalog
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.hlo import CollectiveOp
from jaxserve.planning.stage_load import Collective
from sharding import devices, specs
from sharding.spec import ShardingSpec

BLOOM = {"model_type": "bloom", "vocab_size": 1024, "hidden_size": 128, "n_layer": 2, "n_head": 8}
GPT2 = {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 128, "n_layer": 2, "n_head": 8, "n_positions": 512}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "ffn_dim": 512,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 64,
    "do_layer_norm_before": False,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GPTJ = {"model_type": "gptj", "vocab_size": 1024, "n_embd": 128, "n_layer": 2, "n_head": 8, "rotary_dim": 8}
GPTJ |= {"n_positions": 512}
FALCON = {
    "model_type": "falcon",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "multi_query": True,
}
SIZES: dict[str, Any] = {"dtype": "float32", "max_rows": 4, "buckets": (8,), "max_context": 256, "slots": 8192}
SIZES["attention"] = "xla"  # which a CPU compiles too, whatever the topology
# What a spec changes: activations split by their width, or tokens and slots by an axis of their own.
BY_EMBED: dict[str, Any] = {"activations": {"embed": "tensor"}}
BY_CONTEXT: dict[str, Any] = {"activations": {"tokens": "context"}, "pool": {"slots": "context"}}


def question(
    entries: dict[str, Any], spec: ShardingSpec | None = None, topology: str = "v5p:2x2x2", **settings: Any
) -> Deployment:
    config = models.parse_config(entries)
    return Deployment(
        name=config.family,
        config=config,
        topology=devices.parse(topology),
        engine=EngineConfig(**SIZES | settings),
        spec=spec or specs.default(config.family),
        context=128,
    )


def named(name: str, topology: str, spec: ShardingSpec | None = None, **settings: Any) -> Deployment:
    _, config = model_catalog.find(name)
    return Deployment(
        name=name,
        config=config,
        topology=devices.parse(topology),
        engine=EngineConfig(**settings),
        spec=spec or specs.default(config.family),
    )


def payloads(deployment: Deployment, collectives: Iterable[Collective | CollectiveOp]) -> Counter[tuple[str, int]]:
    """Bytes of the results of collectives in the largest bucket, by kind and devices of a group."""
    tokens, counts = deployment.buckets[-1], Counter()
    for each in collectives:
        rows = 1
        if isinstance(each, Collective):
            rows = min(tokens, deployment.engine.max_rows) if each.per_row else tokens
        counts[each.kind, each.group] += round(each.times * each.nbytes * rows)
    return counts
