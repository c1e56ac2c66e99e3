"""Wrappers around the attention functions of PyTorch, installed while a `Watch` is running.

Requirements:
- the model's own function runs on its own arguments, and the model gets its result, unless a watch wants one pass;
- a function mode or a module's hook would take ``nn.TransformerEncoder`` off its fused path and change its output, and
  modes belong to one thread: names are replaced where they are bound in modules (`rebinding`), and nothing else;
- several watches may run at once; when the last one stops, all names are restored;
- inside ``torch.compile`` and while statistics are computed, wrappers only call their originals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attnscore as ats
from attnscore import api
from attnscore.backends import torch_private as private
from attnscore.diagnostics.watching.rebinding import Rebinding, is_active
from attnscore.diagnostics.watching.sums import Call, NotRecorded, Scores, deciding_options, describe_error
from attnscore.diagnostics.watching.torch_calls import bias_of, can_pool, projected, sdpa_call, with_head_axis

if TYPE_CHECKING:
    from attnscore.diagnostics.watching.torch_watch import TorchWatch


@dataclass
class _Scope:
    """Call of the model's attention: all attention functions inside of it count, or else the first softmax."""

    heads: int | None = None
    """Number of query heads, where known."""
    recorded: bool = False


@dataclass
class _Unwrapped:
    """Wrapper whose name is bound to its original while there are calls that compare the two."""

    wrapper: Any
    calls: int = 0


class _ThreadState(threading.local):
    """Scopes that this thread is in, and whether it is computing statistics."""

    def __init__(self) -> None:
        self.is_recording = False
        self.scopes: list[_Scope] = []


_THREAD = _ThreadState()
_DEVICES = ("cpu", "cuda", "xpu")  # not every release knows more
_BY_HAND = "a softmax of its own, which may be that of an attention: watch(model, softmax=[name]) records it"
_LOCK = threading.RLock()
_WATCHERS: list[TorchWatch] = []
_UNWRAPPED: dict[tuple[Any, str], _Unwrapped] = {}
# Options of PyTorch to set back.
_UNDO = contextlib.ExitStack()


def start(watcher: TorchWatch) -> None:
    """Report attention calls to `watcher` from now on."""
    with _LOCK:
        if not _WATCHERS:
            _install()
        _WATCHERS.append(watcher)


def stop(watcher: TorchWatch) -> None:
    """Report no more calls to `watcher`; after the last one, bind names of wrappers to the originals."""
    with _LOCK:
        if watcher in _WATCHERS:
            _WATCHERS.remove(watcher)
            if not _WATCHERS:
                _restore()


def _install() -> None:
    _restore()  # another library may have bound a name to one of our wrappers after the last watch
    torch.overrides.get_overridable_functions()  # cached tables of functions: filled later, they would hold wrappers
    try:
        functions: list[tuple[Any, Callable[..., Any]]] = [
            (functional.scaled_dot_product_attention, _sdpa),
            (functional.multi_head_attention_forward, _multi_head),
            (functional.softmax, functools.partial(_softmax, functional)),
            (torch.softmax, functools.partial(_softmax, torch)),
            (api.attend, _attend),
        ]
        if (fused := private.fused_encoder()) is None:  # modules then take the path of functions that are wrapped
            mha = torch.backends.mha
            _UNDO.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        else:
            for (function, names), make_call in zip(fused, (_encoder_layer_call, _native_multi_head_call), strict=True):
                functions.append((function, functools.partial(_fused, names, make_call)))
        # Tables in torch's private modules are keyed by the originals, and our own modules need the originals too.
        _NAMES.bind_functions(functions, but=("torch._", "attnscore.diagnostics.watching."))
        _NAMES.bind_methods([(Tensor, "softmax", functools.partial(_softmax, Tensor))])
        _NAMES.bind_methods([(nn.Module, "__call__", _module_call)])
        interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
        if interface is not None and "get_interface" in vars(interface):  # since transformers 5
            _NAMES.bind_methods([(interface, "get_interface", _get_interface)])
    except BaseException:
        _restore()
        raise


def _restore() -> None:
    """Bind every name of a wrapper to its original, and let all wrappers only call their originals."""
    _UNDO.close()
    _NAMES.restore()


def _is_bypassed() -> bool:
    """Return whether wrappers only call their originals: in traced or compiled code, and while we record."""
    # In this order: compiled code evaluates the first term and reads nothing of ours.
    return torch.compiler.is_compiling() or private.tracing_state() is not None or _THREAD.is_recording


