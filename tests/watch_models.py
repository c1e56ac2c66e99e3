"""Rows of a watched PyTorch model of one attention call, which watches of other frameworks are compared with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from attnscore.diagnostics import watch

ROW = dict[str, Any]


class Pooled(nn.Module):
    """``F.scaled_dot_product_attention`` with these arguments."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, *arrays: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*arrays, **self.given)


def torch_rows(
    query: np.ndarray, key: np.ndarray, tokens: np.ndarray | None = None, value: np.ndarray | None = None, **given: Any
) -> list[ROW]:
    """Rows of a PyTorch model with queries, keys and values (batch, position, head, feature); no value: the keys."""
    arrays = query, key, key if value is None else value
    q, k, v = (torch.from_numpy(np.array(x, np.float32)).transpose(1, 2) for x in arrays)
    arguments = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    model = Pooled(**arguments, enable_gqa=q.shape[1] != k.shape[1])
    with watch(model) as seen:
        model(q, k, v, **({} if tokens is None else {"attention_mask": torch.from_numpy(tokens)}))
    return seen.rows()


def assert_same_rows(rows: list[ROW], expected: list[ROW], tolerance: float = 2e-5) -> None:
    """Check that rows have the same numbers, whatever their layers are called.

    What queries and values say of a head is known of fewer calls in some frameworks, where it is NaN.
    """
    assert len(rows) == len(expected) > 0
    for row, other in zip(rows, expected, strict=True):
        assert row["head"] == other["head"]
        for name in row.keys() - {"layer", "head"}:
            if name in ("query_variance", "value_spread") and math.isnan(row[name] + other[name]):
                continue
            if math.isnan(other[name]):
                assert math.isnan(row[name]), name
            else:
                assert row[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


# Faults of head 1 of 2, from its kernels (features, head, size) of queries: what a bad step or initialisation leaves.
FAULTS = {
    "queries x 30": lambda kernel: kernel * np.array([1, 30], np.float32)[:, None],
    "nan in W_q": lambda kernel: np.where(np.arange(2)[:, None] == 1, np.float32(np.nan), kernel),
    "queries all alike": lambda kernel: kernel * np.array([1, 0], np.float32)[:, None],
}
STEPS, BREAKS_AT = 7, 3


def failures(seen: Any) -> list[tuple[int, str, int, str]]:
    """Head, kind, first step and cause of every failure that a watch reports."""
    return [(x.head, x.sign, x.first_step, x.cause) for x in seen.verdicts() if x.failure]


def failures_of_pytorch(fault: str, x: np.ndarray, projections: dict[str, tuple[np.ndarray, np.ndarray]]) -> Any:
    """Failures of an ``nn.MultiheadAttention`` with kernels (features, head, size) and offsets (head, size)."""
    size = x.shape[-1]
    layer = nn.MultiheadAttention(size, 2, batch_first=True)

    def set_queries(change: Any) -> None:
        with torch.no_grad():
            for place, name in enumerate(("query", "key", "value")):
                kernel, offset = projections[name]
                kernel = change(kernel) if name == "query" else kernel
                rows = slice(size * place, size * place + size)
                layer.in_proj_weight[rows] = torch.from_numpy(kernel.reshape(size, size).T.copy())
                layer.in_proj_bias[rows] = torch.from_numpy(offset.reshape(size).copy())

    set_queries(lambda kernel: kernel)
    with watch(layer) as seen:
        for step in range(STEPS):
            if step == BREAKS_AT:
                set_queries(FAULTS[fault])
            layer(*[torch.from_numpy(x)] * 3, need_weights=False)
    return failures(seen)
