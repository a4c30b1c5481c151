"""`jaxserve serve` on a fake engine, as a process of its own: `python -m tests.server.serve_fake [--held] FLAGS`."""

import sys

from server import cli, serve
from tests.server.fake_engine import FakeEngine, byte_tokenizer

if __name__ == "__main__":
    flags = [flag for flag in sys.argv[1:] if flag != "--held"]
    engine = FakeEngine(tokenizer=byte_tokenizer(), held="--held" in sys.argv)
    serve.load_engine = lambda _: engine  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(cli.main(["serve", *flags]))