_NAMES = Rebinding(_is_bypassed)


def _report(make_call: Callable[[], Call | Scores | str], watchers: Sequence[TorchWatch] = _WATCHERS) -> Tensor | None:
    """Record the call that `make_call` makes, in each watch that is sampling; a text is why it cannot be recorded.

    Return the output of the call where a watch has computed it.
    """
    for scope in _THREAD.scopes:
        scope.recorded = True
    sampling = [watcher for watcher in watchers if watcher.is_sampling()]
    if not sampling:
        return None
    out = None
    with _recording():
        # An error of ours is counted and does not reach the model.
        try:
            call = make_call()
        except Exception as error:
            call = describe_error(error)
        for watcher in sampling:
            if isinstance(call, str):
                watcher.skip(call)
            elif (output := watcher.record(call)) is not None:
                out = output
    return out


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Compute statistics inside: no wrapper reports, autograd and autocast are off."""
    _THREAD.is_recording = True
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            # Autocast would compute our own products in half precision as well.
            for device in filter(torch.is_autocast_enabled, _DEVICES):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        _THREAD.is_recording = False


@contextlib.contextmanager
def _scope(heads: int | None, reason: str, *, recorded: bool = False) -> Iterator[None]:
    """Report `reason` unless attention is found inside, through a wrapped function or a softmax.

    In a call that has been `recorded` before, the softmax is ignored.
    """
    scope = _Scope(heads, recorded)
    _THREAD.scopes.append(scope)
    try:
        yield
    finally:
        _THREAD.scopes.pop()
        if not scope.recorded and not any(outer.recorded for outer in _THREAD.scopes):
            _report(lambda: reason)


# ---------------------------------------------------------------- wrappers, each called with its original first


def _module_call(original: Any, module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
    """Call a module; each watch of it, or of a model that contains it, notes when it begins and ends."""
    entered = [watcher for watcher in _WATCHERS if watcher.enter(module, arguments, options)]
    try:
        out = original(module, *arguments, **options)
    except BaseException:
        _leave(entered, None, failed=True)
        raise
    _leave(entered, out)
    return out


def _leave(entered: list[TorchWatch], out: Any, failed: bool = False) -> None:
    """Leave all, the last one first, also when one of them raises, as a caller's `on_step` may."""
    if entered:
        try:
            entered.pop().leave(out, failed)
        finally:
            _leave(entered, out, failed)


