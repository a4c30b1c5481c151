"""One host of a group with a tiny model on devices of its own, as a process: `python -m ... '{"host": 1, ...}'`.

Host 0 drives the engine a step at a time with made-up traffic, some of which is aborted, prints what was answered, and
ends the group.
"""

import json
import logging
import os
import sys
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.multihost import startup as start
from jaxserve.multihost.config import ClusterConfig, TlsFiles
from jaxserve.multihost.process_watchdog import end_process
from jaxserve.request import Request
from tests.fixtures.texts import constrained
from tests.fixtures.traffic import Answers, traffic

CONFIG = EngineConfig(max_rows=4, block_size=4, slots=120, buckets=(4, 12), max_context=96, dtype="float32")
REQUESTS, CONSTRAINED = 40, 15
ABORTED = {"5": 9, "11": 20, "23": 31}  # after so many steps from its submission


def requests(count: int = REQUESTS, held: int = CONSTRAINED) -> list[tuple[int, Request]]:
    """So many requests, and so many more that are held to grammars, each with the step of its arrival."""
    plain = traffic(count, scored=True)
    return plain + [(step, request) for step, request, _ in constrained(held, plain[-1][0]).values()]


def config_of(told: dict) -> EngineConfig:
    names = ("tensor", "stages", "replicas", "speculate", "compilation_cache", "sharding")
    given = {name: told[name] for name in names if name in told}
    given["order"] = "fcfs"  # long prompts early take blocks from others
    if given.get("stages", 1) == 1:
        given["slots"] = 96  # too few for the rows of one stage too
    given["slots"] = told.get("slots", given.get("slots", CONFIG.slots))
    return EngineConfig(**{name: getattr(CONFIG, name) for name in EngineConfig.__dataclass_fields__} | given)


def run(engine: Engine, arrivals: list[tuple[int, Request]]) -> Answers:
    """Submits each request before the step of its number, aborts some, and steps until all is done."""
    answers, step = Answers(), 0
    aborts = {at + ABORTED[each.request_id]: each.request_id for at, each in arrivals if each.request_id in ABORTED}
    waiting = sorted(arrivals, key=lambda pair: pair[0])
    while waiting or engine.load().running or engine.load().waiting:
        while waiting and waiting[0][0] <= step:
            engine.submit(waiting.pop(0)[1], answers)
        if step in aborts:
            engine.abort(aborts[step])
        engine.step()
        step += 1
        assert step < 20_000
    while engine.step():
        pass
    return answers


def as_json(answers: Answers) -> dict:
    return {
        "tokens": answers.tokens,
        "logprobs": answers.logprobs,
        "prompt_logprobs": answers.prompt_logprobs,
        "reasons": {name: reason.value for name, reason in answers.reasons.items()},
    }


# Libraries print to standard output too: it is ours alone, and theirs goes where errors go.
OUT = sys.stdout
if __name__ == "__main__":
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def tell(line: dict) -> None:
    OUT.write(json.dumps(line) + "\n")  # in one piece, whatever other threads say
    OUT.flush()


def say(line: str) -> None:
    tell({"told": line})


def main(told: dict) -> int:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    secrets = None
    if "secrets" in told:
        files = [(Path(told["secrets"]) / name).read_bytes() for name in ("ca.pem", "host.pem", "host.key")]
        secrets = TlsFiles(authority=files[0], certificate=files[1], key=files[2])
    cluster = ClusterConfig(
        hosts=told["hosts"],
        host=told["host"],
        coordinator=told["coordinator"],
        links=told.get("links", "auto"),
        join_timeout=120.0,
        step_deadline=60.0,
        record_folder=Path(told["folder"]),
        record_seconds=told.get("record_seconds", 600.0),
        secrets=secrets,
    )
    if cluster.host:
        start.follow(told["model"], config_of(told), cluster, tell=say)
        return 0
    started, tokenizer, recorders = start.lead(told["model"], config_of(told), cluster, tell=say)
    engine = Engine(config_of(told), started, tokenizer)
    answers = run(engine, requests())
    load = engine.load()
    facts = {
        "preemptions": load.preemptions,
        "accepted": load.accepted_tokens,
        "cached": load.cached_tokens,
        "compiled": load.compiled_after_ready,
        "used": load.slots_used,
        "records": [str(recorder.write("asked for")) for recorder in recorders],
        "iterations": [each.iterations for each in engine.loads()],
        "weight_bytes": engine.report.weight_bytes,
    }
    engine.stop()
    tell({"answers": as_json(answers)} | facts)
    return 0


if __name__ == "__main__":
    end_process(main(json.loads(sys.argv[1])))  # as `jaxserve serve` ends
