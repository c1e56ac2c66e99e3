"""Results of the native module: the names and order of what it fills and reads, and the shapes of its gradients."""

from __future__ import annotations

from attnscore.backends.base import Array, sum_to
from attnscore.problem.problem import Problem
from attnscore.problem.statistics import TABLE
from attnscore.scores.forms import AdditiveForm

# Statistics that the forward fills where wanted, in its order. The log-sum-exp is row_max + log_denom outside of plans:
# autodiff passes through that sum.
STATISTICS = tuple(name for name in TABLE if name != "log_sum_exp")
# Arrays that the forward fills, in its order. `saved_scores` are before bias and cap, for the backward alone;
# `attention_scores` and `attention_weights` are those that a caller asks for.
FILLED = (
    *("out", "row_max", "log_denom", "saved_scores", "attention_scores", "attention_weights"),
    *(*STATISTICS, "log_sum_exp"),
)
# Arrays that the backward reads in addition to the operands, in its order.
BACKWARD_INPUTS = (
    *("out", "row_max", "log_denom", "entropy", "saved_scores", "attention_weights"),
    *("grad_out", "grad_log_sum_exp", "grad_entropy", "grad_attention_scores", "grad_attention_weights"),
)
# The gradients that the module writes, in its order; those of `_ALWAYS` also where they are not wanted.
GRADIENTS = ("query", "key", "value", "query_bias", "key_bias", "bias", "w_v", "sink", "scale")
_ALWAYS = frozenset(("query", "key", "value", "w_v"))


def gradient_shapes(problem: Problem, wanted: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays in which gradients are accumulated, in the order of `GRADIENTS`."""
    score_shape, form = problem.score_shape, problem.form
    arrays = problem.operands()
    shared = _shared(problem)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, x in arrays.items():
        if name in ("sink", "scale"):
            shapes[name] = score_shape.rows[:-1]
        elif name == "bias":
            shapes[name] = tuple(x.shape)
        elif name == "w_v":
            shapes[name] = (*shared, x.shape[-1])
        elif name == "value" or form.role(name) == "key":
            shapes[name] = (*shared, score_shape.key_len, *x.shape[-1:])
        else:
            shapes[name] = (*score_shape.rows, *x.shape[-1:])
    for name in ("query_bias", "key_bias"):
        if name in shapes:
            shapes[name] = shapes[name][:-1]
    return {name: shapes[name] for name in GRADIENTS if name in shapes and (name in wanted or name in _ALWAYS)}


def _shared(problem: Problem) -> tuple[int, ...]:
    """Return the leading axes (*lead, head, group) of the gradients of key, value and w_v.

    An axis is 1 where all of these arrays have size 1: the module then sums their gradients over it.
    """
    form, whole = problem.form, problem.score_shape.rows[:-1]
    shapes = [x.shape[:-2] for name, x in form.arrays().items() if form.role(name) == "key"]
    shapes.append(problem.value.shape[:-2])
    if isinstance(form, AdditiveForm) and len(form.w_v.shape) > 1:
        shapes.append((*(1 for _ in problem.score_shape.lead), *form.w_v.shape[:2]))
    return tuple(1 if all(n == 1 for n in lengths) else length for length, *lengths in zip(whole, *shapes, strict=True))


def as_operand(problem: Problem, grad: Array, name: str, operand: Array) -> Array:
    """Return a gradient in the shape of its operand: summed over the axes along which the operand was broadcast."""
    ops, shape = problem.ops, tuple(operand.shape)
    if name in ("query_bias", "key_bias"):
        grad = ops.expand_dims(grad, -1)
    if name == "scale":
        grad = ops.reshape(grad, (*grad.shape, 1, 1))
    return grad if tuple(grad.shape) == shape else sum_to(ops, grad, shape)
