"""Why scores are scaled, measured; and what a model's attention is doing. Nothing is imported before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscore.diagnostics.health import Thresholds
    from attnscore.diagnostics.inspection import Inspection, inspect_model
    from attnscore.diagnostics.scaling import scaling_lab
    from attnscore.diagnostics.torch_watch import watch

__all__ = ["Inspection", "Thresholds", "inspect_model", "scaling_lab", "watch"]

_HOMES = {
    "Inspection": "inspection",
    "Thresholds": "health",
    "inspect_model": "inspection",
    "scaling_lab": "scaling",
    "watch": "torch_watch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
