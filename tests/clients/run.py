"""Runs other people's clients as they come: `python -m tests.clients.run [NAME ...]`.

Each `NAME_client.py` or `NAME_client.mjs` here is a script that names its packages in its first lines (PEP 723, or
`// npm: ...`). It runs in an environment of its own, `.venv-clients/NAME`, which is made on first use. Its arguments
are the URLs of two servers, the gRPC address of the first, and the Python that has jaxserve. The first server has the
demo model, the second answers a chat with its last message, so that a script says what the model says.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.free_ports import free_ports

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
SECONDS = 300
ECHO = "{# <tool_call> #}{% if tools %}{% endif %}{{ messages[-1].content }}"


def packages(script: Path) -> list[str]:
    """The packages that a script names."""
    text = script.read_text(encoding="utf-8")
    if script.suffix == ".mjs":
        return text.partition("\n")[0].removeprefix("// npm: ").split()
    block = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", text)
    assert block is not None, script
    return tomllib.loads(re.sub("(?m)^# ?", "", block[1]))["dependencies"]


def command_of(script: Path, wanted: list[str]) -> list[str | Path]:
    """The command that runs a script in its environment. Raises CalledProcessError if a package cannot be installed."""
    if script.suffix == ".mjs":
        folder = ENVIRONMENTS / name_of(script)
        stamp = folder / "installed"
        if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--silent", "--no-save", "--prefix", folder, *wanted], check=True)
            stamp.write_text("\n".join(wanted))
        shutil.copy(script, folder)  # node looks for packages beside the script
        return ["node", folder / script.name]
    return [environment(name_of(script), wanted), script]


def environment(name: str, wanted: list[str]) -> Path:
    """The Python of an environment with these packages. Raises CalledProcessError if one cannot be installed."""
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        venv.create(folder, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def name_of(script: Path) -> str:
    return script.stem.removesuffix("_client")


@contextlib.contextmanager
def server(*command: str) -> Iterator[tuple[str, str]]:
    """A server's URL and its gRPC address, once it is ready."""
    port, http_port = map(str, free_ports(2))
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", port, "--http-port", http_port], cwd=ROOT)
    try:
        url, until = f"http://127.0.0.1:{http_port}", time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        yield url, f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main(names: list[str]) -> int:
    scripts = {name_of(path): path for path in sorted(FOLDER.glob("*_client.*"))}
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(ECHO)
        template.flush()
        with (
            server("server.commands.cli", "serve") as (demo, grpc_address),
            server("tests.server.serve_fake", "--chat-template", template.name) as (echo, _),
            ThreadPoolExecutor(2) as installers,
        ):
            results = {}
            wanted_by = {name: packages(scripts[name]) for name in names or scripts}
            commands = {
                name: installers.submit(command_of, scripts[name], wanted) for name, wanted in wanted_by.items()
            }
            for name, wanted in wanted_by.items():
                try:
                    command = [*commands[name].result(), demo, echo, grpc_address, sys.executable]
                    results[name] = "works" if subprocess.run(command, timeout=SECONDS).returncode == 0 else "FAILS"
                except (subprocess.CalledProcessError, FileNotFoundError):  # the latter without npm
                    results[name] = "cannot be installed"
                print(f"{name} ({', '.join(wanted)}): {results[name]}", flush=True)
    return int(set(results.values()) != {"works"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
