"""The script that drops flags finds the places where each is handed over."""

from jaxserve.config import ENGINE_PARAMS
from jaxserve.multihost.config import CLUSTER_PARAMS
from server.commands import cli
from server.serve_settings import SERVE_PARAMS
from tests.server.mutate_flags import all_mutants


def test_every_flag_of_serve_has_a_mutant() -> None:
    mutants = list(all_mutants())
    for each in mutants:
        compile(each.source, each.file, "exec")
    flags = {name: param.flag for name, param in (ENGINE_PARAMS | SERVE_PARAMS | CLUSTER_PARAMS).items()}
    names = {flags.get(each.flag, each.flag).removeprefix("--").replace("-", "_") for each in mutants}
    known = set(vars(cli.parser().parse_args(["serve"]))) - {"run", "settings"}
    assert known - names == {"config"}  # which the parser itself reads
