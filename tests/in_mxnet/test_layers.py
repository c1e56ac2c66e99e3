"""The Gluon layers: numbers, parameters, training, files, weights, errors."""

from __future__ import annotations

import copy
import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as onp
import pytest
from mxnet import autograd, gluon, np

import attnscore as ats
from attnscore.base.thresholds import KEPT_WEIGHTS
from attnscore.layers import mxnet as layers
from attnscore.layers.mxnet import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)
from constructor_cases import (
    check_constructors,
    check_masks_of_heads,
    check_older_calls,
    check_textbook_numbers,
    check_weights_not_kept,
    check_wrong_calls,
)

pytestmark = pytest.mark.usefixtures("numpy_semantics")
SCORES = ("dot", "scaled_dot", "gaussian", "cosine", "additive", "bilinear")
LAYERS = {
    "dot": DotProductAttention,
    "additive": lambda **o: AdditiveAttention(6, **o),
    "bilinear": BilinearAttention,
    "gaussian": lambda **o: GaussianAttention(1.5, learn_bandwidth=True, **o),
    **{f"heads-{name}": lambda name=name, **o: MultiHeadAttention(8, 2, score=name, bias=True, **o) for name in SCORES},
    "grouped": lambda **o: MultiHeadAttention(8, 4, num_key_value_heads=2, **o),
    "sparse": lambda **o: AdditiveAttention(6, normalizer="entmax15", **o),
    "heads-sigmoid": lambda **o: MultiHeadAttention(8, 2, normalizer="sigmoid", bias=True, **o),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
every_layer_that_learns = pytest.mark.parametrize("name", [name for name in LAYERS if name != "dot"])


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return np.array(onp.random.default_rng(seed).standard_normal(shape), dtype=dtype)


def inputs(dtype: str = "float32") -> tuple[Any, ...]:
    return random(3, 5, 4, dtype=dtype), random(3, 7, 4, seed=1, dtype=dtype), random(3, 7, 3, seed=2, dtype=dtype)


def made(name: str, **options: Any) -> Any:
    layer = LAYERS[name](**options)
    layer.initialize(mx.init.Normal(0.4))
    return layer


def parameters(layer: Any) -> dict[str, Any]:
    return dict(layer._collect_params_with_prefix())


def with_gradients(layer: Any, call: Callable[[], Any]) -> list[onp.ndarray]:
    """The output of a call, and the gradient of the sum of its squares for each parameter."""
    with autograd.record():
        out = call()
        loss = (out**2).sum()
    loss.backward()
    return [out.asnumpy(), *(x.grad().asnumpy().copy() for x in parameters(layer).values())]


def all_close(found: list[onp.ndarray], wanted: list[onp.ndarray], atol: float) -> None:
    for got, expected in zip(found, wanted, strict=True):
        assert onp.allclose(got, expected, atol=atol)


def test_doctests() -> None:
    found = doctest.testmod(layers)
    assert found.attempted > 20
    assert not found.failed


def test_the_numbers_of_the_textbook() -> None:
    check_textbook_numbers(layers, np.array)


# ------------------------------------------------------------------ parameters


def test_names_and_shapes_are_the_textbooks() -> None:
    layer = AdditiveAttention(8)
    layer.initialize()
    assert parameters(layer)["W_q.weight"].shape == (8, -1)
    layer(random(2, 1, 20), random(2, 10, 2), random(2, 10, 4))
    assert {name: x.shape for name, x in parameters(layer).items()} == {
        "W_q.weight": (8, 20),
        "W_k.weight": (8, 2),
        "w_v.weight": (1, 8),
    }
    heads = MultiHeadAttention(8, 2, bias=True)
    heads.initialize()
    heads(*inputs())
    assert sorted(parameters(heads)) == sorted(f"W_{x}.{y}" for x in "qkvo" for y in ("weight", "bias"))
    shapes = {name: parameters(made(f"heads-{name}")) for name in SCORES}
    assert shapes["additive"]["w_v"].shape == (2, 4)
    assert shapes["bilinear"]["W"].shape == (2, 4, 4)
    assert shapes["gaussian"]["log_bandwidth"].shape == (2,)
    assert shapes["cosine"]["log_scale"].shape == (2,)


def test_starting_values() -> None:
    assert GaussianAttention(0.5).bandwidth == 0.5
    assert made("gaussian").bandwidth.item() == pytest.approx(1.5)
    layer = made("bilinear")
    layer(*inputs())
    weight = layer.W.weight.data().asnumpy()
    assert 0 < onp.abs(weight).max() <= 1 / 4
    assert onp.allclose(onp.exp(made("heads-cosine").log_scale.data().asnumpy()), 2.0)


def test_additive_attention_is_a_one_layer_network_on_query_and_key() -> None:
    layer = made("additive")
    queries, keys, values = inputs()
    out = layer(queries, keys, values).asnumpy()
    w = {name: x.data().asnumpy() for name, x in parameters(layer).items()}
    both = onp.concatenate(
        [onp.broadcast_to(x, (3, 5, 7, 4)) for x in (queries.asnumpy()[:, :, None], keys.asnumpy()[:, None])], -1
    )
    hidden = onp.tanh(both @ onp.concatenate([w["W_q.weight"], w["W_k.weight"]], 1).T)
    scores = (hidden @ w["w_v.weight"].T)[..., 0]
    weights = onp.exp(scores) / onp.exp(scores).sum(-1, keepdims=True)
    assert onp.allclose(out, weights @ values.asnumpy(), atol=1e-6)
    assert onp.allclose(layer.attention_weights.asnumpy(), weights, atol=1e-6)


def test_hooks_of_w_v_see_its_call() -> None:
    layer, calls = made("additive"), []
    wanted = layer(*inputs()).asnumpy()
    layer.w_v.register_forward_hook(lambda *_: calls.append(None))
    assert onp.allclose(layer(*inputs()).asnumpy(), wanted, atol=1e-6)
    assert len(calls) == 1


class Adapted(gluon.nn.Dense):
    """A projection with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__(1, flatten=False, in_units=6)
        self.adapter = gluon.nn.Dense(1, flatten=False, in_units=6)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.adapter(x)


def test_what_replaces_w_v_is_called() -> None:
    """A bias in it is in all scores of a query, and changes no weight."""
    layer, (queries, keys, values) = made("additive"), inputs()
    layer.w_v = Adapted()
    layer.w_v.initialize(mx.init.Normal(0.4))
    layer.w_v.adapter.bias.set_data(np.ones(1))

    def plain() -> Any:
        hidden = np.tanh(layer.W_q(queries)[:, :, None] + layer.W_k(keys)[:, None])
        return np.matmul(mx.npx.softmax(layer.w_v(hidden)[..., 0], axis=-1), values)

    found = with_gradients(layer, lambda: layer(queries, keys, values))
    assert len(found) == 7
    all_close(found, with_gradients(layer, plain), 1e-5)


def test_prepared_keys() -> None:
    layer = made("additive")
    queries, keys, values = inputs()
    wanted = layer(queries, keys, values, [2, 7, 5])
    prepared = layer.prepare_keys(keys)
    assert onp.allclose(layer(queries, prepared, values, [2, 7, 5]).asnumpy(), wanted.asnumpy(), atol=1e-6)
    assert layer.attention_weights.shape == (3, 5, 7)
    features = random(3, 7, 6, seed=3)
    wanted = ats.attend(layer.W_q(queries), prepared.key + features, values, score=prepared.score)
    assert onp.allclose(layer(queries, prepared + features, values).asnumpy(), wanted.asnumpy(), atol=1e-6)
    found = with_gradients(layer, lambda: layer(queries, layer.prepare_keys(keys), values))
    all_close(found, with_gradients(layer, lambda: layer(queries, keys, values)), 1e-5)
    with pytest.raises(ats.ShapeError, match="keys: expected vectors of length 4, which W_k takes, got 3"):
        layer.prepare_keys(keys[..., :3])


@pytest.mark.parametrize("score", SCORES)
def test_multi_head_is_attend_between_projections(score: str) -> None:
    layer = made(f"heads-{score}")
    arrays, lens = inputs(), [2, 7, 0]
    out = layer(*arrays, valid_lens=lens).asnumpy()
    w = {name: x.data().asnumpy() for name, x in parameters(layer).items()}
    q, k, v = (
        (x.asnumpy() @ w[f"W_{n}.weight"].T + w[f"W_{n}.bias"]).reshape(3, -1, 2, 4)
        for n, x in zip("qkv", arrays, strict=True)
    )
    own = layer._layer.make_score({part.name: w[part.name] for part in layer._layer.parameters})
    pooled = ats.attend(q, k, v, score=own, valid_lens=lens, head_axis=-2).reshape(3, 5, 8)
    assert onp.allclose(out, pooled @ w["W_o.weight"].T + w["W_o.bias"], atol=1e-5)


NORMALIZERS = ("sigmoid", "sparsemax", "entmax15", ats.Entmax(1.2))


@pytest.mark.parametrize("few", [0, KEPT_WEIGHTS])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_layers_of_other_normalizers_are_attend(normalizer: Any, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against NumPy's in float64, which the tests of NumPy hold to the definitions; a sequence without keys too."""
    monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
    arrays, call = inputs(), {"normalizer": normalizer, "valid_lens": [2, 7, 0]}
    q, k, v = (x.asnumpy().astype("float64") for x in arrays)
    matrix = random(4, 4, seed=3)
    for layer, score in (
        (DotProductAttention(normalizer=normalizer), "scaled_dot"),
        (BilinearAttention(normalizer=normalizer), ats.Bilinear(matrix.asnumpy().astype("float64"))),
        (GaussianAttention(1.5, normalizer=normalizer), ats.Gaussian(1.5)),
    ):
        layer.initialize()
        layer(*arrays)
        if isinstance(layer, BilinearAttention):
            layer.W.weight.set_data(matrix)
        out = layer(*arrays, [2, 7, 0])
        wanted, weights = ats.attend(q, k, v, score=score, return_weights=True, **call)
        onp.testing.assert_allclose(out.asnumpy(), wanted, rtol=1e-4, atol=1e-5)
        onp.testing.assert_allclose(layer.attention_weights.asnumpy(), weights, rtol=1e-4, atol=1e-5)
        assert not out[2].asnumpy().any()
        assert layer.normalizer == normalizer


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_heads_of_other_normalizers_with_a_cache(normalizer: Any) -> None:
    layer = MultiHeadAttention(8, 2, normalizer=normalizer, score="gaussian")
    layer.initialize(mx.init.Normal(0.4))
    x = random(3, 5, 4)
    whole = layer(x, x, x, mask=ats.Causal())
    weights, outs = layer.attention_weights, []
    cache = ats.KeyValueCache(head_axis=-2, capacity=6)
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        step = x[:, start:stop]
        out, cache = layer(step, step, step, cache=cache)
        outs.append(out)
        found = layer.attention_weights
        onp.testing.assert_allclose(found[..., :5].asnumpy(), weights[:, :, start:stop].asnumpy(), rtol=1e-4, atol=1e-5)
        assert not found[..., stop:].asnumpy().any()
    onp.testing.assert_allclose(np.concatenate(outs, 1).asnumpy(), whole.asnumpy(), rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------- masks, gradients


@every_layer
def test_masks_and_lengths_combine(name: str) -> None:
    layer, (queries, keys, values) = made(name), inputs()
    lens = np.array([3, 7, 0])
    layer(queries, keys, values, lens, ats.Causal("bottom_right"))
    weights = layer.attention_weights.asnumpy()
    i, j = onp.arange(5)[:, None], onp.arange(7)
    seen = (j <= i + 2) & (j < lens.asnumpy()[:, None, None])
    seen = seen[:, None] if weights.ndim == 4 else seen
    assert ((weights > 0) == onp.broadcast_to(seen, weights.shape)).all()
    layer(queries, keys, values, mask=np.array(seen.reshape(3, 5, 7), dtype=bool))
    assert onp.allclose(layer.attention_weights.asnumpy(), weights, atol=1e-7)


@every_layer_that_learns
def test_nan_in_the_padding_reaches_no_parameter(name: str) -> None:
    layer = made(name)
    queries, keys, values = inputs()
    found = []
    for nonfinite in (0.0, onp.nan):
        keys[1, 3:] = values[1, 3:] = nonfinite
        keys[2] = values[2] = nonfinite
        found.append(with_gradients(layer, lambda: layer(queries, keys, values, np.array([7, 3, 0]))))
    assert all(onp.isfinite(x).all() for x in found[1])
    all_close(*found, 1e-6)


@every_layer_that_learns
def test_gradients_are_those_of_differences(name: str) -> None:
    layer = made(name)
    # Sizes first: MXNet's own initialisers make float32.
    layer(*inputs())
    layer.cast("float64")
    arrays = inputs("float64")

    def loss() -> Any:
        return (layer(*arrays, [7, 3, 0]) ** 2).sum()

    with autograd.record():
        value = loss()
    value.backward()
    for parameter in parameters(layer).values():
        direction = random(*parameter.shape, seed=9, dtype="float64")
        got, start, ends = float((parameter.grad() * direction).sum()), parameter.data().copy(), []
        for step in (1e-5, -1e-5):
            parameter.set_data(start + step * direction)
            ends.append(float(loss()))
        parameter.set_data(start)
        assert got == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8)


# -------------------------------------------------------------------- training, files


@pytest.mark.parametrize("name", ["additive", "bilinear", "gaussian", "heads-scaled_dot", "heads-additive"])
def test_a_trainer_learns(name: str) -> None:
    layer = made(name)
    queries, keys, values = inputs()
    layer(queries, keys, values)
    target = layer(queries, keys, values) * 0.5 + 0.1
    trainer = gluon.Trainer(layer.collect_params(), "adam", {"learning_rate": 0.02})
    losses = []
    for _ in range(30):
        with autograd.record():
            loss = ((layer(queries, keys, values) - target) ** 2).mean()
        loss.backward()
        trainer.step(1)
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_dropout_acts_in_training_alone() -> None:
    layer, arrays = made("dot", dropout=0.5), inputs()
    plain = layer(*arrays).asnumpy()
    assert (layer(*arrays).asnumpy() == plain).all()
    with autograd.record():
        first, second = (layer(*arrays).asnumpy() for _ in range(2))
    assert (first != plain).any()
    assert (first != second).any()
    weights = layer.attention_weights.asnumpy()
    assert onp.allclose(weights.sum(-1), 1, atol=1e-6)
    with autograd.record(train_mode=False):
        assert (layer(*arrays).asnumpy() == plain).all()


@every_layer_that_learns
def test_parameters_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    layer, other, arrays = made(name), LAYERS[name](), inputs()
    out = layer(*arrays).asnumpy()
    path = str(tmp_path / "layer.params")
    layer.save_parameters(path)
    other.load_parameters(path)
    assert (other(*arrays).asnumpy() == out).all()


def test_a_checkpoint_of_the_textbooks_own_layer_loads(tmp_path: Path) -> None:
    class Textbook(gluon.Block):
        def __init__(self) -> None:
            super().__init__()
            self.W_k = gluon.nn.Dense(6, use_bias=False, flatten=False)
            self.W_q = gluon.nn.Dense(6, use_bias=False, flatten=False)
            self.w_v = gluon.nn.Dense(1, use_bias=False, flatten=False)

        def forward(self, queries: Any, keys: Any, values: Any) -> Any:
            hidden = np.tanh(np.expand_dims(self.W_q(queries), 2) + np.expand_dims(self.W_k(keys), 1))
            weights = mx.npx.softmax(np.squeeze(self.w_v(hidden), axis=-1))
            return mx.npx.batch_dot(weights, values)

    theirs, ours = Textbook(), AdditiveAttention(6)
    theirs.initialize(mx.init.Normal(0.5))
    wanted = theirs(*inputs()).asnumpy()
    theirs.save_parameters(str(tmp_path / "theirs.params"))
    ours.load_parameters(str(tmp_path / "theirs.params"))
    assert onp.allclose(ours(*inputs()).asnumpy(), wanted, atol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), [("dot", "float16"), ("gaussian", "float16"), ("grouped", "float64")])
