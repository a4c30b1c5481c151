"""Runs one job of `python -m benchmarks peers` with llama.cpp.

The script stands alone: its environment has no jaxserve.

    python run_llama_cpp.py JOB.json      (see engines.py for what a job is and what is printed)

Only the library's low-level interface has batches of several sequences. A load is served as llama.cpp's own server
does it (peer_traffic.serve_by_iterations). The fastest settings depend on case and dtype: the first job tries them, and
later jobs receive the result.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import numpy as np
from peer_common import WARM_UP, peak_rss, read_job
from peer_traffic import Token, Traffic, serve_by_iterations

LARGEST_BATCH, LARGEST_PART = 2048, 512  # tokens of a call, and of a computation: the library's defaults
TRIAL_STEPS = 3
TRIAL_LOAD = {"context": 100, "prompt": 120}  # the step by which a load's settings are chosen, beside its decodes


class Settings(NamedTuple):
    """Settings that the library leaves to its user.

    Attributes:
      unified: one buffer for all sequences; otherwise a batch of decodes and a prompt is cut into two.
      flash: the fused attention.
    """

    unified: bool
    flash: bool


def main(path: str) -> None:
    """Runs a job and prints its answer."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    job = read_job(path)
    if "ask" in job:
        print(json.dumps({"version": f"llama-cpp-python {llama_cpp.__version__}"}))
        return
    quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 999 if llama_cpp.llama_supports_gpu_offload() else 0
    model = llama_cpp.llama_model_load_from_file(job["model"].encode(), params)
    if not model:
        sys.exit(f"llama.cpp cannot load {job['model']}")
    result: dict[str, Any] = {"version": f"llama-cpp-python {llama_cpp.__version__}"}
    if "sequences" in job:
        result["scores"] = check(llama_cpp, model, job)
    elif "load" in job:
        trial = TRIAL_LOAD | {"decodes": job["load"]["rows"] - 1}
        settings = Settings(*(job.get("settings") or best_settings(llama_cpp, model, trial, job)))
        serve(llama_cpp, model, job, settings, Traffic.rehearsal(job["load"]))
        traffic = Traffic(job["load"])
        serve(llama_cpp, model, job, settings, traffic)
        result |= {"settings": settings, **traffic.result()}
    else:
        chosen = job.get("settings") or [best_settings(llama_cpp, model, case, job) for case in job["cases"]]
        result["settings"] = chosen
        result["milliseconds"] = [
            time_case(llama_cpp, model, case, job, Settings(*settings), job["steps"])
            for case, settings in zip(job["cases"], chosen, strict=True)
        ]
    result["peak_rss"] = peak_rss()
    print(json.dumps(result))


