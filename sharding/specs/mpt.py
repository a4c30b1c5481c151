"""MPT, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3)."""

from sharding.specs.bloom import SPEC

__all__ = ["SPEC"]
