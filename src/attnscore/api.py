"""attend: scores, masked softmax and pooling in one call. The outline of the library in code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Never, cast

from attnscore import backends, kernels
from attnscore.analysis.weights import row_gradient
from attnscore.backends.base import Array, sum_to
from attnscore.base.arguments import CallArguments, check_flag, hides_unknown, reject_unknown, shown
from attnscore.errors import ArgumentError, FrameworkError, KernelUnavailable, message
from attnscore.masks import ValidLens
from attnscore.packing import attend_ragged
from attnscore.plans import plan as plans
from attnscore.plans.prepared import PreparedKeys
from attnscore.problem.problem import Problem, build_problem
from attnscore.problem.results import present
from attnscore.scores import ScoreGradients, arrays_of
from attnscore.scores.base import Pullback


@hides_unknown
def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    head_axis: int = -3,
    normalizer: Any = "softmax",
    kernel: str = "auto",
    return_weights: bool = False,
    return_stats: bool | tuple[str, ...] = False,
    **unknown: Never,
) -> Any:
    """Attention pooling: out_i = sum_j softmax_j(score(q_i, k_j)) v_j over the keys that i may attend to.

    A query with all keys masked gives zero. Masked values, NaN included, do not propagate. Memory is linear in the
    lengths.

    Parameters
    ----------
    query : (..., query, dim)
        Two axes or more, any strides. Three: (batch, query, dim). Four or more: heads on `head_axis`.
        Jagged tensors of PyTorch are computed packed, and give jagged results; `mask` then holds in each sequence.
    key : (..., key, dim_k)
        ``dim_k == dim`` except for scores that allow otherwise. May have fewer heads than `query`: query head h uses
        KV head ``h // (heads / kv_heads)``. Other leading axes broadcast.
    value : (..., key, value_dim)
    score : a score object, or a registered name (``dot scaled_dot gaussian cosine sum`` ...)
    mask : a mask object, or a boolean array broadcastable to (..., query, key), True = may attend
    valid_lens : (batch,) or (batch, query) whole numbers
        Keys j < valid_lens are unmasked; combined with `mask` by AND. For a query of two axes: a number, or (query,).
    bias : broadcastable to (..., query, key), or (..., 1, query + key - 1)
        Added to the scores after temperature and cap; -inf masks a key. Gets a gradient. The second shape has one
        number for each relative offset, key minus query, see `relative_positions`.
    sink : number or (heads,)
        A further logit in the softmax, without a value. Gets a gradient.
    dropout : number in [0, 1)
        Probability that a weight is dropped; the other weights are divided by 1 - dropout.
    seed : whole number, in JAX a key too, optional
        Replays a dropout mask; None draws one from the framework's generator; JAX has none.
    head_axis : -3, or -2 for the layout (batch, length, head, dim)
    normalizer : "softmax", "sigmoid", "sparsemax", "entmax15" or an `Entmax`
        How scores become weights: see `Entmax`. The sigmoid takes each score by itself, so that the weights of a query
        do not sum to 1.
    kernel : "auto", or a name among ``attnscore.available()["kernels"]``, which then runs or raises
    return_weights : bool
        Also the weights (..., query, key), before dropout: O(n^2) memory. See `attention_weights` for a part of them.
    return_stats : bool, or names of fields of `AttentionStats`

    Returns
    -------
    out : (..., query, value_dim), of the dtype and framework of the inputs
    weights : (..., query, key), with `return_weights`
    stats : AttentionStats, with `return_stats`

    Raises
    ------
    ShapeError, DtypeError, DeviceError, FrameworkError, MaskError, ArgumentError, KernelUnavailable
        The message names the argument, the expected and the actual value.

    Examples
    --------
    Keys all alike: uniform weights over the valid ones.

    >>> import numpy as np, attnscore as ats
    >>> value = np.arange(40.0).reshape(1, 10, 4).repeat(2, axis=0)
    >>> ats.attend(np.ones((2, 1, 2)), np.ones((2, 10, 2)), value, valid_lens=[2, 6])
    array([[[ 2.,  3.,  4.,  5.]],
    <BLANKLINE>
           [[10., 11., 12., 13.]]])
    """
    if unknown:
        reject_unknown(attend, unknown)
    if type(key) is PreparedKeys:
        key, score = key.unpack(score)
    if type(mask) is ValidLens and valid_lens is mask.query_lens is None and mask.lens is not None:
        # A plan reads valid lengths at each call; lengths in a mask would be part of the plan.
        mask, valid_lens = None, mask.lens
    # Under torch.compile the replacement calls an operator, which the compiler does not look into.
    if (compiled := backends.compiled()) is not None:
        return compiled(
            query, key, value, score=score, mask=mask, valid_lens=valid_lens, bias=bias, sink=sink, dropout=dropout,
            seed=seed, head_axis=head_axis, normalizer=normalizer, kernel=kernel, return_weights=return_weights,
            return_stats=return_stats,
        )  # fmt: skip
    options = (head_axis, normalizer, kernel, dropout, return_weights, return_stats)
    arguments = tuple.__new__(CallArguments, (query, key, value, score, mask, valid_lens, bias, sink, seed))
    signature = plans.signature(arguments, options)
    if signature is None:
        # Neither variables nor ragged arrays have a signature.
        arguments = plans.change_arrays(arguments, backends.variable_value)
        signature, (query, key, value, *_) = plans.signature(arguments, options), arguments
        ops = backends.of({"query": query})
        if (recorded := backends.in_make_fx(ops)) is not None:
            return recorded(
                **arguments._asdict(), head_axis=head_axis, normalizer=normalizer, kernel=kernel, dropout=dropout,
                return_weights=return_weights, return_stats=return_stats,
            )  # fmt: skip
        if ops.ragged(query) is not None:
            return attend_ragged(
                attend, {"query": query, "key": key, "value": value}, mask, head_axis=head_axis, score=score,
                sink=sink, dropout=dropout, seed=seed, normalizer=normalizer, kernel=kernel, return_stats=return_stats,
                without={"valid_lens": valid_lens, "bias": bias, "return_weights": return_weights},
            )  # fmt: skip
        if all(backends.of_type(type(x)) is ops for x in (query, key, value)) and ops.has_autocast(query):
            with ops.numeric_scope():
                # In autocast's dtype, and without autocast, the call has a plan.
                query, key, value = ops.autocast(query, key, value)
                arguments = arguments._replace(query=query, key=key, value=value)
                plan, arguments = plans.plan_for(plans.signature(arguments, options), arguments, options)
                return plan.run(arguments)
    plan, arguments = plans.plan_for(signature, arguments, options)
    return plan.run(arguments)


class Gradients(NamedTuple):
    """Gradients of one attention call; None where there was no such input."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sink: Array | None
    score: dict[str, Array]
    """Gradients of the score's arrays, by field name."""


