"""Scores: names, classes, parameters of wrong shape, dtype, range or framework, a custom score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import attnscore as ats
from attnscore import ArgumentError, DtypeError, FrameworkError, ShapeError
from bad_input.table import Errors, Maker, Rows, cases

_NAN, _INF = float("nan"), float("inf")
_NAMES = "dot|scaled_dot|gaussian|cosine|sum"
_SCALED = {"ScaledDot": ats.ScaledDot, "Cosine": ats.Cosine}
_WRAPPERS = {"cap": ats.SoftCap, "temperature": ats.Temperature}

_WHICH: Rows = {
    "an unknown name": (f"score|one of|{_NAMES}|got 'dott'", lambda x: x.attend(score="dott")),
    **{
        f"{name!r} by name": (
            f"score|one of|{_NAMES}|got {name!r}|"
            f"Hint: outside of layers, a score with parameters is an object: score=ats.{made}",
            lambda x, name=name: x.attend(score=name),
        )
        for name, made in (
            ("additive", "Additive(w_v, W_q, W_k)"),
            ("additve", "Additive(w_v, W_q, W_k)"),
            ("Bilinear", "Bilinear(W)"),
            ("soft_cap", 'SoftCap("scaled_dot", cap)'),
            ("temperature", 'Temperature("scaled_dot", temperature)'),
        )
    },
    **{
        f"{name!r} for another name": (
            f"score|one of|{_NAMES}|got {name!r}|Hint: did you mean {meant!r}?",
            lambda x, name=name: x.attend(score=name),
        )
        for name, meant in (("scaled-dot", "scaled_dot"), ("Gausian", "gaussian"), ("Scaled_Dot", "scaled_dot"))
    },
    "the empty name": (f"score|{_NAMES}|got ''", lambda x: x.attend(score="")),
    "the class instead of a score": (
        "score|a registered name or a score object|Dot|Hint: Dot(...) makes one",
        lambda x: x.attend(score=ats.Dot),
    ),
    "a class with parameters": (
        "score|score object|Additive|Hint: Additive(...) makes one",
        lambda x: x.attend(score=ats.Additive),
    ),
    **{
        f"score is {score!r}": (
            f"score|a registered name or a score object with a method tile|got {score!r}",
            lambda x, score=score: x.attend(score=score),
        )
        for score in (None, 5, ["dot"], {"dot": 1})
    },
    "a mask as score": ("score|a score object with a method tile|Causal()", lambda x: x.attend(score=ats.Causal())),
    "for weights": (f"score|one of|{_NAMES}|'dott'", lambda x: x.weights(score="dott")),
    "inside a wrapper": (f"score|one of|{_NAMES}|'dott'", lambda x: x.attend(score=ats.SoftCap("dott", 2.0))),
    "inside two wrappers": (
        f"score|one of|{_NAMES}|'dott'",
        lambda x: x.attend(score=ats.SoftCap(ats.Temperature("dott", 2.0), 2.0)),
    ),
    "a class inside a wrapper": (
        "score|Hint: Dot(...) makes one",
        lambda x: x.attend(score=ats.Temperature(ats.Dot, 2.0)),
    ),
}


def _scales(name: str, make: Callable[[Any], Any]) -> Errors:
    """Scales of a score that has them."""
    return {
        ArgumentError: {
            f"{name}: scale as text": ("scale|a number|array|str", lambda x: x.attend(score=make("big"))),
            f"{name}: scale as a list": ("scale|a number|array|list", lambda x: x.attend(score=make([1.0, 2.0]))),
        },
        DtypeError: {
            f"{name}: complex scale": (
                "scale|a floating dtype|complex64",
                lambda x: x.attend(score=make(x.complexes(1))),
            ),
            f"{name}: whole-number scale": ("scale|a floating dtype|int64", lambda x: x.attend(score=make(x.ints(1)))),
        },
        ShapeError: {
            f"{name}: one scale too many": ("scale|(4,)|got (5,", lambda x: x.heads(4, 2, score=make(x.floats(5)))),
            f"{name}: a scale per pair": (
                "scale|constant along one of the two|got (3, 5)",
                lambda x: x.attend(score=make(x.floats(3, 5))),
            ),
            f"{name}: scales for other queries": (
                "scale|broadcasts to (..., query, key)|got (4, 1)|(2, 3, 4)",
                lambda x: x.attend(score=make(x.floats(4, 1))),
            ),
        },
    }


def _additive(x: Maker, **given: Any) -> Any:
    """attend() with h = 8, dim = 4, dim_k = 4, and what is given instead."""
    parameters = {"w_v": x.floats(8), "W_q": x.floats(8, 4), "W_k": x.floats(8, 4)} | given
    return x.attend(score=ats.Additive(**parameters))


_ADDITIVE: Errors = {
    ShapeError: {
        "w_v None": ("w_v|(h,)|NoneType", lambda x: _additive(x, w_v=None)),
        "w_v a list": ("w_v|(h,)|list", lambda x: _additive(x, w_v=[1.0] * 8)),
        "w_v without axes": ("w_v|(h,)|got ()", lambda x: _additive(x, w_v=x.array(1.0))),
        "w_v of another h": ("W_q|(h, dim) = (7, 4)|got (8, 4)|w_v (7,)", lambda x: _additive(x, w_v=x.floats(7))),
        "W_q of another dim": (
            "W_q|(h, dim) = (8, 4)|got (8, 3)|shapes: query (2, 3, 4), |w_v (8,)|W_q (8, 3)|W_k (8, 4)",
            lambda x: _additive(x, W_q=x.floats(8, 3)),
        ),
        "W_q turned": ("W_q|(8, 4)|got (4, 8)", lambda x: _additive(x, W_q=x.floats(4, 8))),
        "W_k of another dim": ("W_k|(8, 4)|got (8, 2)|w_v (8,)", lambda x: _additive(x, W_k=x.floats(8, 2))),
        "W_q of one axis": ("W_q|(8, 4)|got (8,)", lambda x: _additive(x, W_q=x.floats(8))),
        "W_q a list": ("W_q|(8, 4)|list", lambda x: _additive(x, W_q=[[1.0] * 4] * 8)),
        "W_k as text": ("W_k|(8, 4)|str", lambda x: _additive(x, W_k="text")),
        "a query that is not projected": ("W_q|query vectors of dimension h = 8|4", lambda x: _additive(x, W_q=None)),
        "keys that are not projected": ("W_k|key vectors of dimension h = 8|4", lambda x: _additive(x, W_k=None)),
        "bias of another h": ("bias|(8,)|got (7,)", lambda x: _additive(x, bias=x.floats(7))),
        "bias as text": ("bias|(8,)|str", lambda x: _additive(x, bias="text")),
        "parameters for three of two heads": (
            "W_q|(2,) heads in front|got (3, 8, 4)",
            lambda x: x.heads(2, 2, score=ats.Additive(x.floats(8), x.floats(3, 8, 4), x.floats(8, 4))),
        ),
        "w_v for three of two heads": (
            "w_v|(2,) heads in front|got (3, 8)",
            lambda x: x.heads(2, 2, score=ats.Additive(x.floats(3, 8), x.floats(8, 4), x.floats(8, 4))),
        ),
        **{
            f"{name} for three of two heads": (
                f"{name}|() or (2,)|got (3,)",
                lambda x, make=make: x.heads(2, 2, score=make(abs(x.floats(3)) + 1)),
            )
            for name, make in (
                ("temperature", lambda a: ats.Temperature("dot", a)),
                ("cap", lambda a: ats.SoftCap("dot", a)),
                ("bandwidth", ats.Gaussian),
            )
        },
    },
    DtypeError: {
        "whole-number w_v": ("w_v|a floating dtype|int64", lambda x: _additive(x, w_v=x.ints(8))),
        "boolean W_q": ("W_q|a floating dtype|bool", lambda x: _additive(x, W_q=x.bools(8, 4))),
    },
    ArgumentError: {
        **{
            f"activation {activation!r}": (
                f"activation|one of|tanh|sigmoid|relu|leaky_relu|silu|gelu|got {activation!r}",
                lambda x, activation=activation: _additive(x, activation=activation),
            )
            for activation in ("swish", None, 3, ["tanh"])
        },
        **{
            f"negative_slope {slope!r}": (
                f"negative_slope|a number|got {slope!r}",
                lambda x, slope=slope: _additive(x, activation="leaky_relu", negative_slope=slope),
            )
            for slope in ("steep", None)
        },
    },
}

_BILINEAR: Errors = {
    ShapeError: {
        "W None": ("W|(dim, dim_k) = (4, 4)|NoneType", lambda x: x.attend(score=ats.Bilinear(None))),
        "W a list": ("W|(4, 4)|list", lambda x: x.attend(score=ats.Bilinear([[1.0] * 4] * 4))),
        "W a number": ("W|(4, 4)|float", lambda x: x.attend(score=ats.Bilinear(1.0))),
        "W turned": (
            "W|(dim, dim_k) = (4, 7)|got (7, 4)",
            lambda x: x.attend(key=x.floats(2, 5, 7), score=ats.Bilinear(x.floats(7, 4))),
        ),
        "W of one axis": ("W|(4, 4)|got (4,)", lambda x: x.attend(score=ats.Bilinear(x.floats(4)))),
        "W of four axes": ("W|(4, 4)|got (1, 1, 4, 4)", lambda x: x.attend(score=ats.Bilinear(x.floats(1, 1, 4, 4)))),
        "W for three of two heads": (
            "W|(2,) heads in front|got (3, 4, 4)",
            lambda x: x.heads(2, 2, score=ats.Bilinear(x.floats(3, 4, 4))),
        ),
    },
    DtypeError: {
        "whole-number W": ("W|a floating dtype|int64", lambda x: x.attend(score=ats.Bilinear(x.ints(4, 4)))),
    },
}

_NUMBERS: Errors = {
    ArgumentError: {
        **{
            f"bandwidth {bandwidth!r}": (
                f"bandwidth|a finite number above 0|{bandwidth!r}",
                lambda x, bandwidth=bandwidth: x.attend(score=ats.Gaussian(bandwidth)),
            )
            for bandwidth in (0, 0.0, -1.0, 1e-300, _NAN, "wide", None, True, 1j)
        },
        "a bandwidth of 0 among others": (
            "bandwidth|finite numbers above 0|0.0",
            lambda x: x.heads(2, 2, score=ats.Gaussian(x.array([1.0, 0.0]))),
        ),
        **{
            f"{name}={value!r}": (
                f"{name}: expected a finite number above 0|got {value!r}",
                lambda x, wrapper=wrapper, value=value: x.attend(score=wrapper("scaled_dot", value)),
            )
            for name, wrapper in _WRAPPERS.items()
            for value in (0, 0.0, -2.0, _NAN, _INF, "two", None, True, [1.0])
        },
        "cap inside a wrapper": (
            "cap|a finite number above 0|got -3",
            lambda x: x.attend(score=ats.Temperature(ats.SoftCap("dot", -3), 2.0)),
        ),
    },
    ShapeError: {
        "one bandwidth too many": (
            "bandwidth|(2,)|got (3,",
            lambda x: x.heads(2, 2, score=ats.Gaussian(x.array([1.0, 2.0, 3.0]))),
        ),
        "bandwidths of another dimension": (
            "bandwidth|(heads,), or (1, dim) or (heads, dim) with dim = |got (1, 2)",
            lambda x: x.heads(2, 2, score=ats.Gaussian(x.array([[1.0, 2.0]]))),
        ),
        "bandwidths of three axes": (
            "bandwidth|(heads,), or (1, dim) or (heads, dim)|got (1, 1, 2)",
            lambda x: x.heads(2, 2, score=ats.Gaussian(x.array([[[1.0, 2.0]]]))),
        ),
    },
    DtypeError: {
        "whole-number bandwidths": (
            "bandwidth|a floating dtype|int64",
            lambda x: x.heads(2, 2, score=ats.Gaussian(x.array([1, 2], "int64"))),
        ),
    },
}


def _learned(name: str, wrapper: Callable[[Any, Any], Any]) -> Errors:
    """Learned numbers of a wrapper."""
    return {
        ShapeError: {
            f"{name} of two axes": (
                f"{name}|a number, () or (heads,)|got (1, 2)",
                lambda x: x.heads(2, 2, score=wrapper("dot", x.array([[1.0, 2.0]]))),
            ),
            f"one {name} too many": (
                f"{name}|(2,)|got (3,",
                lambda x: x.heads(2, 2, score=wrapper("dot", x.array([1.0, 2.0, 3.0]))),
            ),
        },
        ArgumentError: {
            f"a learned {name} of 0": (
                f"{name}|finite numbers above 0|0.0",
                lambda x: x.heads(2, 2, score=wrapper("dot", x.array([1.0, 0.0]))),
            ),
        },
        DtypeError: {
            f"whole-number {name}": (
                f"{name}|a floating dtype|int64",
                lambda x: x.heads(2, 2, score=wrapper("dot", x.array([1, 2], "int64"))),
            ),
        },
    }


def _of_dtype(x: Maker, dtype: str, **given: Any) -> Any:
    """attend() in another dtype than float32; float16 has its scores in float32."""
    query, key, value = (x.floats(2, length, 4, dtype=dtype) for length in (3, 5, 5))
    return ats.attend(query, key, value, **given)


_FLOAT32, _FLOAT64 = "expected a number that works in float32, ", "expected a number that works in float64, "
_LARGEST = f"{_FLOAT32}3.4e+38 or less in size, got "
# Numbers that the dtype of the scores cannot hold, or whose inverse it cannot: they gave NaN, or zeros.
_EXTREME: Rows = {
    **{
        f"{score!r}, {kernel}": (words, lambda x, s=score, k=kernel: x.attend(score=s, kernel=k))
        for kernel in ("auto", "streaming", "dense")
        for score, words in (
            (ats.Temperature("dot", 1e-39), f"temperature: {_FLOAT32}2.94e-39 or more, got 1e-39"),
            (ats.Gaussian(1e-20), f"bandwidth: {_FLOAT32}5.42e-20 or more, got 1e-20"),
            (ats.ScaledDot(1e39), f"scale: {_LARGEST}1e+39"),
            (ats.ScaledDot(-1e39), f"scale: {_LARGEST}-1e+39"),
            (ats.Cosine(1e39), f"scale: {_LARGEST}1e+39"),
            (
                ats.Temperature(ats.Temperature("dot", 1e-20), 1e-25),
                f"temperature: {_FLOAT32}2.94e-19 or more, got 1e-25",
            ),
            (ats.Temperature(ats.Gaussian(1e-15), 1e-20), f"temperature: {_FLOAT32}1.47e-09 or more, got 1e-20"),
            (ats.SoftCap(ats.Temperature("dot", 1e-39), 5.0), f"temperature: {_FLOAT32}2.94e-39 or more, got 1e-39"),
            (ats.Temperature(ats.SoftCap("dot", 5.0), 1e-39), f"temperature: {_FLOAT32}2.94e-39 or more, got 1e-39"),
            (ats.Temperature(ats.SoftCap("dot", 1e39), 1e-39), f"temperature: {_FLOAT32}2.94e-39 or more, got 1e-39"),
        )
    },
    "T in 16 bits": (
        f"temperature: {_FLOAT32}2.94e-39",
        lambda x: _of_dtype(x, "float16", score=ats.Temperature("dot", 1e-40)),
    ),
    "T in float64": (
        f"temperature: {_FLOAT64}5.56e-309",
        lambda x: _of_dtype(x, "float64", score=ats.Temperature("dot", 1e-309)),
    ),
    "bandwidth in float64": (
        f"bandwidth: {_FLOAT64}7.46e-155 or more, got 1e-160",
        lambda x: _of_dtype(x, "float64", score=ats.Gaussian(1e-160)),
    ),
    "negative_slope of 1e39": (
        f"negative_slope: {_LARGEST}1e+39",
        lambda x: _additive(x, activation="leaky_relu", negative_slope=1e39),
    ),
    "bias of 1e39": (f"bias: {_LARGEST}1e+39", lambda x: x.attend(bias=1e39)),
    "bias of -1e39": (f"bias: {_LARGEST}-1e+39", lambda x: x.attend(bias=-1e39)),
    "bias of NumPy's 1e39": (f"bias: {_LARGEST}", lambda x: x.attend(bias=np.float64(1e39))),
    "sink of 1e39": (f"sink: {_LARGEST}1e+39", lambda x: x.attend(sink=1e39)),
    "temperature of a softmax": (f"temperature: {_FLOAT32}2.94e-39", lambda x: x.softmax(temperature=1e-39)),
    "T for weights": (f"temperature: {_FLOAT32}2.94e-39", lambda x: x.weights(score=ats.Temperature("dot", 1e-39))),
}


@dataclass(frozen=True, eq=False)
class _Turned:
    """A user's score that gives (key, query)."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.matmul(key, ops.matrix_transpose(query))


