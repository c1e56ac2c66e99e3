"""A user's mask that gives `ends` alone: everything else follows from it, in programs of all frameworks too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.masks.dynamic_intervals import traced_visibility
from attnscore.problem.problem import build_problem
from cases import needs_native


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(ats.IntervalMask):
    """Query i attends the keys j < lens of its own block of queries and of those before."""

    lens: Any
    size: int

    def ends(self, ops: Any, score_shape: Any, rows: Any) -> Any:
        lens = ops.reshape(ops.asarray(self.lens, rows, "int64"), (-1, 1))
        return None, -ops.maximum(-lens, -(rows // self.size + 1) * self.size)


@dataclass(frozen=True, eq=False, repr=False)
class Ends(ats.IntervalMask):
    """The same keys for every query, as numbers."""

    start: int | None
    stop: int | None

    def ends(self, ops: Any, score_shape: Any, rows: Any) -> Any:
        return self.start, self.stop


LENS = [5, 40]


def attends(lens: Any, size: int, queries: int, keys: int) -> np.ndarray:
    i, j = np.arange(queries)[:, None], np.arange(keys)
    return (j < (i // size + 1) * size) & (j < np.reshape(lens, (-1, 1, 1)))


def inputs(queries: int = 37, keys: int = 41) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 2, n, 4)) for n in (queries, keys, keys)]


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), (3, 0), (1, 1), (1, 7), (17, 5), (37, 41)], ids=str)
def test_visible_and_intervals_are_those_of_the_ends(lengths: tuple[int, int]) -> None:
    mask, wanted = Blocks(LENS, 6), attends(LENS, 6, *lengths)
    np.testing.assert_array_equal(mask.materialize(*lengths, batch=2), wanted)
    start, stop = (x[..., None] for x in mask.intervals(*lengths, batch=2))
    keys = np.arange(lengths[1])
    np.testing.assert_array_equal((keys >= start) & (keys < stop), wanted)
    assert start.dtype == stop.dtype == np.int64 and start.shape == stop.shape


@pytest.mark.parametrize("ends", [(None, None), (2, None), (None, 3), (-4, 99), (3, 1), (7, 9)], ids=str)
def test_numbers_and_no_bound(ends: tuple[int | None, int | None]) -> None:
    start, stop = (bound if end is None else end for end, bound in zip(ends, (0, 5), strict=True))
    wanted = np.broadcast_to((np.arange(5) >= start) & (np.arange(5) < stop), (1, 3, 5))
    np.testing.assert_array_equal(Ends(*ends).materialize(3, 5), wanted)
    x = np.random.default_rng(1).normal(size=(2, 5, 4))
    attend = jax.jit(lambda x, n: ats.attend(x[:, :3], x, x, mask=Ends(*ends) & ats.KeyRange(0, n)))
    found = ats.attend(x[:, :3], x, x, mask=Ends(*ends), kernel="dense")
    np.testing.assert_allclose(attend(jnp.asarray(x, "f4"), jnp.array([5])), found, atol=1e-6)


def test_tensors_on_the_host_are_read() -> None:
    for lens in (torch.tensor(LENS), jnp.array(LENS), np.array(LENS, np.int16), np.array(LENS, np.uint8)):
        _, stop = Blocks(lens, 6).intervals(9, 41, 2)
        np.testing.assert_array_equal(stop, np.minimum(np.reshape(LENS, (2, 1)), (np.arange(9) // 6 + 1) * 6))


MASKS: dict[str, Callable[[Any], ats.Mask]] = {
    "alone": lambda lens: Blocks(lens, 6),
    "and": lambda lens: Blocks(lens, 6) & ats.SlidingWindow(9, None, offset=0),
    "or": lambda lens: Blocks(lens, 6) | ats.KeyRange(30, 35),
    "not": lambda lens: ~Blocks(lens, 6) & ats.KeyRange(1, 39),
}


@needs_native
@pytest.mark.parametrize("name", MASKS)
def test_jax_programs_skip_tiles(name: str) -> None:
    """All of the mask is intervals in the program, whose numbers are known when it runs."""
    arrays = [jnp.asarray(x, "f4") for x in inputs()]
    rests = []

    def loss(lens: Any, *arrays: Any) -> Any:
        problem, _ = build_problem(*arrays, mask=MASKS[name](lens))
        ends, rest = traced_visibility(problem.ops, problem.score_shape, problem.value, problem.mask)
        rests.append((ends is not None, rest))
        return jnp.sin(ats.attend(*arrays, mask=MASKS[name](lens))).sum()

    found = jax.jit(jax.value_and_grad(loss, (1, 2, 3)))(jnp.array(LENS), *arrays)
    assert set(rests) == {(True, None)}

    def reference(*arrays: Any) -> Any:
        return jnp.sin(ats.attend(*arrays, mask=MASKS[name](LENS), kernel="dense")).sum()

    wanted = jax.value_and_grad(reference, (0, 1, 2))(*arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients(name: str, kernel: str) -> None:
    mask = MASKS[name](LENS)
    found = ats.attend_vjp(*inputs(), mask=mask, kernel=kernel)
    wanted = ats.attend_vjp(*inputs(), mask=mask.materialize(37, 41, 2)[:, None], kernel="streaming")
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-12)
    for x, y in zip(found[1](np.cos(found[0]))[:3], wanted[1](np.cos(wanted[0]))[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_the_compiler_of_torch() -> None:
    arrays, lens = [torch.tensor(x) for x in inputs()], torch.tensor(LENS)
    compiled = torch.compile(lambda lens, *x: ats.attend(*x, mask=Blocks(lens, 6)), backend="aot_eager")
    wanted = ats.attend(*inputs(), mask=Blocks(LENS, 6), kernel="dense")
    torch.testing.assert_close(compiled(lens, *arrays), torch.tensor(wanted), atol=1e-12, rtol=1e-12)
