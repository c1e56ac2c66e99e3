"""Attention over a sequence whose rows are shared out along a mesh axis, inside ``jax.shard_map``.

- Each device computes the queries that it holds; the results equal a call on one device.
- Masks, valid lengths and dropout cover the whole sequence; a bias has the device's queries and all keys.
- The rows to send follow from the shards and the mask, and are part of the program: JAX's collectives move them, and
  the derivatives of the collectives return the gradients.
- All devices run one program over arrays of one shape. Shards of different sizes are padded at their end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Never

import jax.numpy as jnp
from jax import Array

from attnscore.base.arguments import hides_unknown, reject_unknown
from attnscore.base.layout import check_bias_shape
from attnscore.errors import ArgumentError, message
from attnscore.parallel.explanation import ParallelExplanation
from attnscore.parallel.jax_modes import MODE_CLASSES, lax
from attnscore.parallel.jax_rows import join_rows, rows_of_devices, split_rows
from attnscore.parallel.mask import sequence_mask
from attnscore.parallel.options import Options
from attnscore.parallel.parts import Call
from attnscore.parallel.plan import exchange
from attnscore.parallel.shard import Shard
from attnscore.problem.problem import check_extra
from attnscore.problem.results import present

__all__ = ["attend", "explain", "gather_rows", "join_rows", "merge_over", "split_rows"]


@hides_unknown
def attend(
    query: Array,
    key: Any,
    value: Array,
    *,
    axis_name: Any,
    queries: Sequence[Shard] | None = None,
    keys: Sequence[Shard] | None = None,
    mode: str = "auto",
    memory: int | None = None,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    head_axis: int = -3,
    normalizer: Any = "softmax",
    kernel: str = "auto",
    return_stats: bool | tuple[str, ...] = False,
    **unknown: Never,
) -> Any:
    """Attention pooling over a sequence of which each device of a mesh axis holds some rows, inside ``jax.shard_map``.

    The result, its gradients, statistics and dropout equal a call of `attnscore.attend` on one device.

    Parameters
    ----------
    query, key, value : (..., own rows, dim)
        The rows that this device holds, as in `attnscore.attend`; `split_rows` gives arrays that ``shard_map`` divides
        so. Rows beyond the device's shard are padding.
    axis_name : name of a mesh axis, or several
    queries, keys : Shard of each device, in the order of the axis
        Rows of the whole sequence on each device. None: consecutive parts of one length; `keys` None where
        `queries` is given: the same shards.
    mode : "auto", "gather", "ring" or "heads"
        How keys and queries meet, see `attnscore.parallel.explain`.
    memory : int, optional
        Bytes that a device has for its arrays and the exchange; "auto" then takes a mode that fits.
    mask, valid_lens
        Mask and lengths of the whole sequence, the same on all devices.
    bias : broadcastable to (..., own queries, all keys), or (..., 1, all queries + all keys - 1)
    score, sink, dropout, seed, head_axis, normalizer, kernel, return_stats
        As in `attnscore.attend`, the same on all devices. Gradients of arrays that are not divided are summed by JAX.
        A "ring" merges results over parts of the keys by their log-sum-exp, and has the softmax alone.

    Returns
    -------
    out : (..., own queries, value_dim)
        0 for padding.
    stats : AttentionStats of the device's queries, with `return_stats`

    Raises
    ------
    ShapeError, DtypeError, FrameworkError, MaskError, ArgumentError, KernelUnavailable
    NameError
        Raised by JAX outside of ``shard_map``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, attnscore as ats
    >>> from attnscore.parallel.jax import attend
    >>> mesh = jax.make_mesh((jax.device_count(),), ("context",))
    >>> rows = jax.P(None, None, "context")
    >>> @jax.shard_map(mesh=mesh, in_specs=rows, out_specs=rows)
    ... def call(x):
    ...     return attend(x, x, x, axis_name="context", mask=ats.Causal())
    >>> x = jax.random.normal(jax.random.key(0), (1, 2, 64, 8))
    >>> out = call(jax.device_put(x, jax.NamedSharding(mesh, rows)))
    >>> bool(jnp.allclose(out, ats.attend(x, x, x, mask=ats.Causal()), atol=1e-5))
    True
    """
    reject_unknown(attend, unknown)
    options = Options(
        queries=queries, keys=keys, mode=mode, memory=memory, score=score, mask=mask, valid_lens=valid_lens, bias=bias,
        sink=sink, dropout=dropout, seed=seed, head_axis=head_axis, normalizer=normalizer, kernel=kernel,
        return_stats=return_stats,
    )  # fmt: skip
    call, _ = _plan_call(query, key, value, axis_name, options)
    return present(call.problem, call.compute())


def explain(query: Array, key: Any, value: Array, *, axis_name: Any, **options: Any) -> ParallelExplanation:
    """Return the plan of `attend` with the same arguments: mode, bytes sent, pairs and memory of each device.

    Call it where `attend` is called: the plan is known while JAX traces. Padding is not counted.
    """
    return _plan_call(query, key, value, axis_name, Options.of(attend, options))[1]


def gather_rows(x: Array, shards: Sequence[Shard] | None, axis_name: Any, axis: int = -2) -> Array:
    """Gather the rows of all devices in the order of the sequence, inside ``shard_map``.

    Parameters
    ----------
    x : array with the device's rows on `axis`
    shards : Shard of each device, or None for consecutive parts of one length
    axis_name : name of a mesh axis, or several
    axis : int
    """
    axis %= x.ndim
    device_rows = rows_of_devices("shards", shards, x.shape[axis], axis_name)
    return join_rows(lax.all_gather(x, axis_name, axis=axis, tiled=True), device_rows.shards, axis)


def merge_over(out: Array, log_sum_exp: Array, axis_name: Any) -> tuple[Array, Array]:
    """Merge the attention of the same queries over the keys of each device, as in decoding, inside ``shard_map``.

    Parameters
    ----------
    out : (..., query, value_dim)
    log_sum_exp : (..., query), -inf for a query that attends to none of the device's keys
    axis_name : name of a mesh axis, or several

    Returns
    -------
    out, log_sum_exp : over the keys of all devices, the same on each
    """
    sum_dtype = jnp.promote_types(log_sum_exp.dtype, jnp.float32)
    logs = log_sum_exp.astype(sum_dtype)
    max_log = lax.pmax(lax.stop_gradient(logs), axis_name)
    # Without a key anywhere the maximum is -inf, and -inf - -inf NaN.
    max_log = jnp.where(jnp.isneginf(max_log), 0, max_log)
    weights = jnp.exp(logs - max_log)
    total = lax.psum(weights, axis_name)
    # A query without keys has out = 0; NaN of other devices' padding does not come in.
    shares = jnp.where(weights[..., None] == 0, 0, out.astype(sum_dtype) * weights[..., None])
    pooled = lax.psum(shares, axis_name) / jnp.where(total == 0, 1, total)[..., None]
    merged = jnp.where(total == 0, -jnp.inf, jnp.log(jnp.where(total == 0, 1, total)) + max_log)
    return pooled.astype(out.dtype), merged.astype(log_sum_exp.dtype)


# ---- planning


def _plan_call(
    query: Array, key: Any, value: Array, axis_name: Any, options: Options
) -> tuple[Call, ParallelExplanation]:
    """Return this device's call, and the explanation of the call of all devices."""
    options.check_names()
    if options.gradient == "queries":
        expected = "'reduce' in JAX, whose collectives return gradients to the owners of the keys"
        raise ArgumentError(message("gradient", expected, "'queries'"))
    key, options = options.unpack(key)
    problem = options.own_problem(query, key, value)
    shape = problem.score_shape
    queries = rows_of_devices("queries", options.queries, shape.query_len, axis_name)
    keys = rows_of_devices("keys", options.queries if options.keys is None else options.keys, shape.key_len, axis_name)
    sequence_shape = dataclasses.replace(shape, query_len=queries.length, key_len=keys.length)
    mask = sequence_mask(problem.ops, options.mask, options.valid_lens, sequence_shape)
    problem, bias_has_queries = dataclasses.replace(problem, mask=mask), False
    if options.bias is not None:
        bias = check_extra(problem.ops, "bias", options.bias, query)
        is_relative = sequence_shape.is_relative(tuple(bias.shape))
        own_shape = dataclasses.replace(shape, key_len=keys.length)
        check_bias_shape(tuple(bias.shape), sequence_shape if is_relative else own_shape)
        bias = sequence_shape.to_canonical(problem.ops, bias)
        # With one query a device, an axis of queries of size 1 has the device's own query.
        bias_has_queries = not is_relative and (bias.shape[-2] > 1 or queries.rows <= 1)
        problem = dataclasses.replace(problem, bias=bias)
    plan = exchange(mask, queries.shards, keys.shards, batch=sequence_shape.batch)
    explanation = options.choose(problem, sequence_shape, plan, MODE_CLASSES, "reduce")
    mode_class = MODE_CLASSES[explanation.mode]
    call = mode_class(plan, sequence_shape, problem, options.kernel, bias_has_queries, axis_name, queries, keys)
    return call, explanation
