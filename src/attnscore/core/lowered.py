"""Calls whose score is lowered to another score of computed queries and keys: bilinear, cosine, projected additive.

- Lowering runs in the framework's operations, which its autograd records: PyTorch's own nodes of a projection cost a
  tiny backward 20 us less than a VJP in Python.
- The plan of the call holds that of the lowered call, whose computed arrays are in C order: one signature finds both.
"""

from __future__ import annotations

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
    computed: tuple[int, ...]
    """Which of query (0) and key (1) the lowering computes."""
    is_projection: bool
    """Whether the score's ``project`` lowers finite queries and keys: it isolates no rows and casts nothing."""

    def run(self, arguments: CallArguments) -> Any:
        """Return what `attend` returns."""
        ops, call, score = self.ops, self.call, arguments.score
        if type(score) is str:
            score = scores.resolve(score)
        lowered = self.lower(score, arguments.query, arguments.key)
        operands = self.operands(lowered, arguments.value, arguments.bias, arguments.sink)
        if ops.has_planned_gradients and ops.needs_grad(*operands):
            return call.present(ops.record(call.op(arguments, self.lowered), operands))
        return call.present(call.forward(operands, *call.mask_and_seed(arguments), saves=False)[0])

    def lower(self, score: Any, query: Array, key: Array) -> LoweredArrays:
        """Return the arrays of the lowered form."""
        ops = self.ops
        if self.is_projection and ops.known_finite(*[(query, key)[i] for i in self.computed]):
            with ops.numeric_scope():
                projected = LoweredArrays(*score.project(ops, query, key))
            # A sum with the bias alone keeps the strides of the query.
            rows = [ops.in_c_order(x) if i in self.computed else x for i, x in enumerate(projected[:2])]
            return LoweredArrays(rows[0], rows[1], projected.w_v)
        return lower(ops, score, query, key)[1]

    @staticmethod
    def operands(lowered: LoweredArrays, value: Array, bias: Array | None, sink: Array | None) -> list[Array]:
        """Return the operands of the lowered call, in its order."""
        found = [lowered.query, lowered.key, value]
        if bias is not None:
            found.append(bias)
        if lowered.w_v is not None:
            found.append(lowered.w_v)
        if sink is not None:
            found.append(sink)
        return found
