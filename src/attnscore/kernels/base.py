"""What a kernel is: one way to run a problem.

``reasons_against`` says why it cannot run a problem; empty means it can. A kernel asked for by name runs or
raises; ``auto`` takes the first that can, in order of speed.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnscore.backends.base import Array, SeedHalves
from attnscore.core.problem import Problem
from attnscore.core.tiled import Result, RowGradients, operands
from attnscore.core.tiling import TilePlan

DIFFERENTIABLE = ("log_sum_exp", "entropy")
"""Statistics through which a gradient flows, streamed; the others are detached."""


class Kernel(ABC):
    """Interface of all kernels."""

    name: str
    summary: str
    has_vjp: bool
    """Whether ``backward`` is the gradient; otherwise it is the framework's autodiff through ``forward``."""
    matrix_is_second_pass: bool = False
    """Whether ``forward`` computes the scores again for `Problem.matrix` where there is an output too."""
    saves_scores: bool = False
    """Whether ``forward`` gives the scores too, for ``backward``."""

    def prepare(self, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> Any:
        """Return a plan (`core.plan.ExecutionPlan`) for all calls like this one, or None where each is planned anew.

        `arrays` are query, key, value, bias and sink as the caller has them, where there are any.
        """
        return None

    @property
    def differentiable(self) -> Kernel:
        """The kernel whose gradient the framework can differentiate further: itself, unless it leaves the framework."""
        return self

    def with_backward(self, problem: Problem, plan: TilePlan) -> Kernel:
        """The kernel for a forward whose backward is to come: itself, or one that keeps the scores."""
        return self

    def explain_tiles(self, problem: Problem, plan: TilePlan) -> TilePlan:
        """The plan as this kernel walks it, for `explain`: its own tiles, where `plan` is the streaming engine's.

        All sizes are known.
        """
        return plan

    def notes(self, problem: Problem, plan: TilePlan) -> tuple[str, ...]:
        """What else a reader of `explain` should know of how `problem` is run."""
        return ()

    @abstractmethod
    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        """Why this kernel cannot run `problem`; empty when it can."""

    @abstractmethod
    def forward(self, problem: Problem, plan: TilePlan) -> Result: ...

    @abstractmethod
    def backward(
        self, problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Array]:
        """Gradients of the operands in `wanted`, at least, by name."""

    def missing(self) -> str | None:
        """Why this kernel can run nothing here; None when it can run."""
        return None


@dataclass(frozen=True, eq=False)
class AttentionOp:
    """A kernel on a problem as a function of arrays alone: what a framework's gradient hook can hold.

    Outputs are (out, log_total, entropy and matrix if wanted, top, scores if kept, then the other statistics). The
    first ``differentiable_outputs`` carry gradients; all before the other statistics are kept for the backward.
    """

    kernel: Kernel
    problem: Problem
    plan: TilePlan

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics among the outputs behind those that are kept, in their order."""
        return tuple(name for name in self.problem.statistics if name not in DIFFERENTIABLE)

    @property
    def _differentiable(self) -> tuple[str, ...]:
        """The outputs that carry gradients, by their names in `RowGradients`."""
        entropy = ("entropy",) if "entropy" in self.problem.statistics else ()
        return ("out", "log_sum_exp", *entropy, *(() if self.problem.matrix is None else ("matrix",)))

    @property
    def differentiable_outputs(self) -> int:
        return 2 + ("entropy" in self.problem.statistics) + (self.problem.matrix is not None)

    @property
    def saved_outputs(self) -> int:
        return self.differentiable_outputs + 1 + self.kernel.saves_scores

    def with_backward(self) -> AttentionOp:
        """The run whose backward will be asked for, which may keep the scores too."""
        kernel = self.kernel.with_backward(self.problem, self.plan)
        return self if kernel is self.kernel else dataclasses.replace(self, kernel=kernel)

    def without_scores(self, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """The outputs of the run that `with_backward` was asked of."""
        count = self.saved_outputs
        return (*outputs[: count - 1], *outputs[count:]) if self.kernel.saves_scores else outputs

    def constants(self) -> tuple[Array, ...]:
        return () if self.problem.mask is None else tuple(self.problem.mask.arrays().values())

    def variables(self) -> tuple[tuple[Array, ...], Callable[[Sequence[Array]], AttentionOp]]:
        """The arrays of the mask and of a traced seed, and the same run over others in their place."""
        mask, rest, dropout = self.problem.mask, self.plan.rest, self.problem.dropout
        seed = () if dropout is None or not isinstance(dropout.seed, SeedHalves) else tuple(dropout.seed)
        found = [*(() if mask is None else mask.leaves()), *(() if rest is None else rest.leaves()), *seed]

        def given(arrays: Sequence[Array]) -> AttentionOp:
            if all(map(operator.is_, arrays, found)):
                return self
            left = iter(arrays)
            changes: dict[str, Any] = {"mask": None if mask is None else mask.with_leaves(left)}
            plan = self.plan if rest is None else dataclasses.replace(self.plan, rest=rest.with_leaves(left))
            if dropout is not None and seed:
                changes["dropout"] = dataclasses.replace(dropout, seed=SeedHalves(*left))
            return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **changes), plan=plan)

        return tuple(found), given

    def streaming(self) -> AttentionOp:
        """The same in the framework's own operations: what a derivative of the gradient is taken of."""
        return dataclasses.replace(self, kernel=self.kernel.differentiable)

    def operands(self) -> dict[str, Array]:
        """The arrays that the run is a function of, by name."""
        return operands(self.problem)

    def _with(self, arrays: Sequence[Array]) -> Problem:
        operands = self.operands()
        if all(map(operator.is_, arrays, operands.values())):
            # Most often they are, and a new problem costs 15 us.
            return self.problem
        named = dict(zip(operands, arrays, strict=True))
        own = {name: named.pop(name) for name in ("value", "bias", "sink") if name in named}
        return dataclasses.replace(self.problem, form=self.problem.form.with_arrays(named), **own)

    def forward(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        result = self.kernel.forward(self._with(arrays), self.plan)
        entropy = (result.statistics["entropy"],) if "entropy" in self.problem.statistics else ()
        matrix = () if self.problem.matrix is None else (result.matrix,)
        scores = (result.scores,) if self.kernel.saves_scores else ()
        others = (result.statistics[name] for name in self.statistics)
        return (result.out, result.log_denom, *entropy, *matrix, result.row_max, *scores, *others)

    def result(self, outputs: Sequence[Array]) -> Result:
        """The outputs by name."""
        count = self.differentiable_outputs
        statistics = dict(zip(self.statistics, outputs[self.saved_outputs :], strict=False))
        named = dict(zip(self._differentiable, outputs, strict=False))
        if "entropy" in named:
            statistics["entropy"] = named["entropy"]
        scores = outputs[count + 1] if self.kernel.saves_scores else None
        found = Result(outputs[0], outputs[count], outputs[1], statistics, named.get("matrix"), scores)
        if "log_sum_exp" in self.problem.statistics:
            statistics["log_sum_exp"] = found.log_sum_exp
        return found

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        """Gradients of `arrays`, in their dtypes, from `grads` on the differentiable outputs.

        `outputs` are those that are kept. `wanted` says of each array whether its gradient is (None: all are); the
        others are None.
        """
        ops, names = self.problem.ops, tuple(self.operands())
        chosen = frozenset(names if wanted is None else itertools.compress(names, wanted))
        with ops.numeric_scope():
            result = self.result(outputs)
            incoming = RowGradients(**dict(zip(self._differentiable, grads, strict=False)))
            found = self.kernel.backward(self._with(arrays), self.plan, result, incoming, chosen)
            return tuple(
                ops.astype(found[name], ops.dtype(x)) if name in chosen else None
                for name, x in zip(names, arrays, strict=True)
            )

    def __call__(self) -> Result:
        """Run, with the gradient attached where the framework has one."""
        ops, arrays = self.problem.ops, tuple(self.operands().values())
        own = self.kernel.has_vjp
        return self.result(ops.differentiable(self, arrays) if own else self.forward(arrays))
