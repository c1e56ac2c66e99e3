"""The lines of *Dive into Deep Learning* (chapter 11), run with one changed import, in each framework."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from test_mxnet import PYTHON as MXNET
from test_mxnet import VARIABLES as MXNET_VARIABLES

TORCH = """
import torch
from attnscore.compat.d2l import torch as d2l

print(d2l.masked_softmax(torch.rand(2, 2, 4), torch.tensor([2, 3]))[..., 2:].ne(0).tolist())
queries, keys = d2l.normal(0, 1, (2, 1, 20)), d2l.normal(0, 1, (2, 10, 2))
values = torch.arange(40, dtype=torch.float32).reshape(1, 10, 4).repeat(2, 1, 1)
valid_lens = d2l.tensor([2, 6])
for attention in (d2l.AdditiveAttention(num_hiddens=8, dropout=0.1), d2l.AdditiveAttention(2, 20, 8, 0.1)):
    attention.eval()
    d2l.check_shape(attention(queries, keys, values, valid_lens), (2, 1, 4))
d2l.show_heatmaps(d2l.reshape(attention.attention_weights, (1, 1, 2, 10)), xlabel="Keys", ylabel="Queries")
attention = d2l.DotProductAttention(dropout=0.5).eval()
print(attention(d2l.ones((2, 1, 2)), d2l.ones((2, 10, 2)), values, valid_lens).round().tolist())
X, Y, lens = d2l.ones((2, 4, 100)), d2l.ones((2, 6, 100)), d2l.tensor([3, 2])
for attention in (d2l.MultiHeadAttention(100, 5, 0.5), d2l.MultiHeadAttention(100, 100, 100, 100, 5, 0.5)):
    d2l.check_shape(attention.eval()(X, Y, Y, lens), (2, 4, 100))
print(d2l.sequence_mask(d2l.tensor([[1, 2, 3], [4, 5, 6]]), d2l.tensor([1, 2])).tolist())
"""
TENSORFLOW = """
import tensorflow as tf
from attnscore.compat.d2l import tensorflow as d2l

print((d2l.masked_softmax(tf.random.uniform(shape=(2, 2, 4)), tf.constant([2, 3])).numpy()[..., 2:] != 0).tolist())
queries, keys = d2l.normal(shape=(2, 1, 20)), d2l.normal(shape=(2, 10, 2))
values = tf.repeat(tf.reshape(tf.range(40, dtype=tf.float32), shape=(1, 10, 4)), repeats=2, axis=0)
valid_lens = d2l.tensor([2, 6])
for attention in (d2l.AdditiveAttention(num_hiddens=8, dropout=0.1), d2l.AdditiveAttention(2, 20, 8, 0.1)):
    d2l.check_shape(attention(queries, keys, values, valid_lens, training=False), (2, 1, 4))
d2l.show_heatmaps(d2l.reshape(attention.attention_weights, (1, 1, 2, 10)), xlabel="Keys", ylabel="Queries")
attention = d2l.DotProductAttention(dropout=0.5)
out = attention(d2l.ones((2, 1, 2)), d2l.ones((2, 10, 2)), values, valid_lens, training=False)
print(out.numpy().round().tolist())
X, Y, lens = d2l.ones((2, 4, 100)), d2l.ones((2, 6, 100)), d2l.tensor([3, 2])
for attention in (d2l.MultiHeadAttention(100, 5, 0.5), d2l.MultiHeadAttention(100, 100, 100, 100, 5, 0.5)):
    d2l.check_shape(attention(X, Y, Y, lens, training=False), (2, 4, 100))
print(d2l.sequence_mask(d2l.tensor([[1, 2, 3], [4, 5, 6]]), d2l.tensor([1, 2])).numpy().tolist())
"""
MXNET_LINES = """
from mxnet import np, npx
from attnscore.compat.d2l import mxnet as d2l

npx.set_np()
print((d2l.masked_softmax(np.random.uniform(size=(2, 2, 4)), d2l.tensor([2, 3])).asnumpy()[..., 2:] != 0).tolist())
queries, keys = d2l.normal(0, 1, (2, 1, 20)), d2l.normal(0, 1, (2, 10, 2))
values = np.arange(40).reshape(1, 10, 4).repeat(2, axis=0)
valid_lens = d2l.tensor([2, 6])
for attention in (d2l.AdditiveAttention(num_hiddens=8, dropout=0.1), d2l.AdditiveAttention(2, 20, 8, 0.1)):
    attention.initialize()
    d2l.check_shape(attention(queries, keys, values, valid_lens), (2, 1, 4))
