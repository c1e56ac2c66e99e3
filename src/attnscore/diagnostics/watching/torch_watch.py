"""Recording of every attention call of a PyTorch model, step by step, without changing the model.

Requirements:
- a step is one call of the model; every n-th is sampled, the others cost only a test per module;
- where parts of the model are called in its place, a step begins with the part that was called first;
- what a backward pass calls, to compute it again, is not recorded;
- a call is named by the module that made it, and by its number among that module's calls in the step;
- threads that call the model at once have steps of their own;
- memory grows with layers, heads and sampled steps, never with the length of a sequence;
- every call that could not be recorded is counted, with the reason.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnscore.backends import torch_private as private
from attnscore.base.arguments import check_flag, is_whole, shown
from attnscore.diagnostics.watching import torch_patches
from attnscore.diagnostics.watching.health import Thresholds
from attnscore.diagnostics.watching.records import Layer, Records, Row
from attnscore.diagnostics.watching.torch_calls import (
    Array,
    Call,
    Scores,
    described,
    output_and_sums,
    reason_against,
    sums_of,
)
from attnscore.errors import ArgumentError, message

# Arguments of models, (batch, token): True (1) at tokens, and True (or -inf) at padding.
_REAL, _IGNORED = "attention_mask", "src_key_padding_mask"
_WHOLE = "(model)"


@dataclass
class _Step:
    """Step in progress: the sums of each call, and which tokens are not padding."""

    number: int
    sampled: bool
    begins: bool
    """Whether the step begins here, and not with the call of another part of the model."""
    real: Tensor | None
    sums: dict[str, dict[str, Array]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)


class _ThreadState(threading.local):
    """Names of the modules that this thread is in, the innermost last, and its step."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.step: _Step | None = None


