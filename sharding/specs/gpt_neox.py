"""GPT-NeoX, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3).

If attention and feed-forward are parallel, their sums could share one all-reduce per layer.
"""

from sharding.specs.bloom import SPEC

__all__ = ["SPEC"]
