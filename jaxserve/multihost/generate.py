"""Generates control_pb2.py: `python -m jaxserve.multihost.generate` (needs the dev extra)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = "jaxserve/multihost/control.proto"


def generate(out: Path = ROOT) -> None:
    """Write the generated modules under `out`, at their path in the repository."""
    from grpc_tools import protoc

    if protoc.main(["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", str(ROOT / PROTO)]) != 0:
        raise RuntimeError(f"protoc could not compile {PROTO}")


if __name__ == "__main__":
    generate()
