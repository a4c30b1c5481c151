"""Generates the protocols' Python files: `python -m server.proto.generate`.

Generated code does not run on a protobuf or grpcio older than the tools that made it. Therefore pyproject.toml pins
grpcio-tools and takes the lower bounds of grpcio and protobuf from it. A test compares the committed files.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = (
    "server/proto/jaxserve/v1/inference.proto",
    "server/proto/vllm/grpc/engine/vllm_engine.proto",
    "server/proto/inference/open_inference_grpc.proto",
)
MESSAGES = (  # no generated service code
    "server/engine_process/messages.proto",
    "jaxserve/multihost/control.proto",
    "jaxserve/text/sentencepiece.proto",
)


def generate(out: Path = ROOT) -> None:
    """Writes the generated modules under `out`, at their paths in the repository.

    The include path is the root of the repository, so the modules import each other by their full names, such as
    `server.proto.jaxserve.v1`, and cannot collide with other packages.
    """
    from grpc_tools import protoc

    flags = [f"--python_out={out}", f"--pyi_out={out}"]
    for proto in (*PROTOS, *MESSAGES):
        service = [f"--grpc_python_out={out}"] if proto in PROTOS else []
        if protoc.main(["protoc", f"-I{ROOT}", *flags, *service, str(ROOT / proto)]) != 0:
            raise RuntimeError(f"protoc could not compile {proto}")


if __name__ == "__main__":
    generate()
