"""Every Flax layer: its definition, masks, gradients, transformations, dtypes, dropout and training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import attnscore as ats
from attnscore.layers import flax as layers
from attnscore.layers.flax import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)
from constructor_cases import check_constructors, check_older_calls, check_textbook_numbers
from flax_cases import (
    both,
    by_torch_names,
    called,
    inputs,
    make,
    mask_of,
    some_layers,
    to_jax,
    to_torch,
    two_layers,
)
from layer_cases import KEYS, LAYERS, MASKS, QUERIES, VALUE_SIZE, Case, close, every_layer

pytestmark = pytest.mark.usefixtures("torch_seed", "one_thread")

THOROUGH = "composed, and lens"
# By default a dozen pairs, as each takes a second to compile.
_QUICK = {
    "scaled dot": ("lens (batch,)", "lens (batch, query), some 0", "causal", "array (batch, query, key)"),
    "additive": ("lens (batch, query), some 0", "causal", "array (batch, query, key)", THOROUGH),
    "bilinear": (THOROUGH,),
    "gaussian, learned": (THOROUGH,),
    "heads, additive, 3 hidden": ("causal", "array (batch, query, key)"),
}


@pytest.mark.parametrize(
    ("case", "mask"),
    [
        pytest.param(
            case, mask, id=f"{case.name}-{mask}", marks=() if mask in _QUICK.get(case.name, ()) else pytest.mark.slow
        )
        for case in LAYERS
        for mask in MASKS
    ],
)
def test_layer_is_its_definition(case: Case, mask: str) -> None:
    theirs, layer = both(case)
    out, weights = case.plain(theirs, *case.inputs(), MASKS[mask][1])
    close(to_torch(layer(*inputs(case), **mask_of(mask))), out)
    close(to_torch(layer.attention_weights), weights)
    assert layer.attention_weights.shape == case.weights_shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        pytest.param(dtype, case, id=f"{dtype}-{case.name}")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for case in LAYERS
    ],
)
def test_layer_is_as_accurate_as_the_plain_one_in_its_dtype(case: Case, dtype: torch.dtype) -> None:
    theirs, layer = both(case, dtype)
    given, visible = MASKS["lens (batch,)"]
    tensors, arrays = case.inputs(dtype), inputs(case, dtype)
    plain, plain_weights = case.plain(theirs, *tensors, visible)
    usual = theirs(*tensors, **given)
    exact, exact_weights = case.plain(theirs.double(), *(x.double() for x in tensors), visible)
    out = layer(*arrays, **given)
    weights = layer.attention_weights
    assert str(out.dtype) == str(weights.dtype) == str(dtype).removeprefix("torch.")
    for got, other, wanted in ((out, plain, exact), (out, usual, exact), (weights, plain_weights, exact_weights)):
        floor = 8 * torch.finfo(dtype).eps * wanted.abs().max()
        assert (to_torch(got) - wanted).abs().max() <= torch.maximum(2 * (other - wanted).abs().max(), floor)


@two_layers
@pytest.mark.parametrize("mask", [pytest.param("none", marks=pytest.mark.slow), THOROUGH])
def test_gradients(case: Case, mask: str) -> None:
    """They equal the plain definition's by PyTorch, for parameters and inputs."""
    theirs, layer = both(case)
    tensors = [x.requires_grad_() for x in case.inputs()]
    case.plain(theirs, *tensors, MASKS[mask][1])[0].square().sum().backward()

    def loss(layer: Any, arrays: Any) -> jax.Array:
        return jnp.square(layer(*arrays, **mask_of(mask))).sum()

    own, of_inputs = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, inputs(case))
    close([to_torch(x) for x in of_inputs], [x.grad for x in tensors])
    close(by_torch_names(own), {name: x.grad for name, x in theirs.named_parameters()})


