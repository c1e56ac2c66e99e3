"""Prepared keys: the numbers and gradients of the call that prepares nothing, at the cost of the query alone."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.base.cache import BoundedCache
from attnscore.layers.torch import AdditiveAttention, DotProductAttention
from attnscore.plans import plan
from cases import SCORE, Sizes, needs_native
from covering import pairs
from own_scores import OwnAbsolute

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = {"heads": (4, -3), "heads-behind": (4, -2), "no-heads": (3, -3)}
# One of each kind of preparation.
SOME = ("additive-tanh-bias", "additive-gelu-heads", "bilinear", "cosine-heads", "soft_cap-of-temperature-additive")


def _leaves(name: str, axes: int = 4, head_axis: int = -3, kv_heads: int | None = None) -> dict[str, np.ndarray]:
    """Query, key, value and the arrays of a score, in float64; parameters per head leave no KV heads to share."""
    row = SCORE[name]
    arrays = {axis for axes_ in row.arrays.values() for axis in axes_}
    sizes = row.sized(Sizes(batch=2, heads=4 if axes == 4 else 1, queries=3, keys=7))
    heads = kv_heads or (sizes.heads if "H" in arrays else min(2, sizes.heads))
    rng = np.random.default_rng(0)
    shapes = {
        "query": (2, sizes.heads, sizes.queries, sizes.dim),
        "key": (2, heads, sizes.keys, sizes.key_dim),
        "value": (2, heads, sizes.keys, sizes.value_dim),
    }
    found = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    if axes == 3:
        found = {key: x[:, 0] for key, x in found.items()}
    elif head_axis == -2:
        found = {key: np.ascontiguousarray(x.swapaxes(1, 2)) for key, x in found.items()}
    return found | {f"score.{key}": rng.uniform(0.5, 1.5, shape) for key, shape in row.shapes(sizes).items()}


def _score(name: str, leaves: dict[str, Any]) -> Any:
    prefix = "score."
    return SCORE[name].make(**{key.removeprefix(prefix): x for key, x in leaves.items() if key.startswith(prefix)})


def _torch(leaves: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(x, requires_grad=True) for key, x in leaves.items()}


@pairs(name=tuple(SCORE), layout=tuple(LAYOUTS))
def test_numbers_and_gradients(name: str, layout: str) -> None:
    """Of query, key, value and all parameters, through the preparation."""
    axes, head_axis = LAYOUTS[layout]
    leaves = _torch(_leaves(name, axes, head_axis))
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    score, options = _score(name, leaves), {"mask": ats.Causal("bottom_right"), "head_axis": head_axis}
    prepared = ats.prepare_keys(score, key, head_axis=head_axis)
    outs = [
        ats.attend(query, key, value, score=score, **options),
        ats.attend(query, prepared, value, **options),
        ats.attend(query, prepared.key, value, score=prepared.score, **options),
    ]
    grads = [torch.autograd.grad(x.square().sum(), leaves.values(), retain_graph=True) for x in outs]
    for out, grad in zip(outs[1:], grads[1:], strict=True):
        torch.testing.assert_close(out, outs[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad, grads[0], rtol=1e-8, atol=1e-10)


def test_what_is_prepared() -> None:
    """Each projection and norm is in the keys, and no longer in the score."""
    rng = np.random.default_rng(0)
    key, w_v, w_q, w_k, bias = (rng.standard_normal(shape) for shape in ((7, 5), (3,), (3, 4), (3, 5), (3,)))
    additive = ats.prepare_keys(ats.Additive(w_v, w_q, w_k, bias, activation="relu"), key)
    np.testing.assert_allclose(additive.key, key @ w_k.T)
    assert additive.score.W_k is None
    assert (additive.score.w_v is w_v, additive.score.W_q is w_q, additive.score.bias is bias) == (True, True, True)
    assert additive.score.activation == "relu"
    bilinear = ats.prepare_keys(ats.Bilinear(rng.standard_normal((4, 5))), key)
    assert (bilinear.key.shape, type(bilinear.score)) == ((7, 4), ats.Dot)
    capped = ats.prepare_keys(ats.SoftCap(ats.Temperature(ats.Cosine(2.0), 3.0), 4.0), key)
    np.testing.assert_allclose(np.linalg.norm(capped.key, axis=-1), np.ones(7))
    assert (capped.score.cap, capped.score.score.temperature) == (4.0, 3.0)
    assert (capped.score.score.score.scale, capped.score.score.score.unit_keys) == (2.0, True)
    assert ats.prepare_keys(capped.score, capped.key).key is capped.key
    for score in ("dot", "scaled_dot", "gaussian", "sum", OwnAbsolute(np.array(0.5))):
        assert ats.prepare_keys(score, key).key is key


@pytest.mark.parametrize("name", SOME)
def test_every_function_takes_them(name: str) -> None:
    leaves = _leaves(name)
    query, key, value, score = leaves["query"], leaves["key"], leaves["value"], _score(name, leaves)
    prepared, lens = ats.prepare_keys(score, key), {"valid_lens": [5, 0]}
    for function, more in (
        (ats.attention_weights, ()),
        (ats.attention_scores, ()),
        (ats.top_weights, (2,)),
        (ats.pooled_weights, ((2, 3),)),
        (ats.key_mass, ()),
    ):
        found, wanted = (function(query, k, *more, **s, **lens) for k, s in ((prepared, {}), (key, {"score": score})))
        for x, y in zip(*((x,) if isinstance(x, np.ndarray) else x for x in (found, wanted)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12, err_msg=function.__name__)
    block = ats.attention_weights(query, prepared, key_index=[2, 0], **lens)
    np.testing.assert_allclose(block, ats.attention_weights(query, key, score=score, **lens)[..., [2, 0]])
    explained = ats.explain(query, prepared, value, **lens)
    assert explained.score == type(prepared.score).__name__
    assert explained.operations <= ats.explain(query, key, value, score=score, **lens).operations


@pytest.mark.parametrize("name", SOME)
def test_vjp_of_numpy(name: str) -> None:
    """The gradient of the prepared keys, and of the parameters that a query still meets."""
    leaves = _leaves(name)
    score, seed = _score(name, leaves), np.random.default_rng(1).standard_normal((2, 4, 3, 3))
    prepared = ats.prepare_keys(score, leaves["key"])
    out, pullback = ats.attend_vjp(leaves["query"], prepared, leaves["value"], valid_lens=[5, 0])
    found = pullback(seed)

    own = _torch({"query": leaves["query"], "key": prepared.key, "value": leaves["value"]})
    arrays = {key: torch.tensor(x, requires_grad=True) for key, x in ats.scores.arrays_of(prepared.score).items()}
    left = _with_arrays(prepared.score, arrays)
    wanted = ats.attend(own["query"], ats.PreparedKeys(own["key"], left), own["value"], valid_lens=[5, 0])
    np.testing.assert_allclose(out, wanted.detach(), rtol=1e-10, atol=1e-12)
    wanted.backward(torch.tensor(seed))
    for key, x in own.items():
        np.testing.assert_allclose(getattr(found, key), x.grad, rtol=1e-8, atol=1e-10, err_msg=key)
    assert found.score.keys() == arrays.keys()
    for key, x in arrays.items():
        np.testing.assert_allclose(found.score[key], x.grad, rtol=1e-8, atol=1e-10, err_msg=key)


def _with_arrays(score: Any, arrays: dict[str, Any]) -> Any:
    changed = {key: arrays[key] for key in arrays if getattr(score, key, None) is not None}
    if hasattr(score, "score"):
        changed["score"] = _with_arrays(score.score, arrays)
    return dataclasses.replace(score, **changed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SOME)
def test_a_masked_key_propagates_to_nothing(name: str, bad: float) -> None:
    """Neither to the output nor to the gradient of any parameter, and it gets gradient 0."""
    clean, dirty = _leaves(name), _leaves(name)
    dirty["key"][0, :, 5:], dirty["key"][1] = bad, bad
    found = []
    for leaves in map(_torch, (clean, dirty)):
        prepared = ats.prepare_keys(_score(name, leaves), leaves["key"])
        out = ats.attend(leaves["query"], prepared, leaves["value"], valid_lens=torch.tensor([5, 0]))
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves.values())])
    torch.testing.assert_close(found[1], found[0])


def test_added_features_are_a_term_of_the_additive_score() -> None:
    """w_v . tanh(W_q q + W_k k + W_f f + b), with f per key, as Tacotron 2 has it."""
    leaves = _torch(_leaves("additive-tanh-bias", axes=3))
    features = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    w_f = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    query, key, value = leaves["query"][:, :1], leaves["key"], leaves["value"]
    w_v, w_q, w_k, bias = (leaves[f"score.{x}"] for x in ("w_v", "W_q", "W_k", "bias"))
    prepared = ats.prepare_keys(_score("additive-tanh-bias", leaves), key)
    out = ats.attend(query, prepared + features @ w_f.T, value)
    hidden = torch.tanh(query @ w_q.T + key @ w_k.T + features @ w_f.T + bias)
    wanted = (hidden @ w_v).softmax(-1).unsqueeze(-2) @ value
    torch.testing.assert_close(out, wanted)
    inputs = [*leaves.values(), features, w_f]
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, wanted)))


def test_a_bias_per_key_is_coverage_or_a_prior() -> None:
    leaves = _leaves("additive-tanh-bias", axes=3)
    prepared = ats.prepare_keys(_score("additive-tanh-bias", leaves), leaves["key"])
    coverage = np.random.default_rng(0).random((2, 1, 7))
    found = ats.attention_scores(leaves["query"], prepared, bias=-coverage)
    np.testing.assert_allclose(found, ats.attention_scores(leaves["query"], prepared) - coverage)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SOME)
def test_prepared_keys_have_the_dtype_of_the_keys(name: str, dtype: torch.dtype) -> None:
    """Also where the parameters have another; the rounding is a linear layer's."""
    leaves = {key: torch.tensor(x).to(torch.float32) for key, x in _leaves(name).items()}
    query, key, value = (leaves[x].to(dtype) for x in ("query", "key", "value"))
    score = _score(name, leaves)
    prepared = ats.prepare_keys(score, key)
    assert prepared.key.dtype == dtype
    out, wanted = ats.attend(query, prepared, value), ats.attend(query, key, value, score=score)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, wanted, rtol=0, atol=8 * eps * float(value.abs().max()))


