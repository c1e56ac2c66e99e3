"""Fixtures that the generic tests share."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# torch's threads wait asleep. Awake they hold a core that another worker or process has use for: on a busy machine
# eight training runs of six steps took 98 seconds in place of 5.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A program of XLA is compiled twice as fast without most optimisations, and compiling is most of what tests of JAX and
# TensorFlow take. The products (`make test-all`) run what users run.
if "--products" not in sys.argv:
    _flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    # A release that does not know a flag ends the process: these for those in which they were tried. They save a third.
    with contextlib.suppress(PackageNotFoundError):  # a quick run needs neither
        if version("jaxlib").startswith("0.10.") and version("tensorflow-cpu").startswith("2.21."):
            _flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ.setdefault("XLA_FLAGS", " ".join(_flags))

import numpy as np
import pytest

import covering
import selection

# Nothing of what is imported and collected is garbage: looking for it took a third of the collection's time.
gc.disable()

HANGS_AFTER = 600
"""Seconds after which a test says where it is."""
_STDERR, _SET_AT = pytest.StashKey[int](), pytest.StashKey[float]()

# In an environment of their own, which tests/test_mxnet.py starts.
collect_ignore = ["in_mxnet"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is not chosen, and without a GPU tests/gpu, which tests/test_triton.py runs in an interpreter."""
    if selection.is_left_out(collection_path, config):
        return True
    if collection_path.name != "gpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    import torch

    return None if torch.cuda.is_available() else True


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)
    parser.addoption("--products", action="store_true", help="whole products of tables in place of pairs of their rows")
    parser.addoption("--every", type=int, default=1, help="of the rows of each test of tests/gpu every so many")


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are collected: their rows are made when they are imported."""
    covering.products = config.getoption("--products")
    selection.configure(config)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        _import_frameworks(config.getoption("--quick"))
    else:
        gc.enable()  # this process collects no tests
    # Here it is the process's own: while tests run, pytest has another in its place.
    config.stash[_STDERR] = os.dup(2)


def _import_frameworks(quick: bool) -> None:
    """Not in the process that hands the tests to workers, which would wait for it."""
    # triton, which PyTorch's CUDA builds bring, before TensorFlow: loaded after it, it ends in a segmentation
    # fault over two LLVMs (tensorflow/tensorflow#124205).
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    if quick or os.environ.get("TRITON_INTERPRET") == "1" or "jax" in selection.absent():
        return  # a quick run, or a process of tests/gpu: they need PyTorch alone
    import jax

    # The tables have float64 rows, which JAX would make float32; tests/test_jax.py has the narrow width too.
    jax.config.update("jax_enable_x64", True)
    _share_context_of_programs()


def _share_context_of_programs() -> None:
    """JAX makes an MLIR context for each program: 5 of the 25 ms of a small one, of which there are thousands."""
    with contextlib.suppress(ImportError, AttributeError):  # private to JAX
        from jax._src.interpreters import mlir

        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark rows before pytest leaves out those that are marked."""
    selection.mark_slow_rows(items)
    if left_out := set(selection.left_out(items, config)):
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_itemcollected(item: pytest.Item) -> None:
    """`slow_rows("name", ...)` marks rows of a parametrised test as slow, by patterns of their names."""
    name = item.callspec.id if hasattr(item, "callspec") else ""
    if any(fnmatchcase(name, pattern) for mark in item.iter_markers("slow_rows") for pattern in mark.args):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say where a test hangs, set anew every few seconds: pytest's own way takes half a millisecond of each test."""
    stash, now = item.config.stash, time.monotonic()
    if now - stash.get(_SET_AT, -HANGS_AFTER) > HANGS_AFTER / 60:
        stash[_SET_AT] = now
        faulthandler.dump_traceback_later(HANGS_AFTER, file=stash[_STDERR])


def pytest_collection_finish() -> None:
    """The frameworks are here to stay: a collection that looks at all of their objects takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _tables_as_found() -> Iterator[None]:
    """What an example or a test registers is gone with it: other tests list the names in messages."""
    from attnscore import kernels, scores

    before = [(table, dict(table)) for table in (scores._TABLE, kernels._TABLE)]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_file() -> Iterator[None]:
    """What JAX compiled goes with the file that it was for: a program takes 3 MB, and there are thousands."""
    yield
    if sys.modules.get("jax"):  # in a quick run None
        sys.modules["jax"].clear_caches()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 4 scores: inputs of a dozen positions are then walked over in many tiles, some of them partial.

    Masks that the native kernels have evaluated come in strips of 3 rows, and a Gaussian has the form of large inputs.
    """
    from attnscore.base import thresholds

    monkeypatch.setattr(thresholds, "TILE_SCORES", 1)
    monkeypatch.setattr(thresholds, "SMALLEST_TILE", 4)
    monkeypatch.setattr(thresholds, "CHUNK_BYTES", 1)
    monkeypatch.setattr(thresholds, "CHUNK_ROWS", 3)
    monkeypatch.setattr(thresholds, "INNER_TERMS", 0)


@pytest.fixture
def torch_seed() -> None:
    """torch's own generator, set."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """On tensors of a few hundred numbers a second thread only spins: it doubled the time of these tests."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def few_modules() -> Iterator[None]:
    """Watches search fewer modules."""
    from few_modules import few_modules

    with few_modules():
        yield
