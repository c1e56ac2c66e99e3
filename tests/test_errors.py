"""Bad input gets an error of ours: its class, the argument, what was expected, what came, the shapes, a hint.

- Every row of ``bad_input`` on NumPy; every other framework says the same, in calls and while it traces.
- No absurd value for any argument of any function gets past with a bare error of a framework, or an assert.
- A call that fails has changed nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
import covering
from attnscore import parallel
from bad_input import CASES, Case, Maker, Traced
from bad_input.absurd import CALLS, VALUES
from covering import pairs, some

FRAMEWORKS = ("numpy", "torch", "tensorflow", "jax")
# Some environments of `make versions` have no JAX.
RANKS = {
    importlib.import_module(f"attnscore.parallel.{name}"): ranks
    for name, ranks in (("torch", "group"), ("jax", "axis_name"))
    if importlib.util.find_spec(name) is not None
}
BUILT_IN = {
    ats.ShapeError: ValueError,
    ats.MaskError: ValueError,
    ats.DtypeError: TypeError,
    ats.DeviceError: ValueError,
    ats.FrameworkError: TypeError,
    ats.ArgumentError: ValueError,
    ats.FileError: ValueError,
    ats.KernelUnavailable: RuntimeError,
}
EVERYWHERE = [
    (case, framework) for case in CASES for framework in FRAMEWORKS
    if case.only in ("", framework) and case.but != framework
]  # fmt: skip
# What every framework says alike is compared below; here NumPy says it, and others what is their own.
ROWS = [
    (case, framework) for case, framework in EVERYWHERE if covering.products or framework == "numpy" or not case.same
    or case.only
]  # fmt: skip


def named(rows: list[tuple[Case, str]]) -> list[Any]:
    return [pytest.param(*row, id=f"{row[1]}-{row[0].error.__name__}-{row[0].name}") for row in rows]


def slow(rows: list[Any]) -> list[Any]:
    return [pytest.param(*row.values, id=row.id, marks=pytest.mark.slow) for row in rows]


rows = pytest.mark.parametrize(("case", "framework"), named(ROWS))


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


@rows
def test_bad_input(case: Case, framework: str) -> None:
    error, maker = caught(case, framework)
    text = str(error)
    assert type(error) is case.error, f"{type(error).__name__}: {text}"
    missing = [word for word in map(maker.named, case.words) if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert maker.unchanged()
    check_words(text)


def check_words(text: str) -> None:
    """A message is one line in our words."""
    assert "\n" not in text
    assert len(text) < 500
    assert not re.search(r"torch\.Size|np\.(int|float)|0x[0-9a-f]{6}|traceback", text, re.IGNORECASE), text
    # A shape is written as a tuple, a place as a name: nothing is left to a format gone wrong.
    assert "{" not in text or "{'" in text, text


@pytest.mark.parametrize(
    "case", [pytest.param(x, id=f"{x.error.__name__}-{x.name}") for x in CASES if x.same and not x.only]
)
def test_every_framework_says_the_same(case: Case) -> None:
    said = {}
    for framework in FRAMEWORKS:
        if framework != case.but:
            error, maker = caught(case, framework)
            said[framework] = type(error), str(error)
            assert maker.unchanged()
    assert said == dict.fromkeys(said, said["numpy"])


# What is wrong about them are numbers, which cannot be read while a graph or a program is made.
UNSEEN = ("half a key in an array", "a bandwidth of 0 among others", "a learned temperature of 0", "a learned cap of 0")
PICTURES = ("a heat map of one axis", "a heat map of five axes", "more titles than maps")


TRACED = [row for row in EVERYWHERE if row[0].same and not row[0].only and row[1] in ("tensorflow", "jax")]


# In turn: two rows of a mistake follow each other.
@pytest.mark.parametrize(
    ("case", "framework"),
    named(TRACED if covering.products else TRACED[4::8] + TRACED[7::8])
    + ([] if covering.products else slow(named(TRACED[::8] + TRACED[3::8]))),
)
def test_the_same_is_said_while_tracing(case: Case, framework: str) -> None:
    said = Traced(framework).error_of(case)
    if case.name in UNSEEN:
        assert said is None or (type(said), str(said)) == (case.error, str(caught(case, "numpy")[0]))
    elif case.name in PICTURES:
        assert type(said) is ats.FrameworkError and "matrices: expected an array of numbers" in str(said)
    else:
        assert (type(said), str(said)) == (case.error, str(caught(case, "numpy")[0]))


ARGUMENTS = [(call, argument) for call, row in CALLS.items() for argument in row.arguments]


@some(
    "name,argument,framework",
    [(*row, FRAMEWORKS[i % len(FRAMEWORKS)]) for i, row in enumerate(ARGUMENTS)],
    [(*row, framework) for row in ARGUMENTS for framework in FRAMEWORKS],
)
def test_absurd_values_get_an_error_of_ours(name: str, argument: str, framework: str) -> None:
    call, wrong = CALLS[name], []
    for value, make in VALUES.items():
        maker = Maker(framework)
        given = call.good(maker) | {argument: make(maker)}
        try:
            call.function(**given)
        except ats.AttnscoreError as error:
            if not names(str(error), argument):
                wrong.append(f"{value}: does not name {argument}: {error}")
        except Exception as error:
            wrong.append(f"{value}: {type(error).__name__}: {error}")
        if not maker.unchanged():
            wrong.append(f"{value}: changed an array")
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


WRONG_NUMBERS: dict[str, tuple[Callable[[], Any], str]] = {
    "bandwidth 0": (lambda: ats.Gaussian(0), "bandwidth: expected a finite number above 0, got 0"),
    "bandwidth below 0": (lambda: ats.Gaussian(-2.0), "bandwidth: expected a finite number above 0, got -2.0"),
    "bandwidth whose square is 0": (
        lambda: ats.Gaussian(1e-200),
        "bandwidth: expected a finite number above 0 whose square is too, got 1e-200",
    ),
    "scale NaN": (lambda: ats.ScaledDot(math.nan), "scale: expected a number (finite), got nan"),
    "scale of cosines": (lambda: ats.Cosine(math.inf), "scale: expected a number (finite), got inf"),
    "cap 0": (lambda: ats.SoftCap("dot", 0), "cap: expected a finite number above 0, got 0"),
    "T 0": (lambda: ats.Temperature("dot", 0), "temperature: expected a finite number above 0, got 0"),
    "T of float32": (lambda: ats.Temperature("dot", np.float32(-1)), "temperature: expected a finite number above 0"),
    "slope NaN": (
        lambda: ats.Additive(np.ones(3), negative_slope=math.nan),
        "negative_slope: expected a number (finite), got nan",
    ),
    "slope infinite": (
        lambda: ats.Additive(np.ones(3), activation="leaky_relu", negative_slope=math.inf),
        "negative_slope: expected a number (finite), got inf",
    ),
    "activation misspelt": (
        lambda: ats.Additive(np.ones(3), activation="tahn"),
        "got 'tahn'. Hint: did you mean 'tanh'?",
    ),
    "weight NaN": (lambda: ats.Dot() * math.nan, "weights[0]: expected a number (finite), got nan"),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_a_score_checks_its_number_when_it_is_made(name: str) -> None:
    make, expected = WRONG_NUMBERS[name]
    with pytest.raises(ats.ArgumentError, match=re.escape(expected)):
        make()


def test_arrays_of_scores_are_checked_at_the_call() -> None:
    """They may be traced when the score is made, or be no numbers yet."""
    x = Maker("numpy")
    for score in (
        ats.Gaussian(np.array(0.0)),
        ats.Temperature("dot", np.array(-1.0)),
        ats.SoftCap("dot", np.array([0.0])),
        ats.Gaussian("wide"),
        ats.ScaledDot("1"),
    ):
        with pytest.raises(ats.ArgumentError, match=r"expected (a number, an array|(a )?finite numbers? above 0)"):
            x.attend(score=score)


def test_scores_with_placeholders_are_made() -> None:
    """JAX rebuilds a score with whatever its leaves were mapped to."""
    import jax

    score = jax.tree_util.tree_map(lambda _: 0, ats.Gaussian(jax.numpy.ones(2)))
    assert score.bandwidth == 0
    with pytest.raises(ats.ArgumentError, match="bandwidth: expected a finite number above 0, got 0"):
        Maker("numpy").attend(score=score)


LEARNED: dict[str, Callable[[Any], Any]] = {
    "scaled_dot": lambda T: ats.ScaledDot(scale=1 / (T * 4**0.5)),
    "cosine": lambda T: ats.Cosine(scale=1 / T),
    "gaussian": lambda T: ats.Gaussian(bandwidth=T**0.5),
}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ats.Combination((), ()),
            "weights: expected one for each of one score or more, got 0 scores, 0 weights",
        ),
        (lambda: ats.Combination(("dot",), (1, 2)), "weights: expected .*, got 1 scores, 2 weights"),
        (lambda: ats.Combination("dot", (1,)), "scores: expected a tuple, one entry for each score, got 'dot'"),
        (lambda: ats.Combination(("dot",), 2.0), "weights: expected a tuple, one entry for each score, got 2.0"),
        (lambda: ats.Dot() * float("nan"), r"weights\[0\]: expected a number \(finite\), got nan"),
        (
            lambda: ats.Dot() + ats.Cosine() * np.ones((1, 2)),
            r"weights\[1\]: expected a number, \(\) or \(heads,\), got",
        ),
        (lambda: ats.Dot() * np.ones(3), r"weights\[0\]: expected \(\) or \(2,\), got \(3,\)"),
    ],
)
def test_combinations_of_scores(make: Callable[[], Any], said: str) -> None:
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(ats.AttnscoreError, match=said):
        ats.attend(x, x, x, score=make())


def test_scores_are_added_to_scores_and_multiplied_by_numbers() -> None:
    for wrong in (lambda: ats.Dot() + 3, lambda: 3 + ats.Dot(), lambda: ats.Dot() * ats.Dot()):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()
    assert repr(2 * (ats.Dot() + ats.Sum() * 3) + ats.Cosine()) == "Combination(2 * Dot() + 6 * Sum() + Cosine())"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_temperature_is_a_parameter_of_the_score(name: str, framework: str) -> None:
    x = Maker(framework)
    T = x.array(2.0)
    wanted = x.host(x.attend(score=ats.Temperature(name, 2.0)))
    for score in (ats.Temperature(name, T), LEARNED[name](T)):
        np.testing.assert_allclose(x.host(x.attend(score=score)), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_temperature_has_a_gradient(name: str) -> None:
    query, key, value = torch.randn(3, 3, 4).double()
    T = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda T: ats.attend(query, key, value, score=LEARNED[name](T)), T)


EXTREME: dict[str, tuple[Any, Any]] = {
    **{f"SoftCap {cap}": (ats.SoftCap("dot", cap), "dot") for cap in (1e30, 1e35, 1e37, 3e38, 1e39, 1e300)},
    **{f"SoftCap {cap}": (ats.SoftCap("dot", cap), ats.ScaledDot(0.0)) for cap in (1e-30, 1e-39, 1e-300)},
    "SoftCap in SoftCap": (ats.SoftCap(ats.SoftCap("dot", 1e39), 5.0), ats.SoftCap("dot", 5.0)),
    "SoftCap in Temperature": (ats.Temperature(ats.SoftCap("dot", 1e39), 2.0), ats.Temperature("dot", 2.0)),
    "Temperature in SoftCap": (ats.SoftCap(ats.Temperature("dot", 2.0), 1e39), ats.Temperature("dot", 2.0)),
    **{f"T {T}": (ats.Temperature("dot", T), ats.ScaledDot(0.0)) for T in (1e30, 1e39, 1e300)},
    **{f"bandwidth {b}": (ats.Gaussian(b), ats.ScaledDot(0.0)) for b in (1e20, 1e39, 1e300)},
    **{f"scale {s}": (ats.ScaledDot(s), ats.ScaledDot(0.0)) for s in (1e-30, 1e-39, -1e-300)},
    "T sharp": (ats.Temperature("dot", 1e-37), ats.ScaledDot(1e9)),
    "bandwidth narrow": (ats.Gaussian(1e-18), ats.Gaussian(1e-6)),
}
"""Scores whose numbers are extreme, and what they then are: a cap that the dtype cannot hold bounds nothing."""


@pairs(name=tuple(EXTREME), framework=FRAMEWORKS, kernel=("auto", "streaming", "dense"))
def test_extreme_numbers_that_work(name: str, framework: str, kernel: str) -> None:
    x = Maker(framework)
    found, wanted = (x.host(x.attend(score=score, kernel=kernel)) for score in EXTREME[name])
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.slow
def test_gradients_under_a_cap_that_bounds_nothing() -> None:
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32"))
    scores: dict[Any, Any] = {0: "dot", 1e37: ats.SoftCap("dot", 1e37), 1e39: ats.SoftCap("dot", 1e39)}

    def loss(x: Any, score: Any, kernel: str) -> Any:
        return (ats.attend(x, x, x, score=score, kernel=kernel) ** 2).sum()

    for kernel in ("auto", "streaming", "dense"):
        # As one program: operation by operation each is compiled.
        grads = jax.jit(lambda x, kernel=kernel: {n: jax.grad(loss)(x, s, kernel) for n, s in scores.items()})(x)
        wanted = grads.pop(0)
        for cap, found in grads.items():
            np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=f"{cap}, {kernel}")
            leaf = torch.tensor(np.asarray(x), requires_grad=True)
            loss(leaf, scores[cap], kernel).backward()
            np.testing.assert_allclose(leaf.grad, wanted, atol=1e-5, err_msg=f"{cap}, {kernel}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow_rows("jax")
def test_merge_takes_stacked_parts(framework: str) -> None:
    x = Maker(framework)
    outs, lse = x.floats(2, 3, 4), x.floats(2, 3)
    first, second = ats.merge(outs, lse), ats.merge(list(outs), list(lse))
    assert np.array_equal(x.host(first[0]), x.host(second[0]))
    assert np.array_equal(x.host(first[1]), x.host(second[1]))


WITH_HINTS = (ats.attend, ats.explain)
INSTEAD = {
    "valid_len": ([1, 2], "did you mean 'valid_lens'?"),
    "kernal": ("dense", "did you mean 'kernel'?"),
    "scale": (0.5, "score=ats.ScaledDot(0.5)"),
    "temperature": (2, 'score=ats.Temperature("scaled_dot", 2)'),
    "softcap": (50.0, 'score=ats.SoftCap("scaled_dot", 50.0)'),
    "is_causal": (True, 'mask=ats.Causal(align="top_left")'),
    "causal": (True, "mask=ats.Causal()"),
    "window": (3, "mask=ats.SlidingWindow(left=3 - 1, right=0)"),
    "attn_mask": (np.ones((3, 5)), "mask=attn_mask if it is boolean, bias=attn_mask if it is added to the scores"),
    "key_padding_mask": (np.zeros((2, 5), bool), "mask=ats.KeyPadding.from_ignore(key_padding_mask)"),
    "dropout_p": (0.1, "did you mean 'dropout'?"),
    "lengths": ([1, 2], "valid_lens=lengths"),
    "need_weights": (True, "return_weights=True"),
    "attention_mask": (None, "leave it out"),
    "use_causal_mask": (False, "leave it out"),
    "zzz": (1, "it takes query, key, value, score, mask, valid_lens, "),
}


# They lack some arguments of `attend`: only what is common is shown by all.
WITH_SOME_HINTS = (
    *(ats.attend_vjp, ats.attention_weights, ats.attention_scores, ats.top_weights, ats.pooled_weights, ats.key_mass),
    *(parallel.attend_chunks, *(module.attend for module in RANKS)),
)
COMMON = ("valid_len", "scale", "temperature", "is_causal", "attn_mask", "lengths", "attention_mask")


def rejects(function: Any, name: str, x: Any, hint: str) -> None:
    """The argument is unknown, and that is said before anything is read of the others."""
    parameters = inspect.signature(function).parameters.values()
    required = {parameter.name: None for parameter in parameters if parameter.default is parameter.empty}
    expected = f"{function.__name__}() got an unexpected keyword argument '{name}'. Hint: {hint}"
    for error in (TypeError, ValueError, ats.ArgumentError):
        with pytest.raises(error, match=re.escape(expected)):
            function(**required, **{name: x})


@pytest.mark.parametrize("name", INSTEAD)
def test_an_unknown_argument_shows_what_to_write(name: str) -> None:
    for function in (*WITH_HINTS, *(WITH_SOME_HINTS if name in COMMON else ())):
        rejects(function, name, *INSTEAD[name])


@pytest.mark.parametrize(("module", "ranks"), RANKS.items())
def test_a_plan_over_ranks_names_arguments_that_its_call_does_not_have(module: Any, ranks: str) -> None:
    with pytest.raises(ats.ArgumentError, match=re.escape("'scale'. Hint: score=ats.ScaledDot(0.5)")):
        module.explain(*np.ones((3, 1, 2, 4)), scale=0.5, **{ranks: None})


@pytest.mark.parametrize(
    ("name", "x", "hint"),
    [
        ("temprature", 2, "did you mean 'temperature'?"),
        ("causal", True, "mask=ats.Causal()"),
        ("attn_mask", np.ones((2, 3), bool), "mask=attn_mask if it is boolean"),
        ("scale", 0.5, "it takes scores, valid_lens, mask, axis, temperature"),
    ],
)
def test_masked_softmax_shows_arguments_that_it_has(name: str, x: Any, hint: str) -> None:
    rejects(ats.masked_softmax, name, x, hint)
    with pytest.raises(ats.ArgumentError, match=f"{re.escape(hint)}$"):
        ats.masked_softmax(np.ones((2, 3)), **{name: x})


def test_what_an_unknown_argument_shows_can_be_written() -> None:
    """Every line that has no name of the caller's runs."""
    shown = [hint for _, hint in INSTEAD.values() if hint.startswith(("score=", "mask=ats"))]
    for hint in shown:
        if "key_padding_mask" not in hint:
            assert eval(f"ats.attend(x, x, x, {hint})", {"ats": ats, "x": np.ones((2, 3, 4))}) is not None
    assert len(shown) == 7


