"""Gemma 3 (text), tensor parallel like Llama (Megatron-LM, arXiv:1909.08053, section 3)."""

from sharding.specs.llama import SPEC

__all__ = ["SPEC"]
