"""GPT-2, tensor parallel (Megatron-LM, arXiv:1909.08053, section 3), as BLOOM; every device holds the positions.

GPT-2's own vocabulary of 50,257 divides over no even number of devices.
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
