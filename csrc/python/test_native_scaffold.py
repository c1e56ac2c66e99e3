"""The native module's outside: targets, threads, fork, strides, and that no wrong call gets through to the kernels.

What the kernels compute is held to NumPy on small cases only; the oracle tests do the rest.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

native: Any = pytest.importorskip("attnscore._native", reason="installed without the native kernels")

STATISTICS = native.STATISTICS
OPTIONS: dict[str, Any] = {
    "form": "inner",
    "activation": "tanh",
    "negative_slope": 0.2,
    "scale": 0.5,
    "score_dtype": "float32",
    "value_dtype": "float32",
}
BITS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TOLERANCE = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture(autouse=True)
def restored():
    """Target and thread count are the process's own: leave them as they were."""
    target, threads = native.current_target(), native.get_num_threads()
    yield
    native.select(target)
    native.set_num_threads(threads)


# ---- NumPy's version ----


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
        **options: Any,
    ) -> None:
        self.options = OPTIONS | options
        rng = np.random.default_rng(1)
        self.grid = (*lead, head, group)
        self.key_grid = (*lead, head, key_group)
        additive = self.options["form"] == "additive"
        self.sum = np.dtype("f8" if self.options["value_dtype"] == "float64" else "f4")

        def draw(dtype: str, *shape: int) -> np.ndarray:
            x = rng.standard_normal(shape)
            return x.astype(BITS[dtype]).view(np.uint16) if dtype in BITS else x.astype(dtype)

        score, value = self.options["score_dtype"], self.options["value_dtype"]
        self.query = draw(score, *self.grid, query_len, dim)
        self.key = draw(score, *self.key_grid, key_len, dim)
        self.value = draw(value, *self.key_grid, key_len, value_dim)
        self.grad_out = draw(value, *self.grid, query_len, value_dim)
        self.grad_total = rng.standard_normal((*self.grid, query_len)).astype(self.sum)
        self.weights = draw(self.sum.name, dim) if additive else None
        self.start = self.stop = None
        if intervals:
            ends = np.sort(rng.integers(0, key_len + 1, (lead[0], query_len, 2)), axis=-1)
            self.start, self.stop = (np.ascontiguousarray(ends[..., i]) for i in (0, 1))

    def exact(self, name: str) -> np.ndarray:
        dtype = self.options["value_dtype" if name in {"value", "grad_out", "out"} else "score_dtype"]
        x = getattr(self, name)
        return (x.view(BITS[dtype]) if dtype in BITS else x).astype(np.float64)

    def seen(self) -> np.ndarray:
        query_len, key_len = self.query.shape[-2], self.key.shape[-2]
        if self.start is None:
            return np.ones((query_len, key_len), bool)
        j = np.arange(key_len)
        seen = (self.start[..., None] <= j) & (j < self.stop[..., None])
        return seen.reshape(len(seen), *(1,) * (len(self.grid) - 1), query_len, key_len)

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores, and the activation's derivative times its weights (additive)."""
        q, k = self.exact("query"), self.exact("key")
        if self.weights is None:
            return q @ k.swapaxes(-1, -2) * self.options["scale"], np.zeros(0)
        self.hidden = q[..., :, None, :] + k[..., None, :, :]
        y, slope = activated(self.options["activation"], self.hidden, self.options["negative_slope"])
        self.activations = y
        return y @ self.weights.astype(float), slope * self.weights

    def run(self, threads: int = 1, **change: Any) -> None:
        query_len, value_dim = self.query.shape[-2], self.value.shape[-1]
        self.out = np.full((*self.grid, query_len, value_dim), 77, self.value.dtype)
        self.statistics = np.full((*self.grid, query_len, STATISTICS), 77, self.sum)
        names = ("query", "key", "value", "out", "statistics", "start", "stop", "weights")
        arrays = {name: change.pop(name, getattr(self, name)) for name in names}
        native.forward(**arrays, **(self.options | {"full_statistics": True, "threads": threads} | change))

    def run_backward(self, threads: int = 1, **change: Any) -> None:
        query_len, key_len, dim, value_dim = *self.query.shape[-2:-1], *self.key.shape[-2:], self.value.shape[-1]
        with np.errstate(divide="ignore"):
            log_total = np.log(self.statistics[..., 1])
        self.log_total = np.where(self.statistics[..., 1] == 0, np.inf, log_total).astype(self.sum)
        self.top = np.where(np.isinf(self.statistics[..., 0]), 0, self.statistics[..., 0]).astype(self.sum)
        self.shift = self.grad_total - (self.exact("grad_out") * self.exact("out")).sum(-1)
        self.shift = self.shift.astype(self.sum)
        self.grad_query = np.zeros((*self.grid, query_len, dim), self.sum)
        self.grad_key = np.zeros((*self.key_grid, key_len, dim), self.sum)
        self.grad_value = np.zeros((*self.key_grid, key_len, value_dim), self.sum)
        self.grad_weights = None if self.weights is None else np.zeros((*self.key_grid, dim), self.sum)
        names = ("query", "key", "value", "grad_out", "top", "log_total", "shift", "start", "stop", "weights")
        names += ("grad_query", "grad_key", "grad_value", "grad_weights")
        arrays = {name: change.pop(name, getattr(self, name)) for name in names}
        options = self.options | {"grad_dtype": self.options["value_dtype"], "threads": threads} | change
        native.backward(**arrays, **options)

    def check(self) -> None:
        """Forward and backward against NumPy in float64."""
        self.run()
        tolerance = TOLERANCE[self.options["value_dtype"]] * 10
        scores, slopes = self.scores()
        seen = np.broadcast_to(self.seen(), scores.shape)
        some = seen.any(-1, keepdims=True)
        top = np.where(some, np.max(scores, axis=-1, initial=-np.inf, where=seen, keepdims=True), 0)
        e = np.where(seen, np.exp(scores - top), 0)
        total = e.sum(-1, keepdims=True)
        p = e / np.where(some, total, 1)
        out = p @ self.exact("value")
        close(self.exact("out"), out, tolerance)
        close(self.statistics[..., 1], total[..., 0], tolerance)
        close(np.where(some[..., 0], self.statistics[..., 0], 0), top[..., 0], tolerance)
        close(self.statistics[..., 4], seen.sum(-1), 0)

        self.run_backward()
        grad_out = self.exact("grad_out")
        shift = self.grad_total.astype(float) - (grad_out * self.exact("out")).sum(-1)
        ds = p * (grad_out @ self.exact("value").swapaxes(-1, -2) + shift[..., None])
        close(self.grad_value, self.summed(p.swapaxes(-1, -2) @ grad_out), tolerance)
        if self.weights is None:
            ds = ds * self.options["scale"]
            close(self.grad_query, ds @ self.exact("key"), tolerance)
            close(self.grad_key, self.summed(ds.swapaxes(-1, -2) @ self.exact("query")), tolerance)
        else:
            du = ds[..., None] * slopes
            close(self.grad_query, du.sum(-2), tolerance)
            close(self.grad_key, self.summed(du.sum(-3)), tolerance)
            close(self.grad_weights, self.summed((ds[..., None] * self.activations).sum((-2, -3)), axis=-2), tolerance)

    def summed(self, x: np.ndarray, axis: int = -3) -> np.ndarray:
        """Over the query heads that share a key head."""
        return x.sum(axis, keepdims=True) if self.key_grid[-1] == 1 else x


