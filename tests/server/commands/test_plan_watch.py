"""`jaxserve plan --watch`: what is printed after each save of the rules."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from jaxserve import models
from jaxserve.planning import deployment, planner, predict
from jaxserve.weights import naming
from server.commands import cli, plan_watch

ASKED = ["plan", "--model", "bloom-560m", "--topology", "h200:8", "--tensor", "4", "--buckets", "8", "--max-rows", "8"]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text('[axes]\nvocab = "none"\n')
    return path


@pytest.fixture
def edits(monkeypatch):
    """Things to do while the command pauses, one a pause; then Ctrl-C comes."""
    wanted = []

    def pause():
        if not wanted:
            raise KeyboardInterrupt
        wanted.pop(0)()

    monkeypatch.setattr(plan_watch, "pause", pause)
    return wanted


def save(path: Path, text: str) -> None:
    """What an editor does: a new file in place of the old."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_save_prints_what_it_changes(capsys, rules, edits, tmp_path):
    page, pages = tmp_path / "page.html", []
    edits += [
        lambda: pages.append(page.read_text()),
        lambda: save(rules, '[axes]\nvocab = "tensor"\n'),
        lambda: pages.append(page.read_text()),
    ]
    assert cli.main([*ASKED, "--sharding", str(rules), "--watch", "--html", str(page)]) == 0
    told = capsys.readouterr()
    whole, changed = told.out.split("now against before, differences only")
    assert "layers.*.up.kernel" in whole
    rows = [re.split(r"  +", line.strip()) for line in changed.strip().splitlines()]
    assert ["[axes] vocab", "none", "tensor"] in rows
    assert not any("layers" in row[0] for row in rows)
    assert told.err.count("waiting for the next save of") == 2
    assert len(set(pages)) == 2


def test_a_save_plans_once_and_builds_nothing_again(capsys, rules, edits, monkeypatch):
    """What depends on the rules is planned once a save; the model and its parameters are those of the first plan."""
    counted = Counter()

    def count(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: counted.update([name]) or original(*args, **kwargs))

    count(models, "build")
    count(naming, "parameters")
    count(planner, "predict")
    for known in (deployment.model_of, predict.count_parameters):
        known.cache_clear()
    seen = []
    edits += [
        lambda: seen.append(dict(counted)),
        lambda: save(rules, '[axes]\nvocab = "tensor"\n'),
        lambda: seen.append(dict(counted)),
        lambda: save(rules, '[axes]\nheads = "none"\n'),
    ]
    assert cli.main([*ASKED, "--sharding", str(rules), "--watch"]) == 0
    seen.append(dict(counted))
    assert "ms of attention" in capsys.readouterr().out
    first, *saves = seen
    assert first == {"predict": 1, "build": 1, "parameters": 4}
    # The parameters are named once for what a rule may name, once for what divides, and once for where they lie.
    assert saves == [{"predict": plans, "build": 1, "parameters": 1 + 3 * plans} for plans in (2, 3)]


def test_mistakes_end_nothing(capsys, rules, edits):
    edits += [
        lambda: save(rules, "[axes\n"),
        lambda: save(rules, '[axes]\nvocb = "none"\n'),
        lambda: save(rules, '[axes]\nheads = "none"\nvocab = "none"\n'),
        rules.unlink,
        lambda: None,
        lambda: save(rules, '[axes]\nvocab = "none"\n'),
    ]
    assert cli.main([*ASKED, "--sharding", str(rules), "--watch"]) == 0
    told = capsys.readouterr()
    errors = [line for line in told.err.splitlines() if "error" in line]
    assert len(errors) == 2
    assert "rules.toml is not TOML" in errors[0]
    assert "did you mean 'vocab'?" in errors[1]
    rows = [re.split(r"  +", line.strip())[:3] for line in told.out.splitlines()]
    assert rows.index(["[axes] heads", "tensor", "none"]) < rows.index(["[axes] heads", "none", "tensor"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --sharding FILE"),
        (["--sharding", "default"], "give --sharding FILE"),
        (["--sharding", "nowhere.toml"], "--sharding nowhere.toml is not a file"),
        (["--sharding", "rules.toml", "--against", "default"], "leave out --against"),
        (["--sharding", "rules.toml", "--search"], "leave out --search"),
        (["--sharding", "rules.toml", "--json"], "leave out --json"),
        (["--sharding", "rules.toml", "--topology", "h20:8"], "did you mean h200?"),
    ],
)
def test_mistakes_in_flags(capsys, rules, edits, monkeypatch, flags, message):
    monkeypatch.chdir(rules.parent)
    assert cli.main([*ASKED, "--watch", *flags]) == 2
    assert message in capsys.readouterr().err
