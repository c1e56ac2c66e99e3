"""Query, key and value: shapes, dtypes, frameworks; and bias and sink."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

import attnscore as ats
from attnscore import DtypeError, FrameworkError, ShapeError
from bad_input.table import case

# "all shapes involved" of query (2, 3, 4), key (2, 5, 4), value (2, 5, 6)
_QUERY, _KEY, _VALUE = "query (2, 3, 4)", "key (2, 5, 4)", "value (2, 5, 6)"

_SHAPES = (
    case("query without axes", ShapeError, "query|2 axes or more|0|query ()", lambda x: x.attend(query=x.array(1.0))),
    case("key without axes", ShapeError, "key|2 axes or more|0|key ()", lambda x: x.attend(key=x.array(1.0))),
    case("value without axes", ShapeError, "value|2 axes or more|0", lambda x: x.attend(value=x.array(1.0))),
    case("query of one axis", ShapeError, "query|2 axes or more|1|query (4,)", lambda x: x.attend(query=x.floats(4))),
    case("key of one axis", ShapeError, f"key|2 axes or more|1|{_QUERY}|key (4,)", lambda x: x.attend(key=x.floats(4))),
    case("value of one axis", ShapeError, f"value|2 axes or more|1|{_KEY}", lambda x: x.attend(value=x.floats(6))),
    case(
        "one value too few",
        ShapeError,
        f"value|as many positions as key (5)|got 4|{_QUERY}|{_KEY}|value (2, 4, 6)",
        lambda x: x.attend(value=x.floats(2, 4, 6)),
    ),
    case(
        "batches that do not broadcast",
        ShapeError,
        f"query, key, value|leading axes that broadcast|got (2,) of query, (3,) of key, (2,) of value|{_QUERY}",
        lambda x: x.attend(key=x.floats(3, 5, 4)),
    ),
    case(
        "batch of the value",
        ShapeError,
        f"query, key, value|broadcast|{_QUERY}|{_KEY}|value (3, 5, 6)",
        lambda x: x.attend(value=x.floats(3, 5, 6)),
    ),
    case(
        "heads that do not divide",
        ShapeError,
        "key|heads that divides the 6 of query|got 4|query (2, 6, 3, 4)|key (2, 4, 5, 4)|Hint: head_axis=-2",
        lambda x: x.heads(6, 4),
    ),
    case(
        "fewer query heads than KV heads",
        ShapeError,
        "key|divides the 2 of query|got 4|query (2, 2, 3, 4)",
        lambda x: x.heads(2, 4),
    ),
    case(
        "key and value heads",
        ShapeError,
        "value|as many heads as key (4)|got 2|query (2, 8, 3, 4)|key (2, 4, 5, 4)|value (2, 2, 5, 4)",
        lambda x: x.heads(8, 4, 2),
    ),
    case(
        "the other layout",
        ShapeError,
        "value|as many positions as key (3)|got 2|Hint: head_axis=-2 takes the layout (batch, length, head, dim)",
        lambda x: ats.attend(x.floats(2, 7, 3, 4), x.floats(2, 5, 3, 4), x.floats(2, 5, 2, 4)),
    ),
    case(
        "heads with head_axis=-2",
        ShapeError,
        "key|divides the 6 of query|got 4|query (2, 3, 6, 4)",
        lambda x: ats.attend(x.floats(2, 3, 6, 4), x.floats(2, 5, 4, 4), x.floats(2, 5, 4, 4), head_axis=-2),
    ),
    *(
        case(
            f"lengths of the vectors: {score}",
            ShapeError,
            f"key|vectors of the dimension of query (4)|got 7|{_QUERY}|key (2, 5, 7)|Hint|Bilinear|Additive",
            lambda x, score=score: x.attend(key=x.floats(2, 5, 7), score=score),
        )
        for score in ("dot", "scaled_dot", "gaussian", "cosine", "sum")
    ),
    case(
        "lengths of the vectors, for weights alone",
        ShapeError,
        f"key|vectors of the dimension of query (4)|got 7|{_QUERY}|key (2, 5, 7)",
        lambda x: x.weights(key=x.floats(2, 5, 7)),
    ),
    case(
        "heads, for weights alone",
        ShapeError,
        "key|divides the 6 of query|got 4|query (2, 6, 3, 4)|key (2, 4, 5, 4)",
        lambda x: x.weights(query=x.floats(2, 6, 3, 4), key=x.floats(2, 4, 5, 4)),
    ),
    case(
        "more axes than there can be",
        ShapeError,
        "query|axes|got 30",
        lambda x: ats.attend(*(x.floats(*[1] * 30) for _ in "qkv")),
        but="tensorflow",
    ),
    case("key without axes, for weights", ShapeError, "key|2 axes or more|0", lambda x: x.weights(key=x.array(1.0))),
)


def _float8() -> Any:
    import ml_dtypes  # not in MXNet's environment

    return ml_dtypes.float8_e5m2


_DTYPES = (
    *(
        case(
            f"{argument} of {kind}",
            DtypeError,
            f"{argument}|a floating dtype|{kind}|{argument} (2, ",
            lambda x, argument=argument, kind=kind: x.attend(
                **{argument: x.array(np.ones((2, 3 if argument == "query" else 5, 4)), kind)}
            ),
        )
        for argument in ("query", "key", "value")
        for kind in ("int64", "bool", "complex64")
    ),
    case(
        "dtypes that differ",
        DtypeError,
        "query, key, value|one dtype|query float32|key float64|value float32|Hint: cast",
        lambda x: x.attend(key=x.floats(2, 5, 4, dtype="float64")),
    ),
    case(
        "a half-precision query",
        DtypeError,
        "one dtype|query float16|key float32|value float32",
        lambda x: x.attend(query=x.floats(2, 3, 4, dtype="float16")),
    ),
    case(
        "dtypes that differ, for weights alone",
        DtypeError,
        "query, key|one dtype|query float32|key float64",
        lambda x: x.weights(key=x.floats(2, 5, 4, dtype="float64")),
    ),
    case(
        "objects",
        DtypeError,
        "query|a floating dtype|object",
        lambda x: x.attend(query=np.array([[None, 1.0]], dtype=object)),
        only="numpy",
    ),
    case(
        "ragged rows",
        DtypeError,
        "key|a floating dtype|object",
        lambda x: x.attend(key=np.array([[1.0], [1.0, 2.0]], dtype=object)),
        only="numpy",
    ),
    case(
        "text in an array",
        DtypeError,
        "value|a floating dtype|str",
        lambda x: x.attend(value=np.array([["a"] * 6] * 5)),
        only="numpy",
    ),
    case(
        "eight-bit floats",
        DtypeError,
        "query|floating dtype|float8_e4m3fn",
        lambda x: ats.attend(*(torch.ones(3, 4).to(torch.float8_e4m3fn) for _ in "qkv")),
        only="torch",
    ),
    *(
        case(
            f"eight-bit floats of ml_dtypes: {name}",
            DtypeError,
            f"{name}|a floating dtype|got float8_e5m2",
            call,
            only="numpy",
        )
        for name, call in {
            "query": lambda x: ats.attend(*(x.floats(3, 4, dtype=_float8()) for _ in "qkv")),
            "bias": lambda x: x.attend(bias=x.floats(3, 5, dtype=_float8())),
            "outs[0]": lambda x: ats.merge([x.floats(3, 2, dtype=_float8())] * 2, [x.floats(3)] * 2),
        }.items()
    ),
)

_NOT_ARRAYS = (
    *(
        case(
            f"{argument} is {what}",
            FrameworkError,
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
    ),
    case(
        "key of another framework",
        FrameworkError,
        "query|key|value|arrays of one framework|MINE|OTHER",
        lambda x: x.attend(key=x.other(2, 5, 4)),
        same=False,
    ),
    case(
        "value of another framework",
        FrameworkError,
        "query: |value: |arrays of one framework|MINE|OTHER",
        lambda x: x.attend(value=x.other(2, 5, 6)),
        same=False,
    ),
    case(
        "key of another framework, for weights",
        FrameworkError,
        "query: |key: |arrays of one framework|MINE|OTHER",
        lambda x: x.weights(key=x.other(2, 5, 4)),
        same=False,
    ),
    case(
        "a framework that is not served",
        FrameworkError,
        "query|arrays of numpy or torch|cupy",
        lambda x: x.attend(query=_of_cupy(), key=_of_cupy(), value=_of_cupy()),
    ),
    case(
        "a sparse tensor",
        FrameworkError,
        "query|dense|sparse|Hint|to_dense",
        lambda x: x.attend(query=x.floats(3, 4).to_sparse(), key=x.floats(5, 4), value=x.floats(5, 6)),
        only="torch",
    ),
    case(
        "a sparse value",
        FrameworkError,
        "value|dense|sparse|Hint|to_dense",
        lambda x: x.attend(value=x.floats(2, 5, 6).to_sparse()),
        only="torch",
    ),
    *(
        case(
            f"a sparse {argument}",
            FrameworkError,
            f"{argument}|dense|sparse|Hint|to_dense",
            lambda x, argument=argument, values=values: x.attend(**{argument: torch.tensor(values).to_sparse()}),
            only="torch",
        )
        for argument, values in (
            ("mask", [[True] * 5] * 3),
            ("bias", [[1.0] * 5] * 3),
            ("sink", [1.0]),
            ("valid_lens", [1, 2]),
        )
    ),
    case(
        "a matrix",
        FrameworkError,
        "query|dense|matrix|Hint",
        lambda x: ats.attend(*(np.ones((3, 4)).view(np.matrix) for _ in "qkv")),
        only="numpy",
    ),
    case(
        "a matrix as W",
        FrameworkError,
        "W|dense|matrix|Hint",
        lambda x: x.attend(score=ats.Bilinear(np.eye(4, dtype="float32").view(np.matrix))),
        only="numpy",
    ),
    case(
        "a matrix of scores",
        FrameworkError,
        "scores|dense|matrix|Hint",
        lambda x: ats.masked_softmax(np.ones((3, 4)).view(np.matrix)),
        only="numpy",
    ),
    case(
        "sparse weights",
        FrameworkError,
        "weights|dense|sparse|Hint|to_dense",
        lambda x: ats.softmax_jacobian(x.floats(3, 4).to_sparse()),
        only="torch",
    ),
    case(
        "sparse results to merge",
        FrameworkError,
        "log_sum_exps[1]|dense|sparse|Hint|to_dense",
        lambda x: ats.merge([x.floats(3, 4)] * 2, [x.floats(3), x.floats(3).to_sparse()]),
        only="torch",
    ),
    case(
        "more axes than TensorFlow has operations for",
        FrameworkError,
        "scores|got one of 8 axes|TensorFlow takes 7|Hint: tf.reshape",
        lambda x: ats.masked_softmax(x.floats(*[1] * 8)),
        only="tensorflow",
    ),
    *(
        case(
            f"a masked array as {argument}",
            FrameworkError,
            f"{argument}|dense|masked array|Hint|filled",
            lambda x, argument=argument: x.attend(
                **{argument: np.ma.masked_array(np.ones((2, 3 if argument == "query" else 5, 4)), mask=True)}
            ),
            only="numpy",
        )
        for argument in ("query", "key", "value")
    ),
    case(
        "a nested tensor",
        FrameworkError,
        "key|nested",
        lambda x: x.attend(key=torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(5, 4)], layout=torch.jagged)),
        only="torch",
    ),
    case(
        "a MaskedTensor",
        FrameworkError,
        "query|dense|MaskedTensor|Hint|get_data",
        lambda x: x.attend(query=_masked_tensor()),
        only="torch",
    ),
)


def _masked_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.masked.masked_tensor(torch.ones(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool))


def _of_cupy() -> object:
    """Something that looks like an array of a package that is known and not served."""
    kind = type("ndarray", (), {"shape": (2, 3), "__module__": "cupy"})
    return kind()


_BIAS = (
    case(
        "bias that does not broadcast",
        ShapeError,
        "bias|broadcasts to (..., query, key) = (2, 3, 5)|got (3, 4)",
        lambda x: x.attend(bias=x.floats(3, 4)),
    ),
    case(
        "bias that would enlarge the result",
        ShapeError,
        "bias|broadcasts to (..., query, key) = (2, 3, 5)|got (7, 2, 3, 5)",
        lambda x: x.attend(bias=x.floats(7, 2, 3, 5)),
    ),
    case(
        "bias per KV head",
        ShapeError,
        "bias|(..., query, key) = (2, 4, 3, 5)|got (2, 2, 3, 5)",
        lambda x: x.heads(4, 2, bias=x.floats(2, 2, 3, 5)),
    ),
    case(
        "boolean bias",
        DtypeError,
        "bias|a floating dtype|bool|Hint: a boolean array is a mask|mask=",
        lambda x: x.attend(bias=x.bools(3, 5)),
    ),
    case("whole-number bias", DtypeError, "bias|a floating dtype|int64", lambda x: x.attend(bias=x.ints(3, 5))),
    case("complex bias", DtypeError, "bias|a floating dtype|complex64", lambda x: x.attend(bias=x.complexes(3, 5))),
    case("bias True", DtypeError, "bias|a number or a floating array|bool", lambda x: x.attend(bias=True)),
    case("bias as text", FrameworkError, "bias|array|str", lambda x: x.attend(bias="text")),
    case("bias as a list", FrameworkError, "bias|array|list", lambda x: x.attend(bias=[0.0] * 5)),
    case(
        "bias of another framework",
        FrameworkError,
        "query: |bias: |arrays of one framework|MINE|OTHER",
        lambda x: x.attend(bias=x.other(3, 5)),
        same=False,
    ),
    case(
        "bias for weights",
        ShapeError,
        "bias|(..., query, key) = (2, 3, 5)|got (3, 4)",
        lambda x: x.weights(bias=x.floats(3, 4)),
    ),
)

_SINK = (
    case(
        "one sink too many",
        ShapeError,
        "sink|a number or shape (4,)|one per query head|got (5,)",
        lambda x: x.heads(4, 2, sink=x.floats(5)),
    ),
    case("sink per KV head", ShapeError, "sink|(4,)|got (2,)", lambda x: x.heads(4, 2, sink=x.floats(2))),
    case("sink of two axes", ShapeError, "sink|(4,)|got (1, 4)", lambda x: x.heads(4, 2, sink=x.floats(1, 4))),
    case("whole-number sinks", DtypeError, "sink|a floating dtype|int64", lambda x: x.heads(4, 2, sink=x.ints(4))),
    case("boolean sinks", DtypeError, "sink|a floating dtype|bool", lambda x: x.heads(4, 2, sink=x.bools(4))),
    case("sink True", DtypeError, "sink|a number or a floating array|bool", lambda x: x.attend(sink=True)),
    case("a complex sink", DtypeError, "sink|a number or a floating array|complex", lambda x: x.attend(sink=1j)),
    case("sink as text", FrameworkError, "sink|array|str", lambda x: x.attend(sink="text")),
    case("sink as a list", FrameworkError, "sink|array|list", lambda x: x.attend(sink=[0.0])),
    case(
        "sink of another framework",
        FrameworkError,
        "query: |sink: |arrays of one framework|MINE|OTHER",
        lambda x: x.attend(sink=x.other(1)),
        same=False,
    ),
)

CASES = (*_SHAPES, *_DTYPES, *_NOT_ARRAYS, *_BIAS, *_SINK)
