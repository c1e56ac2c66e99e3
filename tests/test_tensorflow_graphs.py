"""Native kernels inside TensorFlow's graphs: that they run there, where they must not, and what leaves the process.

Graphs against plain calls, which ``test_every_framework.py`` holds to the oracle; `--products` runs the whole table.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import attnscore as ats
from attnscore.kernels import tiling
from attnscore.kernels.native import in_memory, plan
from cases import DTYPES, in_turn, needs_native
from covering import some
from harness import EXTRAS, make_call
from noted_plans import NotedPlan

TURNS = in_turn(DTYPES, tuple(EXTRAS))
RNG = np.random.default_rng(0)


class Counted:
    """The native module, counting."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls = [0, 0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forward(self, *arguments: Any) -> Any:
        self.calls[0] += 1
        return self._module.forward(*arguments)

    def backward(self, *arguments: Any) -> Any:
        self.calls[1] += 1
        return self._module.backward(*arguments)

    def plan_forward(self, *arguments: Any) -> Any:
        return self._counting(0, self._module.plan_forward(*arguments))

    def plan_backward(self, *arguments: Any) -> Any:
        return self._counting(1, self._module.plan_backward(*arguments))

    def _counting(self, direction: int, plan: Any) -> Any:
        def count(arguments: Any) -> None:
            self.calls[direction] += 1

        return NotedPlan(plan, count)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the native forward and backward ran."""
    counted = Counted(in_memory._native)
    for module in (in_memory, plan):
        monkeypatch.setattr(module, "_native", counted)
    return counted.calls


@pytest.fixture
def arrays() -> list[Any]:
    shapes = (2, 4, 9, 5), (2, 2, 11, 5), (2, 2, 11, 3)
    return [tf.constant(np.random.default_rng(i).standard_normal(shape)) for i, shape in enumerate(shapes)]


def with_gradients(query: Any, key: Any, value: Any, **arguments: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        out, stats = ats.attend(query, key, value, return_stats=("entropy",), **arguments)
        loss = tf.reduce_sum(out**2) + tf.reduce_sum(stats.entropy**2)
    return [out, *tape.gradient(loss, [query, key, value])]


def close(found: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


# ------------------------------------------------------------------ that they run


@pytest.mark.slow
@some("score,mask,dtype,extras", TURNS[3::40], TURNS)
def test_the_table_in_graphs(score: str, mask: str, dtype: str, extras: str) -> None:
    call = make_call(score, mask, dtype, extras)
    call.check(call.tensorflow(tf.function))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [5, 6, 7])
def test_axes_beyond_those_of_a_softmax_of_tensorflow(axes: int) -> None:
    x = tf.random.normal((2,) * (axes - 3) + (2, 5, 4), seed=1)
    close(tf.function(lambda x: with_gradients(x, x, x))(x), with_gradients(x, x, x), 1e-5)


# Axes of 1 between others: TensorFlow's operations take 5 axes, after merging neighbours that broadcast alike.
@pytest.mark.parametrize("score", ["scaled_dot", "gaussian", "additive", "with a bias"])
@pytest.mark.parametrize("kernel", ["dense", "streaming"])
@pytest.mark.parametrize("batch", [None, 2, 1])
def test_batch_axes_that_broadcast_apart(score: str, kernel: str, batch: int | None) -> None:
    rng = np.random.default_rng(6)
    # With a `batch`, the graph does not know the first axes. Where it is 1, those of key and mask differ from it.
    first = 2 if batch is None else batch
    shapes = (first, 3, 2, 4, 5, 3), (2, 1, 2, 2, 6, 3), (2 if batch == 2 else 1, 3, 1, 2, 6, 3)
    shapes = *shapes, (1, 3, 1, 4, 1, 6) if score == "with a bias" else (3,)
    *arrays, parameter = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    mask = rng.random((2, 1, 2, 1, 1, 6)) < 0.7

    def call(*arrays: Any, kernel: str = "auto") -> Any:
        if score == "with a bias":
            return ats.attend(*arrays[:3], bias=arrays[3], kernel=kernel)
        named = ats.Additive(arrays[3]) if score == "additive" else score
        return ats.attend(*arrays[:3], score=named, mask=mask, kernel=kernel)

    def with_gradients_of_all(*arrays: Any, kernel: str = "auto") -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = call(*arrays, kernel=kernel)
        return out, tape.gradient(out, arrays, unconnected_gradients="zero")

    signature = [tf.TensorSpec(shape if batch is None or len(shape) == 1 else (None, *shape[1:])) for shape in shapes]
    function = tf.function(partial(with_gradients_of_all, kernel=kernel), input_signature=signature)
    out, grads = function(*arrays, parameter)
    close(grads, with_gradients_of_all(*map(tf.constant, (*arrays, parameter)))[1], 1e-4)
    close(out, call(*arrays, parameter), 1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4)], ids=["batch", "heads"])
def test_an_empty_axis_ends_no_process(shape: tuple[int, ...]) -> None:
    x = tf.zeros(shape)
    assert tf.function(lambda x: ats.attend(x, x, x, kernel="streaming"))(x).shape == shape


@needs_native
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"valid_lens": [7, 0]},
        {"mask": ats.Causal("bottom_right")},
        {"score": "gaussian", "dropout": 0.3, "seed": 5},
        {
            "mask": ats.Causal("bottom_right") | ats.Documents(np.arange(9) % 3, np.arange(11) % 3),
            "dropout": 0.3,
            "seed": 5,
        },
    ],
    ids=["plain", "lengths", "causal", "dropout", "evaluated"],
)
@pytest.mark.slow_rows("lengths", "causal", "plain", "evaluated")
def test_a_graph_calls_native_code(arguments: Any, arrays: Any, calls: list[int]) -> None:
    compiled = tf.function(lambda *x: with_gradients(*x, **arguments))
    found = compiled(*arrays)
    assert calls == [1, 1]
    compiled(*arrays)
    assert calls == [2, 2]
    close(found, with_gradients(*arrays, **arguments, kernel="streaming"))


@needs_native
def test_a_function_of_indices_is_not_called_while_the_graph_runs(arrays: Any, calls: list[int]) -> None:
    mask = ats.MaskFunction(lambda b, h, i, j: (i + 2 * j + h) % 5 < 3) | ats.Causal("bottom_right")
    reasons = []

    @tf.function
    def compiled(*arrays: Any) -> Any:
        reasons.append(ats.explain(*arrays, mask=mask).reasons["native"])
        return ats.attend(*arrays, mask=mask)

    close(compiled(*arrays), ats.attend(*arrays, mask=mask, kernel="streaming"))
    assert reasons == [(f"a function that NumPy cannot call while a graph runs: {mask.first!r}",)]
    assert calls == [0, 0]
    close(ats.attend(*arrays, mask=mask), ats.attend(*arrays, mask=mask, kernel="streaming"))
    assert calls == [1, 0]


@pytest.mark.slow
@needs_native
def test_lengths_that_the_graph_learns_when_it_runs(arrays: Any, calls: list[int]) -> None:
    signature = [tf.TensorSpec([None, x.shape[1], None, x.shape[3]], x.dtype) for x in arrays]
    compiled = tf.function(
        lambda q, k, v, lens: with_gradients(
            q, k, v, valid_lens=lens, mask=ats.Causal("bottom_right"), dropout=0.2, seed=3
        ),
        input_signature=[*signature, tf.TensorSpec([None], tf.int32)],
    )
    for parts in (arrays, [x[:1] for x in arrays], [arrays[0][:, :, :4], *(x[:, :, :6] for x in arrays[1:])]):
        lens = tf.constant([5, 0][: parts[0].shape[0]])
        options = {"valid_lens": lens, "mask": ats.Causal("bottom_right"), "dropout": 0.2, "seed": 3}
        before = list(calls)
        found = compiled(*parts, lens)
        assert [now - then for now, then in zip(calls, before, strict=True)] == [1, 1]
        close(found, with_gradients(*parts, **options, kernel="streaming"))


@needs_native
@some("score", ["dot"], ["dot", "gaussian", "additive"], slow=["gaussian", "additive"])
def test_valid_lens_that_a_graph_reads_at_each_run(score: str, arrays: Any, calls: list[int]) -> None:
    """Lengths are clipped, as a graph cannot raise; those known when it is made are no argument of the call."""
    own: Any = ats.Additive(tf.constant(RNG.standard_normal(5))) if score == "additive" else score
    signature = [tf.TensorSpec([None, x.shape[1], None, x.shape[3]], x.dtype) for x in arrays]
    given = tf.function(
        lambda q, k, v, lens: with_gradients(q, k, v, valid_lens=lens, score=own, sink=0.5),
        input_signature=[*signature, tf.TensorSpec([None], tf.int32)],
    )
    known = tf.function(lambda *x: with_gradients(*x, valid_lens=[6, 0], score=own), input_signature=signature)
    for keys in (11, 6):
        parts = [arrays[0], *(x[:, :, :keys] for x in arrays[1:])]
        for lens in ([5, 0], [keys + 100, -3], [keys, 1]):
            clipped = np.clip(lens, 0, keys)
            wanted = with_gradients(*parts, valid_lens=clipped, score=own, sink=0.5, kernel="streaming")
            close(given(*parts, tf.constant(lens, tf.int32)), wanted)
        close(known(*parts), with_gradients(*parts, valid_lens=[6, 0], score=own, kernel="streaming"))
    assert calls == [8, 8]


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(ats.IntervalMask):
    """Query i attends the keys j < lens of its own block of 6 queries and of those before."""

    lens: Any

    def ends(self, ops: Any, score_shape: Any, rows: Any) -> Any:
        lens = ops.reshape(ops.asarray(self.lens, rows, "int64"), (-1, 1))
        return None, ops.where(lens < (rows // 6 + 1) * 6, lens, (rows // 6 + 1) * 6)


@needs_native
def test_the_ends_of_an_own_mask_skip_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tiling.TilePlan] = []
    plan = tiling.plan
    monkeypatch.setattr(tiling, "plan", lambda *arguments: plans.append(plan(*arguments)) or plans[-1])
    arrays = [RNG.normal(size=(2, 2, n, 4)) for n in (37, 41, 41)]
    given = tf.function(lambda lens, *x: ats.attend(*x, mask=Blocks(lens) & ats.Causal(offset=4), kernel="native"))
    found = given(tf.constant([5, 40], tf.int32), *map(tf.constant, arrays))
    assert plans[-1].remaining_mask is None and plans[-1].interval_set is not None
    wanted = ats.attend(*arrays, mask=Blocks([5, 40]) & ats.Causal(offset=4), kernel="dense")
    np.testing.assert_allclose(found, wanted, atol=1e-12)


@needs_native
@pytest.mark.slow
def test_buffers_go_in_and_out_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """What native code fills is aligned as TensorFlow wants, which then takes it over; it reads TensorFlow's own."""
    seen: list[tuple[int, bool]] = []

    class WatchedPlan(NotedPlan):
        def allocate_and_run(self, arrays: Any, *rest: Any) -> Any:
            found = super().allocate_and_run(arrays, *rest)
            seen.append((found[0].ctypes.data % 64, arrays[0].flags.owndata))
            return found

    class Watching(Counted):
        def forward(self, score: Any, arrays: Any, found: Any, *rest: Any) -> Any:
            seen.append((found[0].ctypes.data % 64, arrays[0].flags.owndata))
            return super().forward(score, arrays, found, *rest)

        def plan_forward(self, score: Any, inputs: Any, filled: Any) -> Any:
            return WatchedPlan(super().plan_forward(score, inputs, filled), lambda arguments: None)

    watching = Watching(in_memory._native)
    for module in (in_memory, plan):
        monkeypatch.setattr(module, "_native", watching)
    x = tf.ones((1, 1, 512, 64))
    tf.function(lambda x: ats.attend(x, x, x))(x)
    ats.attend(x, x, x)
    ats.attend(x, x, x, score=ats.SoftCap("dot", 30.0))  # runs by no plan
    assert seen == 3 * [(0, False)]


