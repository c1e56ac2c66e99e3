"""What users of MXNet expect of a call: the mission's numbers, gradients, dropout, arrays of their own making."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as onp
import pytest
from mxnet import autograd, np, npx

import attnscore as ats
from attnscore.backends.mxnet import backend as ours
from attnscore.backends.mxnet import gradients
from attnscore.plans import plan as plans
from attnscore.testing import check_framework, check_score
from own_scores import OwnAbsolute, OwnPlain


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return np.array(onp.random.default_rng(seed).standard_normal(shape), dtype=dtype)


def grown(*arrays: Any) -> tuple[Any, ...]:
    for x in arrays:
        x.attach_grad()
    return arrays


def squares(call: Callable[[], Any], *arrays: Any) -> list[onp.ndarray]:
    """The gradients of the sum of the squares of a call's output."""
    for x in arrays:
        x.attach_grad()
    with autograd.record():
        loss = (call() ** 2).sum()
    loss.backward()
    return [x.grad.asnumpy() for x in arrays]


def three(dtype: str = "float32") -> tuple[Any, ...]:
    return random(2, 5, 4, dtype=dtype), random(2, 7, 4, dtype=dtype, seed=1), random(2, 7, 3, dtype=dtype, seed=2)


@pytest.mark.slow
def test_words_kernels_and_gradients() -> None:
    check_framework(np.zeros(1, dtype="float64"))


@pytest.mark.parametrize("score", [OwnPlain(), OwnAbsolute(np.array([0.7], dtype="float64"))])
def test_an_own_score_with_tile_alone(score: Any) -> None:
    check_score(score, like=np.zeros(1, dtype="float64"))


def test_an_array_that_no_gradient_reaches_is_an_error() -> None:
    (factor,) = grown(np.array([1.5]))

    class Product:
        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return factor * ops.matmul(query, ops.swapaxes(key, -1, -2))

    arrays = three()
    with autograd.record(), pytest.raises(ats.ArgumentError, match="score: expected a dataclass whose fields are its"):
        ats.attend(*arrays, score=Product())
    factor = factor.detach()
    assert squares(lambda: ats.attend(*arrays, score=Product()), *arrays)[0].any()


# The last imports the others.
@pytest.mark.parametrize(
    "module",
    [
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("backends.mxnet", "backends.mxnet.gradients")),
        "layers.mxnet",
    ],
)
def test_every_module_imports_by_itself(module: str) -> None:
    code = f"import attnscore.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout + done.stderr


def test_it_is_available() -> None:
    assert ats.available()["frameworks"]["mxnet"] is True
    assert ats.available()["kernels"]["native"] is True


# ------------------------------------------------------------ numbers of the textbook


def test_uniform_weights_over_valid_keys() -> None:
    values = np.arange(40).reshape(1, 10, 4).repeat(2, axis=0)
    lens = np.array([2, 6])
    assert lens.dtype == onp.float32
    for score in (ats.Dot(), ats.Additive(np.ones(8), np.ones((8, 20)), np.ones((8, 2)))):
        dim = 20 if isinstance(score, ats.Additive) else 2
        query, key = random(2, 1, dim), np.ones((2, 10, 2))
        out, weights = ats.attend(query, key, values, score=score, valid_lens=lens, return_weights=True)
        assert onp.allclose(out.asnumpy()[:, 0], [[2, 3, 4, 5], [10, 11, 12, 13]], atol=1e-5)
        expected = onp.zeros((2, 10))
        expected[0, :2], expected[1, :6] = 1 / 2, 1 / 6
        assert onp.allclose(weights.asnumpy()[:, 0], expected, atol=1e-6)
        assert (weights.asnumpy()[:, 0][expected == 0] == 0).all()


def test_masked_softmax_of_the_textbook() -> None:
    weights = ats.masked_softmax(random(2, 2, 4), np.array([[1, 3], [2, 4]]))
    assert weights.asnumpy()[0, 0].tolist() == [1, 0, 0, 0]
    assert onp.allclose(weights.asnumpy().sum(-1), 1)


def test_softmax_and_its_jacobian() -> None:
    y = np.array([0.2, 0.4, 0.1, 0.8], dtype="float64")
    weights = ats.masked_softmax(y)
    assert onp.allclose(weights.asnumpy(), [0.202, 0.247, 0.183, 0.368], atol=5e-4)
    assert onp.allclose(ats.softmax_jacobian(weights).asnumpy()[0], [0.16125, -0.04988, -0.03695, -0.07441], atol=1e-5)


def test_batch_matrix_multiplication_shapes() -> None:
    assert ats.attend(np.ones((2, 3, 4)), np.ones((2, 4, 4)), np.ones((2, 4, 6))).shape == (2, 3, 6)


