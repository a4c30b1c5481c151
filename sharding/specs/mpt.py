"""MPT, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3)."""

from sharding.spec import ShardingSpec

SPEC = ShardingSpec(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "ffn": "tensor",
        "embed": None,
    }
)
