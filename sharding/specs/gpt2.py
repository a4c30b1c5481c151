"""GPT-2, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3).

The position table is replicated. GPT-2's vocabulary of 50,257 does not divide over an even number of devices.
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
