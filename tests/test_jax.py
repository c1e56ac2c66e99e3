"""JAX: jit, grad, vmap, forward mode, gradients of gradients; traced lengths and seeds; pytrees; both integer widths.

The generic tests hold plain calls to the oracle; here transformed calls are held to plain ones, and those to NumPy's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attnscore as ats
from attnscore import backends
from attnscore.backends.jax.pytrees import Static
from attnscore.base import thresholds
from cases import DTYPES, SCORES_WITH_ARRAYS
from covering import some
from harness import make_call
from own_scores import OwnAbsolute, OwnSquare

# Own classes that do not inherit from `Score` are pytrees once registered, or from the first call that takes them.
backends.register_pytree(OwnAbsolute)
backends.register_pytree(OwnSquare)

RNG = np.random.default_rng(3)
MASKS: dict[str, Any] = {
    "none": {},
    "causal": {"mask": ats.Causal("bottom_right")},
    "lengths, one of 0": {"valid_lens": np.array([7, 0])},
    "no interval": {"mask": ~ats.KeyRange(2, [5, 9])},
    "window": {"mask": ats.SlidingWindow(3, 2, "top_left")},
}
SCORES: dict[str, Any] = {
    "scaled_dot": ats.ScaledDot,
    "gaussian": lambda: ats.Gaussian(jnp.asarray(0.8)),
    "additive": lambda: ats.Additive(*(jnp.asarray(x) for x in _ADDITIVE)),
    "own, tile alone": lambda: OwnAbsolute(jnp.asarray(0.7)),
    "own, with a gradient": lambda: OwnSquare(jnp.asarray(0.7)),
}
_ADDITIVE = [RNG.standard_normal(shape) for shape in ((3,), (3, 4), (3, 4))]
masks = pytest.mark.parametrize("mask", MASKS)
scores = pytest.mark.parametrize("score", SCORES)
# Every program is compiled, which takes seconds. By default all scores meet one mask and one score all masks, and the
# native kernel is asked everything; other pairs, second derivatives and the streaming form's own answers to the same
# questions are slow tests.
pairs = pytest.mark.parametrize(
    ("score", "mask"),
    [
        pytest.param(score, mask, marks=() if score == "scaled_dot" or mask == "causal" else pytest.mark.slow)
        for score in SCORES
        for mask in MASKS
    ],
)
_STREAMING = pytest.param("streaming", marks=pytest.mark.slow)
kernels = pytest.mark.parametrize("kernel", ["auto", _STREAMING])


def inputs(dtype: str = "float64", queries: int = 9, keys: int = 11) -> tuple[Any, Any, Any]:
    """Two batches, four heads on two KV heads."""
    rng = np.random.default_rng(0)
    shapes = (2, 4, queries, 4), (2, 2, keys, 4), (2, 2, keys, 3)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)  # type: ignore[return-value]


def close(got: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one, "f8"), np.asarray(other, "f8"), atol=tolerance, rtol=tolerance)


def in_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def loss_of(score: str, mask: str, **options: Any) -> Any:
    """One number through which gradients flow into the output, log-sum-exp (where finite) and entropy."""

    def loss(arrays: Any, made: Any) -> Any:
        out, stats = ats.attend(
            *arrays, score=made, **MASKS[mask], **options, return_stats=("log_sum_exp", "entropy", "max_weight")
        )
        lse = jnp.where(jnp.isfinite(stats.log_sum_exp), stats.log_sum_exp, 0.0)
        return (out**2).sum() + jnp.sin(lse).sum() + (stats.entropy**2).sum()

    return loss


@pytest.fixture
def narrow() -> Iterator[None]:
    """JAX as it comes: 32-bit numbers."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pairs
@pytest.mark.slow_rows("own, *-causal")
def test_jit_gives_what_a_plain_call_gives(score: str, mask: str, small_tiles: None) -> None:
    """The plain call is NumPy's, whose numbers are JAX's (test_every_framework.py) and need no programs."""
    arrays, made = inputs(), SCORES[score]()
    plain, of_numpy = in_numpy(arrays), in_numpy(made)
    wanted = ats.attend(*plain, score=of_numpy, **MASKS[mask], return_weights=True, return_stats=True)
    got = jax.jit(lambda a, s: ats.attend(*a, score=s, **MASKS[mask], return_weights=True, return_stats=True))
    close(got(arrays, made), wanted)


