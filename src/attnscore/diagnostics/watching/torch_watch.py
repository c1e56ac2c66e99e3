"""Recording of every attention call of a PyTorch model, step by step, without changing the model.

Requirements:
- a step is one call of the model; every n-th is sampled, the others cost only a test per module;
- where parts of the model are called in its place, a step begins with the part that was called first;
- calls of a backward pass, which computes them again, are not recorded;
- a call is named by the module that made it, and by its number among that module's calls in the step;
- threads that call the model at once have steps of their own;
- memory grows with layers, heads and sampled steps, never with the length of a sequence;
- every call that could not be recorded is counted, with the reason.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from attnscore.backends import torch_private as private
from attnscore.base.arguments import check_flag, is_whole, shown
from attnscore.diagnostics.watching import torch_patches
from attnscore.diagnostics.watching.base import WHOLE, Step, Watch, next_name
from attnscore.diagnostics.watching.padding import named_arguments, padding_like
from attnscore.diagnostics.watching.sums import Call, Scores, describe_error, sums_of
from attnscore.diagnostics.watching.torch_calls import output_and_sums, reason_against
from attnscore.errors import ArgumentError, message

# Arguments of models, (batch, token): True (1) at tokens, and True (or -inf) at padding.
_REAL, _IGNORED = "attention_mask", "src_key_padding_mask"
_CROSS_ATTENTION = re.compile(r"cross_?att|\bcross\b", re.IGNORECASE)


class _ThreadState(threading.local):
    """Modules that this thread is in (the innermost last), its step, and an argument that may be a padding mask."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.step: Step | None = None
        self.padding: str | None = None


class TorchWatch(Watch):
    """Records of a PyTorch model that can be started and stopped. See `watch` and `Records`."""

    def __init__(
        self,
        model: nn.Module,
        *arguments: Any,
        softmax: str | Iterable[str] | Mapping[str, int | None] = (),
        one_pass: bool = False,
    ) -> None:
        super().__init__(model, *arguments)
        self._names: dict[int, str] = {}
        self._first = ""  # the module whose calls are the steps
        self._softmax = _softmax_patterns(model, softmax)
        self._one_pass = check_flag("one_pass", one_pass)
        self._thread = _ThreadState()
        self._has_encoder_and_decoder = False

    def _install(self) -> None:
        self._names = {id(module): name or WHOLE for name, module in self._model.named_modules()}
        parts = {part for name in self._names.values() for part in name.split(".")}
        self._has_encoder_and_decoder = {"encoder", "decoder"} <= parts
        torch_patches.start(self)

    def _uninstall(self) -> None:
        torch_patches.stop(self)
        # Steps that threads are in the middle of are dropped.
        self._thread = _ThreadState()

    # ------------------------------------------------------------ called by the wrappers of `torch_patches`

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Note that a module is called; return whether it is watched, so that `leave` must follow."""
        scripted = isinstance(module, torch.jit.ScriptModule)
        # The result of torch.compile(module) holds the module under this name.
        inner = None if scripted else module._modules.get("_orig_mod")
        name = self._names.get(id(module if inner is None else inner))
        if name is None:
            return False
        if scripted or inner is not None or module._compiled_call_impl is not None:
            self._count_unseen(name, "scripted code" if scripted else "compiled code")
            return False
        state = self._thread
        if not state.stack:
            if private.graph_task() != -1:  # checkpointing computes it again
                return False
            with self._lock:
                if begins := not self._first or name in (self._first, WHOLE):
                    self._first = name
                state.step = self._begin_step(begins)
        if state.step is not None and state.step.sampled:
            named = _named_arguments(module, arguments, options)
            real = _real_tokens(named)
            if real is None:
                real = _inherited_mask(state.step, (*arguments, *options.values()))
            state.step.real.pop(name, None)  # of an earlier call
            if real is not None or isinstance(named.get("pixel_values"), Tensor):  # an image's tokens are not padded
                state.step.real[name] = real
            if not state.stack:
                state.padding = padding_like(named)
        state.stack.append(name)
        return True

    def leave(self, out: Any, failed: bool) -> None:
        """Note that the innermost watched module has returned, or has raised; a step that raises is dropped."""
        state = self._thread
        if state.stack:  # none when the watch was stopped in the middle
            name = state.stack.pop()
            if state.step is not None and (mask := state.step.real.get(name)) is not None:
                parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else (out,)
                if isinstance(first := next(iter(parts), None), Tensor):
                    state.step.masked_outputs[id(first)] = weakref.ref(first), mask
        if not state.stack and state.step is not None:
            step, state.step = state.step, None
            if step.sampled and not failed:
                if step.sums and not step.masked_outputs and all(mask is None for mask in step.real.values()):
                    self.unchecked_padding = state.padding
                self._finish(step)

    def is_sampling(self) -> bool:
        """Return whether a call that is made now would be recorded."""
        state = self._thread
        return bool(state.step is not None and state.step.sampled and state.stack)

    def is_pooling(self) -> bool:
        """Return whether a call that is made now would be computed by the watch."""
        return self._one_pass and self.is_sampling()

    def heads_of_softmax(self) -> tuple[bool, int | None]:
        """Return whether a softmax of the innermost module belongs to attention, and its heads where known."""
        name = self._thread.stack[-1]
        return next(((True, heads) for x, heads in self._softmax.items() if fnmatchcase(name, x)), (False, None))

    def record(self, call: Call | Scores) -> Tensor | None:
        """Record an attention call; return its output where this watch computes it."""
        step = self._thread.step
        if step is None:
            return None
        name = self._thread.stack[-1]
        if isinstance(call, Call) and call.within:
            name = call.within if name == WHOLE else f"{name}.{call.within}"
        name = next_name(step.calls, name)
        tensors = (call.scores,) if isinstance(call, Scores) else (call.query, call.key)
        if (why := reason_against(*tensors)) is not None:
            self.skip(why)
            return None
        out = None
        try:
            real = self._real_tokens_of(call, name, step)
            weight = self.thresholds.saturated_weight
            if self._one_pass and isinstance(call, Call) and call.is_recorded is not None:
                out, step.sums[name] = output_and_sums(call, real, weight)
            else:
                step.sums[name] = sums_of(call, real, weight)
        except Exception as error:  # recording must never break the model
            self.skip(describe_error(error))
        return out

    def _real_tokens_of(self, call: Call | Scores, name: str, step: Step) -> Tensor | None:
        """Return (batch, token) of the keys of a call: the innermost mask around it that fits."""
        queries, keys = call.lengths
        in_decoder = self._has_encoder_and_decoder and "decoder" in name
        # Where there are as many keys as queries, they may be tokens of either sequence; where a decoder has one query,
        # they may be the slots of its cache.
        is_ambiguous = queries == keys and (in_decoder or _CROSS_ATTENTION.search(name))
        if is_ambiguous or (in_decoder and queries == 1):
            return None
        first = call.scores if isinstance(call, Scores) else call.key
        masks = (step.real[module] for module in reversed(self._thread.stack) if module in step.real)
        return next((mask for mask in masks if mask is None or mask.shape == (first.shape[0], keys)), None)

    def skip(self, why: str) -> None:
        """Count an attention call that cannot be recorded, with the reason."""
        stack = self._thread.stack
        self._count_unseen(stack[-1] if stack else "(outside)", why)


def _named_arguments(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; positional ones by number, unless one of them may be a padding mask.

    Without nested tensors, whose shape cannot be read.
    """
    if any(isinstance(x, Tensor) and x.ndim == 2 for x in arguments[1:]):
        named = named_arguments(module.forward, (arguments, options))
    else:
        named = options | {f"argument {place}": x for place, x in enumerate(arguments)}
    return {name: x for name, x in named.items() if not getattr(x, "is_nested", False)}


