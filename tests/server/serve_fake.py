"""`jaxserve serve` on a fake engine, as a process of its own: `python -m tests.server.serve_fake [--held] FLAGS`, or
with its engine in another, which does as a file says: `python -m tests.server.serve_fake --orders FILE FLAGS`."""

import sys

from jaxserve.text.tokenizer import Tokenizer
from server import lifecycle as front
from server.commands import cli, serve
from tests.server.fake_engine import FakeEngine, byte_tokenizer

if __name__ == "__main__":
    flags = [flag for flag in sys.argv[1:] if flag != "--held"]
    if "--orders" in flags:
        at = flags.index("--orders")
        orders = flags[at + 1]
        del flags[at : at + 2]
        front.ENGINE_COMMAND = (sys.executable, "-m", "tests.server.fake_engine_process", orders)
        Tokenizer.from_directory = lambda _: byte_tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
        sys.exit(cli.main(["serve", *flags]))
    engine = FakeEngine(tokenizer=byte_tokenizer(), held="--held" in sys.argv)
    serve.start_engine = lambda *_: engine  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(cli.main(["serve", "--front", "thread", *flags]))
