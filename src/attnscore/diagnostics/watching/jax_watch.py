"""Recording of every attention call of a Flax model, NNX or linen, also inside ``jit`` and the other transformations.

Requirements:
- a step is one call of the model; a call is named by the path of the module that makes it, and its number in the step;
- NNX makes new modules inside of its transformations: a model is known by its class and the paths and classes of its
  modules, and its names come from the modules that are called;
- calls outside of the model, or by a thread that did not start the watch inside of a program, are counted;
- when the last watch stops, every name and method is bound to its original.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax

from attnscore import api
from attnscore.diagnostics.watching import sites, staged
from attnscore.diagnostics.watching.base import WHOLE
from attnscore.diagnostics.watching.jax_values import JaxValues
from attnscore.diagnostics.watching.rebinding import Rebinding
from attnscore.diagnostics.watching.staged import HERE, Root, Site, StagedWatch

VALUES = JaxValues()
_NAMES = Rebinding(lambda: HERE.root is None or HERE.is_recorded)
_METHODS = Rebinding(lambda: False)
_LINEN = contextlib.ExitStack()


class JaxWatch(StagedWatch):
    """Records of a Flax model that can be started and stopped. See `watch` and `Records`."""

    values = VALUES

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        linen = sys.modules.get("flax.linen")
        self.is_linen = linen is not None and isinstance(model, linen.Module)
        self.framework = "linen" if self.is_linen else "nnx"
        self.key = (type(model), ()) if self.is_linen else _key_of(model)

    def _start_observing(self, watches: list[JaxWatch]) -> None:
        if len(watches) == 1:
            _NAMES.bind_functions(_functions(), but=("attnscore.diagnostics.watching.",))
        _observe_modules(watches)

    def _stop_observing(self, watches: list[JaxWatch]) -> None:
        if not watches:
            _NAMES.restore()
        _observe_modules(watches)


def _observe_modules(watches: list[JaxWatch]) -> None:
    """Wrap the methods whose calls these watches need, and no others: of the models' NNX classes, and linen's."""
    _METHODS.restore()
    _LINEN.close()
    classes = {kind for watch in watches if not watch.is_linen for _, kind in watch.key[1]}  # type: ignore[index]
    owners = {next((c for c in kind.__mro__ if "__call__" in vars(c)), None) for kind in classes}
    _METHODS.bind_methods([(owner, "__call__", _nnx_call) for owner in owners if owner is not None])
    if any(watch.is_linen for watch in watches):
        _LINEN.enter_context(sys.modules["flax.linen"].intercept_methods(_linen_call))


def _key_of(model: Any) -> Hashable:
    """Return a key that an NNX model shares with the copies that transformations make of it."""
    return (type(model), tuple((path, type(module)) for path, module in _modules(model)))


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path of each module of an NNX model, and the module."""
    nnx = sys.modules["flax.nnx"]
    for path, module in nnx.iter_modules(model):
        yield ".".join(map(str, path)) or WHOLE, module


# ------------------------------------------------------------------ calls of modules


def _nnx_call(original: Any, module: Any, /, *arguments: Any, **options: Any) -> Any:
    """Call an NNX module: inside of a watched model under its name, else as a step of its watches."""
    if HERE.root is not None:
        with staged.here(name=_name_of(HERE.root, module) or HERE.name):
            return original(module, *arguments, **options)
    key = _key_of(module)
    if not staged.watches_of(key):
        return original(module, *arguments, **options)
    modules = dict(_modules(module))
    root = Root(key, names={id(part): name for name, part in modules.items()}, modules=modules)
    return _call_model(root, functools.partial(original, module), arguments, options)


def _name_of(root: Root, module: Any) -> str | None:
    """Return the name of a module; a copy by a transformation inside of the model has the original's name.

    Copies belong to modules of the same structure, in the order of the model.
    """
    if (name := root.names.get(id(module))) is None:
        key = _key_of(module)
        same = [name for name, part in root.modules.items() if type(part) is type(module) and _key_of(part) == key]
        name = next((name for name in same if name not in root.entered), same[-1] if same else None)
        if name is not None:
            for path, part in _modules(module):
                inner = name if path == WHOLE else f"{name}.{path}"
                root.names[id(part)] = inner
                root.copies.append(part)
    if name is not None:
        root.entered.add(name)
    return name


def _linen_call(original: Any, arguments: Any, options: Any, context: Any) -> Any:
    """Call a method of a linen module: inside of a watched model under its path, else as a step of its watches."""
    module = context.module
    if HERE.root is not None:
        name = ".".join(map(str, module.path)) if context.method_name != "setup" else ""
        with staged.here(name=name or HERE.name):
            return original(*arguments, **options)
    key = (type(module), ())
    is_call = context.method_name != "setup" and not module.path and not module.is_initializing()
    if not is_call or not staged.watches_of(key):
        return original(*arguments, **options)
    return _call_model(Root(key), original, arguments, options)


def _call_model(root: Root, function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Call a model as a step of its watches."""
    inputs = arguments, dict(options)
    real = staged.real_tokens(root.key, function, inputs)
    return staged.call_model(VALUES, root, function, inputs, jax.tree.leaves(inputs), real)


# ------------------------------------------------------------------ calls of attention functions


def _functions() -> list[tuple[Any, Callable[..., Any]]]:
    """Return the functions that are wrapped, and their wrappers."""
    makers: list[tuple[Any, Callable[..., Site]]]
    makers = [(jax.nn.dot_product_attention, _jax_attention), (api.attend, sites.attended)]
    for name in ("flax.nnx.nn.attention", "flax.linen.attention"):  # `flax.nnx` does not export the first one
        function = getattr(sys.modules.get(name), "dot_product_attention_weights", None)
        if function is not None:
            makers.append((function, functools.partial(_flax_weights, inspect.signature(function))))
    return [(function, functools.partial(staged.record, VALUES, make_site)) for function, make_site in makers]


def _jax_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: Any = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: Any = None, **_: Any,
) -> Site:  # fmt: skip
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    arrays = {"bias": bias, "mask": mask, "query_lens": query_seq_lengths, "key_lens": key_value_seq_lengths}
    return sites.dot_product(query, key, value, **arrays, scale=scale, is_causal=is_causal, window=window)


def _flax_weights(signature: inspect.Signature, *arguments: Any, **options: Any) -> Site:
    named = signature.bind(*arguments, **options).arguments
    masking = {name: named[name] for name in ("bias", "mask", "is_causal") if name in named}
    return sites.dot_product(named["query"], named["key"], _value_in_flax(), **masking)


def _value_in_flax() -> Any:
    """Return the values of the function of Flax that asks for weights and passes no values; None of another caller."""
    frame = sys._getframe()
    while frame.f_back is not None and not frame.f_globals.get("__name__", "").startswith("flax."):
        frame = frame.f_back
    return frame.f_locals.get("value") if frame.f_code.co_name == "dot_product_attention" else None
