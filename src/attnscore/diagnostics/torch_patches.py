"""Functions through which PyTorch models attend, wrapped while something watches, and put back.

What this module meets:
- the model's own function runs, on its own arguments, and its result is what the model gets;
- a function mode or a module's hook would knock ``nn.TransformerEncoder`` off its fused path and change its output:
  names are replaced, where they are bound in modules, and nothing else;
- several may watch at once; with the last of them every name is again what it was;
- inside ``torch.compile`` and while looking itself, the wrappers are not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

import attnscore as ats
from attnscore import api
from attnscore.diagnostics.torch_calls import Call, Scores, bias_of, described, projected, sdpa_call


class Watcher(Protocol):
    """Who is told."""

    def enter(self, module: nn.Module, arguments: dict[str, Any]) -> bool:
        """A module is called; True: it is one of the watched, and `leave` is wanted."""

    def leave(self) -> None:
        """That module is done."""

    def wants(self) -> bool:
        """Whether a call that comes now would be looked at."""

    def saw(self, call: Call | Scores) -> None:
        """An attention call."""

    def missed(self, why: str) -> None:
        """An attention call that cannot be looked at."""


@dataclass
class _Scope:
    """Inside a function that attends in a way of its own: the first softmax is its attention."""

    heads: int | None = None
    seen: bool = False


class _Here(threading.local):
    """What this thread is doing."""

    def __init__(self) -> None:
        self.looking = False
        self.scopes: list[_Scope] = []


_HERE = _Here()
_TORCH_SOFTMAX = torch.softmax
_DEVICES = ("cpu", "cuda", "xpu")  # not every release knows more
_BY_HAND = "a softmax of its own, which may be that of an attention"
_LOCK = threading.RLock()
_WATCHERS: list[Watcher] = []
_UNDO: list[Callable[[], None]] = []


def start(watcher: Watcher) -> None:
    """Tell `watcher` from now on."""
    with _LOCK:
        if not _WATCHERS:
            _install()
        _WATCHERS.append(watcher)


def stop(watcher: Watcher) -> None:
    """Tell `watcher` no more; with the last one every name is put back."""
    with _LOCK:
        if watcher in _WATCHERS:
            _WATCHERS.remove(watcher)
            if not _WATCHERS:
                _restore()


def _install() -> None:
    try:
        _bind_everywhere(functional.scaled_dot_product_attention, _sdpa)
        _bind_everywhere(functional.multi_head_attention_forward, _multi_head)
        _bind_everywhere(torch._transformer_encoder_layer_fwd, _encoder_layer)
        _bind_everywhere(torch._native_multi_head_attention, _native_multi_head)
        _bind_everywhere(functional.softmax, _softmax)
        _bind_everywhere(torch.softmax, _softmax)
        _replace(torch.Tensor, "softmax", _wrapped(torch.Tensor.softmax, _softmax))
        _bind_everywhere(api.attend, _attend)
        _replace(nn.Module, "__call__", _module_call(nn.Module.__call__))
        interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
        if interface is not None and "get_interface" in vars(interface):  # since transformers 5
            _replace(interface, "get_interface", _get_interface(interface.get_interface))
    except BaseException:
        _restore()
        raise


def _restore() -> None:
    while _UNDO:
        _UNDO.pop()()


def _replace(owner: Any, name: str, new: Any) -> None:
    if name in vars(owner):
        old = vars(owner)[name]
        _UNDO.append(lambda: setattr(owner, name, old))
    else:  # inherited
        _UNDO.append(lambda: delattr(owner, name))
    setattr(owner, name, new)


def _wrapped(original: Any, wrapper: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def called(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    return called


def _bind_everywhere(original: Any, wrapper: Callable[..., Any]) -> None:
    """Replace `original` under every name that a loaded module has for it (also ``from ... import``)."""
    new = _wrapped(original, wrapper)
    for module in list(sys.modules.values()):
        # Private modules of torch hold tables by function; ours must find the original.
        name = getattr(module, "__name__", "") if isinstance(module, type(sys)) else ""
        if not name or name.startswith(("torch._", "attnscore.diagnostics.torch_")):
            continue
        for bound, value in list(vars(module).items()):
            if value is original:
                _replace(module, bound, new)


def _silent() -> bool:
    """Whether wrappers should do nothing but call: while we look ourselves, and while code is traced or compiled."""
    # In this order: what is compiled reads the first word and nothing of ours.
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or _HERE.looking


def _tell(made: Callable[[], Call | Scores | str]) -> None:
    """Make the call once, if anyone wants it; a word instead of a call says why there is none."""
    for scope in _HERE.scopes:
        scope.seen = True
    wanting = [watcher for watcher in _WATCHERS if watcher.wants()]
    if not wanting:
        return
    with _looking():
        # Whatever goes wrong in looking is told, and does not reach the model.
        try:
            call = made()
        except Exception as error:
            call = described(error)
        for watcher in wanting:
            if isinstance(call, str):
                watcher.missed(call)
            else:
                watcher.saw(call)


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    _HERE.looking = True
    try:
        with contextlib.ExitStack() as own:
            own.enter_context(torch.no_grad())
            # Autocast would compute our own products in half precision as well.
            for device in filter(torch.is_autocast_enabled, _DEVICES):
                own.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        _HERE.looking = False


@contextlib.contextmanager
def _scope(heads: int | None, missed: str) -> Iterator[None]:
    """What is called in here attends, through a function that we see or through a softmax; else it was missed."""
    scope = _Scope(heads)
    _HERE.scopes.append(scope)
    try:
        yield
    finally:
        _HERE.scopes.pop()
        if not scope.seen and not any(outer.seen for outer in _HERE.scopes):
            _tell(lambda: missed)


# ---------------------------------------------------------------- the wrappers, each around its original


def _module_call(original: Any) -> Any:
    @functools.wraps(original)
    def called(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if _silent():
            return original(module, *arguments, **options)
        entered = [watcher for watcher in _WATCHERS if watcher.enter(module, options)]
        try:
            return original(module, *arguments, **options)
        finally:
            _leave(entered)

    return called


def _leave(entered: list[Watcher]) -> None:
    """Tell all, the last one first, also when one of them raises, as a caller's own function of a step may."""
    if entered:
        try:
            entered.pop().leave()
        finally:
            _leave(entered)


