"""`jaxserve serve` on one of several hosts, its stage's programs broken once a file is there.

`python -m tests.server.failing_host wedge|compile FILE serve ...`. What is broken is what XLA compiles and the device
runs: a kernel that never returns, or one that XLA does not know. The process with the devices is one of these as well.
"""

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

ENGINE = "engine"


def break_programs(how: str, file: Path) -> None:
    """Has every stage's layers end in a kernel that does what it should until the file is there."""
    import jax

    from jaxserve.runner import lowering
    from jaxserve.runner.programs import Forward

    forward = lowering.forward

    def kernel(hidden: Any) -> Any:
        if file.exists():
            threading.Event().wait()
        return hidden

    def broken(*args: Any) -> Forward:
        out = forward(*args)
        if how == "wedge":
            return out._replace(hidden=jax.pure_callback(kernel, out.hidden, out.hidden))
        if file.exists():
            return out._replace(hidden=jax.ffi.ffi_call("a_kernel_that_nobody_wrote", out.hidden)(out.hidden))
        return out

    lowering.forward = broken


def main() -> int:
    how, file, role, *rest = sys.argv[1:]
    if role == ENGINE:
        from server.engine_process import main as engine_process

        break_programs(how, Path(file))
        sys.argv = [sys.argv[0], *rest]
        return engine_process.main()
    from server import lifecycle as front
    from server.commands import cli, hosts
    from server.engine_process.supervisor import Supervisor

    command = (sys.executable, "-m", "tests.server.failing_host", how, file, ENGINE)
    front.ENGINE_COMMAND = command
    hosts.Supervisor = partial(Supervisor, command=command)  # pyright: ignore[reportAttributeAccessIssue]
    return cli.main([role, *rest])


if __name__ == "__main__":
    sys.exit(main())
