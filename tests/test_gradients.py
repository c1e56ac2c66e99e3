"""Gradients: the oracle's own against autograd and finite differences, then attnscore's to second order.

That every gradient of every score, mask, framework and dtype is accurate is the subject of ``test_every_score``; here
are the foundations of that comparison, gradients into single results, and gradients of gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnscore as ats
import covering
from cases import FRAMEWORKS, MASKS, SCORES, SCORES_WITH_ARRAYS, SOME_MASKS, SOME_SCORES, Sizes
from covering import each, pairs
from harness import STATISTICS, Call, array, attend_on, make_call, pullback_of, tensor

pytestmark = pytest.mark.usefixtures("one_thread")
scores = pytest.mark.parametrize("score", [score.name for score in SCORES])
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
smooth_scores = pytest.mark.parametrize("score", [score.name for score in SCORES if score.smooth])
# One of each family; a difference takes a tenth of a second, and the exact comparisons below have every score.
by_differences = pytest.mark.parametrize(
    "score",
    [
        pytest.param(score.name, marks=() if score in SOME_SCORES else pytest.mark.slow)
        for score in SCORES
        if score.smooth
    ],
)
SMALL = Sizes(batch=1, heads=4, key_heads=2, queries=3, keys=4, value_dim=2)


# ------------------------------------------------- the oracle holds itself up


@pytest.mark.parametrize("mask", ["none", "nested"])
@scores
def test_the_oracle_agrees_with_autograd(score: str, mask: str) -> None:
    """The tape in long double against torch's autodiff through the same formula in float64."""
    call = make_call(score, mask, "float64", "hiding-bias")
    for name, wanted in call.plain.items():
        found = call.reference[name].astype(np.float64)
        scale = max(1.0, np.abs(found[np.isfinite(found)]).max(initial=0))
        np.testing.assert_allclose(found, wanted, atol=1e-12 * scale, err_msg=name)


@by_differences
def test_the_oracle_agrees_with_finite_differences(score: str) -> None:
    """Each gradient of the oracle along a random direction against a central difference in long double."""
    call = make_call(score, "nested", "float64", "hiding-bias")
    rng = np.random.default_rng(0)
    step = np.longdouble(1e-6)
    for name, x in call.leaves.items():
        direction = rng.standard_normal(x.shape)
        ends = []
        for sign in (1, -1):
            moved = {**call.leaves, name: x.astype(np.longdouble) + sign * step * direction}
            ends.append(_total(call, moved))
        wanted = (ends[0] - ends[1]) / (2 * step)
        found = (call.reference[f"grad.{name}"] * direction).sum()
        assert abs(found - wanted) <= 1e-8 * max(1, abs(wanted)), name


def _total(call: Call, leaves: dict[str, np.ndarray]) -> np.longdouble:
    """What the gradients of the call are gradients of."""
    moved = dataclasses.replace(
        call,
        **{n: leaves[n] for n in ("query", "key", "value")},
        bias=leaves.get("bias"),
        sink=leaves.get("sink"),
        arrays={name: leaves[f"score.{name}"] for name in call.arrays},
    )
    total = np.longdouble(0)
    for name, seed in call.seeds.items():
        x = moved.reference[name]
        total += (np.where(np.isfinite(x), x, 0) * seed).sum()
    return total


# -------------------------------------------- gradients into single results


@pairs(
    score=[score.name for score in SOME_SCORES],
    mask=[mask.name for mask in SOME_MASKS],
    extras={"plain": "", "bias-and-sink": "hiding-bias"},
    seeded=("out", "log_sum_exp", "entropy"),
    framework=FRAMEWORKS,
)
def test_gradient_into_one_result(
    score: str, mask: str, extras: str, seeded: str, framework: str, small_tiles: None
) -> None:
    call = make_call(score, mask, "float64", extras)
    seed = call.seeds.get(seeded, np.random.default_rng(3).standard_normal(call.visible.shape[:-1]))
    call = dataclasses.replace(call, seeds={seeded: seed})
    if framework == "torch":
        call.check(_torch_alone(call, seeded))
        return
    if seeded != "out":
        # NumPy's VJP always takes a gradient of the output.
        call = dataclasses.replace(call, seeds={"out": np.zeros((*call.visible.shape[:-1], 3)), seeded: seed})
    call.check(call.numpy())