@hides_unknown
def attend_vjp(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    head_axis: int = -3,
    normalizer: Any = "softmax",
    kernel: str = "auto",
    return_weights: bool = False,
    return_stats: bool | tuple[str, ...] = False,
    **unknown: Never,
) -> tuple[Any, Callable[..., Gradients]]:
    """`attend` for NumPy with an explicit VJP function: NumPy has no autodiff.

    Parameters
    ----------
    query, key, value, score, mask, valid_lens, bias, sink, dropout, seed, head_axis, normalizer, kernel
        As in `attend`, as are `return_weights` and `return_stats`.

    Returns
    -------
    out : result of `attend`
    pullback : function of (grad_out, grad_log_sum_exp=None, grad_entropy=None, grad_weights=None) giving `Gradients`
        It reads query, key, value, bias and sink again, which must not have been written to since; masks may have been.
        `grad_out` has the shape of out, or is None; the next two have the shape of a statistic, `grad_weights` has the
        shape of the weights. A gradient into the entropy needs ``return_stats`` to name it, one into the weights
        ``return_weights=True``.

    Raises
    ------
    FrameworkError
        The arrays are not NumPy's: other frameworks differentiate `attend` by themselves. `pullback` raises it where a
        custom score has no `tile_gradient` and calls an operation whose gradient is not known.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> out, pullback = ats.attend_vjp(np.zeros((1, 2)), np.ones((4, 2)), np.ones((4, 3)))
    >>> pullback(np.ones_like(out)).value[:, 0]
    array([0.25, 0.25, 0.25, 0.25])
    """
    reject_unknown(attend_vjp, unknown)
    if type(key) is PreparedKeys:
        key, score = key.unpack(score)
    ops = backends.of({"query": query})
    if ops.has_autodiff:
        hint = "attend() is differentiable there by itself"
        raise FrameworkError(message("query", "a NumPy array", f"one of {ops.name}", hint=hint))
    returns_weights = check_flag("return_weights", return_weights)
    with ops.numeric_scope():
        problem, score_pullback = build_problem(
            query, key, value, score=score, mask=mask, valid_lens=valid_lens, bias=bias, sink=sink,
            dropout=dropout, seed=seed, head_axis=head_axis, normalizer=normalizer, statistics=return_stats,
            matrix="weights" if returns_weights else None, pullback=True,
        )  # fmt: skip
        op = kernels.single_plan(problem, kernel).with_saved_mask().with_backward()
        if not op.kernel.has_vjp:
            got = f"{kernel!r}: its gradient is autodiff through it, which NumPy has not"
            hint = "kernel='streaming' has one"
            raise KernelUnavailable(message("kernel", "one with a gradient of its own", got, hint=hint))
        operands = op.operands()
        outputs = op.forward(tuple(operands.values()))
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "sink": sink}

    def pullback(
        grad_out: Array, grad_log_sum_exp: Array = None, grad_entropy: Array = None, grad_weights: Array = None
    ) -> Gradients:
        if grad_entropy is not None and "entropy" not in problem.statistics:
            got = f"return_stats={shown(return_stats)}"
            raise ArgumentError(message("grad_entropy", "return_stats to name the entropy", got))
        if grad_log_sum_exp is not None and problem.normalizer is not None:
            raise ArgumentError(message("grad_log_sum_exp", "None, as the normalizer is not the softmax", "an array"))
        if grad_weights is not None and not returns_weights:
            raise ArgumentError(message("grad_weights", "return_weights=True", "False"))
        with ops.numeric_scope():
            grads_out = {"grad_out": grad_out, "grad_log_sum_exp": grad_log_sum_exp}
            grads_out |= {"grad_entropy": grad_entropy} if "entropy" in problem.statistics else {}
            grads_out |= {"grad_weights": grad_weights} if returns_weights else {}
            incoming = [row_gradient(problem, name, grad) for name, grad in grads_out.items()]
            grads = op.backward(tuple(operands.values()), outputs[: op.saved_count], incoming)
            named = dict(zip(operands, grads, strict=True))
            return gradients(problem, cast(Pullback, score_pullback)(named), named, arrays)

    return present(problem, op.result(outputs)), pullback


