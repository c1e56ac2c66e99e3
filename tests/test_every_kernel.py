"""Every kernel against the oracle: scores, masks, dtypes, what else is in a call, kernels and frameworks by pairs.

A row is one call with its gradients. Each pair of any two tables meets in a row.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore import KernelUnavailable
from attnscore.testing import check_kernel
from cases import (
    AUTOMATIC,
    DTYPES,
    FRAMEWORKS,
    KERNELS,
    MASK,
    MIXED_DTYPES,
    NOT_NATIVE,
    SCORE,
    SCORES_WITH_ARRAYS,
    SMALL_CALLS,
    SOME_MASKS,
    SOME_SCORES,
)
from covering import covering_array, each, pairs
from harness import EXTRAS, Call, array, make_call, tensor

pytestmark = pytest.mark.usefixtures("one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
kernels = pytest.mark.parametrize("kernel", KERNELS)


def run(call: Call, framework: str, kernel: str) -> dict[str, Any]:
    """Run a kernel by name. What the native one and gather do not take they say, and another runs."""
    try:
        return call.run(framework, kernel=kernel)
    except KernelUnavailable as error:
        if kernel in {"gather", "fused", "triton"}:
            # The others run on GPUs: tests/gpu and test_fused_kernel.py have their own rows.
            return call.run(framework)
        if kernel != "native":
            raise
        reasons = str(error).partition("can run, got ")[2].partition(". Hint: ")[0].split("; ")
        unknown = [reason for reason in reasons if not any(known in reason for known in NOT_NATIVE)]
        if AUTOMATIC == "native":
            assert not unknown, unknown
        return call.run(framework)


def all_pairs() -> list[Any]:
    """(score, mask, dtype, extras, kernel, framework): never their product, which has a million rows.

    Slow are the rows that are there for a score and a mask neither of which stands for its family: scores and masks are
    lowered apart. All other pairs are in the rest.
    """
    tables = [list(table) for table in (SCORE, MASK, DTYPES, EXTRAS, KERNELS, FRAMEWORKS)]
    families = {row.name for row in (*SOME_SCORES, *SOME_MASKS)}
    met: set[tuple[int, str, int, str]] = set()
    params = []
    for numbers in sorted(covering_array(*map(len, tables))):
        row = [table[i] for table, i in zip(tables, numbers, strict=True)]
        new = {
            (i, row[i], j, row[j])
            for i, j in combinations(range(len(row)), 2)
            if (i, j) != (0, 1) or not families.isdisjoint(row[:2])
        } - met
        met |= new
        params.append(pytest.param(*row, id="-".join(filter(None, row)), marks=() if new else pytest.mark.slow))
    return params


@pytest.mark.parametrize(("score", "mask", "dtype", "extras", "kernel", "framework"), all_pairs())
def test_against_the_oracle(
    score: str, mask: str, dtype: str, extras: str, kernel: str, framework: str, small_tiles: None
) -> None:
    call = make_call(score, mask, dtype, extras, seed=1)
    call.check(run(call, framework, kernel))


@pairs(
    score=SOME_SCORES,
    mask=SOME_MASKS,
    dtype=("float32", "float64"),
    extras=("bias-sink", "hiding-bias"),
    kernel=KERNELS,
    framework=FRAMEWORKS,
)
def test_families_against_the_oracle(
    score: Any, mask: Any, dtype: str, extras: str, kernel: str, framework: str, small_tiles: None
) -> None:
    """One of each family, of which `--products` runs the product."""
    call = make_call(score.name, mask.name, dtype, extras)
    call.check(run(call, framework, kernel))


@pairs(score=SCORES_WITH_ARRAYS, dtypes={"-".join(x): x for x in MIXED_DTYPES}, kernel=KERNELS, framework=FRAMEWORKS)
def test_arrays_of_another_dtype(
    score: str, dtypes: tuple[str, str], kernel: str, framework: str, small_tiles: None
) -> None:
    """Arrays of the score, bias and sink may be of any float dtype; each gradient comes in the dtype of its array."""
    call = make_call(score, "nested", dtypes[0], "bias-sink").with_extras_in(dtypes[1])
    call.check(run(call, framework, kernel))


@frameworks
@kernels
def test_check_kernel(kernel: str, framework: str) -> None:
    like = np.zeros(1) if framework == "numpy" else torch.zeros(1)
    if kernel in ("fused", "triton") or (kernel == "native" and AUTOMATIC != "native"):
        # None of its problems runs on a CPU, or without the module: a check of nothing is no check.
        with pytest.raises(AssertionError, match=f"{kernel}: nothing was checked"):
            check_kernel(kernel, like=like)
        return
    check_kernel(kernel, like=like)


def test_every_kernel_is_in_the_table() -> None:
    assert sorted((*KERNELS, *SMALL_CALLS)) == sorted(ats.available()["kernels"])


@frameworks
@kernels
@pytest.mark.parametrize("score", ["scaled_dot", "additive-tanh-bias", "own-tile"])
def test_the_same_bits_from_run_to_run(score: str, kernel: str, framework: str, small_tiles: None) -> None:
    call = make_call(score, "nested", "float32", "hiding-bias")
    first, second = (run(call, framework, kernel) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(array(x), array(second[name]), err_msg=name)


@each(score=SOME_SCORES, mask=SOME_MASKS, extras={name or "nothing-else": name for name in EXTRAS})
def test_tile_size_does_not_matter(score: Any, mask: Any, extras: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile, and tiles down to a single score."""
    call = make_call(score.name, mask.name, "float64", extras)
    for smallest in (1, 2, 5, 1000):
        monkeypatch.setattr("attnscore.base.thresholds.TILE_SCORES", 1)
        monkeypatch.setattr("attnscore.base.thresholds.SMALLEST_TILE", smallest)
        call.check(call.numpy(kernel="streaming"))


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_a_window_wider_than_a_tile(kernel: str, small_tiles: None) -> None:
    """Some of its tiles are partial at both ends, with keys between that all rows see."""
    x = np.random.default_rng(0).standard_normal((3, 1, 1, 23, 4))
    for mask in (ats.SlidingWindow(left=9), ats.SlidingWindow(left=7, right=6)):
        found, wanted = (ats.attend(*x, mask=mask, kernel=name) for name in (kernel, "dense"))
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_the_dense_kernel_has_no_gradient_in_numpy() -> None:
    """In a default run too, which leaves out the row of bad_input."""
    call = make_call("dot")
    with pytest.raises(KernelUnavailable, match="dense"):
        ats.attend_vjp(call.query, call.key, call.value, kernel="dense")


@frameworks
def test_auto_never_takes_the_matrix(framework: str) -> None:
    """Quadratic memory is for whoever asks for it by name."""
    for length in (1, 2, 64):
        x = np.ones((1, 1, length, 4), np.float32)
        arrays = [tensor(x) if framework == "torch" else x] * 3
        assert ats.explain(*arrays).kernel == AUTOMATIC
        assert ats.explain(*arrays, kernel="dense").kernel == "dense"
