"""Recording of every attention call of a Keras model, on its TensorFlow, JAX, PyTorch and NumPy backends.

Requirements:
- a step is one call of the model: a batch of ``fit``, ``evaluate`` and ``predict``, or a call in Python;
- a call is named by the layers that it is made in, as "encoder.attention", and its number in the step;
- the functions that ``fit`` and the others compile are made anew when a watch starts and stops. XLA calls nothing
  outside on TensorFlow, and ``torch.compile`` sees no wrappers: during a watch, ``jit_compile`` is off there;
- when the last watch stops, every name and method is bound to its original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from attnscore import api
from attnscore.diagnostics.watching import keras_private as private
from attnscore.diagnostics.watching import sites, staged
from attnscore.diagnostics.watching.base import WHOLE
from attnscore.diagnostics.watching.rebinding import Rebinding
from attnscore.diagnostics.watching.staged import HERE, Root, Site, StagedWatch, Values
from attnscore.diagnostics.watching.sums import NotRecorded

_BACKEND = keras.backend.backend()
_NAMES = Rebinding(lambda: HERE.root is None or HERE.is_recorded)
_CALLS = Rebinding(private.in_symbolic_scope)
_FUNCTIONS = ("train_function", "test_function", "predict_function")


class _EagerValues(Values):
    """Arrays of backends that compute at once."""

    def is_abstract(self, x: Any) -> bool:
        """Return whether an array has no values, as on PyTorch's device "meta"."""
        return bool(getattr(x, "is_meta", False))

    def numpy(self, x: Any) -> Any:
        return keras.ops.convert_to_numpy(x)


def _values() -> Values:
    """Return how arrays of Keras's backend come to the host."""
    if _BACKEND == "jax":
        from attnscore.diagnostics.watching.jax_values import JaxValues

        return JaxValues()
    if _BACKEND == "tensorflow":
        from attnscore.diagnostics.watching.tensorflow_values import TensorflowValues

        return TensorflowValues()
    return _EagerValues()


VALUES = _values()


class KerasWatch(StagedWatch):
    """Records of a Keras model that can be started and stopped. See `watch` and `Records`."""

    framework = "keras"
    values = VALUES

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self.key = ("keras", id(model))
        self._jit_compile: Any = None

    def _start_observing(self, watches: list[KerasWatch]) -> None:
        methods, others = private.attention_methods()
        if len(watches) == 1:
            layer = keras.layers.Layer
            wrappers = {make.__name__: _recording(make) for make in (_compute_attention, _apply_scores)}
            _CALLS.bind_methods([(layer, "__call__", _layer_call), (layer, "stateless_call", _stateless_call)])
            _NAMES.bind_methods([(owner, name, wrappers[name]) for owner, name in methods])
            dot_product = keras.ops.dot_product_attention, _recording(_dot_product)
            attend = api.attend, _recording(sites.attended)
            _NAMES.bind_functions([dot_product, attend], but=("attnscore.diagnostics.watching.",))
        for owner in others:
            self._count_unseen(WHOLE, f"layers {owner.__name__}: this release of Keras computes them elsewhere")
        if _BACKEND in ("tensorflow", "torch") and getattr(self._model, "jit_compile", False):
            self._jit_compile, self._model.jit_compile = self._model.jit_compile, False
        self._make_functions_anew()

    def _stop_observing(self, watches: list[KerasWatch]) -> None:
        if not watches:
            _CALLS.restore()
            _NAMES.restore()
        if self._jit_compile is not None:
            self._model.jit_compile, self._jit_compile = self._jit_compile, None
        self._make_functions_anew()

    def _make_functions_anew(self) -> None:
        """Forget the functions that ``fit``, ``evaluate`` and ``predict`` have compiled."""
        for name in _FUNCTIONS:
            if getattr(self._model, name, None) is not None:
                setattr(self._model, name, None)


def layer_in(outer: Any, name: str) -> Any:
    """Return the layer of this name in an attribute of another, or in a list there; None where there is none."""
    # On PyTorch's backend a layer is a module, which holds layers apart from its other attributes.
    modules = list(outer.children()) if hasattr(outer, "children") else []
    values = [*vars(outer).values(), modules, getattr(outer, "layers", [])]
    inner = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
    return next((x for x in inner if isinstance(x, keras.layers.Layer) and x.name == name), None)


# ------------------------------------------------------------------ calls of layers, the original first


def _layer_call(original: Any, layer: Any, /, *arguments: Any, **options: Any) -> Any:
    """Call a layer: inside of a watched model under its name, else as a step if it is a watched model itself."""
    if HERE.root is not None:
        with staged.here(name=layer.name if HERE.name == WHOLE else f"{HERE.name}.{layer.name}"):
            return original(layer, *arguments, **options)
    return _call_model(layer, functools.partial(original, layer), arguments, options)


def _stateless_call(original: Any, layer: Any, trainable: Any, others: Any, *arguments: Any, **options: Any) -> Any:
    """Call a model as ``fit`` does on JAX, where the model's ``__call__`` is left out."""
    if HERE.root is not None:
        return original(layer, trainable, others, *arguments, **options)
    return _call_model(layer, functools.partial(original, layer, trainable, others), arguments, options)


def _call_model(layer: Any, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a layer, as a step if it is a watched model."""
    key, leaves = ("keras", id(layer)), keras.tree.flatten((arguments, options))
    is_symbolic = any(isinstance(x, keras.KerasTensor) or getattr(x, "is_meta", False) for x in leaves)
    if is_symbolic or not staged.watches_of(key):
        return function(*arguments, **options)
    real = staged.real_tokens(key, layer.call, (arguments, options))
    return staged.call_model(VALUES, Root(key), function, (arguments, options), leaves, real)


# ------------------------------------------------------------------ calls of attention functions


def _recording(make_site: Callable[..., Site]) -> Callable[..., Any]:
    """Return a wrapper that records calls of an attention function as sites."""
    return functools.partial(staged.record, VALUES, make_site)


def _compute_attention(
    layer: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *_: Any, use_causal_mask: Any = False,
    **__: Any,
) -> Site:  # fmt: skip
    if len(query.shape) != 4:  # batch, position, head, feature
        raise NotRecorded(f"attention over {len(query.shape) - 3} axes")
    mask = None if attention_mask is None else keras.ops.cast(attention_mask, "bool")
    while mask is not None and len(mask.shape) < 4:
        mask = keras.ops.expand_dims(mask, -3)
    return sites.dot_product(query, key, value, mask=mask, is_causal=bool(use_causal_mask))


def _apply_scores(layer: Any, scores: Any, value: Any, scores_mask: Any = None, *_: Any, **__: Any) -> Site:
    return sites.scores(scores, scores_mask)


def _dot_product(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, scale: Any = None, is_causal: Any = False,
    flash_attention: Any = None, attn_logits_soft_cap: Any = None,
) -> Site:  # fmt: skip
    if attn_logits_soft_cap is not None:
        raise NotRecorded("dot_product_attention with attn_logits_soft_cap")
    return sites.dot_product(query, key, value, bias=bias, mask=mask, scale=scale, is_causal=bool(is_causal))
