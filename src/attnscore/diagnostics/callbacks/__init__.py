"""Callbacks that watch a model in the training loop of a library, and write to the logs that people already have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscore.diagnostics.callbacks.keras_callback import KerasCallback
    from attnscore.diagnostics.callbacks.lightning_callback import LightningCallback
    from attnscore.diagnostics.callbacks.logging import HeadLog
    from attnscore.diagnostics.callbacks.transformers_callback import TrainerCallback

__all__ = ["HeadLog", "KerasCallback", "LightningCallback", "TrainerCallback"]

_HOMES = {
    "HeadLog": "logging",
    "KerasCallback": "keras_callback",
    "LightningCallback": "lightning_callback",
    "TrainerCallback": "transformers_callback",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
