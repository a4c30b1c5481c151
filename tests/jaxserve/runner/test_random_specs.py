"""Meshes and rules drawn from a seed: what a plan accepts gives the answers of one device."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import drawn_specs
from jaxserve.config import EngineConfig
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.predict import predict
from sharding import devices, spec, specs
from tests.fixtures.traffic import Answers, run, traffic
from tests.jaxserve.runner.test_meshes import CONFIG, config_of, make

REQUESTS = 6
SIZES = replace(CONFIG, slots=400, buckets=(16,), attention="xla", compilation_cache=None)


def drawn(seed: int, folder: Path, parts: tuple[str, ...]) -> tuple[str, EngineConfig]:
    """A family, and a mesh and rules for it that a plan accepts; the pool may be split by rows, slots or both."""
    rng = random.Random(seed)
    while True:
        family, _ = each = drawn_specs.draw(rng, exceptions=True, parts=parts)
        file = folder / f"{seed}.toml"
        file.write_text(each.text)
        try:
            config = replace(SIZES, sharding=str(file), scoring=bool(seed), slots=800 if parts else 400)
            config = replace(config, block_size=8 if "slots" in parts else 4)
            predict(
                Deployment(
                    name=family,
                    config=config_of(family, 2),
                    topology=devices.parse("v5p:2x2x2"),
                    engine=config,
                    spec=spec.read(file, specs.default(family)),
                )
            )
        except ValueError:
            continue
        return family, config


def answers(family: str, config: EngineConfig) -> Answers:
    return run(make(family, 2, config), traffic(REQUESTS, scored=config.scoring))


def marked(seed: int) -> Any:
    """The first seed runs among the long tests, four with the exhaustive ones and the others every week."""
    group = pytest.mark.long if not seed else pytest.mark.exhaustive if seed < 5 else pytest.mark.weekly
    return pytest.param(seed, marks=group)


@pytest.mark.parametrize("parts", [(), ("rows",), ("slots",), ("rows", "slots")])
@pytest.mark.parametrize("seed", [marked(seed) for seed in range(40)])
def test_what_a_plan_accepts_answers_as_one_device(seed: int, parts: tuple[str, ...], tmp_path: Path) -> None:
    family, config = drawn(seed, tmp_path, parts)
    expected, found = answers(family, replace(SIZES, scoring=config.scoring)), answers(family, config)
    assert found.tokens.keys() == expected.tokens.keys()
    different = [name for name, tokens in expected.tokens.items() if found.tokens[name] != tokens]
    assert len(different) <= 1  # a draw or a choice within a hair of the next
    for name in expected.tokens.keys() - set(different):
        np.testing.assert_allclose(found.logprobs[name], expected.logprobs[name], atol=1e-4)
        np.testing.assert_allclose(found.prompt_logprobs[name], expected.prompt_logprobs[name], atol=1e-4)
