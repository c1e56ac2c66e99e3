"""Code that the modules of all frameworks share: the arguments of both editions, and functions of any array."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from attnscore import backends

Layer = TypeVar("Layer")


def of_both_editions(layer: type[Layer], module: str) -> type[Layer]:
    """Return a class of `module`: a layer that takes the positional arguments of both editions.

    They have the order of the later edition, which infers the sizes; more of them, or some that are given by name as
    well, the order of the earlier one.
    """
    base: Any = layer
    older: tuple[str, ...] = base._older_order
    names = tuple(name for name in older if not name.endswith("_size"))
    inherited_attribute = getattr(base, "__getattr__", None)

    class OfBothEditions(base):  # type: ignore[misc]  # a class of layers
        __doc__ = f"``({', '.join(names)})``, or ``({', '.join(older)})`` in the earlier edition."

        def __init__(self, *arguments: Any, **options: Any) -> None:
            count = len(arguments)
            if count > len(older):
                raise TypeError(f"expected at most the arguments {', '.join(older)}, got {count}")
            order = names if count <= len(names) and options.keys().isdisjoint(names[:count]) else older
            if "bias" in names and "use_bias" in options and "bias" not in options:  # its name for MXNet
                options["bias"] = options.pop("use_bias")
            super().__init__(**dict(zip(order, arguments, strict=False)), **options)

        def __getattr__(self, name: str) -> Any:
            # Called for a name that the layer lacks. In the book `attention` is a layer, which keeps the weights.
            try:
                if inherited_attribute is not None:
                    return inherited_attribute(self, name)
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            except AttributeError:
                if name != "attention":
                    raise
            return SimpleNamespace(attention_weights=self.attention_weights)

    # By these names pickle finds it.
    OfBothEditions.__module__ = module
    OfBothEditions.__name__ = OfBothEditions.__qualname__ = layer.__name__
    return OfBothEditions


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
