"""What attnscore does in each framework, in short calls: run with an old or a new release of it.

``python tests/version_checks.py [framework ...]`` checks those frameworks, or all that are installed, against NumPy. It
needs attnscore and the frameworks alone. The exit status is the number of checks that failed.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import attnscore as ats

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3)))
LENS = np.array([3, 7])
MASKS = {
    "lengths": ats.ValidLens(LENS),
    "causal": ats.Causal("bottom_right"),
    "written": ats.MaskFunction(lambda batch, head, query, key: (query + key) % 3 > 0),
    "array": ats.Dense(RNG.random((2, 1, 5, 7)) < 0.5),
}
SCORES = ("scaled_dot", "gaussian", "cosine", ats.SoftCap("scaled_dot", 2.0))
CHECKS: dict[str, list[Callable[[], None]]] = {}


def check(framework: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS.setdefault(framework, []).append(function)
        return function

    return register


def close(x: Any, expected: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(x), np.asarray(expected), atol=tolerance, rtol=tolerance)


def reference(**options: Any) -> np.ndarray:
    return ats.attend(Q, K, V, **options)


def gradients(**options: Any) -> tuple[Any, Any, Any]:
    out, pullback = ats.attend_vjp(Q, K, V, **options)
    found = pullback(np.ones_like(out))
    return found.query, found.key, found.value


def every_call(convert: Callable[[Any], Any], differentiate: Callable[..., tuple[Any, ...]]) -> None:
    """Compare outputs and gradients of `attend` with NumPy's, for some scores and all masks."""
    arrays = [convert(x) for x in (Q, K, V)]
    for options in [{"score": score} for score in SCORES] + [{"mask": mask} for mask in MASKS.values()]:
        for _ in range(2):  # the second call has a plan
            close(ats.attend(*arrays, **options), reference(**options))
            for got, expected in zip(differentiate(arrays, options), gradients(**options), strict=True):
                close(got, expected, 1e-4)
    *_, stats = ats.attend(*arrays, return_weights=True, return_stats=True)
    close(stats.entropy, reference(return_stats=True)[1].entropy)


def cached_steps(arrays: Any, **options: Any) -> None:
    """Compare one step after another, by a cache, with the whole sequence."""
    q, k, v = arrays
    cache = ats.KeyValueCache(**options)
    for step in range(5):
        cache = cache.append(k[:, :, step : step + 1], v[:, :, step : step + 1])
        out = cache.attend(q[:, :, step : step + 1])
        close(out, ats.attend(Q[:, :, step : step + 1], K[:, :, : step + 1], V[:, :, : step + 1]))


# ---------------------------------------------------------------- NumPy, Matplotlib


@check("numpy")
def numpy_calls() -> None:
    close(reference(), ats.attend(Q, K, V, kernel="dense"))
    close(reference(mask=MASKS["lengths"]), ats.attend(Q, K, V, mask=MASKS["lengths"], kernel="dense"))
    cached_steps((Q, K, V))


@check("matplotlib")
def heatmaps() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from attnscore.plotting import show_heatmaps

    figure = show_heatmaps(ats.attention_weights(Q, K), xlabel="Keys", ylabel="Queries")
    getattr(figure, "figure", figure).savefig(io.BytesIO(), format="png")


# ---------------------------------------------------------------- PyTorch


def tensors(grad: bool = False) -> list[Any]:
    import torch

    return [torch.tensor(x, requires_grad=grad) for x in (Q, K, V)]


@check("torch")
def torch_calls() -> None:
    import torch

    def differentiate(arrays: Any, options: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in arrays]
        return torch.autograd.grad(ats.attend(*leaves, **options).sum(), leaves)

    every_call(torch.tensor, differentiate)


@check("torch")
def torch_second_derivatives() -> None:
    import torch

    leaves = [x.double().detach().requires_grad_() for x in tensors()]
    small = [x[:1, :1, :3].detach().requires_grad_() for x in leaves]
    assert torch.autograd.gradgradcheck(lambda *x: ats.attend(*x, mask=ats.Causal("bottom_right")), small)


@check("torch")
def torch_func() -> None:
    import torch

    close(torch.func.vmap(ats.attend)(*tensors()), reference())
    close(torch.func.grad(lambda q: ats.attend(q, *tensors()[1:]).sum())(tensors()[0]), gradients()[0], 1e-4)
    tangents = [torch.ones_like(x) for x in tensors()]
    out, tangent = torch.func.jvp(ats.attend, tuple(tensors()), tuple(tangents))
    close(out, reference())
    assert tangent.abs().sum() > 0


