"""The masked softmax, its Jacobian and VJP, and the exact merge of partial results."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, Never

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, Backend, accumulator
from attnscore.base.arguments import (
    check_overflow,
    check_positive,
    hides_unknown,
    is_whole,
    largest_of,
    reject_unknown,
    shown,
)
from attnscore.base.layout import ScoreShape
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, ShapeError, message
from attnscore.masks import Mask, as_mask
from attnscore.masks.lowering import evaluate
from attnscore.problem.online_softmax import NEG_INF, safe_max, weights_of_rows


@hides_unknown
@backends.outside_graphs()
def masked_softmax(
    scores: Array,
    valid_lens: Any = None,
    *,
    mask: Any = None,
    axis: int = -1,
    temperature: float = 1.0,
    **unknown: Never,
) -> Array:
    """Softmax over the unmasked keys: p_j = exp(s_j / T) / sum_i exp(s_i / T); 0 for fully masked queries.

    Parameters
    ----------
    scores : (..., query, key)
        Two axes: (query, key). Three: (batch, query, key). Four or more: (batch, ..., head, query, key).
    valid_lens : (batch,) or (batch, query) whole numbers; with two axes a number or (query,)
    mask : a mask object, or a boolean array broadcastable to the scores, True = unmasked
    axis : int
        Axis of the keys, in `scores` and in an array `mask`. Unless it is the last, the last axis has the queries.
    temperature : number above 0

    Returns
    -------
    weights : of the shape and dtype of `scores`; they sum to 1 over the keys, or are all 0

    Raises
    ------
    MaskError, ShapeError, DtypeError, ArgumentError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.masked_softmax(np.zeros((2, 2, 4)), np.array([[1, 3], [2, 4]]))[0].round(3)
    array([[1.   , 0.   , 0.   , 0.   ],
           [0.333, 0.333, 0.333, 0.   ]])
    """
    reject_unknown(masked_softmax, unknown)
    scores = backends.variable_value(scores)
    ops = backends.of({"scores": scores})
    shape = tuple(scores.shape)
    backends.check_dense(ops, {"scores": scores})
    backends.check_not_recorded(ops, "masked_softmax")
    if not ops.is_floating(scores):
        raise DtypeError(message("scores", FLOATING, ops.dtype(scores)))
    check_positive("temperature", temperature, if_array="divide the scores by it: masked_softmax(scores / temperature)")
    if not is_whole(axis) or not -len(shape) <= axis < len(shape):
        expected = f"an axis of the {len(shape)} of scores"
        raise ArgumentError(message("axis", expected, shown(axis), shapes={"scores": shape}))
    with ops.numeric_scope():
        transposed = ops.swap_axes(scores, int(axis), -1)
        flat = ops.reshape(transposed, (1, *transposed.shape)) if len(shape) == 1 else transposed
        mask = _move_keys_last(mask, int(axis) % len(shape), len(shape))
        unmasked = _unmasked(ops, flat, mask, valid_lens)
        if flat.shape[-1] == 0:
            return scores + 0.0
        sum_dtype = accumulator(ops.dtype(flat))
        check_overflow("temperature", temperature, sum_dtype, 1 / float(temperature), 1 / largest_of(sum_dtype))
        logits = ops.astype(flat, sum_dtype) / temperature
        if unmasked is not None:
            logits = ops.where(unmasked, logits, NEG_INF)
        weights = ops.astype(weights_of_rows(ops, logits, unmasked, None), ops.dtype(scores))
        return ops.swap_axes(ops.reshape(weights, ops.shape(transposed)), int(axis), -1)


def _move_keys_last(mask: Any, axis: int, ndim: int) -> Any:
    """Return a mask array, whose keys are on `axis` of an array of `ndim` axes, with keys last; a mask as it is.

    An array of more axes is returned as it is: the checks that follow report it.
    """
    if mask is None or isinstance(mask, Mask) or axis == ndim - 1:
        return mask
    ops = backends.of_type(type(mask))
    if ops is None:
        ops, mask = backends.load("numpy"), np.asarray(mask)
    if len(mask.shape) > ndim:
        return mask
    mask = ops.reshape(mask, (*(1,) * (ndim - len(mask.shape)), *ops.shape(mask)))
    return ops.swap_axes(mask, axis, -1)


def _unmasked(ops: Backend, scores: Array, mask: Any, valid_lens: Any) -> Array | None:
    """Return the unmasked entries of scores on the caller's axes; None: all."""
    shape = ops.shape(scores)
    has_heads = len(shape) >= 4
    score_shape = ScoreShape(
        lead=shape[: -3 if has_heads else -2] or (1,),
        heads=shape[-3] if has_heads else 1,
        groups=1,
        query_len=shape[-2],
        key_len=shape[-1],
        has_batch=len(shape) >= 3,
        has_heads=has_heads,
    )
    combined = as_mask(mask, valid_lens, score_shape)
    if combined is None:
        return None
    backends.check_dense(ops, combined.arrays())
    combined.check(ops, score_shape)
    backends.check_devices(ops, scores, combined.arrays(), host_passes=True)
    visible = evaluate(ops, score_shape, scores, combined)
    full = ops.broadcast_to(visible, (*score_shape.rows, score_shape.key_len))
    return ops.reshape(full, shape)