def close(found: Any, expected: np.ndarray, tolerance: float) -> None:
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


# ---- targets and threads ----


def test_targets_end_with_the_one_that_runs_everywhere() -> None:
    names = native.targets()
    assert names[-1] == "portable"
    assert names == [name for name in ("avx512", "avx2", "portable") if name in names]
    assert native.current_target() in names


@pytest.mark.parametrize("target", native.targets())
def test_every_target_can_be_selected(target: str) -> None:
    native.select(target)
    assert native.current_target() == target
    Case(intervals=True).check()
    Case(form="additive", intervals=True).check()


def test_a_target_that_does_not_exist() -> None:
    before = native.current_target()
    with pytest.raises(ValueError, match=r"name: expected a target .*'portable', got 'sse9'"):
        native.select("sse9")
    assert native.current_target() == before


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import attnscore._native as native\n{code}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_environment_forces_a_target() -> None:
    done = in_new_process("print(native.current_target())", ATTNSCORE_TARGET="portable")
    assert (done.stdout, done.stderr) == ("portable\n", "")


def test_a_wrong_target_in_the_environment_is_an_error_at_the_first_use() -> None:
    code = "print(native.targets()[-1], flush=True); native.current_target()"
    done = in_new_process(code, ATTNSCORE_TARGET="sse9")
    assert done.stdout == "portable\n"
    assert "ValueError: environment variable ATTNSCORE_TARGET: expected a target" in done.stderr
    assert "got 'sse9'" in done.stderr
    assert in_new_process("native.select('portable'); native.current_target()", ATTNSCORE_TARGET="sse9").returncode == 0


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("5,2", 5), ("2000000", 1024)])
def test_the_environment_sets_the_threads(text: str, count: int) -> None:
    assert in_new_process("print(native.get_num_threads())", OMP_NUM_THREADS=text).stdout == f"{count}\n"


