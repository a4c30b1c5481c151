"""Llama, tensor parallel (Megatron-LM, arXiv:1909.08053, section 3).

Key heads are split with the query heads that read them, and repeated where there are more devices than key heads.
"""

from sharding.spec import ShardingSpec

SPEC = ShardingSpec(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "ffn": "tensor",
        "embed": None,
        "head_dim": None,
    }
)