def softmax_jacobian(weights: Array) -> Array:
    """diag(p) - p p^T for each query: the derivative of the weights with respect to the scores.

    Parameters
    ----------
    weights : (..., key)

    Returns
    -------
    jacobian : (..., key, key)

    Raises
    ------
    ShapeError, DtypeError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.softmax_jacobian(np.array([0.5, 0.5]))
    array([[ 0.25, -0.25],
           [-0.25,  0.25]])
    """
    weights = backends.variable_value(weights)
    ops = _check_weights({"weights": weights})
    length = weights.shape[-1]
    positions = ops.positions(0, length, weights)
    diagonal = ops.equal(ops.reshape(positions, (length, 1)), ops.reshape(positions, (1, length)))
    column, row = ops.expand_dims(weights, -1), ops.expand_dims(weights, -2)
    return ops.where(diagonal, column, 0.0) - column * row


def softmax_pullback(weights: Array, grad: Array) -> Array:
    """(diag(p) - p p^T) grad = p (grad - sum p grad), without forming the Jacobian.

    Parameters
    ----------
    weights, grad : (..., key)

    Returns
    -------
    grad_scores : (..., key)

    Raises
    ------
    ShapeError, DtypeError, DeviceError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.softmax_pullback(np.array([0.5, 0.5]), np.array([1.0, 0.0]))
    array([ 0.25, -0.25])
    """
    weights, grad = map(backends.variable_value, (weights, grad))
    ops = _check_weights({"weights": weights, "grad": grad})
    if tuple(weights.shape) != tuple(grad.shape):
        raise ShapeError(
            message("grad", "the shape of weights", tuple(grad.shape), shapes={"weights": tuple(weights.shape)})
        )
    if (dtype := ops.dtype(weights)) != ops.dtype(grad):
        raise DtypeError(message("grad", f"the dtype of weights ({dtype})", ops.dtype(grad)))
    return weights * (grad - ops.sum(weights * grad, axis=-1, keepdims=True))


def _check_weights(arrays: dict[str, Array]) -> Backend:
    """Return the backend of dense floating arrays with one axis or more, on one device."""
    ops = backends.of(arrays)
    backends.check_compatible(ops, next(iter(arrays.values())), arrays)
    shapes = {name: tuple(x.shape) for name, x in arrays.items()}
    for name, x in arrays.items():
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x)))
        if not shapes[name]:
            raise ShapeError(message(name, "1 axis or more", 0, shapes=shapes))
    return ops


