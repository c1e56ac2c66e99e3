"""Calls whose score is lowered to another score of other rows: bilinear, cosine, additive with projections.

- Lowering runs in the framework's operations, which its autograd records: PyTorch's own nodes of a projection cost a
  tiny backward 20 us less than a VJP in Python.
- The plan of the call holds that of the lowered score, for arrays in C order: one signature finds both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from attnscore import scores
from attnscore.backends.base import Array, Backend
from attnscore.scores.forms import Form


class Rows(NamedTuple):
    """What a lowered call reads in place of query, key and score."""

    query: Array
    key: Array
    w_v: Array | None = None
    """Weights of an additive score."""


def lower(ops: Backend, score: Any, query: Array, key: Array) -> tuple[Form, Rows]:
    """Return the lowered form on the caller's axes, and its arrays: those that it computes in C order.

    Rows that it leaves as they are keep their layout, which the signature of the call has.
    """
    with ops.numeric_scope():
        form: Any = score.lower(ops, query, key)
        sides = ((form.query, query), (form.key, key))
        rows = [x if x is given else ops.in_c_order(x) for x, given in sides]
    return form, Rows(rows[0], rows[1], getattr(form, "w_v", None))


@dataclass(frozen=True, eq=False)
class LoweredCall:
    """Plan of calls whose score is lowered, in the framework, to one that has a plan."""

    ops: Backend
    call: Any
    """Plan of the lowered call (`kernels.native.call.NativeCall`)."""
    lowered: Any
    """The lowered score; one with weights w_v has None in their place, as a plan holds no array."""
    computed: tuple[int, ...]
    """Which of query (0) and key (1) the lowering computes."""
    is_projection: bool
    """Whether the score has ``project`` for rows that are finite, and all arrays have one dtype."""

    def run(
        self, query: Array, key: Array, value: Array, score: Any, mask: Any, bias: Any, sink: Any, seed: Any,
        valid_lens: Any,
    ) -> Any:  # fmt: skip
        """Return what `attend` returns."""
        ops, call = self.ops, self.call
        if type(score) is str:
            score = scores.resolve(score)
        operands = self.operands(self.rows(score, query, key), value, bias, sink)
        if ops.has_plain_tape and ops.needs_grad(*operands):
            return call.present(ops.record(call.op(query, self.lowered, mask, seed, valid_lens), operands))
        return call.present(call.forward(operands, *call.values(query, mask, seed, valid_lens), saves=False)[0])

    def rows(self, score: Any, query: Array, key: Array) -> Rows:
        """Return the arrays of the lowered form."""
        ops = self.ops
        if self.is_projection and ops.known_finite(*[(query, key)[i] for i in self.computed]):
            with ops.numeric_scope():
                return Rows(*score.project(ops, query, key))
        return lower(ops, score, query, key)[1]

    @staticmethod
    def operands(rows: Rows, value: Array, bias: Array | None, sink: Array | None) -> list[Array]:
        """Return the operands of the lowered call, in its order."""
        found = [rows.query, rows.key, value]
        if bias is not None:
            found.append(bias)
        if rows.w_v is not None:
            found.append(rows.w_v)
        if sink is not None:
            found.append(sink)
        return found
