"""jaxserve: iteration-level serving of BLOOM and GPT-family language models in JAX.

The names below are imported on first use, so that modules without jax (scheduling, requests) load without it.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.planning.planner import plan
    from jaxserve.request import Request
    from jaxserve.sampling_params import SamplingParams

    __version__: str

__all__ = ["Engine", "EngineConfig", "Request", "SamplingParams", "plan"]

_HOMES = {
    "Engine": "jaxserve.engine",
    "EngineConfig": "jaxserve.config",
    "Request": "jaxserve.request",
    "SamplingParams": "jaxserve.sampling_params",
    "plan": "jaxserve.planning.planner",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return metadata.version("jaxserve")
        except metadata.PackageNotFoundError:  # a checkout on the path
            return "0+checkout"
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
