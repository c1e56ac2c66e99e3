"""Calls whose score is lowered to another score of computed queries and keys: bilinear, cosine, projected additive.

- Lowering runs in the framework's operations, which its autograd records: PyTorch's own nodes of a projection cost a
  tiny backward 20 us less than a VJP in Python.
- The plan of the call holds that of the lowered call, whose computed arrays are in C order: one signature finds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnscore import scores
from attnscore.backends.base import Array, Backend
from attnscore.core.arguments import CallArguments
from attnscore.scores.forms import Form


class LoweredArrays(NamedTuple):
    """Arrays that a lowered call reads in place of query, key and the arrays of the score."""

    query: Array
    key: Array
    w_v: Array | None = None
    """w_v of an additive score."""


def lower(ops: Backend, score: Any, query: Array, key: Array) -> tuple[Form, LoweredArrays]:
    """Return the lowered form on the caller's axes, and its arrays.

    Computed arrays are in C order; an array that is the caller's keeps its layout, which is in the signature.
    """
    with ops.numeric_scope():
        form: Any = score.lower(ops, query, key)
        pairs = ((form.query, query), (form.key, key))
        arrays = [x if x is given else ops.in_c_order(x) for x, given in pairs]
    return form, LoweredArrays(arrays[0], arrays[1], getattr(form, "w_v", None))


@dataclass(frozen=True, eq=False)
class LoweredCall:
    """Plan of calls whose score is lowered: the framework computes the lowered arrays, the plan `call` the rest."""

    ops: Backend
    call: Any
    """Plan of the lowered call (`kernels.native.call.NativeCall`)."""
    lowered: Any
    """The lowered score; w_v is None, as a plan holds no array."""
    computed: slice
    """Which of (query, key) the lowering computes."""
    is_projection: bool
    """Whether the score's ``project`` lowers finite queries and keys: it isolates no rows and casts nothing."""

    def run(self, arguments: CallArguments) -> Any:
        """Return what `attend` returns."""
        ops, call = self.ops, self.call
        query, key, value, score, _, _, bias, sink, _, key_exps = arguments
        if type(score) is str:
            score = scores.resolve(score)
        lowered = self.lower(score, query, key)
        operands = [*lowered[:2], value]
        if bias is not None:
            operands.append(bias)
        operands += lowered[2:]
        if sink is not None:
            operands.append(sink)
        if ops.has_planned_gradients and ops.needs_grad(*operands):
            return call.present(ops.record(call.op(arguments, self.lowered), operands))
        mask, seed = call.mask_and_seed(arguments)
        return call.present(call.forward(operands, mask, seed, saves=False, key_exps=key_exps)[0])

    def lower(self, score: Any, query: Array, key: Array) -> Sequence[Array]:
        """Return query and key of the lowered form, and w_v of an additive score."""
        ops, computed = self.ops, self.computed
        if self.is_projection and ops.known_finite(*(query, key)[computed]):
            with ops.numeric_scope():
                found = list(score.project(ops, query, key))
            # A sum with the bias alone keeps the strides of the query.
            found[computed] = map(ops.in_c_order, found[computed])
            return found
        arrays = lower(ops, score, query, key)[1]
        return arrays if arrays.w_v is not None else arrays[:2]
