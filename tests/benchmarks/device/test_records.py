"""Cases in a process of their own: each is recorded as it ends, and none stops the others."""

from __future__ import annotations

import json
import sys
import time

import pytest

from benchmarks.device import records

WORKER = """
import json, os, sys, time
from benchmarks.device import records
def fails(): raise ValueError("no such thing")
def crashes(): os._exit(9)
def hangs(): time.sleep(600)
def one(name): return (name, lambda: {"ms": 1.5, "run": os.getpid()})
def noisy(): print("a warning"); return {"ms": 2.0}
cases = {"plain": [one("a"), ("b", noisy), one("c")],
         "bad": [one("a"), ("b", fails), ("c", crashes), ("d", hangs), one("e")],
         "dead": None}[sys.argv[1]]
records.run_cases(cases, set(json.loads(sys.argv[2])))
"""


def collect(kind: str, path, *, case_seconds: float = 60.0, seconds: float = 60.0) -> tuple[bool, list[str]]:
    said: list[str] = []
    worker = [sys.executable, "-c", WORKER, kind]
    until = time.monotonic() + seconds
    return records.collect("job", worker, path, case_seconds=case_seconds, until=until, say=said.append), said


def test_every_case_is_a_line_and_what_is_done_is_not_run_again(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    came_to_the_end, said = collect("plain", path)
    assert came_to_the_end
    assert [record["name"] for record in records.read(path)] == ["a", "b", "c"]
    assert said[1] == "b: ms 2"
    assert collect("plain", path) == (True, [])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[2][:20]]))  # cut short
    came_to_the_end, said = collect("plain", path)
    assert (came_to_the_end, len(said)) == (True, 2)


@pytest.mark.bench
def test_a_case_that_fails_hangs_or_crashes_costs_only_itself(tmp_path):
    path = tmp_path / "records.jsonl"
    came_to_the_end, _ = collect("bad", path, case_seconds=3.0)
    assert came_to_the_end
    found = {record["name"]: record.get("failed") for record in records.read(path)}
    assert found == {
        "a": None,
        "b": "ValueError: no such thing",
        "c": "its process ended with code 9",
        "d": "nothing for 3 s",
        "e": None,
    }
    records.drop_failures(path)
    assert [record["name"] for record in records.read(path)] == ["a", "e"]


def test_a_job_that_cannot_begin_is_told(tmp_path):
    came_to_the_end, said = collect("dead", tmp_path / "records.jsonl")
    assert not came_to_the_end
    assert said == ["job: its process ended with code 1 before a case began"]


def test_time_is_up_before_a_case_ends(tmp_path):
    path = tmp_path / "records.jsonl"
    assert collect("plain", path, seconds=0.0) == (False, [])
    assert records.read(path) == []


def test_lines_are_json_with_the_job_and_the_time(tmp_path):
    path = tmp_path / "records.jsonl"
    collect("plain", path)
    (first, *_) = map(json.loads, path.read_text().splitlines())
    assert first["job"] == "job"
    assert first["at"].startswith("20")
