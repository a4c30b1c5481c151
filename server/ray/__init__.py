"""jaxserve on Ray Serve (`pip install 'jaxserve[ray]'`): one replica an actor."""

from __future__ import annotations

from server.ray.deployment import RayConfig, deployment, group

__all__ = ["RayConfig", "deployment", "group"]
