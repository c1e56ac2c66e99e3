"""The callback of Keras."""

from __future__ import annotations

from typing import Any

import keras

from attnscore.diagnostics.callbacks.watching import Watching


class KerasCallback(Watching, keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Watch a Keras model while it trains: ``model.fit(..., callbacks=[this])``.

    A step is a batch. Validation is left out. The loss that Keras reports, its mean in the epoch, is passed on to the
    records.
    """

    on_test_begin, on_test_end, on_train_end = Watching._pause, Watching._resume, Watching._end

    def _training_methods(self) -> list[tuple[Any, str]]:
        return [(keras.Model, name) for name in ("fit", "evaluate", "predict")]

    def set_model(self, model: Any) -> None:
        """Begin to watch, before Keras compiles its training step."""
        super().set_model(model)
        self._start(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Pass the loss on; end the training if a head fails."""
        self._take_loss((logs or {}).get("loss"))
        if self._has_failed:
            self.model.stop_training = True
