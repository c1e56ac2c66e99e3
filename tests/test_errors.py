"""Bad input gets an error of ours: its class, the argument, what was expected, what came, the shapes, a hint.

- Every row of ``bad_input`` runs on NumPy and on PyTorch, with the same words.
- No absurd value for any argument of any function gets past with a bare error of a framework, or an assert.
- A call that fails has changed nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from bad_input import CASES, Case, Maker

import attnscore as ats

FRAMEWORKS = ("numpy", "torch")
BUILT_IN = {
    ats.ShapeError: ValueError,
    ats.MaskError: ValueError,
    ats.DtypeError: TypeError,
    ats.DeviceError: ValueError,
    ats.FrameworkError: TypeError,
    ats.ArgumentError: ValueError,
    ats.KernelUnavailable: RuntimeError,
}
ROWS = [
    pytest.param(case, framework, id=f"{framework}-{case.error.__name__}-{case.name}")
    for case in CASES
    for framework in FRAMEWORKS
    if case.only in ("", framework)
]


@pytest.fixture(autouse=True)
def _quiet_prototypes() -> Iterator[None]:
    """Nested tensors and the like announce themselves as prototypes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(prototype|beta).*")
        yield


def caught(case: Case, framework: str) -> tuple[ats.AttnscoreError, Maker]:
    """The error that a row gets, and what its arrays were made by."""
    maker = Maker(framework)
    with pytest.raises(ats.AttnscoreError) as found:
        case.call(maker)
    return found.value, maker


@pytest.mark.parametrize(("cls", "built_in"), BUILT_IN.items(), ids=lambda x: x.__name__)
def test_every_error_is_ours_and_the_built_in(cls: type, built_in: type) -> None:
    assert issubclass(cls, ats.AttnscoreError)
    assert issubclass(cls, built_in)
    assert not issubclass(cls, AssertionError)


def test_the_table_of_errors_is_complete() -> None:
    ours = {x for x in vars(ats).values() if isinstance(x, type) and issubclass(x, ats.AttnscoreError)}
    assert ours == {ats.AttnscoreError, *BUILT_IN}
    assert {case.error for case in CASES} == set(BUILT_IN)


