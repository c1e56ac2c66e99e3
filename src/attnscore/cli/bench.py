"""``attnscore bench``: a first look at this machine: our calls against the installed frameworks', in two minutes.

The documentation's figures come from ``python benchmarks`` in a clone: more cases, threads, memory, growth.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

import attnscore as ats
from attnscore.cli.console import console, error_console, table
from attnscore.cli.timing import Effort, alternate, summary
from attnscore.cli.versions import version
from attnscore.errors import ArgumentError, AttnscoreError, FrameworkError, message

Call = Callable[[], Any]


class WrongResult(AttnscoreError, RuntimeError):
    """Two sides that do not agree."""


@dataclass(frozen=True)
class Pair:
    """A call of ours and one that a user would make in its place, on the same arrays."""

    what: str
    beside: str
    ours: Call
    theirs: Call


def bench(
    seconds: Annotated[float, typer.Option(metavar="S", help="How long each pair is timed.")] = 4.0,
) -> None:
    """A first look at this machine: our calls against the installed frameworks', in two minutes.

    Every result is compared with the other before it is timed; both sides alternate in one process. Leave the machine
    alone meanwhile.
    """
    if not 0 < seconds < math.inf:
        raise ArgumentError(message("--seconds", "a positive number", seconds))
    if all(version(package) is None for package in ("torch", "jax", "tensorflow")):
        raise FrameworkError("bench: nothing to compare with but NumPy: pip install 'attnscore[torch]'")
    rows, progress = [], error_console()
    for pairs in (_of_torch, _of_numpy, _of_jax, _of_tensorflow):
        try:
            for pair in pairs():
                progress.print(Text(f"{pair.what}, beside {pair.beside}"))
                rows.append(_row(pair, Effort(min_rounds=3, max_rounds=101, seconds=seconds)))
        except ImportError as error:
            progress.print(Text(f"left out: {error.name} is not installed"))
    caption = "medians; ratio: their time over ours, median and quartiles of alternating rounds"
    columns = ["call", "beside", "theirs / ms", "ours / ms", "ratio", "quartiles"]
    screen = console()
    screen.print(table("Speed on this machine", columns, rows, left=2, caption=caption))


def _row(pair: Pair, effort: Effort) -> list[str]:
    """Compare the results of a pair, time both sides, and format the row of the table."""
    for ours, theirs in zip(_arrays(pair.ours()), _arrays(pair.theirs()), strict=True):
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        if not error < 1e-4:
            raise WrongResult(f"bench: {pair.what}: the results differ by {error:.1e} of the largest number")
    times = alternate(pair.ours, pair.theirs, effort)
    ratio = summary([of_theirs / of_ours for of_ours, of_theirs in zip(*times, strict=True)])
    our_time, their_time = (f"{1e3 * summary(side)['median']:.3g}" for side in times)
    quartiles = f"{ratio['q1']:.2f} to {ratio['q3']:.2f}"
    return [pair.what, pair.beside, their_time, our_time, f"{ratio['median']:.2f}", quartiles]


def _arrays(result: Any) -> list[Any]:
    arrays = result if isinstance(result, tuple) else (result,)
    return [np.asarray(x.detach() if hasattr(x, "detach") else x, np.float64) for x in arrays]


def _drawn(*shape: int, of: int = 3) -> list[Any]:
    return list(np.random.default_rng(0).standard_normal((of, *shape), np.float32))


def _pair(what: str, ours: Any, theirs: Any, *arrays: Any, beside: str = "SDPA") -> Pair:
    return Pair(what, beside, functools.partial(ours, *arrays), functools.partial(theirs, *arrays))


def _of_torch() -> Iterator[Pair]:
    import torch

    sdpa, ours = torch.nn.functional.scaled_dot_product_attention, ats.attend

    def with_backward(attention: Any) -> Any:
        def run(query: Any, key: Any, value: Any, grad: Any) -> tuple[Any, ...]:
            out = attention(query, key, value)
            return (out, *torch.autograd.grad(out, (query, key, value), grad))

        return run

    usual = [torch.from_numpy(x) for x in _drawn(1, 8, 2048, 64)]
    yield _pair("PyTorch, scaled dot (1,8,2048,64)", ours, sdpa, *usual)
    learned = [x.clone().requires_grad_() for x in usual]
    yield _pair("the same, forward + backward", with_backward(ours), with_backward(sdpa), *learned, usual[0])
    causal = functools.partial(ours, mask=ats.Causal())
    yield _pair("the same, causal", causal, functools.partial(sdpa, is_causal=True), *usual)
    padded = torch.zeros(1, 1, 1, 2048, dtype=torch.bool)
    padded[..., :1024] = True
    half = functools.partial(ours, valid_lens=torch.tensor([1024]))
    yield _pair("the same, half the keys padded", half, functools.partial(sdpa, attn_mask=padded), *usual)
    i = torch.arange(2048)
    near = (i <= i[:, None]) & (i > i[:, None] - 256)
    window = functools.partial(ours, mask=ats.SlidingWindow(255, 0))
    yield _pair("the same, a window of 256", window, functools.partial(sdpa, attn_mask=near), *usual)
    one = usual[0][:, :, :1], *(torch.from_numpy(x) for x in _drawn(1, 8, 32768, 64, of=2))
    yield _pair("decoding, 1 query, 32768 keys", ours, sdpa, *one)
    tiny = [torch.from_numpy(x) for x in _drawn(2, 8, 16, 64)]
    yield _pair("tiny (2,8,16,64)", ours, sdpa, *tiny)
    short = [torch.from_numpy(x) for x in _drawn(1, 256, 256)]
    w_v = torch.linspace(-1, 1, 256)

    def formula(query: Any, key: Any, value: Any) -> Any:
        scores = torch.tanh(query[..., :, None, :] + key[..., None, :, :]) @ w_v
        return torch.softmax(scores, -1) @ value

    additive = functools.partial(ours, score=ats.Additive(w_v))
    yield _pair("additive (1,256,256), h 256", additive, formula, *short, beside="the formula in PyTorch")


def _of_numpy() -> Iterator[Pair]:
    def formula(query: Any, key: Any, value: Any) -> Any:
        scores = query @ key.swapaxes(-1, -2) / np.float32(8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ value

    arrays = _drawn(1, 8, 1024, 64)
    yield _pair("NumPy, scaled dot (1,8,1024,64)", ats.attend, formula, *arrays, beside="the formula in NumPy")


def _of_jax() -> Iterator[Pair]:
    import jax

    arrays = [jax.numpy.asarray(x) for x in _drawn(1, 8, 1024, 64)]
    theirs = jax.jit(lambda *x: jax.nn.dot_product_attention(*(y.swapaxes(1, 2) for y in x)).swapaxes(1, 2))
    ours, what = jax.jit(ats.attend), "JAX, jit, scaled dot (1,8,1024,64)"
    sides = (lambda *x, side=side: side(*x).block_until_ready() for side in (ours, theirs))
    yield _pair(what, *sides, *arrays, beside="dot_product_attention")


def _of_tensorflow() -> Iterator[Pair]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    def formula(query: Any, key: Any, value: Any) -> Any:
        return tf.matmul(tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 8.0), value)

    arrays, what = (tf.constant(x) for x in _drawn(1, 8, 1024, 64)), "TensorFlow, eager, scaled dot (1,8,1024,64)"
    yield _pair(what, ats.attend, formula, *arrays, beside="the formula in TensorFlow")
