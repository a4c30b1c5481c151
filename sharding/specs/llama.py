"""Llama, tensor parallel (Megatron-LM, arXiv:1909.08053, section 3).

KV heads are split with their query heads, and repeated if there are more devices than KV heads.
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