class Watch(Records):
    """Records of a model that can be started and stopped. See `watch` and `Records`."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        thresholds: Thresholds | None,
        on_step: Callable[[int, list[Row]], Any] | None,
        history: int,
        softmax: str | Iterable[str] | Mapping[str, int | None],
        one_pass: bool,
    ) -> None:
        super().__init__(Thresholds() if thresholds is None else thresholds)
        if not isinstance(model, nn.Module):
            raise ArgumentError(message("model", "a torch.nn.Module", type(model).__name__))
        for name, number in (("every", every), ("history", history)):
            if not is_whole(number) or number < 1:
                raise ArgumentError(message(name, "a whole number above 0", shown(number)))
        if on_step is not None and not callable(on_step):
            raise ArgumentError(message("on_step", "a function of (step, rows), or None", shown(on_step)))
        # A strong reference: names are kept by the ids of modules, which Python reuses once a module is gone.
        self._model = model
        self._names: dict[int, str] = {}
        self._first = ""  # the module whose calls are the steps
        self._softmax = _softmax_patterns(model, softmax)
        self._one_pass = check_flag("one_pass", one_pass)
        self._every, self._history, self._on_step = int(every), int(history), on_step
        self._thread, self._lock = _ThreadState(), threading.Lock()
        self._running = self._has_two = False

    def start(self) -> Self:
        """Begin to record; modules that the model gets later have no name and are ignored."""
        if not self._running:
            self._names = {id(module): name or _WHOLE for name, module in self._model.named_modules()}
            parts = {part for name in self._names.values() for part in name.split(".")}
            self._has_two = {"encoder", "decoder"} <= parts
            torch_patches.start(self)
            self._running = True
        return self

    def stop(self) -> None:
        """Stop recording and keep the numbers; `start` adds to them."""
        if self._running:
            torch_patches.stop(self)
            self._running = False
            # Steps that threads are in the middle of are dropped.
            self._thread = _ThreadState()

    def __enter__(self) -> Self:
        """Begin to record."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop recording."""
        self.stop()

    # ------------------------------------------------------------ called by the wrappers of `torch_patches`

    def enter(self, module: nn.Module, arguments: dict[str, Any]) -> bool:
        """Note that a module is called; return whether it is watched, so that `leave` must follow."""
        scripted = isinstance(module, torch.jit.ScriptModule)
        # The result of torch.compile(module) holds the module under this name.
        inner = None if scripted else module._modules.get("_orig_mod")
        name = self._names.get(id(module if inner is None else inner))
        if name is None:
            return False
        if scripted or inner is not None or module._compiled_call_impl is not None:
            with self._lock:
                self.unseen[name, "scripted code" if scripted else "compiled code"] += 1
            return False
        here = self._thread
        if not here.stack:
            if private.graph_task() != -1:  # checkpointing computes it again
                return False
            with self._lock:
                if begins := not self._first or name in (self._first, _WHOLE):
                    self._first = name
                    self.steps += 1
                number = self.steps - 1
                here.step = _Step(number, number % self._every == 0, begins, None)
        if here.step is not None and here.step.sampled and here.step.real is None:
            here.step.real = _real_tokens(arguments)
        here.stack.append(name)
        return True

    def leave(self, failed: bool) -> None:
        """Note that the innermost watched module has returned, or has raised; a step that raises is dropped."""
        here = self._thread
        if here.stack:  # none when the watch was stopped in the middle
            here.stack.pop()
        if not here.stack and here.step is not None:
            step, here.step = here.step, None
            if step.sampled and not failed:
                self._finish(step)

    def is_sampling(self) -> bool:
        """Return whether a call that is made now would be recorded."""
        here = self._thread
        return bool(here.step is not None and here.step.sampled and here.stack)

    def is_pooling(self) -> bool:
        """Return whether a call that is made now would be computed by the watch."""
        return self._one_pass and self.is_sampling()

    def heads_of_softmax(self) -> tuple[bool, int | None]:
        """Return whether a softmax of the innermost module is that of an attention, and its heads where known."""
        name = self._thread.stack[-1]
        return next(((True, heads) for x, heads in self._softmax.items() if fnmatchcase(name, x)), (False, None))

    def record(self, call: Call | Scores) -> Tensor | None:
        """Record an attention call; return its output where this watch computes it."""
        step = self._thread.step
        if step is None:
            return None
        name = self._place(step, call.within if isinstance(call, Call) else "")
        tensors = (call.scores,) if isinstance(call, Scores) else (call.query, call.key)
        if (why := reason_against(*tensors)) is not None:
            self.skip(why)
            return None
        out = None
        try:
            # Where there are two halves the mask is the encoder's, also where lengths are equal by chance.
            real = None if self._has_two and "decoder" in name else step.real
            weight = self.thresholds.saturated_weight
            if self._one_pass and isinstance(call, Call) and call.pooling is not None:
                out, step.sums[name] = output_and_sums(call, call.pooling, real, weight)
            else:
                step.sums[name] = sums_of(call, real, weight)
        except Exception as error:  # recording must never break the model
            self.skip(described(error))
        return out

    def skip(self, why: str) -> None:
        """Count an attention call that cannot be recorded, with the reason."""
        stack = self._thread.stack
        with self._lock:
            self.unseen[stack[-1] if stack else "(outside)", why] += 1

    def _place(self, step: _Step, within: str) -> str:
        """Return the name of the calling module; its second attention call in a step is "name #2"."""
        name = self._thread.stack[-1]
        if within:
            name = within if name == _WHOLE else f"{name}.{within}"
        step.calls[name] += 1
        return name if (number := step.calls[name]) == 1 else f"{name} #{number}"

    def _finish(self, step: _Step) -> None:
        added = []
        with self._lock:
            for name, sums in step.sums.items():
                heads = len(sums["rows"])
                known = self.layers.get(name)
                key = name if known is None or known.heads == heads else f"{name} ({heads} heads)"
                if key not in self.layers:
                    self.layers[key] = Layer(key, heads, deque(maxlen=self._history))
                self.layers[key].add(step.number, sums)
                added.append(self.layers[key])
            self.sampled += step.begins
            tau = self.thresholds.tau
            rows = [row for layer in added for row in layer.rows(layer.steps[-1][1], tau)]
        if self._on_step is not None:  # outside the lock: it may read the records and stop the watch
            self._on_step(step.number, rows)