@two_layers
@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "jit"])
@pytest.mark.slow_rows("jit-heads, additive, 3 hidden")
def test_what_is_hidden_reaches_nothing(case: Case, jit: bool) -> None:
    """NaN and infinity in padding, and in a query that sees nothing: same output, same gradients, finite."""
    layer = make(case)
    lens = jnp.array([[2, 0, 3], [4, 4, 0]])

    def run(layer: Any, arrays: Any) -> tuple[Any, Any]:
        def loss(layer: Any, arrays: Any) -> tuple[jax.Array, jax.Array]:
            out = layer(*arrays, lens)
            return out.sum(), out

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, arrays)

    run = nnx.jit(run) if jit else run
    clean = case.inputs()
    with_nonfinite = [x.clone() for x in clean]
    with_nonfinite[0][0, 1, 0], with_nonfinite[0][1, 2] = torch.nan, torch.inf
    with_nonfinite[1][0, 3:], with_nonfinite[1][1, 4:, 0] = torch.nan, torch.inf
    with_nonfinite[2][0, 3:, 0], with_nonfinite[2][1, 4:] = torch.inf, torch.nan
    (own, grads), out = run(layer, to_jax(with_nonfinite))
    (clean_own, clean_grads), clean_out = run(layer, to_jax(clean))
    close(to_torch(out), to_torch(clean_out))
    close([to_torch(x) for x in grads], [to_torch(x) for x in clean_grads])
    close(by_torch_names(own), by_torch_names(clean_own))
    bias = getattr(getattr(layer, "W_o", None), "bias", None)
    assert not (out[0, 1] - (0 if bias is None else bias[...])).any()
    assert not grads[0][0, 1].any()
    layer(*to_jax(with_nonfinite), lens)
    assert not layer.attention_weights[..., 1, :][0].any()


@two_layers
@pytest.mark.parametrize("queries, keys, batch", [(0, 5, 2), (3, 0, 2), (3, 5, 0)])
def test_empty_axes(case: Case, queries: int, keys: int, batch: int) -> None:
    q, k, v = inputs(case)
    layer = make(case)
    out = layer(q[:batch, :queries], k[:batch, :keys], v[:batch, :keys])
    assert out.shape == (batch, queries, layer(q, k, v).shape[-1])
    assert jnp.isfinite(out).all()


@some_layers
def test_one_memory_for_a_batch_of_queries(case: Case) -> None:
    layer, (q, k, v) = make(case), inputs(case)
    twice = (jnp.tile(x[:1], (2, 1, 1)) for x in (k, v))
    wanted = called(layer, q, *twice, valid_lens=(3, 3))
    close(to_torch(called(layer, q, k[:1], v[:1], valid_lens=(3,))), to_torch(wanted))


def test_numbers_of_the_textbook() -> None:
    rngs = nnx.Rngs(0)
    check_textbook_numbers(layers, jnp.asarray, rngs=rngs)
    x, y = jnp.ones((2, 4, 100)), jnp.ones((2, 6, 100))
    layer = MultiHeadAttention(100, 5, 0.5, rngs=rngs, query_size=100, key_size=100, value_size=100)
    assert called(layer, x, y, y, valid_lens=(3, 2)).shape == (2, 4, 100)


# ------------------------------------------------------------------ jit, vmap


@some_layers
def test_compiled(case: Case) -> None:
    layer, arrays = make(case), inputs(case)
    wanted, traces = layer(*arrays, [2, 5]), []

    @nnx.jit
    def compiled(layer: Any, lens: jax.Array) -> jax.Array:
        traces.append(None)
        out: jax.Array = layer(*arrays, lens)
        with pytest.raises(ats.AttnscoreError, match=r"a call outside jit, grad and vmap, .*, got one inside\. Hint"):
            _ = layer.attention_weights
        return out

    for lens in ([2, 5], [5, 1]):
        close(to_torch(compiled(layer, jnp.array(lens))), to_torch(layer(*arrays, lens)))
    assert len(traces) == 1, "a concrete call in between is no reason to compile again"
    # What is read is the last concrete call.
    layer(*arrays, [2, 5])
    compiled(layer, jnp.array([1, 1]))
    assert (layer.attention_weights[0, ..., 1] > 0).any()
    close(to_torch(layer(*arrays, [2, 5])), to_torch(wanted))


