"""Mixtral, tensor parallel, also in experts (Megatron-LM, arXiv:1909.08053, section 3).

For expert parallelism set "expert" to the mesh axis and "ffn" to None.
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
        "router": None,
    }
)