@pytest.mark.slow
@kernels
@pytest.mark.parametrize("mask", ["causal", "none"])
@scores
def test_grad_inside_and_around_jit(score: str, mask: str, kernel: str, small_tiles: None) -> None:
    arrays, made = inputs(queries=8, keys=12), SCORES[score]()
    wanted = jax.jit(jax.value_and_grad(loss_of(score, mask, kernel="dense"), (0, 1)))(arrays, made)
    loss = loss_of(score, mask, kernel=kernel)
    close(jax.jit(jax.value_and_grad(loss, (0, 1)))(arrays, made), wanted)
    close(jax.value_and_grad(jax.jit(loss), (0, 1))(arrays, made), wanted)


@masks
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_those_of_numpy(mask: str, dtype: str) -> None:
    arrays = inputs(dtype)
    grads = jax.grad(lambda a: ats.attend(*a, **MASKS[mask]).sum())(arrays)
    out, pullback = ats.attend_vjp(*map(np.asarray, arrays), **MASKS[mask])
    close(grads, tuple(pullback(np.ones_like(out))[:3]), 1e-5 if dtype == "float32" else 1e-12)


THREE, GELU = ("auto", "streaming", "dense"), "additive-gelu-heads"


IN_JIT = ("scaled_dot-heads", "gaussian-heads", "own-tile", GELU)


@pytest.mark.slow
@some(
    "score,kernel,jit",
    [
        *(("scaled_dot-heads", "auto", False), ("scaled_dot-heads", "auto", True)),
        *(("gaussian-heads", "streaming", True), ("own-tile", "auto", True), (GELU, "dense", True)),
    ],
    [
        *((score, kernel, False) for score in SCORES_WITH_ARRAYS for kernel in THREE),
        *((score, kernel, True) for score in IN_JIT for kernel in THREE),
    ],
)
def test_arrays_of_another_dtype(score: str, kernel: str, jit: bool) -> None:
    call = make_call(score, "none" if jit else "nested", "float32", "bias-sink").with_extras_in("float64")
    call.check(call.jax(jit=jit, kernel=kernel))


@scores
@pytest.mark.slow_rows("own, with a gradient", "own, tile alone")
def test_check_grads(score: str) -> None:
    arrays, made = inputs(), SCORES[score]()
    loss = loss_of(score, "window")
    call = jax.jit(lambda *a: loss(a, made))
    check_grads(call, arrays, order=1, modes=("rev",), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_check_grads_of_the_second_order_and_forward(mask: str, small_tiles: None) -> None:
    arrays, loss = inputs(), loss_of("scaled_dot", mask)
    check_grads(
        lambda *a: loss(tuple(map(jnp.asarray, a)), ats.ScaledDot()),
        arrays,
        order=2,
        modes=("fwd", "rev"),
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "streaming", "dense"])
def test_a_hessian_through_jit(kernel: str, small_tiles: None) -> None:
    query, key, value = (jnp.asarray(RNG.standard_normal((5, 3))) for _ in range(3))

    def loss(query: Any, kernel: str = kernel) -> Any:
        return (ats.attend(query, key, value, mask=ats.Causal(), kernel=kernel) ** 3).sum()

    wanted = jax.hessian(lambda q: loss(q, "dense"))(query)
    close(jax.jacrev(jax.grad(loss))(query), wanted)
    close(jax.jit(jax.jacrev(jax.grad(loss)))(query), wanted)
    close(jax.jacrev(jax.jit(jax.grad(loss)))(query), wanted)
    close(jax.jit(jax.jacfwd(jax.grad(loss)))(query), wanted)


