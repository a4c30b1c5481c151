"""The engines that `python -m benchmarks peers` compares; each job runs in its own process.

A job is a JSON file: `model` (a checkpoint in the engine's own format), `dtype`, `threads`, `vocab_size`, and one of
  * `cases` (decodes, context, prompt; see step.Case) and `steps`: the engine prints `milliseconds`, for each case a
    list, or null where it has no such step,
  * `load` (see peer_scripts/peer_traffic.py), and whether it is for the `capacity`: the engine prints the `tokens` of
    every request and the `times` at which they came, or
  * `sequences` of equal length and `prompt_length`: the engine scores them, the prompts as a whole and the rest token
    by token through its cache, and prints `scores`: for each sequence the `logprobs` of its tokens (null where the
    engine reports none) and the `likeliest` ones. Ours takes `prompts` and `steps` instead, and generates sequences.
An answer may hold the `settings` that the engine found best, which its next job of the kind receives. A first job
(`ask`: a model type) asks a peer whether it can serve the model; `cannot` in its answer is the reason why not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.environments import OURS, PEERS
from jaxserve import weights
from jaxserve.config import EngineConfig
from server.commands.bench import machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One engine with one model in one dtype.

    Attributes:
      shape: the checkpoint's name.
      model: the checkpoint in the engine's own format.
      run: runs a job; returns what the engine printed.
    """

    engine: str
    shape: str
    dtype: str
    model: Path
    vocab_size: int
    run: Callable[[dict[str, Any]], dict[str, Any]]

    def do(self, **fields: Any) -> dict[str, Any]:
        """Runs a job with these fields; raises PeerError where the engine fails."""
        job = {"model": str(self.model), "dtype": self.dtype, "vocab_size": self.vocab_size}
        return self.run({**job, "threads": machine.usable_cores(), **fields})


def ours(checkpoint: Path, dtype: str, config: EngineConfig, scratch: Path) -> Contender:
    """Our engine."""

    def run(job: dict[str, Any]) -> dict[str, Any]:
        path = _write(scratch, {**job, "config": dataclasses.asdict(config)})
        return json.loads(environments.run_command([sys.executable, "-m", "benchmarks.jobs", path], OURS))

    vocab_size = weights.read_config(checkpoint).vocab_size
    return Contender(engine=OURS, shape=checkpoint.name, dtype=dtype, model=checkpoint, vocab_size=vocab_size, run=run)


def peer(
    name: str,
    checkpoint: Path,
    dtypes: Sequence[str],
    quantize: str | None,
    env_dir: Path,
    scratch: Path,
    say: Callable[[str], None],
) -> tuple[list[Contender], list[str]]:
    """Makes a peer's environment and converts its checkpoints, in every dtype that it can serve.

    Args:
      quantize: how our weights are held; a peer that has no such format is left out.

    Returns:
      The contenders, and a line for each dtype that the peer cannot serve.

    Raises:
      PeerError: the environment cannot be made, or a checkpoint cannot be converted.
    """
    known = PEERS[name]
    python = environments.ensure(known, env_dir, say)
    model_config = weights.read_config(checkpoint)

    def run(job: dict[str, Any]) -> dict[str, Any]:
        path = _write(scratch, {**job, **known.job})
        return json.loads(environments.run_script(python, known.script, path, name=name))

    contenders, notes = [], []
    for dtype in dtypes:
        reason = run({"ask": model_config.family, "dtype": dtype}).get("cannot")
        if reason is not None:
            notes.append(f"{name} is not compared with {checkpoint.name} in {dtype}: {reason}")
            continue
        if quantize is not None and quantize not in known.quantized:
            notes.append(f"{name} is not compared with {checkpoint.name} in {quantize}: it has no such weights here")
            continue
        model, held = checkpoint, dtype if quantize is None else known.quantized[quantize]
        if known.converted is not None:
            ending = known.converted.format(dtype=held)
            model = env_dir / f"{checkpoint.name}-{_fingerprint(checkpoint)}{ending}"
            if not model.exists():
                say(f"converting the checkpoint for {name}: {model}")
                # The file is renamed when it is complete, so that an interrupted run leaves none.
                partial = model.with_suffix(".partial")
                environments.run_script(
                    python, environments.CONVERTER, name, str(checkpoint), str(partial), held, name=name
                )
                partial.rename(model)
        vocab_size = model_config.vocab_size
        contenders.append(
            Contender(engine=name, shape=checkpoint.name, dtype=dtype, model=model, vocab_size=vocab_size, run=run)
        )
    return contenders, notes


def _write(scratch: Path, job: dict[str, Any]) -> str:
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    return str(path)


def _fingerprint(checkpoint: Path) -> str:
    """Changes when a checkpoint's files do."""
    files = sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"])
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((checkpoint.resolve(), seen)).encode()).hexdigest()[:10]