@two_layers
@pytest.mark.slow_rows("heads*")
def test_vmap_and_an_ensemble(case: Case) -> None:
    layer, (q, k, v) = make(case), inputs(case)
    found = jax.jit(jax.vmap(layer, in_axes=(0, None, None)))(jnp.stack([q, q[::-1]]), k, v)
    close(to_torch(found[0]), to_torch(called(layer, q, k, v)))
    close(to_torch(found[1]), to_torch(called(layer, q[::-1], k, v)))
    if not nnx.state(layer):
        return
    many = nnx.jit(nnx.vmap(lambda seed: make(case, seed=seed)))(jax.random.split(jax.random.key(0), 3))
    outs = nnx.jit(nnx.vmap(lambda layer, q: layer(q, k, v), in_axes=(0, None)))(many, q)
    graph, state = nnx.split(many)
    one = nnx.merge(graph, jax.tree.map(lambda x: x[1], state))
    close(to_torch(outs[1]), to_torch(called(one, q, k, v)))


# ------------------------------------------------------------------ modes, dtypes, sizes


@every_layer
@pytest.mark.slow_rows("one head", "*gaussian", "*sigmoid", "*max", "heads*")
def test_dropout_acts_in_training_alone(case: Case) -> None:
    arrays = inputs(case)
    layer, again = make(case, dropout=0.5), make(case, dropout=0.5)
    first, second = layer(*arrays), layer(*arrays)
    assert not jnp.array_equal(first, second)
    assert jnp.array_equal(again(*arrays), first), "the same seed"
    if layer.normalizer != "sigmoid":
        sums = to_torch(layer.attention_weights.sum(-1))
        # A sink takes a share.
        close(sums, torch.ones_like(sums)) if getattr(layer, "sink", None) is None else close(sums.clamp(0, 1), sums)
    given = [layer(*arrays, rngs=rngs) for rngs in (nnx.Rngs(7), nnx.Rngs(7).dropout, nnx.Rngs(7).dropout())]
    assert jnp.array_equal(given[0], given[1]) and jnp.array_equal(given[0], given[2])
    off = layer(*arrays, deterministic=True)
    model = nnx.Sequential(layer)
    model.eval()
    assert layer.deterministic
    out = layer(*arrays)
    assert jnp.array_equal(out, off) and jnp.array_equal(layer(*arrays), out)
    assert not jnp.array_equal(layer(*arrays, deterministic=False), out)
    model.train()
    assert not jnp.array_equal(layer(*arrays), out)
    close(to_torch(out), to_torch(make(case)(*arrays)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"qk_norm": True}, {"bias": True}, {"score": "cosine"}, {"normalizer": "entmax15"}],
    ids=lambda options: next(iter(options)),
)
def test_where_promotion_of_ranks_is_an_error(options: dict[str, Any]) -> None:
    sizes = {"query_size": 6, "key_size": 6, "value_size": 6}
    layer, x = MultiHeadAttention(8, 2, **options, **sizes, rngs=nnx.Rngs(0)), jnp.ones((2, 3, 6))
    with jax.numpy_rank_promotion("raise"):
        layer(x, x, x, jnp.array([2, 3]))
        nnx.jit(nnx.grad(lambda layer: layer(x, x, x, jnp.array([2, 3])).sum()))(layer)


def test_a_view_has_its_own_mode() -> None:
    layer, x = MultiHeadAttention(8, 2, 0.5, rngs=nnx.Rngs(0)), jnp.ones((2, 3, 4))
    layer(x, x, x)
    model = nnx.Dict(attention=layer, dropout=nnx.Dropout(0.5))
    off = nnx.view(model, deterministic=True)
    assert off.attention.deterministic and off.dropout.deterministic and not layer.deterministic
    assert jnp.array_equal(off.attention(x, x, x), off.attention(x, x, x))
    assert not jnp.array_equal(layer(x, x, x), layer(x, x, x))
    assert nnx.view(off, only=nnx.Dropout, deterministic=False).attention.deterministic
    assert "MultiHeadAttention:\n  deterministic: bool | None = None\n    if True, dropout is off." in nnx.view_info(
        model
    )


