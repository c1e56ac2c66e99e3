"""Private names of Keras that a watch uses, each with the effect of its absence.

- ``_compute_attention`` of its multi-head layers and ``_apply_scores`` of the others are the methods that compute
  attention, which Keras lets subclasses replace. Without one, calls of the layer are counted in `unseen`.
- Without the flag of symbolic calls, a call that only infers shapes on PyTorch's backend counts as a step.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

__all__ = ["attention_methods", "in_symbolic_scope"]

try:
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope
except ImportError:

    def in_symbolic_scope() -> bool:
        """Return False: nothing says which calls are symbolic."""
        return False


_METHODS = {
    "MultiHeadAttention": "_compute_attention",
    "GroupQueryAttention": "_compute_attention",
    "Attention": "_apply_scores",
}


def attention_methods() -> tuple[list[tuple[type, str]], list[type]]:
    """Return the methods that compute attention, and the layers that have none by the known name."""
    methods, others = [], []
    for layer, name in _METHODS.items():
        if (owner := getattr(keras.layers, layer, None)) is not None:
            if isinstance(vars(owner).get(name), Callable):  # type: ignore[arg-type]
                methods.append((owner, name))
            else:
                others.append(owner)
    return methods, others
