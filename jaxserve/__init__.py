"""jaxserve: iteration-level serving of BLOOM and GPT-family language models in JAX.

The names below are loaded when they are first used, so that the rooms without jax (scheduling, requests) can be
imported without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.request import Request, SamplingParams

__all__ = ["Engine", "EngineConfig", "Request", "SamplingParams"]

_HOMES = {
    "Engine": "jaxserve.engine",
    "EngineConfig": "jaxserve.config",
    "Request": "jaxserve.request",
    "SamplingParams": "jaxserve.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