# ------------------------------------------------------------- inside other things


def mapped(query: Any, key: Any, value: Any) -> Any:
    one = lambda x: ats.attend(*(part[None] for part in x))[0]  # noqa: E731
    return tf.map_fn(one, (query, key, value), fn_output_signature=query.dtype)


def vectorized(query: Any, key: Any, value: Any) -> Any:
    return tf.vectorized_map(lambda x: ats.attend(*(part[None] for part in x))[0], (query, key, value))


def branched(query: Any, key: Any, value: Any) -> Any:
    return tf.cond(tf.reduce_sum(query) < 1e9, lambda: ats.attend(query, key, value), lambda: query[..., :3])


def recomputed(query: Any, key: Any, value: Any) -> Any:
    return tf.recompute_grad(ats.attend)(query, key, value)


INSIDE: list[Callable[..., Any]] = [mapped, vectorized, branched, recomputed]


@pytest.mark.parametrize("inside", INSIDE, ids=lambda x: x.__name__)
@pytest.mark.slow_rows("vectorized", "recomputed")
def test_gradients_through_loops_and_branches(inside: Any, arrays: Any) -> None:
    @tf.function
    def call(*arrays: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = inside(*arrays)
            loss = out**2
        return out, tape.gradient(loss, arrays)

    with tf.GradientTape() as tape:
        tape.watch(arrays)
        out = ats.attend(*arrays)
        loss = out**2
    close(call(*arrays), [out, tape.gradient(loss, arrays)])


def test_in_the_map_of_a_dataset(arrays: Any) -> None:
    whole = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    made = whole.map(lambda *x: ats.attend(*(part[None] for part in x))[0], num_parallel_calls=2)
    close(tf.stack(list(made)), ats.attend(*arrays))


def test_autograph_leaves_a_loop_over_tiles_as_it_is() -> None:
    """AutoGraph warns of each function of ours that it cannot rewrite."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    score = ats.Additive(tf.ones(64), tf.ones((64, 4)), tf.ones((64, 4)))

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(ats.attend(x, x, x, score=score))
        return tape.gradient(loss, x)

    tf.get_logger().addHandler(handler)
    try:
        gradient(tf.ones((64, 24, 4)))
    finally:
        tf.get_logger().removeHandler(handler)
    assert not warnings


@pytest.mark.slow
@pytest.mark.parametrize("how", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_jacobians(how: Any, arrays: Any) -> None:
    query, key, value = arrays

    def jacobian(query: Any, kernel: str = "auto") -> Any:
        with tf.GradientTape() as tape:
            tape.watch(query)
            out = ats.attend(query, key, value, kernel=kernel)[0, 0, :2]
        return tape.jacobian(out, query)

    close(how(jacobian)(query), jacobian(query, "dense"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["eager", "inside", "around"])
def test_forward_mode(where: str, arrays: Any) -> None:
    along = [tf.constant(RNG.standard_normal(x.shape)) for x in arrays]

    def slope(call: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(arrays, along) as forward:
            out = call(*arrays)
        return forward.jvp(out)

    def inside(arrays: Any, along: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(arrays, along) as forward:
            out = ats.attend(*arrays, valid_lens=[7, 3])
        return forward.jvp(out)

    call = lambda *x: ats.attend(*x, valid_lens=[7, 3])  # noqa: E731
    found = (
        tf.function(inside)(arrays, along)
        if where == "inside"
        else slope(tf.function(call) if where == "around" else call)
    )
    step = 1e-6
    ends = [call(*(x + sign * step * d for x, d in zip(arrays, along, strict=True))) for sign in (1, -1)]
    assert float(tf.reduce_max(tf.abs(found))) > 0.1
    close(found, (ends[0] - ends[1]) / (2 * step), 1e-8)


@pytest.mark.slow
@some("where", ["inside", "tf.gradients"], ["inside", "tf.gradients", "around"], slow=["around"])
def test_second_derivatives_in_graphs(where: str, arrays: Any) -> None:
    _, key, value = arrays

    def loss(query: Any, kernel: str = "auto") -> Any:
        return tf.reduce_sum(ats.attend(query, key, value, mask=ats.Causal("bottom_right"), kernel=kernel) ** 3)

    def second(query: Any, loss: Any = loss) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(query)
            with tf.GradientTape() as tape:
                tape.watch(query)
                value = loss(query)
            squares = tf.reduce_sum(tape.gradient(value, query) ** 2)
        return outer.gradient(squares, query)

    def by_graph(query: Any) -> Any:
        (slope,) = tf.gradients(loss(query), query)
        return tf.gradients(tf.reduce_sum(slope**2), query)[0]

    ways: dict[str, Callable[..., Any]] = {
        "inside": tf.function(second),
        "tf.gradients": tf.function(by_graph),
        "around": lambda query: second(query, tf.function(loss)),
    }
    close(ways[where](arrays[0]), second(arrays[0], lambda query: loss(query, "dense")), 1e-10)


# -------------------------------------------------- graphs without host callbacks


@pytest.mark.slow
@needs_native
def test_xla_around_a_graph_that_calls(arrays: Any, calls: list[int]) -> None:
    """The inner graph was made without XLA, and is compiled by it later: forward, and forward and backward."""
    inner, both = tf.function(ats.attend), tf.function(with_gradients)
    wanted = inner(*arrays), both(*arrays)
    before = list(calls)

    @tf.function(jit_compile=True)
    def outer(*arrays: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = inner(*arrays)
        return out, tape.gradient(out, arrays), both(*arrays)

    out, _, found = outer(*arrays)
    close((out, found), wanted)
    assert calls[0] == before[0]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A model with a variable, of unknown lengths, that ran natively before it was saved; what it gave."""

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = tf.Variable(tf.eye(4) * 0.5)

        @tf.function(input_signature=[tf.TensorSpec([None, None, 4], tf.float32), tf.TensorSpec([None], tf.int32)])
        def __call__(self, x: Any, lens: Any) -> Any:
            return ats.attend(x, x, x, score=ats.Bilinear(self.W), valid_lens=lens)

    folder, model = tmp_path_factory.mktemp("exported"), Model()
    x, lens = tf.constant(RNG.standard_normal((3, 7, 4)), tf.float32), tf.constant([7, 0, 2])
    with tf.GradientTape() as tape:
        out = model(x, lens)
    found = {"x": x.numpy(), "out": out.numpy(), "grad": tape.gradient(out, model.W).numpy()}
    np.savez(folder / "found.npz", **found)
    tf.saved_model.save(model, str(folder / "model"))
    yield folder, found


CHILD = """
import sys, json, numpy, tensorflow as tf
sys.modules["attnscore"] = None
known = numpy.load(sys.argv[1] + "/found.npz")
x, lens = tf.constant(known["x"]), tf.constant([7, 0, 2])
model = tf.saved_model.load(sys.argv[1] + "/model")
def both(x, lens):
    with tf.GradientTape() as tape:
        out = model(x, lens)
    return out, tape.gradient(out, model.W)
found = {"plain": both(x, lens), "xla": tf.function(both, jit_compile=True)(x, lens)}
print(json.dumps({name: [float(abs(a - known[b]).numpy().max()) for a, b in zip(pair, ("out", "grad"))]
                  for name, pair in found.items()}))
"""


@pytest.mark.slow
def test_an_exported_model_runs_and_trains_without_attnscore(exported: tuple[Path, Any]) -> None:
    """In another process: plain, and compiled by XLA, the gradient of its variable too."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(exported[0])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert max(max(pair) for pair in errors.values()) < 1e-5, errors


@pytest.mark.slow
def test_an_exported_model_in_the_process_that_made_it(exported: tuple[Path, Any]) -> None:
    folder, known = exported
    model = tf.saved_model.load(str(folder / "model"))
    with tf.GradientTape() as tape:
        out = model(known["x"], tf.constant([7, 0, 2]))
    close((out, tape.gradient(out, model.W)), (known["out"], known["grad"]), 1e-5)


RUNTIME = """
import ctypes, pathlib, sys, numpy as np
# The runtime that serves models, without Python's part of TensorFlow and so without a kernel for callbacks.
folder, package = sys.argv[1:]
ctypes.CDLL(package + "/libtensorflow_framework.so.2", ctypes.RTLD_GLOBAL)
tf = ctypes.CDLL(package + "/libtensorflow_cc.so.2", ctypes.RTLD_GLOBAL)
for name in ("TF_NewStatus", "TF_NewSessionOptions", "TF_NewGraph", "TF_LoadSessionFromSavedModel", "TF_AllocateTensor",
             "TF_TensorData", "TF_GraphOperationByName", "TF_Message"):
    getattr(tf, name).restype = ctypes.c_void_p
class Output(ctypes.Structure):
    _fields_ = [("operation", ctypes.c_void_p), ("index", ctypes.c_int)]
status, graph = ctypes.c_void_p(tf.TF_NewStatus()), ctypes.c_void_p(tf.TF_NewGraph())
def check():
    assert tf.TF_GetCode(status) == 0, ctypes.string_at(tf.TF_Message(status))
tags = (ctypes.c_char_p * 1)(b"serve")
session = ctypes.c_void_p(tf.TF_LoadSessionFromSavedModel(
    ctypes.c_void_p(tf.TF_NewSessionOptions()), None, folder.encode() + b"/model", tags, 1, graph, None, status))
check()
known = np.load(folder + "/found.npz")
def tensor(x, kind):
    dims = (ctypes.c_int64 * x.ndim)(*x.shape)
    made = ctypes.c_void_p(tf.TF_AllocateTensor(kind, dims, x.ndim, ctypes.c_size_t(x.nbytes)))
    ctypes.memmove(ctypes.c_void_p(tf.TF_TensorData(made)), x.ctypes.data, x.nbytes)
    return made
def end(name):
    found = tf.TF_GraphOperationByName(graph, name)
    assert found, name
    return Output(found, 0)
x, lens = np.ascontiguousarray(known["x"]), np.array([7, 0, 2], np.int32)
inputs = (Output * 2)(end(b"serving_default_x"), end(b"serving_default_lens"))
values = (ctypes.c_void_p * 2)(tensor(x, 1), tensor(lens, 3))
outputs, results = (Output * 1)(end(b"StatefulPartitionedCall")), (ctypes.c_void_p * 1)()
tf.TF_SessionRun(session, None, inputs, values, 2, outputs, results, 1, None, 0, None, status)
check()
start = ctypes.cast(tf.TF_TensorData(ctypes.c_void_p(results[0])), ctypes.POINTER(ctypes.c_float))
out = np.ctypeslib.as_array(start, x.shape)
assert "tensorflow" not in sys.modules
print(abs(out - known["out"]).max())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names of shared libraries")
def test_an_exported_model_in_a_runtime_without_python(exported: tuple[Path, Any]) -> None:
    """Through the C interface of the library: a callback that is not taken is not even looked up."""
    package = str(Path(tf.__file__).parent)
    command = [sys.executable, "-c", RUNTIME, str(exported[0]), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 1e-6


LITE = """
import sys, warnings, numpy as np, tensorflow as tf, attnscore as ats
warnings.simplefilter("ignore")  # the interpreter's own: it moves to another package
spec, rng = tf.TensorSpec((2, 7, 4), tf.float32), np.random.default_rng(0)
arrays = [rng.standard_normal((2, 7, 4)).astype(np.float32) for _ in range(3)]
for x in arrays[1:]:
    x[0, 2:] = np.nan
for mask in (ats.ValidLens([2, 7]), ats.ValidLens([0, 7]), ats.Causal() & ats.ValidLens([2, 7]), ~ats.KeyRange(2, 7)):
    def call(query, key, value):
        return ats.attend(query, key, value, mask=mask)
    function = tf.function(call, input_signature=[spec] * 3)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()], function)
    model = tf.lite.Interpreter(model_content=converter.convert())
    model.allocate_tensors()
    given = dict(zip(("query", "key", "value"), arrays))
    for place in model.get_input_details():
        model.set_tensor(place["index"], given[place["name"].removeprefix("serving_default_").partition(":")[0]])
    model.invoke()
    out = model.get_tensor(model.get_output_details()[0]["index"])
    print(abs(out - ats.attend(*arrays, mask=mask, kernel="dense")).max())
"""


@pytest.mark.slow
def test_tensorflow_lite_runs_masked_calls() -> None:
    """In a process of its own, which its interpreter ends where it lacks a form. NaN lies in the padding."""
    done = subprocess.run([sys.executable, "-c", LITE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = [float(line) for line in done.stdout.splitlines()[-4:]]
    assert max(errors) < 1e-6, errors


# `==` of an array and a number is one False there.
@pytest.mark.parametrize("kernel", ["dense", "streaming"])
@pytest.mark.parametrize("arguments", [{}, {"score": "cosine"}, {"normalizer": "sparsemax"}, {"sink": 0.5}])
def test_a_graph_and_session_of_old(arrays: Any, arguments: dict[str, Any], kernel: str) -> None:
    def call() -> list[Any]:
        given = map(tf.constant, (x.numpy() for x in arrays))
        return tf.nest.flatten(ats.attend(*given, valid_lens=[5, 0], return_stats=True, kernel=kernel, **arguments))

    wanted = [x for x in call() if x is not None]
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        close(session.run([x for x in call() if x is not None]), wanted)


def test_a_function_that_compares_in_a_session() -> None:
    with tf.Graph().as_default(), pytest.raises(ats.MaskError, match=r"tf\.equal"):
        x = tf.zeros((1, 3, 2))
        ats.attend(x, x, x, mask=ats.MaskFunction(lambda b, h, i, j: i == j))


@pytest.mark.parametrize("shape", [(None, 4, 5), (2, None, None), (None, None, None)])
def test_a_softmax_of_unknown_sizes(shape: tuple[Any, ...]) -> None:
    x = tf.random.normal((2, 4, 5), seed=1)
    softmax = tf.function(lambda x: ats.masked_softmax(x, [2, 3]), input_signature=[tf.TensorSpec(shape)])
    close(softmax(x), ats.masked_softmax(x, [2, 3]), 1e-6)


def test_an_unknown_number_of_keys() -> None:
    x, signature = tf.random.normal((2, 4, 5), seed=1), [tf.TensorSpec((2, None, 5))]

    def first_keys(x: Any) -> Any:
        return ats.attend(x, x, x, return_stats=True, kernel="streaming")[1].argmax_key

    close(tf.function(first_keys, input_signature=signature)(x), first_keys(x))
    with pytest.raises(ats.ShapeError, match="number of keys that is known"):
        tf.function(lambda x: ats.top_weights(x, x, 1), input_signature=signature)(x)


# ------------------------------------------------------------------ and besides


def test_several_threads_run_one_graph(arrays: Any) -> None:
    compiled, wanted = tf.function(ats.attend), ats.attend(*arrays)
    compiled(*arrays)
    wrong: list[float] = []

    def work() -> None:
        for _ in range(20):
            error = float(tf.reduce_max(tf.abs(compiled(*arrays) - wanted)))
            wrong.extend([error] if error > 1e-12 else [])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_what_waits_for_the_call_holds_no_tensor(arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow keeps a callback for good: with a tensor of its graph in it, every retracing would leave a graph."""
    kept: list[Any] = []
    original = tf.numpy_function

    def keep(function: Any, *arguments: Any, **options: Any) -> Any:
        kept.append(function)
        return original(function, *arguments, **options)

    monkeypatch.setattr(tf, "numpy_function", keep)
    signature = [tf.TensorSpec([None, x.shape[1], None, x.shape[3]], x.dtype) for x in arrays]
    made = tf.function(
        lambda *x: with_gradients(*x, valid_lens=tf.range(2), bias=x[0][..., :1]), input_signature=signature
    )
    made.get_concrete_function()
    seen, left = set(), list(kept)
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (str, bytes, int, float, type)) or type(x).__name__ == "module":
            continue
        seen.add(id(x))
        assert not isinstance(x, tf.Tensor) or hasattr(x, "numpy")
        left += [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        left += list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, (list, tuple, set)) else []
        left += list(vars(x).values()) if hasattr(x, "__dict__") and not callable(x) else []
    assert bool(kept) == bool(ats.available()["kernels"]["native"])


@needs_native
@pytest.mark.slow
def test_lengths_of_each_query_without_a_batch() -> None:
    arrays = [tf.constant(RNG.standard_normal((12, 4))) for _ in range(3)]
    lens = tf.constant(RNG.integers(0, 13, 12), tf.int32)
    run = tf.function(lambda q, k, v, lens: ats.attend(q, k, v, valid_lens=lens, kernel="native"))
    np.testing.assert_allclose(run(*arrays, lens), ats.attend(*arrays, valid_lens=lens), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_moments_over_a_number_of_keys_that_the_graph_learns(kernel: str, jit_compile: bool) -> None:
    x = tf.constant(RNG.standard_normal((2, 5, 4)))

    def moments(x: Any) -> Any:
        stats = ats.attend(x, x, x, return_stats=("mean_score", "var_score"), kernel=kernel)[1]
        return stats.mean_score, stats.var_score

    signature = [tf.TensorSpec([2, None, 4], x.dtype)]
    for got, wanted in zip(tf.function(moments, signature, jit_compile=jit_compile)(x), moments(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["additive", "gaussian"])
def test_parameters_of_more_digits_than_the_vectors(score: str) -> None:
    x = tf.constant(RNG.standard_normal((2, 5, 4)), tf.float32)
    parameter = tf.constant(RNG.random(4) + 0.5) if score == "additive" else tf.constant(1.5, tf.float64)

    def gradients(x: Any, parameter: Any) -> Any:
        own: Any = (ats.Additive if score == "additive" else ats.Gaussian)(parameter)
        with tf.GradientTape() as tape:
            tape.watch([x, parameter])
            total = tf.reduce_sum(ats.attend(x, x, x, score=own, mask=ats.Causal("top_left")) ** 2)
        return tape.gradient(total, [x, parameter])

    for got, wanted in zip(tf.function(gradients)(x, parameter), gradients(x, parameter), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@needs_native
def test_a_mask_of_numpy_is_that_of_the_time_of_tracing() -> None:
    x, mask = tf.constant(RNG.standard_normal((1, 12, 4))), RNG.random((1, 12, 12)) < 0.6
    run = tf.function(lambda x: ats.attend(x, x, x, mask=mask, kernel="native"))
    before = run(x)
    mask[:] = ~mask
    np.testing.assert_array_equal(run(x), before)


@needs_native
def test_lengths_that_a_graph_clips_stay_errors_elsewhere() -> None:
    x = tf.constant(RNG.standard_normal((2, 5, 4)))
    run = tf.function(lambda x: ats.attend(x, x, x, valid_lens=[6, 0]), [tf.TensorSpec([2, None, 4], x.dtype)])
    run(x)
    for given in (x, x.numpy()):
        with pytest.raises(ats.MaskError, match="from 0 to 5"):
            ats.attend(given, given, given, valid_lens=[6, 0])


def test_a_sink_without_queries() -> None:
    """TensorFlow's optimizer of graphs divided by the number of queries, which ended the process."""

    @tf.function
    def gradients(query: Any, key: Any, value: Any, sink: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((query, sink))
            total = tf.reduce_sum(ats.attend(query, key, value, sink=sink, kernel="streaming"))
        return tape.gradient(total, (query, sink))

    of_query, of_sink = gradients(*(tf.zeros(shape) for shape in ((1, 0, 3), (1, 4, 3), (1, 4, 2), ())))
    assert of_query.shape == (1, 0, 3) and float(of_sink) == 0


def test_a_block_of_documents_with_an_unknown_number_of_queries() -> None:
    query, key = (tf.constant(RNG.standard_normal((2, n, 4))) for n in (5, 7))
    mask = ats.Documents(np.arange(5) // 2, np.arange(7) // 2)
    run = tf.function(
        lambda query, key: ats.attention_weights(query, key, mask=mask, key_index=[0, 1, 4]),
        [tf.TensorSpec([None, None, 4], query.dtype), tf.TensorSpec([None, 7, 4], key.dtype)],
    )
    np.testing.assert_allclose(
        run(query, key), ats.attention_weights(query, key, mask=mask, key_index=[0, 1, 4]), atol=1e-12
    )