def _call_original(home: Any, original: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function, bound to its own name where subclasses of tensors, or modes, compare it with that name."""
    # The proxies of torch.fx are not tensors, and compare as well.
    if not torch.overrides.has_torch_function((*arguments, *options.values())):
        return original(*arguments, **options)
    with _unwrapped(home, original):
        return original(*arguments, **options)


@contextlib.contextmanager
def _unwrapped(home: Any, original: Any) -> Iterator[None]:
    """Bind the name of a function to the function itself until the last of the calls in here has ended.

    No lock is held meanwhile: a subclass of tensors or a mode may wait for attention of another thread, as ranks do
    that are threads.
    """
    name = getattr(original, "__name__", "")
    with _LOCK:
        bound = vars(home).get(name)
        if is_active(bound, original):  # otherwise a call is in here already, or another library's function is bound
            _UNWRAPPED[home, name] = _Unwrapped(bound)
            setattr(home, name, original)
        unwrapped = _UNWRAPPED.get((home, name), _Unwrapped(None))
        unwrapped.calls += 1
    try:
        yield
    finally:
        with _LOCK:
            unwrapped.calls -= 1
            is_last = not unwrapped.calls and vars(home).get(name) is original
            if is_last and is_active(unwrapped.wrapper, original):
                setattr(home, name, unwrapped.wrapper)
            if not unwrapped.calls and _UNWRAPPED.get((home, name)) is unwrapped:
                del _UNWRAPPED[home, name]


def _sdpa(original: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
    names = ("attn_mask", "dropout_p", "is_causal")
    arguments = dict(zip(names, more, strict=False)) | options
    heads = _THREAD.scopes[-1].heads if _THREAD.scopes else None
    pools = any(x.is_pooling() for x in _WATCHERS) and can_pool(query, key, value, arguments)
    is_recorded = torch.is_grad_enabled() if pools else None
    out = _report(
        lambda: dataclasses.replace(sdpa_call(query, key, arguments), heads=heads, is_recorded=is_recorded, value=value)
    )
    if out is not None:
        return out
    return _call_original(functional, original, (query, key, value, *more), options)


def _attend(original: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
    if isinstance(query, Tensor):
        _report(lambda: Call(query, *deciding_options(key, options), value if isinstance(value, Tensor) else None))
    return original(query, key, value, **options)


def _multi_head(original: Any, *arguments: Any, **options: Any) -> Any:
    heads = options["num_heads"] if "num_heads" in options else arguments[4]
    with _scope(heads, "multi_head_attention_forward without a softmax that could be recorded"):
        if any(watcher.is_sampling() for watcher in _WATCHERS):
            # A call that returns weights shows its scores alone, to the softmax. One more call, without weights,
            # reports queries, keys and values; where it fails, the softmax still reports the scores.
            with contextlib.suppress(Exception), torch.no_grad():
                named = inspect.signature(original).bind(*arguments, **options).arguments
                if named.get("need_weights", True):
                    _call_original(functional, original, (), named | {"need_weights": False, "training": False})
        return _call_original(functional, original, arguments, options)


def _softmax(home: Any, original: Any, *arguments: Any, **options: Any) -> Any:
    """Report the scores of a softmax: the first in a scope; outside of scopes each, where only named modules attend."""
    scopes = _THREAD.scopes
    scores = arguments[0] if arguments else options.get("input")
    if isinstance(scores, Tensor) and scores.ndim >= 3 and not (scopes and scopes[-1].recorded):
        if not scopes:
            axis = options.get("dim", arguments[1] if len(arguments) > 1 else None)
            for watcher in list(_WATCHERS):
                _report(functools.partial(_by_hand, watcher, scores, axis), [watcher])
            # F.softmax calls a tensor's own softmax, which must not be counted again.
            with _scope(None, "", recorded=True):
                return _call_original(home, original, arguments, options)
        head_scores = with_head_axis(scores, scopes[-1].heads)
        _report(lambda: Scores(head_scores))
    return _call_original(home, original, arguments, options)


def _by_hand(watcher: TorchWatch, scores: Tensor, axis: int | None) -> Scores:
    """Return the scores of a softmax in a module that the caller has named as one that attends."""
    is_named, heads = watcher.heads_of_softmax()
    if not is_named:
        raise NotRecorded(_BY_HAND)
    if axis not in (-1, scores.ndim - 1):
        raise NotRecorded(f"a softmax over axis {axis} of {scores.ndim}, not over the last")
    return Scores(with_head_axis(scores, heads))


def _fused(
    names: Sequence[str], make_call: Callable[[dict[str, Any]], Call], original: Any, *arguments: Any, **options: Any
) -> Any:
    """Report the attention of a fused function, which `make_call` makes of its arguments by name."""
    _report(lambda: make_call(dict(zip(names, arguments, strict=False)) | options))
    return original(*arguments, **options)


def _encoder_layer_call(named: dict[str, Any]) -> Call:
    """Return the attention of a fused encoder layer, whose inputs are normalised first under `norm_first`."""
    x = named["src"]
    if named["norm_first"]:
        norm = named["norm_weight_1"], named["norm_bias_1"], named["eps"]
        x = functional.layer_norm(x, (named["embed_dim"],), *norm)
    return dataclasses.replace(projected((x, x, x), named["num_heads"], named), within="self_attn")


def _native_multi_head_call(named: dict[str, Any]) -> Call:
    return projected((named["query"], named["key"], named["value"]), named["num_head"], named)


def _get_interface(original: Any, interface: Any, implementation: Any, default: Any) -> Any:
    """Choose an attention function as transformers does, eager included, wrapped so that its call is a scope."""
    function = original(interface, implementation, default)

    @functools.wraps(function)
    def attention(module: Any, query: Tensor, key: Tensor, *more: Any, **options: Any) -> Any:
        if _is_bypassed():
            return function(module, query, key, *more, **options)
        sinks = getattr(module, "sinks", None)
        if function is default and isinstance(sinks, Tensor):
            # Eager sinks are one more column of the scores, less each query's maximum: the logits are lost there.
            mask = more[1] if len(more) > 1 else options.get("attention_mask")
            extra = {"sink": sinks.detach(), "score": ats.ScaledDot(options.get("scaling"))}
            _report(lambda: Call(query, key, extra | (bias_of(mask) if isinstance(mask, Tensor) else {})))
            scope = _scope(None, "", recorded=True)
        else:
            reason = f"attention implementation {implementation!r}: no function that could be recorded"
            scope = _scope(query.shape[1], reason)
        with scope:
            return function(module, query, key, *more, **options)

    return attention
