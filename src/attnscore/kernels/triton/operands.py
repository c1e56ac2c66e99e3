"""Operands of the Triton kernels: named tuples of tensors and strides, as Triton takes them.

A broadcast axis has stride 0, so no operand is copied for it. None in a tuple is a constant to Triton's compiler,
which leaves out the code for absent operands.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attnscore.problem.statistics import TABLE


class Side(NamedTuple):
    """Queries or keys of one (batch, head, group): a pointer at them, and strides in elements."""

    data: Any
    row: Any
    column: Any


class Operand(NamedTuple):
    """Array on the axes (batch, head, group, row, column): tensor and strides in elements."""

    data: Any
    batch: Any
    head: Any
    group: Any
    row: Any
    column: Any


class Sizes(NamedTuple):
    """Lengths of the axes of a call."""

    n_q: Any
    n_k: Any
    dim: Any
    """Dimension of queries and keys."""
    value_dim: Any
    heads: Any
    """Number of KV heads."""
    groups: Any
    """Query heads that share a KV head."""


class Masking(NamedTuple):
    """The mask of a call; query i attends key j where all parts that are not None say so."""

    start: Any = None
    """First key of each query's interval, int32 (interval, batch or 1, query), in C order."""
    stop: Any = None
    interval: Any = 0
    """Stride of an interval in `start` and `stop`."""
    batch: Any = 0
    """Stride of a batch row in `start` and `stop`; 0 where all share one."""
    ends: Any = None
    """Ends of each query tile, int32 (interval, batch or 1, tile, 4): see `ranges.ends_of_tiles`."""
    ends_batch: Any = 1
    """Batch rows in `ends`."""
    query_ids: Any = None
    """Document of each query and key, int64 (batch or 1, n): a pair attends where they are equal and not negative."""
    key_ids: Any = None
    query_ids_batch: Any = 0
    key_ids_batch: Any = 0
    array: Any = None
    """`Operand` of booleans."""


class Dropout(NamedTuple):
    """Dropout of the weights: the halves of the seed and the threshold as the bits of int32, and 1 / (1 - p)."""

    low: Any
    high: Any
    threshold: Any
    factor: Any


class Inputs(NamedTuple):
    """Inputs of all kernels over tiles of pairs: each an `Operand` unless its docstring differs; None: absent."""

    query: Any
    key: Any
    value: Any
    query_bias: Any
    key_bias: Any
    shared: Any
    """Arrays of the score that all pairs share: w_v of an additive score, the tuple of parameters of a custom score."""
    scales: Any
    """Scale of each query head, float32 (head, group)."""
    bias: Any
    masking: Any
    """`Masking`"""
    dropout: Any
    """`Dropout`"""


_ROWS: Any = ("row_max", "log_denom", *(name for name in TABLE if name != "log_sum_exp"))
# By a variable, as type checkers take only literal names.
_namedtuple: Any = namedtuple
Rows = _namedtuple("Rows", _ROWS, defaults=(None,) * len(_ROWS))
"""One float32 a query, (batch, head, group, query) in C order; None: not requested."""


class RowGrads(NamedTuple):
    """Numbers of each query that the backward reads: -delta = dlse - dout . out, and the entropy with its gradient."""

    row_max: Any
    log_denom: Any
    minus_delta: Any
    entropy: Any
    grad_entropy: Any


def operand(x: torch.Tensor, lead: Sequence[int], heads: int, groups: int, row: int) -> Operand:
    """Return an array (*lead, head, group, row, column), each axis whole or 1, with its leading axes as one."""
    expanded = x.expand(*lead, heads, groups, row, x.shape[-1])
    # Leading axes that no single stride describes are copied.
    return as_strided_operand(expanded.reshape(math.prod(lead), *expanded.shape[len(lead) :]))


def as_strided_operand(x: torch.Tensor) -> Operand:
    """Return an array (batch, head, group, row, column) as an `Operand`; an axis of size 1 is broadcast."""
    return Operand(x, *(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)))
