"""The bilinear score where W is applied to the keys, as that takes fewer operations, and nothing else changes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.backends import native
from attnscore.plans import plan as plans
from attnscore.problem.problem import build_problem
from cases import needs_native
from harness import pullback_of

LENS = np.array([2, 3])


def arrays(queries: int = 9) -> list[np.ndarray]:
    """Query, key, value and W; a masked key is NaN."""
    rng = np.random.default_rng(0)
    found = [rng.standard_normal(shape) for shape in ((2, queries, 4), (2, 3, 5), (2, 3, 2), (4, 5))]
    found[1][0, 2] = np.nan
    return found


def reference() -> tuple[np.ndarray, ...]:
    """Output and gradients of its sum of squares, by the definition."""
    query, key, value, weight = [torch.tensor(x, requires_grad=True) for x in arrays()]
    is_masked = torch.arange(3) >= torch.tensor(LENS)[:, None]
    finite = key.masked_fill(is_masked[..., None], 0.0)
    scores = (query @ weight @ finite.mT).masked_fill(is_masked[:, None], -torch.inf)
    out = scores.softmax(-1) @ value
    grads = torch.autograd.grad(out.square().sum(), (query, key, value, weight))
    return tuple(x.detach().numpy() for x in (out, *grads))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax.jit", "tensorflow"])
def test_fewer_keys_than_queries(framework: str) -> None:
    lens = torch.tensor(LENS) if framework == "torch" else LENS
    for _ in range(2):  # in PyTorch the second call runs by the plan of the first
        out, pull = pullback_of(framework, arrays(), ats.Bilinear, valid_lens=lens)
    for found, wanted in zip((out, *pull(2 * out)), reference(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("queries", "side"), [(9, 3), (2, 2)])
def test_the_side_with_fewer_rows_is_projected(queries: int, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    matmul = torch.matmul

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows.append(a.shape[-2])
        return matmul(a, b)

    *inputs, weight = [torch.tensor(np.nan_to_num(x)) for x in arrays(queries)]
    weight.requires_grad_()  # without a gradient the native module multiplies
    monkeypatch.setattr(torch, "matmul", noted)
    plans.PLANS.clear()
    for _ in range(2):  # the second call runs by the plan of the first
        rows.clear()
        out = ats.attend(*inputs, score=ats.Bilinear(weight))
        assert rows[0] == side
    monkeypatch.undo()
    wanted = ats.attend(*inputs, score=ats.Bilinear(weight), kernel="dense")
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    one_each = ats.Bilinear(weight.expand(2, 4, 5))  # per head: the keys of all heads would be as many products
    heads = [x[None] for x in inputs]
    torch.testing.assert_close(ats.attend(*heads, score=one_each)[0], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("query", "key", "projects_key"),
    [
        ((2, 9, 4), (2, 3, 5), True),
        ((9, 64), (8, 2), False),  # the pairs take more with 64 dimensions than the projection saves
        ((9, 2), (9, 64), True),
        ((9, 4), (9, 4), False),
        ((4, 3, 5), (1, 6, 5), True),  # keys of all batch entries
        ((1, 4, 3, 5), (1, 2, 3, 5), True),  # grouped-query attention
        ((0, 4), (3, 4), False),
    ],
)
@pytest.mark.parametrize("head_axis", [-3, -2])
def test_the_side_that_takes_fewer_operations(
    query: tuple[int, ...], key: tuple[int, ...], projects_key: bool, head_axis: int
) -> None:
    rng = np.random.default_rng(0)
    arrays = [torch.tensor(rng.standard_normal(shape)) for shape in (query, key, (*key[:-1], 3))]
    score = ats.Bilinear(torch.tensor(rng.standard_normal((query[-1], key[-1]))))
    if head_axis == -2 and len(query) == 4:
        arrays = [x.transpose(1, 2).contiguous() for x in arrays]
    problem, _ = build_problem(*arrays, score=score, head_axis=head_axis)
    assert (problem.form.query is problem.query) == projects_key
    assert (problem.form.key is problem.key) == (not projects_key)
    wanted = ats.attend(*arrays, score=score, head_axis=head_axis, kernel="dense")
    for _ in range(2):
        torch.testing.assert_close(ats.attend(*arrays, score=score, head_axis=head_axis), wanted)
    # Whatever the lengths, ranks that share the sequence move the keys as they are.
    problem, _ = build_problem(*arrays, score=score, head_axis=head_axis, rowwise=True)
    assert problem.form.key is problem.key and problem.form.query is not problem.query


def test_unknown_lengths_leave_the_keys_as_they_are() -> None:
    import tensorflow as tf

    found = []

    # AutoGraph, which `attend` keeps away, would rewrite all of the planning: four seconds.
    @tf.function(input_signature=[tf.TensorSpec((2, None, n)) for n in (4, 5, 2)], autograph=False)
    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        problem, _ = build_problem(query, key, value, score=ats.Bilinear(tf.ones((4, 5))))
        found.append(problem.form.key is problem.key)
        return problem.operands()["query"]

    attend.get_concrete_function()
    assert found == [True]


def test_the_count_of_operations_is_that_of_the_cheaper_side() -> None:
    score = ats.Bilinear(np.ones((4, 5)))
    assert score.operations(9, 3, 4, 5) == 2 * 3 * 4 * 5 + 2 * 9 * 3 * 4
    assert score.operations(3, 9, 4, 5) == 2 * 3 * 4 * 5 + 2 * 9 * 3 * 5


# Sizes on both sides of what the native module multiplies itself; with (3, 9, 4) the keys are projected.
@pytest.mark.parametrize("sizes", [(2, 1, 10, 8), (3, 9, 4, 5), (4, 3, 40, 33), (2, 70, 80, 40)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_products_of_numpy(sizes: tuple[int, ...], dtype: str) -> None:
    """Planned calls from NumPy: no warning, no matter what the caller makes of them, and no NaN of a masked key."""
    batch, queries, keys, dim = sizes
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((batch, n, dim)) for n in (queries, keys, keys))
    lens, weight = np.arange(batch) + 1, rng.standard_normal((dim, dim)) / dim
    key[0, 1:] = np.nan
    exact = ats.attend(query, key, value, score=ats.Bilinear(weight), valid_lens=lens, kernel="dense")
    inputs = [x.astype(dtype) for x in (query, key, value)]
    orders = [np.asarray(weight.astype(dtype), order=order) for order in ("C", "F")]
    for matrix, large in [(x, large) for x in orders for large in (False, True)] * 2:
        one = [x.copy() for x in inputs]
        if large:  # products beyond the largest number
            one[0][-1, 0], one[1][-1, 0] = (np.finfo(dtype).max / 2,) * 2
        with np.errstate(all="raise"):
            out = ats.attend(*one, score=ats.Bilinear(matrix), valid_lens=lens)
        rows = np.ones((batch, queries), bool)
        if large:
            rows[-1] = False
        np.testing.assert_allclose(out[rows], exact[rows], rtol=0, atol=1e-5 if dtype == "float32" else 1e-13)


@needs_native
@pytest.mark.parametrize(
    ("rows", "depth", "cols"),
    # Of 323 columns the last 3 fill no vector, and are in a task with 3 or 2 panels, by the number of threads.
    [(1, 300, 270), (5, 1, 32), (6, 64, 64), (193, 100, 33), (7, 1000, 3), (4, 512, 323)],
)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("target", [None] if native.module is None else native.module.targets())
def test_products_of_the_native_module(target: str, dtype: str, rows: int, depth: int, cols: int) -> None:
    before, rng = native.module.current_target(), np.random.default_rng(rows)
    x, matrix = rng.standard_normal((rows, depth)).astype(dtype), rng.standard_normal((depth, cols)).astype(dtype)
    exact = x.astype(np.float64) @ matrix.astype(np.float64)
    native.module.select(target)
    try:
        for order in ("C", "F"):
            outs = [np.full((rows, cols), np.nan, dtype) for _ in range(2)]
            for out, threads in zip(outs, (1, 3), strict=True):
                assert native.module.multiply_rows(x, np.asarray(matrix, order=order), out, threads)
            np.testing.assert_array_equal(*outs)
            step = 2e-7 if dtype == "f4" else 4e-16
            np.testing.assert_allclose(outs[0], exact, rtol=0, atol=step * depth**0.5 * 8)
    finally:
        native.module.select(before)


@needs_native
def test_products_of_tensors() -> None:
    """Without a gradient the native module multiplies tensors too; NaN, a gradient and other dtypes are PyTorch's."""
    torch.manual_seed(0)
    query, key, weight = torch.randn(3, 2, 8), torch.randn(3, 9, 8), torch.randn(8, 8)
    for change in ("nothing", "NaN", "gradient", "float64"):
        inputs, score = [query.clone(), key, key], ats.Bilinear(weight.clone())
        if change == "NaN":
            inputs[0][1, 1, 3] = torch.nan
        if change == "gradient":
            score.W.requires_grad_()
        if change == "float64":
            inputs, score = [x.double() for x in inputs], ats.Bilinear(weight.double())
        wanted = ats.attend(*inputs, score=score, kernel="dense")
        for _ in range(2):
            out = ats.attend(*inputs, score=score)
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
            assert out.requires_grad == (change == "gradient")


