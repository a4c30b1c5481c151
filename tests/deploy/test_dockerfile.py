"""The Dockerfile: its targets, who they run as, and what they copy.

Nothing is built: that takes Docker's daemon.
"""

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def stages() -> dict[str, list[tuple[str, str]]]:
    """(instruction, arguments) of each stage, those of the stages it is made from first."""
    lines = re.sub(r"\\\n\s*", "", TEXT).splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = [*found.get(base, []), ("FROM", base)]
        elif word and not word.startswith("#"):
            current.append((word, rest))
    return found


def last(stage: list[tuple[str, str]], instruction: str) -> str:
    return [rest for word, rest in stage if word == instruction][-1]


@pytest.mark.parametrize("target", ["cpu", "gpu", "tpu"])
def test_a_target_serves_and_is_nobody_in_particular(target: str) -> None:
    stage = stages()[target]
    user = last(stage, "USER")
    assert all(int(part) >= 1000 for part in user.split(":"))
    assert [word for word, _ in stage][-1] == "USER"
    assert json.loads(last(stage, "ENTRYPOINT")) == ["jaxserve"]
    assert json.loads(last(stage, "CMD")) == ["serve", "--host", "0.0.0.0"]
    assert last(stage, "EXPOSE").split() == ["50051", "8000", "9100"]
    assert f"--from=build-{target} /opt/jaxserve /opt/jaxserve" in last(stage, "COPY")
    assert not any(word == "ADD" for word, _ in stage)


def test_a_device_has_its_own_jax_of_a_supported_version() -> None:
    extras = {target: last(stages()[f"build-{target}"], "RUN") for target in ("cpu", "gpu", "tpu")}
    for target, extra in (("cpu", "jax=="), ("gpu", "jax[cuda12]=="), ("tpu", "jax[tpu]==")):
        assert f'"{extra}${{JAX}}" "flax==${{FLAX}}"' in extras[target]
        assert 'python -I -c "import jaxserve.engine, server.commands.cli"' in extras[target]
    (jax,) = re.findall(r"^ARG JAX=(\S+)$", TEXT, re.MULTILINE)
    (python,) = re.findall(r"^ARG PYTHON=(\S+)$", TEXT, re.MULTILINE)
    (supported,) = [each for each in PROJECT["project"]["dependencies"] if each.startswith("jax>=")]
    low, high = (tuple(map(int, part.split("."))) for part in re.findall(r"[\d.]+", supported))
    assert low <= tuple(map(int, jax.split("."))) < high
    # As tested on this Python, and compiled for GPUs: an older flax does not go with this jax, which pip does not know.
    (flax,) = re.findall(r"^ARG FLAX=(\S+)$", TEXT, re.MULTILINE)
    assert {f"jax=={jax}", f"flax=={flax}"} <= set((ROOT / "requirements-newest.txt").read_text().split())
    (triton,) = re.findall(r"^ARG TRITON=(\S+)$", TEXT, re.MULTILINE)
    assert f"triton=={triton}" in (ROOT / "requirements-newest.txt").read_text().split()
    assert '"triton==${TRITON}"' in extras["gpu"]
    assert f"Programming Language :: Python :: {python}" in PROJECT["project"]["classifiers"]


def test_copies_the_whole_wheel() -> None:
    copied = {word for rest in (rest for word, rest in stages()["build"] if word == "COPY") for word in rest.split()}
    sources = {each for each in copied if each not in (".", "./")}
    assert all((ROOT / each).exists() for each in sources)
    assert {each.split(".")[0] for each in PROJECT["tool"]["setuptools"]["packages"]} <= sources
    assert {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= sources
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert {each.removeprefix("!") for each in ignored if each.startswith("!")} == sources


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_follows_health(status: int, code: int) -> None:
    asked = []

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    *_, program = json.loads(last(stages()["runtime"], "HEALTHCHECK").partition("CMD ")[2])
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code_of_it = program.replace(":8000/", f":{server.server_port}/")
        done = subprocess.run([sys.executable, "-c", code_of_it], capture_output=True, timeout=30)
        server.shutdown()
    assert (done.returncode, asked) == (code, ["/health"])
