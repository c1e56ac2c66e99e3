"""The callback of Hugging Face's ``Trainer``."""

from __future__ import annotations

import sys
from typing import Any

import transformers

from attnscore.diagnostics.callbacks.watching import Watching


class TrainerCallback(Watching, transformers.TrainerCallback):  # type: ignore[misc]  # imported when it is used
    """Watch the model of a Hugging Face ``Trainer`` while it trains: ``Trainer(..., callbacks=[this])``.

    A step is one call of the model: with gradient accumulation several are one step of the optimiser. Evaluation is
    left out. The loss that the trainer logs is passed on to the records.
    """

    on_evaluate, on_train_end = Watching._resume, Watching._end

    def _training_methods(self) -> list[tuple[Any, str]]:
        # Importing it takes seconds; who trains with it has imported it.
        trainer = sys.modules.get("transformers.trainer")
        return [] if trainer is None else [(trainer.Trainer, "train")]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to watch."""
        self._start(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out an evaluation that follows; end the training if a head fails."""
        if self._has_failed:
            control.should_training_stop = True
        if control.should_evaluate:
            self._pause()

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Pass the loss on."""
        self._take_loss((logs or {}).get("loss"))
