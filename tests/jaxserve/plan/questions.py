"""What-ifs small enough to compile in a test."""

from __future__ import annotations

from typing import Any

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.plan.whatif import WhatIf
from sharding import devices, specs
from sharding.spec import ShardingSpec

BLOOM = {"model_type": "bloom", "vocab_size": 1024, "hidden_size": 128, "n_layer": 2, "n_head": 8}
GPT2 = {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 128, "n_layer": 2, "n_head": 8, "n_positions": 512}
SIZES: dict[str, Any] = {"dtype": "float32", "max_rows": 4, "buckets": (8,), "max_context": 256, "slots": 8192}


def question(
    entries: dict[str, Any], spec: ShardingSpec | None = None, topology: str = "v5p:2x2x2", **settings: Any
) -> WhatIf:
    config = models.parse_config(entries)
    return WhatIf(
        name=config.family,
        config=config,
        topology=devices.parse(topology),
        engine=EngineConfig(**SIZES | settings),
        spec=spec or specs.default(config.family),
        context=128,
    )