@dataclass(frozen=True, eq=False)
class _Summed:
    """A user's score that gives one number a query."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.sum(query, axis=-1, keepdims=True)


@dataclass(frozen=True, eq=False)
class _Nothing:
    """A user's score that forgot to return."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return None


@dataclass(frozen=True, eq=False)
class _PerHead:
    """A custom score whose parameter has the caller's axes (batch, head, query, key), where tiles have one more."""

    scale: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        scale = ops.reshape(self.scale, (1, -1, 1, 1))
        return scale * ops.matmul(query, ops.matrix_transpose(key))


@dataclass(frozen=True, eq=False)
class _Changed:
    """A custom score that does something else with the right scores in the end."""

    change: Callable[[Any, Any], Any]

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return self.change(ops, ops.matmul(query, ops.matrix_transpose(key)))


_TILE = "expected scores (*batch, kv head, group, query, key) = "
_KERNELS = ("auto", "streaming", "dense")


def _changed(name: str, words: str, change: Callable[[Any, Any], Any]) -> Rows:
    """Rows of a custom score whose tile is changed like this."""
    score, owner = _Changed(change), "tile of _Changed|; shapes: query (2, 1, 1, 3, 4), key (2, 1, 1, 5, 4)|"
    return {
        f"custom score {name}, {kernel}": (owner + words, lambda x, kernel=kernel: x.attend(score=score, kernel=kernel))
        for kernel in ("auto", "dense")
    }


