"""From a caller's arguments to a checked Problem."""

from __future__ import annotations

import dataclasses
from typing import Any

from attnscore import frameworks, scoring
from attnscore.errors import ArgumentError, MaskError, message
from attnscore.frameworks.contract import Array, Framework
from attnscore.masking import And, Dense, Mask, ValidLens
from attnscore.problem import (
    Layout,
    Problem,
    check_arrays,
    check_bias,
    check_dropout,
    check_sink,
)
from attnscore.scoring.contract import Pullback
from attnscore.softmax import STATISTICS


def pose(
    query: Array,
    key: Array,
    value: Array | None,
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
    pullback: bool = False,
) -> tuple[Problem, Pullback | None]:
    """Check everything, lower the score, and put all on the uniform axes.

    `value` None: the question is about the weights alone. With `pullback`, the score's own pull-back comes along, for a
    framework without autodiff.
    """
    given = {"query": query, "key": key, "value": value, "bias": bias, "sink": sink}
    arrays = {
        name: x
        for name, x in given.items()
        if name in ("query", "key") or (name == "value" and x is not None) or frameworks.is_array(x)
    }
    ops = frameworks.of(arrays)
    score = scoring.resolve(score)
    scoring.check_score_arrays(ops, score, query)
    if value is None:
        query, key = ops.autocast(query, key)
        value = key[..., :0]
    else:
        query, key, value = ops.autocast(query, key, value)
    layout = check_arrays(ops, query, key, value, head_axis)
    scoring.check(score, layout.dim, layout.key_dim)
    checked_mask = _mask(ops, mask, valid_lens, layout)
    uniform_query = layout.inward(ops, query, is_query=True)
    uniform_key = layout.inward(ops, key, is_query=False)
    if pullback:
        form, score_pullback = scoring.lower_pullback(ops, score, uniform_query, uniform_key)
    else:
        form, score_pullback = scoring.lower(ops, score, uniform_query, uniform_key), None
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
        dropout=check_dropout(dropout, seed, lambda: ops.draw_seed(query)),
        statistics=statistics,
    )
    return problem, score_pullback


def wanted_statistics(return_stats: Any) -> tuple[str, ...]:
    """Names of the statistics that ``return_stats`` asks for."""
    if return_stats is True:
        return STATISTICS
    if not return_stats:
        return ()
    names = (return_stats,) if isinstance(return_stats, str) else tuple(return_stats)
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ArgumentError(message("return_stats", "a flag or names among " + ", ".join(STATISTICS), unknown))
    return tuple(name for name in STATISTICS if name in names)


def _mask(ops: Framework, mask: Any, valid_lens: Any, layout: Layout) -> Mask | None:
    """The mask and the lengths as one mask, checked."""
    parts: list[Mask] = []
    if mask is not None:
        parts.append(mask if isinstance(mask, Mask) else _wrapped(ops, mask, layout))
    if valid_lens is not None:
        parts.append(ValidLens(valid_lens))
    for part in parts:
        part.check(ops, layout.grid)
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else And(*parts)


def _wrapped(ops: Framework, mask: Any, layout: Layout) -> Mask:
    """A bare boolean array as a mask, unless its two axes could be read in two ways."""
    grid = layout.grid
    if isinstance(mask, (str, bytes)) or not (hasattr(mask, "shape") or isinstance(mask, (list, tuple))):
        hint = f"{mask.__name__}() makes a mask" if isinstance(mask, type) else "for example attnscore.Causal()"
        raise MaskError(message("mask", "a mask object or a boolean array", f"{mask!r}", hint=hint))
    dense = Dense(mask)
    shape = tuple(getattr(frameworks.host(mask), "shape", ())) if not hasattr(mask, "shape") else tuple(mask.shape)
    if len(shape) == 2 and layout.axes >= 3 and shape == (grid.batch, grid.key_len):
        if grid.batch == grid.query_len:
            raise MaskError(
                message(
                    "mask",
                    "an array whose meaning is clear",
                    f"shape {shape}, which is both (batch, key) and (query, key)",
                    hint="KeyPadding(mask) says (batch, key), Dense(mask) says (query, key)",
                )
            )
        if grid.batch != 1:
            raise MaskError(
                message(
                    "mask",
                    f"a shape that broadcasts to (..., query, key) = {grid.user_shape}",
                    shape,
                    hint="this is (batch, key): KeyPadding(mask) says so",
                )
            )
    return dense


def without_value(problem: Problem) -> Problem:
    """The same problem with values of length 0: for the log-sum-exp and statistics alone."""
    layout = dataclasses.replace(problem.layout, value_dim=0)
    return dataclasses.replace(problem, layout=layout, value=problem.value[..., :0], dropout=None)