class Session:
    """A context of the library: the cache of some sequences, and batches over it."""

    def __init__(self, library, model, job: dict, settings: Settings, *, sequences: int, length: int) -> None:
        self.llama = library
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        params = library.llama_context_default_params()
        params.n_ctx = sequences * (-(-length // 256) * 256)
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = LARGEST_BATCH, LARGEST_PART
        params.n_threads = params.n_threads_batch = job["threads"]
        params.kv_unified = settings.unified
        params.flash_attn_type = int(settings.flash)
        if job["dtype"] == "float32":
            params.type_k = params.type_v = 0  # GGML_TYPE_F32; the default is half precision
        self.context = library.llama_init_from_model(model, params)
        if not self.context:
            sys.exit("llama.cpp cannot make a context")
        self.batch = library.llama_batch_init(LARGEST_BATCH, 0, 1)

    def decode(self, tokens: list[Token]) -> np.ndarray:
        """Runs one batch; returns float32[wanted, V] logits, valid until the next."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token.token
            batch.pos[index] = token.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = token.sequence
            batch.logits[index] = token.wanted
        code = self.llama.llama_decode(self.context, batch)
        if code != 0:
            sys.exit(f"llama_decode failed with code {code}")
        wanted = sum(token.wanted for token in tokens)
        if not wanted:
            return np.empty((0, self.vocabulary), np.float32)
        logits = self.llama.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, shape=(wanted, self.vocabulary))

    def forget(self, sequence: int) -> None:
        """Empties a sequence."""
        self.llama.llama_memory_seq_rm(self.llama.llama_get_memory(self.context), sequence, -1, -1)

    def close(self) -> None:
        self.llama.llama_batch_free(self.batch)
        self.llama.llama_free(self.context)


def prompt(tokens: list[int], sequence: int) -> list[Token]:
    """The batch of a whole prompt."""
    return [Token(token, at, sequence, at == len(tokens) - 1) for at, token in enumerate(tokens)]


def best_settings(library, model, case: dict, job: dict) -> Settings:
    """The fastest settings for a case, by a few steps of each."""
    choices = [Settings(*values) for values in itertools.product((False, True), repeat=2)]
    return min(choices, key=lambda choice: statistics.median(time_case(library, model, case, job, choice, TRIAL_STEPS)))


def time_case(library, model, case: dict, job: dict, settings: Settings, steps: int) -> list[float]:
    """Milliseconds of each step: the decodes and the prompt are one batch."""
    rng = np.random.default_rng(0)
    decodes, context = case["decodes"], case["context"]
    length = max(context + WARM_UP + steps + 1, case["prompt"])
    sequences = decodes + (case["prompt"] > 0)
    session = Session(library, model, job, settings, sequences=sequences, length=length)
    last = []
    for sequence in range(decodes):
        tokens = prompt(rng.integers(session.vocabulary, size=context).tolist(), sequence)
        logits = [session.decode(tokens[at : at + LARGEST_BATCH]) for at in range(0, len(tokens), LARGEST_BATCH)]
        last.append(int(logits[-1].argmax()))
    new = prompt(rng.integers(session.vocabulary, size=case["prompt"]).tolist(), decodes)
    times = []
    for step in range(WARM_UP + steps):
        batch = [Token(token, context + step, sequence, True) for sequence, token in enumerate(last)] + new
        if new:
            session.forget(decodes)
        started = time.perf_counter()
        last = session.decode(batch).argmax(-1).tolist()[:decodes]
        times.append(1000 * (time.perf_counter() - started))
    session.close()
    return times[WARM_UP:]


def serve(library, model, job: dict, settings: Settings, traffic: Traffic) -> None:
    """Serves a load."""
    longest = max(len(prompt) + output for prompt, output in zip(traffic.prompts, traffic.outputs, strict=True))
    session = Session(library, model, job, settings, sequences=traffic.rows, length=longest)
    serve_by_iterations(traffic, LARGEST_BATCH, lambda batch: session.decode(batch).argmax(-1).tolist(), session.forget)
    session.close()


def check(library, model, job: dict) -> list[dict]:
    """Scores sequences as a batch: their prompts, then all of them token by token."""
    sequences, begin = job["sequences"], job["prompt_length"]
    length = len(sequences[0])
    session = Session(library, model, job, Settings(False, True), sequences=len(sequences), length=length)
    scores: list[dict] = [{"logprobs": [], "likeliest": []} for _ in sequences]

    def take(score: dict, logits: np.ndarray, following: int) -> None:
        wide = logits.astype(np.float64)
        score["logprobs"].append(float(wide[following] - np.logaddexp.reduce(wide)))
        score["likeliest"].append(int(wide.argmax()))

    for number, tokens in enumerate(sequences):
        logits = session.decode([Token(token, at, number, True) for at, token in enumerate(tokens[:begin])])
        for at, row in enumerate(logits):
            take(scores[number], row, tokens[at + 1])
    for at in range(begin, length - 1):
        logits = session.decode([Token(tokens[at], at, number, True) for number, tokens in enumerate(sequences)])
        for number, tokens in enumerate(sequences):
            take(scores[number], logits[number], tokens[at + 1])
    session.close()
    return scores


if __name__ == "__main__":
    main(sys.argv[1])
