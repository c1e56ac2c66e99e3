"""The cost of a call, the plan of a call, and the frameworks and kernels available."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Never

import numpy as np

from attnscore import backends, kernels, scores
from attnscore.backends import native
from attnscore.backends.base import Array, itemsize
from attnscore.base.arguments import check_choice, check_count, check_flag, hides_unknown, reject_unknown, shown
from attnscore.base.thresholds import PLANNED_HEADS
from attnscore.errors import ArgumentError, message
from attnscore.kernels import tiling
from attnscore.kernels.tiling import TilePlan
from attnscore.plans.prepared import PreparedKeys
from attnscore.problem.problem import build_problem
from attnscore.scores import Additive, Bilinear, arrays_of
from attnscore.scores.base import operations_of


class Cost(NamedTuple):
    """Cost of one forward.

    Attributes
    ----------
    operations : multiplications, additions and function values, masks not counted
    bytes : inputs and outputs, read or written once, in float32
    matrix_bytes : additional bytes of an implementation that keeps every intermediate: scores and weights, and for
        additive scores the (query, key, h) array
    parameters : numbers that the score learns, one set of them for all heads
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
    num_hiddens: int | None = None,
    heads: int = 1,
    batch: int = 1,
) -> Cost:
    """Count operations, bytes and parameters of attention with `score`, from shapes alone.

    A score counts its own operations (dot: 2 n m d; additive: 4 n m h and its projections); softmax 4 n m, pooling
    2 n m v.

    Parameters
    ----------
    score : a score object, a registered name, "additive" or "bilinear"
        The last two by name need no arrays: W_q (num_hiddens, dim), W_k (num_hiddens, key_dim) and w_v (num_hiddens,)
        are counted, and W (dim, key_dim), as the layers have them.
    query_len, key_len, dim, key_dim, value_dim, heads, batch : int
        `key_dim` and `value_dim` None: as `dim`.
    num_hiddens : int, optional
        h of ``score="additive"``, for which it is required; None otherwise.

    Returns
    -------
    Cost

    Raises
    ------
    ArgumentError, ShapeError
        An unknown name, a size that is no whole number or that the score cannot take.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.cost("dot", query_len=512, key_len=512, dim=64).operations
    68157440
    >>> ats.cost("additive", query_len=8, key_len=8, dim=4, num_hiddens=16).parameters
    144
    """
    key_dim = dim if key_dim is None else key_dim
    value_dim = dim if value_dim is None else value_dim
    sizes = {
        "query_len": query_len, "key_len": key_len, "dim": dim, "key_dim": key_dim,
        "value_dim": value_dim, "heads": heads, "batch": batch,
    }  # fmt: skip
    for name, size in sizes.items():
        check_count(name, size)
    score = _resolve_score(score, dim, key_dim, num_hiddens)
    scores.check(score, dim, key_dim)
    pairs = query_len * key_len
    score_operations = operations_of(score, query_len, key_len, dim, key_dim)
    arrays = query_len * (dim + value_dim) + key_len * (key_dim + value_dim)
    parameters = sum(math.prod(x.shape) for x in arrays_of(score).values())
    # h of the array (query, key, h), which each additive term of a sum has.
    hidden = sum(int(x.shape[-1]) for name, x in arrays_of(score).items() if name.split(".")[-1] == "w_v")
    return Cost(
        operations=batch * heads * (score_operations + 4 * pairs + 2 * pairs * value_dim),
        bytes=4 * (batch * heads * arrays + parameters),
        matrix_bytes=4 * batch * heads * pairs * (2 + hidden),  # scores, weights, hidden features
        parameters=parameters,
    )


def _resolve_score(score: Any, dim: int, key_dim: int, num_hiddens: int | None) -> Any:
    """Return the score object; "additive" and "bilinear", names in this function alone, get arrays of these shapes."""
    by_name = isinstance(score, str) and scores.named(score) is None
    if num_hiddens is not None and not (by_name and score == "additive"):
        hint = "a score object has its own sizes, and other scores have no hidden units"
        raise ArgumentError(message("num_hiddens", 'None unless score="additive"', shown(num_hiddens), hint=hint))
    if not by_name:
        return scores.resolve(score)
    check_choice("score", score, (*scores.registered(), "additive", "bilinear"))
    if score == "bilinear":
        return Bilinear(_shape_only(dim, key_dim))
    if num_hiddens is None:
        expected = 'a whole number, 0 or more, for score="additive"'
        raise ArgumentError(message("num_hiddens", expected, None, hint="the h of W_q (h, dim), W_k (h, key_dim), w_v"))
    h = check_count("num_hiddens", num_hiddens)
    return Additive(_shape_only(h), _shape_only(h, dim), _shape_only(h, key_dim))


def _shape_only(*shape: int) -> Array:
    """Return an array of this shape that takes no memory: only its shape is read."""
    try:
        return np.broadcast_to(np.int8(0), shape)
    except (ValueError, OverflowError) as error:
        expected = "sizes of which NumPy makes an array"
        raise ArgumentError(message("dim, key_dim, num_hiddens", expected, shown(shape))) from error


