"""Custom scores with functions in Triton's language: the Triton kernel against the oracle and the streaming kernel."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from device_calls import DEVICE, equal, run

import attnscore as ats
import oracle
import triton_scores as own
from attnscore.kernels.triton import launch
from attnscore.scores.triton_tile import TritonTile
from attnscore.testing import check_score
from cases import MASK, Score, Sizes
from covering import pairs
from harness import EXTRAS, Call, build_call

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # NumPy's, of which the interpreter is made: functions of the zeros past the last position, of NaN and infinities.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]


def _square(q: Any, k: Any, gain: Any) -> Any:
    x = oracle.dot(q, k) - 0.5
    return x * x * oracle.per_head(gain, 0)


def _student(q: Any, k: Any, rate: Any) -> Any:
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    return -((difference * difference).sum(-1) * oracle.per_head(rate, 0) + 1.0).log()


def _smooth_distance(q: Any, k: Any, rate: Any, width: Any = 0.3) -> Any:
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    if len(rate.shape) > 1:
        rate = rate.reshape(rate.shape[0], 1, 1, rate.shape[1])
    return -(((difference * difference + width * width).sqrt() - width) * rate).sum(-1)


SCORES = {
    score.name: score
    for score in (
        Score("product", own.Square, _square, {"gain": ()}, magnitude="own"),
        Score("product-heads", own.Square, _square, {"gain": ("H",)}, magnitude="own"),
        Score("distance-heads", own.Student, _student, {"rate": ("H",)}, magnitude="own"),
        Score("channels", own.SmoothDistance, _smooth_distance, {"rate": ("d",)}, magnitude="own"),
        Score("channels-heads", own.SmoothDistance, _smooth_distance, {"rate": ("H", "d")}, magnitude="own"),
        Score("channels-two", own.SmoothDistance, _smooth_distance, {"rate": ("d",), "width": ()}, magnitude="own"),
        Score("soft_cap-of-temperature-distance",
              lambda rate: ats.SoftCap(ats.Temperature(own.Student(rate), 0.5), 3.0),
              lambda q, k, rate: oracle.soft_cap(_student(q, k, rate) * 2.0, 3.0), {"rate": ()}, magnitude="own"),
    )
}  # fmt: skip
MASKS = ("none", "valid_lens-empty", "KeyPadding-scattered", "Causal-bottom_right-tall", "Causal-offset-batch",
         "SlidingWindow-both", "Documents-scattered", "Packed-or", "array-4d", "nested")  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")
SOME_EXTRAS = tuple(name for name in EXTRAS if "weights" not in name)


def call_of(score: str, mask: str, dtype: str, extras: str) -> Call:
    """A call of two heads that share a KV head: the interpreter takes a tenth of a second for a few programs."""
    queries, keys = MASK[mask].lengths
    sizes = Sizes(heads=2, key_heads=1, queries=queries, keys=keys)
    return build_call(SCORES[score], MASK[mask], dtype, extras, sizes, seed=2)


@pytest.mark.parametrize(
    ("score", "mask", "dtype", "extras"),
    [
        ("product", "Causal-bottom_right-tall", "float32", "hiding-bias"),
        ("channels-heads", "valid_lens-empty", "float32", "sink"),
        ("soft_cap-of-temperature-distance", "array-4d", "bfloat16", ""),
    ],
)
def test_a_few_against_the_oracle(score: str, mask: str, dtype: str, extras: str) -> None:
    call = call_of(score, mask, dtype, extras)
    call.check(run(call, kernel="triton", among_nan=True))


@pytest.mark.slow
@pairs(score=tuple(SCORES), mask=MASKS, dtype=DTYPES, extras={name or "nothing-else": name for name in SOME_EXTRAS})
def test_against_the_oracle(score: str, mask: str, dtype: str, extras: str) -> None:
    call = call_of(score, mask, dtype, extras)
    call.check(run(call, kernel="triton", among_nan=True))


@pytest.mark.slow
@pytest.mark.parametrize("score", ["product-heads", "distance-heads", "channels-two"])
def test_the_same_bits_in_any_order(score: str, request: pytest.FixtureRequest) -> None:
    """No two programs write to the same place, or the later one of them would be another one here."""
    call = call_of(score, "nested", "float32", "hiding-bias")
    first = run(call, kernel="triton")
    equal(first, run(call, kernel="triton"))
    request.getfixturevalue("reversed_grid")
    equal(first, run(call, kernel="triton"))


def _arrays(
    sizes: tuple[int, int] = (9, 13), dims: tuple[int, int] = (5, 3), heads: tuple[int, int] = (4, 2)
) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(3)
    shapes = {"query": (2, heads[0], sizes[0], dims[0]), "key": (2, heads[1], sizes[1], dims[0])}
    shapes["value"] = (2, heads[1], sizes[1], dims[1])
    return {name: torch.tensor(rng.standard_normal(shape)) for name, shape in shapes.items()}


def results(
    arrays: dict[str, torch.Tensor], score: Any, kernel: str, dtype: torch.dtype, **options: Any
) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of all arrays and of the score's, in float64, of a call in another dtype."""
    device = DEVICE if kernel == "triton" else "cpu"
    leaves = {name: x.detach().to(device, dtype).requires_grad_() for name, x in arrays.items()}
    fields = {}
    if dataclasses.is_dataclass(score):
        fields = {f.name: getattr(score, f.name) for f in dataclasses.fields(score)}
        fields = {n: x.detach().to(device, dtype).requires_grad_() for n, x in fields.items() if torch.is_tensor(x)}
        score = dataclasses.replace(score, **fields)
    out = ats.attend(**leaves, score=score, kernel=kernel, **options)
    seed = torch.linspace(-1, 1, out.numel(), dtype=dtype, device=device).reshape(out.shape)
    wanted = leaves | fields
    grads = torch.autograd.grad(out, list(wanted.values()), seed)
    return {name: x.detach().double().cpu() for name, x in zip(("out", *wanted), (out, *grads), strict=True)}


