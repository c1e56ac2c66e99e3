"""What hypothesis draws for the properties: calls with their arrays, every score, and trees of masks.

Lengths and seeds are drawn, the numbers come from the seed: a failing example stays short, and shrinks to the
smallest shapes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

import attnscore as ats
import covering
from attnscore.base import thresholds
from attnscore.masks import parts_of

HostArray = np.ndarray
NAN, INF = float("nan"), float("inf")

law = settings(deadline=None, max_examples=100 if covering.products else 12, derandomize=bool(os.environ.get("CI")))


def same(found: Any, expected: Any, tolerance: float = 1e-11) -> None:
    """Equal to rounding in float64, relative to the largest entry; NaN and infinity at the same places."""
    found, expected = np.asarray(found), np.asarray(expected)
    finite = expected[np.isfinite(expected)]
    largest = max(1.0, float(np.abs(finite).max()) if finite.size else 1.0)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * largest)


@contextmanager
def tiles_of(scores: int) -> Iterator[None]:
    """Tiles that hold about so many scores, down to a single one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thresholds, "TILE_SCORES", scores)
        patch.setattr(thresholds, "SMALLEST_TILE", 1)
        yield


@dataclass(frozen=True)
class Drawn:
    """One call on NumPy in float64."""

    query: HostArray
    key: HostArray
    value: HostArray
    score: Any
    mask: ats.Mask | None
    batch: int
    rng: np.random.Generator

    @property
    def query_len(self) -> int:
        return self.query.shape[-2]

    @property
    def key_len(self) -> int:
        return self.key.shape[-2]

    @property
    def pairs(self) -> tuple[int, ...]:
        """(..., query, key)."""
        return (*self.query.shape[:-1], self.key_len)

    @property
    def visible(self) -> HostArray:
        """Which pairs are visible, as (..., query, key)."""
        if self.mask is None:
            return np.ones(self.pairs, bool)
        full = self.mask.materialize(self.query_len, self.key_len, self.batch)
        axes = self.query.ndim
        return np.broadcast_to(full[0] if axes == 2 else full if axes == 3 else full[:, None], self.pairs)

    @property
    def rest(self) -> dict[str, Any]:
        return {"score": self.score, "mask": self.mask}

    def with_(self, **changes: Any) -> Drawn:
        return replace(self, **changes)

    def attend(self, **more: Any) -> Any:
        return ats.attend(self.query, self.key, self.value, **(self.rest | more))

    def weights(self, **more: Any) -> HostArray:
        return ats.attention_weights(self.query, self.key, **(self.rest | more))

    def scores(self, **more: Any) -> HostArray:
        return ats.attention_scores(self.query, self.key, **(self.rest | more))

    def statistics(self, **more: Any) -> ats.AttentionStats:
        return self.attend(return_stats=True, **more)[1]

    def gradients(self, grad_out: HostArray, *grads: HostArray, **more: Any) -> dict[str, HostArray]:
        """The gradients of all arrays by name."""
        _, pullback = ats.attend_vjp(self.query, self.key, self.value, return_stats=("entropy",), **(self.rest | more))
        found = pullback(grad_out, *grads)
        named = {name: x for name, x in found._asdict().items() if name != "score" and x is not None}
        return named | {f"score.{name}": x for name, x in found.score.items()}

    def normal(self, *shape: int) -> HostArray:
        return self.rng.normal(size=shape)