@needs_native
def test_what_the_native_module_does_not_multiply() -> None:
    """It says so, and leaves these calls to NumPy: other layouts and dtypes."""
    x, matrix, to = np.ones((3, 4)), np.arange(8.0).reshape(4, 2), np.empty((3, 2))

    def multiply(*arrays: np.ndarray) -> bool:
        return bool(native.module.multiply_rows(*arrays, 1))

    for m in (matrix, np.asfortranarray(matrix), np.repeat(matrix, 2, 1)[:, ::2], matrix[:, ::-1]):
        assert multiply(x, m, to)
        np.testing.assert_array_equal(to, x @ m)
    assert not multiply(np.asfortranarray(x), matrix, to)
    assert not multiply(x.astype("f"), matrix, to)
    assert not multiply(x.astype("f2"), matrix.astype("f2"), to.astype("f2"))
    assert not multiply(x, matrix[:3], to)
    assert not multiply(x, matrix, np.empty((2, 2)))
    assert not multiply(x, matrix, np.empty(6))
    assert not multiply(x[:, :0], matrix[:0], to)
    for place in ((0, 0), (1, 2), (2, 3)):
        for number in (np.nan, np.inf):
            x[place] = number
            assert multiply(x, matrix, to)
            np.testing.assert_array_equal(
                to, np.where((np.arange(3) == place[0])[:, None], np.nan, np.ones((3, 4)) @ matrix)
            )
        x[place] = 1


@needs_native
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("lengths", [(2, 3), (40, 7)])
def test_a_masked_row_that_is_not_finite_changes_no_bit(framework: str, lengths: tuple[int, int]) -> None:
    """Queries and keys that are projected, without a gradient: one product serves all rows."""
    rng = np.random.default_rng(3)
    given = {
        name: rng.standard_normal((2, n, 24)).astype("f4") for name, n in zip(("query", "key"), lengths, strict=True)
    }
    weight = rng.standard_normal((24, 24)).astype("f4")
    convert = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[framework]

    def run() -> np.ndarray:
        query, key = (convert(x.copy()) for x in given.values())
        mask = ats.ValidLens([lengths[1] - 1, lengths[1] - 1], query_lens=[lengths[0] - 1, lengths[0] - 1])
        return np.asarray(ats.attend(query, key, key, score=ats.Bilinear(convert(weight)), mask=mask))

    clean = run()
    for x in given.values():
        for number in (np.nan, np.inf):
            x[:, -1, 5] = number
            np.testing.assert_array_equal(run(), clean)
        x[:, -1, 5] = 0.5
