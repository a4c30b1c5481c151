"""OPT, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3).

The position table is replicated. The token table is split by tokens, also in opt-350m, where its rows are narrower than
the hidden size.
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
