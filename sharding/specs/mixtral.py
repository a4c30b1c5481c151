"""Mixtral, tensor parallel (Megatron-LM, arXiv:1909.08053, section 3), also within each expert.

For expert parallelism give "expert" the mesh axis and "ffn" none.
"""

from sharding.spec import ShardingSpec

SPEC = ShardingSpec(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "expert": None,
        "ffn": "tensor",
        "embed": None,
        "head_dim": None,
    }
)
