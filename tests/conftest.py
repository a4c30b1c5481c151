"""What every test shares: eight virtual devices, and programs compiled once in a run are not compiled again."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compilation-cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