def agree(arrays: dict[str, torch.Tensor], score: Any, **options: Any) -> None:
    """Assert that float32 in the Triton kernel is float64 in the streaming kernel."""
    found = results(arrays, score, "triton", torch.float32, **options)
    for name, want in results(arrays, score, "streaming", torch.float64, **options).items():
        unit = max([1.0, *want[torch.isfinite(want)].abs().flatten().tolist()])
        torch.testing.assert_close(
            found[name], want, rtol=2e-5, atol=4e-6 * unit, equal_nan=True, msg=lambda text, name=name: name + text
        )


def scores_of(dim: int, heads: int) -> dict[str, Any]:
    rate = 0.2 + torch.arange(dim, dtype=torch.float64) / dim
    return {
        "product": own.Square(torch.tensor(0.1, dtype=torch.float64)),
        "distance": own.Student(0.5 + torch.arange(heads, dtype=torch.float64)),
        "channels": own.SmoothDistance(rate, torch.tensor(0.4, dtype=torch.float64)),
        "not-finite-at-zero": own.LogRatio(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["product", "distance", "channels", "not-finite-at-zero"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 13), (17, 1), (5, 33), (16, 16)])
@pytest.mark.parametrize("dims", [(1, 1), (17, 33)])
def test_odd_sizes(sizes: tuple[int, int], dims: tuple[int, int], kind: str) -> None:
    """With heads of its own for each, and a mask whose last query tile counts as whole though it is not.

    Products, distances and values are about 1 in any dimension, and no logarithm is of a number near 0: of one
    key the gradients are 0, and their rounding errors are of the size of the scores and derivatives.
    """
    arrays = _arrays(sizes, dims, (2, 2))
    for name in ("query", "key"):
        x = arrays[name]
        arrays[name] = x.abs() + 0.5 if kind == "not-finite-at-zero" else x / dims[0] ** 0.5
    arrays["value"] /= dims[1] ** 0.5
    agree(arrays, scores_of(dims[0], 2)[kind], mask=ats.SlidingWindow(40, 40, align="top_left"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["product", "distance", "channels", "not-finite-at-zero"])
def test_dropout_and_a_relative_bias(kind: str) -> None:
    """With the same weights dropped as on the CPU, and the gradient of the bias."""
    arrays = _arrays() | {"bias": torch.tensor(np.random.default_rng(4).standard_normal((4, 1, 21)))}
    agree(arrays, scores_of(5, 4)[kind], mask=ats.Causal("bottom_right"), dropout=0.4, seed=2**40 + 17)


NAN, INF = float("nan"), float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("planted", [("key", 3, NAN), ("key", 12, INF), ("query", 2, INF), ("value", 5, -INF)])
@pytest.mark.parametrize("score", [own.Bounded(), *(scores_of(5, 4)[name] for name in ("distance", "channels"))])
def test_nan_and_infinity_reach_what_attends_them_alone(score: Any, planted: tuple[str, int, float]) -> None:
    """As in the streaming kernel, forward and backward, also where the function of an infinity is finite."""
    arrays = _arrays()
    name, position, x = planted
    arrays[name][..., position, 1] = x
    agree(arrays, score, mask=ats.SlidingWindow(3, 2, offset=2) & ats.ValidLens([11, 0]))


def test_the_kernels_compute_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def noted(self: Any, function: Any, grid: Any, *operands: Any, **constants: Any) -> None:
        launched.append(function.__name__)
        function[grid](*operands, **constants)

    monkeypatch.setattr(launch.Runner, "run", noted)
    arrays = _arrays((4, 5), (3, 2), (1, 1))
    score = own.SmoothDistance(torch.ones(3), torch.tensor(0.5))
    agree(arrays, score)
    assert launched == ["forward", "row_sums", "d_query", "d_key", "d_parameter", "d_parameter"]


# ------------------------------------------------------------------ check_score


def test_check_score_takes_right_functions() -> None:
    rate, width = (torch.tensor(x, dtype=torch.float64, device=DEVICE) for x in ([0.6] * 5, 0.3))
    check_score(own.SmoothDistance(rate, width))


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ((own.double, own.bounded_gradient), "triton_tile: out differs from that by tile: off by"),
        ((own.bounded, own.half_gradient), "triton_tile: gradient of query differs from that by tile: off by"),
    ],
)
def test_check_score_finds_wrong_functions(functions: Any, expected: str) -> None:
    with pytest.raises(AssertionError, match=expected):
        check_score(own.Given(TritonTile("product", *functions)))


