"""JAX's attention, argument for argument, computed by `attend`.

- `dot_product_attention` takes and returns the same as its original: shapes, dtypes, order of arguments, the classes of
  errors; under ``jit``, ``grad``, ``vmap``, ``shard_map`` and ``jax.export`` too.
- A query that attends to no key gets zeros, where the original pools the keys that it may not attend to. With
  ``strict=True`` it gets the numbers of the original.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from attnscore.api import attend
from attnscore.backends.base import DTYPES
from attnscore.errors import message
from attnscore.masks import Causal, Dense, Mask, ValidLens
from attnscore.masks.base import all_of
from attnscore.scores import ScaledDot

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    strict: bool = False,
) -> Any:
    """Attention pooling with the signature of ``jax.nn.dot_product_attention``.

    out_i = sum_j softmax_j(scale q_i . k_j + b_ij) v_j, in memory linear in the lengths.

    Parameters
    ----------
    query : (batch, query, heads, dim), or without the first axes
    key : (batch, key, KV heads, dim), or without the first axes
        The number of KV heads divides the number of heads.
    value : of the shape of key
    bias : broadcastable to (batch, heads, query, key), optional
        Added to the scores; gets a gradient.
    mask : boolean, broadcastable to (batch, heads, query, key), optional
        True = may attend.
    scale : number, optional
        None: 1/sqrt(dim). An array of one number gets a gradient.
    implementation : "xla" or None
        Both are `attend`.
    others
        As the original takes them.
    strict : bool
        A query that attends to no key gets the mean of the values that are masked, as from the original.

    Returns
    -------
    out : of the shape and dtype of query
    residual : of the shape of query without its last axis, with `return_residual`
        -inf for a query that attends to no key.

    Raises
    ------
    ValueError, TypeError, AssertionError
        As the original, for arguments that do not fit each other.
    RuntimeError
        ``implementation="cudnn"``.

    References
    ----------
    ``jax.nn.dot_product_attention``, JAX 0.10.

    Examples
    --------
    >>> import jax
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 8))
    >>> out = dot_product_attention(query, key, value, is_causal=True)
    >>> theirs = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    >>> bool(abs(out - theirs).max() < 1e-5)
    True
    """
    shape = jnp.asarray(query).shape
    q, k, v = (_with_four_axes(x) for x in (query, key, value))
    bias, mask = (None if x is None else _with_four_axes(x) for x in (bias, mask))
    query_lens, key_lens = (None if x is None else jnp.asarray(x) for x in (query_seq_lengths, key_value_seq_lengths))
    batch, key_len, kv_heads, dim = k.shape
    _check("value", v, (batch, key_len, kv_heads, dim), k.dtype)
    _check("query", q, (batch, None, None, dim), k.dtype)
    query_len, heads = q.shape[1:3]
    score_shape = (batch, heads, query_len, key_len)
    _check("mask", mask, (None,) * 4, jnp.dtype(bool))
    _check("bias", bias, (None,) * 4)
    _check("query_seq_lengths", query_lens, (batch,), jnp.dtype(np.int32))
    _check("key_value_seq_lengths", key_lens, (batch,), jnp.dtype(np.int32))
    if heads % kv_heads:
        raise ValueError(message("key", f"a number of heads that divides the {heads} of query", kv_heads))
    if implementation not in (None, "xla"):
        if implementation == "cudnn":
            raise RuntimeError(message("implementation", "None or 'xla'", "'cudnn'", hint="cuDNN is not used"))
        raise ValueError(message("implementation", "None or 'xla': unsupported option", repr(implementation)))
    if k.dtype.name not in DTYPES:
        raise ValueError(message("query, key, value", f"one of {', '.join(DTYPES)}", k.dtype.name))
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None and any(n not in (1, full) for n, full in zip(x.shape, score_shape, strict=True)):
            kind = AssertionError if x.shape[1] not in (1, heads) else TypeError
            raise kind(message(name, f"a shape that broadcasts to (batch, heads, query, key) = {score_shape}", x.shape))

    parts: list[Mask] = [] if mask is None else [Dense(mask)]
    parts += [Causal(offset=0)] if is_causal else []
    if local_window_size is not None:
        both = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        left, right = map(_whole, both)
        # Any sign, arrays too: an inverted causal mask masks the keys before i - left.
        parts += [Causal(offset=right), ~Causal(offset=-left - 1)]
    stop = None if key_lens is None else jnp.clip(key_lens, 0, key_len)
    if query_lens is not None:
        stop = jnp.full_like(query_lens, key_len) if stop is None else stop
    if stop is not None:
        parts.append(ValidLens(stop, None if query_lens is None else jnp.clip(query_lens, 0, query_len)))
    combined_mask = all_of(parts)
    dtype = jnp.promote_types(q.dtype, np.float32)
    bias = None if bias is None else bias.astype(dtype)
    stats = ("log_sum_exp",) if return_residual or strict else ()
    score = ScaledDot(_scale(scale, dtype))
    result = attend(q, k, v, score=score, mask=combined_mask, bias=bias, head_axis=-2, return_stats=stats)
    out, residual = (result[0], result[1].log_sum_exp) if stats else (result, None)
    if strict and key_len:
        out, residual = _with_masked_keys(q, k, v, combined_mask, out, residual)
        if query_lens is not None:
            is_query = jnp.arange(query_len)[None] < query_lens[:, None]
            out = out * is_query[..., None, None].astype(out.dtype)
    out = jnp.reshape(out, shape)
    if not return_residual or residual is None:
        return out
    return out, lax.stop_gradient(jnp.reshape(residual.astype(k.dtype), shape[:-1]))


def _with_masked_keys(query: Array, key: Array, value: Array, mask: Mask | None, out: Array, residual: Any) -> Any:
    """Return output and log-sum-exp, with the original's numbers for queries that attend to no key.

    The original's masked score is the number below, not -inf: if a query has no other, its masked keys have equal
    weights. A bias of -inf on all keys gives NaN, as none is masked.
    """
    empty = jnp.isneginf(residual)
    if mask is None:
        return jnp.where(empty[..., None], jnp.nan, out), residual
    zeros = jnp.zeros_like(query), jnp.zeros_like(key)
    mean, stats = attend(*zeros, value, mask=~mask, head_axis=-2, return_stats=("log_sum_exp",))
    has_masked = ~jnp.isneginf(stats.log_sum_exp)
    masked_score = -0.7 * float(np.finfo(np.float32).max)
    out = jnp.where(empty[..., None], jnp.where(has_masked[..., None], mean, jnp.nan), out)
    return out, jnp.where(empty & has_masked, masked_score, residual)


def _with_four_axes(x: ArrayLike) -> Array:
    array = jnp.asarray(x)
    return jnp.reshape(array, (1,) * (4 - array.ndim) + array.shape)


def _scale(scale: Any, dtype: Any) -> Any:
    """Return a number of Python, which makes the score static, where `scale` is one; else an array."""
    if scale is None or isinstance(scale, (int, float)):
        return scale
    array = jnp.array(scale, dtype)
    if array.size != 1:
        raise ValueError(message("scale", "one number", f"shape {array.shape}"))
    return jnp.reshape(array, ()) if isinstance(array, jax.core.Tracer) else array.item()


def _whole(width: Any) -> Any:
    if isinstance(width, (jax.Array, np.ndarray)):
        return jnp.floor(width).astype(np.int32)
    return math.floor(width)


def _check(name: str, x: Array | None, shape: tuple[int | None, ...], dtype: Any = None) -> None:
    """Raise ValueError unless `x`, where there is one, has this shape, any length for None, and this dtype."""
    if x is None:
        return
    if x.ndim != len(shape):
        raise ValueError(message(name, f"{len(shape)} axes or fewer", f"{x.ndim}: {x.shape}"))
    if dtype is not None and x.dtype != dtype:
        raise ValueError(message(name, f"dtype {dtype.name}", x.dtype.name))
    if any(expected not in (None, n) for expected, n in zip(shape, x.shape, strict=True)):
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(message(name, f"shape ({sizes})", x.shape))
