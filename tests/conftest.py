"""What every test shares: eight virtual devices, shapes checked, and programs compiled once in a run not compiled
again."""

from collections.abc import Iterator

import jax
import pytest
from jaxtyping import install_import_hook

from jaxserve.runner import cache_folder

jax.config.update("jax_num_cpu_devices", 8)

# Before anything imports them: their functions hold arguments and results to their annotations.
SHAPE_CHECKED = (
    "jaxserve.models",
    "jaxserve.sampling.sampler",
    "jaxserve.sampling.selection",
    "jaxserve.sampling.scoring",
    "jaxserve.runner.batch",
    "pallas_kernels.tpu",
    "pallas_kernels.xla",
    "pallas_kernels.cpu",
    "pallas_kernels.cpu.product",
    "pallas_kernels.gpu",
    "pallas_kernels.int8",
)
install_import_hook(SHAPE_CHECKED, "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, metavar="N", help="repeat the random inputs of a failed conformance test")


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compilation-cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session", autouse=True)
def _keep_out_of_your_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines keep by themselves is not kept among what you keep."""
    folder = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_folder, "default", lambda: folder)
        yield