@pytest.mark.parametrize(("case", "framework"), ROWS)
def test_bad_input(case: Case, framework: str) -> None:
    error, maker = caught(case, framework)
    text = str(error)
    assert type(error) is case.error, f"{type(error).__name__}: {text}"
    missing = [word for word in case.words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert maker.unchanged()


@pytest.mark.parametrize(("case", "framework"), ROWS)
def test_a_message_is_one_line_in_our_words(case: Case, framework: str) -> None:
    text = str(caught(case, framework)[0])
    assert "\n" not in text
    assert len(text) < 500
    assert not re.search(r"torch\.Size|np\.(int|float)|0x[0-9a-f]{6}|traceback", text, re.IGNORECASE), text
    # A shape is written as a tuple, a place as a name: nothing is left to a format gone wrong.
    assert "{" not in text or "{'" in text, text


@pytest.mark.parametrize(
    "case", [pytest.param(x, id=f"{x.error.__name__}-{x.name}") for x in CASES if x.same and not x.only]
)
def test_every_framework_says_the_same(case: Case) -> None:
    first, second = (str(caught(case, framework)[0]) for framework in FRAMEWORKS)
    assert first == second


# What no argument means anything for. None, a number or a word may be welcome somewhere: then there is no error.
ABSURD: dict[str, Callable[[Maker], Any]] = {
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

CALLS: dict[str, tuple[Callable[..., Any], Callable[[Maker], dict[str, Any]], tuple[str, ...]]] = {
    "attend": (
        ats.attend,
        Maker.three,
        (
            *("query", "key", "value", "score", "mask", "valid_lens", "bias", "sink", "dropout", "seed"),
            *("head_axis", "kernel", "return_weights", "return_stats"),
        ),
    ),
    "attention_weights": (
        ats.attention_weights,
        lambda x: {"query": x.floats(2, 3, 4), "key": x.floats(2, 5, 4)},
        (
            *("query", "key", "score", "mask", "valid_lens", "bias", "sink"),
            *("head_axis", "query_index", "key_index"),
        ),
    ),
    "attention_scores": (
        ats.attention_scores,
        lambda x: {"query": x.floats(2, 3, 4), "key": x.floats(2, 5, 4)},
        ("query", "key", "mask", "bias", "query_index", "key_index"),
    ),
    "masked_softmax": (
        ats.masked_softmax,
        lambda x: {"scores": x.floats(2, 3, 5)},
        ("scores", "valid_lens", "mask", "axis", "temperature"),
    ),
    "explain": (ats.explain, Maker.three, ("query", "key", "value", "mask", "kernel", "score")),
    "softmax_jacobian": (ats.softmax_jacobian, lambda x: {"weights": x.floats(2, 3)}, ("weights",)),
    "softmax_pullback": (
        ats.softmax_pullback,
        lambda x: {"weights": x.floats(2, 3), "grad": x.floats(2, 3)},
        ("weights", "grad"),
    ),
    "merge": (
        ats.merge,
        lambda x: {"outs": [x.floats(3, 2)] * 2, "log_sum_exps": [x.floats(3)] * 2},
        ("outs", "log_sum_exps"),
    ),
    "cost": (
        lambda score="dot", **given: ats.cost(score, **{"query_len": 3, "key_len": 5, "dim": 4} | given),
        lambda x: {},
        ("score", "query_len", "key_len", "dim", "key_dim", "value_dim", "heads", "batch"),
    ),
}
for _name, _parameters in {
    "Additive": ("w_v", "W_q", "W_k", "bias", "activation", "negative_slope"),
    "Bilinear": ("W",),
    "ScaledDot": ("scale",),
    "Cosine": ("scale",),
    "Gaussian": ("bandwidth",),
    "SoftCap": ("score", "cap"),
    "Temperature": ("score", "T"),
    "ValidLens": ("lens", "query_lens"),
    "KeyRange": ("start", "stop"),
    "KeyPadding": ("array",),
    "Causal": ("align", "offset"),
    "SlidingWindow": ("left", "right", "align", "offset"),
    "PrefixLM": ("prefix_lens",),
    "Documents": ("query_ids", "key_ids"),
    "Dense": ("array",),
}.items():
    CALLS[_name] = (
        lambda x, cls, **given: x.square(**{"mask" if issubclass(cls, ats.Mask) else "score": cls(**given)}),
        lambda x, cls=getattr(ats, _name): {"x": x, "cls": cls} | _fields(x, cls),
        _parameters,
    )


def _fields(x: Maker, cls: type) -> dict[str, Any]:
    """Good arguments of a score or mask, for self-attention of 4 vectors of length 2."""
    return {
        "Additive": lambda: {"w_v": x.floats(3), "W_q": x.floats(3, 2), "W_k": x.floats(3, 2)},
        "Bilinear": lambda: {"W": x.floats(2, 2)},
        "SoftCap": lambda: {"score": "dot", "cap": 2.0},
        "Temperature": lambda: {"score": "dot", "T": 2.0},
        "ValidLens": lambda: {"lens": 3},
        "KeyRange": lambda: {"start": 1, "stop": 3},
        "KeyPadding": lambda: {"array": x.bools(1, 4)},
        "PrefixLM": lambda: {"prefix_lens": 2},
        "Documents": lambda: {"query_ids": [0, 0, 1, 1]},
        "Dense": lambda: {"array": x.bools(4, 4)},
    }.get(cls.__name__, dict)()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("call", "argument"),
    [pytest.param(call, name, id=f"{call}-{name}") for call, row in CALLS.items() for name in row[2]],
)
def test_absurd_values_get_an_error_of_ours(call: str, argument: str, framework: str) -> None:
    function, arguments, _ = CALLS[call]
    bare = []
    for name, make in ABSURD.items():
        maker = Maker(framework)
        given = arguments(maker) | {argument: make(maker)}
        try:
            function(**given)
        except ats.AttnscoreError as error:
            if not named(str(error), argument):
                bare.append(f"{name}: does not name {argument}: {error}")
        except Exception as error:
            bare.append(f"{name}: {type(error).__name__}: {error}")
        if not maker.unchanged():
            bare.append(f"{name}: changed an array")
    assert not bare, "\n".join(bare)


# What the messages call an argument, where a field is best known under the name that `attend` has for it.
KNOWN_AS = {"lens": "valid_lens", "array": "mask|key_padding", "outs": "outs", "align": "align|Causal|SlidingWindow"}


def named(text: str, argument: str) -> bool:
    """Whether a message says which argument is wrong."""
    return bool(re.search(rf"\b({KNOWN_AS.get(argument, argument)})\b", text.partition(", got ")[0]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers_of_numpy_are_numbers(framework: str) -> None:
    """float32 is no subclass of float: a number read from an array must do wherever a number does."""
    x = Maker(framework)
    half = np.float32(0.5)
    x.attend(dropout=half, seed=np.int32(3))
    x.attend(score=ats.SoftCap("dot", np.float32(2.0)), bias=half, sink=half)
    x.attend(score=ats.Temperature("dot", half))
    x.attend(score=ats.ScaledDot(half))
    x.attend(score=ats.Gaussian(half))
    x.softmax(temperature=half)
    x.weights(query_index=np.int32(1), key_index=np.array([0, 2]))
    ats.cost("dot", query_len=np.int64(3), key_len=np.int32(5), dim=4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_merge_takes_stacked_parts(framework: str) -> None:
    x = Maker(framework)
    outs, lse = x.floats(2, 3, 4), x.floats(2, 3)
    first, second = ats.merge(outs, lse), ats.merge(list(outs), list(lse))
    assert np.array_equal(x.host(first[0]), x.host(second[0]))
    assert np.array_equal(x.host(first[1]), x.host(second[1]))


@pytest.mark.parametrize(("function", "name"), [(ats.attend_vjp, "attend_vjp"), (ats.explain, "explain")])
def test_a_misspelt_argument_is_told_by_the_function_that_was_called(function: Any, name: str) -> None:
    x = Maker("numpy")
    with pytest.raises(TypeError, match=rf"{name}\(\).*valid_len\b"):
        function(**x.three(), valid_len=[1, 2])


def test_no_error_rests_on_an_assert() -> None:
    """With asserts compiled away (python -O) a mistake must be told just the same; none is told by one today."""
    for case in CASES:
        if not case.only:
            assert not isinstance(caught(case, "numpy")[0].__context__, AssertionError)


def test_a_failed_call_leaves_the_registry_alone() -> None:
    from attnscore import scoring

    before = scoring.registered()
    for name, cls in (("dot", ats.Sum), ("whole", int), ("", ats.Sum)):
        with pytest.raises(ats.ArgumentError):
            ats.register_score(name, cls)
    assert scoring.registered() == before


def test_gradients_are_left_alone_by_a_failed_call() -> None:
    query = torch.ones(2, 3, 4, requires_grad=True)
    with pytest.raises(ats.ShapeError):
        ats.attend(query, torch.ones(2, 5, 7), torch.ones(2, 5, 6))
    assert query.grad is None and query.grad_fn is None