def _torch_alone(call: Call, seeded: str) -> dict[str, Any]:
    """As ``Call.torch``, with values that get no gradient from log-sum-exp and entropy."""
    leaves = {name: tensor(x, requires_grad=True) for name, x in call.leaves.items()}
    out, stats = attend_on(call, leaves, return_stats=True)
    outputs = {"out": out, **stats._asdict()}
    grads = torch.autograd.grad(outputs[seeded], list(leaves.values()), torch.tensor(call.seeds[seeded]))
    return outputs | {f"grad.{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def test_statistics_without_gradient_are_detached() -> None:
    call = make_call("scaled_dot", "nested", "float64", "bias-sink")
    for kernel in ("auto", "streaming"):
        found = call.torch(kernel=kernel)
        assert {name for name in STATISTICS if found[name].requires_grad} == {"log_sum_exp", "entropy"}


# ------------------------------------------------------------- second order


def _double(call: Call) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The call as a function of tensors that gives everything differentiable that is finite."""
    names = list(call.leaves)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = dict(zip(names, tensors, strict=True))
        out, stats = attend_on(call, leaves, return_stats=("log_sum_exp", "entropy"))
        alive = torch.isfinite(stats.log_sum_exp)
        return out, torch.where(alive, stats.log_sum_exp, 0.0), stats.entropy

    return function, tuple(tensor(x, requires_grad=True) for x in call.leaves.values())


@by_differences
def test_gradcheck(score: str, small_tiles: None) -> None:
    """In a random direction, by default: entry by entry takes ten times as long."""
    function, inputs = _double(make_call(score, "none", "float64", "bias-sink", SMALL))
    torch.autograd.gradcheck(function, inputs, fast_mode=not covering.products)


@by_differences
def test_gradgradcheck(score: str, small_tiles: None) -> None:
    """Double backward: what gradient penalties and meta-learning take."""
    function, inputs = _double(make_call(score, "none", "float64", "bias-sink", SMALL))
    torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@smooth_scores
def test_second_order_with_empty_rows_and_hiding_bias(score: str, small_tiles: None) -> None:
    """Hidden pairs and empty rows put no NaN into second derivatives."""
    call = make_call(score, "ValidLens-query_lens", "float64", "hiding-bias")
    function, inputs = _double(call)
    first = torch.autograd.grad(sum((x**2).sum() for x in function(*inputs)), inputs, create_graph=True)
    second = torch.autograd.grad(sum((x**2).sum() for x in first), inputs)
    for grad in (*first, *second):
        assert bool(torch.isfinite(grad).all())


@smooth_scores
def test_second_order_against_the_oracle(score: str, small_tiles: None) -> None:
    """The gradient of a gradient penalty equals autograd's through the plain formula."""
    _check_penalty(make_call(score, "nested", "float64", "sink"))


@each(
    score=("scaled_dot-heads", "additive-tanh-bias"),
    mask=[mask.name for mask in MASKS],
    extras={"plain": "", "bias-and-sink": "hiding-bias"},
)
def test_second_order_under_every_mask(score: str, mask: str, extras: str, small_tiles: None) -> None:
    _check_penalty(make_call(score, mask, "float64", extras))


def _penalty(outputs: dict[str, Any], leaves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    loss = (outputs["out"] ** 2).sum() + (outputs["entropy"] ** 2).sum()
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    total = sum((x**2).sum() for x in first)
    if not total.requires_grad:
        # Nothing is visible: the first gradient is 0 whatever the inputs are.
        assert all(bool((x == 0).all()) for x in first)
        return tuple(torch.zeros_like(x) for x in first)
    return torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)


@pytest.mark.parametrize("score", SCORES_WITH_ARRAYS)
def test_second_order_with_arrays_of_another_dtype(score: str, small_tiles: None) -> None:
    """Under "auto" too a second derivative goes through the streaming form."""
    _check_penalty(make_call(score, "nested", "float32", "bias-sink").with_extras_in("float64"), 1e-4)


def _check_penalty(call: Call, tolerance: float = 1e-9) -> None:
    plain = {name: tensor(x.astype(np.float64), requires_grad=True) for name, x in call.leaves.items()}
    wanted = _penalty(call.formulas(plain, torch.from_numpy), plain)
    function, inputs = _double(call)
    out, _, entropy = function(*inputs)
    found = _penalty({"out": out, "entropy": entropy}, dict(zip(plain, inputs, strict=True)))
    for name, x, y in zip(plain, found, wanted, strict=True):
        scale = max(1.0, float(y.abs().max()))
        np.testing.assert_allclose(array(x), array(y), atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_a_temperature_over_a_learned_bandwidth(shape: tuple[int, ...]) -> None:
    """NumPy's VJP of a wrapped score against autograd's."""
    rng = np.random.default_rng(0)
    x, bandwidth = rng.standard_normal((2, 4, 5, 3)), rng.uniform(0.5, 2, shape)
    seed, learned = rng.standard_normal((2, 4, 5, 3)), tensor(bandwidth, requires_grad=True)
    _, pullback = ats.attend_vjp(x, x, x, score=ats.Temperature(ats.Gaussian(np.asarray(bandwidth)), 0.5))
    out = ats.attend(*map(tensor, (x, x, x)), score=ats.Temperature(ats.Gaussian(learned), 0.5))
    (wanted,) = torch.autograd.grad((out * tensor(seed)).sum(), learned)
    (found,) = pullback(seed).score.values()
    np.testing.assert_allclose(found, array(wanted), rtol=1e-10)


def test_a_bandwidth_that_is_a_number_of_numpy_has_no_gradient() -> None:
    x = np.random.default_rng(0).standard_normal((5, 3))
    for bandwidth in (np.float64(3.0), 3.0):
        _, pullback = ats.attend_vjp(x, x, x, score=ats.Gaussian(bandwidth))
        assert pullback(x).score == {}


def test_a_learned_bandwidth_of_16_bits() -> None:
    rng = np.random.default_rng(0)
    x, seed = rng.standard_normal((2, 5, 3)).astype(ml_dtypes.bfloat16)
    found = []
    for kind in (ml_dtypes.bfloat16, np.float64):
        score = ats.Gaussian(np.asarray(1.5, kind))
        _, pullback = ats.attend_vjp(*[x.astype(kind)] * 3, score=score)
        found.append(float(pullback(seed.astype(kind)).score["bandwidth"]))
    assert abs(found[0] - found[1]) <= 2**-6 * max(1, abs(found[1]))


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("score", ["additive-tanh", "gaussian-direct", "soft_cap-gaussian"])
def test_second_derivatives_where_first_ones_are_zero(score: str, kernel: str) -> None:
    """At values of zero, and where no gradient comes in, as the dense kernel's."""
    call = make_call(score, "valid_lens", "float64")
    own = call.score.make(**{name: torch.tensor(x) for name, x in call.arrays.items()})
    query, key, value = (torch.tensor(x) for x in (call.query, call.key, call.value))
    lens = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in call.arguments.items()}

    def derivatives(kernel: str) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (query, key, 0 * value)]
        into = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64, requires_grad=True)
        out = ats.attend(*leaves, score=own, kernel=kernel, **lens)
        first = torch.autograd.grad((out * (value.mean() + out)).sum(), leaves, create_graph=True)
        incoming = torch.autograd.grad(out, leaves, into, create_graph=True)
        results = [(torch.cos(torch.arange(x.numel()).double()).view(x.shape) * x).sum() for x in (*first, *incoming)]
        return [*torch.autograd.grad(sum(results), [*leaves, into])]

    torch.testing.assert_close(derivatives(kernel), derivatives("dense"))


