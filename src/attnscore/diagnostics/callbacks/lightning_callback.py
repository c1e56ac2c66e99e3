"""The callback of Lightning, from the package ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from attnscore.diagnostics.callbacks.watching import Watching
from attnscore.io import require


def _base() -> Any:
    """Return Lightning's class of callbacks, of the package that the user has imported or has; object without one."""
    packages = ("lightning", "pytorch_lightning")
    for name in sorted(packages, key=lambda name: name not in sys.modules):
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            return importlib.import_module("lightning.pytorch" if name == "lightning" else name).Callback
    return object


_BASE: Any = _base()


class LightningCallback(Watching, _BASE):  # type: ignore[misc]  # a base that is there only with Lightning
    """Watch the module of a Lightning ``Trainer`` while it trains: ``Trainer(callbacks=[this])``.

    A step is one call of the module, or of the part of it that ``training_step`` calls first. Validation is left out.
    The loss that ``training_step`` returns is passed on to the records. A logger of Lightning is a writer.
    """

    on_validation_start, on_validation_end = Watching._pause, Watching._resume
    on_train_end = on_exception = Watching._end

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """Raise FrameworkError where Lightning is not installed."""
        if _BASE is object:
            require("lightning", "LightningCallback", "pip install lightning")
        return super().__new__(cls)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._start(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Pass the loss on; end the training if a head fails."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._take_loss(loss)
        if self._has_failed:
            trainer.should_stop = True
