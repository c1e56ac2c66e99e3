"""The options of a call over several ranks, and the steps of planning that all frameworks share.

- The rank's own rows are an ordinary problem. The mask and the bias, which cover all keys, are added later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnscore import kernels
from attnscore.base.arguments import check_choice, reject_unknown
from attnscore.base.layout import ScoreShape
from attnscore.parallel.explanation import ParallelExplanation, RowBytes, choose
from attnscore.parallel.plan import Exchange
from attnscore.parallel.schedule import MODES
from attnscore.parallel.shard import Shard
from attnscore.plans.prepared import PreparedKeys
from attnscore.problem.problem import Problem, build_problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Arguments of `attend` other than query, key, value and the ranks; `attend` describes them."""

    queries: Sequence[Shard] | None = None
    keys: Sequence[Shard] | None = None
    mode: str = "auto"
    gradient: str = "auto"
    memory: int | None = None
    score: Any = "scaled_dot"
    mask: Any = None
    valid_lens: Any = None
    bias: Any = None
    sink: Any = None
    dropout: float = 0.0
    seed: Any = None
    head_axis: int = -3
    normalizer: Any = "softmax"
    kernel: str = "auto"
    return_stats: bool | tuple[str, ...] = False

    @classmethod
    def of(cls, attend: Callable[..., Any], arguments: Mapping[str, Any]) -> Options:
        """Return options by name; raise for names that `attend` does not have, as it does."""
        reject_unknown(attend, {name: x for name, x in arguments.items() if name not in cls.__dataclass_fields__})
        return cls(**arguments)

    def check_names(self) -> None:
        """Raise ArgumentError unless mode, gradient and kernel are names that exist."""
        check_choice("mode", self.mode, ("auto", *MODES))
        check_choice("gradient", self.gradient, ("auto", "reduce", "queries"))
        check_choice("kernel", self.kernel, kernels.names())

    def unpack(self, key: Any) -> tuple[Any, Options]:
        """Return the array of prepared keys, and the options with the remaining score; other keys unchanged."""
        if type(key) is not PreparedKeys:
            return key, self
        key, score = key.unpack(self.score)
        return key, replace(self, score=score)

    def own_problem(self, query: Any, key: Any, value: Any) -> Problem:
        """Return the problem of the rank's own rows, without a mask and without a bias."""
        problem, _ = build_problem(
            query, key, value, score=self.score, sink=self.sink, dropout=self.dropout, seed=self.seed, rowwise=True,
            head_axis=self.head_axis, normalizer=self.normalizer, statistics=self.return_stats,
        )  # fmt: skip
        return problem

    def choose(
        self, problem: Problem, sequence_shape: ScoreShape, plan: Exchange, modes: Mapping[str, Any], gradient: str
    ) -> ParallelExplanation:
        """Return the explanation of the caller's mode, or of the best mode that can run."""
        mask = "none" if problem.mask is None else repr(problem.mask)
        size = RowBytes.of_problem(problem)
        reasons = {name: "; ".join(mode.reasons_against(problem, sequence_shape)) for name, mode in modes.items()}
        refused = {name: reason for name, reason in reasons.items() if reason}
        return choose(plan, size, mode=self.mode, gradient=gradient, memory=self.memory, mask=mask, refused=refused)
