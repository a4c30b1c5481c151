"""Settings from flags, the environment and a file: which one counts, and what is refused."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.commands import cli, settings

Parse = Callable[..., Any]


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """`parse("--port 1", variables={...}, file="...")` gives the namespace of `jaxserve serve`."""

    def run(given: str = "", *, variables: dict[str, str] | None = None, file: str | None = None) -> Any:
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        argv = ["serve", *given.split()]
        if file is not None:
            (tmp_path / "serve.toml").write_text(file)
            argv += ["--config", str(tmp_path / "serve.toml")]
        return cli.parser().parse_args(argv)

    return run


def test_precedence_of_sources(parse: Parse) -> None:
    args = parse(
        "--port 1", variables={"JAXSERVE_PORT": "2", "JAXSERVE_MAX_ROWS": "2"}, file="port=3\nmax-rows=3\nslots=3"
    )
    assert (args.port, args.max_rows, args.slots, args.host) == (1, 2, 3, "127.0.0.1")
    sources = {each.name: each.source.rpartition("/")[2] for each in args.settings}
    assert [sources[name] for name in ("port", "max-rows", "slots", "host")] == [
        "flag",
        "JAXSERVE_MAX_ROWS",
        "serve.toml",
        "default",
    ]


def test_flags_in_the_file_and_in_the_environment(parse: Parse) -> None:
    file = (
        'host = "::1"\ndrain-seconds = 5\ndtype = "bfloat16"\nbuckets = [8, 64]\ntarget-tpot = "80ms"\n'
        'deterministic = true\nprefix-cache = "off"\nlayers-per-stage = "1,2"\nmodel = "somewhere"\n'
    )
    args = parse(file=file)
    assert (args.host, args.drain_seconds, args.dtype, args.buckets) == ("::1", 5.0, "bfloat16", (8, 64))
    assert (args.target_tpot, args.deterministic, args.prefix_cache) == (0.08, True, "off")
    assert (args.layers_per_stage, args.model) == ((1, 2), Path("somewhere"))
    variables = {
        f"JAXSERVE_{name.replace('-', '_').upper()}": ",".join(map(str, value))
        if isinstance(value, list)
        else str(value)
        for name, value in tomllib.loads(file).items()
    }
    again = parse(variables=variables)
    assert [each[:2] for each in again.settings] == [each[:2] for each in args.settings]


def test_names_are_a_list(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--served-model-name a b --port 1").served_model_name == ["a", "b"]
    assert parse(variables={"JAXSERVE_SERVED_MODEL_NAME": "a b"}).served_model_name == ["a", "b"]
    monkeypatch.delenv("JAXSERVE_SERVED_MODEL_NAME")
    args = parse(file='served-model-name = ["a", "b c"]')
    assert args.served_model_name == ["a", "b c"]
    assert 'served-model-name = ["a", "b c"]' in settings.as_toml(args.settings)


def test_a_switch_in_the_environment_undoes_the_files(parse: Parse) -> None:
    assert not parse(variables={"JAXSERVE_DETERMINISTIC": "false"}, file="deterministic = true").deterministic


def test_the_file_may_be_named_in_the_environment(parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("port = 7")
    assert parse(variables={"JAXSERVE_CONFIG": str(tmp_path / "other.toml")}).port == 7


@pytest.mark.parametrize(
    ("variables", "file", "told"),
    [
        ({"JAXSERVE_MAXROWS": "3"}, None, "JAXSERVE_MAXROWS is not a setting; did you mean JAXSERVE_MAX_ROWS?"),
        ({"JAXSERVE_PORT": "x"}, None, "JAXSERVE_PORT is 'x'; it must be a whole number"),
        ({"JAXSERVE_DETERMINISTIC": "maybe"}, None, "JAXSERVE_DETERMINISTIC is 'maybe'; it must be true or false"),
        ({}, "max_rows = 3", "serve.toml: max_rows is not a setting; did you mean max-rows?"),
        ({}, "[engine]\nmax-rows = 3", "engine is not a setting"),
        ({}, "port = true", "port is True; it must be a whole number"),
        ({}, "port = 1.5", "port is 1.5; it must be a whole number"),
        ({}, "deterministic = 1", "deterministic is 1; it must be true or false"),
        ({}, 'dtype = "int4"', "dtype is 'int4'; it must be one of auto, float32, bfloat16"),
        ({}, 'target-tpot = "3"', "target-tpot: '3' is not a time above 0"),
        ({}, "host = [1]", "host is [1]"),
        ({}, "served-model-name = [1]", "served-model-name is [1]; it must be a list of strings"),
        ({}, "served-model-name = []", "served-model-name is []; it must be a list of strings"),
        ({}, "port =", "not TOML"),
    ],
)
def test_wrong_settings_are_named(
    parse: Parse, variables: dict[str, str], file: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(variables=variables, file=file)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_missing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--config", "/no/such/file"])
    assert "/no/such/file: the settings cannot be read: No such file or directory" in capsys.readouterr().err


def test_printed_config_can_be_read_again(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "serve",
        "--buckets",
        "8,64",
        "--target-tpot",
        "80ms",
        "--host",
        'a"b\\c',
        "--deterministic",
        "--http-port",
        "off",
    ]
    assert cli.main([*given, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "buckets = [8, 64]  # flag\n" in printed
    assert "port = 50051  # default\n" in printed
    assert "# slots is not set  # default\n" in printed
    again = parse(file=printed)
    assert [each[:2] for each in again.settings] == [each[:2] for each in cli.parser().parse_args(given).settings]


def test_other_commands_read_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_MAX_ROWS", "3")
    args = cli.parser().parse_args(["generate", "--prompt", "a"])
    assert args.max_rows == 16
