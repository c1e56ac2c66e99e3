"""Baselines: code that a user would write or call in place of this library, each in its fastest form.

- A baseline gets the same arrays, converted before anything is timed, and the equivalent mask. A case names only
  baselines that can compute it.
- Where there are several ways to write it, the fastest one on this machine is taken.
- A baseline that is missing or cannot do the case raises `Unavailable` with the reason, which becomes its row.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attnscore as ats
from bench import layers
from bench.formulas import Scores, formulas, ops
from bench.inputs import Inputs, Side, as_tuple, caller, ours

_CHOICE = 0.003  # seconds, for which a short call is tried


class Unavailable(Exception):
    """Why a baseline cannot run a case on this machine."""


@dataclass(frozen=True)
class Baseline:
    """Title of a baseline in reports, and the function that builds its side of a case or raises `Unavailable`."""

    title: str
    build: Callable[[Inputs], Side]
    is_alternative: bool = True
    """It computes the case in another way; a yardstick computes something else."""


def _needs(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Unavailable(f"{package.partition('.')[0]} is not installed") from error


def fastest(call: Callable[[], Any], rounds: int = 3, seconds: float = 0.0) -> float:
    """Return the least seconds of a warm call, over at least that many rounds and seconds."""
    call()
    times: list[float] = []
    while len(times) < rounds or (sum(times) < seconds and len(times) < 100):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _fastest(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    return min(calls, key=functools.partial(fastest, seconds=_CHOICE)) if len(calls) > 1 else calls[0]


def sdpa(inputs: Inputs) -> Side:
    """``torch.nn.functional.scaled_dot_product_attention``; a yardstick where the score is another one."""
    import torch

    attention, allowed = torch.nn.functional.scaled_dot_product_attention, inputs.allowed()
    if inputs.case.mask == "causal":
        options: list[dict[str, Any]] = [{"is_causal": True}]
    elif allowed is None:
        options = [{}]
    else:
        mask = torch.from_numpy(allowed.copy())[None, None]
        masks = [mask, mask[:, :, :1]] if inputs.case.mask == "valid_lens" else [mask]
        options = [{"attn_mask": mask} for mask in masks]

    def form(options: dict[str, Any]) -> Callable[..., Any]:
        return lambda query, key, value, parameter=None: attention(query, key, value, **options)

    forms = [caller(inputs, form(each) if each or inputs.case.has_parameter else attention) for each in options]
    return Side(_fastest(forms), same=inputs.case.score == "scaled_dot")


def sdpa_padded(inputs: Inputs) -> Side:
    """The same function of a padded batch with the lengths of its keys."""
    import torch

    lengths = np.array(inputs.case.packed_lengths())
    cu = np.cumsum([0, *lengths])

    def padded(x: Any) -> Any:
        # (1, head, total, dim) to (sequence, head, longest, dim)
        found = ats.unpack_padded(x.detach()[0].transpose(0, 1), cu).transpose(1, 2).contiguous()
        return found.requires_grad_(x.requires_grad)

    def packed(x: Any) -> Any:
        return ats.pack_padded(x.transpose(1, 2), lengths)[0].transpose(0, 1)[None]

    names = ("query", "key", "value", "grad")
    batch = replace(inputs, **{name: padded(getattr(inputs, name)) for name in names})
    mask = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])[:, None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    run = caller(batch, lambda query, key, value: attention(query, key, value, attn_mask=mask))
    return Side(run, outputs=lambda found: tuple(map(packed, as_tuple(found))))


def _forms(inputs: Inputs) -> list[Callable[..., Any]]:
    """The formulas in the caller's framework as functions of (query, key, value[, parameter])."""
    case = inputs.case
    its = ops(case.framework)
    positions = its.arange(case.sizes["keys"])

    def form(scores: Scores) -> Callable[..., Any]:
        def pooled(query: Any, key: Any, value: Any, parameter: Any = inputs.parameter, *, lens: Any = None) -> Any:
            weights = its.weights(scores(query, key, parameter), lens, positions)
            out = weights @ value
            return (out, weights) if case.weights else out

        return pooled

    return [form(scores) for scores in formulas(case.score, case.sizes["dim"], its)]


