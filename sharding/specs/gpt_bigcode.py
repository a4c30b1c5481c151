"""GPT-BigCode, tensor parallel like GPT-2 (Megatron-LM, arXiv:1909.08053, section 3).

The single KV head is repeated on every device.
"""

from sharding.specs.gpt2 import SPEC

__all__ = ["SPEC"]
