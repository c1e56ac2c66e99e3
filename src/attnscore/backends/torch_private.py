"""Private names of PyTorch, and replacements for names that a release does not have.

- No other file of the package reads a private name of a PyTorch module.
- A replacement is slower, never wrong: it assumes that a transform, a mode or a hook is active.
- `FALLBACKS` says what each replacement costs; ``attnscore.available()`` and ``attnscore info`` show it.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from attnscore.backends.base import private_name

FALLBACKS: dict[str, str] = {}
_resolve = partial(private_name, FALLBACKS)
_NO_PLANS = "calls have no plans"
_UNPLANNED = f"{_NO_PLANS}, torch.compile breaks its graph at each, and torch.jit.trace refuses them"


def _has_no_storage(x: torch.Tensor) -> bool:
    """Whether a transform wraps a tensor: it then has no memory."""
    try:
        x.untyped_storage()
    except RuntimeError:
        return True
    return False


# ---------------------------------------------------------------- torch.func and forward mode

are_transforms_active: Callable[[], bool] = _resolve(
    "torch._C._are_functorch_transforms_active", lambda: True, _UNPLANNED
)
is_wrapped: Callable[[torch.Tensor], bool] = _resolve(
    "torch._C._functorch.is_functorch_wrapped_tensor", _has_no_storage, "a slower test of each tensor"
)
is_legacy_batched: Callable[[torch.Tensor], bool] = _resolve(
    "torch._C._functorch.is_legacy_batchedtensor", _has_no_storage, "a slower test of each tensor"
)
# None: the host cannot read values inside a transform.
outside_transforms: Callable[[], contextlib.AbstractContextManager[Any]] | None = _resolve(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", None, "masks are not read inside torch.func"
)
# Its `_current_level` is -1 outside of forward mode.
dual_levels: Any = forward_ad
if _resolve("torch.autograd.forward_ad._current_level", None, _UNPLANNED) is None:
    dual_levels = SimpleNamespace(_current_level=0)

# ---------------------------------------------------------------- modes

count_function_modes: Callable[[], int] = _resolve("torch._C._len_torch_function_stack", lambda: 1, _NO_PLANS)
count_dispatch_modes: Callable[[], int] = _resolve("torch._C._len_torch_dispatch_stack", lambda: 1, _NO_PLANS)
is_any_autocast: Callable[[], bool] = _resolve("torch._C._is_any_autocast_enabled", lambda: True, _NO_PLANS)
_without_modes: Callable[[], contextlib.AbstractContextManager[Any]] | None = _resolve(
    "torch.utils._python_dispatch._disable_current_modes", None, _NO_PLANS
)
_keys: Callable[[torch.Tensor], Any] | None = _resolve("torch._C._dispatch_keys", None, _NO_PLANS)
if _resolve("torch._C.DispatchKeySet.raw_repr", None, _NO_PLANS) is None:
    _keys = None


def _plain_keys() -> frozenset[int]:
    """Return the dispatch keys of plain CPU tensors, with and without autograd; none where the release hides them."""
    if _keys is None or _without_modes is None:
        return frozenset()
    with _without_modes(), torch.inference_mode():
        inference = torch.empty(0, device="cpu")
        with torch.inference_mode(False):
            return frozenset(_keys(x).raw_repr() for x in (torch.empty(0, device="cpu"), inference))


_PLAIN_KEYS = _plain_keys()


def has_plain_keys(x: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU, not negated, conjugated, wrapped, fake, sparse or nested; False if unknown."""
    return bool(_PLAIN_KEYS) and _keys(x).raw_repr() in _PLAIN_KEYS  # type: ignore[misc]  # there are none without it


# ---------------------------------------------------------------- torch.jit.trace, torch.export

tracing_state: Callable[[], Any] = _resolve(
    "torch._C._get_tracing_state",
    lambda: torch.jit.is_tracing() or None,  # type: ignore[attr-defined, no-untyped-call]  # torch's own
    "a slower test at each call",
)
_set_tracing_state: Callable[[Any], None] = _resolve(
    "torch._C._set_tracing_state", lambda state: None, "torch.jit.trace warns that sizes are constants"
)
proxy_mode: Callable[[], Any] = _resolve(
    "torch.fx.experimental.proxy_tensor.get_proxy_mode", lambda: None, "make_fx records results as constants"
)
register_namedtuple: Callable[..., None] = _resolve(
    "torch.utils._pytree._register_namedtuple", lambda *_, **__: None, "programs that return statistics are not saved"
)


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Hide operations from `torch.jit.trace`."""
    state = tracing_state()
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


# ---------------------------------------------------------------- modules

has_any_global_hook: Callable[[], bool] = _resolve(
    "torch.nn.modules.module._has_any_global_hook", lambda: True, "layers call their projections as modules"
)

# ---------------------------------------------------------------- diagnostics.watch

_FUSED = ("torch._transformer_encoder_layer_fwd", "torch._native_multi_head_attention")
_SCHEMAS = (
    "torch.ops.aten._transformer_encoder_layer_fwd.default._schema",
    "torch.ops.aten._native_multi_head_attention.default._schema",
)
_fused = [_resolve(path, None, "watch turns the fused encoder off") for path in (*_FUSED, *_SCHEMAS)]
_HAS_FUSED = all(x is not None for x in _fused)


def fused_encoder() -> list[tuple[Any, list[str]]] | None:
    """Return the functions of a fused encoder layer as bound now, with their arguments' names; None without them."""
    if not _HAS_FUSED:
        return None
    functions, schemas = ([pkgutil.resolve_name(path) for path in paths] for paths in (_FUSED, _SCHEMAS))
    return [(function, [x.name for x in schema.arguments]) for function, schema in zip(functions, schemas, strict=True)]


graph_task: Callable[[], int] = _resolve(
    "torch._C._current_graph_task_id", lambda: -1, "watch records a checkpointed pass each time it is computed"
)
saved_tensor_hooks: Callable[[bool], Any] = _resolve(
    "torch._C._autograd._top_saved_tensors_default_hooks", lambda _: True, "watch computes attention twice"
)
