"""Falcon, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3).

Key heads are repeated where there are more devices than key heads.
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