attention = d2l.DotProductAttention(dropout=0.5)
attention.initialize()
print(attention(d2l.ones((2, 1, 2)), d2l.ones((2, 10, 2)), values, valid_lens).asnumpy().round().tolist())
X, Y, lens = d2l.ones((2, 4, 100)), d2l.ones((2, 6, 100)), d2l.tensor([3, 2])
for attention in (d2l.MultiHeadAttention(100, 5, 0.5), d2l.MultiHeadAttention(100, 100, 100, 100, 5, 0.5)):
    attention.initialize()
    d2l.check_shape(attention(X, Y, Y, lens), (2, 4, 100))
print(d2l.sequence_mask(d2l.tensor([[1, 2, 3], [4, 5, 6]]), d2l.tensor([1, 2])).astype(int).asnumpy().tolist())
"""
JAX = """
import jax
from jax import numpy as jnp
from attnscore.compat.d2l import jax as d2l

weights = d2l.masked_softmax(jax.random.uniform(d2l.get_key(), (2, 2, 4)), jnp.array([2, 3]))
print((weights[..., 2:] != 0).tolist())
queries, keys = d2l.normal(d2l.get_key(), (2, 1, 20)), d2l.normal(d2l.get_key(), (2, 10, 2))
values = d2l.arange(40, dtype=jnp.float32).reshape(1, 10, 4).repeat(2, axis=0)
valid_lens = d2l.tensor([2, 6])
attention = d2l.AdditiveAttention(num_hiddens=8, dropout=0.1)
(out, weights), params = attention.init_with_output(d2l.get_key(), queries, keys, values, valid_lens)
d2l.check_shape(out, (2, 1, 4))
d2l.check_shape(params["params"]["w_v"]["kernel"], (8, 1))
train = attention.apply(params, queries, keys, values, valid_lens, training=True, rngs={"dropout": d2l.get_key()})[0]
d2l.check_shape(train, (2, 1, 4))
d2l.show_heatmaps(d2l.reshape(weights, (1, 1, 2, 10)), xlabel="Keys", ylabel="Queries")
attention = d2l.DotProductAttention(dropout=0.5)
(out, weights), params = attention.init_with_output(
    d2l.get_key(), d2l.ones((2, 1, 2)), d2l.ones((2, 10, 2)), values, valid_lens)
