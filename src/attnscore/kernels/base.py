"""Interface of the kernels, and of the plans by which everything runs.

- ``reasons_against`` lists why a kernel cannot run a problem; an empty list means that it can.
- ``reasons_not_automatic`` lists why another one is faster, or takes less memory.
- A kernel chosen by name runs or raises; ``auto`` takes the first without reasons, in order of speed.
- A kernel is one algorithm: an algorithm with other conditions is another kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from attnscore import backends
from attnscore.backends.base import Array, DifferentiableOp, SeedHalves
from attnscore.base.arguments import CallArguments
from attnscore.base.layout import may_equal
from attnscore.kernels.tiling import TilePlan
from attnscore.problem.dropout import Dropout, PairDropout
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients, present
from attnscore.problem.statistics import DIFFERENTIABLE

Fact = Literal["masked", "staged"]
"""Fact about a problem: it has a mask; its arrays are traced by a program of TensorFlow or JAX."""


class Kernel(ABC):
    """Interface of all kernels."""

    name: str
    summary: str
    needs: ClassVar[frozenset[Fact]] = frozenset()
    """Facts without which the kernel has `reasons_against` any problem, so that "auto" need not ask for them."""
    is_sometimes_slower: ClassVar[bool] = False
    """Whether the kernel may have `reasons_not_automatic`."""
    has_vjp: bool = True
    """Whether ``backward`` computes the gradient; otherwise the framework's autodiff differentiates ``forward``."""
    matrix_is_second_pass: bool = False
    """Whether ``forward`` computes all scores for the output, and once more for `Problem.matrix`."""
    saves_scores: bool = False
    """Whether ``forward`` also returns the scores, for ``backward``."""

    def prepare(self, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> Plan:
        """Return the plan of all calls with this call's signature, or a plan of this call alone.

        `arrays` are the caller's, from whose layouts a plan of all calls is built: query, key, value and, if the call
        has them, bias, sink, w_v of an additive score, the bandwidth of a Gaussian, and a boolean mask or valid
        lengths that are the whole mask.
        """
        return SinglePlan(self, problem, tiles)

    @property
    def differentiable(self) -> Kernel:
        """Kernel whose gradient the framework can differentiate again; by default this kernel."""
        return self

    def with_backward(self, problem: Problem, tiles: TilePlan) -> Kernel:
        """Return the kernel for a forward that a backward follows: itself, or one that keeps more for the backward."""
        return self

    def explain_tiles(self, problem: Problem, tiles: TilePlan) -> TilePlan:
        """Return this kernel's tiles for `explain`, where all sizes are known; `tiles` are the streaming kernel's."""
        return tiles

    def notes(self, problem: Problem, tiles: TilePlan) -> tuple[str, ...]:
        """Return further lines of `explain` about how this kernel runs `problem`."""
        return ()

    @abstractmethod
    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        """Return why this kernel cannot run `problem`; empty when it can."""

    def reasons_not_automatic(self, problem: Problem) -> tuple[str, ...]:
        """Return why "auto" passes this kernel over for a problem that it can run."""
        return ()

    @abstractmethod
    def forward(self, problem: Problem, tiles: TilePlan) -> Result: ...

    @abstractmethod
    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        """Return the gradients by name, of the operands in `requested` at least."""

    def missing(self) -> str | None:
        """Return why this kernel cannot run on this machine; None when it can."""
        return None


class Plan(ABC):
    """Plan of all calls of one signature, which is cached, or of one call alone."""

    is_reusable = True
    """Whether the plan runs other calls of its signature, and so holds no array of a caller."""

    @property
    def cache_weight(self) -> int:
        """Weight of the plan in the cache: heads of all elements of the batch, as it holds about 2 KB for each."""
        return 0

    @abstractmethod
    def run(self, arguments: CallArguments) -> Any:
        """Return the result of `attend`."""


@dataclass(frozen=True, eq=False)
class SinglePlan(Plan, DifferentiableOp):
    """Plan of one call, with its arrays: a kernel applied to a problem, as a function of arrays alone.

    Outputs are (out, log_denom, entropy and matrix if requested, row_max, scores if saved, the other statistics).
    The first ``differentiable_count`` carry gradients; the first ``saved_count`` are saved for the backward.
    `DifferentiableOp` documents the methods that have no docstring here.
    """

    kernel: Kernel
    problem: Problem
    tiles: TilePlan
    is_reusable = False

    def __repr__(self) -> str:
        tiles, saved = f"{self.tiles.query_tile} x {self.tiles.key_tile}", ", ".join(self._saved)
        return f"SinglePlan({self.kernel.name}, {self.problem.dtype}, tiles of {tiles}, saves {saved})"

    def run(self, arguments: CallArguments) -> Any:
        with self.problem.ops.numeric_scope():
            return present(self.problem, self())

    @property
    def has_loops(self) -> bool:
        tiles = self.tiles
        return not (may_equal(tiles.query_tile, tiles.query_len) and may_equal(tiles.key_tile, tiles.key_len))

    @property
    def _differentiable(self) -> tuple[str, ...]:
        """Names of the outputs that carry gradients; log_denom has the gradient of the log-sum-exp."""
        entropy = ("entropy",) if "entropy" in self.problem.statistics else ()
        return ("out", "log_denom", *entropy, *(() if self.problem.matrix is None else ("matrix",)))

    @property
    def _saved(self) -> tuple[str, ...]:
        """Names of the outputs that the backward reads."""
        return (*self._differentiable, "row_max", *(("scores",) if self.kernel.saves_scores else ()))

    @property
    def _outputs(self) -> tuple[str, ...]:
        """Names of all outputs: the log-sum-exp is none of them, as it is row_max + log_denom."""
        return (*self._saved, *(name for name in self.problem.statistics if name not in DIFFERENTIABLE))

    @property
    def differentiable_count(self) -> int:
        return len(self._differentiable)

    @property
    def saved_count(self) -> int:
        return len(self._saved)

    @property
    def seed(self) -> int:
        dropout = self.problem.dropout
        return 0 if dropout is None or isinstance(dropout.seed, SeedHalves) else dropout.seed

    def with_seed(self, seed: int) -> SinglePlan:
        dropout = dataclasses.replace(cast(Dropout, self.problem.dropout), seed=seed)
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, dropout=dropout))

    def with_backward(self) -> SinglePlan:
        kernel = self.kernel.with_backward(self.problem, self.tiles)
        return self if kernel is self.kernel else dataclasses.replace(self, kernel=kernel)

    def without_saved(self, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
        # `result` reads row_max too, for the log-sum-exp.
        return tuple(x for name, x in zip(self._outputs, outputs, strict=True) if name != "scores")

    def constants(self) -> tuple[Array, ...]:
        return () if self.problem.mask is None else tuple(self.problem.mask.arrays().values())

    def variables(self) -> tuple[tuple[Array, ...], Callable[[Sequence[Array]], SinglePlan]]:
        mask, remaining_mask, dropout = self.problem.mask, self.tiles.remaining_mask, self.problem.dropout
        seed = () if dropout is None or not isinstance(dropout.seed, SeedHalves) else tuple(dropout.seed)
        pair_dropout = dropout if isinstance(dropout, PairDropout) else None
        pairs = () if pair_dropout is None else (pair_dropout.row, pair_dropout.key)
        leaves = [leaf for x in (mask, remaining_mask) if x is not None for leaf in x.leaves()]
        # A gradient hook passes these to its function as inputs, as it must not close over traced arrays.
        variable_arrays = (*leaves, *pairs, *seed)

        def with_variables(arrays: Sequence[Array]) -> SinglePlan:
            """Return this plan with `arrays` in place of `variable_arrays`, in their order."""
            if all(map(operator.is_, arrays, variable_arrays)):
                return self
            remaining = iter(arrays)
            changes: dict[str, Any] = {"mask": None if mask is None else mask.with_leaves(remaining)}
            tiles = self.tiles
            if remaining_mask is not None:
                tiles = dataclasses.replace(tiles, remaining_mask=remaining_mask.with_leaves(remaining))
            if pair_dropout is not None:
                changes["dropout"] = dataclasses.replace(pair_dropout, row=next(remaining), key=next(remaining))
            if dropout is not None and seed:
                changes["dropout"] = dataclasses.replace(changes.get("dropout", dropout), seed=SeedHalves(*remaining))
            return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **changes), tiles=tiles)

        return variable_arrays, with_variables

    def streaming(self) -> SinglePlan:
        return dataclasses.replace(self, kernel=self.kernel.differentiable)

    def operands(self) -> dict[str, Array]:
        """Return the arrays that the op is a function of, by name."""
        return self.problem.operands()

    def _problem_with(self, arrays: Sequence[Array]) -> Problem:
        """Return the problem with other arrays for its operands, in their order."""
        operands = self.operands()
        if all(map(operator.is_, arrays, operands.values())):
            # The common case; a new problem would cost 15 us.
            return self.problem
        by_name = dict(zip(operands, arrays, strict=True))
        fields = {name: by_name.pop(name) for name in ("value", "bias", "sink") if name in by_name}
        return dataclasses.replace(self.problem, form=self.problem.form.with_arrays(by_name), **fields)

    def forward(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        # A framework may call this when it differentiates a program, outside the scope of the call.
        with self.problem.ops.numeric_scope():
            result = self.kernel.forward(self._problem_with(arrays), self.tiles)
        outputs = {**vars(result), **result.statistics}
        return tuple(outputs[name] for name in self._outputs)

    def result(self, outputs: Sequence[Array]) -> Result:
        """Return the outputs, all or the saved ones alone, as a `Result`."""
        by_name = dict(zip(self._outputs, outputs, strict=False))
        statistics = {name: by_name[name] for name in self.problem.statistics if name in by_name}
        if "log_sum_exp" in self.problem.statistics:
            statistics["log_sum_exp"] = by_name["row_max"] + by_name["log_denom"]
        others = {name: by_name.get(name) for name in ("matrix", "scores")}
        return Result(by_name["out"], by_name["row_max"], by_name["log_denom"], statistics, **others)

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        requested: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        ops, names = self.problem.ops, tuple(self.operands())
        requested_names = frozenset(names if requested is None else itertools.compress(names, requested))
        with ops.numeric_scope():
            result = self.result(outputs)
            incoming = dict(zip(self._differentiable, grads, strict=False))
            row_gradients = RowGradients(*map(incoming.get, ("out", "log_denom", "entropy", "matrix")))
            problem = self._problem_with(arrays)
            gradients = self.kernel.backward(problem, self.tiles, result, row_gradients, requested_names)
            return tuple(
                ops.astype(gradients[name], ops.dtype(x)) if name in requested_names else None
                for name, x in zip(names, arrays, strict=True)
            )

    def __call__(self) -> Result:
        """Run, with the gradient attached where the framework has one."""
        ops, arrays = self.problem.ops, tuple(self.operands().values())
        if not self.kernel.has_vjp:
            return self.result(self.forward(arrays))
        # A backward reads the mask again, and a program shares NumPy's memory: the caller may have written to the mask.
        mask_is_read_later = ops.needs_grad(*arrays) or ops.needs_host_callback(*arrays)
        op = self.with_saved_mask() if mask_is_read_later else self
        return op.result(ops.differentiable(op, arrays))

    def with_saved_mask(self) -> SinglePlan:
        """Return the op with copies of the arrays in its mask to which a caller might write unnoticed."""
        arrays, with_variables = self.variables()
        return with_variables([snapshot(x) for x in arrays])


def snapshot(x: Array) -> Array:
    """Return a copy, or the array itself where its framework allows no writes, or counts them for the backward."""
    ops = backends.of_type(type(x))
    return x if ops is None or ops.version(x) is not None else ops.copy(x)
