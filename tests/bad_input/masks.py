"""Masks and valid lengths: values, lengths, shapes, dtypes, alignment, ambiguity, composition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import attnscore as ats
from attnscore import MaskError
from attnscore.masks import IntervalSet
from bad_input.table import Rows, cases

_NAN, _INF = float("nan"), float("inf")

_LENGTHS: Rows = {
    "a negative length": ("valid_lens|numbers from 0 to 5|got -1", lambda x: x.attend(valid_lens=[2, -1])),
    "more than the keys": ("valid_lens|from 0 to 5|got 6", lambda x: x.attend(valid_lens=[6, 2])),
    "half a key": ("valid_lens|whole numbers|2.5", lambda x: x.attend(valid_lens=[2.5, 1.0])),
    "half a key in an array": ("valid_lens|whole numbers|2.5", lambda x: x.attend(valid_lens=x.array([2.5, 1.0]))),
    "length NaN": ("valid_lens|whole numbers|nan", lambda x: x.attend(valid_lens=[_NAN, 1.0])),
    "length infinity": ("valid_lens|whole numbers|inf", lambda x: x.attend(valid_lens=[_INF, 1.0])),
    "boolean lengths": ("valid_lens|whole numbers|bool", lambda x: x.attend(valid_lens=[True, False])),
    "lengths as text": ("valid_lens|numbers|str", lambda x: x.attend(valid_lens=["2", "3"])),
    "lengths None": ("valid_lens|numbers|object", lambda x: x.attend(valid_lens=[None, 1])),
    "ragged lengths": ("valid_lens|ragged", lambda x: x.attend(valid_lens=[[1, 2], [3]])),
    "complex lengths": (
        "valid_lens|whole numbers|complex",
        lambda x: x.attend(valid_lens=x.array([1j, 2.0], "complex64")),
    ),
    "three lengths for two batch rows": (
        "valid_lens|shape (2,) or (2, 3)|got (3,)",
        lambda x: x.attend(valid_lens=[1, 2, 3]),
    ),
    "lengths per key": ("valid_lens|shape (2,) or (2, 3)|got (2, 5)", lambda x: x.attend(valid_lens=x.ints(2, 5))),
    "lengths of three axes": (
        "valid_lens|(2,) or (2, 3)|got (2, 3, 1)",
        lambda x: x.attend(valid_lens=x.ints(2, 3, 1)),
    ),
    "lengths of a single sequence": ("valid_lens|a number or (4,)|got (3,)", lambda x: x.square(valid_lens=[1, 2, 3])),
    "no lengths at all": ("valid_lens|shape (2,)|got (0,)", lambda x: x.attend(valid_lens=[])),
    "lengths for weights": ("valid_lens|from 0 to 5|got 9", lambda x: x.weights(valid_lens=[9, 1])),
    "lengths of a softmax": ("valid_lens|from 0 to 5|got 9", lambda x: x.softmax(valid_lens=[9, 1])),
    "lengths of a softmax, per row": (
        "valid_lens|(2,) or (2, 3)|got (3, 2)",
        lambda x: x.softmax(valid_lens=x.ints(3, 2)),
    ),
    "query_lens past the queries": (
        "query_lens|from 0 to 3|got 4",
        lambda x: x.attend(mask=ats.ValidLens([1, 2], query_lens=[4, 1])),
    ),
    "query_lens per key": (
        "query_lens|shape (2,)|got (5,)",
        lambda x: x.attend(mask=ats.ValidLens([1, 2], query_lens=[1] * 5)),
    ),
    "ValidLens(None)": ("valid_lens|numbers", lambda x: x.attend(mask=ats.ValidLens(None))),
    "a range that starts below 0": ("start|from 0 to 5|got -2", lambda x: x.attend(mask=ats.KeyRange([-2, 0], 5))),
    "a range that stops past the end": ("stop|from 0 to 5|got 8", lambda x: x.attend(mask=ats.KeyRange(0, [8, 2]))),
    "half a start": ("start|whole numbers|0.5", lambda x: x.attend(mask=ats.KeyRange(0.5, 2))),
    "a range per query": ("stop|shape (2,)|got (3,)", lambda x: x.attend(mask=ats.KeyRange(0, [1, 2, 3]))),
    "a prefix below 0": ("prefix_lens|from 0 to 4|got -1", lambda x: x.square(mask=ats.PrefixLM(-1))),
    "prefix past the end": ("prefix_lens|from 0 to 4|got 5", lambda x: x.square(mask=ats.PrefixLM(5))),
    "half a prefix": ("prefix_lens|whole numbers|1.5", lambda x: x.square(mask=ats.PrefixLM(1.5))),
}

_ALIGNMENT: Rows = {
    "which diagonal": (
        "Causal()|3 queries and 5 keys|align='top_left'|align='bottom_right'",
        lambda x: x.attend(mask=ats.Causal()),
    ),
    "which diagonal of a window": (
        "SlidingWindow()|3 queries and 5 keys|align='top_left'|align='bottom_right'",
        lambda x: x.attend(mask=ats.SlidingWindow(left=2)),
    ),
    "which diagonal, inside &": (
        "Causal()|3 queries and 5 keys|top_left|bottom_right",
        lambda x: x.attend(mask=ats.ValidLens([1, 2]) & ~ats.Causal()),
    ),
    "an unknown alignment": (
        "align|'top_left'|'bottom_right'|got 'upper_left'",
        lambda x: x.attend(mask=ats.Causal("upper_left")),
    ),
    "a misspelt alignment": (
        "align|'top_left'|got 'bottom-rigth'|Hint: did you mean 'bottom_right'?",
        lambda x: x.attend(mask=ats.SlidingWindow(2, align="bottom-rigth")),
    ),
    "alignment and offset": (
        "Causal|align or offset, not both|align=",
        lambda x: x.attend(mask=ats.Causal("top_left", offset=2)),
    ),
    "half an offset": ("offset|whole numbers|0.5", lambda x: x.attend(mask=ats.Causal(offset=0.5))),
    **{
        f"{kind} of {number}": (
            f"{name}|whole numbers (below 2^62 in size)|got [{number}",
            lambda x, make=make, number=number: x.attend(mask=make(number)),
        )
        # The absolute value of -2^63 is no 64-bit number.
        for number in (-(2**63), -(2**62), 2**62)
        for kind, name, make in (
            ("Causal with an offset", "offset", lambda n: ats.Causal(offset=n)),
            ("SlidingWindow with offsets", "offset", lambda n: ats.SlidingWindow(left=3, offset=[n, n])),
            ("Documents with ids", "query_ids", lambda n: ats.Documents([n] * 3, [n] * 5)),
        )
    },
    "an offset as text": ("offset|whole numbers|str", lambda x: x.attend(mask=ats.Causal(offset="2"))),
    "an offset per query": ("offset|shape (2,)|got (3,)", lambda x: x.attend(mask=ats.Causal(offset=[1, 2, 3]))),
    **{
        f"{side}={width!r}": (
            f"{side}|a whole number of keys, 0 or more, or None|got {width!r}",
            lambda x, side=side, width=width: x.square(mask=ats.SlidingWindow(**{side: width})),
        )
        for side in ("left", "right")
        for width in (-1, 1.5, "2", True, [1])
    },
}

_ARRAYS: Rows = {
    "a mask that does not broadcast": (
        "mask|broadcasts to (..., query, key) = (2, 3, 5)|got (3, 4)",
        lambda x: x.attend(mask=x.bools(3, 4)),
    ),
    "a mask that would enlarge the result": (
        "mask|(..., query, key) = (2, 3, 5)|got (7, 2, 3, 5)",
        lambda x: x.attend(mask=x.bools(7, 2, 3, 5)),
    ),
    "a mask per KV head": (
        "mask|(..., query, key) = (2, 4, 3, 5)|got (2, 2, 3, 5)",
        lambda x: x.heads(4, 2, mask=x.bools(2, 2, 3, 5)),
    ),
    "Dense that does not broadcast": ("mask|(2, 3, 5)|got (5, 3)", lambda x: x.attend(mask=ats.Dense(x.bools(5, 3)))),
    "both (batch, key) and (query, key)": (
        "mask|(2, 5)|both (batch, key) and (query, key)|Hint|KeyPadding|Dense",
        lambda x: x.attend(query=x.floats(2, 2, 4), mask=x.bools(2, 5)),
    ),
    "a padding mask": (
        "mask|(..., query, key) = (2, 3, 5)|got (2, 5)|Hint|(batch, key)|KeyPadding",
        lambda x: x.attend(mask=x.bools(2, 5)),
    ),
    "an additive mask": (
        "mask|a boolean array|True where a key may be attended|float32|Hint: compare it: array > 0 for one|bias=",
        lambda x: x.attend(mask=x.array([[0.0] * 5] * 3)),
    ),
    "a padding of floats": (
        "key_padding|a boolean array|float32|Hint: compare it: array > 0 for one of 0 and 1; an additive mask of 0 and "
        "-inf is compared with 0: array == 0",
        lambda x: x.attend(mask=ats.KeyPadding(x.floats(2, 5))),
    ),
    "whole numbers": ("mask|a boolean array|int64|Hint", lambda x: x.attend(mask=x.ints(3, 5))),
    "complex numbers": ("mask|a boolean array|complex64", lambda x: x.attend(mask=x.complexes(3, 5))),
    "ragged rows": ("mask|ragged", lambda x: x.attend(mask=[[True], [True, False]])),
    "ragged rows in Dense": ("mask|ragged", lambda x: x.attend(mask=ats.Dense([[True], [True, False]]))),
    **{
        f"mask is {mask!r}": (
            f"mask|a mask object or a boolean array|got {mask!r}|Hint: {hint}",
            lambda x, mask=mask: x.attend(mask=mask),
        )
        for mask, hint in (
            *((mask, "for example attnscore.Causal()") for mask in (3, 1.5, True, "text")),
            ("causal", "did you mean attnscore.Causal(...)?"),
            ("sliding-window", "did you mean attnscore.SlidingWindow(...)?"),
        )
    },
    **{
        f"lengths of positions on the axis of heads, {lens}": (
            f"valid_lens|{expected}|Hint: head_axis=-2 takes the layout (batch, length, head, dim)",
            lambda x, lens=lens: x.attend(
                query=x.floats(2, 5, 3, 4), key=x.floats(2, 5, 3, 4), value=x.floats(2, 5, 3, 4), valid_lens=lens
            ),
        )
        for lens, expected in (
            ([5, 2], "numbers from 0 to 3|got 5"),
            ([[1, 2, 3, 3, 3]] * 2, "shape (2,) or (2, 3)|got (2, 5)"),
        )
    },
    "the class instead of a mask": (
        "mask|a mask object or a boolean array|Causal|Hint: Causal() makes a mask",
        lambda x: x.attend(mask=ats.Causal),
    ),
    "padding of another length": (
        "key_padding|(batch, key) = (2, 5)|got (2, 4)",
        lambda x: x.attend(mask=ats.KeyPadding(x.bools(2, 4))),
    ),
    "padding of another batch": (
        "key_padding|(batch, key) = (2, 5)|got (3, 5)",
        lambda x: x.attend(mask=ats.KeyPadding(x.bools(3, 5))),
    ),
    "padding without a batch": (
        "key_padding|(batch, key) = (2, 5)|got (5,)",
        lambda x: x.attend(mask=ats.KeyPadding(x.bools(5))),
    ),
    "padding of other numbers than 0 and 1": (
        "key_padding|a boolean array|int64",
        lambda x: x.attend(mask=ats.KeyPadding(x.ints(2, 5))),
    ),
    "padding as text": ("key_padding|a boolean array", lambda x: x.attend(mask=ats.KeyPadding("110"))),
    "floats to ignore": ("key_padding|a boolean array|float32", lambda x: ats.KeyPadding.from_ignore(x.floats(2, 5))),
    "ids of another length": (
        "query_ids|(batch, length) = (2, 3) or (3,)|got (2, 4)",
        lambda x: x.attend(mask=ats.Documents(x.ints(2, 4), x.ints(2, 5))),
    ),
    "ids for the queries alone": (
        "key_ids|(2, 5) or (5,)|got (2, 3)",
        lambda x: x.attend(mask=ats.Documents(x.ints(2, 3))),
    ),
    "ids of halves": ("query_ids|whole numbers|0.5", lambda x: x.square(mask=ats.Documents([0.0, 0.5, 1.0, 1.0]))),
    "ids as text": ("query_ids|whole numbers|str", lambda x: x.square(mask=ats.Documents(["a", "a", "b", "b"]))),
    "neighbours of another number of queries": (
        "indptr|shape (query + 1,) = (5,)|got (3,)",
        lambda x: x.square(mask=ats.Neighbours([0, 1, 2], [0, 1])),
    ),
    "neighbours that begin behind 0": (
        "indptr|from 0|got [1, 1, 1, 1, 1]|Hint|cumsum",
        lambda x: x.square(mask=ats.Neighbours([1] * 5, [0])),
    ),
    "neighbours that are not all in a row": (
        "indptr|a last entry of 3, the number of indices|got 2",
        lambda x: x.square(mask=ats.Neighbours([0, 1, 1, 1, 2], [0, 1, 2])),
    ),
    "a neighbour past the keys": (
        "indices|keys from 0 to 3|got 4",
        lambda x: x.square(mask=ats.Neighbours([0, 1, 1, 1, 2], [0, 4])),
    ),
    "a neighbour before the keys": (
        "indices|keys from 0 to 3|got -1",
        lambda x: x.square(mask=ats.Neighbours([0, 1, 1, 1, 2], [0, -1])),
    ),
    "a neighbour twice": (
        "indices|each key once in a row|key 2 twice for query 3|Hint|unique",
        lambda x: x.square(mask=ats.Neighbours([0, 1, 1, 1, 4], [0, 2, 1, 2])),
    ),
    "half a neighbour": (
        "indices|whole numbers|got [0.5]",
        lambda x: x.square(mask=ats.Neighbours([0, 1, 1, 1, 1], [0.5])),
    ),
    "neighbours in a matrix": (
        "indices|shape (edges,)|got (1, 1)",
        lambda x: x.square(mask=ats.Neighbours([0, 1, 1, 1, 1], [[0]])),
    ),
    "cumulative lengths that begin behind 0": (
        "cu_query|from 0|got [1, 3]|Hint|cumsum",
        lambda x: x.attend(mask=ats.Packed([1, 3], [0, 5])),
    ),
    "cumulative lengths that fall": (
        "cu_key|none below the one before|got [0, 4, 3]",
        lambda x: x.attend(mask=ats.Packed([0, 1, 3], [0, 4, 3])),
    ),
    "cumulative lengths past the end": ("cu_query|up to 3|got 4", lambda x: x.attend(mask=ats.Packed([0, 4], [0, 5]))),
    "cumulative lengths of no sequence": (
        "cu_query|the ends of at least one sequence|the start alone|numpy.cumsum([0, *lengths])",
        lambda x: x.attend(mask=ats.Packed([0])),
    ),
    "cumulative lengths of queries past the keys": (
        "cu_query|up to 4|got 5",
        lambda x: x.square(mask=ats.Packed([0, 5])),
    ),
    "cumulative lengths of other sequences": (
        "cu_key|(sequences + 1,) = (3,)|got (2,)",
        lambda x: x.attend(mask=ats.Packed([0, 1, 3], [0, 5])),
    ),
    "lengths for cumulative lengths": (
        "cu_query|shape (sequences + 1,)|got (0,)",
        lambda x: x.attend(mask=ats.Packed([])),
    ),
    "cumulative lengths of halves": ("cu_query|whole numbers|0.5", lambda x: x.square(mask=ats.Packed([0, 0.5, 4]))),
    "which diagonal of each sequence": (
        "align|2 queries and 1 keys in sequence 0|align='top_left'|align='bottom_right'",
        lambda x: x.attend(mask=ats.Packed([0, 2, 3], [0, 1, 3]).causal()),
    ),
    "which diagonal of a window in each sequence": (
        "align|1 queries and 2 keys in sequence 1|align='top_left'|align='bottom_right'",
        lambda x: x.attend(mask=ats.Packed([0, 2, 3], [0, 2, 4]).window(left=1)),
    ),
    "an unknown alignment of sequences": (
        "align|'top_left'|'bottom_right'|got 'left'",
        lambda x: x.square(mask=ats.Packed([0, 4]).causal("left")),
    ),
    "a window of a half in sequences": (
        "left|a whole number of keys|got 0.5",
        lambda x: x.square(mask=ats.Packed([0, 4]).window(0.5)),
    ),
    "mask of a softmax": ("mask|(..., query, key) = (2, 3, 5)|got (3, 4)", lambda x: x.softmax(mask=x.bools(3, 4))),
    "additive mask of a softmax": ("mask|a boolean array|float32|Hint", lambda x: x.softmax(mask=x.floats(3, 5))),
    "the class in a softmax": (
        "mask|a mask object or a boolean array|Hint: Causal() makes a mask",
        lambda x: x.softmax(mask=ats.Causal),
    ),
    "text in a softmax": ("mask|a mask object or a boolean array|'causal'", lambda x: x.softmax(mask="causal")),
    "both readings, in a softmax": (
        "mask|both (batch, key) and (query, key)|Hint|KeyPadding|Dense",
        lambda x: x.softmax(2, 2, 5, mask=x.bools(2, 5)),
    ),
    "a softmax without alignment": (
        "Causal()|3 queries and 5 keys|top_left|bottom_right",
        lambda x: x.softmax(mask=ats.Causal()),
    ),
    "materialize of a mask that does not fit": (
        "valid_lens|from 0 to 3|got 4",
        lambda x: ats.ValidLens(4).materialize(2, 3),
    ),
}

_COMPOSITION: Rows = {
    "mask | number": ("mask|a mask object on both sides|int", lambda x: ats.Causal() | 1),
    "number | mask": ("mask|a mask object on both sides|int", lambda x: 1 | ats.Causal()),
    "mask & None": ("mask|a mask object on both sides|NoneType", lambda x: ats.Causal() & None),
    "mask & class": (
        "mask|a mask object on both sides|Hint: Causal() makes a mask",
        lambda x: ats.ValidLens(1) & ats.Causal,
    ),
    "mask and mask": ("mask|truth value|Hint|& | ~", lambda x: ats.Causal() and ats.ValidLens(1)),
    "not mask": ("mask|truth value|Hint|& | ~", lambda x: not ats.Causal()),
}


@dataclass(frozen=True, eq=False, repr=False)
class _Custom(ats.Mask):
    """A user's mask that returns what it was made with, which breaks the contract."""

    seen: Callable[[Any, Any], Any] = lambda rows, cols: cols <= rows
    ends: Callable[[int, int, int], Any] = lambda query_len, key_len, batch: None
    parts: Callable[[int, int, int], Any] | None = None

    def visible(self, ops: Any, grid: Any, rows: Any, cols: Any) -> Any:
        return self.seen(rows, cols)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Any:
        return self.ends(query_len, key_len, batch)

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> Any:
        return (
            super().interval_set(query_len, key_len, batch)
            if self.parts is None
            else self.parts(query_len, key_len, batch)
        )

    def check(self, ops: Any, grid: Any) -> None:
        pass