print(out.round().tolist())
X, Y, lens = d2l.ones((2, 4, 100)), d2l.ones((2, 6, 100)), d2l.tensor([3, 2])
out, weights = d2l.MultiHeadAttention(100, 5, 0.5).init_with_output(d2l.get_key(), X, Y, Y, lens, training=False)[0]
d2l.check_shape(out, (2, 4, 100))
print(d2l.sequence_mask(d2l.tensor([[1, 2, 3], [4, 5, 6]]), d2l.tensor([1, 2])).tolist())
"""
PRINTED = """\
[[[False, False], [False, False]], [[True, False], [True, False]]]
[[[2.0, 3.0, 4.0, 5.0]], [[10.0, 11.0, 12.0, 13.0]]]
[[1, 0, 0], [4, 5, 0]]
"""


def output_of(python: str | Path, lines: str, tmp_path: Path) -> str:
    (tmp_path / "chapter.py").write_text(lines, encoding="utf-8")
    if Path(python) == MXNET and sys.version_info >= (3, 12):
        pytest.skip("MXNet needs NumPy below 1.24, which is not built for this Python")
    environment = MXNET_VARIABLES if Path(python) == MXNET else None
    done = subprocess.run(
        [python, "chapter.py"], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("python", "lines"),
    [
        pytest.param(sys.executable, TORCH, id="torch"),
        pytest.param(sys.executable, TENSORFLOW, id="tensorflow"),
        pytest.param(sys.executable, JAX, id="jax"),
        pytest.param(MXNET, MXNET_LINES, id="mxnet"),
    ],
)
def test_the_lines_of_the_book_run(
    python: str | Path, lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert output_of(python, lines, tmp_path) == PRINTED


def test_the_arguments_of_both_editions() -> None:
    from attnscore.compat.d2l import torch as d2l

    newer = d2l.AdditiveAttention(8, 0.1)
    assert (newer.num_hiddens, newer.dropout, newer.key_size) == (8, 0.1, None)
    for older in (
        d2l.AdditiveAttention(2, 20, 8, 0.1),
        d2l.AdditiveAttention(2, 20, 8, dropout=0.1),
        d2l.AdditiveAttention(2, 20, num_hiddens=8, dropout=0.1),
    ):
        assert (older.key_size, older.query_size, older.num_hiddens, older.dropout) == (2, 20, 8, 0.1)
    for multi_head in (d2l.MultiHeadAttention(8, 2, 0.1, True), d2l.MultiHeadAttention(8, 2, 0.1, use_bias=True)):
        assert multi_head.W_o.bias is not None
    multi_head = d2l.MultiHeadAttention(8, 8, 8, 8, num_heads=2, dropout=0.1)
    assert (multi_head.W_q.weight.shape, multi_head.num_heads) == ((8, 8), 2)
    with pytest.raises(TypeError, match="misses the required argument 'num_hiddens'"):
        d2l.AdditiveAttention(8, 0.1, dropout=0.1)
    with pytest.raises(TypeError, match="at most the arguments key_size"):
        d2l.AdditiveAttention(1, 2, 3, 4, 5)


def test_layers_are_classes_with_the_books_inner_attention() -> None:
    from attnscore.compat.d2l import torch as d2l

    class Changed(d2l.MultiHeadAttention):
        pass

    layer, x = Changed(8, 2, 0.0), torch.ones(1, 3, 8)
    assert isinstance(layer, d2l.MultiHeadAttention)
    layer(x, x, x)
    assert layer.attention.attention_weights.shape == (1, 2, 3, 3)
    with pytest.raises(AttributeError, match="attentions"):
        _ = layer.attentions
    layer.attention = d2l.DotProductAttention(0.0)
    assert layer.attention(x, x, x).shape == (1, 3, 8)


def test_a_keras_model_with_a_layer_of_the_book_can_be_saved(tmp_path: Path) -> None:
    code = """
import sys
import keras, numpy as np
from attnscore.compat.d2l import tensorflow as d2l
x = keras.Input((4, 6))
model = keras.Model(x, d2l.MultiHeadAttention(8, 2, 0.5)(x, x, x))
model.save(sys.argv[1])
one = np.ones((1, 4, 6), "float32")
assert np.array_equal(model(one), keras.models.load_model(sys.argv[1])(one))
"""
    environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.keras"], check=True, env=environment)


@pytest.mark.parametrize("num_heads", [None, 2])
def test_numbers_of_windows_are_added_to_the_scores_in_jax(num_heads: int | None) -> None:
    """Of 6 sequences the windows take turns, 3 of them; heads of a sequence follow each other."""
    import jax.numpy as jnp

    from attnscore.compat.d2l import jax as d2l

    rng = np.random.default_rng(0)
    heads = num_heads or 1
    q, k, v = rng.standard_normal((3, 6 * heads, 4, 5), np.float32)
    window_mask = rng.standard_normal((3, 4, 4), np.float32)
    _, weights = d2l.DotProductAttention(0.0, num_heads).apply({}, *map(jnp.asarray, (q, k, v)), None, window_mask)
    scores = (q @ k.swapaxes(1, 2) / 5**0.5).reshape(2, 3, heads, 4, 4) + window_mask[:, None]
    exps = np.exp(scores - scores.max(-1, keepdims=True)).reshape(6 * heads, 4, 4)
    np.testing.assert_allclose(weights, exps / exps.sum(-1, keepdims=True), rtol=0, atol=1e-6)


def test_constructors_can_be_pickled() -> None:
    from attnscore.compat.d2l import torch as d2l

    for constructor in (d2l.AdditiveAttention, d2l.MultiHeadAttention):
        assert pickle.loads(pickle.dumps(constructor)) is constructor


def test_wrong_shapes_are_told() -> None:
    from attnscore.compat.d2l.shared import check_shape

    with pytest.raises(AssertionError, match=r"tensor's shape \(2, 3\) != expected shape \(3, 2\)"):
        check_shape(np.ones((2, 3)), (3, 2))
