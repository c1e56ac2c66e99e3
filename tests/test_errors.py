"""Bad input gets an error of ours: its class, the argument, what was expected, what came, the shapes, a hint.

- Every row of ``bad_input`` runs on NumPy and on PyTorch, with the same words.
- No absurd value for any argument of any function gets past with a bare error of a framework, or an assert.
- A call that fails has changed nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from bad_input import CASES, Case, Maker
from bad_input.absurd import CALLS, VALUES, Call

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


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("call", "argument"),
    [pytest.param(row, name, id=f"{call}-{name}") for call, row in CALLS.items() for name in row.arguments],
)
def test_absurd_values_get_an_error_of_ours(call: Call, argument: str, framework: str) -> None:
    wrong = []
    for name, make in VALUES.items():
        maker = Maker(framework)
        given = call.good(maker) | {argument: make(maker)}
        try:
            call.function(**given)
        except ats.AttnscoreError as error:
            if not names(str(error), argument):
                wrong.append(f"{name}: does not name {argument}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        if not maker.unchanged():
            wrong.append(f"{name}: changed an array")
    assert not wrong, "\n".join(wrong)


# Under which name a message may speak of an argument: the better known one, or the other side of a contradiction.
KNOWN_AS = {
    "lens": "valid_lens",
    "array": "mask|key_padding",
    "align": "align|Causal|SlidingWindow",
    "return_weights": "return_weights|mask",
    "return_stats": "return_stats|mask",
    "w_v": "w_v|W_q",
    "dim": "dim|query|key",
    "key_dim": "key_dim|key",
}


def names(text: str, argument: str) -> bool:
    """Whether a message says, before what came, which argument is wrong."""
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
        framework = case.only or "numpy"
        error, _ = caught(case, framework)
        assert not isinstance(error, AssertionError)
        assert not isinstance(error.__context__, AssertionError), case.name


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
