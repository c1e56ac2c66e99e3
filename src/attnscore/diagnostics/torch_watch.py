"""Watching every attention call of a PyTorch model, step by step, without changing the model.

What this module meets:
- a step is one call of the model (of its outermost module that is called); every n-th is looked at, the others cost
  nothing but a test per module;
- a call is known by the module that made it, and by its number among that module's calls in the step;
- steps of several threads at once are steps of their own; none sees what another calls;
- what is kept grows with layers, heads and sampled steps, never with the length of a sequence;
- whatever could not be looked at is counted, with the reason.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnscore.core.arguments import is_whole, shown
from attnscore.diagnostics import torch_patches
from attnscore.diagnostics.health import Thresholds
from attnscore.diagnostics.torch_calls import Array, Call, Scores, described, reason_against, sums_of
from attnscore.diagnostics.watched import Layer, Row, Watched
from attnscore.errors import ArgumentError, message

# Under these names models are told which tokens are real (1) or padding; only (batch, token) says it.
_REAL, _IGNORED = "attention_mask", "src_key_padding_mask"


@dataclass
class _Step:
    """What has been seen in a step: the sums of each call, and which tokens are real."""

    number: int
    sampled: bool
    real: Tensor | None
    sums: dict[str, dict[str, Array]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)


class _Here(threading.local):
    """What of the model this thread is in."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.step: _Step | None = None


class Watch(Watched):
    """What `watch` returns: the numbers so far, and the switch. See `watch` and `Watched`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        thresholds: Thresholds | None = None,
        on_step: Callable[[int, list[Row]], Any] | None = None,
        history: int = 1000,
    ) -> None:
        super().__init__(thresholds or Thresholds())
        if not isinstance(model, nn.Module):
            raise ArgumentError(message("model", "a torch.nn.Module", type(model).__name__))
        for name, number in (("every", every), ("history", history)):
            if not is_whole(number) or number < 1:
                raise ArgumentError(message(name, "a whole number above 0", shown(number)))
        # Weakly would be enough, were ids not used again: names are held by id while the watch is on.
        self._model: nn.Module | None = model
        self._names: dict[int, str] = {}
        self._root = id(model)
        self._root_was_called = False
        self._every, self._history, self._on_step = int(every), int(history), on_step
        self._here, self._lock = _Here(), threading.Lock()
        self._running = self._has_two = False

    # ------------------------------------------------------------ the switch

    def start(self) -> Self:
        """Begin to watch; modules that the model has now are those that are known by name."""
        if not self._running and self._model is not None:
            self._names = {id(module): name or "(model)" for name, module in self._model.named_modules()}
            parts = {part for name in self._names.values() for part in name.split(".")}
            self._has_two = {"encoder", "decoder"} <= parts
            torch_patches.start(self)
            self._running = True
        return self

    def stop(self) -> None:
        """Watch no more; what was seen stays. `start` goes on with the same numbers."""
        if self._running:
            torch_patches.stop(self)
            self._running = False
            # What a thread is in the middle of, is lost to the numbers.
            self._here = _Here()

    def __enter__(self) -> Self:
        """Begin to watch."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Watch no more."""
        self.stop()

    # ------------------------------------------------------------ what the wrappers tell

    def enter(self, module: nn.Module, arguments: dict[str, Any]) -> bool:
        scripted = isinstance(module, torch.jit.ScriptModule)
        # What torch.compile(module) returns holds the module under this name.
        inner = None if scripted else module._modules.get("_orig_mod")
        name = self._names.get(id(module if inner is None else inner))
        if name is None:
            return False
        if scripted or inner is not None or module._compiled_call_impl is not None:
            self.unseen[name, "scripted code" if scripted else "compiled code"] += 1
            return False
        here = self._here
        if not here.stack:
            if id(module) == self._root:
                self._root_was_called = True
            elif self._root_was_called:
                # A part of the model by itself, once the whole was called: checkpointing computes it once more.
                return False
            with self._lock:
                here.step = _Step(self.steps, self.steps % self._every == 0, _real_tokens(arguments))
                self.steps += 1
        here.stack.append(name)
        return True

    def leave(self) -> None:
        here = self._here
        if here.stack:  # none when the watch was stopped in the middle
            here.stack.pop()
        if not here.stack and here.step is not None:
            step, here.step = here.step, None
            if step.sampled:
                self._finish(step)

    def wants(self) -> bool:
        here = self._here
        return bool(here.step is not None and here.step.sampled and here.stack)

    def saw(self, call: Call | Scores) -> None:
        step = self._here.step
        if step is None:
            return
        name = self._place(step, call.within if isinstance(call, Call) else "")
        tensors = (call.scores,) if isinstance(call, Scores) else (call.query, call.key)
        if (why := reason_against(*tensors)) is not None:
            self.missed(why)
            return
        try:
            # Which tokens are real is said of the encoder's, where there are two; lengths may be the same by chance.
            real = None if self._has_two and "decoder" in name else step.real
            step.sums[name] = sums_of(call, real, self.thresholds.saturated_weight)
        except Exception as error:  # looking must never break the model
            self.missed(described(error))

    def missed(self, why: str) -> None:
        stack = self._here.stack
        with self._lock:
            self.unseen[stack[-1] if stack else "(outside)", why] += 1

    def _place(self, step: _Step, within: str) -> str:
        """The module that is being called; its second attention call in a step is "name #2"."""
        name = self._here.stack[-1]
        if within:
            name = within if name == "(model)" else f"{name}.{within}"
        step.calls[name] += 1
        return name if (number := step.calls[name]) == 1 else f"{name} #{number}"

    def _finish(self, step: _Step) -> None:
        seen = []
        with self._lock:
            for name, sums in step.sums.items():
                heads = len(sums["rows"])
                known = self.layers.get(name)
                key = name if known is None or known.heads == heads else f"{name} ({heads} heads)"
                if key not in self.layers:
                    self.layers[key] = Layer(key, heads, deque(maxlen=self._history))
                self.layers[key].add(step.number, sums)
                seen.append(self.layers[key])
            self.sampled += 1
            tau = self.thresholds.tau
            rows = [row for layer in seen for row in layer.rows_of(layer.steps[-1][1], tau)]
        if self._on_step is not None:  # may ask anything of the watch, and stop it
            self._on_step(step.number, rows)