def test_dropout_draws_anew_inside_jit() -> None:
    x = jnp.ones((2, 3, 4))
    layer = DotProductAttention(0.5, rngs=nnx.Rngs(dropout=0))
    call = nnx.jit(lambda layer, x: layer(x, x, x))
    first = call(layer, x)
    assert not jnp.array_equal(first, call(layer, x))
    other = DotProductAttention(0.5, rngs=nnx.Rngs(dropout=0))
    assert jnp.array_equal(call(other, x), first)
    other.eval()
    assert jnp.array_equal(call(other, x), x)


@some_layers
@pytest.mark.slow_rows("scaled dot", "additive", "heads, additive, 3 hidden")
def test_training_reduces_a_loss(case: Case) -> None:
    """Find the value whose key is the query's: a few steps suffice to halve the loss."""
    q, k, v = inputs(case, torch.float32)
    model = _Model(case)
    model(q, k, v)
    optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            return jnp.square(model(q, k, v, jnp.array([KEYS, 4])) - v[:, :QUERIES]).mean()

        found, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return found

    losses = [float(step(model, optimizer)) for _ in range(40)]
    assert losses[-1] < losses[0] / 2


class _Model(nnx.Module):
    """A layer between two linear ones."""

    def __init__(self, case: Case) -> None:
        rngs = nnx.Rngs(0)
        self.before = nnx.Linear(case.query_size, case.query_size, rngs=rngs)
        self.layer = make(case, lazy=True)
        self.after = nnx.Linear(case.arguments.get("num_hiddens", 0) if case.head_count else VALUE_SIZE, 4, rngs=rngs)

    def __call__(self, q: jax.Array, *others: Any) -> jax.Array:
        return self.after(self.layer(self.before(q), *others))


@two_layers
@pytest.mark.slow_rows("heads*")
def test_a_dtype_of_the_computation(case: Case) -> None:
    """Parameters and inputs in float32, computed in bfloat16, as accurately as torch's autocast is held to."""
    theirs, layer = both(case, torch.float32, dtype=jnp.bfloat16)
    out = layer(*inputs(case, torch.float32))
    weights = layer.attention_weights
    assert out.dtype == weights.dtype == jnp.bfloat16
    tensors = case.inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, _ = case.plain(theirs, *tensors, None)
    exact, exact_weights = case.plain(theirs.double(), *(x.double() for x in tensors), None)
    eps = torch.finfo(torch.bfloat16).eps
    floor = 8 * eps * exact.abs().max()
    assert (to_torch(out) - exact).abs().max() <= torch.maximum(2 * (plain - exact).abs().max(), floor)
    assert (to_torch(weights) - exact_weights).abs().max() < 8 * eps
    arrays = inputs(case, torch.float32)
    grads = nnx.jit(nnx.grad(lambda layer: layer(*arrays).astype(jnp.float32).sum()))(layer)
    assert all(x.dtype == jnp.float32 and jnp.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_dtypes_are_promoted_as_flax_does_it() -> None:
    x = jnp.ones((1, 3, 4), jnp.bfloat16)
    layer = AdditiveAttention(8, rngs=nnx.Rngs(0))
    assert layer(x, x, x).dtype == jnp.float32, "the parameters are float32"
    assert DotProductAttention()(x, x.astype(jnp.float32), x).dtype == jnp.float32
    assert DotProductAttention()(x, x, x).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["heads, norms, sink", "heads, capped additive", "heads, sigmoid", "heads, entmax"])