def _wherever_it_is_read(name: str, mask: _Custom, words: str) -> Rows:
    """Rows of a custom mask: in every kernel, composed, for weights and in a softmax."""
    calls: dict[str, Callable[[Any], Any]] = {
        **{k: lambda x, k=k: x.attend(mask=mask, kernel=k) for k in ("auto", "streaming", "dense")},
        "&": lambda x: x.attend(mask=ats.Dense([[True, False, True, False, True]]) & mask),
        "|": lambda x: x.attend(mask=mask | ats.Dense([[True, False, True, False, True]])),
        "~": lambda x: x.attend(mask=~mask, valid_lens=[5, 3]),
        "weights": lambda x: x.weights(mask=mask),
    }
    return {f"custom mask, {name}, {where}": (f"of _Custom: expected |{words}", call) for where, call in calls.items()}


def _ends(start: Any, stop: Any) -> _Custom:
    def ends(query_len: int, key_len: int, batch: int) -> Any:
        zeros = np.zeros((1, query_len), int)
        return zeros + start, zeros + stop

    return _Custom(ends=ends)


def _parts(*ends: tuple[int, int]) -> _Custom:
    def parts(query_len: int, key_len: int, batch: int) -> Any:
        start, stop = (np.tile(np.array(x)[:, None, None], (1, 1, query_len)) for x in zip(*ends, strict=True))
        return IntervalSet(start, stop)

    return _Custom(parts=parts)


