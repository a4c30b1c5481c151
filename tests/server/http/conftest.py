import functools
from collections.abc import Callable

import pytest

from jaxserve.text.chat_template import ChatTemplate
from tests.server.conftest import TEMPLATE

FOREIGN = {"uvicorn": pytest.mark.clients, "hypercorn": pytest.mark.clients, "ray": pytest.mark.scale}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "http_server" in metafunc.fixturenames:
        foreign = [pytest.param(name, marks=marks) for name, marks in FOREIGN.items()]
        metafunc.parametrize("http_server", [None, *foreign], indirect=True)


@pytest.fixture
def http_server(request: pytest.FixtureRequest) -> str | None:
    """The ASGI server of the application; None for jaxserve's own ports, with gRPC."""
    name = getattr(request, "param", None)
    if name == "ray":
        from tests.ray import served  # which has its own environment

        served.deployed()
    return name


@pytest.fixture
def serve_http(serve: Callable[..., None], http_server: str | None) -> Callable[..., None]:
    """Runs a coroutine with a server that answers over HTTP, as `serve` does: our own, and others."""
    template = ChatTemplate(TEMPLATE, {})
    return functools.partial(serve, http_port=0, chat_template=template, http_server=http_server)


@pytest.fixture
def serve_port(serve: Callable[..., None]) -> Callable[..., None]:
    """The same with our own server only, for tests of what its port does or of gRPC beside it."""
    return functools.partial(serve, http_port=0, chat_template=ChatTemplate(TEMPLATE, {}))
