"""Code that the modules of all frameworks share: the arguments of both editions, and functions of any array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from attnscore import backends

ADDITIVE = ("num_hiddens", "dropout")
OLD_ADDITIVE = ("key_size", "query_size", "num_hiddens", "dropout")
MULTI_HEAD = ("num_hiddens", "num_heads", "dropout", "bias")
OLD_MULTI_HEAD = ("key_size", "query_size", "value_size", "num_hiddens", "num_heads", "dropout", "bias")

Layer = TypeVar("Layer")


def additive_attention(layer: Callable[..., Layer], module: str) -> Callable[..., Layer]:
    """Return `module`'s constructor of additive attention, with the arguments of both editions."""

    def AdditiveAttention(*arguments: Any, **options: Any) -> Layer:
        """``AdditiveAttention(num_hiddens, dropout)``, or ``(key_size, query_size, num_hiddens, dropout)`` before."""
        return layer(**named(arguments, options, ADDITIVE, OLD_ADDITIVE))

    return _defined_in(module, AdditiveAttention)


def multi_head_attention(layer: Callable[..., Layer], module: str) -> Callable[..., Layer]:
    """Return `module`'s constructor of multi-head attention, with the arguments of both editions."""

    def MultiHeadAttention(*arguments: Any, **options: Any) -> Layer:
        """``MultiHeadAttention(num_hiddens, num_heads, dropout, bias=False)``, or with the three sizes in front."""
        return layer(**named(arguments, options, MULTI_HEAD, OLD_MULTI_HEAD))

    return _defined_in(module, MultiHeadAttention)


def _defined_in(module: str, function: Callable[..., Layer]) -> Callable[..., Layer]:
    """Name a function as its module has it: pickle finds functions by these names."""
    function.__module__, function.__qualname__ = module, function.__name__
    return function


def named(
    positional: Sequence[Any], options: Mapping[str, Any], names: Sequence[str], old_names: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments by name; more positional ones than `names` are in the order of the earlier edition."""
    order = names if len(positional) <= len(names) else old_names
    if len(positional) > len(order):
        raise TypeError(f"expected at most the arguments {', '.join(order)}, got {len(positional)}")
    if twice := set(order[: len(positional)]) & set(options):
        raise TypeError(f"got several values for {', '.join(sorted(twice))}")
    return dict(zip(order, positional, strict=False)) | dict(options)


def sequence_mask(X: Any, valid_len: Any, value: float = 0) -> Any:
    """Return `X` (batch, length, ...) with `value` at the positions from `valid_len` (batch,) on."""
    ops = backends.of({"X": X, "valid_len": valid_len})
    shape = ops.shape(X)
    positions = ops.reshape(ops.positions(0, shape[1], X), (1, shape[1], *[1] * (len(shape) - 2)))
    lens = ops.reshape(ops.astype(valid_len, "int64"), (shape[0], *[1] * (len(shape) - 1)))
    return ops.where(positions < lens, X, value)


def check_shape(a: Any, shape: Sequence[int]) -> None:
    """Raise AssertionError unless an array has this shape."""
    if tuple(a.shape) != tuple(shape):
        raise AssertionError(f"tensor's shape {tuple(a.shape)} != expected shape {tuple(shape)}")
