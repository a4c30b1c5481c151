"""Qwen3 MoE, tensor parallel like Mixtral (Megatron-LM, arXiv:1909.08053, section 3)."""

from sharding.specs.mixtral import SPEC

__all__ = ["SPEC"]