def test_other_dtypes(name: str, dtype: str) -> None:
    """MXNet has no projections of float16 on the CPU."""
    layer = made(name)
    layer(*inputs())
    layer.cast(dtype)
    assert layer(*inputs(dtype)).dtype == onp.dtype(dtype)


# ------------------------------------------------------------------------ the weights


@every_layer
@pytest.mark.parametrize("of_lens", [np, onp], ids=["mxnet", "numpy"])
@pytest.mark.parametrize("few", [0, KEPT_WEIGHTS])
def test_weights_are_those_of_the_call_whatever_happens_after(
    name: str, of_lens: Any, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
    layer, (queries, keys, values) = made(name), inputs()
    lens, mask = of_lens.array([2, 7, 4]), of_lens.ones((3, 5, 7), dtype=bool)
    mask[:, 0, 1] = False
    layer(queries, keys, values, lens, mask)
    before = layer.attention_weights.asnumpy()
    mask[:] = False
    assert layer.normalizer == "sigmoid" or onp.allclose(before.sum(-1), 1, atol=1e-5)
    queries[:] = 0
    keys[:] = 0
    lens[:] = 7
    for parameter in parameters(layer).values():
        parameter.set_data(parameter.data() * 0)
    assert (layer.attention_weights.asnumpy() == before).all()
    layer.attention_weights[:] = 0
    assert (layer.attention_weights.asnumpy() == before).all()


@every_layer
def test_few_weights_are_computed_in_the_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, given, found = made(name), inputs(), {}
    for few in (KEPT_WEIGHTS, 0):
        monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
        with autograd.record():
            layer(*given, np.array([2, 7, 4]))
        assert (layer._last.computed is not None) == bool(few)
        found[few] = layer.attention_weights.asnumpy()
    assert onp.allclose(*found.values(), atol=1e-6)


def test_weights_before_a_call_or_of_a_layer_that_keeps_none() -> None:
    check_weights_not_kept(layers, random(2, 3, 6))


def test_masks_of_heads() -> None:
    check_masks_of_heads(layers, random(2, 3, 6), np.array)


def test_a_copy_carries_no_activations() -> None:
    layer = made("dot")
    layer(*inputs())
    with pytest.raises(ats.AttnscoreError):
        _ = copy.deepcopy(layer).attention_weights


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["additive", "multi-head"])
def test_the_dtype_of_a_first_call_is_checked(name: str) -> None:
    layer = AdditiveAttention(8) if name == "additive" else MultiHeadAttention(8, 2)
    layer.initialize()
    arrays = inputs()
    with pytest.raises(ats.DtypeError, match="queries: expected float32, the dtype of W_q, got float64"):
        layer(*[x.astype("float64") for x in arrays])
    assert layer(*arrays).dtype == np.float32