def _real_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Return (batch, token) True where there is a token, from the arguments of the model; None without a mask."""
    for name in (_REAL, _IGNORED):
        mask = arguments.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            if mask.is_floating_point() and name == _IGNORED:  # added to the scores: 0 or -inf
                return mask == 0
            real = mask.detach().to(torch.bool)
            return real if name == _REAL else ~real
    return None


def _softmax_patterns(
    model: nn.Module, softmax: str | Iterable[str] | Mapping[str, int | None]
) -> dict[str, int | None]:
    """Return heads by pattern of names; raise ArgumentError unless each pattern is the name of a module."""
    patterns: Any = [softmax] if isinstance(softmax, str) else softmax
    if not isinstance(patterns, Iterable) or not all(isinstance(x, str) for x in patterns):
        raise ArgumentError(message("softmax", "names of modules, or a mapping of names to heads", shown(softmax)))
    found = dict(patterns) if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
    names = [name or _WHOLE for name, _ in model.named_modules()]
    for pattern, heads in found.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = "`unseen` of a watch without it lists where a softmax was called"
            raise ArgumentError(message("softmax", "names of modules of the model", repr(pattern), hint=hint))
        if heads is not None and (not is_whole(heads) or heads < 1):
            raise ArgumentError(message(f"softmax[{pattern!r}]", "a whole number of heads above 0", shown(heads)))
    return found


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    thresholds: Thresholds | None = None,
    on_step: Callable[[int, list[Row]], Any] | None = None,
    history: int = 1000,
    softmax: str | Iterable[str] | Mapping[str, int | None] = (),
    one_pass: bool = False,
) -> Watch:
    """Watch every attention call of a PyTorch model: a context manager, or ``start()`` and ``stop()``.

    The model is not changed: its own functions run, and statistics of their queries and keys are computed in a pass of
    their own, in O(n) memory. Recorded are ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``, the
    fused functions of ``nn.TransformerEncoder``, the attention functions of Hugging Face's models, eager included, and
    `attend` with the layers of this library, and a softmax written by hand in modules that `softmax` names. Not
    recorded: compiled or scripted code, functions bound to something else than a module's name.

    Parameters
    ----------
    model : nn.Module
    every : int
        Sample one of so many steps; a step is one call of the model, or of the part of it that is called first where
        the model itself is not.
    thresholds : Thresholds, optional
        Thresholds of the verdicts.
    on_step : callable (step, rows), optional
        Called after each sampled step with a row for each head: for logs, for stopping a training run. It comes before
        the backward pass, which needs the weights unchanged; a repair follows the optimiser's step, with `last`.
    history : int
        Number of sampled steps that are kept for trends and plots.
    softmax : names of modules, or a mapping of names to heads
        Modules whose own softmax over the last axis is that of an attention, as in BLOOM and DeBERTa; ``*`` in a name
        stands for anything. Scores of four axes are (batch, head, query, key); of three, (batch, query, key), or
        (batch * head, query, key) where the mapping gives the heads.
    one_pass : bool
        On sampled steps, compute ``F.scaled_dot_product_attention`` on the CPU by `attend`, in the pass that gives the
        statistics. The output agrees to rounding. A sampled step of long sequences then takes about as long as another,
        one of short sequences less than with a second pass. Calls with dropout, under autocast or inside checkpointing
        keep PyTorch's function and a pass of their own.

    Returns
    -------
    Watch
        Context manager with `start`, `stop` and the records: `rows`, `last`, `verdicts`, `failing`, `table`, `plot`,
        `json_lines`, `unseen`.

    Raises
    ------
    ArgumentError
        `model` is not a module, a number is not whole, `on_step` is not callable, `one_pass` is no bool, or a name in
        `softmax` is that of no module.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with watch(layer) as seen:
    ...     out, _ = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> [(row["layer"], row["head"], row["rows"]) for row in seen.rows()]
    [('(model)', 0, 5), ('(model)', 1, 5)]
    """
    return Watch(model, every, thresholds, on_step, history, softmax, one_pass)