def test_other_type_errors_are_left_alone() -> None:
    """One that a score raises inside of a call stays as it is, and signatures have the named arguments alone."""

    class Wrong:
        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return ats.attend(query, key, key, score=len(3))  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len") as received:
        ats.attend(**Maker("numpy").three(), score=Wrong())
    assert not isinstance(received.value, ats.AttnscoreError)
    for function in (*WITH_HINTS, *WITH_SOME_HINTS, ats.masked_softmax):
        assert inspect.Parameter.VAR_KEYWORD not in {x.kind for x in inspect.signature(function).parameters.values()}


# With triton first: loaded after TensorFlow, as torch does for nested tensors, it ends the process (see conftest.py).
TELL = """
import contextlib, json, warnings
warnings.simplefilter("ignore")
with contextlib.suppress(ImportError): import triton
from bad_input import CASES, Maker
assert False, "python -O compiles this away"
received = []
for case in CASES:
    try: case.call(Maker(case.only or "numpy"))
    except Exception as error: received.append((type(error).__name__, str(error)))
    else: received.append(("nothing", ""))
print(json.dumps(received))
"""


@pytest.mark.slow
def test_no_error_rests_on_an_assert() -> None:
    """The package has none, nor anything else that python -O takes away."""
    for path in Path(ats.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        assert not [node for node in nodes if isinstance(node, ast.Assert)], path.name
        assert not [node for node in nodes if isinstance(node, ast.Name) and node.id == "__debug__"], path.name


@pytest.mark.slow
def test_every_error_comes_without_asserts_too() -> None:
    """With asserts compiled away (python -O) every mistake raises the same error."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", TELL],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for case, (kind, text) in zip(CASES, json.loads(done.stdout), strict=True):
        error, _ = caught(case, case.only or "numpy")
        assert (kind, text) == (type(error).__name__, str(error)), case.name


# What may look wrong and is not.
FINE: dict[str, Callable[[Maker], Any]] = {
    "lengths as floats": lambda x: x.attend(valid_lens=[2.0, 5.0]),
    "lengths as an array of floats": lambda x: x.attend(valid_lens=x.array([2.0, 5.0])),
    "lengths as a tuple": lambda x: x.attend(valid_lens=(2, 5)),
    "lengths of another framework": lambda x: x.attend(valid_lens=x.other(2)),
    "lengths in small whole numbers": lambda x: x.attend(valid_lens=x.array([2, 5], "uint8")),
    "one length for a batch": lambda x: x.attend(mask=ats.ValidLens(3)),
    "one length for a sequence": lambda x: x.square(valid_lens=3),
    "one length per query of a sequence": lambda x: x.square(valid_lens=[1, 2, 3, 4]),
    "no keys": lambda x: x.attend(key=x.floats(2, 0, 4), value=x.floats(2, 0, 6), valid_lens=[0, 0]),
    "no queries": lambda x: x.attend(query=x.floats(2, 0, 4)),
    "no batch rows": lambda x: ats.attend(x.floats(0, 3, 4), x.floats(0, 5, 4), x.floats(0, 5, 6)),
    "vectors of length 0": lambda x: x.attend(query=x.floats(2, 3, 0), key=x.floats(2, 5, 0)),
    "values of length 0": lambda x: x.attend(value=x.floats(2, 5, 0)),
    "a mask as nested lists": lambda x: x.attend(mask=[[True] * 5] * 3),
    "a mask of another framework": lambda x: x.attend(mask=x.other(3, 5) > 0),
    "a mask for all rows": lambda x: x.attend(mask=x.bools(5)),
    "a mask of one entry": lambda x: x.attend(mask=x.bools(1, 1)),
    "padding of zeros and ones": lambda x: x.attend(mask=ats.KeyPadding(x.array([[1, 1, 0, 0, 0]] * 2, "int64"))),
    "a start behind the stop": lambda x: x.attend(mask=ats.KeyRange(4, 2)),
    "an offset past everything": lambda x: x.attend(mask=ats.Causal(offset=99)),
    "a bias of one number": lambda x: x.attend(bias=0.5),
    "a bias without axes": lambda x: x.attend(bias=x.array(0.5)),
    "a bias of another float": lambda x: x.attend(bias=x.floats(3, 5, dtype="float64")),
    "a whole sink": lambda x: x.attend(sink=0),
    "one sink for all heads": lambda x: x.heads(4, 2, sink=x.floats(1)),
    "a head_axis that means nothing here": lambda x: x.attend(head_axis=-2),
    "no dropout": lambda x: x.attend(dropout=0),
    "a negative seed": lambda x: x.attend(dropout=0.5, seed=-1),
    "a huge seed": lambda x: x.attend(dropout=0.5, seed=2**80),
    "statistics as a list": lambda x: x.attend(return_stats=["entropy"]),
    "one statistic": lambda x: x.attend(return_stats="entropy"),
    "no statistics": lambda x: x.attend(return_stats=()),
    "one index": lambda x: x.weights(query_index=-1, key_index=np.int64(2)),
    "no indices": lambda x: x.weights(query_index=[], key_index=slice(3, 3)),
    "indices twice": lambda x: x.weights(query_index=[0, 0, -3]),
    "indices as an array": lambda x: x.weights(key_index=x.array([4, 0], "int64")),
    "one head for many": lambda x: x.heads(6, 1),
    "one query head for many": lambda x: x.heads(1, 6),
    "key and value heads apart": lambda x: x.heads(4, 2, 1),
    "axes that are missing in front": lambda x: ats.attend(x.floats(2, 3, 4), x.floats(5, 4), x.floats(5, 6)),
    "a scale that turns the order round": lambda x: x.attend(score=ats.ScaledDot(-1)),
    "a bandwidth without bounds": lambda x: x.attend(score=ats.Gaussian(1e300)),
    "a cap as a whole number": lambda x: x.attend(score=ats.SoftCap("dot", 5)),
    "a cap on a cap": lambda x: x.attend(score=ats.SoftCap(ats.SoftCap("cosine", 5), 2)),
    "the softmax of one row": lambda x: x.softmax(5, valid_lens=3),
    "the softmax of nothing": lambda x: x.softmax(2, 3, 0),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FINE)
def test_what_looks_wrong_and_is_not(name: str, framework: str) -> None:
    maker = Maker(framework)
    found = FINE[name](maker)
    for x in found if isinstance(found, tuple) else (found,):
        if not isinstance(x, ats.AttentionStats):
            assert np.isfinite(maker.host(x)).all()
    assert maker.unchanged()


ON_META: dict[str, Callable[[torch.Tensor], Any]] = {
    "attend": lambda x: ats.attend(x, x, x),
    "mask": lambda x: ats.attend(x, x, x, mask=ats.Causal() & ats.Dense(np.ones((3, 3), bool))),
    "valid_lens": lambda x: ats.attend(x, x, x, valid_lens=[1, 2]),
    "bias and sink": lambda x: ats.attend(x, x, x, bias=x[..., :3], sink=0.5),
    "gaussian": lambda x: ats.attend(x, x, x, score="gaussian"),
    "cosine": lambda x: ats.attend(x, x, x, score="cosine"),
    "bilinear": lambda x: ats.attend(x, x, x, score=ats.Bilinear(x.new_ones(4, 4))),
    "additive": lambda x: ats.attend(x, x, x, score=ats.Additive(x.new_ones(4)), valid_lens=[1, 2]),
    "gradient": lambda x: torch.autograd.grad(
        ats.attend(*[x.requires_grad_()] * 3, mask=ats.Causal(), score="cosine").sum(), x
    )[0],
    "statistics": lambda x: ats.attend(x, x, x, mask=ats.Causal(), return_stats=True)[0],
}


@pytest.mark.parametrize("name", ON_META)
def test_shapes_can_be_inferred_on_the_meta_device(name: str) -> None:
    """Where no value can be read, none is needed: no bare error about .item()."""
    found = ON_META[name](torch.ones(2, 3, 4, device="meta"))
    assert found.shape == (2, 3, 4) and found.device.type == "meta"


def test_a_failed_call_leaves_the_registry_alone() -> None:
    from attnscore import scores

    before = scores.registered()
    for name, cls in (("dot", ats.Sum), ("whole", int), ("", ats.Sum)):
        with pytest.raises(ats.ArgumentError):
            ats.register_score(name, cls)
    assert scores.registered() == before


def test_gradients_are_left_alone_by_a_failed_call() -> None:
    query = torch.ones(2, 3, 4, requires_grad=True)
    with pytest.raises(ats.ShapeError):
        ats.attend(query, torch.ones(2, 5, 7), torch.ones(2, 5, 6))
    assert query.grad is None and query.grad_fn is None