@pytest.mark.parametrize("wrap", [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.slow)], ids=["jit", "plain"])
@pytest.mark.parametrize("mask", ["none", pytest.param("no interval", marks=pytest.mark.slow)])
@pytest.mark.slow_rows("none-jit")
def test_forward_mode_is_the_gradient_in_a_direction(mask: str, wrap: Any, small_tiles: None) -> None:
    arrays = inputs()
    along = tuple(jnp.asarray(RNG.standard_normal(x.shape)) for x in arrays)
    loss = loss_of("scaled_dot", mask)
    grads = jax.jit(jax.grad(loss))(arrays, ats.ScaledDot())
    wanted = sum((grad * direction).sum() for grad, direction in zip(grads, along, strict=True))
    found = wrap(lambda a, d: jax.jvp(lambda x: loss(x, ats.ScaledDot()), (a,), (d,))[1])(arrays, along)
    close(found, wanted, 1e-9)


@pytest.mark.slow
def test_forward_mode_around_jit_says_that_it_is_not() -> None:
    """What docs/decisions/jax.md says: `jit(jvp(f))` works, `jvp(jit(f))` needs the dense kernel."""
    arrays = inputs()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(jax.jit(ats.attend), arrays, arrays)
    found = jax.jvp(jax.jit(lambda *a: ats.attend(*a, kernel="dense")), arrays, arrays)
    close(found, jax.jvp(ats.attend, arrays, arrays))