def test_wrong_input_is_told() -> None:
    queries, keys, values = inputs()
    layer = made("additive")
    layer(queries, keys, values)
    with pytest.raises(ats.ShapeError, match="queries: expected vectors of length 4, which W_q takes, got 3"):
        layer(queries[..., :3], keys, values)
    with pytest.raises(ats.FrameworkError, match=r"keys: expected an mx\.np\.ndarray, got ndarray"):
        layer(queries, keys.asnumpy(), values)
    with pytest.raises(ats.FrameworkError, match=r"keys: expected an mx\.np\.ndarray, got NDArray"):
        layer(queries, keys.as_nd_ndarray(), values)
    with pytest.raises(ats.DtypeError, match="queries: expected float32, the dtype of W_q, got float64"):
        layer(queries.astype("float64"), keys, values)
    with pytest.raises(ats.DtypeError, match="int32"):
        layer(queries.astype("int32"), keys, values)


def test_errors_that_all_frameworks_share() -> None:
    check_wrong_calls(layers, random(2, 3, 6))


def test_legacy_semantics_are_told() -> None:
    with mx.util.np_array(False), pytest.raises(ats.FrameworkError, match=r"NumPy semantics.*npx\.set_np"):
        made("dot")(*inputs())


def test_calls_of_older_editions() -> None:
    check_older_calls(layers)


