"""What every test runs under: eight host devices, no silent broadcasting, and x64 off before and after."""

import gc
import os
from pathlib import Path

# Compiling is most of what the tests do: without LLVM's optimizations it takes two thirds of the time. And a busy
# machine may keep one of eight devices from a sum for longer than the 40 seconds after which XLA ends the process.
# Before JAX is there, which reads it once; XLA_FLAGS= gives the programs that users run.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
# XLA has as many threads as there are devices or cores, whichever is more: eight on two cores, all of which a sum over
# eight devices needs at once. Such a sum was seen to wait for ever; that a ninth thread was missing is inferred.
os.environ.setdefault("NPROC", "32")

import jax
import pytest

# Before the first computation: the backend reads it once. The sharding tests need a mesh.
jax.config.update("jax_num_cpu_devices", 8)
# One program at a time: of several under way, each on eight devices, two have kept each other's threads waiting.
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_numpy_rank_promotion", "raise")

MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def x64_stays_off():
    """FOSI must never leave JAX's global x64 flag changed; a test that needs float64 enters a context."""
    yield
    assert not jax.config.jax_enable_x64


@pytest.fixture(autouse=True)
def room_for_programs():
    """Linux lets a process map memory 65,530 times, and each compiled program takes some: past that XLA crashes."""
    yield  # after every test, not every module: tests of one come in any order, and some modules compile hundreds
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
