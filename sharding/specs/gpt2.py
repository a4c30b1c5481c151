"""GPT-2, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3).

Every device holds all positions. GPT-2's own vocabulary of 50,257 does not divide over any even number of devices.
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
