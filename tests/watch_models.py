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