def _as_it_was(home: Any, original: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function; under its own name where subclasses of tensors, or modes, may ask which function that is."""
    # What torch.fx traces with is no tensor, and asks as well.
    given = (*arguments, *options.values())
    if torch.compiler.is_compiling() or not torch.overrides.has_torch_function(given):
        return original(*arguments, **options)
    with _LOCK:
        wrapped = vars(home)[original.__name__]
        setattr(home, original.__name__, original)
        try:
            return original(*arguments, **options)
        finally:
            setattr(home, original.__name__, wrapped)


def _sdpa(original: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
    if not _silent():
        names = ("attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, more, strict=False)) | options
        heads = _HERE.scopes[-1].heads if _HERE.scopes else None
        _tell(lambda: dataclasses.replace(sdpa_call(query, key, given), heads=heads))
    return _as_it_was(functional, original, (query, key, value, *more), options)


def _attend(original: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
    if not _silent() and isinstance(query, Tensor):
        kept = ("score", "mask", "valid_lens", "bias", "sink", "head_axis")
        _tell(lambda: Call(query, key, {name: options[name] for name in kept if name in options}))
    return original(query, key, value, **options)


def _multi_head(original: Any, *arguments: Any, **options: Any) -> Any:
    if _silent():
        return original(*arguments, **options)
    heads = options["num_heads"] if "num_heads" in options else arguments[4]
    with _scope(heads, "multi_head_attention_forward without a softmax that could be seen"):
        return _as_it_was(functional, original, arguments, options)


def _softmax(original: Any, *arguments: Any, **options: Any) -> Any:
    scopes = _HERE.scopes
    scores = arguments[0] if arguments else options.get("input")
    home = functional if isinstance(original, FunctionType) else torch if original is _TORCH_SOFTMAX else Tensor
    if isinstance(scores, Tensor) and scores.ndim >= 3 and not (scopes and scopes[-1].seen) and not _silent():
        if not scopes:
            _tell(lambda: _BY_HAND)
            # The one of `functional` calls a tensor's own.
            return _without_softmax(_as_it_was, home, original, arguments, options)
        heads = scopes[-1].heads
        if heads is not None and scores.ndim == 3:  # (batch * head, query, key)
            scores = scores.reshape(-1, heads, *scores.shape[1:])
        found = scores
        _tell(lambda: Scores(found))
    return _as_it_was(home, original, arguments, options)


def _encoder_layer(original: Any, *arguments: Any, **options: Any) -> Any:
    if not _silent():
        src, dim, heads, weight, bias = arguments[:5]
        norm_first, eps, norm_weight, norm_bias = arguments[8:12]
        mask, kind = (*arguments[18:], None, None)[:2]

        def made() -> Call:
            x = functional.layer_norm(src, (dim,), norm_weight, norm_bias, eps) if norm_first else src
            return dataclasses.replace(projected(x, x, dim, heads, weight, bias, mask, kind), within="self_attn")

        _tell(made)
    return original(*arguments, **options)


def _native_multi_head(original: Any, *arguments: Any, **options: Any) -> Any:
    if not _silent():
        query, key, _, dim, heads, weight, bias = arguments[:7]
        mask = arguments[9] if len(arguments) > 9 else options.get("mask")
        kind = arguments[12] if len(arguments) > 12 else options.get("mask_type")
        _tell(lambda: projected(query, key, dim, heads, weight, bias, mask, kind))
    return original(*arguments, **options)


def _get_interface(original: Any) -> Any:
    """Transformers' choice of an attention function, eager included: what it gives is called inside a scope."""

    @functools.wraps(original)
    def chosen(self: Any, implementation: Any, default: Any) -> Any:
        function = original(self, implementation, default)

        @functools.wraps(function)
        def attention(module: Any, query: Tensor, key: Tensor, *more: Any, **options: Any) -> Any:
            if _silent():
                return function(module, query, key, *more, **options)
            sinks = getattr(module, "sinks", None)
            if function is default and isinstance(sinks, Tensor):
                # Eager sinks are one more column of scores, shifted by each row's maximum: the logits are lost there.
                mask = more[1] if len(more) > 1 else options.get("attention_mask")
                extra = {"sink": sinks.detach(), "score": ats.ScaledDot(options.get("scaling"))}
                _tell(lambda: Call(query, key, extra | (bias_of(mask) if isinstance(mask, Tensor) else {})))
                return _without_softmax(function, module, query, key, *more, **options)
            with _scope(query.shape[1], f"attention implementation {implementation!r}: no function that could be seen"):
                return function(module, query, key, *more, **options)

        return attention

    return chosen


def _without_softmax(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function whose attention has been seen."""
    _HERE.scopes.append(_Scope(seen=True))
    try:
        return function(*arguments, **options)
    finally:
        _HERE.scopes.pop()
