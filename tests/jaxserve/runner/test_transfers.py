"""What passes between host and devices in an iteration."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import make_engine
from tests.fixtures.traffic import Answers


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_decodes_send_one_array_and_return_one(params, monkeypatch, top_p):
    """The packed plan; the tokens with their logprobs."""
    engine = make_engine(params)
    (stage,) = engine._loops[0].pipeline.stages
    sent: list[tuple[int, ...]] = []
    returned: list[tuple[int, ...]] = []

    def noted(program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            sent.extend(leaf.shape for leaf in jax.tree.leaves(given) if isinstance(leaf, np.ndarray))
            return program(*given)

        return run

    for kind in ("_forward", "_head", "_choose"):
        programs = {key: noted(program) for key, program in getattr(stage, kind).items()}
        monkeypatch.setattr(stage, kind, programs)
    for kind in ("admit", "copy", "draft"):
        monkeypatch.setattr(stage, kind, noted(getattr(stage, kind)))
    sample = stage.sample

    def sampled(*given: Any) -> Any:
        launched = sample(*given)
        returned.extend(leaf.shape for leaf in jax.tree.leaves(launched))
        return launched

    monkeypatch.setattr(stage, "sample", sampled)
    sampling = SamplingParams(max_tokens=9, temperature=0.7, top_p=top_p, ignore_eos=True)
    for name in "ab":
        engine.submit(Request(request_id=name, prompt=(5, 6, 7), sampling=sampling), Answers())
    for _ in range(3):
        engine.step()
    assert len(sent) > 3  # admissions are arrays of their own
    sent.clear()
    returned.clear()
    engine.step()
    assert len(sent) == 1
    assert [shape[0] for shape in returned] == [2]
