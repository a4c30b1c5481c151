"""GPT-BigCode, tensor parallel like GPT-2 (Megatron-LM, arXiv:1909.08053, section 3).

The one key head is repeated on every device.
"""

from sharding.spec import ShardingSpec

SPEC = ShardingSpec(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "ffn": "tensor",
        "embed": None,
        "positions": None,
    }
)
