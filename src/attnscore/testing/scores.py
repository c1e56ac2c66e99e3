"""Check of a scoring function: `check_score`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnscore import backends, kernels
from attnscore.analysis.weights import attention_scores
from attnscore.api import attend
from attnscore.backends.base import Array, Backend
from attnscore.core.online_softmax import STATISTICS
from attnscore.core.problem import build_problem
from attnscore.masks import ValidLens
from attnscore.scores import arrays_of, resolve
from attnscore.testing.compare import (
    against_dense,
    check_differences,
    close,
    gradients,
    native,
    same,
    values_of,
    with_arrays,
)


def check_score(
    score: Any,
    *,
    dim: int = 5,
    key_dim: int | None = None,
    heads: int = 2,
    like: Array | None = None,
    seed: int = 0,
) -> None:
    """Check a scoring function: shapes, blocks, values, gradients, and masked keys.

    1. The scores are floating, of shape (*batch, kv head, group, query, key), and chosen rows and columns of them are
       the same numbers.
    2. Computed tile by tile, the attention is that of the whole matrix of ``score.tile``.
    3. The gradients of query, key and of each array of the score are those of finite differences. A score without
       ``lower_pullback`` or ``tile_gradient`` has none in NumPy: pass ``like=`` a torch tensor to check it there.
    4. NaN in a masked key propagates neither to the result nor to the gradients.
    5. No input is changed.

    Parameters
    ----------
    score : a score object or a registered name
        Its arrays in float64.
    dim, key_dim : int
        Sizes of the query and key vectors that it takes; `key_dim` None: as `dim`.
    heads : int
        Query heads, for a score with one set of parameters per head.
    like : array, optional
        An array of the framework to check in, on the device to check on; None: that of the score's arrays, or NumPy.
    seed : int
        Of the random arrays.

    Raises
    ------
    AssertionError
        Which check failed, where, and by how much.
    ShapeError, DtypeError, FrameworkError
        `tile` gives no scores: those of a call, with the same message.

    Examples
    --------
    >>> import attnscore as ats
    >>> from attnscore.testing import check_score
    >>> class Laplace:
    ...     def tile(self, ops, query, key):
    ...         return -ops.sum(ops.abs(ops.expand_dims(query, -2) - ops.expand_dims(key, -3)), axis=-1)
    >>> check_score(Laplace())
    >>> check_score(ats.SoftCap(ats.Gaussian(0.5), cap=3.0))
    """
    score = resolve(score)
    own = arrays_of(score)
    home = like if like is not None else next(iter(own.values()), np.zeros(1))
    ops = backends.of({"like": home})
    rng = np.random.default_rng(seed)
    shapes = {"query": (2, heads, 5, dim), "key": (2, heads, 7, key_dim or dim), "value": (2, heads, 7, 3)}
    inputs = {name: native(ops, rng.standard_normal(shape), home) for name, shape in shapes.items()}
    before = {name: native(ops, values_of(ops, x), x) for name, x in inputs.items()}

    def call(**arrays: Array) -> Array:
        return attend(arrays["query"], arrays["key"], arrays["value"], score=with_arrays(score, arrays))

    whole = attention_scores(inputs["query"], inputs["key"], score=score)
    for name, x in inputs.items():
        same(ops, f"{name} was changed by the call", x, before[name])
    _check_blocks(ops, score, inputs, whole)
    with ops.numeric_scope():
        problem, _ = build_problem(inputs["query"], inputs["key"], inputs["value"], score=score, statistics=STATISTICS)
        against_dense(problem, kernels.table()["streaming"])
    leaves = {**inputs, **own}
    if ops.has_autodiff or _has_gradient(score):
        found = gradients(ops, score, leaves, None)
        check_differences(ops, "score", call, leaves, found, rng)
        _check_masked(ops, score, leaves)
    for name, x in inputs.items():
        same(ops, f"{name} was changed by the gradient", x, before[name])


def _check_blocks(ops: Backend, score: Any, inputs: Mapping[str, Array], whole: Array) -> None:
    query, key = inputs["query"], inputs["key"]
    expected = (*query.shape[:-1], key.shape[-2])
    if tuple(whole.shape) != expected:
        raise AssertionError(f"tile: expected scores of shape {expected}, got {tuple(whole.shape)}")
    rows, cols = [3, 0], [6, 2, 1]
    block = attention_scores(query, key, score=score, query_index=rows, key_index=cols)
    wanted = values_of(ops, whole)[..., rows, :][..., cols]
    close("tile: a block of rows and columns differs from the same part of the whole", values_of(ops, block), wanted)


def _has_gradient(score: Any) -> bool:
    """Return whether a score, or the one that it wraps, has a gradient of its own."""
    if hasattr(score, "tile_gradient"):
        return True
    inner = getattr(score, "score", None)
    return hasattr(score, "lower_pullback") and (inner is None or _has_gradient(resolve(inner)))


def _check_masked(ops: Backend, score: Any, leaves: Mapping[str, Array]) -> None:
    """Check that NaN in masked keys and values changes no result and no gradient, and gets gradient 0."""
    lens = ValidLens([4, 0])
    with_nan = dict(leaves)
    for name in ("key", "value"):
        x = np.array(values_of(ops, leaves[name]))
        x[0, :, 4:] = x[1] = np.nan
        with_nan[name] = native(ops, x, leaves[name])
    clean, dirty = (gradients(ops, score, each, lens) for each in (leaves, with_nan))
    for name, grad in clean.items():
        close(f"NaN in a masked key propagates to the gradient of {name}", dirty[name], grad)