@check("torch")
def torch_autocast() -> None:
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        out = ats.attend(*tensors())
    assert out.dtype == torch.bfloat16
    close(out.float(), reference(), 0.05)


@check("torch")
def torch_layers() -> None:
    import torch

    from attnscore.layers import torch as layers

    q, k, v = (x[:, 0].detach().requires_grad_() for x in tensors())
    for layer in (
        layers.DotProductAttention(),
        layers.AdditiveAttention(4, query_size=4, key_size=4),
        layers.BilinearAttention(query_size=4, key_size=4),
        layers.GaussianAttention(),
        layers.MultiHeadAttention(4, 2, query_size=4, key_size=4, value_size=3),
    ):
        for _ in range(2):
            layer(q, k, v, torch.tensor(LENS)).sum().backward()
        assert all(x.grad is not None for x in layer.parameters())
        assert layer.attention_weights.shape[-2:] == (5, 7)


def compiled(function: Callable[..., Any], *arguments: Any, fullgraph: bool = True) -> Any:
    import torch

    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)(*arguments)


@check("torch")
def torch_compile() -> None:
    import torch

    leaves = tensors(grad=True)
    out = compiled(lambda q, k, v, n: ats.attend(q, k, v, valid_lens=n), *leaves, torch.tensor(LENS))
    close(out.detach(), reference(mask=MASKS["lengths"]))
    for got, expected in zip(torch.autograd.grad(out.sum(), leaves), gradients(mask=MASKS["lengths"]), strict=True):
        close(got, expected, 1e-4)


@check("torch")
def torch_compiled_layer() -> None:
    from attnscore.layers.torch import MultiHeadAttention

    layer = MultiHeadAttention(4, 2, query_size=4, key_size=4, value_size=3)
    inputs = [x[:, 0] for x in tensors()]
    close(compiled(layer, *inputs).detach(), layer(*inputs).detach())


@check("torch")
def torch_compiled_functions() -> None:
    import torch

    scores = torch.tensor(Q)
    close(compiled(ats.masked_softmax, scores, fullgraph=False), ats.masked_softmax(Q))
    close(compiled(ats.attention_weights, *tensors()[:2], fullgraph=False), ats.attention_weights(Q, K))


@check("torch")
def torch_export() -> None:
    import torch

    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return ats.attend(q, k, v, mask=ats.Causal("bottom_right"))

    close(torch.export.export(Model(), tuple(tensors())).module()(*tensors()), reference(mask=MASKS["causal"]))


@check("torch")
def torch_trace() -> None:
    import torch

    close(torch.jit.trace(ats.attend, tensors(), check_trace=False)(*tensors()), reference())


@check("torch")
def torch_watch() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    from attnscore.diagnostics import watch

    model = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    for is_training in (True, False):
        with watch(model.train(is_training)) as seen, torch.set_grad_enabled(is_training):
            out = checkpoint(model, tensors()[0][:, 0], use_reentrant=False)
            if is_training:
                out.sum().backward()
        assert str(seen).startswith("1 attention call"), seen


@check("torch")
def torch_cache() -> None:
    cached_steps(tensors())


@check("torch")
def torch_fake_tensors() -> None:

    assert ats.attend(*(x.to("meta") for x in tensors())).shape == (2, 2, 5, 3)


@check("transformers")
def transformers_model() -> None:
    import torch
    import transformers

    from attnscore.integrations.transformers import register

    torch.manual_seed(0)
    settings = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, **heads)).eval()
    tokens, padding = torch.arange(14).reshape(2, 7), torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    with torch.no_grad():
        expected = model(tokens, attention_mask=padding).logits
        model.set_attn_implementation(register())
        out = model(tokens, attention_mask=padding).logits
        model.generate(tokens, attention_mask=padding, max_new_tokens=3)
    close(out[padding.bool()], expected[padding.bool()], 1e-4)


# ---------------------------------------------------------------- JAX, Flax


@check("jax")
def jax_calls() -> None:
    import jax
    import jax.numpy as jnp

    def differentiate(arrays: Any, options: Any) -> Any:
        return jax.grad(lambda *x: ats.attend(*x, **options).sum(), argnums=(0, 1, 2))(*arrays)

    every_call(jnp.asarray, differentiate)


