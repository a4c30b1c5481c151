"""The text models of Gemma 3, tensor parallel like Llama (Megatron-LM, arXiv:1909.08053, section 3)."""

from sharding.specs.llama import SPEC

__all__ = ["SPEC"]
