"""What the tests of the native module share: the module itself, calls drawn at random, and NumPy's version of them.

What the kernels compute is held to NumPy on small cases only; the tests of every score, mask and kernel do the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnscore as ats
from attnscore.base.cache import BoundedCache
from attnscore.kernels.native.marshalling import STATISTICS
from noted_plans import NotedPlan

BITS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TOLERANCE = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 1e-2, "float16": 2e-3}
INPUTS = ("query", "key", "value", "query_bias", "key_bias", "bias", "mask", "query_ids", "key_ids", "start", "stop")
INPUTS += ("w_v", "sink", "scales")
OPTIONS = {
    "form": "inner",
    "activation": "tanh",
    "negative_slope": 0.2,
    "scale": 0.5,
    "caps": (),
    "score_dtype": "float32",
    "value_dtype": "float32",
    "bias_dtype": "float32",
    "dropout": 0.0,
    "first_row": 0,
    "all_rows": 0,
    "seed": 0,
}
ROWS = ("out", "row_max", "log_denom", "entropy", "scores", "attention_weights", "grad_out", "grad_log_sum_exp")
ROWS += ("grad_entropy", "grad_attention_scores", "grad_attention_weights")
GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_query_bias", "grad_key_bias", "grad_bias", "grad_w_v")
GRADIENTS += ("grad_sink", "grad_scales")


def native_module() -> Any:
    """The module; without it the tests fail, or are skipped where ATTNSCORE_NO_NATIVE=1 says that this is meant."""
    works = ats.available()["kernels"]["native"]
    if not works:
        if os.environ.get("ATTNSCORE_NO_NATIVE") == "1":
            pytest.skip(str(works), allow_module_level=True)
        pytest.fail(f"{works}; ATTNSCORE_NO_NATIVE=1 says that this is meant", pytrace=False)
    from attnscore import _native

    return _native


native = native_module()


def activated(name: str, u: np.ndarray, negative_slope: float) -> tuple[np.ndarray, np.ndarray]:
    """Its value and its derivative."""
    if name == "tanh":
        return np.tanh(u), 1 - np.tanh(u) ** 2
    if name == "sigmoid":
        y = 1 / (1 + np.exp(-u))
        return y, y * (1 - y)
    slope = np.where(u > 0, 1.0, negative_slope if name == "leaky_relu" else 0.0)
    return u * slope, slope


class Case:
    """Arrays of one call, drawn at random, and what must come out."""

    def __init__(
        self,
        lead: tuple[int, ...] = (2,),
        head: int = 2,
        group: int = 3,
        query_len: int = 5,
        key_len: int = 7,
        dim: int = 4,
        value_dim: int = 6,
        key_group: int = 1,
        intervals: bool = False,
        saves_scores: bool = False,
        matrix: str | None = None,
        **options: Any,
    ) -> None:
        self.options = OPTIONS | options
        rng = np.random.default_rng(1)
        self.grid = (*lead, head, group)
        self.key_grid = (*lead, head, key_group)
        self.sum = np.dtype("f8" if self.options["value_dtype"] == "float64" else "f4")

        def draw(dtype: str, *shape: int) -> np.ndarray:
            x = rng.standard_normal(shape)
            return x.astype(BITS[dtype]).view(np.uint16) if dtype in BITS else x.astype(dtype)

        score, value = self.options["score_dtype"], self.options["value_dtype"]
        self.query = draw(score, *self.grid, query_len, dim)
        self.key = draw(score, *self.key_grid, key_len, dim)
        self.value = draw(value, *self.key_grid, key_len, value_dim)
        self.grad_out = draw(value, *self.grid, query_len, value_dim)
        self.grad_log_sum_exp = rng.standard_normal((*self.grid, query_len, 1)).astype(self.sum)
        self.w_v = draw(self.sum.name, dim) if self.options["form"] == "additive" else None
        self.start = self.stop = None
        self.query_bias = self.key_bias = self.bias = self.mask = self.query_ids = self.key_ids = self.sink = None
        self.scales = None
        self.entropy = self.grad_entropy = None
        self.saves_scores, self.matrix = saves_scores, matrix
        self.attention_scores = self.attention_weights = None
        self.grad_attention_scores = self.grad_attention_weights = None
        if matrix is not None:
            pairs = rng.standard_normal((*self.grid, query_len, key_len)).astype(self.sum)
            setattr(self, f"grad_attention_{matrix}", pairs)
        if intervals:
            ends = np.sort(rng.integers(0, key_len + 1, (lead[0], query_len, 2)), axis=-1)
            self.start, self.stop = (np.ascontiguousarray(ends[..., i]) for i in (0, 1))

    def exact(self, name: str) -> np.ndarray:
        dtype = self.options["value_dtype" if name in {"value", "grad_out", "out"} else "score_dtype"]
        x = getattr(self, name)
        return (x.view(BITS[dtype]) if dtype in BITS else x).astype(np.float64)

    def seen(self) -> np.ndarray:
        query_len, key_len = self.query.shape[-2], self.key.shape[-2]
        if self.start is None or self.stop is None:
            return np.ones((query_len, key_len), bool)
        j = np.arange(key_len)
        seen = (self.start[..., None] <= j) & (j < self.stop[..., None])
        return seen.reshape(len(seen), *(1,) * (len(self.grid) - 1), query_len, key_len)

    def exact_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores, and the activation's derivative times its weights (additive)."""
        q, k = self.exact("query"), self.exact("key")
        if self.w_v is None:
            return q @ k.swapaxes(-1, -2) * self.options["scale"], np.zeros(0)
        self.hidden = q[..., :, None, :] + k[..., None, :, :]
        y, slope = activated(self.options["activation"], self.hidden, self.options["negative_slope"])
        self.activations = y
        return y @ self.w_v.astype(float), slope * self.w_v

    def _words(self, change: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        score = tuple(change.pop(name, option) for name, option in self.options.items())
        return score, tuple(change.pop(name, getattr(self, name)) for name in INPUTS)

    def run(self, threads: Any = 1, **change: Any) -> None:
        rows = (*self.grid, self.query.shape[-2])
        self.out = np.full((*rows, self.value.shape[-1]), 77, self.value.dtype)
        self.row_max, self.log_denom, *statistics = np.full((2 + len(STATISTICS), *rows, 1), 77, self.sum)
        self.statistics = dict(zip(STATISTICS, statistics, strict=True))
        score, inputs = self._words(change)
        self.scores = np.full((*rows, self.key.shape[-2]), np.nan, self.sum) if self.saves_scores else None
        if self.matrix is not None:
            setattr(self, f"attention_{self.matrix}", np.full((*rows, self.key.shape[-2]), 77, self.sum))
        filled = {"out": self.out, "row_max": self.row_max, "log_denom": self.log_denom, "scores": self.scores}
        filled |= {"attention_scores": self.attention_scores, "attention_weights": self.attention_weights}
        filled |= self.statistics | {"log_sum_exp": None}
        native.forward(score, inputs, [change.pop(name, x) for name, x in filled.items()], threads)
        assert not change

    def run_backward(self, threads: int = 1, **change: Any) -> None:
        query_len, key_len, dim, value_dim = *self.query.shape[-2:-1], *self.key.shape[-2:], self.value.shape[-1]
        self.grad_query = np.zeros((*self.grid, query_len, dim), self.sum)
        self.grad_key = np.zeros((*self.key_grid, key_len, dim), self.sum)
        self.grad_value = np.zeros((*self.key_grid, key_len, value_dim), self.sum)
        self.grad_w_v = None if self.w_v is None else np.zeros((*self.key_grid, dim), self.sum)
        self.grad_query_bias = self.grad_key_bias = self.grad_bias = self.grad_sink = self.grad_scales = None
        score, inputs = self._words(change)
        grad_dtype = change.pop("grad_dtype", self.options["value_dtype"])
        rows, gradients = ([change.pop(n, getattr(self, n)) for n in names] for names in (ROWS, GRADIENTS))
        native.backward(score, inputs, rows, grad_dtype, gradients, threads)
        assert not change

    def check(self) -> None:
        """Forward and backward against NumPy in float64."""
        self.run()
        tolerance = TOLERANCE[self.options["value_dtype"]] * 10
        scores, slopes = self.exact_scores()
        seen = np.broadcast_to(self.seen(), scores.shape)
        some = seen.any(-1, keepdims=True)
        top = np.where(some, np.max(scores, axis=-1, initial=-np.inf, where=seen, keepdims=True), 0)
        e = np.where(seen, np.exp(scores - top), 0)
        total = e.sum(-1, keepdims=True)
        p = e / np.where(some, total, 1)
        close(self.exact("out"), p @ self.exact("value"), tolerance)
        self.check_statistics(scores, seen, p, tolerance)
        close(self.row_max, top, tolerance)
        close(np.exp(self.log_denom), total, tolerance)

        self.run_backward()
        grad_out = self.exact("grad_out")
        shift = self.grad_log_sum_exp.astype(float) - (grad_out * self.exact("out")).sum(-1, keepdims=True)
        ds = p * (grad_out @ self.exact("value").swapaxes(-1, -2) + shift)
        close(self.grad_value, self.summed(p.swapaxes(-1, -2) @ grad_out), tolerance)
        if self.w_v is None:
            ds = ds * self.options["scale"]
            close(self.grad_query, ds @ self.exact("key"), tolerance)
            close(self.grad_key, self.summed(ds.swapaxes(-1, -2) @ self.exact("query")), tolerance)
        else:
            du = ds[..., None] * slopes
            close(self.grad_query, du.sum(-2), tolerance)
            close(self.grad_key, self.summed(du.sum(-3)), tolerance)
            close(self.grad_w_v, self.summed((ds[..., None] * self.activations).sum((-2, -3)), axis=-2), tolerance)

    def check_statistics(self, scores: np.ndarray, seen: np.ndarray, p: np.ndarray, tolerance: float) -> None:
        count = np.maximum(seen.sum(-1, keepdims=True), 1)
        mean = np.where(seen, scores, 0).sum(-1, keepdims=True) / count
        log_p = np.log(np.where(p > 0, p, 1))
        ends = [(0, 0)] * (scores.ndim - 1) + [(0, 1)]
        expected = {
            "max_score": np.max(scores, axis=-1, initial=-np.inf, where=seen, keepdims=True),
            "mean_score": mean,
            "var_score": np.where(seen, (scores - mean) ** 2, 0).sum(-1, keepdims=True) / count,
            "entropy": -(p * log_p).sum(-1, keepdims=True),
            "max_weight": p.max(-1, initial=0, keepdims=True),
            "sum_sq_weights": (p * p).sum(-1, keepdims=True),
            "sum_weights": p.sum(-1, keepdims=True),
            "min_score": np.min(scores, axis=-1, initial=np.inf, where=seen, keepdims=True),
            "argmax_key": np.pad(np.where(seen, scores, -np.inf), ends, constant_values=-np.inf).argmax(-1)[..., None],
        }
        some = seen.any(-1, keepdims=True)
        empty = {"max_score": -np.inf, "min_score": np.inf, "argmax_key": -1}
        for name, x in self.statistics.items():
            close(np.where(some, x, 0), np.where(some, expected[name], 0), tolerance)
            assert (x[~some] == empty.get(name, 0)).all(), name

    def summed(self, x: np.ndarray, axis: int = -3) -> np.ndarray:
        """Over the query heads that share a KV head."""
        return x.sum(axis, keepdims=True) if self.key_grid[-1] == 1 else x

    def results(self) -> tuple[np.ndarray, ...]:
        return self.out, *self.statistics.values(), self.grad_query, self.grad_key, self.grad_value


def close(found: Any, expected: np.ndarray, tolerance: float) -> None:
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


def same(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))