def gradients(
    problem: Problem, by_score: ScoreGradients, grads: dict[str, Array], caller_arrays: dict[str, Any]
) -> Gradients:
    """Return the gradients of the caller's arrays, in their shapes and dtypes.

    `grads` are the gradients of a kernel, on the canonical axes, and `by_score` the results of the score's VJP: the
    gradients of query, key and the score's arrays.
    """
    ops, layout = problem.ops, problem.layout

    def from_canonical(grad: Array, canonical: Array, name: str) -> Array:
        grad = layout.gradient_from_canonical(ops, sum_to(ops, grad, canonical.shape), caller_arrays[name].shape)
        return ops.astype(grad, ops.dtype(caller_arrays[name]))

    def like(name: str) -> Array | None:
        x = caller_arrays[name]
        return None if x is None else ops.reshape(grads[name], getattr(x, "shape", ()))

    arrays = arrays_of(problem.score)
    return Gradients(
        query=from_canonical(by_score.query, problem.query, "query"),
        key=from_canonical(by_score.key, problem.key, "key"),
        value=from_canonical(grads["value"], problem.value, "value"),
        bias=like("bias"),
        sink=like("sink"),
        score={name: ops.astype(grad, ops.dtype(arrays[name])) for name, grad in by_score.arrays.items()},
    )
