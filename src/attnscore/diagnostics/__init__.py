"""Experiments on why scores are scaled, and the attention of whole models. Modules are imported when they are used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscore.diagnostics.inspection.inspection import Inspection, inspect_model
    from attnscore.diagnostics.scaling import scaling_lab
    from attnscore.diagnostics.watching.base import Watch
    from attnscore.diagnostics.watching.head_weights import qk_clip, reset_heads
    from attnscore.diagnostics.watching.health import Thresholds, Verdict
    from attnscore.diagnostics.watching.watch import watch

__all__ = [
    "Inspection",
    "Thresholds",
    "Verdict",
    "Watch",
    "inspect_model",
    "qk_clip",
    "reset_heads",
    "scaling_lab",
    "watch",
]

_HOMES = {
    "Inspection": "inspection.inspection",
    "Thresholds": "watching.health",
    "Verdict": "watching.health",
    "Watch": "watching.base",
    "inspect_model": "inspection.inspection",
    "qk_clip": "watching.head_weights",
    "reset_heads": "watching.head_weights",
    "scaling_lab": "scaling",
    "watch": "watching.watch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
