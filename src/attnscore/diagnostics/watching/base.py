"""A watch without a framework: which steps are sampled, their sums by attention call, and when a step is complete.

Requirements:
- a step is one call of the model; every n-th is sampled;
- memory grows with layers, heads and sampled steps, never with the length of a sequence;
- every call that could not be recorded is counted, with the reason.

The observer of a framework is a subclass. It finds attention calls, and gives their sums.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from attnscore.base.arguments import is_whole, shown
from attnscore.diagnostics.watching.health import Thresholds
from attnscore.diagnostics.watching.records import Layer, Records, Row
from attnscore.diagnostics.watching.sums import Array
from attnscore.errors import ArgumentError, message

WHOLE = "(model)"
"""Name of the model itself, where it makes an attention call."""


@dataclass
class Step:
    """Step in progress: the sums of each attention call, and which tokens are not padding."""

    number: int
    sampled: bool
    begins: bool = True
    """Whether the step begins here, and not with the call of another part of the model."""
    real: dict[str, Any] = field(default_factory=dict)
    """(batch, token), True where there is a token: by module, the mask of its last call; None: no token is padding."""
    masked_outputs: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    """By id: outputs (weak references) of modules with a mask, and the mask: modules that read only them have it."""
    sums: dict[Any, dict[str, Array]] = field(default_factory=dict)
    """Sums by name; before a program's run ends, by module, iteration of a loop and number of the call."""
    calls: Counter[str] = field(default_factory=Counter)


def next_name(calls: Counter[str], name: str) -> str:
    """Return the name of one more call of a module; its second attention call in a step is "name #2"."""
    calls[name] += 1
    return name if calls[name] == 1 else f"{name} #{calls[name]}"


class Watch(Records):
    """Records of a model that can be started and stopped. See `watch` and `Records`."""

    def __init__(
        self,
        model: Any,
        every: int = 1,
        thresholds: Thresholds | None = None,
        on_step: Callable[[int, list[Row]], Any] | None = None,
        history: int = 1000,
    ) -> None:
        super().__init__(Thresholds() if thresholds is None else thresholds)
        for name, number in (("every", every), ("history", history)):
            if not is_whole(number) or number < 1:
                raise ArgumentError(message(name, "a whole number above 0", shown(number)))
        if on_step is not None and not callable(on_step):
            raise ArgumentError(message("on_step", "a function of (step, rows), or None", shown(on_step)))
        # A strong reference: names are kept by the ids of modules, which Python reuses once a module is gone.
        self._model = model
        self._every, self._history, self._on_step = int(every), int(history), on_step
        self._lock = threading.RLock()
        self._running = self._is_paused = False

    @property
    def model(self) -> Any:
        """The model that is watched."""
        return self._model

    def start(self) -> Self:
        """Begin to record; modules that the model gets later have no name and are ignored."""
        if not self._running:
            self._install()
            self._running = True
        return self

    def stop(self) -> None:
        """Stop recording and keep the numbers; `start` adds to them."""
        if self._running:
            self._uninstall()
            self._running = False

    def pause(self) -> None:
        """Count and record no steps until `resume`, as during a validation: cheaper than `stop` and `start`."""
        self._is_paused = True

    def resume(self) -> None:
        """Count and record steps again."""
        self._is_paused = False

    def __enter__(self) -> Self:
        """Begin to record."""
        return self.start()

    def __exit__(self, *error: object) -> None:
        """Stop recording."""
        self.stop()

    @abstractmethod
    def _install(self) -> None:
        """Let the framework's attention functions report their calls."""

    @abstractmethod
    def _uninstall(self) -> None:
        """Let the attention functions report no more; drop unfinished steps of threads."""

    # ------------------------------------------------------------ called by the observer of a framework

    def _begin_step(self, begins: bool = True) -> Step:
        """Return a new step; or, without `begins`, one more part of the last step."""
        with self._lock:
            if self._is_paused:
                return Step(self.steps, False, begins)
            self.steps += begins
            number = self.steps - 1
        return Step(number, number % self._every == 0, begins)

    def _count_unseen(self, name: str, why: str) -> None:
        """Count an attention call of a module that cannot be recorded, with the reason."""
        with self._lock:
            self.unseen[name, why] += 1

    def _finish(self, step: Step) -> None:
        """Add the sums of a sampled step to the records, and call `on_step` with its rows."""
        added = []
        with self._lock:
            if step.begins:  # the steps before are whole
                self._remember_before_the_history_drops_a_step()
                self.clipped.clear()
            for name, sums in step.sums.items():
                heads = len(sums["rows"])
                same_name = self.layers.get(name)
                key = name if same_name is None or same_name.heads == heads else f"{name} ({heads} heads)"
                layer = self.layers.setdefault(key, Layer(key, heads, deque(maxlen=self._history)))
                layer.add(step.number, sums)
                added.append(layer)
            self.sampled += step.begins
            if self._on_step is None:  # rows of many heads take as long as a short attention call
                return
            rows = [row for layer in added for row in layer.rows(layer.steps[-1][1], self.thresholds.tau)]
        self._on_step(step.number, rows)  # outside the lock: it may read the records and stop the watch
