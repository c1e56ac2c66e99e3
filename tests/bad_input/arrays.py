"""Query, key and value: shapes, dtypes, frameworks; and bias and sink."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

import attnscore as ats
from attnscore import DtypeError, FrameworkError, ShapeError
from bad_input.table import Errors, Rows, cases

# "all shapes involved" of query (2, 3, 4), key (2, 5, 4), value (2, 5, 6)
_QUERY, _KEY, _VALUE = "query (2, 3, 4)", "key (2, 5, 4)", "value (2, 5, 6)"

_SHAPES: Rows = {
    "query without axes": ("query|2 axes or more|0|query ()", lambda x: x.attend(query=x.array(1.0))),
    "key without axes": ("key|2 axes or more|0|key ()", lambda x: x.attend(key=x.array(1.0))),
    "value without axes": ("value|2 axes or more|0", lambda x: x.attend(value=x.array(1.0))),
    "query of one axis": ("query|2 axes or more|1|query (4,)", lambda x: x.attend(query=x.floats(4))),
    "key of one axis": (f"key|2 axes or more|1|{_QUERY}|key (4,)", lambda x: x.attend(key=x.floats(4))),
    "value of one axis": (f"value|2 axes or more|1|{_KEY}", lambda x: x.attend(value=x.floats(6))),
    "one value too few": (
        f"value|as many positions as key (5)|got 4|{_QUERY}|{_KEY}|value (2, 4, 6)",
        lambda x: x.attend(value=x.floats(2, 4, 6)),
    ),
    "batches that do not broadcast": (
        f"query, key, value|leading axes that broadcast|got (2,) of query, (3,) of key, (2,) of value|{_QUERY}",
        lambda x: x.attend(key=x.floats(3, 5, 4)),
    ),
    "batch of the value": (
        f"query, key, value|broadcast|{_QUERY}|{_KEY}|value (3, 5, 6)",
        lambda x: x.attend(value=x.floats(3, 5, 6)),
    ),
    "heads that do not divide": (
        "key|heads that divides the 6 of query|got 4|query (2, 6, 3, 4)|key (2, 4, 5, 4)|Hint: head_axis=-2",
        lambda x: x.heads(6, 4),
    ),
    "fewer query heads than KV heads": ("key|divides the 2 of query|got 4|query (2, 2, 3, 4)", lambda x: x.heads(2, 4)),
    "key and value heads": (
        "value|as many heads as key (4)|got 2|query (2, 8, 3, 4)|key (2, 4, 5, 4)|value (2, 2, 5, 4)",
        lambda x: x.heads(8, 4, 2),
    ),
    "the other layout": (
        "value|as many positions as key (3)|got 2|Hint: head_axis=-2 takes the layout (batch, length, head, dim)",
        lambda x: ats.attend(x.floats(2, 7, 3, 4), x.floats(2, 5, 3, 4), x.floats(2, 5, 2, 4)),
    ),
    "heads with head_axis=-2": (
        "key|divides the 6 of query|got 4|query (2, 3, 6, 4)",
        lambda x: ats.attend(x.floats(2, 3, 6, 4), x.floats(2, 5, 4, 4), x.floats(2, 5, 4, 4), head_axis=-2),
    ),
    **{
        f"lengths of the vectors: {score}": (
            f"key|vectors of the dimension of query (4)|got 7|{_QUERY}|key (2, 5, 7)|Hint|Bilinear|Additive",
            lambda x, score=score: x.attend(key=x.floats(2, 5, 7), score=score),
        )
        for score in ("dot", "scaled_dot", "gaussian", "cosine", "sum")
    },
    "lengths of the vectors, for weights alone": (
        f"key|vectors of the dimension of query (4)|got 7|{_QUERY}|key (2, 5, 7)",
        lambda x: x.weights(key=x.floats(2, 5, 7)),
    ),
    "heads, for weights alone": (
        "key|divides the 6 of query|got 4|query (2, 6, 3, 4)|key (2, 4, 5, 4)",
        lambda x: x.weights(query=x.floats(2, 6, 3, 4), key=x.floats(2, 4, 5, 4)),
    ),
    "key without axes, for weights": ("key|2 axes or more|0", lambda x: x.weights(key=x.array(1.0))),
}


def _float8() -> Any:
    import ml_dtypes  # not in MXNet's environment

    return ml_dtypes.float8_e5m2


_DTYPES: Rows = {
    **{
        f"{argument} of {kind}": (
            f"{argument}|a floating dtype|{kind}|{argument} (2, ",
            lambda x, argument=argument, kind=kind: x.attend(
                **{argument: x.array(np.ones((2, 3 if argument == "query" else 5, 4)), kind)}
            ),
        )
        for argument in ("query", "key", "value")
        for kind in ("int64", "bool", "complex64")
    },
    "dtypes that differ": (
        "query, key, value|one dtype|query float32|key float64|value float32|Hint: cast",
        lambda x: x.attend(key=x.floats(2, 5, 4, dtype="float64")),
    ),
    "a half-precision query": (
        "one dtype|query float16|key float32|value float32",
        lambda x: x.attend(query=x.floats(2, 3, 4, dtype="float16")),
    ),
    "dtypes that differ, for weights alone": (
        "query, key|one dtype|query float32|key float64",
        lambda x: x.weights(key=x.floats(2, 5, 4, dtype="float64")),
    ),
}

_NOT_ARRAYS: Rows = {
    **{
        f"{argument} is {what}": (
            f"{argument}|an array of numpy or torch|got {shown}|Hint|numpy.asarray",
            lambda x, argument=argument, value=value: x.attend(**{argument: value}),
        )
        for argument in ("query", "key", "value")
        for what, value, shown in (
            ("None", None, "NoneType"),
            ("text", "text", "str"),
            ("a number", 3, "int"),
            ("a list", [[1.0, 2.0]], "list"),
            ("a tuple of arrays", (np.ones((2, 2)),), "tuple"),
        )
    },
    "a framework that is not served": (
        "query|arrays of numpy or torch|cupy",
        lambda x: x.attend(query=_of_cupy(), key=_of_cupy(), value=_of_cupy()),
    ),
}


def _masked_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.masked.masked_tensor(torch.ones(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool))


def _of_cupy() -> object:
    """Something that looks like an array of a package that is known and not served."""
    kind = type("ndarray", (), {"shape": (2, 3), "__module__": "cupy"})
    return kind()


_BIAS: Errors = {
    ShapeError: {
        "bias that does not broadcast": (
            "bias|broadcasts to (..., query, key) = (2, 3, 5)|got (3, 4)",
            lambda x: x.attend(bias=x.floats(3, 4)),
        ),
        "bias that would enlarge the result": (
            "bias|broadcasts to (..., query, key) = (2, 3, 5)|got (7, 2, 3, 5)",
            lambda x: x.attend(bias=x.floats(7, 2, 3, 5)),
        ),
        "bias per KV head": (
            "bias|(..., query, key) = (2, 4, 3, 5)|got (2, 2, 3, 5)",
            lambda x: x.heads(4, 2, bias=x.floats(2, 2, 3, 5)),
        ),
        "bias for weights": ("bias|(..., query, key) = (2, 3, 5)|got (3, 4)", lambda x: x.weights(bias=x.floats(3, 4))),
    },
    DtypeError: {
        "boolean bias": (
            "bias|a floating dtype|bool|Hint: a boolean array is a mask|mask=",
            lambda x: x.attend(bias=x.bools(3, 5)),
        ),
        "whole-number bias": ("bias|a floating dtype|int64", lambda x: x.attend(bias=x.ints(3, 5))),
        "complex bias": ("bias|a floating dtype|complex64", lambda x: x.attend(bias=x.complexes(3, 5))),
        "bias True": ("bias|a number or a floating array|bool", lambda x: x.attend(bias=True)),
    },
    FrameworkError: {
        "bias as text": ("bias|array|str", lambda x: x.attend(bias="text")),
        "bias as a list": ("bias|array|list", lambda x: x.attend(bias=[0.0] * 5)),
    },
}

_SINK: Errors = {
    ShapeError: {
        "one sink too many": (
            "sink|a number or shape (4,)|one per query head|got (5,)",
            lambda x: x.heads(4, 2, sink=x.floats(5)),
        ),
        "sink per KV head": ("sink|(4,)|got (2,)", lambda x: x.heads(4, 2, sink=x.floats(2))),
        "sink of two axes": ("sink|(4,)|got (1, 4)", lambda x: x.heads(4, 2, sink=x.floats(1, 4))),
    },
    DtypeError: {
        "whole-number sinks": ("sink|a floating dtype|int64", lambda x: x.heads(4, 2, sink=x.ints(4))),
        "boolean sinks": ("sink|a floating dtype|bool", lambda x: x.heads(4, 2, sink=x.bools(4))),
        "sink True": ("sink|a number or a floating array|bool", lambda x: x.attend(sink=True)),
        "a complex sink": ("sink|a number or a floating array|complex", lambda x: x.attend(sink=1j)),
    },
    FrameworkError: {
        "sink as text": ("sink|array|str", lambda x: x.attend(sink="text")),
        "sink as a list": ("sink|array|list", lambda x: x.attend(sink=[0.0])),
    },
}

_MANY_AXES: Rows = {
    "more axes than there can be": ("query|axes|got 30", lambda x: ats.attend(*(x.floats(*[1] * 30) for _ in "qkv"))),
}

_NUMPY: Errors = {
    DtypeError: {
        "objects": ("query|a floating dtype|object", lambda x: x.attend(query=np.array([[None, 1.0]], dtype=object))),
        "ragged rows": (
            "key|a floating dtype|object",
            lambda x: x.attend(key=np.array([[1.0], [1.0, 2.0]], dtype=object)),
        ),
        "text in an array": ("value|a floating dtype|str", lambda x: x.attend(value=np.array([["a"] * 6] * 5))),
        **{
            f"eight-bit floats of ml_dtypes: {name}": (f"{name}|a floating dtype|got float8_e5m2", call)
            for name, call in {
                "query": lambda x: ats.attend(*(x.floats(3, 4, dtype=_float8()) for _ in "qkv")),
                "bias": lambda x: x.attend(bias=x.floats(3, 5, dtype=_float8())),
                "outs[0]": lambda x: ats.merge([x.floats(3, 2, dtype=_float8())] * 2, [x.floats(3)] * 2),
            }.items()
        },
    },
    FrameworkError: {
        "a matrix": (
            "query|dense|matrix|Hint",
            lambda x: ats.attend(*(np.ones((3, 4)).view(np.matrix) for _ in "qkv")),
        ),
        "a matrix as W": (
            "W|dense|matrix|Hint",
            lambda x: x.attend(score=ats.Bilinear(np.eye(4, dtype="float32").view(np.matrix))),
        ),
        "a matrix of scores": (
            "scores|dense|matrix|Hint",
            lambda x: ats.masked_softmax(np.ones((3, 4)).view(np.matrix)),
        ),
        **{
            f"a masked array as {argument}": (
                f"{argument}|dense|masked array|Hint|filled",
                lambda x, argument=argument: x.attend(
                    **{argument: np.ma.masked_array(np.ones((2, 3 if argument == "query" else 5, 4)), mask=True)}
                ),
            )
            for argument in ("query", "key", "value")
        },
    },
}

_TORCH: Errors = {
    DtypeError: {
        "eight-bit floats": (
            "query|floating dtype|float8_e4m3fn",
            lambda x: ats.attend(*(torch.ones(3, 4).to(torch.float8_e4m3fn) for _ in "qkv")),
        ),
    },
    FrameworkError: {
        "a sparse tensor": (
            "query|dense|sparse|Hint|to_dense",
            lambda x: x.attend(query=x.floats(3, 4).to_sparse(), key=x.floats(5, 4), value=x.floats(5, 6)),
        ),
        "a sparse value": ("value|dense|sparse|Hint|to_dense", lambda x: x.attend(value=x.floats(2, 5, 6).to_sparse())),
        **{
            f"a sparse {argument}": (
                f"{argument}|dense|sparse|Hint|to_dense",
                lambda x, argument=argument, values=values: x.attend(**{argument: torch.tensor(values).to_sparse()}),
            )
            for argument, values in (
                ("mask", [[True] * 5] * 3),
                ("bias", [[1.0] * 5] * 3),
                ("sink", [1.0]),
                ("valid_lens", [1, 2]),
            )
        },
        "sparse weights": (
            "weights|dense|sparse|Hint|to_dense",
            lambda x: ats.softmax_jacobian(x.floats(3, 4).to_sparse()),
        ),
        "sparse results to merge": (
            "log_sum_exps[1]|dense|sparse|Hint|to_dense",
            lambda x: ats.merge([x.floats(3, 4)] * 2, [x.floats(3), x.floats(3).to_sparse()]),
        ),
        "a nested tensor": (
            "key|nested",
            lambda x: x.attend(
                key=torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(5, 4)], layout=torch.jagged)
            ),
        ),
        "a MaskedTensor": ("query|dense|MaskedTensor|Hint|get_data", lambda x: x.attend(query=_masked_tensor())),
    },
}

_OWN_WORDS: Rows = {
    "key of another framework": (
        "query|key|value|arrays of one framework|MINE|OTHER",
        lambda x: x.attend(key=x.other(2, 5, 4)),
    ),
    "key of another framework, for weights": (
        "query: |key: |arrays of one framework|MINE|OTHER",
        lambda x: x.weights(key=x.other(2, 5, 4)),
    ),
    **{
        f"{name} of another framework": (
            f"query: |{name}: |arrays of one framework|MINE|OTHER",
            lambda x, name=name, shape=shape: x.attend(**{name: x.other(*shape)}),
        )
        for name, shape in (("value", (2, 5, 6)), ("bias", (3, 5)), ("sink", (1,)))
    },
}

_TENSORFLOW: Rows = {
    "more axes than TensorFlow has operations for": (
        "scores|got one of 8 axes|TensorFlow takes 7|Hint: tf.reshape",
        lambda x: ats.masked_softmax(x.floats(*[1] * 8)),
    ),
}

CASES = (
    *cases({ShapeError: _SHAPES, DtypeError: _DTYPES, FrameworkError: _NOT_ARRAYS}),
    *cases(_BIAS),
    *cases(_SINK),
    *cases({ShapeError: _MANY_AXES}, but="tensorflow"),
    *cases(_NUMPY, only="numpy"),
    *cases(_TORCH, only="torch"),
    *cases({FrameworkError: _TENSORFLOW}, only="tensorflow"),
    *cases({FrameworkError: _OWN_WORDS}, same=False),
)