@pytest.mark.slow
def test_a_scan_with_a_cache_is_one_pass(name: str) -> None:
    """A compiled loop carries the cache; the rotary embedding takes the positions behind it."""

    def rotary(q: Any, k: Any, positions: Any) -> Any:
        def turned(x: Any) -> Any:
            a, b = jnp.split(x, 2, axis=-1)
            angles = positions[..., None, None] * jnp.ones_like(a) / 3
            return jnp.concatenate(
                [a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1
            )

        return turned(q), turned(k)

    layer = make(next(case for case in LAYERS if case.name == name), rotary=rotary)
    layer.keep_last = False
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.standard_normal((2, 7, size))) for size in (6, 7, VALUE_SIZE)]
    whole = layer(*inputs, mask=ats.Causal() & (ats.SlidingWindow(left=2) | ats.KeyRange(0, 1)))
    cache = ats.KeyValueCache(head_axis=-2, window=3, sinks=1, capacity=6)
    first, cache = layer(*[x[:, :3] for x in inputs], cache=cache)

    @jax.jit
    def decode(cache: Any, inputs: Any) -> Any:
        def step(cache: Any, inputs: Any) -> Any:
            out, cache = layer(*[x[:, None] for x in inputs], cache=cache)
            return cache, out[:, 0]

        return jax.lax.scan(step, cache, [x.swapaxes(0, 1) for x in inputs])

    cache, rest = decode(cache, [x[:, 3:] for x in inputs])
    np.testing.assert_allclose(jnp.concatenate([first, rest.swapaxes(0, 1)], 1), whole, rtol=1e-9, atol=1e-9)
    assert cache.lens.tolist() == [7, 7]


@pytest.mark.parametrize("case", [case for case in LAYERS if case.sizes], ids=lambda case: case.name)
@pytest.mark.slow_rows("*max", "heads*", "dot", "scaled*", "bilinear*", "one head", "additive, sigmoid")
def test_sizes_come_with_the_first_call(case: Case) -> None:
    layer, arrays = make(case, lazy=True), inputs(case)
    copy = nnx.clone(layer)
    out = layer(*arrays)
    assert jnp.array_equal(copy(*arrays), out), "a copy starts with the same numbers"
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(layer)))
    assert shapes == jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(make(case))))


@pytest.mark.parametrize(
    "call",
    [
        nnx.jit(lambda layer, x: layer(x, x, x)),
        lambda layer, x: jax.jit(lambda x: layer(x, x, x))(x),
        lambda layer, x: nnx.grad(lambda layer: layer(x, x, x).sum())(layer),
        lambda layer, x: jax.vmap(lambda x: layer(x, x, x))(x[None]),
    ],
    ids=["nnx.jit", "jax.jit", "nnx.grad", "jax.vmap"],
)
@pytest.mark.parametrize("kind", [BilinearAttention, lambda rngs: MultiHeadAttention(8, 2, rngs=rngs)])
@pytest.mark.slow_rows("BilinearAttention-*", "<lambda>-nnx.grad")
def test_no_sizes_from_a_transformed_call(kind: Callable[..., Any], call: Callable[..., Any]) -> None:
    """A parameter that is made inside grad has no gradient; one made inside jit is a tracer."""
    layer, x = kind(rngs=nnx.Rngs(0)), jnp.ones((1, 3, 4))
    with pytest.raises(
        ats.ArgumentError, match=r"a first call outside jit, grad and vmap, which makes W.* query_size="
    ):
        call(layer, x)
    layer(x, x, x)
    call(layer, x)


def test_made_inside_jit_and_as_shapes_alone() -> None:
    x = jnp.ones((1, 3, 4))
    layer = nnx.jit(lambda: MultiHeadAttention(8, 2, score="additive", rngs=nnx.Rngs(0)))()
    assert layer(x, x, x).shape == (1, 3, 8)
    sizes = {"query_size": 4, "key_size": 4, "value_size": 4}
    shapes = nnx.eval_shape(lambda: MultiHeadAttention(8, 2, rngs=nnx.Rngs(0), **sizes))
    assert shapes.W_q.kernel.shape == (4, 8)
    out = nnx.eval_shape(lambda layer: layer(x, x, x), layer)
    assert out.shape == (1, 3, 8)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 256])
