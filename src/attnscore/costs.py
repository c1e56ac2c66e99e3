"""What a call costs, how it would run, and what runs here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnscore import frameworks, kernels, scoring, tiling
from attnscore.checks import check_count
from attnscore.frameworks.contract import Array
from attnscore.pose import check_flag, pose, wanted_statistics
from attnscore.scoring import arrays_of
from attnscore.scoring.contract import operations_of
from attnscore.tiling import TilePlan


class Cost(NamedTuple):
    """What one forward costs.

    Attributes
    ----------
    operations : multiplications, additions and function values, masks not counted
    bytes : inputs and outputs, read or written once, in float32
    matrix_bytes : what a form that keeps every intermediate would hold besides: scores and weights, and for additive
        scores the (query, key, h) array
    parameters : numbers that the score learns
    """

    operations: int
    bytes: int
    matrix_bytes: int
    parameters: int


def cost(
    score: Any,
    *,
    query_len: int,
    key_len: int,
    dim: int,
    key_dim: int | None = None,
    value_dim: int | None = None,
    heads: int = 1,
    batch: int = 1,
) -> Cost:
    """Operations, bytes and parameters of attention with `score`, from shapes alone.

    Scores as the score counts them (dot: 2 n m d; additive: 4 n m h and its projections), softmax 4 n m, pooling
    2 n m v.

    Parameters
    ----------
    score : a score object or a registered name
    query_len, key_len, dim, key_dim, value_dim, heads, batch : int
        `key_dim` and `value_dim` None: as `dim`.

    Returns
    -------
    Cost

    Raises
    ------
    ArgumentError, ShapeError
        A size that is no whole number, or one that the score cannot take.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.cost("dot", query_len=512, key_len=512, dim=64).operations
    68157440
    """
    score = scoring.resolve(score)
    key_dim = dim if key_dim is None else key_dim
    value_dim = dim if value_dim is None else value_dim
    sizes = {
        "query_len": query_len, "key_len": key_len, "dim": dim, "key_dim": key_dim,
        "value_dim": value_dim, "heads": heads, "batch": batch,
    }  # fmt: skip
    for name, size in sizes.items():
        check_count(name, size)
    scoring.check(score, dim, key_dim)
    pairs = query_len * key_len
    own = operations_of(score, query_len, key_len, dim, key_dim)
    arrays = query_len * (dim + value_dim) + key_len * (key_dim + value_dim)
    parameters = sum(math.prod(x.shape) for x in arrays_of(score).values())
    hidden = int(arrays_of(score)["w_v"].shape[-1]) if "w_v" in arrays_of(score) else 0
    return Cost(
        operations=batch * heads * (own + 4 * pairs + 2 * pairs * value_dim),
        bytes=4 * (batch * heads * arrays + parameters),
        matrix_bytes=4 * batch * heads * pairs * (2 + hidden),
        parameters=parameters,
    )


@dataclass(frozen=True, eq=False)
class Explanation:
    """How a call would run. Prints as a table."""

    kernel: str
    reasons: dict[str, tuple[str, ...]]
    """Against each other kernel."""
    score: str
    form: str
    mask: str
    remarks: tuple[str, ...]
    plan: TilePlan
    """Tiles as the kernel walks them; of a batch, those that any of its rows needs."""
    operations: int
    bytes: int

    def __str__(self) -> str:
        kept = 1 - self.plan.fractions["skip"]
        rows = [
            ("kernel", self.kernel),
            *((f"not {name}", "; ".join(reasons)) for name, reasons in self.reasons.items()),
            ("score", f"{self.score}, as {self.form}"),
            ("mask", self.mask),
            *(("", remark) for remark in self.remarks),
            ("operations", f"{self.operations:,} ({kept:.0%} of the unmasked)"),
            ("bytes", f"{self.bytes:,} in and out"),
            ("tiles", str(self.plan).replace("\n", "\n" + " " * 16)),
        ]
        return "\n".join(f"{name:<15} {text}" for name, text in rows)


def explain(
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
    kernel: str = "auto",
    return_weights: bool = False,
    return_stats: bool | tuple[str, ...] = False,
) -> Explanation:
    """The plan of ``attend(query, key, value, ...)``, which is checked and not run.

    Parameters
    ----------
    query, key, value, score, mask, ...
        As in `attend`.

    Returns
    -------
    Explanation
        The kernel chosen, why each other one was not, tiles skipped, operations, bytes; prints as a table.

    Raises
    ------
    AttnscoreError
        Whatever `attend` would raise for the same arguments.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> x = np.ones((1, 8, 4))
    >>> plan = ats.explain(x, x, x, mask=ats.Causal())
    >>> sorted([plan.kernel, *plan.reasons])
    ['dense', 'native', 'streaming']
    """
    check_flag("return_weights", return_weights)
    with frameworks.of({"query": query}).quiet():
        problem, _ = pose(
            query, key, value, score=score, mask=mask, valid_lens=valid_lens, bias=bias, sink=sink,
            dropout=dropout, seed=seed, head_axis=head_axis, statistics=wanted_statistics(return_stats),
        )  # fmt: skip
        grid, layout = problem.grid, problem.layout
        # First: sizes that are not known yet are refused here.
        whole = cost(
            problem.score,
            query_len=grid.query_len,
            key_len=grid.key_len,
            dim=layout.dim,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            heads=grid.heads * grid.groups,
            batch=math.prod(grid.lead),
        )
        chosen, plan = kernels.choose(kernel, problem), tiling.plan(problem)
        remarks, plan = chosen.remarks(problem, plan), chosen.walk(problem, plan)
    itemsize = 2 if problem.dtype in ("float16", "bfloat16") else 8 if problem.dtype == "float64" else 4
    moved = sum(math.prod(x.shape) for x in (problem.query, problem.key, problem.value))
    moved += math.prod(grid.rows) * layout.value_dim
    return Explanation(
        kernel=chosen.name,
        reasons=kernels.reasons(problem, chosen),
        score=type(problem.score).__name__,
        form=type(problem.form).__name__,
        mask="none" if problem.mask is None else repr(problem.mask),
        remarks=remarks,
        plan=plan,
        operations=round(whole.operations * (1 - plan.fractions["skip"])),
        bytes=moved * itemsize,
    )


def available() -> dict[str, dict[str, str | None]]:
    """Which frameworks and kernels work here: None, or the reason why one does not.

    Returns
    -------
    dict with "frameworks" and "kernels", each from name to None or a reason

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.available()["frameworks"]["numpy"] is None
    True
    """
    return {
        "frameworks": frameworks.availability(),
        "kernels": {name: kernel.missing() for name, kernel in kernels.table().items()},
    }