@pytest.mark.parametrize("mask", ["none", pytest.param("no interval", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrap", ["vmap", "jit of vmap", "vmap of jit"])
def test_vmap(wrap: str, mask: str) -> None:
    arrays = tuple(jnp.stack([x, 2 * x, -x]) for x in inputs())
    wanted = jnp.stack([ats.attend(*(x[i] for x in arrays), **MASKS[mask]) for i in range(3)])
    inside, outside = (jax.jit if name in wrap else lambda f: f for name in ("of jit", "jit of"))
    close(outside(jax.vmap(inside(lambda *a: ats.attend(*a, **MASKS[mask]))))(*arrays), wanted)


def test_gradients_per_example() -> None:
    arrays = inputs()

    def loss(query: Any, key: Any, value: Any) -> Any:
        example = (x[None] for x in (query, key, value))
        return (ats.attend(*example, mask=ats.Causal("bottom_right")) ** 2).sum()

    def whole(query: Any, key: Any, value: Any) -> Any:
        return (ats.attend(query, key, value, mask=ats.Causal("bottom_right")) ** 2).sum()

    wanted = jax.jit(jax.grad(whole, (0, 1, 2)))(*arrays)
    each = jax.grad(loss, (0, 1, 2))
    for call in (jax.jit(jax.vmap(each)), jax.vmap(jax.jit(each))):
        close(call(*arrays), wanted)


@pytest.mark.slow
def test_lengths_of_each_example_under_vmap() -> None:
    arrays, lens = inputs(), jnp.asarray([7, 0])
    wanted = ats.attend(*arrays, valid_lens=lens)

    def one(query: Any, key: Any, value: Any, length: Any) -> Any:
        return ats.attend(query[None], key[None], value[None], valid_lens=length[None])[0]

    close(jax.vmap(one)(*arrays, lens), wanted)
    close(jax.jit(jax.vmap(one))(*arrays, lens), wanted)
    close(jax.vmap(jax.jit(one))(*arrays, lens), wanted)


# ------------------------------------------------------- lengths and seeds that are traced


@kernels
def test_traced_lengths_are_clamped(kernel: str, small_tiles: None) -> None:
    arrays = inputs()
    call = jax.jit(lambda a, lens: ats.attend(*a, valid_lens=lens, kernel=kernel))
    for lens in ([3, 11], [0, 5]):
        close(call(arrays, jnp.asarray(lens)), ats.attend(*arrays, valid_lens=lens))
    close(call(arrays, jnp.asarray([-4, 99])), ats.attend(*arrays, valid_lens=[0, 11]))


@kernels
@pytest.mark.parametrize(
    "mask",
    [
        lambda n: ats.Causal(offset=n),
        lambda n: ats.SlidingWindow(2, 3, offset=n),
        lambda n: ats.PrefixLM(n) & ats.Causal("bottom_right"),
        lambda n: ats.KeyRange(n, 9) & ats.ValidLens(7),
        lambda n: ats.Packed(jnp.cumsum(jnp.append(0, n)), [0, 5, 11]).causal("bottom_right"),
        lambda n: ats.KeyPadding(jnp.arange(11)[None] > n[:, None]),
        lambda n: ats.Documents(jnp.arange(9)[None] // n[:, None], jnp.arange(11)[None] // n[:, None]),
        lambda n: ats.Dense(jnp.arange(9)[:, None] + n[:, None, None, None] > jnp.arange(11)),
        lambda n: ats.Causal(offset=n) | ats.ValidLens(n),
    ],
)  # fmt: skip
@pytest.mark.slow_rows("<lambda>[13568]-*", "<lambda>4-auto", "<lambda>0-auto")
def test_every_kind_of_traced_mask(mask: Any, kernel: str, small_tiles: None) -> None:
    arrays, numbers = inputs(), jnp.asarray([2, 4])

    def loss(arrays: Any, mask: Any, kernel: str = kernel) -> Any:
        return (ats.attend(*arrays, mask=mask, kernel=kernel) ** 2).sum()

    known = mask(numbers)
    wanted = jax.jit(jax.value_and_grad(lambda a: loss(a, known, "dense")))(arrays)
    close(jax.jit(jax.value_and_grad(lambda a, n: loss(a, mask(n))))(arrays, numbers), wanted)
    # The mask itself as an argument: a pytree.
    close(jax.jit(jax.value_and_grad(loss))(arrays, known), wanted)


@pytest.mark.slow
def test_a_mask_that_closes_over_a_traced_array(small_tiles: None) -> None:
    query, key, value = (jnp.asarray(RNG.normal(size=(2, 5, 4))) for _ in range(3))
    hidden = jnp.asarray([True, False, False, True, False])

    def pooled(query: Any, hidden: Any) -> Any:
        return ats.attend(query, key, value, mask=ats.MaskFunction(lambda b, h, i, j: ~hidden[j]))

    wanted = ats.attend(query, key, value, mask=~np.asarray(hidden))
    np.testing.assert_allclose(jax.jit(pooled)(query, hidden), wanted, atol=1e-12)
    of_mask = jax.grad(lambda x: ats.attend(x, key, value, mask=~np.asarray(hidden)).sum())(query)
    grad = jax.jit(jax.grad(lambda query, hidden: pooled(query, hidden).sum()))(query, hidden)
    np.testing.assert_allclose(grad, of_mask, atol=1e-12)


def test_wrong_input_raises_while_tracing() -> None:
    query, key, value = inputs()
    with pytest.raises(ats.ShapeError, match="key: expected") as plain:
        ats.attend(query, key[..., :3], value)
    with pytest.raises(ats.ShapeError) as traced:
        jax.jit(ats.attend)(query, key[..., :3], value)
    assert str(plain.value) == str(traced.value)
    with pytest.raises(ats.MaskError, match="valid_lens: expected shape"):
        jax.jit(lambda q, n: ats.attend(q, key, value, valid_lens=n))(query, jnp.asarray([1, 2, 3]))
    with pytest.raises(ats.DtypeError, match="one dtype"):
        jax.jit(ats.attend)(query.astype("float32"), key, value)
    with pytest.raises(ats.FrameworkError, match="arrays of one framework"):
        jax.jit(lambda q: ats.attend(q, np.asarray(key), value))(query)
    with pytest.raises(ats.FrameworkError, match="query: expected a dense array, got a ShapeDtypeStruct"):
        ats.attend(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)))


@kernels
@pytest.mark.parametrize(
    "seed",
    [-3, 2**40 + 5, np.uint32(2**32 - 1), np.int8(-3), jax.random.key(5), jax.random.PRNGKey(5)],
    ids=["negative", "wide", "unsigned", "narrow", "key", "old key"],
)
def test_dropout_is_the_same_traced_or_not(seed: Any, kernel: str, small_tiles: None) -> None:
    arrays = inputs()

    def loss(arrays: Any, seed: Any) -> Any:
        return (ats.attend(*arrays, mask=ats.Causal("bottom_right"), dropout=0.4, seed=seed, kernel=kernel) ** 2).sum()

    wanted = jax.value_and_grad(loss)(arrays, seed)
    traced = jnp.asarray(seed) if isinstance(seed, (int, np.integer)) else seed
    close(jax.jit(jax.value_and_grad(loss))(arrays, traced), wanted)
    assert float(loss(arrays, 8)) != float(wanted[0])


def test_an_integer_seed_means_what_it_means_in_numpy() -> None:
    arrays = inputs()
    close(ats.attend(*arrays, dropout=0.4, seed=11), ats.attend(*map(np.asarray, arrays), dropout=0.4, seed=11), 1e-12)


def test_dropout_needs_a_seed() -> None:
    with pytest.raises(ats.ArgumentError, match=r"seed: expected a whole number or a jax\.random key"):
        ats.attend(*inputs(), dropout=0.1)
    ats.attend(*inputs(), dropout=0.0)


SEVERAL = r". Hint: jax\.random\.split gives several keys"


@pytest.mark.parametrize(
    ("seed", "got"),
    [
        (jnp.asarray(0.5), r"float\d+ of shape \(\)"),
        (jax.random.split(jax.random.key(0)), r"key<\w+> of shape \(2,\)" + SEVERAL),
        (jax.random.split(jax.random.PRNGKey(0), 3), r"uint32 of shape \(3, 2\)" + SEVERAL),
    ],
    ids=["float", "keys", "old keys"],
)
def test_a_seed_is_one_key(seed: jax.Array, got: str) -> None:
    expected = r"seed: expected a whole number or one jax\.random key, got "
    with pytest.raises(ats.ArgumentError, match=expected + got):
        ats.attend(*inputs(), dropout=0.1, seed=seed)
    with pytest.raises(ats.ArgumentError, match=expected + got):
        jax.jit(lambda seed: ats.attend(*inputs(), dropout=0.1, seed=seed))(seed)


# ------------------------------------------------------- dtypes, widths, NaN, empty rows


@pytest.mark.slow
@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_under_jit(dtype: str, kernel: str) -> None:
    arrays = inputs(dtype)
    out, stats = jax.jit(lambda a: ats.attend(*a, kernel=kernel, return_stats=True))(arrays)
    assert out.dtype == dtype
    sums = "float64" if dtype == "float64" else "float32"
    assert {name: x.dtype.name for name, x in stats._asdict().items()} == dict.fromkeys(stats._fields, sums) | {
        "argmax_key": "int32"
    }
    grads = jax.jit(jax.grad(lambda a: ats.attend(*a, kernel=kernel).astype("float32").sum()))(arrays)
    assert {x.dtype.name for x in grads} == {dtype}
    wide = tuple(x.astype("float64") for x in arrays)
    wanted = jax.jit(jax.grad(lambda a: ats.attend(*a, kernel="dense").sum()))(wide)
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
    close(tuple(x.astype("float64") for x in grads), wanted, tolerance * 4)


@pytest.mark.slow
@kernels
@pytest.mark.parametrize("mask", ["causal", "lengths, one of 0", "no interval"])
def test_without_wide_integers(mask: str, kernel: str, narrow: None, small_tiles: None) -> None:
    arrays = inputs("float32")

    def loss(arrays: Any, seed: Any) -> Any:
        return ats.attend(*arrays, **MASKS[mask], kernel=kernel, dropout=0.3, seed=seed).sum()

    out, pullback = ats.attend_vjp(*map(np.asarray, arrays), **MASKS[mask], dropout=0.3, seed=2**31 + 5)
    wanted = tuple(pullback(np.ones_like(out))[:3])
    close(jax.grad(loss)(arrays, 2**31 + 5), wanted, 2e-5)
    close(jax.jit(jax.grad(loss), static_argnums=1)(arrays, 2**31 + 5), wanted, 2e-5)
    key = jax.random.key(3)
    close(jax.jit(jax.grad(loss))(arrays, key), jax.grad(loss)(arrays, key), 2e-5)


@kernels
@pytest.mark.parametrize(
    "score", ["scaled_dot", *(pytest.param(s, marks=pytest.mark.slow) for s in SCORES if "own" in s)]
)
def test_what_is_hidden_reaches_nothing(score: str, kernel: str, small_tiles: None) -> None:
    """NaN in hidden keys and values, and in a query that sees nothing: forward and backward, under jit too."""
    query, key, value = inputs()
    lens, made = jnp.asarray([7, 0]), SCORES[score]()

    def loss(arrays: Any, lens: Any) -> Any:
        out = ats.attend(*arrays, score=made, valid_lens=lens, kernel=kernel)
        return (out**2).sum(), out

    (_, out), wanted = jax.value_and_grad(loss, has_aux=True)((query, key, value), lens)
    assert not np.asarray(out[1]).any()
    bad = (query.at[1].set(jnp.nan), key.at[0, :, 7:].set(jnp.inf), value.at[0, :, 8].set(jnp.nan))
    for wrap in (lambda f: f, jax.jit):
        (_, found), grads = wrap(jax.value_and_grad(loss, has_aux=True))(bad, lens)
        close(found, out)
        for grad, want, x in zip(grads, wanted, bad, strict=True):
            here = np.isfinite(np.asarray(x))
            np.testing.assert_allclose(np.asarray(grad)[here], np.asarray(want)[here], atol=1e-11)
        seen = wrap(lambda a: ats.attend(*a, valid_lens=lens, kernel=kernel))(
            (query, key, value.at[0, :, 2].set(jnp.nan))
        )
        assert np.isnan(np.asarray(seen[0])).all() and not np.asarray(seen[1]).any()


# ------------------------------------------------------- pytrees, and what surrounds attend


def test_static_values_of_two_types_differ() -> None:
    class Printed(float):
        """As NumPy below 2 prints a float32."""

        def __repr__(self) -> str:
            return float.__repr__(self)

    assert Static(0.1) == Static(0.1) != Static(Printed(0.1)) and Static([0.1]) != Static([Printed(0.1)])


def test_scores_and_masks_are_pytrees() -> None:
    score = ats.SoftCap(ats.Additive(jnp.ones(3), jnp.ones((3, 4)), jnp.ones((3, 4)), activation="gelu"), 30.0)
    leaves, structure = jax.tree.flatten(score)
    assert [x.shape for x in leaves] == [(3,), (3, 4), (3, 4)]
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, ats.SoftCap) and again.score.activation == "gelu" and again.cap == 30.0
    assert jax.tree.map(lambda x: 2 * x, score).score.w_v[0] == 2
    mask = ats.ValidLens(jnp.asarray([1, 2])) & ats.Causal(offset=3)
    assert [x.shape for x in jax.tree.leaves(mask)] == [(2,)]
    assert jax.tree.leaves(ats.ValidLens([1, 2])) == []
    assert jax.tree.structure(ats.Causal()) == jax.tree.structure(ats.Causal())
    assert jax.tree.structure(ats.Causal()) != jax.tree.structure(ats.Causal("top_left"))


def test_gradient_of_a_score() -> None:
    arrays, made = inputs(), SCORES["additive"]()
    grads = jax.grad(lambda score: (ats.attend(*arrays, score=score) ** 2).sum())(made)
    assert isinstance(grads, ats.Additive) and grads.W_q.shape == (3, 4)


@pytest.mark.slow
def test_around_attend_under_jit() -> None:
    query, key, value = inputs()
    plain = [np.asarray(x) for x in (query, key, value)]
    options: dict[str, Any] = {"mask": ats.Causal("bottom_right")}
    calls: dict[str, Any] = {
        "attention_weights": lambda q, k, v: ats.attention_weights(q, k, **options),
        "a block": lambda q, k, v: ats.attention_weights(q, k, query_index=slice(2, 5), key_index=[0, 3], **options),
        "attention_scores": lambda q, k, v: ats.attention_scores(q, k, **options),
        "top_weights": lambda q, k, v: tuple(ats.top_weights(q, k, 3, **options)),
        "pooled_weights": lambda q, k, v: ats.pooled_weights(q, k, (3, 4), **options),
        "key_mass": lambda q, k, v: ats.key_mass(q, k, **options),
        "masked_softmax": lambda q, k, v: ats.masked_softmax(q @ q.swapaxes(-1, -2), **options),
        "softmax_jacobian": lambda q, k, v: ats.softmax_jacobian(v),
        "softmax_pullback": lambda q, k, v: ats.softmax_pullback(v, v),
        "merge": lambda q, k, v: ats.merge([v, 2 * v], [v[..., 0], v[..., 1]]),
    }  # fmt: skip
    for name, call in calls.items():
        wanted = [np.asarray(x) for x in jax.tree.leaves(call(*plain))]
        for got in (call(query, key, value), jax.jit(call)(query, key, value)):
            for one, other in zip(jax.tree.leaves(got), wanted, strict=True):
                np.testing.assert_allclose(np.asarray(one), other, atol=1e-12, err_msg=name)


def test_nothing_is_unrolled_under_jit() -> None:
    """Twice the length, the same program: loops, not copies of their bodies."""

    def lines(length: int) -> int:
        x = jnp.zeros((length, 4))
        call = jax.grad(lambda x: ats.attend(x, x, x, mask=ats.Causal(), kernel="streaming").sum())
        return len(jax.jit(call).lower(x).as_text().splitlines())

    assert lines(16 * 512) < 1.3 * lines(4 * 512)


@pytest.mark.slow
def test_no_matrix_under_jit() -> None:
    """Neither the streaming program nor what the native one keeps holds an array of all pairs."""
    x = jnp.zeros((4096, 8), jnp.float32)
    for kernel in ("streaming", "auto"):
        call = jax.jit(jax.grad(lambda x, kernel=kernel: ats.attend(x, x, x, mask=ats.Causal(), kernel=kernel).sum()))
        memory = call.lower(x).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4096 * 4096 * 4 / 4, kernel


@pytest.mark.parametrize("length", [256, 300, 308])
def test_a_program_holds_one_tile_of_a_length_with_divisors(length: int) -> None:
    """No second copy of a tile's operations, for the first or the last tile: they would take as long to compile."""

    def pooled(q: Any, k: Any, v: Any) -> Any:
        return ats.attend(q, k, v, score=OwnAbsolute(jnp.asarray(0.7)), mask=ats.Causal())

    arrays = [jnp.zeros((4, 8, length, 8))] * 3
    program = jax.jit(pooled).lower(*arrays).as_text()
    assert program.count("stablehlo.while") == 2
    # One of a tile, two where it is merged with those before, one at the end.
    assert program.count("stablehlo.exponential") == 4


@pytest.mark.slow
def test_tile_sizes_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs(queries=19, keys=23)
    found = []
    for size in (4, 16, 512):
        monkeypatch.setattr(thresholds, "TILE_SCORES", size**2)
        monkeypatch.setattr(thresholds, "SMALLEST_TILE", size)
        found.append(jax.jit(lambda a: ats.attend(*a, valid_lens=[5, 20], kernel="streaming"))(arrays))
    close(found[0], found[2])
    close(found[1], found[2])


@pytest.mark.parametrize("number", [2.0, np.float32(2), np.float64(2)], ids=["python", "float32", "float64"])
def test_gradient_at_a_number_that_is_no_array(number: Any) -> None:
    arrays = inputs()

    def loss(bandwidth: Any) -> Any:
        return (ats.attend(*arrays, score=ats.Gaussian(bandwidth)) ** 2).sum()

    close(jax.grad(loss)(number), jax.grad(loss)(jnp.asarray(number)), 1e-6)


@pytest.mark.parametrize("lengths", [(0,), (0, 4)])
def test_an_empty_batch_with_traced_lengths(lengths: tuple[int, ...]) -> None:
    empty = jnp.zeros((0, 4, 3))
    found = jax.jit(lambda lens: ats.attend(empty, empty, empty, valid_lens=lens))(jnp.zeros(lengths, int))
    assert found.shape == (0, 4, 3)


@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "bilinear", "additive", "gaussian"])
@pytest.mark.parametrize("where", ["jit", "scan", "grad in jit"])
@pytest.mark.slow_rows("grad in jit-*")
def test_constants_of_a_program(score: str, where: str) -> None:
    """Arrays that a traced function closes over, once before and once after a plain call has made a plan of them."""
    rng = np.random.default_rng(0)
    x, matrix, w_v = (jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 4, 8), (8, 8), (8,)))
    own: Any = {"bilinear": ats.Bilinear(matrix), "additive": ats.Additive(w_v, matrix, matrix)}.get(score, score)
    if score == "gaussian":
        own = ats.Gaussian(jnp.asarray(1.5))

    def call(factor: Any) -> Any:
        return factor * ats.attend(x, x, x, score=own)

    for _ in range(2):
        if where == "jit":
            found = jax.jit(call)(2.0)
        elif where == "scan":
            found = jax.lax.scan(lambda carry, _: (carry, call(carry)), 2.0, None, length=1)[1][0]
        else:
            grad = jax.jit(lambda _: jax.grad(lambda x: (ats.attend(x, x, x, score=own) ** 2).sum())(x))(0.0)
            wanted = jax.grad(lambda x: (ats.attend(x, x, x, score=own, kernel="streaming") ** 2).sum())(x)
            np.testing.assert_allclose(grad, wanted, rtol=1e-9, atol=1e-11)
            continue
        np.testing.assert_allclose(found, call(2.0), rtol=1e-12)


