"""Every framework: its words against NumPy's, and what each of its users expects of a call.

Same kind, dtype and device out; inputs unchanged; and for PyTorch autograd, forward mode, transforms, autocast.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.testing import check_framework
from cases import DTYPES, FRAMEWORKS, MODES, SCORES, SOME_SCORES, Mode, in_every_mode
from harness import Call, accumulator, array, attend_on, dtype_of, make_call, tensor

pytestmark = pytest.mark.usefixtures("one_thread")
# torch's own, raised inside torch where it loads the rules of forward mode.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
scores = pytest.mark.parametrize("score", [score.name for score in SCORES])
some_scores = pytest.mark.parametrize("score", [score.name for score in SOME_SCORES])


def leaves_of(call: Call, **options: Any) -> dict[str, torch.Tensor]:
    return {name: tensor(x, requires_grad=True, **options) for name, x in call.leaves.items()}


@frameworks
def test_check_framework(framework: str) -> None:
    check_framework(np.zeros(1) if framework == "numpy" else torch.zeros(1))


@pytest.mark.slow
def test_check_framework_on_jax() -> None:
    check_framework(jnp.zeros(1))


def test_every_framework_is_in_the_table() -> None:
    """A framework that is missing here fails; one of another environment is looked for there."""
    known = ats.available()["frameworks"]
    assert {mode.framework for mode in MODES} == set(known)
    assert not [mode for mode in MODES if mode.run is not None and not known[mode.framework]]
    assert all((Path(__file__).parent / mode.own).is_file() for mode in MODES if mode.own)


# A second each to compile, and like other rows of their mode; test_jax.py and test_tensorflow_graphs.py have more.
COMPILED_LIKE_OTHERS = {
    "jax-eager-own-tile_gradient-Causal-bottom_right-tall-float64",
    "jax-vmap-scaled_dot-heads-Causal-bottom_right-tall-float64",
    "tensorflow-graph-cosine-heads-zero-vectors-Causal-bottom_right-tall-float64",
    "tensorflow-graph-additive-tanh-bias-none-float64",
}


def rows_of_modes() -> list[Any]:
    rows = in_every_mode()
    assert {row.id for row in rows} >= COMPILED_LIKE_OTHERS
    return [
        pytest.param(*row.values, id=row.id, marks=[pytest.mark.slow] if row.id in COMPILED_LIKE_OTHERS else row.marks)
        for row in rows
    ]


@pytest.mark.parametrize(("mode", "score", "mask", "dtype"), rows_of_modes())
def test_every_mode_against_the_oracle(mode: Mode, score: str, mask: str, dtype: str) -> None:
    """Output, statistics and gradients: one of each family of scores and of masks, and every dtype."""
    call = make_call(score, mask, dtype, "hiding-bias")
    assert mode.run is not None
    call.check(mode.run(call))


@frameworks
@pytest.mark.parametrize("dtype", DTYPES)
def test_kind_and_dtype_of_results(dtype: str, framework: str) -> None:
    call = make_call("scaled_dot", "Causal-offset", dtype, "bias-sink")
    leaves = leaves_of(call) if framework == "torch" else call.leaves
    out, weights, stats = attend_on(call, leaves, return_weights=True, return_stats=True)
    kind = torch.Tensor if framework == "torch" else np.ndarray
    assert isinstance(out, kind) and isinstance(weights, kind)
    assert dtype_of(out) == dtype_of(weights) == dtype
    assert {dtype_of(x) for x in stats[:-1]} == {accumulator(dtype)} and dtype_of(stats.argmax_key) == "int32"
    assert out.shape == (2, 4, 7, 3) and weights.shape == (2, 4, 7, 12)


@frameworks
@scores
def test_inputs_are_not_changed(score: str, framework: str, small_tiles: None) -> None:
    call = make_call(score, "nested", "float32", "hiding-bias")
    before = {name: x.copy() for name, x in call.leaves.items()}
    mask_before = repr(call.arguments)
    leaves = call.leaves
    if framework == "torch":
        leaves = leaves_of(call)
        attend_on(call, leaves).sum().backward()
        assert {x._version for x in leaves.values()} == {0}
    else:
        call.numpy()
    for name, x in leaves.items():
        np.testing.assert_array_equal(array(x), before[name], err_msg=name)
    assert repr(call.arguments) == mask_before


@some_scores
def test_numpy_inputs_may_be_read_only(score: str, small_tiles: None) -> None:
    call = make_call(score, "nested", "float32", "hiding-bias")
    wanted = call.numpy()
    for x in call.leaves.values():
        x.flags.writeable = False
    try:
        for name, x in call.numpy().items():
            np.testing.assert_array_equal(x, wanted[name], err_msg=name)
    finally:
        for x in call.leaves.values():
            x.flags.writeable = True


@frameworks
def test_bias_sink_and_parameters_of_other_float_dtypes(framework: str, small_tiles: None) -> None:
    """They may be of any float dtype; each gradient comes in the dtype of its own array."""
    call = make_call("additive-tanh-heads", "nested", "float32", "bias-sink")
    wide = make_call("additive-tanh-heads", "nested", "float64", "bias-sink")
    mixed = {
        name: x if name in ("query", "key", "value") else wide.leaves[name].astype(kind)
        for (name, x), kind in zip(
            call.leaves.items(), [None] * 3 + [np.float64, np.float16, np.float64, np.float16, np.float32, np.float64],
            strict=True,
        )
    }  # fmt: skip
    if framework == "torch":
        leaves = {name: tensor(x, requires_grad=True) for name, x in mixed.items()}
        out = attend_on(call, leaves)
        grads = dict(zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True))
    else:
        own = {name: mixed[f"score.{name}"] for name in call.arrays}
        out, pullback = ats.attend_vjp(
            mixed["query"], mixed["key"], mixed["value"], score=call.score.make(**own), bias=mixed["bias"],
            sink=mixed["sink"], **call.arguments,
        )  # fmt: skip
        found = pullback(np.ones_like(out))
        grads = found._asdict() | {f"score.{name}": x for name, x in found.score.items()}
    assert dtype_of(out) == "float32"
    np.testing.assert_allclose(array(out), call.reference["out"], atol=5e-3)
    for name, x in mixed.items():
        assert dtype_of(grads[name]) == dtype_of(x), name
        assert grads[name].shape == x.shape, name


# ------------------------------------------------------------------- PyTorch


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "sink", "score.w_v", "score.W_q", "score.W_k"])
def test_torch_gradient_of_one_input_alone(wanted: str, small_tiles: None) -> None:
    call = make_call("additive-gelu-heads", "nested", "float64", "hiding-bias")
    leaves = {name: tensor(x, requires_grad=name == wanted) for name, x in call.leaves.items()}
    out, stats = attend_on(call, leaves, return_stats=("log_sum_exp", "entropy"))
    grads = torch.autograd.grad(
        [out, stats.log_sum_exp, stats.entropy], leaves[wanted], [torch.tensor(x) for x in call.seeds.values()]
    )
    np.testing.assert_allclose(grads[0].numpy(), call.reference[f"grad.{wanted}"].astype(np.float64), atol=1e-11)


@some_scores
def test_torch_without_grad(score: str) -> None:
    call = make_call(score, "Causal-offset")
    leaves = leaves_of(call)
    wanted = attend_on(call, leaves)
    assert wanted.requires_grad
    for region in (torch.no_grad, torch.inference_mode):
        with region():
            found = attend_on(call, leaves)
        assert not found.requires_grad
        np.testing.assert_array_equal(array(found), array(wanted))
    assert not attend_on(call, {name: x.detach() for name, x in leaves.items()}).requires_grad


@some_scores
def test_torch_calls_share_nothing(score: str, small_tiles: None) -> None:
    """Two calls in flight, their backwards in either order, and one backward twice."""
    calls = [make_call(score, "nested", "float64", seed=seed) for seed in (0, 1)]
    alone = [call.torch() for call in calls]
    leaves = [leaves_of(call) for call in calls]
    outs = [attend_on(call, each) for call, each in zip(calls, leaves, strict=True)]
    for i in (0, 1, 0):
        found = torch.autograd.grad(
            outs[i], list(leaves[i].values()), torch.tensor(calls[i].seeds["out"]), retain_graph=True
        )
        for name, grad in zip(leaves[i], found, strict=True):
            np.testing.assert_array_equal(array(grad), array(alone[i][f"grad.{name}"]), err_msg=name)


def test_torch_keeps_no_matrix_for_the_backward() -> None:
    """What autograd holds between forward and backward is linear in the lengths (short: test_native_saved_scores)."""
    held: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        held.append(x.numel())
        return x

    x = torch.randn(1, 2, 800, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ats.attend(x, x, x, mask=ats.Causal(), score=ats.Additive(torch.randn(8), torch.randn(8, 8), torch.randn(8, 8)))
    assert max(held) <= x.numel()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@some_scores
def test_torch_autocast(score: str, dtype: str) -> None:
    """Query, key and value are cast; the gradients come back in float32."""
    call = make_call(score, "Causal-offset", "float32")
    leaves = leaves_of(call)
    with torch.autocast("cpu", getattr(torch, dtype)):
        out = attend_on(call, leaves)
    assert dtype_of(out) == dtype
    grads = torch.autograd.grad(out.float().sum(), list(leaves.values()))
    assert {dtype_of(grad) for grad in grads} == {"float32"}
    low = {n: x.to(getattr(torch, dtype)) if n in ("query", "key", "value") else x for n, x in leaves.items()}
    torch.testing.assert_close(out, attend_on(call, low))


def test_torch_autocast_leaves_float64_alone() -> None:
    call = make_call("scaled_dot", "none", "float64")
    with torch.autocast("cpu", torch.bfloat16):
        assert dtype_of(attend_on(call, leaves_of(call))) == "float64"


@some_scores
def test_torch_func_grad(score: str, small_tiles: None) -> None:
    call = make_call(score, "nested", "float64", "bias-sink")
    leaves = leaves_of(call)
    expected = torch.autograd.grad(_loss(call, leaves), list(leaves.values()))
    found = torch.func.grad(lambda named: _loss(call, named))({n: x.detach() for n, x in leaves.items()})
    for name, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[name], wanted, msg=lambda text, name=name: f"{name}: {text}")


def _loss(call: Call, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """One number through which gradients flow into out, log-sum-exp (where finite) and entropy."""
    out, stats = attend_on(call, leaves, return_stats=("log_sum_exp", "entropy"))
    alive = torch.from_numpy(call.visible.any(-1))
    lse = torch.where(alive, stats.log_sum_exp, 0.0)
    return (out**2).sum() + lse.sin().sum() + (stats.entropy**2).sum()


@some_scores
def test_torch_vmap(score: str, small_tiles: None) -> None:
    """Over examples, each with two axes of its own beside the heads."""
    call = make_call(score, "none", "float64")
    leaves = {name: tensor(x) for name, x in call.leaves.items()}

    def one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_on(call, {**leaves, "query": query[None], "key": key[None], "value": value[None]})[0]

    found = torch.func.vmap(one)(leaves["query"], leaves["key"], leaves["value"])
    torch.testing.assert_close(found, attend_on(call, leaves))


@pytest.mark.parametrize("mask", [None, ats.Causal("bottom_right"), ats.ValidLens(5)], ids=repr)
@some_scores
def test_torch_per_example_gradients(score: str, mask: Any, small_tiles: None) -> None:
    """vmap of grad: what differential privacy and influence functions take."""
    call = make_call(score, "none", "float64")
    leaves = {name: tensor(x) for name, x in call.leaves.items()}

    def loss(own: dict[str, torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        arrays = {**leaves, **own, "query": query[None], "key": key[None], "value": value[None]}
        made = call.score.make(**{name: arrays[f"score.{name}"] for name in call.arrays})
        return (ats.attend(arrays["query"], arrays["key"], arrays["value"], score=made, mask=mask) ** 2).sum()

    own = {name: x for name, x in leaves.items() if name.startswith("score.")}
    examples = [leaves[name] for name in ("query", "key", "value")]
    found = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0, 0, 0))(own, *examples)
    for i in range(2):
        wanted = torch.func.grad(loss, (0, 1))(own, *(x[i] for x in examples))
        torch.testing.assert_close(found[1][i], wanted[1])
        torch.testing.assert_close({n: x[i] for n, x in found[0].items()}, wanted[0])


CLOSED_OVER = {
    "array": lambda: {"mask": torch.arange(64).view(8, 8) % 3 > 0},
    "inverted": lambda: {"mask": ~ats.Dense(torch.arange(64).view(8, 8) % 3 > 0)},
    "padding": lambda: {"mask": ats.KeyPadding(torch.arange(16).view(2, 8) % 5 > 0)},
    "lengths": lambda: {"valid_lens": torch.tensor([3, 8])},
    "documents": lambda: {"mask": ats.Documents(torch.arange(16).view(2, 8) // 3)},
    "array-causal": lambda: {"mask": ats.Dense(torch.arange(64).view(8, 8) % 3 > 0) & ats.Causal()},
    "bandwidth": lambda: {"score": ats.Gaussian(torch.tensor(2.0))},
    "bias": lambda: {"bias": torch.arange(64.0).view(8, 8) / 64},
}


@forward_mode
@pytest.mark.parametrize("kind", CLOSED_OVER)
def test_torch_transforms_of_calls_with_arrays_that_they_do_not_touch(kind: str) -> None:
    torch.manual_seed(0)
    x, tangent, options = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8, 4), CLOSED_OVER[kind]()

    def loss(query: torch.Tensor) -> torch.Tensor:
        return (ats.attend(query, x, x, **options) ** 2).sum()

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), wanted)
    torch.testing.assert_close(torch.func.vjp(loss, x)[1](torch.tensor(1.0))[0], wanted)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (tangent,))[1], (wanted * tangent).sum())
    mapped = torch.func.vmap(lambda factor: torch.func.grad(loss)(x * factor))(torch.ones(2))
    torch.testing.assert_close(mapped, torch.stack([wanted, wanted]))


@pytest.mark.parametrize(
    "made",
    [lambda m: m, lambda m: ~ats.Dense(m), lambda m: ats.KeyPadding(m[:2])],
    ids=["array", "inverted", "padding"],
)
@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_torch_a_mask_that_changes_before_the_backward_is_refused(made: Any, kernel: str) -> None:
    """As torch refuses it of an operand: the gradient would belong to another mask."""
    x, mask = torch.randn(2, 64, 4, requires_grad=True), torch.arange(64 * 64).view(64, 64) % 3 > 0
    out = ats.attend(x, x, x, mask=made(mask), kernel=kernel)
    out.sum().backward(retain_graph=True)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match=r"mask of attend.* modified by an inplace operation"):
        out.sum().backward()


def test_torch_vmap_draws_dropout_for_each() -> None:
    x = torch.ones(3, 4, 6, 8)
    value = torch.randn(4, 6, 8)
    different, same = (
        torch.func.vmap(lambda q: ats.attend(q, q, value, dropout=0.5), randomness=kind)(x)
        for kind in ("different", "same")
    )
    assert not torch.equal(different[0], different[1])
    assert torch.equal(same[0], same[1])


@forward_mode
@pytest.mark.parametrize("mask", ["none", "nested"])
@some_scores
def test_torch_jvp_is_the_gradient_in_a_direction(score: str, mask: str, small_tiles: None) -> None:
    call = make_call(score, mask, "float64", "bias-sink")
    leaves = leaves_of(call)
    torch.manual_seed(0)
    tangents = {name: torch.randn_like(x) for name, x in leaves.items()}
    grads = dict(zip(leaves, torch.autograd.grad(_loss(call, leaves), list(leaves.values())), strict=True))
    wanted = sum((grads[name] * tangents[name]).sum() for name in leaves)
    plain = {name: x.detach() for name, x in leaves.items()}
    _, found = torch.func.jvp(lambda named: _loss(call, named), (plain,), (tangents,))
    torch.testing.assert_close(found, wanted)


@forward_mode
def test_torch_jacobians_and_hessians(small_tiles: None) -> None:
    """Forward over reverse equals reverse over reverse."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, 3, dtype=torch.float64) for n in (2, 3, 3))

    def loss(query: torch.Tensor) -> torch.Tensor:
        return (ats.attend(query, key, value, mask=ats.Causal("bottom_right")) ** 3).sum()

    forward = torch.func.jacfwd(torch.func.jacrev(loss))(query)
    reverse = torch.autograd.functional.hessian(loss, query)
    torch.testing.assert_close(forward, reverse)
    torch.testing.assert_close(torch.func.jacfwd(loss)(query), torch.func.jacrev(loss)(query))


