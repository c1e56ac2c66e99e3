"""The exact merge of attention over disjoint sets of keys, statistics included.

With the shares w_s = exp(lse_s - lse) of the parts in the softmax: out = sum w_s out_s, and the entropy of a mixture
sum w_s (H_s - log w_s). The mean and the variance of the scores need the number of unmasked keys of each part.
"""

from __future__ import annotations

from attnscore.analysis.functional import merge, merged_shares
from attnscore.backends import of
from attnscore.backends.base import Array, Backend
from attnscore.errors import ArgumentError, message
from attnscore.problem.statistics import AttentionStats

COUNTED = ("mean_score", "var_score")
"""Statistics of the scores of all unmasked keys alike."""

SOFTMAX_ALONE = "a normalizer other than the softmax, by whose log-sum-exp parts are merged"
"""Why a call whose parts are merged cannot run."""


def merge_parts(
    outs: tuple[Array, Array], stats: tuple[AttentionStats, AttentionStats], counts: tuple[Array, Array] | None = None
) -> tuple[Array, AttentionStats]:
    """Return the output and the statistics over the keys of both parts.

    Parameters
    ----------
    outs : two arrays (..., query, value_dim)
    stats : two AttentionStats, with their `log_sum_exp`
        A sink may belong to one of the parts.
    counts : two arrays that broadcast to the shape of a statistic, optional
        Numbers of unmasked keys; required with `mean_score` and `var_score`.

    Raises
    ------
    ArgumentError, ShapeError
    """
    if counts is None and any(getattr(stats[0], name) is not None for name in COUNTED):
        raise ArgumentError(message("counts", "the numbers of unmasked keys, for mean_score and var_score", None))
    ops = of({"outs[0]": outs[0]})
    out, total = merge(outs, [part.log_sum_exp for part in stats])
    with ops.numeric_scope():
        shares, logs, _ = merged_shares(ops, [part.log_sum_exp for part in stats])
        found = {"log_sum_exp": total} | _of_weights(ops, stats, shares, logs)
        if stats[0].max_score is not None:
            found["max_score"] = ops.maximum(*(part.max_score for part in stats))
        if counts is not None:
            found |= _of_scores(ops, stats, counts)
    return out, AttentionStats(**found)


def _of_weights(
    ops: Backend, stats: tuple[AttentionStats, AttentionStats], shares: list[Array], logs: list[Array]
) -> dict[str, Array]:
    """Return the statistics of the weights, from each part's shares in the softmax and their logarithms."""
    found: dict[str, Array] = {}
    (first, second), (w, v) = stats, shares
    if first.entropy is not None:
        # w log w is 0 where w is; selected before the product, which would be 0 * inf.
        finite = [ops.where(share == 0, 0.0, log) for share, log in zip(shares, logs, strict=True)]
        found["entropy"] = w * (first.entropy - finite[0]) + v * (second.entropy - finite[1])
    if first.max_weight is not None:
        found["max_weight"] = ops.maximum(w * first.max_weight, v * second.max_weight)
    if first.sum_sq_weights is not None:
        found["sum_sq_weights"] = w * w * first.sum_sq_weights + v * v * second.sum_sq_weights
    if first.sum_weights is not None:
        found["sum_weights"] = w * first.sum_weights + v * second.sum_weights
    return found


def _of_scores(
    ops: Backend, stats: tuple[AttentionStats, AttentionStats], counts: tuple[Array, Array]
) -> dict[str, Array]:
    """Return the mean and the variance of the scores, by Chan's update."""
    first, second = stats
    found: dict[str, Array] = {}
    share = counts[1] / ops.maximum(counts[0] + counts[1], 1.0)
    if first.mean_score is None:
        raise ArgumentError(message("stats", "mean_score beside var_score", "statistics without it"))
    gap = ops.where(counts[0] == 0, 0.0, second.mean_score - first.mean_score)
    base = ops.where(counts[0] == 0, second.mean_score, first.mean_score)
    found["mean_score"] = base + share * gap
    if first.var_score is not None:
        within = (1 - share) * first.var_score + share * second.var_score
        found["var_score"] = within + share * (1 - share) * gap * gap
    return found
