"""Padding masks among the arguments of a model's call.

Requirements:
- an argument is known by its name in the model's signature, also where it is passed by position;
- another argument that looks like a padding mask is named, as its polarity cannot be known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def named_arguments(function: Callable[..., Any], inputs: tuple[Sequence[Any], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of a call by name; those without a name, where the signature does not fit, are left out."""
    arguments, options = inputs
    try:
        return dict(inspect.signature(function).bind(*arguments, **options).arguments)
    except (TypeError, ValueError):
        return dict(options)


def padding_like(named: Mapping[str, Any]) -> str | None:
    """Return the name of an argument that may be a padding mask: (batch, token) as another one, boolean or so named.

    >>> import numpy as np
    >>> padding_like({"x": np.ones((2, 5, 8)), "pad": np.ones((2, 5)), "mask": np.ones((5, 5))})
    'pad'
    """
    shapes = {name: tuple(getattr(x, "shape", ())) for name, x in named.items()}
    for name, shape in shapes.items():
        is_mask = "bool" in str(getattr(named[name], "dtype", "")) or "pad" in name or "mask" in name
        if len(shape) != 2 or not is_mask:
            continue
        others = [other[:2] for each, other in shapes.items() if each != name and len(other) >= 2]
        if shape in others or shape[::-1] in others:
            return name
    return None