@check("jax")
def jax_transforms() -> None:
    import jax
    import jax.numpy as jnp

    arrays = [jnp.asarray(x) for x in (Q, K, V)]
    close(jax.jit(lambda *x: ats.attend(*x, valid_lens=jnp.asarray(LENS)))(*arrays), reference(mask=MASKS["lengths"]))
    gradient = jax.jit(jax.grad(lambda *x: ats.attend(*x, mask=ats.Causal("bottom_right")).sum()))
    close(gradient(*arrays), gradients(mask=MASKS["causal"])[0], 1e-4)
    close(jax.vmap(ats.attend)(*arrays), reference())
    close(jax.jvp(ats.attend, arrays, arrays)[0], reference())
    jax.hessian(lambda q: ats.attend(q, *arrays[1:]).sum())(arrays[0])
    exported = jax.export.export(jax.jit(lambda *x: ats.attend(*x, kernel="streaming")))(*arrays)
    close(exported.call(*arrays), reference())


@check("jax")
def jax_cache() -> None:
    import jax.numpy as jnp

    cached_steps([jnp.asarray(x) for x in (Q, K, V)], capacity=8)


@check("flax")
def flax_layers() -> None:
    import jax.numpy as jnp
    from flax import nnx

    from attnscore.layers import flax as layers

    q, k, v = (jnp.asarray(x[:, 0]) for x in (Q, K, V))
    sizes = {"query_size": 4, "key_size": 4, "rngs": nnx.Rngs(0)}
    for layer in (
        layers.DotProductAttention(),
        layers.AdditiveAttention(4, **sizes),
        layers.BilinearAttention(**sizes),
        layers.GaussianAttention(),
        layers.MultiHeadAttention(4, 2, value_size=3, **sizes),
    ):
        out, grads = nnx.value_and_grad(lambda layer: layer(q, k, v, jnp.asarray(LENS)).sum())(layer)
        assert np.isfinite(out) and grads is not None
        close(nnx.jit(lambda layer: layer(q, k, v))(layer), layer(q, k, v))
        assert layer.attention_weights.shape[-2:] == (5, 7)


# ---------------------------------------------------------------- TensorFlow, Keras


@check("tensorflow")
def tensorflow_calls() -> None:
    import tensorflow as tf

    def differentiate(arrays: Any, options: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = tf.reduce_sum(ats.attend(*arrays, **options))
        return tape.gradient(out, arrays)

    every_call(tf.constant, differentiate)


@check("tensorflow")
def tensorflow_graphs() -> None:
    import tensorflow as tf

    arrays = [tf.constant(x) for x in (Q, K, V)]
    for xla in (False, True):
        call = tf.function(lambda *x: ats.attend(*x, mask=ats.Causal("bottom_right")), jit_compile=xla)
        close(call(*arrays), reference(mask=MASKS["causal"]))
    with tf.GradientTape() as outer:
        outer.watch(arrays[0])
        with tf.GradientTape() as inner:
            inner.watch(arrays[0])
            out = tf.reduce_sum(ats.attend(*arrays) ** 2)
        gradient = inner.gradient(out, arrays[0])
    assert outer.gradient(gradient, arrays[0]) is not None
    with tf.autodiff.ForwardAccumulator(arrays[0], tf.ones_like(arrays[0])) as forward:
        out = ats.attend(*arrays)
    assert forward.jvp(out) is not None


@check("tensorflow")
def tensorflow_cache() -> None:
    import tensorflow as tf

    cached_steps([tf.constant(x) for x in (Q, K, V)], capacity=8)


@check("keras")
def keras_layers() -> None:
    import keras

    from attnscore.layers import keras as layers

    q, k, v = (keras.ops.convert_to_tensor(x[:, 0]) for x in (Q, K, V))
    for layer in (
        layers.DotProductAttention(),
        layers.AdditiveAttention(4),
        layers.BilinearAttention(),
        layers.GaussianAttention(),
        layers.MultiHeadAttention(4, 2),
    ):
        assert layer(q, k, v, valid_lens=LENS).shape[:2] == (2, 5)
        assert layer.attention_weights.shape[-2:] == (5, 7)
    inputs = [keras.Input(x.shape[1:]) for x in (q, k, v)]
    model = keras.Model(inputs, layers.MultiHeadAttention(4, 2)(*inputs))
    model.compile("sgd", "mse")
    model.fit([q, k, v], np.zeros((2, 5, 4)), verbose=0)


# ---------------------------------------------------------------- the script


def main(frameworks: list[str]) -> int:
    failed = 0
    for framework, checks in CHECKS.items():
        if framework not in frameworks:
            continue
        print(framework, importlib.import_module(framework).__version__, flush=True)
        for function in checks:
            try:
                function()
                print(f"  {function.__name__:<32} ok", flush=True)
            except Exception as error:  # whatever it is, the others run too
                failed += 1
                print(f"  {function.__name__:<32} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if os.environ.get("TRACEBACK"):
                    traceback.print_exc()
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    raise SystemExit(main(sys.argv[1:] or [name for name in CHECKS if importlib.util.find_spec(name)]))