@pytest.mark.parametrize("text", ["", "many", "0", "-3"])
def test_threads_that_the_environment_does_not_settle(text: str) -> None:
    count = int(in_new_process("print(native.get_num_threads())", OMP_NUM_THREADS=text).stdout)
    assert count == (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def test_set_num_threads() -> None:
    native.set_num_threads(3)
    assert native.get_num_threads() == 3
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"n: expected at least 1 thread, got {wrong}"):
            native.set_num_threads(wrong)
    with pytest.raises(TypeError):
        native.set_num_threads("two")


# ---- the pool ----


def many_tasks() -> Case:
    return Case(lead=(4,), head=4, query_len=70, key_len=90)


def answer(threads: int) -> tuple[np.ndarray, ...]:
    case = many_tasks()
    case.run(threads)
    case.run_backward(threads)
    return case.out, case.statistics, case.grad_query, case.grad_key, case.grad_value


def same(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("threads", [0, 2, 3, 7, 100])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    assert same(answer(threads), answer(1))


def test_many_jobs_in_a_row() -> None:
    """The way in and out of a job, thousands of times: a lost wake-up would hang, a late worker would corrupt."""
    case = Case(query_len=3)
    case.run(1)
    expected = case.out.copy()
    for i in range(3000):
        case.run(2 + i % 3)
        assert np.array_equal(case.out, expected)
        if i % 500 == 0:
            time.sleep(0.01)  # long enough for the workers to fall asleep


def test_several_python_threads_at_once() -> None:
    expected, wrong = answer(1), []

    def caller() -> None:
        wrong.extend(i for i in range(20) if not same(answer(3), expected))

    callers = [threading.Thread(target=caller) for _ in range(6)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def child(expected: tuple[np.ndarray, ...], queue: Any) -> None:
    queue.put(all(same(answer(2), expected) for _ in range(3)))


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
# Python warns of exactly what is tested here: a fork from a process that has threads.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_pool_lives_through_fork(busy: bool) -> None:
    expected = answer(2)  # the parent's workers exist now
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            answer(2)

    other = threading.Thread(target=keep_busy)
    if busy:
        other.start()
    try:
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        children = [context.Process(target=child, args=(expected, queue)) for _ in range(6)]
        for process in children:
            process.start()
        assert all(queue.get(timeout=60) for _ in children)
        for process in children:
            process.join(60)
            assert process.exitcode == 0
    finally:
        stop.set()
        if busy:
            other.join()
    assert same(answer(2), expected)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_of_a_fork() -> None:
    expected = answer(2)

    def grandchild() -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if same(answer(2), expected) else 3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    pid = os.fork()
    if pid == 0:
        right = same(answer(2), expected)
        os._exit(grandchild() if right else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_exit_with_workers_asleep_or_awake() -> None:
    code = """
import numpy as np
x = np.ones((1, 8, 1, 64, 16), "f")
out, statistics = np.empty_like(x), np.empty((1, 8, 1, 64, 7), "f")
native.forward(x, x, x, out, statistics, None, None, None, form="inner", activation="tanh", negative_slope=0.0,
               scale=1.0, score_dtype="float32", value_dtype="float32", full_statistics=False, threads=4)
"""
    for pause in ("", "import time; time.sleep(0.05)"):
        done = in_new_process(code + pause)
        assert (done.returncode, done.stderr) == (0, "")


def test_signals_reach_the_main_thread() -> None:
    code = """
import os, signal, time, numpy as np
x = np.ones((1, 8, 1, 64, 16), "f")
out, statistics = np.empty_like(x), np.empty((1, 8, 1, 64, 7), "f")
native.forward(x, x, x, out, statistics, None, None, None, form="inner", activation="tanh", negative_slope=0.0,
               scale=1.0, score_dtype="float32", value_dtype="float32", full_statistics=False, threads=4)
signal.signal(signal.SIGALRM, lambda *_: print("rang"))
signal.setitimer(signal.ITIMER_REAL, 0.1)
start = time.monotonic()
signal.pause()
assert time.monotonic() - start < 10
"""
    done = in_new_process(code)
    assert (done.stdout, done.stderr) == ("rang\n", "")


# ---- shapes ----


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


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu", "leaky_relu"])
def test_activations(activation: str) -> None:
    Case(form="additive", activation=activation).check()


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
@pytest.mark.parametrize("axis", [0, 1, 2, 3, 4])
def test_stride_zero(name: str, axis: int) -> None:
    """An array that repeats itself along an axis, however long it says that the axis is."""
    case = Case(key_group=3)
    x = getattr(case, name)
    setattr(case, name, np.broadcast_to(x.take([0], axis), x.shape))
    case.check()


@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_an_axis_of_length_1_is_broadcast(name: str, axes: tuple[int, ...]) -> None:
    case = Case(key_group=3)
    one = getattr(case, name)
    for axis in axes:
        one = one.take([0], axis)
    setattr(case, name, np.broadcast_to(one, getattr(case, name).shape))
    case.run()
    case.run_backward()
    expected = case.out, case.grad_query, case.grad_key, case.grad_value
    setattr(case, name, one)
    case.run()
    case.run_backward()
    assert same((case.out, case.grad_query, case.grad_key, case.grad_value), expected)


def test_intervals_and_weights_of_their_own() -> None:
    """One interval for all batch rows, and weights per head, backwards in memory: as if written out."""
    case = Case(form="additive", intervals=True, key_group=3)
    assert case.start is not None
    assert case.stop is not None
    rows = case.start[:1], case.stop[:1]
    case.start, case.stop = (np.repeat(x, 2, axis=0) for x in rows)
    weights = np.random.default_rng(2).standard_normal((2, 3, 4)).astype("f4")
    for place in np.ndindex(2, 3):
        case.weights = weights[place]
        case.run()
        case.run_backward()
        whole = [x[:, place[0], place[1]].copy() for x in (case.out, case.grad_query, case.grad_key, case.grad_weights)]
        case.start, case.stop = rows
        case.weights = np.ascontiguousarray(weights[::-1])[::-1]
        case.run()
        case.run_backward()
        own = [x[:, place[0], place[1]] for x in (case.out, case.grad_query, case.grad_key, case.grad_weights)]
        assert same(tuple(whole), tuple(own))


def test_statistics_on_request() -> None:
    case = Case()
    case.run()
    full = case.statistics.copy()
    case.run(full_statistics=False)
    assert np.array_equal(case.statistics[..., :2], full[..., :2])
    assert (case.statistics[..., 2:] == 77).all()
    s, _ = case.scores()
    e = np.exp(s - s.max(-1, keepdims=True))
    rows = [
        s.max(-1),
        e.sum(-1),
        (e * (s - s.max(-1, keepdims=True))).sum(-1),
        (e**2).sum(-1),
        np.full(s.shape[:-1], 7),
    ]
    rows += [s.mean(-1), s.var(-1) * 7]
    close(full, np.stack(rows, axis=-1), 1e-5)


# ---- wrong calls ----

F4 = np.float32
WRONG_FORWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": None}, ValueError, "query: expected an array, got None"),
    ({"query": [1, 2]}, TypeError, "query: expected a NumPy array of float32 .* got .*list"),
    ({"query": np.zeros((2, 2, 3, 5, 4))}, TypeError, "query: expected dtype float32, got float64"),
    ({"query": np.zeros((2, 2, 3, 5, 4), ">f4")}, TypeError, "query: expected a NumPy array of float32"),
    ({"query": np.zeros((2, 2, 3, 5, 4), "c8")}, TypeError, "query: expected dtype float32, got"),
    ({"query": np.zeros((2, 2, 3, 5, 4), object)}, TypeError, "query: expected a NumPy array"),
    ({"query": np.zeros((2, 2, 3, 6, 4), F4)}, ValueError, r"query: expected shape \(2, 2, 3, 5, 4\)|query: .*6, 4\)"),
    ({"query": np.zeros((2, 2, 2, 5, 4), F4)}, ValueError, "query: expected shape"),
    ({"query": np.zeros((2, 2, 5, 4), F4)}, ValueError, "query: expected at least 5 axes"),
    ({"query": np.zeros((1, 2, 2, 3, 5, 4), F4)}, ValueError, "query: expected 5 axes, as out"),
    ({"query": np.zeros((2, 2, 3, 5, 0), F4)}, ValueError, r"key: expected shape \(2, 2, 3, 7, 0\)"),
    ({"key": np.zeros((2, 2, 1, 7, 5), F4)}, ValueError, r"key: expected shape \(2, 2, 3, 7, 4\).*\(2, 2, 1, 7, 5\)"),
    ({"value": np.zeros((2, 2, 1, 8, 6), F4)}, ValueError, "value: expected shape"),
    ({"value": np.zeros((2, 2, 1, 7, 5), F4)}, ValueError, "out: expected shape"),
    ({"value": np.zeros(8, F4)}, ValueError, "value: expected at least 5 axes"),
    ({"value": np.float32(1)}, (TypeError, ValueError), "value: expected"),
    ({"out": np.zeros((2, 2, 3, 5, 6), F4)[..., ::-1]}, ValueError, "out: expected a C-contiguous array"),
    ({"out": np.zeros((2, 2, 3, 6, 5), F4).swapaxes(-1, -2)}, ValueError, "out: expected a C-contiguous array"),
    ({"out": np.broadcast_to(F4(0), (2, 2, 3, 5, 6))}, TypeError, "out: expected a writable NumPy array"),
    ({"out": np.zeros((2, 2, 3, 5, 6))}, TypeError, "out: expected dtype float32, got float64"),
    ({"out": np.zeros((1, 2, 3, 5, 6), F4)}, ValueError, "query: expected shape"),
    ({"out": None}, ValueError, "out: expected an array, got None"),
    ({"statistics": np.zeros((2, 2, 3, 5, 2), F4)}, ValueError, r"statistics: expected shape \(2, 2, 3, 5, 7\)"),
    ({"statistics": np.zeros((2, 2, 3, 5, 7))}, TypeError, "statistics: expected dtype float32"),
    ({"start": np.zeros((2, 5), np.int64)}, ValueError, "stop: expected start and stop together, got None"),
    ({"stop": np.zeros((2, 5), np.int64)}, ValueError, "start: expected start and stop together, got None"),
    (
        {"start": np.zeros((2, 5), np.int32), "stop": np.zeros((2, 5), np.int64)},
        TypeError,
        "start: expected dtype int64",
    ),
    ({"start": np.zeros((3, 5), int), "stop": np.zeros((3, 5), int)}, ValueError, r"start: expected shape \(2, 5\)"),
    ({"start": np.zeros((2, 4), int), "stop": np.zeros((2, 4), int)}, ValueError, r"start: expected shape \(2, 5\)"),
    ({"start": np.zeros(5, int), "stop": np.zeros(5, int)}, ValueError, r"start: expected shape \(2, 5\)"),
    ({"start": np.zeros((1, 5), int), "stop": np.zeros((2, 5), int)}, ValueError, "stop: expected the shape of start"),
    (
        {"start": np.full((2, 5), -1), "stop": np.zeros((2, 5), int)},
        ValueError,
        "start: expected numbers from 0, got -1",
    ),
    ({"start": np.zeros((2, 5), int), "stop": np.full((2, 5), 8)}, ValueError, "stop: expected .* key_len = 7, got 8"),
    (
        {"start": np.full((2, 5), 5), "stop": np.full((2, 5), 4)},
        ValueError,
        "stop: expected numbers from start on, got 4 with start 5",
    ),
    ({"start": np.zeros((2, 10), int)[:, ::2], "stop": np.zeros((2, 5), int)}, ValueError, "start: .*C-contiguous"),
    ({"weights": np.zeros(4, F4)}, ValueError, "weights: expected None with form 'inner'"),
    ({"form": "additive"}, ValueError, "weights: expected an array, got None"),
    ({"form": "additive", "weights": np.zeros(4)}, TypeError, "weights: expected dtype float32"),
    ({"form": "additive", "weights": np.zeros(5, F4)}, ValueError, r"weights: expected shape \(4,\), got \(5,\)"),
    ({"form": "additive", "weights": np.zeros(8, F4)[::2]}, ValueError, "weights: expected a C-contiguous"),
    ({"form": "additive", "weights": np.zeros((3, 3, 4), F4)}, ValueError, r"weights: expected shape \(2, 3, 4\)"),
    ({"form": "additive", "weights": np.zeros((1, 4), F4)}, ValueError, r"weights: expected shape \(2, 3, 4\)"),
    ({"form": "cubic"}, ValueError, "form: expected one of 'inner', 'additive', got 'cubic'"),
    ({"activation": "gelu"}, ValueError, "activation: expected one of .*, got 'gelu'"),
    ({"score_dtype": "int8"}, ValueError, "score_dtype: expected one of .*, got 'int8'"),
    ({"value_dtype": "float"}, ValueError, "value_dtype: expected one of .*, got 'float'"),
    ({"value_dtype": "float64"}, ValueError, "value_dtype: float64 needs score_dtype float64"),
    ({"threads": -1}, ValueError, "threads: expected 0"),
    ({"threads": "two"}, TypeError, "incompatible function arguments"),
    ({"scale": "x"}, TypeError, "incompatible function arguments"),
]


def names(table: list[tuple[dict[str, Any], type[Exception], str]]) -> list[str]:
    return [f"{i} {' '.join(change)}" for i, (change, _, _) in enumerate(table)]


@pytest.mark.parametrize(("change", "error", "message"), WRONG_FORWARD, ids=names(WRONG_FORWARD))
def test_wrong_forward_calls(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Case().run(**change)


WRONG_BACKWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"grad_query": np.zeros((2, 2, 1, 5, 4), F4)}, ValueError, "query: expected shape"),
    ({"grad_query": np.zeros((2, 2, 3, 5, 5), F4)}, ValueError, "grad_query: expected shape"),
    ({"grad_query": None}, ValueError, "grad_query: expected an array, got None"),
    ({"grad_query": np.zeros((2, 2, 3, 5, 4))}, TypeError, "grad_query: expected dtype float32"),
    ({"grad_query": np.zeros((2, 2, 3, 4, 5), F4).swapaxes(-1, -2)}, ValueError, "grad_query: expected a C-contig"),
    ({"grad_out": np.zeros((2, 2, 3, 5, 5), F4)}, ValueError, "grad_out: expected shape"),
    ({"grad_out": np.zeros((2, 3, 5, 6), F4)}, ValueError, "grad_out: expected shape"),
    ({"grad_out": None}, ValueError, "grad_out: expected an array"),
    ({"top": np.zeros((2, 2, 3, 4), F4)}, ValueError, "top: expected shape"),
    ({"log_total": np.zeros((2, 2, 3, 5))}, TypeError, "log_total: expected dtype float32"),
    ({"shift": np.zeros((2, 2, 5, 3), F4).swapaxes(-1, -2)}, ValueError, "shift: expected a C-contiguous"),
    ({"shift": None}, ValueError, "shift: expected an array"),
    ({"grad_key": np.zeros((2, 2, 2, 7, 4), F4)}, ValueError, "grad_key: expected shape"),
    ({"grad_key": np.zeros((2, 2, 3, 7, 4), F4)}, ValueError, "grad_value: expected shape"),
    ({"grad_value": np.zeros((2, 2, 3, 7, 6), F4)}, ValueError, "grad_value: expected shape"),
    ({"grad_key": np.zeros(3, F4)}, ValueError, "grad_key: expected 5 axes"),
    ({"grad_key": None}, ValueError, "grad_key: expected an array"),
    ({"grad_weights": np.zeros((2, 2, 1, 4), F4)}, ValueError, "grad_weights: expected None with form 'inner'"),
    ({"key": np.zeros((2, 2, 3, 7, 4), F4)}, ValueError, "key: expected one key head per group"),
    ({"value": np.zeros((2, 2, 3, 7, 6), F4)}, ValueError, "value: expected one key head per group"),
    ({"grad_dtype": "float8"}, ValueError, "grad_dtype: expected one of"),
    ({"grad_dtype": "bfloat16"}, TypeError, "grad_out: expected dtype uint16, got float32"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG_BACKWARD, ids=names(WRONG_BACKWARD))
def test_wrong_backward_calls(change: dict[str, Any], error: type[Exception], message: str) -> None:
    case = Case()
    case.run()
    with pytest.raises(error, match=message):
        case.run_backward(**change)


def test_wrong_gradients_of_weights() -> None:
    case = Case(form="additive")
    case.run()
    with pytest.raises(ValueError, match="grad_weights: expected an array, got None"):
        case.run_backward(grad_weights=None)
    with pytest.raises(ValueError, match="grad_weights: expected shape"):
        case.run_backward(grad_weights=np.zeros((2, 2, 3, 4), F4))
    with pytest.raises(ValueError, match="weights: expected one row per group, as grad_weights has"):
        case.run_backward(weights=np.zeros((2, 3, 4), F4))


def test_misaligned_arrays_are_refused() -> None:
    case = Case()
    whole = np.zeros(case.query.nbytes + 1, np.uint8)
    query = whole[1:].view(F4).reshape(case.query.shape)
    with pytest.raises(ValueError, match="query: expected elements at multiples of their size"):
        case.run(query=query)
    record = np.zeros(case.query.shape, np.dtype([("flag", "u1"), ("x", "f4")]))
    with pytest.raises(TypeError, match="query: expected a NumPy array of float32 with strides of whole elements"):
        case.run(query=record["x"])


def test_missing_and_unknown_arguments() -> None:
    with pytest.raises(TypeError):
        native.forward()
    with pytest.raises(TypeError):
        Case().run(colour="red")
