"""Calls of `attend` as expressions, which operators of PyTorch take as texts next to their tensors."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from attnscore import masks, scores
from attnscore.problem.normalizers import Entmax

_BUILTIN: tuple[type[Any], ...] = (*scores.BUILTIN.values(), *masks.BUILTIN, Entmax)
_CLASSES: dict[str, Any] = {kind.__name__: kind for kind in _BUILTIN}
_FIELDS = {name: tuple(field.name for field in dataclasses.fields(kind)) for name, kind in _CLASSES.items()}
_FUNCTIONS = _CLASSES | {"float": float, "int": int}
# First rows of an operator's second result, which its backward reads. The statistics follow.
SAVED = ("log_denom", "row_max")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's own
def is_exporting() -> bool:
    """Return `torch.compiler.is_exporting`, which the compiler of torch before 2.12 takes to be true."""
    return torch.compiler.is_exporting()


class Slots:
    """Tensors and numbers of an expression, in their order."""

    def __init__(self) -> None:
        self.arrays: list[Tensor] = []
        self.integers: list[Any] = []

    def written(self, x: Any) -> str:
        """Return `x` as an expression; see `can_be_written`."""
        if isinstance(x, (np.integer, np.floating)):
            x = x.item()
        if x is None or isinstance(x, (bool, str)):
            return repr(x)
        if isinstance(x, (int, torch.SymInt)):
            self.integers.append(x)
            return f"integers[{len(self.integers) - 1}]"
        if isinstance(x, float) and is_exporting():
            # A constant, which the decomposition for exported programs can read.
            return f"float({str(x)!r})"
        if isinstance(x, (float, torch.SymFloat)):
            # As a tensor: a float among the arguments of an operator is a constant of the graph. Torch keeps the
            # sum free, not a tensor filled with the float.
            return f"float({self.written(torch.zeros((), dtype=torch.float64) + cast(float, x))})"
        if isinstance(x, (np.ndarray, np.number)):
            x = torch.as_tensor(x)
        if isinstance(x, Tensor):
            self.arrays.append(x)
            return f"arrays[{len(self.arrays) - 1}]"
        if isinstance(x, (list, tuple)):
            return "[" + ", ".join([self.written(part) for part in x]) + "]"
        name = type(x).__name__
        return name + "(" + ", ".join([self.written(getattr(x, field)) for field in _FIELDS[name]]) + ")"


def can_be_written(x: Any) -> bool:
    """Return whether `x` has an expression."""
    if x is None or isinstance(x, (str, int, float, torch.SymInt, torch.SymFloat, Tensor, np.ndarray, np.number)):
        return True
    if isinstance(x, (list, tuple)):
        return all(can_be_written(part) for part in x)
    name = type(x).__name__
    return _CLASSES.get(name) is type(x) and all(can_be_written(getattr(x, field)) for field in _FIELDS[name])


@lru_cache(maxsize=512)
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def read(expression: str, names: Sequence[str] = (), **slots: Sequence[Any]) -> dict[str, Any]:
    """Read the arguments of a call from its expression, or those in `names` alone."""

    def value(node: Any) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List):
            return [value(part) for part in node.elts]
        if isinstance(node, ast.Subscript):
            slot: Any = node
            return slots[slot.value.id][slot.slice.value]
        return _FUNCTIONS[node.func.id](*(value(part) for part in node.args))

    call = cast(ast.Call, _parsed(expression))
    return {str(keyword.arg): value(keyword.value) for keyword in call.keywords if not names or keyword.arg in names}
