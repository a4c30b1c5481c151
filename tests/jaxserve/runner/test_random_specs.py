"""Meshes and rules drawn from a seed: what a plan accepts gives the answers of one device."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.predict import predict
from sharding import devices, spec, specs
from tests.fixtures.traffic import Answers, run, traffic
from tests.jaxserve.runner.test_meshes import CONFIG, config_of, make

REQUESTS = 6
MESHES = (
    {"data": 2, "tensor": 4},
    {"x": 2, "y": 2, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"stage": 2, "expert": 2, "tensor": 2},
    {"context": 8},
)
SIZES = replace(CONFIG, slots=400, buckets=(16,), attention="xla", compilation_cache=None)


def drawn(seed: int, folder: Path) -> tuple[str, EngineConfig]:
    """A family, and a mesh and rules for it that a plan accepts."""
    rng = random.Random(seed)
    while True:
        family, mesh = rng.choice(models.families()), rng.choice(MESHES)
        default = specs.default(family)
        free = [axis for axis in mesh if axis != "stage"]

        def target(free: list[str] = free) -> str:
            over = rng.sample(free, rng.choice((0, 1, 1, min(2, len(free)))))
            return repr(over) if over else '"none"'

        heads = target()
        rules = {axis: target() for axis in default.rules} | {"heads": heads}
        sections: Mapping[str, Mapping[str, object]] = {
            "mesh": mesh,
            "axes": rules,
            "activations": {axis: target() for axis in ("tokens", "embed") if rng.random() < 0.3},
            "gather": {"weights": target()} if rng.random() < 0.3 else {},
            "pool": {"heads": target()} if rng.random() < 0.2 else {},
            "pad": {"heads": "true", "vocab": "true"},
        }
        file = folder / f"{seed}.toml"
        file.write_text(
            "".join(f"{title}.{key} = {value}\n" for title, each in sections.items() for key, value in each.items())
        )
        try:
            config = replace(SIZES, sharding=str(file), scoring=bool(seed))
            predict(
                Deployment(
                    name=family,
                    config=config_of(family, 2),
                    topology=devices.parse("v5p:2x2x2"),
                    engine=config,
                    spec=spec.read(file, default),
                )
            )
        except ValueError:
            continue
        return family, config


def answers(family: str, config: EngineConfig) -> Answers:
    return run(make(family, 2, config), traffic(REQUESTS, scored=config.scoring))


def marked(seed: int) -> Any:
    """The first seed runs among the long tests, nine with the exhaustive ones and the others every week."""
    group = pytest.mark.long if not seed else pytest.mark.exhaustive if seed < 10 else pytest.mark.weekly
    return pytest.param(seed, marks=group)


@pytest.mark.parametrize("seed", [marked(seed) for seed in range(40)])
def test_what_a_plan_accepts_answers_as_one_device(seed: int, tmp_path: Path) -> None:
    family, config = drawn(seed, tmp_path)
    expected, found = answers(family, replace(SIZES, scoring=config.scoring)), answers(family, config)
    assert found.tokens.keys() == expected.tokens.keys()
    different = [name for name, tokens in expected.tokens.items() if found.tokens[name] != tokens]
    assert len(different) <= 1  # a draw or a choice within a hair of the next
    for name in expected.tokens.keys() - set(different):
        np.testing.assert_allclose(found.logprobs[name], expected.logprobs[name], atol=1e-4)
        np.testing.assert_allclose(found.prompt_logprobs[name], expected.prompt_logprobs[name], atol=1e-4)