def formula(inputs: Inputs) -> Side:
    """The fastest formula in the caller's framework; for a layer in a layer with the same projections."""
    if inputs.case.layer:
        sides = [layers.side(inputs, layer) for layer in layers.of_formulas(inputs)]
    else:
        sides = [Side(caller(inputs, form)) for form in _forms(inputs)]
    fastest = _fastest([side.run for side in sides])
    return next(side for side in sides if side.run is fastest)


def sdpa_blocks(inputs: Inputs) -> Side:
    """The same function on blocks of a window's width: each block of queries attends to two blocks of keys."""
    import torch

    attention, pad = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.pad
    width, (heads, queries, dim) = inputs.case.sizes["visible"], inputs.query.shape[1:]
    behind = -queries % width
    i, j, first = torch.arange(width)[:, None], torch.arange(2 * width), torch.arange(0, queries, width)
    # Of the two blocks query i attends to the `width` keys that end at i + width; the first block has none before it.
    mask = ((j > i) & (j <= i + width) & (first[:, None, None] + j >= width))[:, None]

    def windows(x: Any) -> Any:
        """(1, head, key, dim) to (block, head, 2 width, dim), as views of the padded array."""
        return pad(x, (0, 0, width, behind))[0].unfold(1, 2 * width, width).permute(1, 0, 3, 2)

    def run(query: Any, key: Any, value: Any) -> Any:
        blocks = pad(query, (0, 0, 0, behind)).reshape(heads, -1, width, dim).transpose(0, 1)
        out = attention(blocks, windows(key), windows(value), attn_mask=mask)
        return out.transpose(0, 1).reshape(1, heads, -1, dim)[:, :, :queries]

    return Side(caller(inputs, run))


def flex(inputs: Inputs) -> Side:
    """FlexAttention, which TorchInductor compiles with a C++ compiler, on the blocks that a window leaves."""
    import torch

    library, sizes = _needs("torch.nn.attention.flex_attention"), inputs.case.sizes
    width, lengths = sizes["visible"], (sizes["queries"], sizes["keys"])
    # The mask is known before anything is timed, as for us.
    blocks = library.create_block_mask(
        lambda batch, head, i, j: (j <= i) & (j > i - width), None, None, *lengths, device="cpu"
    )
    compiled_flex = torch.compile(library.flex_attention, dynamic=False)
    return Side(caller(inputs, functools.partial(compiled_flex, block_mask=blocks)))


def naive(inputs: Inputs) -> Side:
    """The definition in PyTorch."""
    return Side(caller(inputs, _forms(inputs)[0]))


def compiled(inputs: Inputs) -> Side:
    """The definition through ``torch.compile``."""
    import torch

    return Side(_fastest([caller(inputs, torch.compile(form, dynamic=False)) for form in _forms(inputs)]))


def xla(inputs: Inputs) -> Side:
    """The definition through ``jax.jit``: XLA on the CPU."""
    jnp = _needs("jax").numpy
    case = replace(inputs.case, framework="jax", graph=True)
    names = ("query", "key", "value", "parameter")
    converted = {name: jnp.asarray(_numpy(getattr(inputs, name))) for name in names}
    return formula(replace(inputs, case=case, **converted))


def keops(inputs: Inputs) -> Side:
    """KeOps: any formula, compiled, in O(n) memory."""
    _needs("pykeops")
    lazy = _needs("pykeops.torch").LazyTensor
    query = lazy(inputs.query.unsqueeze(-2).contiguous())
    key, value = (lazy(x.unsqueeze(-3).contiguous()) for x in (inputs.key, inputs.value))
    # tanh by the exponential: KeOps has no such function, and this form keeps one division for each hidden unit.
    activations = 1 - 2 / (1 + (2 * (query + key)).exp())
    weights = lazy(inputs.parameter.reshape(*(1,) * inputs.query.ndim, -1))
    scores = (activations * weights).sum(-1)
    return Side(lambda: scores.sumsoftmaxweight(value, dim=inputs.query.ndim - 1))


def onnxruntime(inputs: Inputs) -> Side:
    """onnxruntime's fused MultiHeadAttention, in its own layout (batch, query, head * dim)."""
    runtime, onnx = _needs("onnxruntime"), _needs("onnx")
    import torch

    sizes = inputs.case.sizes
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    names = ("query", "key", "value")
    node = helper.make_node(
        "MultiHeadAttention", list(names), ["out"], domain="com.microsoft",
        num_heads=sizes["heads"], unidirectional=int(inputs.case.mask == "causal"),
    )  # fmt: skip
    flat = [_numpy(x).transpose(0, 2, 1, 3) for x in inputs.arrays]
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

    return Side(lambda: session.run(None, feed), outputs)


