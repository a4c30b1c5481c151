"""The socket of jax's coordinator, which is in a folder of its own."""

import socket
import tempfile

from jaxserve.multihost.coordinator import Coordinator
from jaxserve.multihost.handshake import Reception


def test_a_deep_temporary_folder_leaves_a_path_for_it(tmp_path, monkeypatch):
    """A socket's path has 107 bytes on Linux; TMPDIR can be longer, as Slurm's are for each job."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Coordinator(Reception(None)).listening() as address, socket.socket(socket.AF_UNIX) as end:
        end.bind(address.removeprefix("unix:"))