# ------------------------------------------------------------------ kinds of arrays


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_same_kind_dtype_and_context_out_and_inputs_unchanged(dtype: str) -> None:
    arrays = three(dtype)
    before = [x.asnumpy().copy() for x in arrays]
    out, weights, stats = ats.attend(*arrays, mask=ats.Causal("bottom_right"), return_weights=True, return_stats=True)
    assert {type(x) for x in (out, weights, *stats)} == {np.ndarray}
    assert out.dtype == weights.dtype == onp.dtype(dtype)
    assert out.ctx == mx.cpu()
    assert stats.entropy.dtype == onp.dtype("float64" if dtype == "float64" else "float32")
    for x, then in zip(arrays, before, strict=True):
        assert (x.asnumpy() == then).all()


def test_memory_is_shared_both_ways_and_outlives_its_owner() -> None:
    ops = ours.MxnetBackend()
    x = random(3, 4)
    view = ops.memory(x)
    x[1, 2] = 7.0
    mx.nd.waitall()
    assert view[1, 2] == 7
    copy = view.copy()
    del x
    gc.collect()
    assert (view == copy).all()
    host = onp.arange(12.0).reshape(3, 4)
    place = host.ctypes.data
    back = ops.from_memory(host, "float64", view)
    assert ops.memory(back).ctypes.data == place
    assert (ops.memory(back[1:]) == onp.arange(4.0, 12.0).reshape(2, 4)).all()


def test_views_and_pending_results_are_read_as_they_are() -> None:
    big = random(4, 300, 64)
    pending = np.matmul(big, np.swapaxes(big, -1, -2))[1:3, :, :64]
    out = ats.attend(pending, pending, pending)
    host = pending.asnumpy()
    assert onp.allclose(out.asnumpy(), ats.attend(host, host, host), atol=1e-5)


def test_what_is_no_such_array_is_told() -> None:
    legacy = mx.nd.ones((2, 3))
    with pytest.raises(ats.FrameworkError, match=r"query: expected a dense array, got a legacy mxnet.nd.ND.*as_np"):
        ats.attend(legacy, legacy, legacy)
    sparse = mx.nd.ones((2, 3)).tostype("csr")
    with pytest.raises(ats.FrameworkError, match="sparse"):
        ats.attend(sparse, sparse, sparse)
    parameter = mx.gluon.Parameter("w", shape=(2, 3))
    with pytest.raises(ats.FrameworkError, match=r"gluon Parameter.*x\.data\(\)"):
        ats.attend(parameter, parameter, parameter)
    x = np.ones((2, 3))
    with pytest.raises(ats.FrameworkError, match="query: mxnet, key: numpy"):
        ats.attend(x, onp.ones((2, 3)), x)
    with pytest.raises(ats.DtypeError, match="int32"):
        ats.attend(*(np.ones((2, 3), dtype="int32"),) * 3)


def test_head_axis() -> None:
    query, key = random(2, 8, 5, 4), random(2, 2, 7, 4, seed=1)
    turned = [np.swapaxes(x, 1, 2) for x in (query, key)]
    a, b = ats.attend(query, key, key), ats.attend(turned[0], turned[1], turned[1], head_axis=-2)
    assert b.shape == (2, 5, 8, 4)
    assert onp.allclose(a.asnumpy(), b.asnumpy().swapaxes(1, 2), atol=1e-6)


@pytest.mark.parametrize("kernel", ["native", "streaming"])
@pytest.mark.parametrize("lead", [(2, 3), (2, 1, 2)])
def test_more_axes_than_its_operators_take(lead: tuple[int, ...], kernel: str) -> None:
    shapes = (*lead, 4, 5, 3), (*lead, 2, 7, 3)
    query, key = (random(*shape, dtype="float64", seed=i) for i, shape in enumerate(shapes))
    out = ats.attend(query, key, key, mask=ats.Causal("bottom_right"), kernel=kernel)
    wanted = ats.attend(query.asnumpy(), key.asnumpy(), key.asnumpy(), mask=ats.Causal("bottom_right"))
    assert onp.allclose(out.asnumpy(), wanted, atol=1e-12)


@pytest.mark.parametrize("kernel", ["native", "streaming"])
def test_axes_of_length_zero(kernel: str) -> None:
    npx.set_np()
    try:
        for n, m in ((0, 5), (5, 0), (0, 0)):
            query, key, value = grown(np.ones((2, n, 4)), np.ones((2, m, 4)), np.ones((2, m, 3)))
            with autograd.record():
                out = ats.attend(query, key, value, kernel=kernel)
            out.backward()
            assert out.shape == (2, n, 3)
            assert not out.asnumpy().any()
            assert not query.grad.asnumpy().any()
            assert not value.grad.asnumpy().any()
    finally:
        npx.reset_np()