def _real_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """(batch, token) True where there is a token, from the arguments of the model; None when they do not say."""
    for name in (_REAL, _IGNORED):
        mask = arguments.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            if mask.is_floating_point() and name == _IGNORED:  # added to the scores: 0 or -inf
                return mask == 0
            real = mask.detach().to(torch.bool)
            return real if name == _REAL else ~real
    return None


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    thresholds: Thresholds | None = None,
    on_step: Callable[[int, list[Row]], Any] | None = None,
    history: int = 1000,
) -> Watch:
    """Watch every attention call of a PyTorch model: a context manager, or ``start()`` and ``stop()``.

    The model is not changed: its own functions run, and statistics of their queries and keys are computed beside them,
    in O(n) memory. Seen are ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``, the fused functions
    of ``nn.TransformerEncoder``, the attention functions of Hugging Face's models, eager included, and `attend` with
    the layers of this library. Not seen: compiled or scripted code, a softmax written by hand, functions bound
    to something else than a module's name.

    Parameters
    ----------
    model : nn.Module
    every : int
        Look at every so many steps; a step is one call of the model.
    thresholds : Thresholds, optional
        When a head is called what.
    on_step : callable (step, rows), optional
        Called after each step that was looked at, with a row for each head: for logs, for stopping a training run. It
        comes before the backward pass, which the weights must not change under: a repair follows the optimiser's step,
        by `Watched.last`.
    history : int
        How many of the last sampled steps are kept for trends and plots.

    Returns
    -------
    Watch
        A `Watched`: `rows`, `last`, `verdicts`, `failing`, `table`, `plot`, `json_lines`, `unseen`.

    Raises
    ------
    ArgumentError
        Something that is no module, or numbers that are not whole.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with watch(layer) as seen:
    ...     out, _ = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> [(row["layer"], row["head"], row["rows"]) for row in seen.rows()]
    [('(model)', 0, 5), ('(model)', 1, 5)]
    """
    return Watch(model, every=every, thresholds=thresholds, on_step=on_step, history=history)