class _Documents:
    """Ids whose repr leaves out the ones in the middle."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = jnp.asarray(ids)

    def __repr__(self) -> str:
        return "documents"

    def same(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return self.ids[query] == self.ids[key]


@pytest.mark.slow
def test_masks_of_other_functions_are_other_programs() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 4)))
    run = jax.jit(lambda x, mask: ats.attend(x, x, x, mask=mask))
    for ids in ([0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]):
        found = _Documents(np.array(ids))
        wanted = ats.attend(x, x, x, mask=np.equal.outer(ids, ids)[None])
        np.testing.assert_allclose(run(x, ats.MaskFunction(found.same)), wanted, rtol=1e-9)
        part = functools.partial(_Documents.same, found)
        np.testing.assert_allclose(run(x, ats.MaskFunction(part)), wanted, rtol=1e-9)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_ids_of_documents_beyond_32_bits(wrap: Any, narrow: None) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 4)), jnp.float32)
    ids = [3_000_000_000, 1, 3_000_000_000]
    found = wrap(lambda x: ats.attend(x, x, x, mask=ats.Documents(ids)))(x)
    np.testing.assert_allclose(found, ats.attend(x, x, x, mask=np.equal.outer(ids, ids)[None]), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"valid_lens": np.array([3, 2]), "normalizer": "entmax15"},
        lambda: {
            "score": ats.ScaledDot(jnp.ones(3)),
            "mask": ats.Causal() | ats.SlidingWindow(1, 1),
            "sink": jnp.ones(3),
        },
        lambda: {"score": ats.Additive(*(jnp.asarray(x) for x in _ADDITIVE)), "bias": jnp.ones((3, 5, 5))},
    ],
    ids=["entmax, lengths", "scale per head, masks, sink", "additive, bias"],
)
@pytest.mark.parametrize("wrap", ["plain", "grad", "grad of jit"])
def test_where_promotion_of_ranks_is_an_error(options: Any, wrap: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5, 4)))

    def call(x: jax.Array) -> jax.Array:
        return ats.attend(x, x, x, **options())

    call = jax.jit(call) if wrap == "grad of jit" else call
    function = call if wrap == "plain" else jax.grad(lambda x: jnp.square(call(x)).sum())
    wanted = function(x)
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_allclose(function(x), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_vectors_without_features_under_jit() -> None:
    arrays = jnp.zeros((2, 3, 0)), jnp.zeros((2, 5, 0)), jnp.ones((2, 5, 4))
    np.testing.assert_allclose(jax.jit(ats.attend)(*arrays), ats.attend(*arrays))
