"""`jaxserve serve` on one of several hosts, with a fault that begins once a file is there.

`python -m tests.server.failing_host FAULT FILE serve ...`. The process with the devices runs this module as well.

* `wedge`: a kernel never returns.
* `device`: a kernel fails while the device runs it.
* `raise`: the host's own code raises when it launches an iteration.
* `compile`: XLA does not know a kernel.
"""

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

ENGINE = "engine"


def break_programs(fault: str, file: Path) -> None:
    """Replaces what runs or compiles a stage's layers by something that fails once the file is there."""
    import jax

    from jaxserve.runner import lowering
    from jaxserve.runner.programs import Forward
    from jaxserve.runner.stage import StageRunner

    compiled, launch = lowering.forward, StageRunner.forward

    def kernel(hidden: Any) -> Any:
        if file.exists():
            if fault == "device":
                raise RuntimeError("the kernel divides by zero")
            threading.Event().wait()
        return hidden

    def broken(*args: Any, **kwargs: Any) -> Forward:
        out = compiled(*args, **kwargs)
        if fault == "compile":
            if not file.exists():
                return out
            return out._replace(hidden=jax.ffi.ffi_call("a_kernel_that_nobody_wrote", out.hidden)(out.hidden))
        return out._replace(hidden=jax.pure_callback(kernel, out.hidden, out.hidden))

    def raising(*args: Any, **kwargs: Any) -> Forward:
        if file.exists():
            raise RuntimeError("no such program")
        return launch(*args, **kwargs)

    if fault == "raise":
        StageRunner.forward = raising
    else:
        lowering.forward = broken


def main() -> int:
    fault, file, role, *rest = sys.argv[1:]
    if role == ENGINE:
        from server.engine_process import main as engine_process

        break_programs(fault, Path(file))
        sys.argv = [sys.argv[0], *rest]
        return engine_process.main()
    from server import lifecycle as front
    from server.commands import cli, hosts
    from server.engine_process.supervisor import Supervisor

    command = (sys.executable, "-m", "tests.server.failing_host", fault, file, ENGINE)
    front.ENGINE_COMMAND = command
    hosts.Supervisor = partial(Supervisor, command=command)  # pyright: ignore[reportAttributeAccessIssue]
    return cli.main([role, *rest])


if __name__ == "__main__":
    sys.exit(main())
