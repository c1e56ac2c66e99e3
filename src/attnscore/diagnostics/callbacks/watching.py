"""Base of the callbacks of all libraries: a watch that starts and stops with the training, and its log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from attnscore.diagnostics.callbacks.logging import HeadLog
from attnscore.diagnostics.watching.base import Watch
from attnscore.diagnostics.watching.records import Row
from attnscore.diagnostics.watching.watch import watch
from attnscore.errors import ArgumentError, message

_PARAMETERS = """
    Parameters
    ----------
    *writers : objects with ``add_scalar``, ``log_metrics`` or ``log``, or callables (numbers, step)
        Logs to write to, as `HeadLog` takes them.
    every : int
        Sample one call of the model in `every`.
    csv : path, optional
        A CSV file to write.
    per_head : bool
        Write one number for each head and statistic.
    stop : bool
        End the training when a head fails.
    on_step : callable (step, rows), optional
        Called after each sampled step.
    options
        Other arguments of `watch`, such as `thresholds`.
"""


# Callbacks that the innermost wrapped method of this thread has started; None outside of all.
_STARTED: ContextVar[list[Watching] | None] = ContextVar("started", default=None)


def stop_watches_at_the_end(owner: Any, name: str) -> None:
    """Wrap a method that calls callbacks, once: it stops their watches when it ends, also by an exception."""
    method = getattr(owner, name)
    if getattr(method, "stops_watches", False):
        return

    @functools.wraps(method)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        started: list[Watching] = []
        token = _STARTED.set(started)
        try:
            return method(*arguments, **options)
        finally:
            _STARTED.reset(token)
            for callback in started:
                callback._end()

    wrapped.stops_watches = True  # type: ignore[attr-defined]  # so that it is wrapped once
    setattr(owner, name, wrapped)


class Watching:
    """Watch of the model that a library trains. The callbacks are subclasses, and document its parameters."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = f"{cls.__doc__}\n{_PARAMETERS}"

    def __init__(
        self,
        *writers: Any,
        every: int = 10,
        csv: str | Path | None = None,
        per_head: bool = False,
        stop: bool = False,
        on_step: Callable[[int, list[Row]], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._log = HeadLog(*writers, csv=csv, per_head=per_head)
        self._stops, self._on_step = stop, on_step
        self._options = {"every": every, **options}
        self._seen: Watch | None = None
        self._has_failed = False
        for owner, name in self._training_methods():
            stop_watches_at_the_end(owner, name)

    def _training_methods(self) -> Sequence[tuple[Any, str]]:
        """Return classes of the library, with the methods that call callbacks but tell them nothing of an exception."""
        return ()

    @property
    def seen(self) -> Watch:
        """The watch with its records, once the training has begun.

        Raises
        ------
        ArgumentError
            The training has not begun.
        """
        if self._seen is None:
            raise ArgumentError(message("seen", "a training that has begun", "none"))
        return self._seen

    def _start(self, model: Any) -> None:
        """Begin to watch a model, or go on with the same."""
        if self._seen is None or self._seen.model is not model:
            self._end()
            self._seen = watch(model, on_step=self._write, **self._options)
            self._log.seen = self._seen
        if not self._seen._running and (started := _STARTED.get()) is not None:
            started.append(self)
        self._seen.resume()
        self._seen.start()

    def _write(self, step: int, rows: Sequence[Row]) -> None:
        """Write a sampled step to the logs; with `stop`, find out whether a head fails."""
        self._log(step, rows)
        if self._stops:
            self._has_failed = bool(self.seen.failing())
        if self._on_step is not None:
            self._on_step(step, list(rows))

    # The hooks of the libraries at the begin and end of a validation, and at the end, are these.

    def _pause(self, *_: Any, **__: Any) -> None:
        """Count no steps, as in a validation."""
        if self._seen is not None:
            self._seen.pause()

    def _resume(self, *_: Any, **__: Any) -> None:
        """Go on after a validation."""
        if self._seen is not None:
            self._seen.resume()

    def _end(self, *_: Any, **__: Any) -> None:
        """Stop watching."""
        if self._seen is not None:
            self._seen.stop()

    def _take_loss(self, loss: Any) -> None:
        """Pass the loss of the last step on to the records, which judge heads by it."""
        if self._seen is not None and loss is not None:
            self._seen.record_loss(loss)