_FEWER_AXES = _Changed(lambda ops, s: s[0, 0, 0])
_ELSEWHERE: dict[str, Callable[[Maker], Any]] = {
    "streaming": lambda x: x.attend(score=_FEWER_AXES, kernel="streaming"),
    "under a mask and a bias": lambda x: x.attend(score=_FEWER_AXES, bias=0.5, valid_lens=[5, 0]),
    "SoftCap": lambda x: x.attend(score=ats.SoftCap(_FEWER_AXES, 2.0)),
    "SoftCap, dense": lambda x: x.attend(score=ats.SoftCap(_FEWER_AXES, 2.0), kernel="dense"),
    "Temperature, dense": lambda x: x.attend(score=ats.Temperature(_FEWER_AXES, 2.0), kernel="dense"),
    "weights": lambda x: x.weights(score=_FEWER_AXES),
}

_OWN: Errors = {
    ShapeError: {
        "custom score, turned": (
            f"tile of _Turned|{_TILE}(2, 1, 1, 3, 5)|got (2, 1, 1, 5, 3)",
            lambda x: x.attend(score=_Turned()),
        ),
        "custom score, one number a query": (
            f"tile of _Summed|{_TILE}(2, 1, 1, 3, 5)|got (2, 1, 1, 3, 1)",
            lambda x: x.attend(score=_Summed()),
        ),
        **{
            f"custom score, a parameter per head on the caller's axes, {kernel}": (
                f"tile of _PerHead|{_TILE}(2, 4, 1, 3, 5)|got (2, 4, 4, 3, 5)|"
                "query (2, 4, 1, 3, 4), key (2, 4, 1, 5, 4)|Hint: a parameter per head has to be reshaped to "
                "(kv heads, groups, 1, 1) = (4, 1, 1, 1)",
                lambda x, kernel=kernel: x.heads(4, 4, score=_PerHead(x.floats(4)), kernel=kernel),
            )
            for kernel in _KERNELS
        },
        "custom score, a parameter per group of heads": (
            f"tile of _Changed|{_TILE}(2, 2, 2, 3, 5)|got (2, 2, 4, 3, 5)|(kv heads, groups, 1, 1) = (2, 2, 1, 1)",
            lambda x: x.heads(4, 2, score=_Changed(lambda ops, s: ops.concat((s, s), -3))),
        ),
        **{
            f"custom score without leading axes, {where}": (f"tile of _Changed|{_TILE}(2, 1, 1, 3, 5)|got (3, 5)", call)
            for where, call in _ELSEWHERE.items()
        },
        **_changed(
            "of the first batch row for all", f"{_TILE}(2, 1, 1, 3, 5)|got (1, 1, 1, 3, 5)", lambda ops, s: s[:1]
        ),
        **_changed("without leading axes", f"{_TILE}(2, 1, 1, 3, 5)|got (3, 5)", lambda ops, s: s[0, 0, 0]),
        **_changed("with an axis more", "got (1, 2, 1, 1, 3, 5)", lambda ops, s: ops.expand_dims(s, 0)),
        **_changed("for a key too few", "got (2, 1, 1, 3, 4)", lambda ops, s: s[..., 1:]),
    },
    DtypeError: {
        **_changed("in whole numbers", "a floating dtype|got int64", lambda ops, s: ops.astype(s, "int64")),
        **_changed("of complex numbers", "a floating dtype|got complex64", lambda ops, s: ops.astype(s, "complex64")),
        **_changed("of booleans", "a floating dtype|got bool", lambda ops, s: s > 0),
    },
    FrameworkError: {
        **_changed("as a list", "an array of scores|got list", lambda ops, s: [s]),
        "custom score, nothing": ("tile of _Nothing|an array of scores|NoneType", lambda x: x.attend(score=_Nothing())),
    },
}
_OBJECTS = _changed("of objects", "a floating dtype|got object", lambda ops, s: s.astype(object))

