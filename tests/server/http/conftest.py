import functools
from collections.abc import Callable

import pytest

from jaxserve.text.chat_template import ChatTemplate
from tests.server.conftest import TEMPLATE

# What these test is the application's; the others also test jaxserve's own port, which is stricter than most.
_OF_THE_APPLICATION = {"test_chat", "test_tools", "test_score", "test_operations", "test_embeddings"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "http_server" in metafunc.fixturenames and metafunc.module.__name__.rpartition(".")[2] in _OF_THE_APPLICATION:
        foreign = [pytest.param(name, marks=pytest.mark.clients) for name in ("uvicorn", "hypercorn")]
        metafunc.parametrize("http_server", [None, *foreign], indirect=True)


@pytest.fixture
def http_server(request: pytest.FixtureRequest) -> str | None:
    """The ASGI server of the application; None for jaxserve's own ports, with gRPC."""
    return getattr(request, "param", None)


@pytest.fixture
def serve_http(serve: Callable[..., None], http_server: str | None) -> Callable[..., None]:
    """Runs a coroutine with a server that answers over HTTP, as `serve` does."""
    template = ChatTemplate(TEMPLATE, {})
    return functools.partial(serve, http_port=0, chat_template=template, http_server=http_server)