def test_parameters_per_query_head_over_shared_keys() -> None:
    """Each query head has prepared keys of its own, and values too."""
    leaves = _leaves("additive-tanh-heads", kv_heads=2)
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    score = _score("additive-tanh-heads", leaves)
    prepared = ats.prepare_keys(score, key)
    assert prepared.key.shape == (2, 4, 7, 3)
    wanted = ats.attend(query, key, value, score=score)
    np.testing.assert_allclose(ats.attend(query, prepared, value.repeat(2, axis=1)), wanted)
    with pytest.raises(ats.ShapeError, match="value: expected as many heads as key"):
        ats.attend(query, prepared, value)


@needs_native
@pytest.mark.parametrize("name", ["additive-tanh-bias", "additive-relu-projected", "bilinear", "cosine-number"])
def test_a_decoding_step_has_a_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step is checked no more and prepares nothing."""
    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    leaves = {key: torch.tensor(x) for key, x in _leaves(name, axes=3).items()}
    prepared = ats.prepare_keys(_score(name, leaves), leaves["key"])
    query, value = leaves["query"], leaves["value"]
    wanted = ats.attend(query, prepared, value, kernel="dense")
    for step in range(2):
        ats.attend(query[:, step : step + 1], prepared, value)
    monkeypatch.delattr(plan, "build_problem")
    torch.testing.assert_close(ats.attend(query[:, 2:], prepared, value), wanted[:, 2:])


def test_scores_that_differ_in_unit_keys_share_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    query, key, value = (torch.randn(2, n, 5) for n in (3, 7, 7))
    for unit_keys in (True, False, True, False):
        score = ats.Cosine(2.0, unit_keys=unit_keys)
        torch.testing.assert_close(
            ats.attend(query, key, value, score=score), ats.attend(query, key, value, score=score, kernel="dense")
        )


@dataclass(frozen=True)
class OwnCubed:
    """gain q . k^3, which prepares k^3."""

    gain: Any
    cubed: bool = False

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return self.gain * ops.matmul(query, ops.matrix_transpose(key if self.cubed else key * key * key))

    def prepare_keys(self, ops: Any, key: Any) -> Any:
        return key * key * key, OwnCubed(self.gain, cubed=True)


def test_a_custom_score_prepares() -> None:
    leaves = {key: x.astype("f8") for key, x in _leaves("dot").items()}
    score = ats.SoftCap(OwnCubed(np.array(0.5)), 3.0)
    prepared = ats.prepare_keys(score, leaves["key"])
    np.testing.assert_allclose(prepared.key, leaves["key"] ** 3)
    found = ats.attend(leaves["query"], prepared, leaves["value"])
    np.testing.assert_allclose(found, ats.attend(leaves["query"], leaves["key"], leaves["value"], score=score))


class _Shorter(OwnCubed):
    def prepare_keys(self, ops: Any, key: Any) -> Any:
        return key[..., 1:, :], self


class _Nothing(OwnCubed):
    def prepare_keys(self, ops: Any, key: Any) -> Any:
        return None, self


KEY = np.ones((2, 7, 5))
ADDITIVE = ats.Additive(np.ones(3), np.ones((3, 4)), np.ones((3, 5)))


HEADS = ats.Additive(np.ones((2, 3)), *np.ones((2, 2, 3, 4)))
# By the class of the error and its words: the call, given keys that are prepared for ADDITIVE.
ERRORS: dict[type[Exception], dict[str, Callable[[Any], Any]]] = {
    ats.ArgumentError: {
        r"score: expected nothing, as the keys are prepared for Additive\(.*, got 'dot'\. Hint: leave score= out": (
            lambda p: ats.attend(KEY, p, KEY, score="dot")
        ),
        "score: expected nothing, as the keys": lambda p: ats.attention_weights(KEY, p, score=ADDITIVE),
        "these keys are prepared already": lambda p: ats.prepare_keys(ADDITIVE, p),
        "score: expected one of": lambda p: ats.prepare_keys("nope", KEY),
        "head_axis: expected": lambda p: ats.prepare_keys("dot", KEY, head_axis=1),
        "unit_keys: expected True or": lambda p: ats.prepare_keys(ats.Cosine(unit_keys=1), KEY),
    },
    ats.ShapeError: {
        r"W_k: expected \(h, dim_k\) = \(3, 3\), got": lambda p: ats.prepare_keys(ADDITIVE, KEY[..., :3]),
        "W_k: expected an array, or key": lambda p: ats.prepare_keys(ats.Additive(np.ones(3)), KEY),
        "w_v: expected": lambda p: ats.prepare_keys(ats.Additive(None), KEY),
        r"W: expected .*\(4, 6\)": lambda p: ats.prepare_keys(ats.Bilinear(np.ones((4, 6))), KEY),
        "W: expected .*float": lambda p: ats.prepare_keys(ats.Bilinear(3.0), KEY),
        "key: expected 2 axes": lambda p: ats.prepare_keys("dot", KEY[0, 0]),
        "prepare_keys of _Shorter: expected 7 keys": lambda p: ats.prepare_keys(_Shorter(1.0), KEY),
        "prepare_keys of _Nothing: expected 7 keys, as it was given, got None": (
            lambda p: ats.prepare_keys(_Nothing(1.0), KEY)
        ),
        r"W: expected 2 axes, with \(2,\) heads in front or not": (
            lambda p: ats.prepare_keys(ats.Bilinear(np.ones((3, 4, 5))), np.ones((2, 2, 7, 5)))
        ),
        "score: expected parameters without an axis of heads, as the key has none, got those of 2 heads": (
            lambda p: ats.prepare_keys(HEADS, np.ones((1, 5, 4)))
        ),
        r"W_q: expected .*; shapes: query \(.* 3\), key": lambda p: ats.attend(KEY[..., :3], p, KEY),
    },
    ats.DtypeError: {"key: expected": lambda p: ats.prepare_keys("dot", KEY.astype(int))},
    ats.FrameworkError: {"key": lambda p: ats.prepare_keys("dot", [1.0])},
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: type[Exception]) -> None:
    prepared = ats.prepare_keys(ADDITIVE, KEY)
    for words, call in ERRORS[error].items():
        with pytest.raises(error, match=words):
            call(prepared)


# Writes that change all keys to 0; PyTorch counts the first of its own alone.
WRITES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "numpy": (np.asarray, lambda key: key.fill(0)),
    "torch": (torch.tensor, lambda key: key.zero_()),
    "torch-data": (torch.tensor, lambda key: key.data.zero_()),
    "torch-memory": (torch.tensor, lambda key: key.numpy().fill(0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_call_reads_keys_as_they_are(write: str) -> None:
    convert, call = WRITES[write]
    draw = np.random.default_rng(0).standard_normal
    query, key, value, *arrays = (
        convert(draw(shape).astype("f4")) for shape in ((2, 1, 4), (2, 70, 5), (2, 70, 3), (16,), (16, 4), (16, 5))
    )
    prepared = ats.prepare_keys(ats.Additive(*arrays), key)
    ats.attend(query, prepared, value)
    for each in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        call(each.key)
        mean = np.broadcast_to(np.asarray(value).mean(-2, keepdims=True), (2, 1, 3))
        np.testing.assert_allclose(ats.attend(query, each, value), mean, rtol=0, atol=1e-6)


# ----------------------------------------------------------------- layers


def _layer_inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype("f4") for shape in ((2, 3, 20), (2, 7, 5), (2, 7, 4), (2, 7, 8))]


@pytest.mark.slow
def test_the_layer_of_pytorch() -> None:
    """Its sizes may be inferred by the preparation; gradients flow through it to all parameters."""
    torch.manual_seed(0)
    queries, keys, values, features = map(torch.tensor, _layer_inputs())
    layer = AdditiveAttention(8)
    prepared = layer.prepare_keys(keys)
    assert prepared.key.shape == (2, 7, 8)
    outs = [layer(queries, x, values, valid_lens=[5, 0]) for x in (prepared, keys)]
    assert layer.attention_weights.shape == (2, 3, 7)
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(
        *(torch.autograd.grad(x.square().sum(), list(layer.parameters()), retain_graph=True) for x in outs)
    )
    out = layer(queries, prepared + features, values)
    own = ats.PreparedKeys(prepared.key + features, prepared.score)
    torch.testing.assert_close(out, ats.attend(layer.W_q(queries), own, values))
    torch.testing.assert_close(layer.attention_weights, ats.attention_weights(layer.W_q(queries), own).detach())
    with torch.no_grad():
        detached = layer.prepare_keys(keys)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(queries, detached, values), layer(queries, detached, values))
    for call, error, words in (
        (lambda: layer.prepare_keys(keys[..., :3]), ats.ShapeError, "keys: expected vectors of length 5, which W_k"),
        (lambda: layer.prepare_keys(keys[0]), ats.ShapeError, "keys: expected 3 axes"),
        (lambda: layer.prepare_keys(keys.double()), ats.DtypeError, "keys: expected torch.float32, the dtype of W_k"),
        (lambda: layer(queries, prepared, values[:, :5]), ats.ShapeError, "values: expected as many positions"),
        (
            lambda: layer(queries, dataclasses.replace(prepared, key=keys), values),
            ats.ShapeError,
            "keys: expected vectors of length 8, which w_v takes, got 5",
        ),
        (lambda: DotProductAttention()(queries, prepared, values), ats.FrameworkError, "keys: expected an array"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=words):
                call()


@pytest.mark.parametrize("keep_last", [True, False])
def test_a_step_of_a_layer_takes_its_parameters_of_now(keep_last: bool) -> None:
    torch.manual_seed(0)
    layer = AdditiveAttention(16, keep_last=keep_last)
    query, key, value = 5 * torch.randn(2, 1, 8), 3 * torch.randn(2, 150, 5), torch.randn(2, 150, 4)
    layer(query, key, value)
    with torch.no_grad():
        prepared = layer.prepare_keys(key)
        layer.w_v.weight.mul_(2)
        found, wanted = (layer(query, x, value, valid_lens=[150, 5]) for x in (prepared, key))
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_the_layer_of_flax() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from attnscore.layers import flax as layers

    queries, keys, values, features = map(jnp.asarray, _layer_inputs())
    layer = layers.AdditiveAttention(8, rngs=nnx.Rngs(0))
    prepared = layer.prepare_keys(keys)
    found, wanted = (layer(queries, x, values, valid_lens=[5, 0]) for x in (prepared, keys))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    step = nnx.jit(lambda layer, prepared, features: layer(queries, prepared + features, values))
    own = ats.PreparedKeys(prepared.key + features, prepared.score)
    wanted = ats.attend(layer.W_q(queries), own, values)
    np.testing.assert_allclose(step(layer, prepared, features), wanted, rtol=1e-5, atol=1e-6)
    grads = nnx.grad(lambda layer: (layer(queries, layer.prepare_keys(keys), values) ** 2).sum())(layer)
    plain = nnx.grad(lambda layer: (layer(queries, keys, values) ** 2).sum())(layer)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    with pytest.raises(ats.ShapeError, match="keys: expected vectors of length 5, which W_k takes, got 3"):
        layer.prepare_keys(keys[..., :3])


# ----------------------------------------------------------------- frameworks


@pytest.mark.parametrize("name", SOME[::4])
@pytest.mark.slow_rows("additive-tanh-bias", "soft_cap-of-temperature-additive")
def test_jax(name: str) -> None:
    """A pytree that jit and grad take and return, with gradients of its keys and of the parameters that are left."""
    numbers = {key: x.astype("f4") for key, x in _leaves(name).items()}
    leaves = {key: jnp.asarray(x) for key, x in numbers.items()}

    def loss(prepared: Any, query: Any, value: Any) -> Any:
        return (ats.attend(query, prepared, value) ** 2).sum()

    prepared = jax.jit(lambda leaves: ats.prepare_keys(_score(name, leaves), leaves["key"]))(leaves)
    assert isinstance(prepared, ats.PreparedKeys)
    grads = jax.jit(jax.grad(loss))(prepared, leaves["query"], leaves["value"])
    assert isinstance(grads, ats.PreparedKeys)
    through = jax.grad(lambda x: loss(ats.prepare_keys(_score(name, x), x["key"]), x["query"], x["value"]))(leaves)
    own = {key: torch.tensor(x, requires_grad=True) for key, x in numbers.items()}
    theirs = ats.prepare_keys(_score(name, own), own["key"])
    theirs.key.retain_grad()
    ats.attend(own["query"], theirs, own["value"]).square().sum().backward()
    np.testing.assert_allclose(grads.key, theirs.key.grad, rtol=2e-4, atol=2e-5)
    for key, x in own.items():
        np.testing.assert_allclose(through[key], x.grad, rtol=2e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", SOME[::4])
@pytest.mark.slow_rows("soft_cap-of-temperature-additive")
def test_tensorflow(name: str) -> None:
    tf = pytest.importorskip("tensorflow")
    numbers = {key: x.astype("f4") for key, x in _leaves(name).items()}
    leaves = {key: tf.constant(x) for key, x in numbers.items()}

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            prepared = ats.prepare_keys(_score(name, leaves), leaves["key"])
            loss = tf.reduce_sum(ats.attend(leaves["query"], prepared, leaves["value"]) ** 2)
        return tape.gradient(loss, leaves)

    own = {key: torch.tensor(x, requires_grad=True) for key, x in numbers.items()}
    out = ats.attend(own["query"], own["key"], own["value"], score=_score(name, own))
    out.square().sum().backward()
    for found in (gradients(), tf.function(gradients)()):
        for key, x in own.items():
            np.testing.assert_allclose(found[key], x.grad, rtol=2e-4, atol=2e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME[::4])
def test_torch_compile(name: str) -> None:
    """In one graph: preparation and call, or keys that were prepared outside."""
    leaves = {key: torch.tensor(x, dtype=torch.float32) for key, x in _leaves(name).items()}

    def both(query: Any, key: Any, value: Any) -> Any:
        return ats.attend(query, ats.prepare_keys(_score(name, leaves), key), value)

    arrays = leaves["query"], leaves["key"], leaves["value"]
    wanted = both(*arrays)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(both, backend="eager", fullgraph=True)(*arrays), wanted)
    prepared = ats.prepare_keys(_score(name, leaves), arrays[1])
    step = torch.compile(ats.attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(step(arrays[0], prepared, arrays[2]), wanted)
