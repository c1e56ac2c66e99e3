"""No wrong call gets through the border of the native module: every message names the argument, expected and got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnscore.backends import torch as torch_backend
from attnscore.kernels.native.marshalling import FILLED
from native_cases import GRADIENTS, INPUTS, OPTIONS, ROWS, STATISTICS, Case, native

WrongCalls = dict[type[Exception], list[tuple[dict[str, Any], str]]]
"""The error of a call in which some arguments are replaced, and what it says."""

reads_tensors = pytest.mark.skipif(not torch_backend._READS_TENSORS, reason="this PyTorch has no exchange API")
F4 = np.float32
PAIRS = (2, 2, 3, 5, 7)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, F4)


def rows(table: WrongCalls) -> list[Any]:
    every = [(change, error, message) for error, calls in table.items() for change, message in calls]
    return [pytest.param(*row, id=f"{i} {' '.join(row[0])}") for i, row in enumerate(every)]


HOLE = np.stack([np.full((2, 5), 7), np.full((2, 5), 8)])
ADDITIVE = {"form": "additive", "w_v": zeros(4)}
# Kept scores, in both directions.
WRONG_SCORES: WrongCalls = {
    ValueError: [
        ({"scores": zeros(*PAIRS)}, "scores: expected None but with form 'additive', got an"),
        ({**ADDITIVE, "scores": zeros(2, 2, 1, 5, 7)}, r"scores: expected shape \(2, 2, 3, 5, 7\)"),
        ({**ADDITIVE, "scores": zeros(2, 2, 3, 7, 5)}, r"scores: expected shape \(2, 2, 3, 5, 7\)"),
        ({**ADDITIVE, "scores": zeros(2, 2, 3, 7, 5).swapaxes(-1, -2)}, "scores: .*C-contiguous"),
    ],
    TypeError: [
        ({**ADDITIVE, "scores": np.zeros((2, 2, 3, 5, 7))}, "scores: expected dtype float32, got float64"),
    ],
}
WRONG_FORWARD: WrongCalls = {
    ValueError: [
        ({"query": None}, "query: expected an array, got None"),
        ({"query": zeros(2, 2, 3, 6, 4)}, r"query: expected shape \(2, 2, 3, 5, 4\)|query: .*6, 4\)"),
        ({"query": zeros(2, 2, 2, 5, 4)}, "query: expected shape"),
        ({"query": zeros(2, 2, 5, 4)}, "query: expected at least 5 axes"),
        ({"query": zeros(1, 2, 2, 3, 5, 4)}, "query: expected 5 axes, as out"),
        ({"query": zeros(2, 2, 3, 5, 0)}, r"key: expected shape \(2, 2, 3, 7, 0\)"),
        ({"key": zeros(2, 2, 1, 7, 5)}, r"key: expected shape \(2, 2, 3, 7, 4\).*\(2, 2, 1, 7, 5\)"),
        ({"value": zeros(2, 2, 1, 8, 6)}, "value: expected shape"),
        ({"value": zeros(2, 2, 1, 7, 5)}, "out: expected shape"),
        ({"value": zeros(8)}, "value: expected at least 5 axes"),
        ({"value": np.float32(1)}, r"value: expected at least 5 axes: .*got \(\)"),
        ({"out": zeros(2, 2, 3, 5, 6)[..., ::-1]}, "out: expected a C-contiguous array"),
        ({"out": zeros(2, 2, 3, 6, 5).swapaxes(-1, -2)}, "out: expected a C-contiguous array"),
        ({"out": zeros(1, 2, 3, 5, 6)}, "query: expected shape"),
        ({"out": None}, "out: expected an array, got None"),
        # The module has the names of Python's table, in its order.
        *(({x: zeros(2, 2, 3, 4, 1)}, rf"^{x}: expected shape \(2, 2, 3, 5, 1\)") for x in STATISTICS),
        ({"entropy": zeros(2, 2, 3, 5)}, r"entropy: expected shape \(2, 2, 3, 5, 1\)"),
        ({"start": np.zeros((2, 5), np.int64)}, "stop: expected start and stop together, got None"),
        ({"stop": np.zeros((2, 5), np.int64)}, "start: expected start and stop together, got None"),
        ({"start": np.zeros((3, 5), int), "stop": np.zeros((3, 5), int)}, r"start: expected shape \(2, 5\)"),
        ({"start": np.zeros((2, 4), int), "stop": np.zeros((2, 4), int)}, r"start: expected shape \(2, 5\)"),
        ({"start": np.zeros(5, int), "stop": np.zeros(5, int)}, r"start: expected shape \(2, 5\)"),
        ({"start": np.zeros((1, 5), int), "stop": np.zeros((2, 5), int)}, "stop: expected the shape of start"),
        ({"start": np.full((2, 5), -1), "stop": np.zeros((2, 5), int)}, "start: expected numbers from 0, got -1"),
        ({"start": np.zeros((2, 5), int), "stop": np.full((2, 5), 8)}, "stop: expected .* key_len = 7, got 8"),
        (
            {"start": np.full((2, 5), 5), "stop": np.full((2, 5), 4)},
            "stop: expected numbers from start on, got 4 with start 5",
        ),
        ({"start": np.zeros((2, 10), int)[:, ::2], "stop": np.zeros((2, 5), int)}, "start: .*C-contiguous"),
        ({"start": np.zeros((3, 3, 5), int), "stop": np.zeros((3, 3, 5), int)}, r"start: expected shape \(3, 2, 5\)"),
        ({"start": np.zeros((0, 2, 5), int), "stop": np.zeros((0, 2, 5), int)}, r"start: expected shape \(2, 5\)"),
        ({"start": np.zeros((2, 2, 5), int), "stop": np.zeros((2, 5), int)}, "stop: expected the shape of start"),
        ({"start": np.zeros((2, 2, 5), int), "stop": HOLE}, "stop: expected .* key_len = 7, got 8"),
        (
            {"start": np.zeros((5, 2, 2), int).transpose(1, 2, 0), "stop": np.zeros((2, 2, 5), int)},
            "start: .*C-contiguous",
        ),
        ({"w_v": zeros(4)}, "w_v: expected None but with form 'additive'"),
        ({"form": "additive"}, "w_v: expected an array, got None"),
        ({"form": "additive", "w_v": zeros(5)}, r"w_v: expected shape \(4,\), got \(5,\)"),
        ({"form": "additive", "w_v": zeros(8)[::2]}, "w_v: expected a C-contiguous"),
        ({"form": "additive", "w_v": zeros(3, 3, 4)}, r"w_v: expected shape \(2, 3, 4\)"),
        ({"form": "additive", "w_v": zeros(1, 4)}, r"w_v: expected shape \(2, 3, 4\)"),
        ({"form": "cubic"}, "form: expected one of 'inner', 'additive', 'distance', got 'cubic'"),
        ({"activation": "swish"}, "activation: expected one of .*, got 'swish'"),
        ({"score_dtype": "int8"}, "score_dtype: expected one of .*, got 'int8'"),
        ({"value_dtype": "float"}, "value_dtype: expected one of .*, got 'float'"),
        ({"value_dtype": "float64"}, "value_dtype: float64 needs score_dtype float64"),
        ({"bias_dtype": "bool"}, "bias_dtype: expected one of"),
        ({"dropout": 1.0}, "dropout: expected a number in"),
        ({"dropout": float("nan")}, "dropout: expected a number in"),
        ({"caps": ((0.0, 1.0),)}, "caps: expected caps above 0, got 0"),
        ({"query_bias": zeros(2, 2, 3, 7, 1)}, r"query_bias: expected shape \(2, 2, 3, 5, 1\) \(1 in any"),
        ({"key_bias": zeros(2, 2, 1, 5, 1)}, r"key_bias: expected shape \(2, 2, 3, 7, 1\)"),
        ({"key_bias": zeros(2, 2, 1, 7)}, r"key_bias: .*got \(2, 2, 1, 7\)"),
        ({"bias": zeros(2, 2, 3, 5, 6)}, r"bias: expected shape \(2, 2, 3, 5, 7\)"),
        ({"bias": zeros(5, 7)}, r"bias: expected shape \(2, 2, 3, 5, 7\)"),
        ({"mask": np.zeros((1, 1, 1, 5, 6), np.uint8)}, r"mask: expected shape \(2, 2, 3, 5, 7\)"),
        ({"query_ids": np.zeros((1, 5), int)}, "key_ids: expected query_ids and key_ids together"),
        ({"key_ids": np.zeros((1, 7), int)}, "query_ids: expected query_ids and key_ids together"),
        ({"query_ids": np.zeros((1, 7), int), "key_ids": np.zeros((1, 7), int)}, r"query_ids: .*\(2, 5\)"),
        ({"query_ids": np.zeros((1, 5), int), "key_ids": np.zeros((3, 7), int)}, r"key_ids: .*\(2, 7\)"),
        ({"sink": zeros(2, 2)}, r"sink: expected shape \(2, 3\)"),
        ({"sink": zeros(6)}, r"sink: expected shape \(2, 3\)"),
        ({"scales": zeros(2, 3)}, "scales: expected None but with form 'distance'"),
        ({"form": "distance", "scales": zeros(3, 2)}, r"scales: expected shape \(2, 3\)"),
        ({"form": "distance", "scales": zeros(6)}, r"scales: expected shape \(2, 3\)"),
        ({"row_max": zeros(2, 2, 3, 5)}, r"row_max: expected shape \(2, 2, 3, 5, 1\)"),
        *WRONG_SCORES[ValueError],
        ({"attention_scores": zeros(2, 2, 1, 5, 7)}, r"attention_scores: expected shape \(2, 2, 3, 5, 7"),
        ({"attention_weights": zeros(2, 2, 3, 7, 5)}, r"attention_weights: expected shape \(2, 2, 3, 5"),
        ({"attention_weights": zeros(2, 2, 3, 7, 5).swapaxes(-1, -2)}, "attention_weights: .*C-contiguous"),
        (
            {"attention_scores": zeros(*PAIRS), "attention_weights": zeros(*PAIRS)},
            "attention_weights: expected None beside attention_scores",
        ),
        ({"log_denom": None}, "log_denom: expected an array, got None"),
        ({"threads": 0}, "threads: expected 1 or more, or a negative number, got 0"),
    ],
    TypeError: [
        *WRONG_SCORES[TypeError],
        ({"query": [1, 2]}, "query: expected a NumPy array of float32 .* got .*list"),
        ({"query": np.zeros((2, 2, 3, 5, 4))}, "query: expected dtype float32, got float64"),
        ({"query": np.zeros((2, 2, 3, 5, 4), ">f4")}, "query: expected a NumPy array of float32"),
        ({"query": np.zeros((2, 2, 3, 5, 4), "c8")}, "query: expected dtype float32, got"),
        ({"query": np.zeros((2, 2, 3, 5, 4), object)}, "query: expected a NumPy array"),
        ({"out": np.broadcast_to(F4(0), (2, 2, 3, 5, 6))}, "out: expected a writable NumPy array"),
        ({"out": np.zeros((2, 2, 3, 5, 6))}, "out: expected dtype float32, got float64"),
        ({"var_score": np.zeros((2, 2, 3, 5, 1))}, "var_score: expected dtype float32"),
        ({"sum_weights": np.broadcast_to(F4(0), (2, 2, 3, 5, 1))}, "sum_weights: expected a writable NumPy"),
        ({"start": np.zeros((2, 5), np.int32), "stop": np.zeros((2, 5), np.int64)}, "start: expected dtype int64"),
        ({"form": "additive", "w_v": np.zeros(4)}, "w_v: expected dtype float32"),
        ({"caps": (1.0,)}, "incompatible function arguments"),
        ({"seed": -1}, "incompatible function arguments"),
        ({"query_bias": np.zeros((2, 2, 3, 5, 1))}, "query_bias: expected dtype float32, got float64"),
        ({"bias": np.zeros((1, 1, 1, 5, 7))}, "bias: expected dtype float32, got float64"),
        ({"bias": zeros(1, 1, 1, 5, 7), "bias_dtype": "bfloat16"}, "bias: expected dtype uint16"),
        ({"mask": zeros(1, 1, 1, 5, 7)}, "mask: expected dtype uint8, got float32"),
        ({"query_ids": np.zeros((1, 5), "i4"), "key_ids": np.zeros((1, 7), int)}, "query_ids: expected dtype"),
        ({"sink": np.zeros((2, 3))}, "sink: expected dtype float32"),
        ({"form": "distance", "scales": np.zeros((2, 3))}, "scales: expected dtype float32"),
        ({**ADDITIVE, "scores": np.broadcast_to(F4(0), (2, 2, 3, 5, 7))}, "scores: expected a writable NumPy"),
        ({"attention_weights": np.zeros(PAIRS)}, "attention_weights: expected dtype float32, got float64"),
        ({"threads": "two"}, "incompatible function arguments"),
        ({"scale": "x"}, "incompatible function arguments"),
    ],
}


@pytest.mark.parametrize(("change", "error", "message"), rows(WRONG_FORWARD))
def test_wrong_forward_calls(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Case().run(**change)


WRONG_BACKWARD: WrongCalls = {
    ValueError: [
        ({"out": None}, "out: expected an array, got None"),
        ({"out": zeros(2, 2, 1, 5, 6)}, "query: expected shape"),
        ({"grad_query": zeros(2, 2, 1, 5, 4)}, "grad_query: expected shape"),
        ({"grad_query": zeros(2, 2, 3, 5, 5)}, "grad_query: expected shape"),
        ({"grad_query": zeros(2, 2, 3, 4, 5).swapaxes(-1, -2)}, "grad_query: expected a C-contig"),
        ({"grad_out": zeros(2, 2, 3, 5, 5)}, "grad_out: expected shape"),
        ({"grad_out": zeros(2, 3, 5, 6)}, "grad_out: expected shape"),
        ({"grad_out": None}, "grad_out: expected an array"),
        ({"row_max": zeros(2, 2, 3, 4, 1)}, "row_max: expected shape"),
        ({"row_max": None}, "row_max: expected an array"),
        *WRONG_SCORES[ValueError],
        ({"grad_log_sum_exp": zeros(2, 2, 5, 3, 1)}, "grad_log_sum_exp: expected shape"),
        ({"grad_attention_scores": zeros(2, 2, 3, 5, 6)}, "grad_attention_scores: expected shape"),
        ({"grad_attention_weights": zeros(*PAIRS)}, "attention_weights: expected an array, got None"),
        (
            {"grad_attention_weights": zeros(*PAIRS), "attention_weights": zeros(2, 2, 3, 1, 7)},
            "attention_weights: expected shape",
        ),
        (
            {"grad_attention_weights": zeros(*PAIRS), "grad_attention_scores": zeros(*PAIRS)},
            "grad_attention_weights: expected None beside grad_attention_scores",
        ),
        ({"grad_entropy": zeros(2, 2, 3, 5, 1)}, "entropy: expected an array beside grad_entropy"),
        ({"grad_key": zeros(2, 2, 2, 7, 4)}, "grad_key: expected shape"),
        ({"grad_key": zeros(2, 2, 3, 7, 4)}, r"grad_key: expected shape \(2, 2, 1, 7, 4\)"),
        ({"grad_value": zeros(2, 2, 3, 7, 6)}, "grad_value: expected shape"),
        ({"grad_key": zeros(3)}, "grad_key: expected shape"),
        ({"grad_w_v": zeros(2, 2, 1, 4)}, "grad_w_v: expected None where there is no such"),
        ({"grad_bias": zeros(1, 1, 1, 5, 7)}, "grad_bias: expected None where there is no such"),
        ({"grad_key_bias": zeros(2, 2, 1, 7)}, "grad_key_bias: expected None where there is no such"),
        ({"grad_sink": zeros(2, 2, 3)}, "grad_sink: expected None where there is no such"),
        ({"grad_scales": zeros(2, 2, 3)}, "grad_scales: expected None where there is no such"),
        (
            {"bias": zeros(1, 2, 1, 5, 7), "grad_bias": zeros(1, 1, 1, 5, 7)},
            r"grad_bias: expected shape \(1, 2, 1, 5, 7\)",
        ),
        (
            {"key_bias": zeros(1, 1, 1, 7, 1), "grad_key_bias": zeros(1, 1, 1, 7)},
            r"grad_key_bias: expected shape \(2, 2, 1, 7\)",
        ),
        ({"key": zeros(2, 2, 3, 7, 4)}, r"grad_key: expected shape \(2, 2, 3, 7, 4\)"),
        ({"value": zeros(2, 2, 3, 7, 6)}, r"grad_key: expected shape \(2, 2, 3, 7, 4\)"),
        ({"grad_dtype": "float8"}, "grad_dtype: expected one of"),
        ({**ADDITIVE, "grad_w_v": zeros(2, 2, 3, 4)}, "grad_w_v: expected shape"),
        (
            {**ADDITIVE, "w_v": zeros(2, 3, 4), "grad_w_v": zeros(2, 2, 1, 4)},
            r"grad_key: expected shape \(2, 2, 3, 7, 4\)",
        ),
        # Gradients that are written in any case.
        *(
            ({**ADDITIVE, "grad_w_v": zeros(2, 2, 1, 4), name: None}, f"^{name}: expected an array, got None")
            for name in ("grad_query", "grad_key", "grad_value", "grad_w_v")
        ),
    ],
    TypeError: [
        *WRONG_SCORES[TypeError],
        ({"grad_query": np.zeros((2, 2, 3, 5, 4))}, "grad_query: expected dtype float32"),
        ({"grad_query": np.broadcast_to(F4(0), (2, 2, 3, 5, 4))}, "grad_query: expected a writable"),
        ({"log_denom": np.zeros((2, 2, 3, 5, 1))}, "log_denom: expected dtype float32"),
        ({"grad_attention_scores": np.zeros(PAIRS)}, "grad_attention_scores: expected dtype float32"),
        ({"grad_dtype": "bfloat16"}, "grad_out: expected dtype uint16, got float32"),
    ],
}


@pytest.mark.parametrize(("change", "error", "message"), rows(WRONG_BACKWARD))
def test_wrong_backward_calls(change: dict[str, Any], error: type[Exception], message: str) -> None:
    case = Case()
    case.run()
    with pytest.raises(error, match=message):
        case.run_backward(**change)


@pytest.mark.parametrize("count", [0, 12, 17])
def test_wrong_numbers_of_arrays(count: int) -> None:
    case = Case()
    score = tuple(case.options.values())
    row = np.zeros(1, F4)
    with pytest.raises(ValueError, match=f"inputs: expected 14 arrays, got {count}"):
        native.forward(score, (None,) * count, [row] * len(FILLED), 1)
    with pytest.raises(ValueError, match=f"rows: expected {len(FILLED)} arrays, got {count}"):
        native.forward(score, (None,) * 14, [row] * count, 1)
    inputs = (case.query, case.key, case.value, *(None,) * 11)
    with pytest.raises(ValueError, match=f"rows: expected 11 arrays, got {count}"):
        native.backward(score, inputs, (None,) * count, "float32", (None,) * 9, 1)
    with pytest.raises(ValueError, match=f"gradients: expected 9 arrays, got {count}"):
        native.backward(score, inputs, (None,) * 11, "float32", (None,) * count, 1)


def test_misaligned_arrays_are_refused() -> None:
    case = Case()
    whole = np.zeros(case.query.nbytes + 1, np.uint8)
    query = whole[1:].view(F4).reshape(case.query.shape)
    with pytest.raises(ValueError, match="query: expected elements at multiples of their size"):
        case.run(query=query)
    record = np.zeros(case.query.shape, np.dtype([("flag", "u1"), ("x", "f4")]))
    with pytest.raises(TypeError, match="query: expected a NumPy array of float32 with strides of whole elements"):
        case.run(query=record["x"])


WRONG_EXAMPLES: WrongCalls = {
    ValueError: [
        ({"query": None}, "query: expected an array, got None"),
        ({"out": zeros(2, 2, 3, 5, 6)[..., ::-1]}, "out: expected a C-contiguous array"),
        ({"value": zeros(2, 2, 1, 8, 6)}, "value: expected shape"),
        ({"start": np.zeros((2, 5), np.int64)}, "stop: expected start and stop together, got None"),
        (
            {"start": np.zeros((2, 10), np.int64)[:, ::2], "stop": np.zeros((2, 5), np.int64)},
            "start: expected a C-contiguous array",
        ),
        ({"w_v": zeros(4)}, "w_v: expected None but with form 'additive'"),
        ({"bias": zeros(1, 2, 1, 5, 8)}, "bias: expected shape"),
        ({"sink": zeros(3, 3)}, "sink: expected shape"),
    ],
}


class Planned:
    """A plan of arrays by name."""

    def __init__(self, arrays: dict[str, Any], form: str = "inner", *, backward: bool = False) -> None:
        score = tuple((OPTIONS | {"form": form, "scale": 1.0}).values())
        inputs = [arrays.get(name) for name in INPUTS]
        if backward:
            saved, grads = ([arrays.get(name) for name in names] for names in (ROWS, GRADIENTS))
            self.names: tuple[str, ...] = (*INPUTS, *ROWS, *GRADIENTS)
            self.plan = native.plan_backward(score, inputs, saved, "float32", grads)
        else:
            filled = [name.removeprefix("saved_") for name in FILLED]
            self.names = (*INPUTS, *filled)
            self.plan = native.plan_forward(score, inputs, [arrays.get(name) for name in filled])
        self.names = tuple(x for x in self.names if arrays.get(x) is not None)

    def __call__(self, arrays: dict[str, Any], threads: int = 1) -> None:
        self.plan(tuple(arrays[name] for name in self.names), 0, threads)


@pytest.mark.parametrize(("change", "error", "message"), rows(WRONG_EXAMPLES))
def test_wrong_examples(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Planned(_plan_arrays() | change)


def _backward_arrays() -> dict[str, Any]:
    """Arrays of an additive backward, as its forward has filled them."""
    arrays = _plan_arrays() | {"w_v": np.ones(4, F4)}
    arrays |= {x: np.zeros((2, 2, 3, 5, 1), F4) for x in ("row_max", "log_denom")}
    Planned(arrays, "additive")(arrays)
    arrays |= {f"grad_{x}": np.zeros_like(arrays[x]) for x in ("out", "query", "key", "value")}
    return arrays | {"grad_w_v": np.zeros((2, 2, 1, 4), F4)}


def _of_every_input() -> dict[str, Any]:
    """Arrays of a forward with every input that an additive score may have, and every matrix that it may fill."""
    arrays, bounds = _plan_arrays(), np.full((2, 5), 7)
    pairs, ids = {"bias": np.zeros((1, 2, 1, 5, 7), F4)}, {"query_ids": np.zeros((2, 5), int)}
    pairs |= {x: np.zeros((2, 2, 3, 5, 7), F4) for x in ("scores", "attention_weights")}
    pairs["mask"] = np.ones((2, 2, 3, 5, 7), np.uint8)
    arrays |= pairs | ids | {"key_ids": np.zeros((2, 7), int), "start": 0 * bounds, "stop": bounds}
    arrays |= {"w_v": np.ones(4, F4), "sink": np.zeros((2, 3), F4)}
    return arrays | {name: np.zeros((2, 2, 3, 5, 1), F4) for name in ("row_max", "log_denom")}


@pytest.mark.parametrize("convert", [np.asarray, pytest.param(torch.from_numpy, marks=reads_tensors)])
@pytest.mark.parametrize(
    ("make", "options"),
    [(_of_every_input, {}), (_backward_arrays, {"backward": True})],
    ids=["forward", "backward"],
)
def test_memory_of_a_plan(make: Callable[[], dict[str, Any]], options: dict[str, Any], convert: Any) -> None:
    """Every array is aligned and has at least the memory of its example."""
    examples = make()
    plan, arrays = Planned(examples, "additive", **options), {name: convert(x) for name, x in examples.items()}
    plan(arrays)
    for name, example in examples.items():
        flat = arrays[name].reshape(-1)
        repeated = np.broadcast_to(flat[:1], example.shape) if convert is np.asarray else flat[:1].expand(example.shape)
        for less in (flat[:-1], repeated):
            with pytest.raises(ValueError, match=f"^{name}: expected an array like the example of the plan, "):
                plan(arrays | {name: less})
        if example.itemsize > 1:
            misaligned = np.zeros(example.nbytes + 1, np.uint8)[1:].view(example.dtype).reshape(example.shape)
            with pytest.raises(ValueError, match=f"^{name}: expected an address at a multiple of {example.itemsize}"):
                plan(arrays | {name: misaligned})
        with pytest.raises(TypeError, match="bytes-like object is required"):
            plan(arrays | {name: example.ctypes.data})  # an address has no size


def test_memory_in_front_of_the_first_element() -> None:
    arrays = _plan_arrays()
    backwards = arrays | {"key": arrays["key"][..., ::-1, :]}
    plan = Planned(backwards)
    plan(backwards)
    with pytest.raises(ValueError, match="key: expected an array like the example of the plan"):
        plan(arrays)


def test_wrong_calls_of_a_plan() -> None:
    arrays = _plan_arrays()
    plan = Planned(arrays)
    with pytest.raises(ValueError, match="threads: expected 1 or more, or a negative number, got 0"):
        plan(arrays, threads=0)
    with pytest.raises(ValueError, match="arrays: expected 4, got 3"):
        plan.plan((arrays["query"],) * 3, 0, 1)


def test_intervals_of_a_plan_are_those_of_the_call() -> None:
    arrays = _plan_arrays()
    zeros = np.zeros((2, 5), np.int64)
    plan = Planned(arrays | {"start": zeros, "stop": zeros})
    # Numbers that no example may have reach no memory outside of the arrays.
    plan(arrays | {"start": np.full_like(zeros, -(10**9)), "stop": np.full_like(zeros, 10**9)})
    arrays |= {"start": zeros, "stop": np.full_like(zeros, 3)}
    out = np.full_like(arrays["out"], np.nan)
    plan(arrays | {"out": out}, 2)
    scores = np.exp(arrays["query"] @ arrays["key"][..., :3, :].swapaxes(-1, -2))
    wanted = scores @ arrays["value"][..., :3, :] / scores.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_new_arrays_of_a_plan(dtype: type) -> None:
    """Valid lengths take the place of start and stop; what a run fills is allocated by it."""
    arrays = _plan_arrays()
    bounds = {"start": np.zeros((2, 5), np.int64), "stop": np.zeros((2, 5), np.int64)}
    plan, lens = Planned(arrays | bounds), np.array([[3], [7]], dtype)
    given = tuple(arrays[name] for name in ("query", "key", "value"))
    layouts = ((arrays["out"].shape, F4),)

    def run(lens: tuple[Any, ...]) -> Any:
        return plan.plan.allocate_and_run(given, lens, np.empty, layouts, 0, 1)

    for own in (lens, lens[:, 0], lens.repeat(5, 1)):
        expected = arrays | bounds | {"stop": np.broadcast_to(lens, (2, 5)).astype(np.int64)}
        plan(expected)
        (found,) = run((own,))
        np.testing.assert_array_equal(found, expected["out"])
    assert run((lens + 1,)) is None
    assert run((-lens,)) is None
    with pytest.raises(ValueError, match="lens: expected an array that broadcasts"):
        run((np.zeros(3, dtype),))
    with pytest.raises(TypeError, match="lens: expected an int32 or int64 array"):
        run((lens.astype("f"),))
    with pytest.raises(ValueError, match="arrays: expected 6, got 4"):
        run(())
    with pytest.raises(ValueError, match="lens: expected"):
        Planned(arrays).plan.allocate_and_run(given, (lens,), np.empty, layouts, 0, 1)
    with pytest.raises(RuntimeError):
        plan.plan.allocate_and_run(given, (lens,), np.empty, (5,), 0, 1)
    with pytest.raises(ZeroDivisionError):
        plan.plan.allocate_and_run(given, (lens,), lambda shape, dtype: 1 / 0, layouts, 0, 1)


def test_wrong_calls_of_a_plan_for_any_number_of_keys() -> None:
    arrays = _plan_arrays() | {"mask": np.ones((2, 2, 3, 5, 7), np.uint8)}
    score = tuple((OPTIONS | {"form": "inner", "scale": 1.0}).values())
    filled = [arrays["out"], *[None] * (len(FILLED) - 1)]
    plan = native.plan_decoding(score, [arrays.get(name) for name in INPUTS], filled, True, False)
    query, key, value = arrays["query"].reshape(2, 6, 5, 4), arrays["key"][:, :, 0], arrays["value"][:, :, 0]
    mask = arrays["mask"].reshape(2, 6, 5, 7)

    def run(*arrays: Any) -> Any:
        return plan.allocate_and_run(arrays, (), np.empty, (((2, 6, 5, 6), F4),), 0, 1)[0]

    for keys in (7, 3, 1, 7):
        cut = key[..., :keys, :], value[..., :keys, :], mask[..., :keys]
        scores = np.exp(query @ cut[0].repeat(3, 1).swapaxes(-1, -2))
        expected = scores @ cut[1].repeat(3, 1) / scores.sum(-1, keepdims=True)
        np.testing.assert_allclose(run(query, *cut), expected, rtol=1e-5, atol=1e-5)
    for wrong in (
        (query, key, value),
        (query, key),
        (query, key[0, 0, 0], value, mask),
        (query, key, value, mask.view("V1")),
    ):
        with pytest.raises(
            ValueError, match="arrays: expected query, key, value and the mask of the plan, if it has one"
        ):
            run(*wrong)
    with pytest.raises(ValueError, match="value: expected shape"):
        run(query, key, value[..., 1:, :], mask)
    with pytest.raises(ValueError, match="mask: expected shape"):
        run(query, key, value, mask[..., 1:])
    # Fewer heads, channels and axes than in the examples are too little memory.
    for name, position, less in (
        ("query", 0, query[:, :4]), ("key", 1, key[:, :1]), ("key", 1, key[..., :3].copy()), ("key", 1, key[0, 0]),
        ("value", 2, value[:1]), ("mask", 3, mask[:, :3]),
    ):  # fmt: skip
        changed = [query, key, value, mask]
        changed[position] = less
        with pytest.raises(ValueError, match=f"^{name}: expected an array like the example of the plan"):
            run(*changed)
    with pytest.raises(ValueError, match="arrays: expected 5, got 6"):
        run(query, key, value, mask, mask)
    with pytest.raises(ValueError, match="lens: expected"):
        plan.allocate_and_run((query, key, value, mask), (np.zeros(2, int),), np.empty, (), 0, 1)


def test_weights_of_a_plan_are_required() -> None:
    arrays = _plan_arrays() | {"w_v": np.ones(4, F4)}
    with pytest.raises(ValueError, match=r"w_v: expected shape \(4,\), got \(3,\)"):
        Planned(arrays | {"w_v": np.ones(3, F4)}, "additive")
    plan = Planned(arrays, "additive")
    with pytest.raises(ValueError, match=r"w_v: expected .* 16 bytes of memory, got 8"):
        plan(arrays | {"w_v": np.ones(2, F4)})
    plan(arrays)
    hidden = np.tanh(arrays["query"][..., :, None, :] + arrays["key"][..., None, :, :]).sum(-1)
    wanted = np.exp(hidden) @ arrays["value"] / np.exp(hidden).sum(-1, keepdims=True)
    np.testing.assert_allclose(arrays["out"], wanted, rtol=1e-5, atol=1e-5)


def _plan_arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 2, 3, 5, 4), "key": (2, 2, 1, 7, 4), "value": (2, 2, 1, 7, 6), "out": (2, 2, 3, 5, 6)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
