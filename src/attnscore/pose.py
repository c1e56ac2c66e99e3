"""From a caller's arguments to a checked Problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from attnscore import frameworks, scoring
from attnscore.checks import shown
from attnscore.dropout import check_dropout
from attnscore.errors import ArgumentError, ShapeError, message, with_shapes
from attnscore.frameworks.contract import Array, Framework
from attnscore.grid import Layout
from attnscore.masking import Mask, as_mask, recognised
from attnscore.problem import PairMatrix, Problem, check_arrays, check_bias, check_sink
from attnscore.recall import Memory
from attnscore.scoring.contract import Pullback
from attnscore.softmax import STATISTICS

# Asked of by functions of the weights alone: None would hide a forgotten value.
NO_VALUE = object()
_LAYOUTS: Memory[Layout] = Memory()


def pose(
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
    statistics: tuple[str, ...] = (),
    matrix: PairMatrix | None = None,
    pullback: bool = False,
) -> tuple[Problem, Pullback | None]:
    """Check everything, lower the score, and put all on the uniform axes.

    `value` NO_VALUE: the question is about the weights alone. With `pullback`, the score's own pull-back comes along,
    for a framework without autodiff.
    """
    arrays = {"query": query, "key": key} | ({} if value is NO_VALUE else {"value": value})
    extras = {name: x for name, x in (("bias", bias), ("sink", sink)) if frameworks.is_array(x)}
    ops = frameworks.of(arrays | extras)
    frameworks.check_not_recorded(ops, "this function")
    score = scoring.resolve(score)
    ops.seen(type(score))
    arrays = dict(zip(arrays, ops.autocast(*arrays.values()), strict=True))
    layout = _LAYOUTS.recall(_facts(arrays, head_axis), lambda: check_arrays(ops, arrays, head_axis))
    query, key = arrays["query"], arrays["key"]
    value = arrays["value"] if "value" in arrays else key[..., :0]
    scoring.check_score_arrays(ops, score, query)
    checked_mask = _mask(ops, mask, valid_lens, layout, query)
    uniform_query = layout.inward(ops, query, is_query=True)
    uniform_key = layout.inward(ops, key, is_query=False)
    try:
        scoring.check(score, layout.dim, layout.key_dim)
        if pullback:
            form, score_pullback = scoring.lower_pullback(ops, score, uniform_query, uniform_key)
        else:
            form, score_pullback = scoring.lower(ops, score, uniform_query, uniform_key), None
    except ShapeError as error:
        # A score knows lengths and uniform axes; the message speaks of the caller's arrays.
        raise ShapeError(with_shapes(str(error), {name: tuple(x.shape) for name, x in arrays.items()})) from None
    problem = Problem(
        ops=ops,
        layout=layout,
        score=score,
        query=uniform_query,
        key=uniform_key,
        value=layout.inward(ops, value, is_query=False),
        form=form,
        mask=checked_mask,
        bias=None if bias is None else check_bias(ops, bias, layout, query),
        sink=None if sink is None else check_sink(ops, sink, layout, query),
        dropout=check_dropout(dropout, ops.as_seed(seed), lambda: ops.draw_seed(query)),
        statistics=statistics,
        matrix=matrix,
    )
    return problem, score_pullback


def wanted_statistics(return_stats: Any) -> tuple[str, ...]:
    """Names of the statistics that ``return_stats`` asks for."""
    if return_stats is None or isinstance(return_stats, (bool, np.bool_)):
        return STATISTICS if return_stats else ()
    expected = "a flag or names among " + ", ".join(STATISTICS)
    names = (return_stats,) if isinstance(return_stats, str) else return_stats
    if not isinstance(names, (tuple, list, set, frozenset)):
        raise ArgumentError(message("return_stats", expected, shown(return_stats)))
    unknown = [name for name in names if not isinstance(name, str) or name not in STATISTICS]
    if unknown:
        raise ArgumentError(message("return_stats", expected, shown(unknown)))
    return tuple(name for name in STATISTICS if name in names)


def check_flag(name: str, x: Any) -> bool:
    """A flag."""
    if not isinstance(x, (bool, np.bool_)):
        raise ArgumentError(message(name, "True or False", shown(x)))
    return bool(x)


def _facts(arrays: dict[str, Array], head_axis: Any) -> Hashable:
    """What the layout depends on."""
    facts = [frameworks.facts(x) for x in arrays.values()]
    return None if None in facts else (type(head_axis), head_axis, *facts)


def _mask(ops: Framework, mask: Any, valid_lens: Any, layout: Layout, query: Array) -> Mask | None:
    """The mask and the lengths as one mask, checked."""
    whole = as_mask(mask, valid_lens, layout.grid)

    def check(whole: Mask) -> None:
        frameworks.check_dense(ops, whole.arrays())
        whole.check(ops, layout.grid)
        frameworks.check_devices(ops, query, whole.arrays(), host_passes=True)

    return None if whole is None else recognised(whole, layout.grid, check)


def without_value(problem: Problem) -> Problem:
    """The same problem with values of length 0: for the log-sum-exp and statistics alone."""
    layout = dataclasses.replace(problem.layout, value_dim=0)
    return dataclasses.replace(problem, layout=layout, value=problem.value[..., :0], dropout=None)
