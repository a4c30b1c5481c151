"""GPT-NeoX, tensor parallel (Megatron-LM, arXiv:1909.08053, section 3), as BLOOM.

Where attention and feed-forward stand side by side their sums could share one all-reduce a layer.
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
