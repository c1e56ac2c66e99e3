"""Results of a call: the outputs of a kernel, their gradients, and the result of `attend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnscore.backends.base import Array
from attnscore.problem.problem import Problem
from attnscore.problem.statistics import AttentionStats, in_returned_dtype


@dataclass(frozen=True, eq=False)
class Result:
    """Outputs of a forward, on the canonical axes; one number per query has a last axis of 1."""

    out: Array
    row_max: Array
    """Number subtracted from the scores of a query before exp; carries no gradient."""
    log_denom: Array
    """log sum exp(scores - row_max), -inf for a fully masked query; the threshold of another normalizer."""
    statistics: dict[str, Array]
    matrix: Array | None = None
    """`Problem.matrix`, in the accumulator dtype."""
    scores: Array | None = None
    """All scores of a short call, from a kernel that saves them for its backward."""

    @property
    def log_sum_exp(self) -> Array:
        """row_max + log_denom. Weights are computed from the two terms: their sum is rounded at the scale of scores."""
        return self.row_max + self.log_denom


@dataclass(frozen=True, eq=False)
class RowGradients:
    """Gradients of the outputs of a forward, on the canonical axes; None where there is none."""

    out: Array | None
    log_sum_exp: Array | None = None
    entropy: Array | None = None
    matrix: Array | None = None


def present(problem: Problem, result: Result) -> Any:
    """Return the result of `attend` on the caller's axes: the output, and the requested weights and statistics."""
    ops, layout = problem.ops, problem.layout
    outputs: list[Any] = [layout.from_canonical(ops, result.out)]
    if problem.matrix is not None:
        outputs.append(layout.scores_from_canonical(ops, ops.astype(result.matrix, problem.dtype)))
    if problem.statistics:
        rows = {name: in_returned_dtype(ops, name, result.statistics[name][..., 0]) for name in problem.statistics}
        outputs.append(AttentionStats(**{name: layout.rows_from_canonical(ops, x) for name, x in rows.items()}))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