def merge(outs: Sequence[Array], log_sum_exps: Sequence[Array]) -> tuple[Array, Array]:
    """Join attention results over disjoint sets of keys, exactly.

    lse = log sum_s exp(lse_s); out = sum_s w_s out_s with w_s = exp(lse_s - lse). Empty parts (lse -inf) weigh nothing.

    Parameters
    ----------
    outs : list of (..., query, value_dim)
    log_sum_exps : list of (..., query)

    Returns
    -------
    out, log_sum_exp

    Raises
    ------
    ShapeError, DtypeError, DeviceError, FrameworkError, ArgumentError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> out, lse = ats.merge([np.ones((1, 2)), 3 * np.ones((1, 2))], [np.zeros(1), np.zeros(1)])
    >>> print(out, lse.round(4))
    [[2. 2.]] [0.6931]
    """
    outs, log_sum_exps = map(backends.variable_value, (outs, log_sum_exps))
    for name, parts in (("outs", outs), ("log_sum_exps", log_sum_exps)):
        if not (isinstance(parts, (list, tuple)) or (backends.is_array(parts) and np.ndim(parts))):
            raise FrameworkError(message(name, "a list of arrays", type(parts).__name__))
    if len(outs) != len(log_sum_exps) or len(outs) == 0:
        counts = (len(outs), len(log_sum_exps))
        raise ArgumentError(message("outs, log_sum_exps", "as many of one as of the other, at least one", counts))
    outs, log_sum_exps = ([*map(backends.variable_value, parts)] for parts in (outs, log_sum_exps))
    by_name = {f"outs[{i}]": x for i, x in enumerate(outs)}
    ops = _check_weights(by_name | {f"log_sum_exps[{i}]": x for i, x in enumerate(log_sum_exps)})
    for i, (out, lse) in enumerate(zip(outs, log_sum_exps, strict=True)):
        if tuple(out.shape) != tuple(outs[0].shape) or tuple(lse.shape) != tuple(out.shape[:-1]):
            raise ShapeError(
                message(
                    f"outs[{i}], log_sum_exps[{i}]",
                    "one shape (..., query, value_dim) and that without its last axis",
                    f"{tuple(out.shape)} and {tuple(lse.shape)}",
                    shapes={"outs[0]": tuple(outs[0].shape)},
                )
            )
    for name, parts in (("outs", outs), ("log_sum_exps", log_sum_exps)):
        if len(dtypes := {ops.dtype(x) for x in parts}) > 1:
            raise DtypeError(message(name, "one dtype", sorted(dtypes)))
    with ops.numeric_scope():
        shares, total = merge_shares(ops, log_sum_exps)
        joined: Any = 0.0
        for out, row_shares in zip(outs, shares, strict=True):
            share = ops.expand_dims(row_shares, -1)
            # The output of a fully masked part may be NaN.
            joined = joined + ops.where(ops.equal(share, 0), 0.0, share * ops.astype(out, ops.dtype(share)))
        return ops.astype(joined, ops.dtype(outs[0])), ops.astype(total, ops.dtype(log_sum_exps[0]))


def merge_shares(ops: Backend, log_sum_exps: Sequence[Array]) -> tuple[list[Array], Array]:
    """Return the shares of parts in a softmax over all of them, and the log-sum-exp.

    The shares add up to 1: exp(lse_s - lse) would be off by the rounding of lse, which grows with the scores.
    """
    logs_of_parts = [ops.astype(x, accumulator(ops.dtype(x))) for x in log_sum_exps]
    max_log = safe_max(ops, reduce(ops.maximum, map(ops.stop_gradient, logs_of_parts)))
    weights = [ops.exp(log - max_log) for log in logs_of_parts]
    total = reduce(operator.add, weights)
    is_empty = ops.equal(total, 0)
    total = ops.where(is_empty, 1.0, total)
    log_denom = ops.log(total)
    return [weight / total for weight in weights], ops.where(is_empty, NEG_INF, max_log + log_denom)