@st.composite
def calls(
    draw: Any,
    *,
    min_query: int = 0,
    min_key: int = 0,
    axes: tuple[int, ...] = (2, 3, 4),
    score: str | None = None,
    masked: bool = True,
) -> Drawn:
    """Any call: 2 to 4 axes, grouped heads, every score, a tree of masks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16), label="seed"))
    ndim = draw(st.sampled_from(axes), label="axes")
    batch = draw(st.integers(1, 3), label="batch") if ndim > 2 else 1
    kv, groups = (draw(st.integers(1, 2)), draw(st.integers(1, 2))) if ndim > 3 else (1, 1)
    query_len = draw(st.integers(min_query, 6), label="query_len")
    key_len = draw(st.integers(min_key, 8), label="key_len")
    dim, value_dim = draw(st.integers(1, 5), label="dim"), draw(st.integers(0, 3), label="value_dim")
    size = draw(st.sampled_from((0.3, 1.0, 4.0)), label="size")
    lead = () if ndim == 2 else (batch,)

    def normal(heads: int, length: int, width: int) -> HostArray:
        shape = (*lead, *((heads,) if ndim > 3 else ()), length, width)
        return rng.normal(size=shape) * size

    return Drawn(
        normal(kv * groups, query_len, dim),
        normal(kv, key_len, dim),
        normal(kv, key_len, value_dim),
        make_score(score or draw(st.sampled_from(SCORES), label="score"), dim, rng),
        draw(st.none() | masks(query_len, key_len, batch, ndim), label="mask") if masked else None,
        batch,
        rng,
    )


SCORES = (
    *("dot", "scaled_dot", "scale", "cosine", "gaussian", "sum", "additive", "projected", "bilinear"),
    *("soft_cap", "temperature", "learned_scale", "learned_bandwidth", "silu"),
)


def make_score(name: str, dim: int, rng: np.random.Generator) -> Any:
    """A score for vectors of length `dim`, its parameters random."""
    return {
        "scale": lambda: ats.ScaledDot(0.7),
        "cosine": lambda: ats.Cosine(3.0),
        "gaussian": lambda: ats.Gaussian(1.5),
        "additive": lambda: ats.Additive(rng.normal(size=dim)),
        "projected": lambda: ats.Additive(
            rng.normal(size=4), rng.normal(size=(4, dim)), rng.normal(size=(4, dim)), rng.normal(size=4)
        ),
        "bilinear": lambda: ats.Bilinear(rng.normal(size=(dim, dim))),
        "learned_scale": lambda: ats.ScaledDot(rng.uniform(0.3, 2, 1)),
        "learned_bandwidth": lambda: ats.Gaussian(rng.uniform(0.5, 2, 1)),
        "silu": lambda: ats.Additive(rng.normal(size=dim), activation="silu"),
        "soft_cap": lambda: ats.SoftCap("scaled_dot", 2.0),
        "temperature": lambda: ats.Temperature(ats.Cosine(), 0.2),
    }.get(name, lambda: name)()


def masks(query_len: int, key_len: int, batch: int, axes: int = 3) -> st.SearchStrategy[ats.Mask]:
    """Trees of masks that fit; every mask of the library is a leaf."""
    return st.recursive(
        leaves(query_len, key_len, batch, axes),
        lambda inner: st.one_of(
            inner.map(lambda mask: ~mask),
            # Not filtered: a retry would format all of this tree, which takes seconds and warns.
            st.tuples(inner, inner).map(
                lambda pair: pair[0] & pair[1] if fits(pair[0] & pair[1]) else pair[0] | pair[1]
            ),
            st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        ),
        max_leaves=4,
    )


def fits(mask: ats.Mask) -> bool:
    """Whether no window of the whole array stands beside packed sequences, an error where those have another."""
    parts = parts_of(mask)
    windows = [part for part in parts if isinstance(part, (ats.Causal, ats.SlidingWindow)) and part.offset is None]
    return not windows or not any(isinstance(part, ats.Packed) for part in parts)


def leaves(query_len: int, key_len: int, batch: int, axes: int = 3) -> st.SearchStrategy[ats.Mask]:
    """Single masks that fit."""
    lens, offsets = st.integers(0, key_len), st.integers(-query_len - 1, key_len + 1)
    ids = st.integers(-1, 2)
    flags = st.booleans()
    widths = st.none() | st.integers(0, key_len + 1)
    aligns = st.sampled_from(("top_left", "bottom_right"))
    dense = _lists(flags, query_len, key_len)
    if axes == 3:
        dense = dense | _lists(flags, batch, query_len, key_len)
    elif axes > 3:
        dense = dense | _lists(flags, batch, 1, query_len, key_len)
    return st.one_of(
        st.builds(ats.ValidLens, _one_or_each(lens, batch) | _lists(lens, batch, query_len)),
        st.builds(ats.ValidLens, lens, query_lens=_one_or_each(st.integers(0, query_len), batch)),
        st.builds(ats.KeyRange, _one_or_each(lens, batch), _one_or_each(lens, batch)),
        st.builds(ats.KeyPadding, _arrays(flags, bool, batch, key_len)),
        st.builds(ats.Causal, aligns),
        st.builds(ats.Causal, offset=_one_or_each(offsets, batch)),
        st.builds(ats.SlidingWindow, widths, widths, aligns),
        st.builds(ats.SlidingWindow, widths, widths, offset=_one_or_each(offsets, batch)),
        st.builds(ats.PrefixLM, _one_or_each(lens, batch)),
        st.builds(ats.Documents, _arrays(ids, int, query_len), _arrays(ids, int, key_len)),
        st.builds(ats.Documents, _arrays(ids, int, batch, query_len), _arrays(ids, int, batch, key_len)),
        st.integers(1, 4).flatmap(
            lambda count: st.builds(
                ats.Packed, _cumulative(count, query_len), _cumulative(count, key_len), widths, widths, aligns
            )
        ),
        _lists(flags, query_len, key_len).map(_neighbours),
        st.builds(ats.Dense, dense.map(lambda rows: np.array(rows, bool))),
    )


def _cumulative(count: int, most: int) -> st.SearchStrategy[list[int]]:
    """Cumulative lengths of `count` sequences, some of them empty, within `most` positions."""
    return st.lists(st.integers(0, most), min_size=count, max_size=count).map(lambda ends: [0, *sorted(ends)])


def _neighbours(rows: list[list[bool]]) -> ats.Neighbours:
    """The neighbours of each query, the last first."""
    keys = [[j for j, visible in enumerate(row) if visible][::-1] for row in rows]
    return ats.Neighbours(np.cumsum([0, *map(len, keys)]), [key for row in keys for key in row])


def _one_or_each(number: st.SearchStrategy[int], batch: int) -> st.SearchStrategy[Any]:
    return number | st.lists(number, min_size=batch, max_size=batch)


def _lists(number: st.SearchStrategy[Any], *shape: int) -> st.SearchStrategy[Any]:
    """Nested lists of a shape; an empty axis has no room for the axes behind it, so arrays are reshaped."""
    size = int(np.prod(shape))
    return st.lists(number, min_size=size, max_size=size).map(lambda flat: np.array(flat).reshape(shape))


def _arrays(number: st.SearchStrategy[Any], dtype: type, *shape: int) -> st.SearchStrategy[HostArray]:
    return _lists(number, *shape).map(lambda array: array.astype(dtype))
