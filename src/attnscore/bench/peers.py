"""The peers: what a user would write or call in place of this library, each in the form in which it is fastest.

What this module meets:
- a peer gets the same arrays, converted to its own kind before anything is timed, and the equivalent mask;
- where there are several ways to write it, the fastest one here is taken;
- a peer that is missing, or cannot do the case, raises `Unavailable` with the reason, which becomes its row.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnscore.bench.callers import called
from attnscore.bench.inputs import Inputs, Side, both_ways, ours


class Unavailable(Exception):
    """A peer that cannot run a case here: why."""


def _needs(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Unavailable(f"{package.partition('.')[0]} is not installed") from error


def _need_no(inputs: Inputs, **unwanted: bool) -> None:
    for what, is_so in unwanted.items():
        if is_so:
            raise Unavailable(f"no {what} in this peer's form of {inputs.case.score}")


def _fastest(sides: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Warm each up, then take the one with the quickest of three calls."""

    def best(side: Callable[[], Any]) -> float:
        side()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            side()
            times.append(time.perf_counter() - start)
        return min(times)

    return min(sides, key=best) if len(sides) > 1 else sides[0]


def _one(out: Any) -> tuple[Any, ...]:
    return (out,)


def _whole(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return found


def _torch_side(name: str, inputs: Inputs, forms: Sequence[Callable[[], Any]], same: bool = True) -> Side:
    if inputs.case.backward:
        return Side(name, _fastest([both_ways(form, inputs) for form in forms]), _whole, same)
    return Side(name, _fastest(forms), _one, same)


def sdpa(inputs: Inputs) -> Side:
    """``torch.nn.functional.scaled_dot_product_attention``; also beside an additive score, as the yardstick."""
    import torch

    attention, visible = torch.nn.functional.scaled_dot_product_attention, inputs.visible()
    arrays = (inputs.query, inputs.key, inputs.value)
    same = inputs.case.score == "scaled_dot"
    if visible is None:
        forms = [lambda: attention(*arrays)]
    elif inputs.case.mask == "causal":
        forms = [lambda: attention(*arrays, is_causal=True)]
    else:
        mask = torch.from_numpy(visible.copy())[None, None]
        masks = [mask, mask[:, :, :1]] if inputs.case.mask == "valid_lens" else [mask]
        forms = [_with_mask(attention, arrays, mask) for mask in masks]
    return _torch_side("sdpa", inputs, forms, same)


def _with_mask(attention: Callable[..., Any], arrays: tuple[Any, ...], mask: Any) -> Callable[[], Any]:
    return lambda: attention(*arrays, attn_mask=mask)


def _torch_forms(inputs: Inputs) -> list[Callable[..., Any]]:
    """The textbook as functions of (query, key, value, w_v): a product with w_v, or a sum that a compiler can fuse."""
    _need_no(inputs, mask=bool(inputs.case.mask))
    scale = 1 / math.sqrt(inputs.case.sizes["dim"])

    def dot(query: Any, key: Any, value: Any, w_v: Any) -> Any:
        return ((query @ key.transpose(-1, -2)) * scale).softmax(-1) @ value

    def product(query: Any, key: Any, value: Any, w_v: Any) -> Any:
        return ((query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() @ w_v).softmax(-1) @ value

    def total(query: Any, key: Any, value: Any, w_v: Any) -> Any:
        return ((query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() * w_v).sum(-1).softmax(-1) @ value

    return [product, total] if inputs.case.score == "additive" else [dot]


def _bound(form: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    return lambda: form(inputs.query, inputs.key, inputs.value, inputs.w_v)


def textbook(inputs: Inputs) -> Side:
    """The definition in PyTorch, as textbooks write it."""
    return _torch_side("textbook", inputs, [_bound(_torch_forms(inputs)[0], inputs)])


def compiled(inputs: Inputs) -> Side:
    """The same through ``torch.compile``."""
    import torch

    forms = [torch.compile(form, dynamic=False) for form in _torch_forms(inputs)]
    return _torch_side("compile", inputs, [_bound(form, inputs) for form in forms])


def xla(inputs: Inputs) -> Side:
    """The same through ``jax.jit``: XLA on the CPU."""
    library = _needs("jax")
    _need_no(inputs, mask=bool(inputs.case.mask), backward=inputs.case.backward)
    jnp, scale = library.numpy, 1 / math.sqrt(inputs.case.sizes["dim"])
    arrays = [jnp.asarray(_numpy(x)) for x in (inputs.query, inputs.key, inputs.value, inputs.w_v)]

    def pooled(scores: Any, value: Any) -> Any:
        return library.nn.softmax(scores, axis=-1) @ value

    def hidden(query: Any, key: Any) -> Any:
        return jnp.tanh(query[..., :, None, :] + key[..., None, :, :])

    forms = {
        "scaled_dot": [lambda q, k, v, w: pooled(q @ jnp.swapaxes(k, -1, -2) * scale, v)],
        "additive": [
            lambda q, k, v, w: pooled(hidden(q, k) @ w, v),
            lambda q, k, v, w: pooled((hidden(q, k) * w).sum(-1), v),
        ],
    }[inputs.case.score]
    # dot_product_attention of JAX on a CPU is the first form.
    return Side("xla", _fastest([_jitted(library, form, arrays) for form in forms]), _one)


def _jitted(library: Any, form: Callable[..., Any], arrays: Sequence[Any]) -> Callable[[], Any]:
    jitted = library.jit(form)
    return lambda: jitted(*arrays).block_until_ready()


def keops(inputs: Inputs) -> Side:
    """KeOps: any formula, compiled, in O(n) memory."""
    _needs("pykeops")
    lazy = _needs("pykeops.torch").LazyTensor
    _need_no(inputs, mask=bool(inputs.case.mask), backward=inputs.case.backward)
    query = lazy(inputs.query.unsqueeze(-2).contiguous())
    key, value = (lazy(x.unsqueeze(-3).contiguous()) for x in (inputs.key, inputs.value))
    # tanh by the exponential: KeOps has no word for it, and this form keeps one division for each hidden unit.
    total = query + key
    hidden = 1 - 2 / (1 + (2 * total).exp())
    weights = lazy(inputs.w_v.reshape(*(1,) * inputs.query.ndim, -1))
    scores = (hidden * weights).sum(-1)
    return Side("keops", lambda: scores.sumsoftmaxweight(value, dim=inputs.query.ndim - 1), _one)


def onnxruntime(inputs: Inputs) -> Side:
    """onnxruntime's fused MultiHeadAttention, in its own layout (batch, query, head * dim)."""
    runtime, onnx = _needs("onnxruntime"), _needs("onnx")
    import torch

    sizes, case = inputs.case.sizes, inputs.case
    _need_no(inputs, backward=case.backward, additive=case.score != "scaled_dot", lengths=case.mask == "valid_lens")
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    names = ("query", "key", "value")
    node = helper.make_node(
        "MultiHeadAttention", list(names), ["out"], domain="com.microsoft",
        num_heads=sizes["heads"], unidirectional=int(case.mask == "causal"),
    )  # fmt: skip
    flat = [_numpy(x).transpose(0, 2, 1, 3) for x in (inputs.query, inputs.key, inputs.value)]
    feed = {n: np.ascontiguousarray(x.reshape(*x.shape[:2], -1)) for n, x in zip(names, flat, strict=True)}
    infos = [helper.make_tensor_value_info(n, real, x.shape) for n, x in feed.items()]
    out = helper.make_tensor_value_info("out", real, feed["query"].shape)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attention", infos, [out]), opset_imports=opsets, ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shape = (sizes["batch"], sizes["queries"], sizes["heads"], sizes["dim"])

    def outputs(found: Any) -> tuple[Any, ...]:
        return (found[0].reshape(shape).transpose(0, 2, 1, 3),)

    return Side("onnxruntime", lambda: session.run(None, feed), outputs)


def numpy(inputs: Inputs) -> Side:
    """The definition in NumPy: two products and a stable softmax, in place where it can be."""
    query, key, value = inputs.query, inputs.key, inputs.value
    scale = np.float32(1 / math.sqrt(query.shape[-1]))

    def run() -> Any:
        scores = (query @ key.swapaxes(-1, -2)) * scale
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return scores @ value

    return Side("numpy", run, _one)


def jax(inputs: Inputs) -> Side:
    """``jax.nn.dot_product_attention`` inside ``jax.jit``, in its own layout (batch, query, head, dim)."""
    _need_no(inputs, mask=bool(inputs.case.mask), backward=inputs.case.backward)
    attention = _needs("jax").nn.dot_product_attention
    arrays = [x.swapaxes(1, 2).copy() for x in (inputs.query, inputs.key, inputs.value)]
    return Side("jax", called(inputs.case, attention, arrays, None), lambda out: (out.swapaxes(1, 2),))


def tensorflow(inputs: Inputs) -> Side:
    """The definition in TensorFlow's operations, as its tutorials write it; eager, or inside ``tf.function``."""
    _need_no(inputs, mask=bool(inputs.case.mask), backward=inputs.case.backward)
    tf, scale = _needs("tensorflow"), 1 / math.sqrt(inputs.case.sizes["dim"])

    def attention(query: Any, key: Any, value: Any) -> Any:
        weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * scale)
        return tf.matmul(weights, value)

    return Side("tensorflow", called(inputs.case, attention, (inputs.query, inputs.key, inputs.value), None), _one)


def keras(inputs: Inputs) -> Side:
    """``keras.ops.dot_product_attention`` on TensorFlow, in its own layout (batch, query, head, dim)."""
    _need_no(inputs, mask=bool(inputs.case.mask), backward=inputs.case.backward)
    library, tf = _needs("keras"), _needs("tensorflow")
    if library.config.backend() != "tensorflow":
        raise Unavailable(f"Keras runs on {library.config.backend()} here")
    arrays = [tf.transpose(x, (0, 2, 1, 3)) for x in (inputs.query, inputs.key, inputs.value)]
    run = called(inputs.case, library.ops.dot_product_attention, arrays, None)
    return Side("keras", run, lambda out: (tf.transpose(out, (0, 2, 1, 3)),))


def without(inputs: Inputs) -> Side:
    """The same call of ours without what the case is about: statistics, dropout or a mask."""
    side = ours(inputs, plain=True)
    return Side("without", side.run, side.outputs, same="dropout" not in inputs.case.options)


def reading(inputs: Inputs) -> Side:
    """Reading every key and value once, as quickly as PyTorch's sum does: what a memory-bound call is up against.

    No peer but a limit, measured in the same rounds: the memory of a shared machine changes from minute to minute.
    """
    import torch

    totals = [torch.empty(()) for _ in range(2)]

    def run() -> Any:
        torch.sum(inputs.key, dim=(), out=totals[0])
        return torch.sum(inputs.value, dim=(), out=totals[1])

    return Side("reading", run, _one, same=False)


def _numpy(x: Any) -> Any:
    return x.detach().numpy() if hasattr(x, "detach") else x


PEERS: dict[str, Callable[[Inputs], Side]] = {
    "sdpa": sdpa, "textbook": textbook, "compile": compiled, "xla": xla, "keops": keops, "onnxruntime": onnxruntime,
    "numpy": numpy, "jax": jax, "tensorflow": tensorflow, "keras": keras, "without": without,
    "reading": reading,
}  # fmt: skip

TITLES = {
    "sdpa": "torch scaled_dot_product_attention",
    "textbook": "the textbook in PyTorch",
    "compile": "the textbook, torch.compile",
    "xla": "the textbook, XLA (jax.jit)",
    "keops": "KeOps",
    "onnxruntime": "onnxruntime MultiHeadAttention",
    "numpy": "the textbook in NumPy",
    "jax": "jax.nn.dot_product_attention",
    "tensorflow": "the textbook in TensorFlow",
    "keras": "keras.ops.dot_product_attention",
    "without": "the same call without it",
    "reading": "reading keys and values once",
}

YARDSTICKS = ("without", "reading")
"""What is no other way to compute the case."""
