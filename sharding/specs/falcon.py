"""Falcon, tensor parallel like BLOOM (Megatron-LM, arXiv:1909.08053, section 3).

KV heads are repeated if there are more devices than KV heads.
"""

from sharding.specs.bloom import SPEC

__all__ = ["SPEC"]