def _inherited_mask(step: Step, arguments: Iterable[Any]) -> Tensor | None:
    """Return the mask of the module whose output is all that a call reads: it has the same tokens."""
    inputs = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
    output, mask = step.masked_outputs.get(id(inputs[0]) if inputs else None, (None, None))
    return mask if output is not None and all(x is output() for x in inputs) else None


def _real_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Return (batch, token) True where there is a token, from the arguments of the model; None without a mask."""
    for name in (_REAL, _IGNORED):
        mask = arguments.get(name)
        # Floats that are named `attention_mask` may be added to scores.
        if isinstance(mask, Tensor) and mask.ndim == 2 and not (name == _REAL and mask.is_floating_point()):
            return mask != 0 if name == _REAL else mask == 0
    return None


def _softmax_patterns(
    model: nn.Module, softmax: str | Iterable[str] | Mapping[str, int | None]
) -> dict[str, int | None]:
    """Return heads by pattern of names; raise ArgumentError unless each pattern is the name of a module."""
    patterns: Any = [softmax] if isinstance(softmax, str) else softmax
    if not isinstance(patterns, Iterable) or not all(isinstance(x, str) for x in patterns):
        raise ArgumentError(message("softmax", "names of modules, or a mapping of names to heads", shown(softmax)))
    heads_of = dict(patterns) if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
    names = [name or WHOLE for name, _ in model.named_modules()]
    for pattern, heads in heads_of.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = "`unseen` of a watch without it lists where a softmax was called"
            raise ArgumentError(message("softmax", "names of modules of the model", repr(pattern), hint=hint))
        if heads is not None and (not is_whole(heads) or heads < 1):
            raise ArgumentError(message(f"softmax[{pattern!r}]", "a whole number of heads above 0", shown(heads)))
    return heads_of
