"""What the programs of this folder share. They run in the peers' own environments, which have no jaxserve.

Every one of them runs a job, a JSON file (see contenders.py), and prints its result as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 3  # steps that are not counted


def read_job(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def peak_rss() -> int | None:
    """Most bytes this process ever held resident (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def read_config(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's config.json; ends the program when it is of a family that is not converted here."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ("bloom", "gpt2"):
        raise SystemExit(f"{checkpoint} is a {config['model_type']} model; only bloom and gpt2 are converted")
    return config


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint by its name, in float32."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name).astype(np.float32)


def part_qkv(value: np.ndarray, heads: int) -> np.ndarray:
    """BLOOM fuses q, k, v head by head [N, 3, D, ...]; others want all q, then all k, then all v."""
    rest = value.shape[1:]
    return value.reshape(heads, 3, -1, *rest).swapaxes(0, 1).reshape(value.shape)
