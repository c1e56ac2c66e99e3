"""Watching Flax models: the numbers of PyTorch's watch, models unchanged, and nothing left after it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import attnscore as ats
from attnscore import api
from attnscore.diagnostics import Thresholds, watch
from attnscore.diagnostics.watching import jax_values, rebinding, staged
from attnscore.errors import ArgumentError
from attnscore.layers import torch as torch_layers
from attnscore.layers.flax import AdditiveAttention, MultiHeadAttention
from watch_models import BREAKS_AT, FAULTS, STEPS, assert_same_rows, failures, failures_of_pytorch, torch_rows

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


class Pooled(nnx.Module):
    """``jax.nn.dot_product_attention`` with these arguments."""

    def __init__(self, **given: Any) -> None:
        self.given = tuple(given.items())

    def __call__(self, *arrays: jax.Array, attention_mask: jax.Array | None = None, **more: Any) -> jax.Array:
        return jax.nn.dot_product_attention(*arrays, **dict(self.given), **more)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(x)


class Model(nnx.Module):
    def __init__(self, kind: str = "plain") -> None:
        self.kind = kind
        self.blocks = nnx.List([Block(nnx.Rngs(seed)) for seed in range(2)])
        self.out = nnx.Linear(8, 3, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x) if self.kind == "remat" else block(x)
        return self.out(x)


class Scanned(nnx.Module):
    """Layers in one loop: their parameters have one more axis."""

    def __init__(self) -> None:
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = make(nnx.Rngs(0).split(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        return forward(self.blocks, x)


X = jnp.asarray(normal(2, 5, 8))


def assert_restored() -> None:
    assert not staged._WATCHES and not staged._RUNS and not rebinding.ACTIVE
    functions = (jax.nn.dot_product_attention, api.attend, ats.attend, Block.__call__, Model.__call__)
    assert not any(function in rebinding._WRAPPERS for function in functions)
    assert not nnx.MultiHeadAttention.__call__.__qualname__.startswith("Rebinding")
    assert jax_values._CONTEXT is None or not jax_values._CONTEXT.value


@pytest.fixture(autouse=True)
def restored():
    yield
    assert_restored()


# ---------------------------------------------------------------- the numbers


def cases() -> dict[str, tuple[tuple[int, int, int, int], dict[str, Any], dict[str, Any]]]:
    """Queries, keys, heads and KV heads; arguments for JAX and for PyTorch."""
    mask = RNG.random((2, 1, 5, 7)) > 0.4
    mask[0, 0, 2] = False
    bias = normal(2, 4, 5, 7)
    positions = np.arange(7)
    window = abs(positions[:, None] - positions) <= 2
    lens = np.array([3, 7], np.int32)
    return {
        "plain": ((5, 7, 4, 4), {}, {}),
        "causal": ((7, 7, 4, 4), {"is_causal": True}, {"is_causal": True}),
        "mask": ((5, 7, 4, 4), {"mask": mask}, {"attn_mask": mask}),
        "bias, scale": ((5, 7, 4, 4), {"bias": bias, "scale": 0.3}, {"attn_mask": bias, "scale": 0.3}),
        "grouped": ((5, 7, 4, 2), {}, {}),
        "window": ((7, 7, 2, 2), {"local_window_size": 2}, {"attn_mask": window}),
        "lengths": (
            (5, 7, 2, 2),
            {"key_value_seq_lengths": lens},
            {"attn_mask": (positions < lens[:, None])[:, None, None]},
        ),
        "one key": ((1, 1, 1, 1), {}, {}),
    }


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", cases())
def test_numbers_are_those_of_pytorch(name: str, is_compiled: bool) -> None:
    (queries, keys, heads, kv_heads), given, for_torch = cases()[name]
    query, key = normal(2, queries, heads, 6) * 3, normal(2, keys, kv_heads, 6)
    arrays = {name: jnp.asarray(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    model = Pooled(**{name: x for name, x in given.items() if name not in arrays})
    call = nnx.jit(lambda model, *a, **k: model(*a, **k)) if is_compiled else lambda model, *a, **k: model(*a, **k)
    with watch(model, thresholds=Thresholds(saturated_weight=0.6)) as seen:
        call(model, query, key, key, **arrays)
    assert not seen.unseen and seen.steps == seen.sampled == 1 and list(seen.layers) == ["(model)"]
    with_weight = [row | {"saturated_rows": 0} for row in torch_rows(query, key, **for_torch)]
    assert_same_rows([row | {"saturated_rows": 0} for row in seen.rows()], with_weight)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_padding_nan_and_bfloat16(is_compiled: bool) -> None:
    query, tokens = normal(2, 5, 2, 4), np.array([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    model, call = Pooled(), lambda model, *a, **k: model(*a, **k)
    call = nnx.jit(call) if is_compiled else call
    broken = query.copy()
    broken[1, 2, 1, 0] = np.nan
    half = jnp.asarray(query, jnp.bfloat16)
    for array, expected, tolerance in (
        (query, torch_rows(query, query, tokens), 2e-5),
        (broken, torch_rows(broken, broken, tokens), 2e-5),
        (half, torch_rows(np.asarray(half, np.float32), np.asarray(half, np.float32), tokens), 1e-2),
    ):
        with watch(model) as seen:
            call(model, array, array, array, attention_mask=jnp.asarray(tokens))
        assert not seen.unseen
        assert_same_rows(seen.rows(), expected, tolerance)
    assert expected[0]["padding"] > 0 and expected[0]["rows"] == 7


@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.5, "deterministic": True}], ids=["plain", "dropout"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flax_layers_have_the_numbers_of_pytorchs(is_causal: bool, options: dict[str, Any]) -> None:
    theirs, hidden = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.ones(5, 5).triu(1).bool() & is_causal
    with watch(theirs) as expected:
        theirs(*[torch.from_numpy(np.array(X))] * 3, attn_mask=hidden)
    weight, bias = (x.detach().numpy() for x in (theirs.in_proj_weight, theirs.in_proj_bias))
    nnx_layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), **options)
    linen_layer = nn.MultiHeadDotProductAttention(2, **options)
    variables = linen_layer.init(jax.random.key(0), X)
    for place, name in enumerate(("query", "key", "value")):
        rows = slice(8 * place, 8 * place + 8)
        kernel, offset = jnp.asarray(weight[rows].T.reshape(8, 2, 4)), jnp.asarray(bias[rows].reshape(2, 4))
        getattr(nnx_layer, name).kernel[...], getattr(nnx_layer, name).bias[...] = kernel, offset
        variables["params"][name] = {"kernel": kernel, "bias": offset}
    with watch(nnx_layer) as seen:
        nnx_layer(X, is_causal=is_causal)
    assert_same_rows(seen.rows(), expected.rows())
    with watch(linen_layer) as others:
        jax.jit(linen_layer.apply)(variables, X, mask=jnp.asarray(~hidden)[None, None])
    assert_same_rows(others.rows(), expected.rows())
    assert not any(math.isnan(row["value_spread"]) for row in (*seen.rows(), *others.rows()))


def test_layers_of_this_library() -> None:
    class Both(nnx.Module):
        def __init__(self) -> None:
            self.first = MultiHeadAttention(8, 2, query_size=8, key_size=8, value_size=8, rngs=nnx.Rngs(0))
            self.second = AdditiveAttention(4, query_size=8, key_size=8, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array, lens: jax.Array) -> jax.Array:
            return self.second(*[self.first(x, x, x, lens)] * 3)

    theirs = torch.nn.Module()
    theirs.first = torch_layers.MultiHeadAttention(8, 2, query_size=8, key_size=8, value_size=8)
    theirs.second = torch_layers.AdditiveAttention(4, query_size=8, key_size=8)
    theirs.forward = lambda x, lens: theirs.second(*[theirs.first(x, x, x, lens)] * 3)
    model, lens = Both(), jnp.asarray([2, 5])
    for name in ("first", "second"):
        getattr(model, name).load_torch(dict(getattr(theirs, name).state_dict()))
    output = model(X, lens)
    with watch(theirs) as expected:
        theirs(torch.from_numpy(np.array(X)), torch.tensor([2, 5]))
    with watch(model) as eager:
        assert jnp.array_equal(model(X, lens), output)
    with watch(model) as compiled:
        nnx.jit(lambda model, *a: model(*a))(model, X, lens)
    for seen in (eager, compiled):
        assert list(seen.layers) == ["first", "second"] and not seen.unseen
        assert_same_rows(seen.rows(), expected.rows())


# ---------------------------------------------------------------- transformations


def loss(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).sum()


def call_each(model: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


CALL = nnx.jit(lambda model, x: model(x))
TRANSFORMATIONS = {
    "jit": CALL,
    "grad": nnx.grad(loss),
    "jit of grad": nnx.jit(nnx.value_and_grad(loss)),
    "vmap": call_each,
    "jit of vmap": nnx.jit(call_each),
    "vmap of jit": lambda model, x: jax.vmap(jax.jit(model))(x),
}


@pytest.mark.parametrize("kind", ["plain", "remat"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformed_models_keep_their_bits_and_are_recorded(name: str, kind: str) -> None:
    if kind == "remat" and name not in ("jit of grad", "grad"):
        pytest.skip("only a gradient computes again")
    model, function = Model(kind), TRANSFORMATIONS[name]
    with watch(Model()) as expected:
        Model()(X)
    before = function(model, X)
    with watch(model) as seen:
        during = function(model, X)
    after = function(model, X)
    for x, y, z in zip(*map(jax.tree.leaves, (before, during, after)), strict=True):
        assert np.array_equal(x, y) and np.array_equal(y, z)
    assert seen.steps == seen.sampled == 1 and not seen.unseen
    assert list(seen.layers) == ["blocks.0.attention", "blocks.1.attention"]
    assert_same_rows(seen.rows(), expected.rows())


@pytest.mark.parametrize(("name", "shape"), [("mask", (3, 2, 1, 5, 5)), ("attention_mask", (3, 2, 5))])
def test_a_batch_of_masks_alone(name: str, shape: tuple[int, ...]) -> None:
    model, masks, x = Pooled(), jnp.asarray(RNG.random(shape) > 0.4), jnp.asarray(normal(2, 5, 2, 4))
    with watch(model) as expected:
        model(*[jnp.tile(x, (3, 1, 1, 1))] * 3, **{name: masks.reshape(6, *shape[2:])})
    with watch(model) as seen:
        jax.jit(jax.vmap(lambda mask: model(x, x, x, **{name: mask})))(masks).block_until_ready()
    assert not seen.unseen
    assert_same_rows(seen.rows(), expected.rows())


def test_layers_in_a_loop_have_a_name_each() -> None:
    model = Scanned()
    function = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))
    before = function(model, X)
    with watch(model) as seen:
        during = function(model, X)
    assert all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (before, during)), strict=True))
    assert list(seen.layers) == [f"blocks.attention{suffix}" for suffix in ("", " #2", " #3")]
    assert {row["rows"] for row in seen.rows()} == {10}


def test_programs_without_a_watch_hold_nothing_and_come_back_after_it() -> None:
    model = Model()
    graph, state = nnx.split(model)
    function = jax.jit(lambda state, x: nnx.merge(graph, state)(x))

    def calls() -> int:
        return str(jax.make_jaxpr(function)(state, X)).count("pure_callback")

    traced = []
    counted = jax.jit(lambda state, x: traced.append(1) or nnx.merge(graph, state)(x))
    counted(state, X)
    assert calls() == 0
    with watch(model) as seen:
        assert calls() == 4  # the beginning, two attention calls, the end
        counted(state, X)
    steps = seen.steps
    assert calls() == 0
    counted(state, X)
    with watch(model) as again:  # the program of the first watch
        counted(state, X)
    assert steps == seen.steps == again.steps == 1 and len(again.rows()) == 4
    assert len(traced) == (2 if jax_values._CONTEXT is not None else 1)


def test_only_sampled_steps_send_anything(monkeypatch) -> None:
    model, function, received = Model(), nnx.jit(lambda model, x: model(x)), []
    receive = staged.receive
    monkeypatch.setattr(staged, "receive", lambda *a: received.append(a[0]) or receive(*a))
    rows = []
    with watch(model, every=3, on_step=lambda step, new: rows.append((step, len(new)))) as seen:
        for _ in range(7):
            function(model, X).block_until_ready()
        assert rows == [(0, 4), (3, 4), (6, 4)]  # each when its step is over
        seen.pause()
        function(model, X)
        seen.resume()
    assert len(received) == 6 and (seen.steps, seen.sampled) == (7, 3)


# ---------------------------------------------------------------- several devices


def rows_and_steps(model: Model, call: Any) -> tuple[Any, int]:
    """Return rows and number of steps of a call, whose output must have the bits that it has unwatched."""
    expected = call()
    with watch(model) as seen:
        out = call()
        jax.block_until_ready(out)
    assert jnp.array_equal(out, expected) and not seen.unseen
    return seen.rows(), seen.steps


@pytest.mark.parametrize("kind", ["sharded", "shard_map"])
def test_several_devices_give_the_rows_of_one(kind: str) -> None:
    """On one device here; the next test runs it on two."""
    model, x = Model(), jnp.asarray(normal(4, 5, 8))
    graph, state = nnx.split(model)
    kinds = (jax.sharding.AxisType.Auto,)
    mesh, batch = jax.make_mesh((len(jax.devices()),), ("batch",), axis_types=kinds), jax.P("batch")

    def pure(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x)

    expected, _ = rows_and_steps(model, lambda: jax.jit(pure)(state, x))
    if kind == "sharded":
        spread = jax.device_put(x, jax.NamedSharding(mesh, batch))
        rows, steps = rows_and_steps(model, lambda: jax.jit(pure)(state, spread))
        assert steps == 1
    else:
        function = jax.jit(jax.shard_map(pure, mesh=mesh, in_specs=(jax.P(), batch), out_specs=batch))
        rows, steps = rows_and_steps(model, lambda: function(state, x))
        assert steps == len(jax.devices()), "the part of each device is a step"
    assert_same_rows(rows, expected)


def test_two_devices() -> None:
    flags = "--xla_force_host_platform_device_count=2 " + os.environ.get("XLA_FLAGS", "")
    script = "import jax, pytest, sys; assert len(jax.devices()) == 2; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", __file__, "-k", "test_several_devices"]
    done = subprocess.run(
        [sys.executable, "-c", script, *options],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


# ---------------------------------------------------------------- what cannot be recorded


def test_recording_never_breaks_the_model(monkeypatch) -> None:
    monkeypatch.setattr(staged, "sums_of", lambda *_: 1 / 0)
    model = Model()
    for function in (lambda model, x: model(x), nnx.jit(lambda model, x: model(x))):
        expected = function(model, X)
        with watch(model) as seen:
            assert jnp.array_equal(function(model, X), expected)
        assert not seen.layers and {why for _, why in seen.unseen} == {"ZeroDivisionError: division by zero"}


def test_a_step_that_raises_is_dropped() -> None:
    model = Model()
    with watch(model) as seen, pytest.raises(Exception, match="Incompatible input dimension"):
        model(X[..., :3])
    assert seen.steps == 1 and seen.sampled == 0 and not seen.layers


def test_another_model_is_not_watched() -> None:
    with watch(Model()) as seen:
        Pooled()(*[X[..., None]] * 3)
        Block(nnx.Rngs(0))(X)
    assert seen.steps == 0 and not seen.layers


def test_other_normalizers_and_threads_are_counted() -> None:
    class Sparse(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return ats.attend(x, x, x, normalizer="sparsemax")

    model = Sparse()
    with watch(model) as seen:
        model(X)
        if jax_values._CONTEXT is not None:
            thread = threading.Thread(target=lambda: nnx.jit(lambda model, x: model(x))(model, X))
            thread.start()
            thread.join()
    reasons = " ".join(why for _, why in seen.unseen)
    assert "softmax" in reasons and ("thread" in reasons or jax_values._CONTEXT is None) and not seen.layers


def test_linen_modules_have_their_paths_and_init_is_no_step() -> None:
    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for place in range(2):
                x = nn.remat(nn.MultiHeadDotProductAttention)(2, name=f"attention_{place}")(x)
            return x

    model = Encoder()
    with watch(model) as seen:
        variables = model.init(jax.random.key(0), X)
        assert seen.steps == 0
        jax.jit(jax.grad(lambda variables: model.apply(variables, X).sum()))(variables)
        model.apply(variables, X)
    assert list(seen.layers) == ["attention_0", "attention_1"] and not seen.unseen
    assert seen.steps == 2 and {row["rows"] for row in seen.rows()} == {20}


def test_two_watches_at_once() -> None:
    model, function = Model(), nnx.jit(lambda model, x: model(x))
    first, second = watch(model), watch(model, every=2)
    first.start()
    function(model, X)
    second.start()
    function(model, X)
    first.stop()
    function(model, X)
    second.stop()
    assert (first.steps, second.steps, second.sampled) == (2, 2, 1)


def test_a_watch_can_be_stopped_by_a_step_of_a_program() -> None:
    model, function = Model(), nnx.jit(lambda model, x: model(x))
    seen = watch(model, on_step=lambda step, rows: seen.stop())
    with seen:
        for _ in range(3):
            function(model, X).block_until_ready()
    with watch(model) as again:
        function(model, X)
    assert (seen.steps, len(seen.rows())) == (1, 4) == (again.steps, len(again.rows()))


def test_decoding_with_a_cache() -> None:
    layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((2, 4, 8))
    with watch(layer) as seen:
        for place in range(3):
            layer(X[:, place : place + 1])
    assert seen.steps == 3 and {row["rows"] for row in seen.rows()} == {6}
    assert seen.history("(model)", "choice_rows")[1].tolist() == [[0, 0], [2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: watch(Model(), softmax="blocks.0"), ["softmax", "PyTorch"]),
        (lambda: watch(Model(), one_pass=True), ["one_pass", "PyTorch"]),
        (lambda: watch(lambda x: x), ["torch.nn.Module", "Keras", "flax.nnx", "linen", "function"]),
    ],
)
def test_wrong_arguments_are_named(wrong: Any, words: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        wrong()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_fault_gets_the_verdict_that_it_gets_in_pytorch(fault: str, is_compiled: bool) -> None:
    layer, x = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), normal(4, 16, 8)
    for name in ("query", "key", "value"):
        getattr(layer, name).bias[...] = jnp.asarray(normal(2, 4) / 4)
    projections = {
        name: (np.array(part.kernel[...]), np.array(part.bias[...]))
        for name, part in (("query", layer.query), ("key", layer.key), ("value", layer.value))
    }
    call = nnx.jit(lambda layer, x: layer(x)) if is_compiled else lambda layer, x: layer(x)
    with watch(layer) as seen:
        for step in range(STEPS):
            if step == BREAKS_AT:
                layer.query.kernel[...] = jnp.asarray(FAULTS[fault](projections["query"][0]))
            call(layer, x)
    expected = failures_of_pytorch(fault, x, projections)
    assert failures(seen) == expected and expected[0][0] == 1 and expected[0][2] == BREAKS_AT
