"""BLOOM, tensor parallel (Megatron-LM, arXiv:1909.08053, section 3).

The first matmul of each half is split by its outputs and the second by its inputs, so a layer needs two all-reduces;
the token table is split by tokens.
"""

from sharding.spec import ShardingSpec

SPEC = ShardingSpec(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "ffn": "tensor",
        "embed": None,
    }
)
