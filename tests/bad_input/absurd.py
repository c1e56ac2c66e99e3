"""Values that mean nothing, for every argument of every function: where a bare error would slip through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import attnscore as ats
from bad_input.table import Maker

# None, a number or a word is welcome somewhere; there it gives a result.
VALUES: dict[str, Callable[[Maker], Any]] = {
    "None": lambda x: None,
    "word": lambda x: "absurd",
    "empty word": lambda x: "",
    "bytes": lambda x: b"absurd",
    "number": lambda x: 3,
    "negative": lambda x: -7,
    "fraction": lambda x: 0.25,
    "NaN": lambda x: float("nan"),
    "infinity": lambda x: float("inf"),
    "huge": lambda x: 10**400,
    "complex": lambda x: 1j,
    "flag": lambda x: True,
    "empty list": lambda x: [],
    "list": lambda x: [1, 2, 3],
    "ragged": lambda x: [[1.0], [1.0, 2.0]],
    "dict": lambda x: {"a": 1},
    "set": lambda x: {1, 2},
    "object": lambda x: object(),
    "function": lambda x: len,
    "class": lambda x: ats.Dot,
    "mask": lambda x: ats.Causal(offset=1),
    "score": lambda x: ats.Sum(),
    "slice": lambda x: slice(None),
    "NumPy number": lambda x: np.float32(0.5),
    "no axes": lambda x: x.array(1.0),
    "one axis": lambda x: x.floats(5),
    "nine axes": lambda x: x.floats(1, 2, 1, 2, 1, 2, 1, 2, 1),
    "nothing in it": lambda x: x.floats(0),
    "whole numbers": lambda x: x.ints(2, 3),
    "booleans": lambda x: x.bools(2, 2, 2),
    "complex numbers": lambda x: x.complexes(2, 3),
    "not a number": lambda x: x.array([[float("nan")] * 3] * 2),
    "other framework": lambda x: x.other(2, 3, 4),
    "objects": lambda x: np.array([None, "a"], dtype=object),
    "text": lambda x: np.array(["a", "b"]),
    "times": lambda x: np.array(["2020-01-01"], dtype="datetime64[D]"),
}


@dataclass(frozen=True)
class Call:
    """A function, good arguments for it, and the arguments to spoil one at a time."""

    function: Callable[..., Any]
    good: Callable[[Maker], dict[str, Any]]
    arguments: tuple[str, ...]


def _pair(x: Maker) -> dict[str, Any]:
    return {"query": x.floats(2, 3, 4), "key": x.floats(2, 5, 4)}


_MASKS_AND_MORE = ("score", "mask", "valid_lens", "bias", "sink", "head_axis")
_SWITCHES = ("dropout", "seed", "kernel", "return_weights", "return_stats")
_BLOCK = ("query_index", "key_index")


def _with_threads(n: Any) -> None:
    """set_num_threads(), undone: what is welcome would hold for all tests that follow."""
    before = ats.get_num_threads()
    try:
        ats.set_num_threads(n)
    finally:
        ats.set_num_threads(before)


_FUNCTIONS = {
    "attend": Call(ats.attend, Maker.three, ("query", "key", "value", *_MASKS_AND_MORE, *_SWITCHES)),
    "explain": Call(ats.explain, Maker.three, ("query", "key", "value", "mask", "kernel", "score")),
    "attention_weights": Call(ats.attention_weights, _pair, ("query", "key", *_MASKS_AND_MORE, *_BLOCK)),
    "attention_scores": Call(ats.attention_scores, _pair, ("query", "key", "mask", "bias", *_BLOCK)),
    "top_weights": Call(ats.top_weights, lambda x: {**_pair(x), "k": 2}, ("query", "key", "k", *_MASKS_AND_MORE)),
    "pooled_weights": Call(ats.pooled_weights, _pair, ("query", "key", "bins", *_MASKS_AND_MORE)),
    "key_mass": Call(ats.key_mass, _pair, ("query", "key", *_MASKS_AND_MORE)),
    "set_num_threads": Call(_with_threads, lambda x: {"n": 1}, ("n",)),
    "masked_softmax": Call(
        ats.masked_softmax,
        lambda x: {"scores": x.floats(2, 3, 5)},
        ("scores", "valid_lens", "mask", "axis", "temperature"),
    ),
    "softmax_jacobian": Call(ats.softmax_jacobian, lambda x: {"weights": x.floats(2, 3)}, ("weights",)),
    "softmax_pullback": Call(
        ats.softmax_pullback,
        lambda x: {"weights": x.floats(2, 3), "grad": x.floats(2, 3)},
        ("weights", "grad"),
    ),
    "merge": Call(
        ats.merge,
        lambda x: {"outs": [x.floats(3, 2)] * 2, "log_sum_exps": [x.floats(3)] * 2},
        ("outs", "log_sum_exps"),
    ),
    "cost": Call(
        ats.cost,
        lambda x: {"score": "dot", "query_len": 3, "key_len": 5, "dim": 4},
        ("score", "query_len", "key_len", "dim", "key_dim", "value_dim", "num_hiddens", "heads", "batch"),
    ),
    "cost of an additive score": Call(
        ats.cost,
        lambda x: {"score": "additive", "query_len": 3, "key_len": 5, "dim": 4, "num_hiddens": 3},
        ("dim", "key_dim", "num_hiddens"),
    ),
    "cost of a bilinear score": Call(
        ats.cost,
        lambda x: {"score": "bilinear", "query_len": 3, "key_len": 5, "dim": 4},
        ("dim", "key_dim"),
    ),
}

# Good fields of a score or mask for self-attention of 4 vectors of length 2, and those to spoil.
_FIELDS: dict[type, tuple[Callable[[Maker], dict[str, Any]], tuple[str, ...]]] = {
    ats.Additive: (
        lambda x: {"w_v": x.floats(3), "W_q": x.floats(3, 2), "W_k": x.floats(3, 2)},
        ("w_v", "W_q", "W_k", "bias", "activation", "negative_slope"),
    ),
    ats.Bilinear: (lambda x: {"W": x.floats(2, 2)}, ("W",)),
    ats.ScaledDot: (lambda x: {}, ("scale",)),
    ats.Cosine: (lambda x: {}, ("scale",)),
    ats.Gaussian: (lambda x: {}, ("bandwidth",)),
    ats.SoftCap: (lambda x: {"score": "dot", "cap": 2.0}, ("score", "cap")),
    ats.Temperature: (lambda x: {"score": "dot", "temperature": 2.0}, ("score", "temperature")),
    ats.ValidLens: (lambda x: {"lens": 3}, ("lens", "query_lens")),
    ats.KeyRange: (lambda x: {"start": 1, "stop": 3}, ("start", "stop")),
    ats.KeyPadding: (lambda x: {"array": x.bools(1, 4)}, ("array",)),
    ats.Causal: (lambda x: {}, ("align", "offset")),
    ats.SlidingWindow: (lambda x: {}, ("left", "right", "align", "offset")),
    ats.PrefixLM: (lambda x: {"prefix_lens": 2}, ("prefix_lens",)),
    ats.Documents: (lambda x: {"query_ids": [0, 0, 1, 1]}, ("query_ids", "key_ids")),
    ats.Packed: (lambda x: {"cu_query": [0, 2, 4]}, ("cu_query", "cu_key", "left", "right", "align")),
    ats.Neighbours: (lambda x: {"indptr": [0, 1, 2, 2, 3], "indices": [3, 0, 1]}, ("indptr", "indices")),
    ats.Dense: (lambda x: {"array": x.bools(4, 4)}, ("array",)),
}


def _attend_with(cls: type) -> Callable[..., Any]:
    role = "mask" if issubclass(cls, ats.Mask) else "score"
    return lambda x, **fields: x.square(**{role: cls(**fields)})


def _good_fields(cls: type) -> Callable[[Maker], dict[str, Any]]:
    return lambda x: {"x": x, **_FIELDS[cls][0](x)}


CALLS = _FUNCTIONS | {
    cls.__name__: Call(_attend_with(cls), _good_fields(cls), fields) for cls, (_, fields) in _FIELDS.items()
}
