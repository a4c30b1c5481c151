"""Look-ups in the prefix caches of many replicas."""

from __future__ import annotations

import json

from benchmarks import routing
from benchmarks.__main__ import main


def test_each_kind_of_prompt_is_found_as_far_as_it_is_cached(monkeypatch):
    replicas, found = routing.Replicas(4, 400, 3, 16), []
    look_up = replicas.index.cached_tokens
    monkeypatch.setattr(replicas.index, "cached_tokens", lambda request: found.append(look_up(request)))
    kinds = [kind for kind, _ in replicas.times()]
    cached = [96, 192, 288, 384]  # whole blocks of each quarter, and never the last token
    assert found == [cached, cached, [0] * 4] * 3 + [cached] * 3
    assert kinds == [routing.CACHED, routing.HASHED, routing.NEW] * 3 + [routing.FORGOTTEN] * 3


def test_the_command_writes_every_kind(tmp_path, capsys):
    assert main(["routing", "--quick", "--out", str(tmp_path)]) == 0
    assert routing.FORGOTTEN in capsys.readouterr().out
    result = json.loads((tmp_path / "routing.json").read_text())
    assert set(result["milliseconds"]) == {routing.CACHED, routing.HASHED, routing.NEW, routing.FORGOTTEN}