def answer(threads: int, **options: Any) -> tuple[np.ndarray, ...]:
    """Results of a call forward and backward."""
    case = Case(**options)
    case.run(threads)
    case.run_backward(threads)
    return case.results()


def in_threads(count: int, work: Callable[[int], Any]) -> None:
    """Run ``work(i)`` in so many threads of Python at once, and wait for all."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, "-c", code], os.environ | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


class NotedModule:
    """The native module, whose calls and runs of plans are noted: which, the arguments, and those of a plan's run."""

    use_openmp = native.use_openmp

    def __init__(self, note: Callable[[str, Any, Any], None]) -> None:
        self.note = note

    def forward(self, *arguments: Any) -> None:
        self.note("forward", arguments, ())
        native.forward(*arguments)

    def backward(self, *arguments: Any) -> None:
        self.note("backward", arguments, ())
        native.backward(*arguments)

    def plan_forward(self, *arguments: Any) -> NotedPlan:
        return NotedPlan(native.plan_forward(*arguments), lambda run: self.note("forward", arguments, run))

    def plan_decoding(self, *arguments: Any) -> NotedPlan:
        return NotedPlan(native.plan_decoding(*arguments), lambda run: self.note("forward", arguments[:3], run))

    def plan_backward(self, *arguments: Any) -> NotedPlan:
        return NotedPlan(native.plan_backward(*arguments), lambda run: self.note("backward", arguments, run))


def note_calls(monkeypatch: pytest.MonkeyPatch, note: Callable[[str, Any, Any], None]) -> None:
    """Have the calls of this test noted, which finds no plan of an earlier test."""
    for module in ("in_memory", "plan"):
        monkeypatch.setattr(f"attnscore.kernels.native.{module}._native", NotedModule(note))
    monkeypatch.setattr("attnscore.plans.plan.PLANS", BoundedCache())
