"""Writes the Python files of the protocol anew: `python server/proto/generate.py` (grpcio-tools of the dev extra).

Generated code refuses to run on a protobuf or grpcio older than the tools that made it, so grpcio-tools is pinned in
pyproject.toml, the lower bounds of grpcio and protobuf there follow it, and a test compares the committed files.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = "server/proto/jaxserve/v1/inference.proto"


def generate(out: Path = ROOT) -> None:
    """Writes the generated modules under `out`, at the path they have in the repository.

    The include path is the repository's root, so that they import as `server.proto.jaxserve.v1` and never take the
    name of the engine's own package.
    """
    from grpc_tools import protoc

    flags = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", f"-I{ROOT}", *flags, str(ROOT / PROTO)]) != 0:
        raise RuntimeError(f"protoc could not compile {PROTO}")


if __name__ == "__main__":
    generate()
