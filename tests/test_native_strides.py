"""Shapes, dtypes, strides and alignment of the arrays that the native module reads and fills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attnscore as ats
from native_cases import BITS, STATISTICS, Case, close, same


@pytest.mark.parametrize("form", ["inner", "additive"])
@pytest.mark.parametrize("intervals", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"lead": (1,), "head": 1, "group": 1},
        {"lead": (2, 3, 2)},
        {"group": 1},
        {"key_group": 3},
        {"query_len": 1, "key_len": 1, "dim": 1, "value_dim": 1},
        {"query_len": 17, "key_len": 130, "dim": 33, "value_dim": 65},
        {"dim": 600},
        {"query_len": 17, "key_len": 70, "dim": 300, "lead": (1,), "head": 1},
        {"lead": (0,)},
        {"head": 0},
        {"query_len": 0},
        {"key_len": 0},
        {"dim": 0},
        {"value_dim": 0},
        {"query_len": 0, "key_len": 0},
    ],
    ids=str,
)
def test_shapes(shape: dict[str, Any], intervals: bool, form: str) -> None:
    Case(**shape, intervals=intervals, form=form).check()


@pytest.mark.parametrize("form", ["inner", "additive"])
@pytest.mark.parametrize(
    ("score", "value"),
    [
        ("float32", "float32"),
        ("float64", "float64"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
        ("float16", "float32"),
        ("float64", "float32"),
        ("float64", "float16"),
    ],
)
def test_dtypes(score: str, value: str, form: str) -> None:
    Case(score_dtype=score, value_dtype=value, form=form, intervals=True).check()


@pytest.mark.parametrize("grad", ["float32", "float64", "bfloat16", "float16"])
def test_grad_out_has_a_dtype_of_its_own(grad: str) -> None:
    case = Case()
    case.run()
    g = case.grad_out.astype(BITS.get(grad, grad))
    case.grad_out = g.astype("f4")
    case.run_backward()
    expected = case.grad_value.copy(), case.grad_query.copy()
    case.run_backward(grad_out=g.view(np.uint16) if grad in BITS else g, grad_dtype=grad)
    close(case.grad_value, expected[0], 1e-6)
    close(case.grad_query, expected[1], 1e-6)


# ---- strides ----

LAYOUTS = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "heads inside": lambda x: np.ascontiguousarray(x.transpose(0, 3, 1, 2, 4)).transpose(0, 2, 3, 1, 4),
    "rows backwards": lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    "columns backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "heads backwards": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "every third": lambda x: np.repeat(x, 3, axis=-1)[..., 1::3],
    "shifted by one": lambda x: np.concatenate([x[..., :1], x], axis=-1)[..., 1:],
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "Fortran": np.asfortranarray,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["inner", "additive"])
def test_any_strides(layout: str, dtype: str, form: str) -> None:
    case = Case(form=form, score_dtype=dtype, value_dtype=dtype, intervals=True)
    names = ("query", "key", "value", "grad_out")
    expected = {name: getattr(case, name).copy() for name in names}
    for name in names:
        view = LAYOUTS[layout](getattr(case, name))
        assert np.array_equal(view, expected[name])
        setattr(case, name, view)
    case.check()


@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (4,), (0, 1), (0, 1, 2)])
def test_an_array_that_repeats_itself(name: str, axes: tuple[int, ...]) -> None:
    """However long it says that its axes are; before the rows they may have length 1 as well."""
    case = Case(key_group=3)
    one = getattr(case, name)
    shape = one.shape
    for axis in axes:
        one = one.take([0], axis)
    setattr(case, name, np.broadcast_to(one, shape))
    case.check()
    if max(axes) < 3:
        expected = case.results()
        setattr(case, name, one)
        case.run()
        case.run_backward()
        assert same(case.results(), expected)


@pytest.mark.parametrize("layout", ["transposed", "columns backwards", "every third", "shifted by one", "one column"])
def test_a_mask_of_any_strides(layout: str) -> None:
    """Over several tiles of keys; a mask of one column is broadcast over all keys."""
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((n, 4)) for n in (9, 150, 150))
    mask = rng.random((9, 150)) < 0.7
    laid = mask[:, :1] if layout == "one column" else LAYOUTS[layout](mask)
    full = np.array(np.broadcast_to(laid, mask.shape))
    found, expected = (
        ats.attend(query, key, value, mask=x, kernel=kernel) for x, kernel in ((laid, "native"), (full, "dense"))
    )
    np.testing.assert_allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("layout", ["transposed", "columns backwards", "every third", "shifted by one", "one column"])
@pytest.mark.parametrize("matrix", ["scores", "weights"])
def test_a_gradient_of_the_matrix_of_any_strides(matrix: str, layout: str) -> None:
    case, name = Case(matrix=matrix, key_len=70), f"grad_attention_{matrix}"
    grad = getattr(case, name)
    if layout == "one column":
        grad = np.ascontiguousarray(np.broadcast_to(grad[..., :1], grad.shape))
    case.run()
    found = []
    for x in (grad, grad[..., :1] if layout == "one column" else LAYOUTS[layout](grad)):
        case.run_backward(**{name: x})
        found.append((case.grad_query, case.grad_key, case.grad_value))
    assert same(*found)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", ["query_bias", "key_bias"])
def test_biases_of_queries_and_keys(name: str, step: int) -> None:
    """Over several tiles, contiguous or not: as the same numbers in a bias of all pairs."""
    case = Case(query_len=50, key_len=150)
    count = 50 if name == "query_bias" else 150
    one = np.random.default_rng(4).standard_normal((1, 1, 1, step * count, 1)).astype("f4")[..., ::step, :]
    pairs = np.broadcast_to(one if name == "query_bias" else one.swapaxes(-1, -2), (1, 1, 1, 50, 150))
    case.run(bias=pairs)
    expected = case.out
    case.run(**{name: one})
    close(case.out, expected, 1e-6)
    close(case.statistics["max_score"], (case.exact_scores()[0] + pairs).max(-1, keepdims=True), 1e-6)


def test_intervals_and_weights_of_their_own() -> None:
    """One interval for all batch rows, and weights per head, backwards in memory: as if written out."""
    case = Case(form="additive", intervals=True, key_group=3)
    assert case.start is not None
    assert case.stop is not None
    rows = case.start[:1], case.stop[:1]
    case.start, case.stop = (np.repeat(x, 2, axis=0) for x in rows)
    weights = np.random.default_rng(2).standard_normal((2, 3, 4)).astype("f4")
    for place in np.ndindex(2, 3):
        case.w_v = weights[place]
        case.run()
        case.run_backward()
        whole = [x[:, place[0], place[1]].copy() for x in (case.out, case.grad_query, case.grad_key, case.grad_w_v)]
        case.start, case.stop = rows
        case.w_v = np.ascontiguousarray(weights[::-1])[::-1]
        case.run()
        case.run_backward()
        own = [x[:, place[0], place[1]] for x in (case.out, case.grad_query, case.grad_key, case.grad_w_v)]
        assert same(tuple(whole), tuple(own))


def test_statistics_on_request() -> None:
    """Each alone is what it is among all, and no other array is written."""
    case = Case(intervals=True)
    case.check()
    whole = dict(case.statistics)
    for name in STATISTICS:
        case.run(**{other: None for other in STATISTICS if other != name})
        assert np.array_equal(case.statistics.pop(name), whole[name])
        assert all((x == 77).all() for x in case.statistics.values())
    out = case.out.copy()
    case.run(**dict.fromkeys(STATISTICS))
    assert np.array_equal(case.out, out)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_where_memory_begins_does_not_matter(dtype: str) -> None:
    """Values that lie across the lines of the cache are copied, a tile at a time."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in ((2, 40, 64), (2, 130, 64), (2, 130, 64))]

    def placed(x: NDArray[Any], offset: int) -> NDArray[Any]:
        room = np.empty(x.nbytes + 128, np.uint8)
        first = -room.ctypes.data % 64 + offset
        found = room[first : first + x.nbytes].view(dtype).reshape(x.shape)
        found[...] = x
        return found

    wanted = ats.attend(*(placed(x, 0) for x in arrays), valid_lens=[130, 77], kernel="native")
    for offset in (8, 16, 32):
        found = ats.attend(*(placed(x, offset) for x in arrays), valid_lens=[130, 77], kernel="native")
        np.testing.assert_array_equal(found, wanted)
