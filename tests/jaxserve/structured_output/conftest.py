"""What tests of grammars share: a compiler for the demo model, and answers to compare with."""

import pytest

from jaxserve.structured_output.compiler import GrammarCompiler
from tests.fixtures.tiny import make_engine, opinionated
from tests.fixtures.traffic import Answers, each_alone, traffic
from tests.jaxserve.structured_output.demo_grammars import new_compiler


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return new_compiler()


@pytest.fixture(scope="session")
def alone() -> Answers:
    """Requests without a grammar, each in a run of its own."""
    return each_alone(make_engine(opinionated(0), prefix_cache=False), (request for _, request in traffic(80)))