@dataclass(frozen=True, eq=False, repr=False)
class _Interval(ats.IntervalMask):
    """A user's interval mask that returns what it was made with."""

    found: Callable[[Any], Any]

    def ends(self, ops: Any, score_shape: Any, rows: Any) -> Any:
        return self.found(rows)


_END = "ends of _Interval: expected stop as None, a whole number, or an array of them that broadcasts to (batch, query)"
_INSIDE = "0 <= start <= stop <= key_len = 5|got start"
_BOOLEAN = "visible|a boolean array that broadcasts to (*batch, kv head, group, query, key)|"
_WHOLE = "intervals|as a NumPy array of whole numbers, shape (1, 3) or (2, 3)|got "
_ORDER = "interval_set|in order, none touching the next, the empty ones behind|got start"
_CUSTOM: Rows = {
    **_wherever_it_is_read("a stop past the keys", _ends(0, 6), f"intervals|{_INSIDE} 0 and stop 6 for query 0|Hint: "),
    **_wherever_it_is_read("a stop far past the keys", _ends(0, 2**62), f"intervals|{_INSIDE} 0 and stop {2**62}"),
    **_wherever_it_is_read(
        "whole numbers of rows",
        _Custom(lambda rows, cols: rows % 2),
        "visible|a boolean array that broadcasts to|got dtype int64|Hint: compare it: x > 0",
    ),
    **{
        f"custom mask, {name}": (words, lambda x, mask=mask: x.attend(mask=mask))
        for name, mask, words in (
            ("a start below 0", _ends(-1, 3), f"intervals|{_INSIDE} -1 and stop 3"),
            ("a start above its stop", _ends(np.array([0, 1, 4]), 3), f"intervals|{_INSIDE} 4 and stop 3 for query 2"),
            (
                "a stop of 2^64 - 1",
                _Custom(ends=lambda n, m, b: [np.full((b, n), e, "u8") for e in (0, 2**64 - 1)]),
                f"intervals|{_INSIDE} 0 and stop",
            ),
            ("fractional ends", _ends(0, 2.5), f"{_WHOLE}dtype float64"),
            (
                "ends of one axis",
                _Custom(ends=lambda n, m, b: (np.zeros(n, int), np.ones(n, int))),
                f"{_WHOLE}shape (3,)",
            ),
            (
                "ends of other queries",
                _Custom(ends=lambda n, m, b: (np.zeros((b, n + 1), int),) * 2),
                f"{_WHOLE}shape (2, 4)",
            ),
            (
                "ends of another batch",
                _Custom(ends=lambda n, m, b: (np.zeros((b + 1, n), int),) * 2),
                f"{_WHOLE}shape (3, 3)",
            ),
            ("ragged ends", _Custom(ends=lambda n, m, b: ([[0], [0, 1]], 0)), f"{_WHOLE}dtype object"),
            ("one end", _Custom(ends=lambda n, m, b: 5), "intervals|start and stop, or None|got 5"),
            ("three ends", _Custom(ends=lambda n, m, b: (0, 1, 2)), "intervals|start and stop, or None|got (0, 1, 2)"),
            (
                "pieces that are none",
                _Custom(parts=lambda n, m, b: (0, 1)),
                "interval_set|attnscore.masks.IntervalSet or None|got (0, 1)",
            ),
            ("pieces past the keys", _parts((0, 1), (3, 9)), f"interval_set|{_INSIDE} 3 and stop 9 for query 0"),
            ("pieces out of order", _parts((3, 5), (0, 1)), f"{_ORDER} [3, 0], stop [5, 1]"),
            ("pieces that touch", _parts((0, 2), (2, 5)), f"{_ORDER} [0, 2], stop [2, 5]"),
            ("an empty piece in front", _parts((5, 5), (2, 3)), f"{_ORDER} [5, 2], stop [5, 3]"),
            (
                "pieces of one query that touch",
                _Custom(
                    parts=lambda n, m, b: IntervalSet(
                        np.array([[[0] * n], [[2, 2, 1]]]), np.array([[[1] * n], [[3] * n]])
                    )
                ),
                f"{_ORDER} [0, 1], stop [1, 3] for query 2",
            ),
        )
    },
    **{
        f"custom ends, {name}, {kernel}": (words, lambda x, m=mask, k=kernel: x.attend(mask=m, kernel=k))
        for kernel in ("auto", "dense")
        for name, mask, words in (
            ("none", _Interval(lambda rows: None), "ends of _Interval: expected start and stop, got None"),
            ("one", _Interval(lambda rows: rows[0]), "ends of _Interval: expected start and stop"),
            ("a list", _Interval(lambda rows: (0, [1])), f"{_END}|got [1]"),
            ("fractions", _Interval(lambda rows: (0, rows / 2)), f"{_END}|got dtype float64"),
            (
                "one axis",
                _Interval(lambda rows: (0, rows[0])),
                f"{_END} = (2, 3), got shape (3,)|ops.reshape(x, (-1, 1))",
            ),
            ("a query too few", _Interval(lambda rows: (0, rows[:, 1:])), f"{_END} = (2, 3), got shape (1, 2)"),
            (
                "three batch rows",
                _Interval(lambda rows: (0, np.ones((3, 1), int))),
                f"{_END} = (2, 3), got shape (3, 1)",
            ),
        )
    },
    **{
        f"custom mask, {name}, {kernel}": (
            words,
            lambda x, mask=_Custom(seen), kernel=kernel: x.attend(mask=mask, kernel=kernel),
        )
        for kernel in ("streaming", "dense")
        for name, seen, words in (
            (
                "whole numbers of pairs",
                lambda rows, cols: rows * cols,
                f"{_BOOLEAN}got dtype int64|Hint: compare it: x > 0",
            ),
            ("nothing", lambda rows, cols: None, f"{_BOOLEAN}got None"),
            ("a list", lambda rows, cols: [True], f"{_BOOLEAN}got [True]"),
            ("a row too few", lambda rows, cols: rows[1:] <= cols, f"{_BOOLEAN}= (2, 1, 1, 3, 5), got shape (2, 5)"),
            (
                "three batch rows",
                lambda rows, cols: np.ones((3, 1, 1, 3, 5), bool),
                f"{_BOOLEAN}= (2, 1, 1, 3, 5), got shape (3, 1, 1, 3, 5)",
            ),
            (
                "six axes",
                lambda rows, cols: np.ones((1,) * 6, bool),
                f"{_BOOLEAN}= (2, 1, 1, 3, 5), got shape (1, 1, 1, 1, 1, 1)",
            ),
        )
    },
    "custom mask, whole numbers, materialize": (
        "visible|a boolean array|dtype int64",
        lambda x: _Custom(lambda rows, cols: rows * cols).materialize(3, 5, batch=2),
    ),
    "custom mask, whole numbers, softmax": (
        "visible|a boolean array|dtype int64",
        lambda x: x.softmax(mask=_Custom(lambda rows, cols: rows * cols)),
    ),
}
_OWN_WORDS: Rows = {
    "mask & array": (
        "mask|a mask object on both sides of & or ||Hint|Dense(array)",
        lambda x: ats.Causal() & x.bools(3, 3),
    ),
    "custom mask, three batch rows, auto": (
        "visible|a boolean array|shape (3, 1, 1, 1, 1)",
        lambda x: x.attend(mask=_Custom(lambda rows, cols: np.ones((3, 1, 1, 1, 1), bool))),
    ),
}
_ON_THE_LEFT: Rows = {
    "array & mask": (
        "mask|a mask object on both sides of & or ||Hint|Dense(array)",
        lambda x: x.bools(3, 3) & ats.Causal(),
    ),
}

CASES = (
    *cases({MaskError: _LENGTHS | _ALIGNMENT | _ARRAYS | _COMPOSITION | _CUSTOM}),
    *cases({MaskError: _OWN_WORDS}, same=False),
    *cases({MaskError: _ON_THE_LEFT}, same=False, but="tensorflow"),
)