# ------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("which", range(3))
def test_an_input_that_wants_no_gradient_takes_none_from_the_others(which: int) -> None:
    arrays, alone = three("float64"), three("float64")
    wanted = squares(lambda: ats.attend(*arrays, score="gaussian"), *arrays)[which]
    (found,) = squares(lambda: ats.attend(*alone, score="gaussian"), alone[which])
    assert onp.allclose(found, wanted, atol=1e-12)
    assert wanted.any()


def test_gradients_that_are_added() -> None:
    query, key, value = three("float64")
    bias = random(5, 7, dtype="float64")
    query.attach_grad(grad_req="add")
    bias.attach_grad(grad_req="add")
    found = []
    for _ in range(2):
        with autograd.record():
            loss = (ats.attend(query, key, value, bias=bias) ** 2).sum()
        loss.backward()
        found.append((query.grad.asnumpy().copy(), bias.grad.asnumpy().copy()))
    for once, twice in zip(*found, strict=True):
        assert once.any()
        assert onp.allclose(twice, 2 * once, atol=1e-12)


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("made_by", [onp.array, np.array], ids=["numpy", "mxnet"])
def test_a_mask_may_be_written_to_before_the_backward(made_by: Any, kernel: str) -> None:
    arrays = three("float64")
    for _ in range(3):
        found = []
        for writes in (False, True):
            seen = made_by(onp.arange(35).reshape(5, 7) % 3 > 0, dtype=bool)
            for x in arrays:
                x.attach_grad()
            with autograd.record():
                loss = ats.attend(*arrays, mask=seen, kernel=kernel).sum()
            if writes:
                seen[:] = True
            loss.backward()
            found.append([x.grad.asnumpy() for x in arrays])
        for grad, wanted in zip(*found, strict=True):
            assert onp.array_equal(grad, wanted)


@pytest.mark.parametrize("score", ["scaled_dot", "bilinear"])
def test_recorded_calls_share_a_plan_that_holds_no_array(score: str) -> None:
    def gradients_of(seed: int) -> list[onp.ndarray]:
        arrays = [random(2, *shape, seed=seed + i) for i, shape in enumerate(((5, 3), (7, 3), (7, 2), (3, 3)))]
        lens = np.array([seed % 7 + 1, 4], dtype="int32")

        def call() -> Any:
            chosen: Any = ats.Bilinear(arrays[3][0]) if score == "bilinear" else score
            return ats.attend(*arrays[:3], score=chosen, valid_lens=lens)

        return squares(call, *arrays)

    plans.PLANS.clear()
    wanted = {seed: gradients_of(seed) for seed in (0, 10)}
    assert len(plans.PLANS.values()) == 1 and not onp.allclose(wanted[0][2], wanted[10][2])
    for seed, grads in wanted.items():
        plans.PLANS.clear()
        assert all(map(onp.array_equal, gradients_of(seed), grads))


def test_one_array_in_three_places() -> None:
    x = random(2, 6, 4, dtype="float64")
    parts = [x.copy() for _ in range(3)]
    (found,) = squares(lambda: ats.attend(x, x, x), x)
    assert onp.allclose(found, sum(squares(lambda: ats.attend(*parts), *parts)), atol=1e-12)


def test_statistics_carry_gradients_and_the_rest_none() -> None:
    query, key, value = grown(*three("float64"))
    with autograd.record():
        _, stats = ats.attend(query, key, value, return_stats=True)
        stats.entropy.sum().backward()
    assert query.grad.asnumpy().any()
    with autograd.record():
        _, stats = ats.attend(query, key, value, return_stats=True)
    with pytest.raises(mx.MXNetError):
        stats.max_score.backward()


def test_no_call_is_kept_that_nobody_will_ask_for() -> None:
    """The outputs of a call are held by its node, and the node by its outputs: neither may be held from elsewhere."""
    before = len(gradients._RECORDED)
    x = grown(*three())
    for _ in range(20):
        with autograd.record():
            out = ats.attend(*x)
        out.backward()
        with autograd.record():
            ats.attend(*x)
    del out
    gc.collect()
    mx.nd.waitall()
    assert len(gradients._RECORDED) <= before + 1


def test_prepared_keys_that_are_written_to() -> None:
    score = ats.Additive(random(32), random(32, 4, seed=1), random(32, 6, seed=2))
    query, key, value = random(1, 1, 4, seed=3), random(1, 150, 6, seed=4), random(1, 150, 3, seed=5)
    prepared = ats.prepare_keys(score, key)
    before = ats.attend(query, prepared, value)
    prepared.key[:] = 2 * prepared.key
    found, wanted = ats.attend(query, prepared, value), ats.attend(query, prepared.key, value, score=prepared.score)
    assert onp.allclose(found.asnumpy(), wanted.asnumpy(), rtol=0, atol=1e-6)
    assert not onp.allclose(found.asnumpy(), before.asnumpy(), rtol=0, atol=1e-3)