def test_starting_values_give_scores_of_moderate_variance(width: int) -> None:
    rngs = nnx.Rngs(width)
    q, k = rngs.normal((1, 1, 200, width)), rngs.normal((1, 1, 200, width))
    score = ats.Bilinear(BilinearAttention(query_size=width, key_size=width, rngs=rngs).W[...])
    var = jax.jit(lambda score: ats.attention_scores(q, k, score=score).var(-1).mean())
    assert 0.1 < jax.jit(lambda score: ats.attention_scores(q, k, score=score).var())(score) < 1
    for name in ("cosine", "gaussian", "bilinear", "additive"):
        layer = MultiHeadAttention(width, 1, score=name, rngs=rngs)
        score = layer._layer.make_score({part.name: getattr(layer, part.name)[...] for part in layer._layer.parameters})
        # What is constant in a row changes no weight.
        assert 0.05 < var(score) < 2


@pytest.mark.slow
def test_what_replaces_a_projection_has_its_say() -> None:
    layer, x = MultiHeadAttention(8, 2, query_size=6, key_size=6, value_size=6, rngs=nnx.Rngs(0)), jnp.ones((2, 3, 6))
    layer.W_q = nnx.LoRA(6, 2, 8, base_module=layer.W_q, rngs=nnx.Rngs(1))
    assert layer(x, x, x).shape == (2, 3, 8)
    # Its kernel is (positions, in, out).
    layer.W_v = nnx.Conv(6, 8, kernel_size=(3,), rngs=nnx.Rngs(2))
    assert layer(x, x, x).shape == (2, 3, 8)
    layer.W_k = lambda keys: jnp.zeros((*keys.shape[:-1], 8))
    layer(x, x, x)
    close(to_torch(layer.attention_weights), torch.ones(2, 2, 3, 3) / 3, torch.float32)


@pytest.mark.parametrize(
    "kind",
    [
        lambda rngs: nnx.LoRALinear(7, 1, lora_rank=2, bias_init=nnx.initializers.normal(), rngs=rngs),
        lambda rngs: nnx.LoRA(7, 2, 1, base_module=nnx.Linear(7, 1, rngs=rngs), rngs=rngs),
        lambda rngs: nnx.Sequential(nnx.Linear(7, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)),
        lambda rngs: nnx.Linear(7, 1, bias_init=nnx.initializers.normal(), rngs=rngs),
    ],
    ids=["LoRALinear", "LoRA", "Sequential", "Linear"],
)
@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
@pytest.mark.slow_rows("jit-LoRA*", "*-Sequential", "plain-Linear", "plain-LoRA*", "jit-Linear")
def test_what_replaces_w_v_has_its_say(kind: Callable[..., Any], jit: bool) -> None:
    """In the output and the gradients, beside NaN in the padding; a bias is in all scores of a query."""
    layer = AdditiveAttention(7, query_size=5, key_size=5, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.w_v = kind(nnx.Rngs(1))
    for name, x in nnx.to_flat_state(nnx.state(layer.w_v)):
        x[...] = jax.random.normal(jax.random.key(len(str(name))), x.shape, x.dtype)
    q, k = (jax.random.normal(jax.random.key(n), (2, n, 5), jnp.float64) for n in (3, 4))

    def plain(layer: Any, k: jax.Array) -> jax.Array:
        k = k[:, :3]
        hidden = jnp.tanh(layer.W_q(q)[:, :, None] + layer.W_k(k)[:, None])
        return jax.nn.softmax(layer.w_v(hidden)[..., 0]) @ k

    def found(function: Callable[..., jax.Array], k: jax.Array) -> Any:
        def loss(layer: Any) -> Any:
            out = function(layer, k)
            return jnp.square(out).sum(), out

        grad = nnx.value_and_grad(loss, has_aux=True)
        (_, out), grads = (nnx.jit(grad) if jit else grad)(layer)
        return out, grads

    lens = jnp.array([3, 3])
    (out, grads), (wanted, wanted_grads) = (
        found(lambda f, k: f(q, k, k, lens), k.at[:, 3].set(jnp.nan)),
        found(plain, k),
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_learned_queries_and_numpy_arrays_go_in() -> None:
    x = jnp.ones((1, 3, 4))
    learned = nnx.Param(x)
    grad = jax.grad(lambda q: GaussianAttention()(nnx.Param(q), x, x).sum())(x)
    assert grad.shape == x.shape
    assert jnp.array_equal(DotProductAttention()(learned, jax.device_get(x), x), x)


def test_learned_queries_and_keys_go_into_every_word() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 4))
    words: tuple[Callable[[Any], Any], ...] = (
        lambda x: ats.attention_weights(x, x),
        lambda x: ats.attention_scores(x, x),
        lambda x: ats.top_weights(x, x, 2).weights,
        lambda x: ats.prepare_keys("cosine", x).key,
        lambda x: repr(ats.explain(x, x, x)),
    )
    for word in words:
        assert np.array_equal(word(nnx.Param(x)), word(x))


