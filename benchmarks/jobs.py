"""Runs the jobs of `python -m benchmarks peers` with our engine, in a process of its own.

python -m benchmarks.jobs JOB.json      (see engines.py for what a job is and what is printed)
"""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_scripts.peer_traffic import Traffic
from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.runner.stage import Progress
from jaxserve.sampling_params import SamplingParams
from server.commands.bench import machine
from server.commands.bench.step import LARGEST_BLOCK, Case, measure


def run_job(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Runs one job, whose `config` has the fields of an EngineConfig; returns what is printed."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in job["config"].items()}
    config = EngineConfig(**{**fields, "dtype": job["dtype"], "scoring": "prompts" in job, "replicas": 1})
    model = Path(job["model"])
    if "load" in job:
        if job["capacity"]:
            config = dataclasses.replace(config, target_tpot=None)  # an objective costs throughput
        return serve(model, job["load"], config, progress)
    config = dataclasses.replace(config, token_budget=None, target_tpot=None)  # these limit the scheduler alone
    if "prompts" in job:
        return {"completions": complete(model, job["prompts"], job["steps"], config, progress)}
    timed, memory = measure(
        model, config.dtype, [Case(**case) for case in job["cases"]], job["steps"], config, progress
    )
    return {
        "milliseconds": [steps.milliseconds for steps in timed],
        **{name: getattr(memory, name) for name in ("peak_rss", "weights", "pool")},
    }


def complete(
    model: Path, prompts: Sequence[Sequence[int]], steps: int, config: EngineConfig, progress: Progress
) -> list[dict[str, Any]]:
    """Greedy completions of `steps` tokens, which the peers' outputs are checked against.

    Returns:
      For each prompt: `tokens` (prompt and generated), their `logprobs` (all but the first), and `gaps`, the difference
      between the largest two logprobs at each generated position.
    """
    rows, longest = len(prompts), max(map(len, prompts))
    config = dataclasses.replace(
        config, max_rows=rows, buckets=(rows, max(rows + 1, longest)), slots=rows * LARGEST_BLOCK
    )
    engine = Engine.from_checkpoint(model, config, progress=progress)
    answers = {str(index): {"tokens": list(prompt), "logprobs": [], "gaps": []} for index, prompt in enumerate(prompts)}
    alive = set(answers)

    def sink(events: Sequence[TokenEvent]) -> None:
        for event in events:
            answer = answers[event.request_id]
            answer["logprobs"] += [logprob for logprob, _ in event.prompt_logprobs]
            answer["tokens"] += event.token_ids
            answer["logprobs"] += event.logprobs
            answer["gaps"] += [top.logprobs[0] - top.logprobs[1] for top in event.top_logprobs]
            if event.finish_reason is not None:
                alive.discard(event.request_id)

    sampling = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(index), prompt=tuple(prompt), sampling=sampling), sink)
    while alive:
        assert engine.step()
    return list(answers.values())


def serve(model: Path, load: dict[str, Any], config: EngineConfig, progress: Progress) -> dict[str, Any]:
    """Serves a load through `Engine.submit`, each request at its time.

    The prefix cache is off: no two prompts share a prefix. The pool holds `rows` of the longest request by default.
    """
    longest = max(len(prompt) + output for prompt, output in zip(load["prompts"], load["outputs"], strict=True))
    blocks = -(-longest // LARGEST_BLOCK) * load["rows"]
    config = dataclasses.replace(
        config,
        max_rows=load["rows"],
        prefix_cache=False,
        slots=config.slots or blocks * LARGEST_BLOCK,
        max_queued_requests=max(config.max_queued_requests, len(load["prompts"])),
        max_queued_tokens=max(config.max_queued_tokens, sum(map(len, load["prompts"]))),
    )
    engine = Engine.from_checkpoint(model, config, progress=progress)
    with engine:
        serve_traffic(engine, Traffic.rehearsal(load), "rehearsal")
        traffic = Traffic(load)
        serve_traffic(engine, traffic, "load")
    return {**traffic.result(), "peak_rss": machine.peak_rss()}


def serve_traffic(engine: Engine, traffic: Traffic, name: str) -> None:
    """Serves one run of a load to its end.

    Raises:
      RuntimeError: a request failed; the message is the engine's.
    """
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def sink(events: Sequence[TokenEvent]) -> None:
        for event in events:
            for token in event.token_ids:
                traffic.add(int(event.request_id.removeprefix(name)), token)
            if event.finish_reason is not None:
                failed = event.finish_reason in (FinishReason.ABORTED, FinishReason.ERROR)
                ended.put(event.error or event.finish_reason.value if failed else None)

    requests = [
        Request(
            request_id=f"{name}{number}",
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
        )
        for number, (prompt, output) in enumerate(zip(traffic.prompts, traffic.outputs, strict=True))
    ]
    traffic.begin()
    while traffic.coming:
        for number in traffic.take(1):
            engine.submit(requests[number], sink)
        traffic.wait()
    for error in (ended.get() for _ in requests):
        if error is not None:
            raise RuntimeError(f"a request failed: {error}")


if __name__ == "__main__":
    print(json.dumps(run_job(json.loads(Path(sys.argv[1]).read_text()), startup.silent)))