# ------------------------------------------------------------------ errors


def attended(score: Any, **options: Any) -> Any:
    x = torch.ones(1, 4, 3, device=DEVICE, requires_grad=True)
    return ats.attend(x, x, x, score=score, **options)


def test_a_score_without_functions_streams() -> None:
    with pytest.raises(ats.KernelUnavailable, match="OnlyTile is computed in Python: it has no method triton_tile"):
        attended(own.OnlyTile(), kernel="triton")
    x = torch.ones(1, 4, 3, device=DEVICE)
    found = ats.explain(x, x, x, score=own.OnlyTile())
    assert found.kernel == "streaming"
    assert "no method triton_tile" in str(found)
    assert ats.explain(x, x, x, score=own.Bounded()).kernel == "triton"


def test_another_dimension_streams() -> None:
    @dataclasses.dataclass(frozen=True)
    class First(own.Bounded):
        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return super().tile(ops, query[..., :2], key)

    x = torch.ones(1, 4, 3, device=DEVICE)
    with pytest.raises(ats.KernelUnavailable, match="queries and keys of different dimensions, by a custom score"):
        ats.attend(x, x[..., :2], x, score=First(), kernel="triton")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: TritonTile("dot", own.bounded, own.bounded_gradient), "of: expected one of product, squared_distance"),
        (lambda: TritonTile("product", abs, own.bounded_gradient), r"value: expected a function \(x\) decorated with"),
        (lambda: TritonTile("channels", own.bounded, own.bounded), r"value: expected a function \(a, b\) .*bounded\(x"),
        (
            lambda: TritonTile("product", own.student, own.bounded_gradient, ("rate",)),
            r"gradient: expected a function \(x, rate\) decorated .*got bounded_gradient\(x\)",
        ),
        (
            lambda: TritonTile("product", own.student, own.student, channel_parameters=("rate",)),
            r'channel_parameters: expected \(\) for of="product"',
        ),
    ],
)
def test_wrong_functions(make: Any, expected: str) -> None:
    with pytest.raises(ats.ArgumentError, match=expected):
        make()


WITH_RATE = TritonTile("product", own.student, own.student_gradient, ("rate",))


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (own.Given(None), "triton_tile of Given: expected a TritonTile, got None"),
        (own.Given(WITH_RATE, "fast"), "triton_tile of Given: expected a number or an array in the .*field 'rate'"),
        (
            own.Given(TritonTile("product", own.bounded, own.bounded_gradient), torch.tensor(1.0, device=DEVICE)),
            r"all arrays of the score as parameters, \['rate'\] too",
        ),
        (
            own.Given(TritonTile("channels", own.log_ratio, own.log_ratio_gradient), torch.ones(3, device=DEVICE)),
            r"all arrays of the score as parameters",
        ),
    ],
)
def test_functions_that_do_not_fit_the_score(score: Any, expected: str) -> None:
    with pytest.raises(ats.ArgumentError, match=expected):
        attended(score)


def test_a_parameter_of_another_shape() -> None:
    with pytest.raises(ats.ShapeError, match=r"rate: expected \(\) or \(1,\), got \(3,\)"):
        attended(own.Given(WITH_RATE, torch.ones(3, device=DEVICE)))
    with pytest.raises(ats.ShapeError, match="rate: expected one number for each of 3 channels, got 2"):
        attended(own.SmoothDistance(torch.ones(2, device=DEVICE)))


@pytest.mark.parametrize(("functions", "expected"), own.WRONG_RESULTS)
def test_what_the_functions_return(functions: Any, expected: str) -> None:
    with pytest.raises(Exception, match=r".") as found:
        attended(own.Given(TritonTile("product", *functions))).sum().backward()
    # The compiler's own error, or the cause of the error of the function around it.
    error: BaseException | None = found.value
    while error is not None and re.search(expected, str(error)) is None:
        error = error.__cause__
    assert error is not None
