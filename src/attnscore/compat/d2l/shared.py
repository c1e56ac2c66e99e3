"""Code that the modules of all frameworks share: the arguments of both editions, and functions of any array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attnscore import backends

Layer = TypeVar("Layer")


def of_both_editions(layer: Callable[..., Layer], module: str) -> Callable[..., Layer]:
    """Return `module`'s constructor of a layer.

    Positional arguments have the order of the later edition, which infers the sizes; more of them, the order of the
    earlier one.
    """
    older: tuple[str, ...] = layer._older_order  # type: ignore[attr-defined]  # of these layers
    names = [name for name in older if not name.endswith("_size")]

    def construct(*arguments: Any, **options: Any) -> Layer:
        order = names if len(arguments) <= len(names) else older
        if len(arguments) > len(order):
            raise TypeError(f"expected at most the arguments {', '.join(order)}, got {len(arguments)}")
        return layer(**dict(zip(order, arguments, strict=False)), **options)

    construct.__doc__ = f"``({', '.join(names)})``, or ``({', '.join(older)})`` in the earlier edition."
    # By these names pickle finds it.
    construct.__module__, construct.__name__, construct.__qualname__ = module, layer.__name__, layer.__name__
    return construct


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