@pytest.mark.parametrize("jit", [False, True])
def test_parameters_of_a_module_of_the_users_own(jit: bool) -> None:
    """`attend` takes them as they are, with gradients."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))

    class Learned(nnx.Module):
        def __init__(self) -> None:
            self.query, self.w_v = nnx.Param(x[:, :3] + 1), nnx.Param(x[0, 0])
            self.sink, self.bias = nnx.Param(jnp.ones(())), nnx.Param(jnp.ones((3, 5)))

        def __call__(self, x: Any) -> Any:
            options = {"score": ats.Additive(self.w_v), "sink": self.sink, "bias": self.bias}
            return ats.attend(self.query, x, x, **options)

    def loss(module: Any) -> Any:
        return (module(x) ** 2).sum()

    def plain(query: Any, w_v: Any, sink: Any, bias: Any) -> Any:
        return (ats.attend(query, x, x, score=ats.Additive(w_v), sink=sink, bias=bias) ** 2).sum()

    module = Learned()
    found = nnx.value_and_grad(loss)
    value, grads = (nnx.jit(found) if jit else found)(module)
    names = ("query", "w_v", "sink", "bias")
    arrays = [getattr(module, name)[...] for name in names]
    wanted, expected = jax.value_and_grad(plain, (0, 1, 2, 3))(*arrays)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name, grad in zip(names, expected, strict=True):
        np.testing.assert_allclose(grads[name][...], grad, rtol=1e-4, atol=1e-5)


def test_calls_of_older_editions() -> None:
    check_older_calls(layers, rngs=nnx.Rngs(0))


def test_constructors() -> None:
    check_constructors(layers, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_weights_are_those_of_the_call_whatever_is_written_afterwards() -> None:
    layer, x = DotProductAttention(), jnp.asarray(np.random.default_rng(0).standard_normal((1, 70, 4)))
    mask = np.tri(70, dtype=bool)[None]
    for given in (mask, ats.Dense(mask), ats.Dense(mask) & ats.Causal("top_left")):
        layer(x, x, x, mask=given)
        before = np.array(layer.attention_weights)
        mask[0, :, 1:] = False
        np.testing.assert_array_equal(layer.attention_weights, before)
        mask[:] = np.tri(70, dtype=bool)


def test_a_bias_needs_no_heads() -> None:
    rng = np.random.default_rng(0)
    q, k, v, bias = (
        jnp.asarray(rng.normal(size=shape), "float32") for shape in ((2, 3, 4), (2, 5, 4), (2, 5, 6), (3, 5))
    )
    layer = DotProductAttention()
    assert np.allclose(layer(q, k, v, bias=bias), ats.attend(q, k, v, bias=bias), atol=1e-6)
    found = jax.grad(lambda bias: (layer(q, k, v, bias=bias) ** 2).sum())(bias)
    assert np.allclose(found, jax.grad(lambda bias: (ats.attend(q, k, v, bias=bias) ** 2).sum())(bias), atol=1e-5)


def test_an_unknown_argument_shows_what_to_write() -> None:
    x = jnp.ones((1, 3, 4))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'is_causal'\. Hint: mask=ats\.Causal\(align="):
        DotProductAttention()(x, x, x, is_causal=True)