# ------------------------------------------------- between a forward and its backward


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize(
    "mask",
    [
        lambda seen: (seen, seen),
        lambda seen: (seen, ats.Dense(seen) & ats.Causal()),
        lambda seen: (seen, ats.KeyPadding(seen[:2])),
        lambda seen: (lens := seen.sum(1)[:2], ats.ValidLens(lens)),
    ],
    ids=["array", "composed", "padding", "lengths"],
)
@pytest.mark.slow_rows("composed-*", "lengths-*", "array-streaming-jax", "padding-streaming-jax")
def test_a_mask_of_numpy_may_be_written_to_before_the_backward(mask: Any, kernel: str, framework: str) -> None:
    """No framework knows that it was: the gradient belongs to the mask of the call, also where the call has a plan."""
    arrays = [np.random.default_rng(i).standard_normal((2, 8, 4)) for i in range(3)]
    seen = np.random.default_rng(3).random((8, 8)) < 0.6
    for _ in range(3):
        array, made = mask(seen.copy())
        out, pull = pullback_of(framework, arrays, mask=made, kernel=kernel)
        wanted = pull(np.ones_like(out))
        _, pull = pullback_of(framework, arrays, mask=made, kernel=kernel)
        array[:] = True
        for grad, same in zip(pull(np.ones_like(out)), wanted, strict=True):
            np.testing.assert_array_equal(grad, same)
