"""jaxserve on Ray Serve (`pip install 'jaxserve[ray]'`): one replica a deployment's actor, placed and scaled by Ray."""

from __future__ import annotations

from server.ray.deployment import RayConfig, deployment, group

__all__ = ["RayConfig", "deployment", "group"]