_OWN_WORDS: Errors = {
    ArgumentError: {
        "an array as score": ("score|a registered name or a score object", lambda x: x.attend(score=x.floats(4, 4))),
        **{
            f"a learned {name} in another": (
                f"{name}|one learned array of this name|another in",
                lambda x, wrapper=wrapper: x.attend(score=wrapper(wrapper("dot", x.array(2.0)), x.array(3.0))),
            )
            for name, wrapper in _WRAPPERS.items()
        },
    },
    FrameworkError: {
        **{
            f"{name}: scale of another framework": (
                "query: |scale: |arrays of one framework",
                lambda x, make=make: x.attend(score=make(x.other(1))),
            )
            for name, make in _SCALED.items()
        },
        "W_k of another framework": (
            "query: |W_k: |arrays of one framework",
            lambda x: _additive(x, W_k=x.other(8, 4)),
        ),
        "W of another framework": (
            "query: |W: |arrays of one framework",
            lambda x: x.attend(score=ats.Bilinear(x.other(4, 4))),
        ),
        "custom score, in arrays of another framework": (
            "query: |tile of _Changed: |arrays of one framework",
            lambda x: x.attend(score=_Changed(lambda ops, s: x.other(2, 1, 1, 3, 5))),
        ),
    },
}

CASES = (
    *cases({ArgumentError: _WHICH}),
    *(case for name, make in _SCALED.items() for case in cases(_scales(name, make))),
    *cases(_ADDITIVE),
    *cases(_BILINEAR),
    *cases(_NUMBERS),
    *(case for name, wrapper in _WRAPPERS.items() for case in cases(_learned(name, wrapper))),
    *cases({ArgumentError: _EXTREME}),
    *cases(_OWN),
    *cases({DtypeError: _OBJECTS}, only="numpy"),
    *cases(_OWN_WORDS, same=False),
)