def jax(inputs: Inputs) -> Side:
    """``jax.nn.dot_product_attention`` inside ``jax.jit``, in its own layout (batch, query, head, dim)."""
    attention = _needs("jax").nn.dot_product_attention
    arrays = [x.swapaxes(1, 2).copy() for x in inputs.arrays]
    return Side(caller(inputs, attention, arrays), lambda out: (out.swapaxes(1, 2),))


def _keras() -> Any:
    library = _needs("keras")
    if library.config.backend() != "tensorflow":
        raise Unavailable(f"Keras runs on {library.config.backend()} here")
    return library


def keras(inputs: Inputs) -> Side:
    """``keras.ops.dot_product_attention`` on TensorFlow, in its own layout (batch, query, head, dim)."""
    library, tf = _keras(), _needs("tensorflow")
    arrays = [tf.transpose(x, (0, 2, 1, 3)) for x in inputs.arrays]
    run = caller(inputs, library.ops.dot_product_attention, arrays)
    return Side(run, lambda out: (tf.transpose(out, (0, 2, 1, 3)),))


def keras_layer(inputs: Inputs) -> Side:
    """``keras.layers.Attention`` and ``AdditiveAttention``, with projections before the latter."""
    _keras()
    if inputs.case.score not in ("scaled_dot", "additive"):
        raise Unavailable(f"Keras has no {inputs.case.score} attention")
    return layers.side(inputs, layers.keras_own(inputs))


def only_in_models(inputs: Inputs) -> Side:
    """Refuse a case of one call: a baseline that is a part of whole models, which `bench.models` builds."""
    raise Unavailable("in whole models alone")


def without(inputs: Inputs) -> Side:
    """Our own call without the option or the mask whose overhead the case measures."""
    side = ours(inputs, plain=True)
    return Side(side.run, side.outputs, same="dropout" not in inputs.case.options)


def reading(inputs: Inputs) -> Side:
    """Reading every key and value once, as fast as PyTorch's sum does: the limit of a memory-bound call.

    Measured in the same rounds, because the memory bandwidth of a shared machine changes from minute to minute.
    """
    import torch

    totals = [torch.empty(()) for _ in range(2)]
    # 16-bit numbers by pairs: PyTorch reads them faster than it adds them up.
    key, value = (x.view(torch.float32) if x.itemsize == 2 else x for x in (inputs.key, inputs.value))

    def run() -> Any:
        torch.sum(key, dim=(), out=totals[0])
        return torch.sum(value, dim=(), out=totals[1])

    return Side(run, same=False)


def _numpy(x: Any) -> Any:
    return x.detach().numpy() if hasattr(x, "detach") else x


BASELINES = {
    "sdpa": Baseline("torch scaled_dot_product_attention", sdpa),
    "sdpa-padded": Baseline("the same of a padded batch", sdpa_padded),
    "sdpa-blocks": Baseline("torch scaled_dot_product_attention, in blocks", sdpa_blocks),
    "flex": Baseline("FlexAttention, compiled", flex),
    "naive": Baseline("plain formula in PyTorch", naive),
    "compile": Baseline("plain formula in PyTorch, torch.compile", compiled),
    "xla": Baseline("plain formula in JAX, jax.jit (XLA)", xla),
    "keops": Baseline("KeOps", keops),
    "onnxruntime": Baseline("onnxruntime MultiHeadAttention", onnxruntime),
    "numpy": Baseline("plain formula in NumPy", formula),
    "jax": Baseline("jax.nn.dot_product_attention", jax),
    "tensorflow": Baseline("plain formula in TensorFlow", formula),
    "keras": Baseline("keras.ops.dot_product_attention", keras),
    "keras-layer": Baseline("keras.layers.Attention, AdditiveAttention", keras_layer),
    "keras-multi-head": Baseline("keras.layers.MultiHeadAttention", only_in_models),
    "formula": Baseline("fastest formula", formula),
    "without": Baseline("the same call without it", without, is_alternative=False),
    "reading": Baseline("reading keys and values once", reading, is_alternative=False),
}
