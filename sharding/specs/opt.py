"""OPT, tensor parallel (Megatron-LM, arXiv:1909.08053, section 3), as BLOOM; every device holds the positions.

The token table is split by tokens, in opt-350m too, where its rows are narrower than the hidden size.
"""

from sharding.spec import ShardingSpec

SPEC = ShardingSpec(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "ffn": "tensor",
        "embed": None,
        "word_embed": None,
        "positions": None,
    }
)