def test_constructors() -> None:
    check_constructors(layers)


# ------------------------------------------------------------- scores of parts, bias, rotary embedding


def rotary(q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
    """Turn both halves of the features by angles that grow with the position."""
    angle = positions.astype("float32").reshape((-1, positions.shape[1], 1, 1)) / 10

    def turned(x: Any) -> Any:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)

    return turned(q), turned(k)


TEMPLATES = {
    "sum": lambda: ats.Temperature(ats.Dot() + 0.5 * ats.Gaussian(1.5), onp.linspace(1, 2, 4)),
    "capped": lambda: ats.SoftCap(ats.Combination(("cosine", "gaussian"), (1.0, onp.full(4, 0.5))), 2.0),
}


@pytest.mark.parametrize("shape", [(3, 4, 5, 5), (4, 1, 9)], ids=["pairs", "relative"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_heads_with_a_score_of_parts_a_bias_and_a_rotary_embedding(name: str, shape: Any, tmp_path: Path) -> None:
    """They are `attend` between the projections; files hold every parameter; the bias gets its gradient."""
    layer = MultiHeadAttention(8, 4, score=TEMPLATES[name](), rotary=rotary)
    layer.initialize(mx.init.Normal(0.4))
    x, bias = random(3, 5, 4), random(*shape, seed=4)
    bias.attach_grad()
    with autograd.record():
        out = layer(x, x, x, valid_lens=[2, 5, 0], bias=bias)
        loss = (out**2).sum()
    loss.backward()
    w = {name: x.data() for name, x in parameters(layer).items()}
    q, k, v = (np.dot(x, w[f"W_{n}.weight"].T).reshape(3, 5, 4, 2) for n in "qkv")
    q, k = rotary(q, k, np.arange(5).reshape(1, 5))
    given = {name: x.asnumpy() for name, x in w.items() if "." not in name}
    own = layer._layer.make_score(given)
    arrays = [x.asnumpy() for x in (q, k, v)]
    pooled, back = ats.attend_vjp(*arrays, score=own, valid_lens=[2, 5, 0], bias=bias.asnumpy(), head_axis=-2)
    wanted = pooled.reshape(3, 5, 8) @ w["W_o.weight"].asnumpy().T
    assert onp.allclose(out.asnumpy(), wanted, atol=1e-5)
    through = (2 * wanted @ w["W_o.weight"].asnumpy()).reshape(pooled.shape)
    assert onp.allclose(bias.grad.asnumpy(), back(through).bias, atol=1e-5)
    own_gradients = {name: x.grad() for name, x in parameters(layer).items() if name.startswith("score_")}
    assert all(onp.isfinite(x.asnumpy()).all() and x.asnumpy().any() for x in own_gradients.values()) and own_gradients
    before = layer.attention_weights.asnumpy()
    bias[:] = 0
    assert (layer.attention_weights.asnumpy() == before).all()
    again = MultiHeadAttention(8, 4, score=TEMPLATES[name](), rotary=rotary)
    layer.save_parameters(str(tmp_path / "layer.params"))
    again.load_parameters(str(tmp_path / "layer.params"))
    assert (again(x, x, x).asnumpy() == layer(x, x, x).asnumpy()).all()


@pytest.mark.usefixtures("numpy_semantics")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["scaled_dot", "additive"])
def test_steps_with_a_cache_are_one_pass(name: str, window: int | None) -> None:
    """Output, weights of a step and gradients of the parameters, with grouped heads and lengths per sequence."""
    layer = MultiHeadAttention(8, 4, score=name, num_key_value_heads=2, sink=True, qk_norm=True)
    layer.initialize()
    x = np.array(onp.random.default_rng(0).standard_normal((2, 9, 8)), dtype="float32")
    mask = ats.Causal() if window is None else ats.Causal() & (ats.SlidingWindow(left=window - 1) | ats.KeyRange(0, 1))
    capacity, parts = 12 if window is None else window + 4, (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 9))

    def decoded() -> Any:
        cache = ats.KeyValueCache(head_axis=-2, window=window, sinks=int(window is not None), capacity=capacity)
        outs = []
        for part in parts:
            out, cache = layer(x[:, part], x[:, part], x[:, part], cache=cache)
            outs.append(out)
        assert cache.lens.asnumpy().tolist() == [9, 9]
        assert layer.attention_weights.shape == (2, 4, 3, capacity)
        return np.concatenate(outs, 1)

    layer(x, x, x)
    found = [with_gradients(layer, call) for call in (decoded, lambda: layer(x, x, x, mask=mask))]
    for a, b in zip(*found, strict=True):
        onp.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    out, cache = layer(x, x, x, np.array([2, 9]), cache=ats.KeyValueCache(head_axis=-2, capacity=9))
    wanted = layer(x, x, x, mask=ats.Causal() & ats.ValidLens([2, 9], [2, 9]))
    onp.testing.assert_allclose(out.asnumpy(), wanted.asnumpy(), atol=1e-5)
    assert cache.lens.asnumpy().tolist() == [2, 9]


def test_a_bias_needs_no_heads() -> None:
    q, k, v, bias = random(2, 3, 4), random(2, 5, 4, seed=1), random(2, 5, 6, seed=2), random(3, 5, seed=3)
    bias.attach_grad()
    with autograd.record():
        out = DotProductAttention()(q, k, v, bias=bias)
        loss = (out**2).sum()
    loss.backward()
    pooled, back = ats.attend_vjp(*(x.asnumpy() for x in (q, k, v)), bias=bias.asnumpy())
    assert onp.allclose(out.asnumpy(), pooled, atol=1e-5)
    assert onp.allclose(bias.grad.asnumpy(), back(2 * pooled).bias, atol=1e-5)