def test_an_empty_row_and_nan_in_the_padding() -> None:
    query, key, value = three("float64")
    key[0, 2:] = value[0, 2:] = onp.nan
    key[1] = value[1] = onp.nan
    grown(query, key, value)
    for score in ("scaled_dot", "cosine", ats.Additive(random(4, dtype="float64"))):
        with autograd.record():
            out = ats.attend(query, key, value, score=score, valid_lens=np.array([2, 0]))
        out.backward()
        assert onp.isfinite(out.asnumpy()).all()
        assert not out.asnumpy()[1].any()
        for x in (query, key, value):
            assert onp.isfinite(x.grad.asnumpy()).all()
            assert not x.grad.asnumpy()[1].any()
        assert not key.grad.asnumpy()[0, 2:].any()


# -------------------------------------------------------------------------- dropout


def test_dropout_draws_from_mxnet_and_replays() -> None:
    arrays = three()
    mx.random.seed(3)
    a, b = (ats.attend(*arrays, dropout=0.5).asnumpy() for _ in range(2))
    mx.random.seed(3)
    again = ats.attend(*arrays, dropout=0.5).asnumpy()
    assert (a == again).all()
    assert (a != b).any()


@pytest.mark.parametrize("kernel", ["native", "streaming", "dense"])
def test_dropout_keeps_the_pairs_that_it_keeps_elsewhere(kernel: str) -> None:
    arrays = three("float64")
    host = [x.asnumpy() for x in arrays]
    seed = 2**62 + 12345
    ours_, theirs = (ats.attend(*x, dropout=0.3, seed=seed, kernel=kernel) for x in (arrays, host))
    assert onp.allclose(ours_.asnumpy(), theirs, atol=1e-12)


# --------------------------------------------------------------------------- memory

LONG = """
import warnings
warnings.simplefilter("ignore")
from mxnet import autograd, np
import attnscore as ats
n = {n}
arrays = [np.random.normal(0, 1, (1, n, 16)) for _ in range(3)]
for x in arrays: x.attach_grad()
def run(m):
    with autograd.record(): out = ats.attend(*(x[:, :m] for x in arrays), mask=ats.Causal(), score={score})
    out.backward()
    return [x.grad.asnumpy().sum() for x in arrays]
def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))
run(64)
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")  # VmHWM, the peak of resident memory, begins anew
before = memory("VmRSS")
run(n)
print((memory("VmHWM") - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("score", ["'scaled_dot'", "ats.Additive(np.ones(16))"])
def test_32768_tokens_forward_and_backward_without_the_matrix(score: str) -> None:
    code = LONG.format(n=32768, score=score)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The matrix has 4096 MB.
    assert int(done.stdout) < 200, done.stdout


ENDING = """
import warnings
warnings.simplefilter("ignore")
from mxnet import autograd, np
import attnscore as ats
x = np.random.normal(0, 1, (1, 4096, 16))
x.attach_grad()
with autograd.record(): out = ats.attend(x, x, x)
out.backward()
"""


@pytest.mark.slow
def test_a_process_ends_while_a_gradient_is_under_way() -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=True, timeout=60)
        assert not done.stderr


def test_second_derivatives_are_refused_by_mxnet() -> None:
    x = random(3, 2, dtype="float64")
    x.attach_grad()
    with autograd.record():
        y = (ats.attend(x, x, x) ** 2).sum()
        with pytest.raises(mx.MXNetError):
            autograd.grad(y, [x], create_graph=True)[0].sum().backward()


# ------------------------------------------------------------ normalizers


@pytest.mark.parametrize("normalizer", ["sigmoid", "sparsemax", "entmax15", ats.Entmax(1.2)])
def test_other_normalizers_and_their_gradients(normalizer: Any) -> None:
    arrays = three("float64")
    plain = [x.asnumpy() for x in arrays]
    call = {"normalizer": normalizer, "valid_lens": onp.array([7, 3])}
    wanted, pullback = ats.attend_vjp(*plain, **call)
    leaves = grown(*arrays)
    with autograd.record():
        out = ats.attend(*leaves, **call)
    out.backward()
    onp.testing.assert_allclose(out.asnumpy(), wanted, rtol=1e-10, atol=1e-12)
    for x, grad in zip(leaves, pullback(onp.ones_like(wanted))[:3], strict=True):
        onp.testing.assert_allclose(x.grad.asnumpy(), grad, rtol=1e-9, atol=1e-11)