@dataclass(frozen=True, eq=False)
class Explanation:
    """The plan of a call. Prints as a table."""

    kernel: str
    reasons: dict[str, tuple[str, ...]]
    """Why each other kernel was not chosen."""
    score: str
    form: str
    mask: str
    remarks: tuple[str, ...]
    weights: str | None
    """Shape, bytes and source of the weights, if they are returned."""
    plan: TilePlan
    """Tiles that the kernel visits; of a batch, the tiles that any entry needs."""
    operations: int
    bytes: int

    def __str__(self) -> str:
        computed = 1 - self.plan.fractions["skip"]
        rows = [
            ("kernel", self.kernel),
            *((f"not {name}", "; ".join(reasons)) for name, reasons in self.reasons.items()),
            ("score", f"{self.score}, as {self.form}"),
            ("mask", self.mask),
            *(("", note) for note in self.remarks),
            *((("weights", self.weights),) if self.weights else ()),
            ("operations", f"{self.operations:,} ({computed:.0%} of all pairs)"),
            ("bytes", f"{self.bytes:,} in and out"),
            ("tiles", str(self.plan).replace("\n", "\n" + " " * 16)),
        ]
        return "\n".join(f"{name:<15} {text}" for name, text in rows)


@hides_unknown
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
    normalizer: Any = "softmax",
    kernel: str = "auto",
    return_weights: bool = False,
    return_stats: bool | tuple[str, ...] = False,
    **unknown: Never,
) -> Explanation:
    """The plan of ``attend(query, key, value, ...)``, which is checked and not run.

    Parameters
    ----------
    query, key, value, score, mask, ...
        As in `attend`.

    Returns
    -------
    Explanation
        The kernel chosen, why each other one was not, where the weights come from if they are returned, tiles skipped,
        operations, bytes; prints as a table.

    Raises
    ------
    AttnscoreError
        As `attend`, for the same arguments.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> x = np.ones((1, 8, 4))
    >>> plan = ats.explain(x, x, x, mask=ats.Causal())
    >>> sorted([plan.kernel, *plan.reasons])
    ['dense', 'few_keys', 'fused', 'gather', 'native', 'one_tile', 'streaming', 'triton']
    """
    reject_unknown(explain, unknown)
    if type(key) is PreparedKeys:
        key, score = key.unpack(score)
    return_weights = check_flag("return_weights", return_weights)
    query, key, value = map(backends.variable_value, (query, key, value))
    with backends.of({"query": query}).numeric_scope():
        problem, _ = build_problem(
            query, key, value, score=score, mask=mask, valid_lens=valid_lens, bias=bias, sink=sink,
            dropout=dropout, seed=seed, head_axis=head_axis, normalizer=normalizer,
            statistics=return_stats, matrix="weights" if return_weights else None,
        )  # fmt: skip
        score_shape, layout = problem.score_shape, problem.layout
        # First, because it raises for symbolic sizes.
        full_cost = cost(
            problem.score,
            query_len=score_shape.query_len,
            key_len=score_shape.key_len,
            dim=layout.dim,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            heads=score_shape.heads * score_shape.groups,
            batch=math.prod(score_shape.lead),
        )
        chosen_kernel, plan = kernels.choose(kernel, problem), tiling.plan(problem)
        notes, plan = chosen_kernel.notes(problem, plan), chosen_kernel.explain_tiles(problem, plan)
        heads = math.prod(score_shape.rows[:-1])
        if chosen_kernel.name == "native" and heads > PLANNED_HEADS:
            notes += (f"no plan is cached for {heads:,} heads of all elements of the batch, above {PLANNED_HEADS:,}",)
    size = itemsize(problem.dtype)
    elements = sum(math.prod(x.shape) for x in (problem.query, problem.key, problem.value))
    elements += math.prod(score_shape.rows) * layout.value_dim
    weights = None
    if return_weights:
        pairs = math.prod(score_shape.rows) * score_shape.key_len
        is_second = chosen_kernel.matrix_is_second_pass
        source = "a second pass over the scores" if is_second else "the pass that gives the output"
        weights = f"{score_shape.user_shape}, {pairs * size:,} bytes, from {source}"
        elements += pairs
    return Explanation(
        kernel=chosen_kernel.name,
        reasons=kernels.reasons(problem, chosen_kernel),
        score=type(problem.score).__name__,
        form=type(problem.form).__name__,
        mask="none" if problem.mask is None else repr(problem.mask),
        remarks=notes,
        weights=weights,
        plan=plan,
        operations=round(full_cost.operations * (1 - plan.fractions["skip"])),
        bytes=elements * size,
    )


class Unavailable(str):
    """The reason why something is not available: a text that is false in a condition."""

    def __bool__(self) -> bool:
        return False


def available() -> dict[str, dict[str, Literal[True] | Unavailable]]:
    """Return the available frameworks, kernels and CPU targets: True, or the reason why one is not.

    A reason is a text that is false in a condition: ``if available()["kernels"]["native"]:`` works.

    Returns
    -------
    dict with "frameworks", "kernels" and "targets", each from name to True or a reason, and "fallbacks"
        Targets are the instruction sets of the native kernels that this CPU could run. Fallbacks are the private names
        that a framework in use lacks, each with the operation that is slower without it.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.available()["frameworks"]["numpy"]
    True
    """
    reasons: dict[str, dict[str, str | None]] = {
        "frameworks": backends.availability(),
        "kernels": {name: kernel.missing() for name, kernel in kernels.table().items()},
        "targets": native.targets(),
        "fallbacks": {**backends.fallbacks()},
    }
    return {
        kind: {name: True if reason is None else Unavailable(reason) for name, reason in by_name.items()}
        for kind, by_name in reasons.items()
    }
