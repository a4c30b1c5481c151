"""The command line as a person meets it: help, hints, mistakes."""

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from server.commands import cli, client, other_names

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([], "jaxserve generate --model DIR --input in.jsonl --output out.jsonl"),
        (["serve"], "jaxserve serve --model DIR --host 0.0.0.0"),
        (["generate"], "jaxserve generate --model DIR --input in.jsonl --output out.jsonl"),
        (["client"], 'jaxserve client "It was a" --max-tokens 50'),
        (["compile"], "jaxserve compile --model DIR --max-rows 32"),
        (["convert"], "jaxserve convert DIR OUT"),
        (["bench"], "offline"),
    ],
)
def test_help_shows_examples(command: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "jaxserve serve  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("srve", "unknown command srve (did you mean serve?); there are serve, generate"),
        ("chat", "unknown command chat (did you mean client?)"),
        ("xyzzy", "unknown command xyzzy; there are"),
        ("serve --max-row 3", "unknown argument --max-row (did you mean --max-rows?)"),
        ("serve --max-model-len=3", "unknown argument --max-model-len=3 (did you mean --max-context?)"),
        ("serve -tp 2", "unknown argument -tp (did you mean --tensor?)"),
        ("serve --num-shards 2", "unknown argument --num-shards (did you mean --tensor?)"),
        ("serve org/name", "unknown argument org/name (did you mean --model?)"),
        ("serve --xyzzy", "unknown argument --xyzzy\n"),
        ("client a --hostname b", "unknown argument --hostname\n"),
        ("generate --prompt a --num-shard 2", "unknown argument --num-shard (did you mean --tensor?)"),
    ],
)
def test_what_is_unknown_gets_a_hint(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("module", ["jaxserve", "rich.console", "server.commands.flags"])
def test_ctrl_c_during_imports_shows_no_traceback(module: str) -> None:
    """What the console script does, with a Ctrl-C as it begins to import a module."""
    code = (
        "import os, signal, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == sys.argv[1]: os.kill(os.getpid(), signal.SIGINT)\n"
        "from server.commands.entry import main\n"
        "sys.meta_path.insert(0, Press())\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code, module], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "jaxserve: interrupted\n")


def test_ctrl_c_while_ports_open_shows_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "from server.app import ServerApp\n"
        "start = ServerApp.start\n"
        "async def pressed(*args):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return await start(*args)\n"
        "ServerApp.start = pressed\n"
        "from server.commands.entry import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--http-port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "never awaited" not in done.stderr


def test_hints_lead_to_what_there_is() -> None:
    (commands,) = (action.choices for action in cli.parser()._actions if action.choices)
    assert isinstance(commands, dict)
    flags = {flag for action in commands["serve"]._actions for flag in action.option_strings}
    assert set(other_names.COMMANDS.values()) <= commands.keys()
    assert set(other_names.FLAGS.values()) <= flags
    assert not flags & other_names.FLAGS.keys()


def test_help_of_serve_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    out = capsys.readouterr().out
    titles = re.findall(r"^(\w+)(?: \(.*\))?:$", out, re.MULTILINE)
    assert titles == ["model", "engine", "devices", "server", "security", "hosts", "settings"]
    assert out.startswith("usage: jaxserve serve [--model MODEL] [FLAGS]\n")
    assert re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)[0] == "--model"


def test_help_and_version_need_no_jax() -> None:
    code = (
        "import sys; from server.commands import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally: assert not {'jax', 'matplotlib'} & set(sys.modules)"
    )
    for flag, shown in (("--help", "usage: jaxserve"), ("--version", "jaxserve 0.")):
        done = subprocess.run([sys.executable, "-c", code, flag], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(shown)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("serve --model /no/such/dir", "--model /no/such/dir is not a directory"),
        ("generate --prompt a --model /no/such/dir", "--model /no/such/dir is not a directory"),
        ("serve --max-rows 0", "max_rows is 0"),
        ("serve --buckets 32,16", "buckets are (32, 16)"),
        ("serve --in-flight 3", "in_flight is 3; more than stages + 1 (2)"),
        ("serve --port 70000", "--port is 70000; it must be a whole number from 0 to 65535"),
        ("serve --http-port 70000", "--http-port is 70000"),
        ("serve --metrics-port 70000", "--metrics-port is 70000"),
        ("serve --port 7000 --http-port 7000", "--port and --http-port are both 7000; give each a port of its own"),
        ("serve --http-port 7 --metrics-port 7", "--http-port and --metrics-port are both 7; give each a port"),
        ("serve --stall-seconds 0", "--stall-seconds is 0.0; it must be above 0"),
        ("serve --host not.a.host.invalid", "cannot listen on not.a.host.invalid:50051"),
        ("serve --host not..one", "cannot listen on not..one:50051"),
        (
            "size --trace t --model gpt3-13b --topology h100:1 --plot /proc/no/x.png",
            "cannot write --plot /proc/no/x.png",
        ),
        ("size --trace t --model gpt3-13b --topology h100:1 --plot x", "--plot x must end in .png, .svg or .pdf"),
        (
            "simulate --rate 1 --plot /proc/no/x.svg",
            "cannot write --plot /proc/no/x.svg",
        ),
        ("plan --model gpt3-13b --topology h100:1 --html /proc/no/x", "cannot write --html /proc/no/x"),
        ("serve --profile /proc/no", "cannot write to --profile /proc/no: No such file or directory"),
        ("generate --prompt a --profile /proc/no", "cannot write to --profile /proc/no: No such file or directory"),
        ("generate --input /no/such/file", "cannot open /no/such/file: No such file or directory"),
        ("generate --prompt a --output /no/such/file", "cannot open /no/such/file: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxserve: error: ")
    assert told in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "serve --buckets x",
        "generate",
        "generate --prompt a --input b",
        "generate --prompt a --top-p x",
        "compile --profile nobody-reads-it",
        "simulate --rate 1 --seed -1",
    ],
)
def test_argparse_refuses_what_it_can_see(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2


def test_a_port_that_is_none_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--http-port", "on"])
    assert "--http-port: 'on' is neither off nor a whole number" in capsys.readouterr().err


def test_a_client_whose_reader_has_gone_says_nothing_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")  # as `print` does

    monkeypatch.setattr(client, "_opened", answer)
    with pytest.raises(BrokenPipeError):  # which `main` makes 141 of
        client.run(cli.parser().parse_args(["client", "a"]))
