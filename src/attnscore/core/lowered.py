"""Calls whose score is lowered to another score of other rows: bilinear, cosine, additive with projections.

- Lowering runs in the framework's operations, the lowered score by a plan of its own, for arrays in C order.
- Both are one node of the framework's autograd: `LoweredOp` joins the VJP of the lowering to that of the plan.
- The lowered rows are saved for the backward like outputs, so hooks on saved tensors see them.
- In a derivative of the gradient the score is lowered again, recorded by the framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

from attnscore import scores
from attnscore.backends.base import Array, Backend
from attnscore.scores.base import widen
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
    parameters: tuple[str, ...]
    """Names of the arrays of the score."""
    has_bias: bool
    has_sink: bool
    is_projection: bool
    """Whether the score has ``project`` for rows that are finite, and all arrays have one dtype."""

    @cached_property
    def operand_count(self) -> int:
        """Number of operands that are not of the score."""
        return 3 + self.has_bias + self.has_sink

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Place of each of these among the operands of the lowered call, which has w_v before the sink."""
        places = [*range(3 + self.has_bias)]
        return (*places, *([len(self.call.operands) - 1] if self.has_sink else []))

    @cached_property
    def has_weights(self) -> bool:
        """Whether w_v is an operand of the lowered call, after the bias."""
        return hasattr(self.lowered, "w_v")

    def run(
        self, query: Array, key: Array, value: Array, score: Any, mask: Any, bias: Any, sink: Any, seed: Any,
        valid_lens: Any,
    ) -> Any:  # fmt: skip
        """Return what `attend` returns."""
        ops, call = self.ops, self.call
        if type(score) is str:
            score = scores.resolve(score)
        arrays = [query, key, value]
        if bias is not None:
            arrays.append(bias)
        if sink is not None:
            arrays.append(sink)
        if ops.has_plain_tape:
            arrays += [getattr(score, name) for name in self.parameters]
            if ops.needs_grad(*arrays):
                inner = call.op(query, self.lowered, mask, seed, valid_lens)
                return call.present(ops.record(LoweredOp(self, score, inner), arrays))
        operands = self.operands(self.rows(score, query, key), arrays)
        return call.present(call.forward(operands, *call.values(query, mask, seed, valid_lens), saves=False)[0])

    def rows(self, score: Any, query: Array, key: Array) -> Rows:
        """Return the arrays of the lowered form."""
        ops = self.ops
        if self.is_projection and ops.known_finite(*[(query, key)[i] for i in self.computed]):
            with ops.numeric_scope():
                return Rows(*score.project(ops, query, key))
        return lower(ops, score, query, key)[1]

    def operands(self, rows: Rows, arrays: Sequence[Array]) -> list[Array]:
        """Return the operands of the lowered call, in its order; `arrays` are those of the call."""
        after_bias = 3 + self.has_bias
        found = [rows.query, rows.key, *arrays[2:after_bias]]
        if rows.w_v is not None:
            found.append(rows.w_v)
        if self.has_sink:
            found.append(arrays[after_bias])
        return found


@dataclass(eq=False, slots=True)
class LoweredOp:
    """One recorded call of a score that is lowered (`backends.base.DifferentiableOp`).

    Operands are query, key, value, bias and sink where there are any, and the arrays of the score. Outputs are those of
    the lowered call, with the rows that were computed after the differentiable ones.
    """

    call: LoweredCall
    score: Any
    inner: Any
    """The op of the lowered call (`kernels.native.call.NativeOp`)."""

    @property
    def differentiable_outputs(self) -> int:
        return self.inner.differentiable_outputs  # type: ignore[no-any-return]

    @property
    def saved_outputs(self) -> int:
        return self.inner.saved_outputs + len(self.call.computed)  # type: ignore[no-any-return]

    def constants(self) -> Sequence[Array]:
        return self.inner.constants()  # type: ignore[no-any-return]

    def variables(self) -> tuple[Sequence[Array], Callable[[Sequence[Array]], LoweredOp]]:
        return (), lambda arrays: self

    def with_backward(self) -> LoweredOp:
        return self

    def streaming(self) -> LoweredOp:
        # As for `NativeOp`: planned calls are recorded by frameworks that differentiate a backward by recording it.
        raise NotImplementedError("attnscore: the streaming form of a planned call")

    def without_saved(self, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
        count = self.differentiable_outputs
        return (*outputs[:count], *outputs[count + len(self.call.computed) :])

    def forward(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        call, count = self.call, self.inner.differentiable_outputs
        rows = call.rows(self.score, arrays[0], arrays[1])
        outputs = self.inner.forward(call.operands(rows, arrays))
        return (*outputs[:count], *[rows[i] for i in call.computed], *outputs[count:])

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        call, ops = self.call, self.call.ops
        if wanted is None:
            wanted = [True] * len(arrays)
        query, key, parameters = arrays[0], arrays[1], arrays[call.operand_count :]
        score, computed = self._score_of(parameters), outputs[self.inner.differentiable_outputs :]
        with ops.numeric_scope():
            if ops.needs_grad(*arrays, *[x for x in grads if x is not None]):
                rows = lower(ops, score, query, key)[1]
            else:
                rows = self._saved_rows(score, query, key, computed)
            outputs = outputs[: self.inner.differentiable_outputs]
            found = self.inner.backward(call.operands(rows, arrays), outputs, grads, self._inner_wanted(wanted))
            every = [found[i] for i in call.places]
            if every[0] is not None:
                names = {*compress(("query", "key"), wanted), *compress(call.parameters, wanted[call.operand_count :])}
                incoming = {"query": found[0], "key": found[1]}
                if call.has_weights:
                    incoming["w_v"] = found[3 + call.has_bias]
                every[0], every[1], by_score = score.lowering_vjp(ops, query, key, rows, incoming, names)
                every += [by_score.get(name) for name in call.parameters]
            else:
                every += [None] * len(parameters)
            # In a loop, without `astype`, which takes half a microsecond where there is nothing to do.
            for i, (x, grad) in enumerate(zip(arrays, every, strict=True)):
                if not wanted[i] or grad is None:
                    every[i] = None
                elif grad.dtype != x.dtype:
                    every[i] = ops.astype(grad, ops.dtype(x))
        return tuple(every)

    def _score_of(self, parameters: Sequence[Array]) -> Any:
        """Return the score with other arrays than those of the forward.

        Hooks on saved tensors give others, and autograd gives those that are not leaves as new objects.
        """
        names = self.call.parameters
        for name, x in zip(names, parameters, strict=True):
            if x is not getattr(self.score, name):
                return dataclasses.replace(self.score, **dict(zip(names, parameters, strict=True)))
        return self.score

    def _saved_rows(self, score: Any, query: Array, key: Array, computed: Sequence[Array]) -> Rows:
        """Return the rows of the forward."""
        rows = [query, key]
        for i, x in zip(self.call.computed, computed, strict=False):
            rows[i] = x
        if not self.call.has_weights:
            return Rows(rows[0], rows[1])
        *_, w_v = widen(self.call.ops, *rows, score.w_v)
        return Rows(rows[0], rows[1], w_v)

    def _inner_wanted(self, wanted: Sequence[bool]) -> list[bool]:
        """Return which gradients of the lowered call are needed."""
        call = self.call
        after_bias = 3 + call.has_bias
        found = [True, True, *wanted[2:after_bias]]
        if call.has_weights:
            found.append(True)
        return [*found, *wanted[after_bias : call.operand_count]]