def test_torch_subclasses_and_parameters() -> None:
    w = torch.nn.Parameter(torch.randn(3, 3))
    x = torch.randn(2, 4, 3)
    ats.attend(x @ w, x, x, score=ats.Bilinear(w)).sum().backward()
    assert w.grad is not None and bool((w.grad != 0).any())


def test_torch_backward_in_other_threads(small_tiles: None) -> None:
    """autograd runs the backward where it likes; results do not depend on it."""
    call = make_call("additive-tanh-bias", "nested", "float64")
    wanted = call.torch()
    found: list[Any] = []

    def work() -> None:
        found.append(call.torch())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        for name, x in each.items():
            np.testing.assert_array_equal(array(x), array(wanted[name]), err_msg=name)


# --------------------------------------------------------------------- NumPy


def test_numpy_takes_long_double(small_tiles: None) -> None:
    call = make_call("scaled_dot", "nested", "float64")
    arrays = [x.astype(np.longdouble) for x in (call.query, call.key, call.value)]
    out = ats.attend(*arrays, **call.arguments)
    assert out.dtype == np.longdouble
    np.testing.assert_allclose(out, call.reference["out"], atol=1e-14)


def test_numpy_bfloat16_is_that_of_torch(small_tiles: None) -> None:
    call = make_call("additive-tanh-bias", "nested", "bfloat16", "hiding-bias")
    found, wanted = call.numpy(), call.torch()
    assert found["out"].dtype == ml_dtypes.bfloat16
    for name in found:
        x, y = array(found[name]), array(wanted[name])
        np.testing.assert_allclose(x, y, rtol=2**-7, atol=2**-7, err_msg=name)


def test_numpy_pullback_may_be_called_again(small_tiles: None) -> None:
    call = make_call("additive-tanh-bias", "nested", "float64")
    out, pullback = ats.attend_vjp(
        call.query, call.key, call.value, score=call.score.make(**call.arrays), **call.arguments
    )
    grad = call.seeds["out"]
    first, double, again = pullback(grad), pullback(2 * grad), pullback(grad)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        np.testing.assert_allclose(2 * getattr(first, name), getattr(double, name), rtol=1e-12)
    assert first.bias is None and first.sink is None and set(first.score) == {"w_v", "W_q", "W_k", "bias"}
    assert out.shape == grad.shape


def test_numpy_pullback_names_only_what_was_given() -> None:
    _, pullback = ats.attend_vjp(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 5)), sink=0.5, bias=1.0)
    found = pullback(np.ones((2, 5)))
    assert np.shape(found.sink) == () and np.shape(found.bias) == () and found.score == {}
