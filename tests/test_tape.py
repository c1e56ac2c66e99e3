"""NumPy's reverse tape: every rule against PyTorch's autograd, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore import backends
from attnscore.backends.tape import _RULES, vjp

NUMPY, TORCH = backends.load("numpy"), backends.load("torch")
_POSITIVE = {"log", "log1p", "sqrt", "power", "power-of-number"}

# Name of the rule (and what is special) -> function of ops and arrays, shapes of the arrays.
_CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add": (lambda ops, x, y: x + y + 1.5, ((3, 1, 5), (7, 1))),
    "add-reflected": (lambda ops, x: 1.5 + x, ((3,),)),
    "subtract": (lambda ops, x, y: (x - y) - (2 - x), ((2, 3), ())),
    "multiply": (lambda ops, x, y: 3 * x * y, ((1, 5), (4, 1))),
    "multiply-itself": (lambda ops, x: x * x * x, ((5,),)),
    "divide": (lambda ops, x, y: x / (1.5 + y * y) + 2 / (1 + x * x), ((5, 3), (3,))),
    "power": (lambda ops, x: x**3 + x**0.5 + x**-2, ((4,),)),
    "negative": (lambda ops, x: -x, ((2, 3),)),
    "matmul": (lambda ops, x, y: x @ y, ((2, 1, 3, 5), (7, 5, 2))),
    "matmul-shared": (lambda ops, x, y: ops.matmul(x, y), ((2, 3, 1, 5), (5, 2))),
    "matmul-matrices": (lambda ops, x, y: ops.matmul(x, y), ((1, 1), (1, 3))),
    "matmul-batch-on-the-right": (lambda ops, x, y: ops.matmul(x, y), ((3, 5), (2, 5, 4))),
    "matmul-vector": (lambda ops, x, y: ops.matmul(x, y), ((2, 3, 5), (5,))),
    "matmul-no-rows": (lambda ops, x, y: ops.matmul(x, y), ((2, 0, 5), (5, 2))),
    "exp": (lambda ops, x: ops.exp(x), ((3, 2),)),
    "expm1": (lambda ops, x: ops.expm1(x), ((3, 2),)),
    "log": (lambda ops, x: ops.log(x), ((3, 2),)),
    "log1p": (lambda ops, x: ops.log1p(x), ((3, 2),)),
    "sqrt": (lambda ops, x: ops.sqrt(x), ((3, 2),)),
    "square": (lambda ops, x: ops.square(x), ((3, 2),)),
    "sin": (lambda ops, x: ops.sin(x), ((3, 2),)),
    "cos": (lambda ops, x: ops.cos(x), ((3, 2),)),
    "tanh": (lambda ops, x: ops.tanh(x), ((3, 2),)),
    "sigmoid": (lambda ops, x: ops.sigmoid(x), ((3, 2),)),
    "erf": (lambda ops, x: ops.erf(x), ((3, 2),)),
    "abs": (lambda ops, x: ops.abs(x) + abs(x), ((3, 2),)),
    "maximum": (lambda ops, x, y: ops.maximum(x, y), ((5, 3), (1, 3))),
    "maximum-of-equals": (lambda ops, x: ops.maximum(x, x), ((3,),)),
    "minimum": (lambda ops, x, y: ops.minimum(x, y), ((5, 3), (5, 1))),
    "where": (lambda ops, x, y: ops.where(x > y, x * y, 0.0) + ops.where(x != y, 1.0, y), ((3, 1), (4,))),
    "sum": (lambda ops, x: ops.sum(x * x, axis=-1) * ops.sum(x, axis=(0, 2)) * ops.sum(x, axis=None), ((1, 3, 1),)),
    "sum-kept": (lambda ops, x: x / ops.sum(x, axis=(-1, 0), keepdims=True), ((3, 1, 5),)),
    "mean": (lambda ops, x: ops.mean(x, axis=-1, keepdims=True) + ops.mean(x * x), ((3, 5),)),
    "max": (lambda ops, x: x - ops.max(x, axis=-1, keepdims=True), ((3, 5),)),
    "max-of-equals": (lambda ops, x: ops.max(ops.concat((x[:, None], x[:, None]), -1), axis=-1), ((3,),)),
    "min": (lambda ops, x: ops.amin(x, axis=-1), ((3, 5),)),
    "amin": (lambda ops, x: ops.amin(x, axis=(0, 2)), ((3, 1, 5),)),
    "softmax": (lambda ops, x: ops.softmax(x), ((3, 5),)),
    "astype": (lambda ops, x: ops.astype(x, "float64") * 2, ((3,),)),
    "reshape": (lambda ops, x: ops.reshape(x, (3, -1)), ((2, 3, 5),)),
    "expand_dims": (lambda ops, x: ops.expand_dims(x, -2) - ops.expand_dims(x, -3), ((4, 3),)),
    "squeeze": (lambda ops, x: ops.squeeze(x, 1), ((4, 1, 3),)),
    "broadcast_to": (lambda ops, x: ops.broadcast_to(x, (2, 4, 3)), ((4, 1),)),
    "swap_axes": (lambda ops, x: x * ops.sum(ops.swap_axes(x, 0, 2), axis=1, keepdims=True), ((3, 1, 3),)),
    "matrix_transpose": (lambda ops, x: ops.matrix_transpose(x), ((2, 3, 5),)),
    "getitem": (lambda ops, x: x[..., :2, None] * x[1, ..., 3:4, None], ((2, 7, 4),)),
    "getitem-repeated": (lambda ops, x: x[[0, 2, 0]], ((3, 2),)),
    "take": (lambda ops, x: ops.take(x, ops.astype(x[0, 0, :3] * 0, "int64"), axis=-2), ((2, 5, 3),)),
    "concat": (lambda ops, x, y: ops.concat((x, 2 * y, x), -1), ((2, 3), (2, 0))),
    "stop_gradient": (lambda ops, x: x * ops.stop_gradient(x), ((3,),)),
    "ones_like": (lambda ops, x: x * ops.ones_like(x), ((3,),)),
}  # fmt: skip


def _arrays(case: str, dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(len(case))
    draw = partial(rng.uniform, 0.5, 2.0) if case.partition("-")[0] in _POSITIVE else rng.standard_normal
    return [np.asarray(draw(size=shape), dtype) for shape in _CASES[case][1]]


def test_every_rule_has_a_case() -> None:
    assert set(_RULES) - {"true_divide", "absolute", "amax"} <= {name.partition("-")[0] for name in _CASES}


def test_the_page_lists_the_operations() -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to-add-a-score.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"these functions of `ops`: `([a-z0-9_\s]+)`", page)
    operators = {"add", "subtract", "multiply", "divide", "power", "negative", "matmul", "getitem"}
    aliases = {"true_divide", "absolute", "amax", "amin"}
    composed = {"matmul", "matrix_transpose", "softmax", "stop_gradient", "take"}
    assert set(listed.split()) == set(_RULES) - operators - aliases | composed


def test_the_gradient_is_that_of_autograd() -> None:
    """Of every rule in one test: the default run leaves out rows of a long table."""
    for case, (function, _) in _CASES.items():
        arrays = _arrays(case)
        out, pullback = vjp(NUMPY, function, arrays)
        grad = np.asarray(np.random.default_rng(1).standard_normal(out.shape))
        with torch.no_grad():
            exact, torch_pullback = vjp(TORCH, function, [torch.tensor(x) for x in arrays])
            wanted = [x.numpy() for x in torch_pullback(torch.tensor(grad))]
        np.testing.assert_allclose(out, exact.numpy(), rtol=1e-12, atol=1e-14, err_msg=case)
        for x, y in zip(pullback(grad), wanted, strict=True):
            assert x.shape == y.shape, case
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12, err_msg=case)


@pytest.mark.parametrize("case", [case for case in _CASES if case != "astype"])
def test_float32_stays_float32(case: str) -> None:
    arrays = _arrays(case, "float32")
    out, pullback = vjp(NUMPY, _CASES[case][0], arrays)
    assert out.dtype == np.float32
    assert [np.asarray(x).dtype for x in pullback(np.ones(out.shape, np.float32))] == [np.float32] * len(arrays)


def test_an_input_that_is_not_read_has_zeros() -> None:
    _, pullback = vjp(NUMPY, lambda ops, x, y: 2 * x, (np.ones((2, 3)), np.ones(4, np.float32)))
    np.testing.assert_array_equal(pullback(np.ones((2, 3)))[1], np.zeros(4, np.float32))


def test_an_operator_in_place_is_one_that_makes_an_array() -> None:
    def function(ops: Any, x: Any) -> Any:
        y = ops.exp(x)
        y *= 3
        y -= x
        return y

    x = np.array([0.5, 2.0])
    np.testing.assert_allclose(vjp(NUMPY, function, [x])[1](np.ones(2))[0], 3 * np.exp(x) - 1)


def test_infinite_entries_that_are_left_out_get_zeros() -> None:
    x = np.array([1.0, np.inf, np.nan, -2.0])
    _, pullback = vjp(NUMPY, lambda ops, x: ops.where(ops.isfinite(x), 3 * ops.where(ops.isfinite(x), x, 0.0), x), [x])
    np.testing.assert_array_equal(pullback(np.ones(4)), [[3, 1, 1, 3]])


def test_functions_of_numpy_by_their_own_names() -> None:
    """Those that NumPy dispatches; others are refused, as they would lose the gradient."""
    x, ones = np.array([0.5, 2.0]), np.ones(2)

    def function(ops: Any, x: Any) -> Any:
        return ones * np.abs(np.exp(x)) / np.multiply(x, x) - ones / x

    found = vjp(NUMPY, function, [x])[1](ones)[0]
    np.testing.assert_allclose(found, np.exp(x) * (x - 2) / x**3 + 1 / x**2)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("cumsum", lambda ops, x: ops.cumsum(x)),
        ("power", lambda ops, x: 2.0**x),
        ("arctan", lambda ops, x: np.arctan(x)),
        ("exp with out=", lambda ops, x: np.exp(x, out=np.zeros(3))),
        ("add.reduce", lambda ops, x: np.add.reduce(x)),
        ("asarray", lambda ops, x: np.where(x > 0, x, 0.0)),
        ("matmul of a vector", lambda ops, x: x @ np.ones((3, 2))),
        ("where", lambda ops, x: ops.where(True, a=x, b=0.0)),
    ],
)
def test_an_unknown_operation_is_an_error_that_names_it(name: str, function: Any) -> None:
    with pytest.raises(ats.FrameworkError, match=f"score: .*known in NumPy, got '{name}'. Hint: write `tile_gradient"):
        vjp(NUMPY, function, [np.ones(3)])


@dataclass(frozen=True, eq=False)
class _Laplace(ats.Dot.__base__):
    """A user's subclass of `Score` with a form of its own, and a pullback that is no longer called."""

    rate: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.matmul(query, ops.matrix_transpose(key)) * self.rate

    def lower(self, ops: Any, query: Any, key: Any) -> Any:
        return ats.Dot().lower(ops, query * self.rate, key)

    def lower_pullback(self, ops: Any, query: Any, key: Any) -> Any:
        raise AssertionError("called")

    def check(self, dim: int, key_dim: int) -> None: ...

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return 1


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: ats.SoftCap(x, 3.0), lambda x: 2 * x + ats.Dot()])
def test_a_lowering_of_a_users_own(wrap: Any) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, n, 3)) for n in (5, 7, 7))
    rate = np.array(0.5)
    out, pullback = ats.attend_vjp(query, key, value, score=wrap(_Laplace(rate)))
    found = pullback(out)
    leaves = [torch.tensor(x, requires_grad=True) for x in (query, key, value, rate)]
    exact = ats.attend(*leaves[:3], score=wrap(_Laplace(leaves[3])), kernel="dense")
    wanted = torch.autograd.grad(exact, leaves, exact.detach())
    for x, y in zip((*found[:3], *found.score.values()), wanted, strict=True):
        np.testing.assert_allclose(x, y.numpy(), rtol=1e-9, atol=1e-12)
