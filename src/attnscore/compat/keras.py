"""Keras's attention layers, argument for argument, computed by `attend` on whichever backend Keras runs.

- Each class is a subclass of Keras's layer of the same name, the original, and replaces its forward pass alone.
  Constructor, checks, symbolic shapes, configuration and names of weights are the original's, so that
  ``layer.__class__ = MultiHeadAttention`` changes an existing layer of Keras into one of these.
- Two things differ from the original: a query that attends to no key gets zeros, and dropout draws other weights from
  the same seed. With ``strict=True`` both are as in the original.
- A causal mask and a sliding window are mask objects, without an array of query by key.
- Where a subclass overrides a step of the original's computation (``_compute_attention``, ``_calculate_scores`` ...),
  the original's forward pass runs, and calls the override.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import keras

from attnscore.api import attend
from attnscore.backends.base import Array
from attnscore.errors import message
from attnscore.layers.keras_inputs import drawn_seed, value_of
from attnscore.masks import Causal, Dense, KeyPadding, Mask, SlidingWindow
from attnscore.masks.base import all_of
from attnscore.scores import Additive, Dot, ScaledDot

__all__ = ["AdditiveAttention", "Attention", "GroupQueryAttention", "MultiHeadAttention"]

ops = keras.ops


class _DropIn:
    """Adds the keyword `strict` of `_drop_in` to the configuration of the original."""

    # A layer of Keras whose __class__ is set to one of these has no attribute of its own.
    strict: bool = False

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the original, with `strict` only if it is True."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]  # of Keras's layer, the next class
        return {**config, "strict": True} if self.strict else config


def _drop_in(kind: Any) -> Any:
    """Register a class with Keras, and give its constructor the signature of the original, with `strict` by keyword."""
    signature = inspect.signature(kind.__bases__[1].__init__)
    strict = inspect.Parameter("strict", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
    *named, others = signature.parameters.values()

    def __init__(self: Any, *args: Any, strict: bool = False, **kwargs: Any) -> None:
        super(kind, self).__init__(*args, **kwargs)
        self.strict = strict

    __init__.__signature__ = signature.replace(parameters=[*named, strict, others])  # type: ignore[attr-defined]
    kind.__init__ = __init__
    return keras.saving.register_keras_serializable(package="attnscore.compat")(kind)


def _is_overridden(layer: Any, *names: str) -> bool:
    """Whether the class of `layer` overrides one of these methods of its base class in this module."""
    kind = type(layer)
    ours = next(each for each in kind.__mro__ if each.__module__ == __name__)
    return any(getattr(kind, name) is not getattr(ours, name) for name in names)


def _pooled(
    query: Array,
    key: Array,
    value: Array,
    *,
    rate: float,
    generator: Any,
    with_weights: bool,
    fill_empty: Callable[[Array], Array] | None,
    strict: bool,
    **options: Any,
) -> tuple[Array, Array | None, Array | None]:
    """Return the output, the weights before dropout, and the weights after it; `options` are passed to `attend`.

    Usually `attend` drops weights itself, and none are returned. The matrix of weights is computed if the caller wants
    it, if `strict` needs it, and for a `rate` of 1, where `attend` would divide by 1 - rate = 0. Then `fill_empty`
    replaces the weights of queries that attend to no key, and ``keras.random.dropout`` drops weights with the state of
    `generator`, as in the original.
    """
    if not (with_weights or fill_empty or (rate and (strict or rate >= 1))):
        seed = drawn_seed(generator) if rate else None
        return attend(query, key, value, dropout=rate, seed=seed, **options), None, None
    out, weights = attend(query, key, value, return_weights=True, **options)
    weights = fill_empty(weights) if fill_empty else weights
    dropped = keras.random.dropout(weights, rate, seed=generator) if rate else weights
    if dropped is not weights or fill_empty:
        if options.get("head_axis") == -2:
            value = ops.repeat(value, dropped.shape[1] // value.shape[2], 2)
            out = ops.swapaxes(ops.matmul(dropped, ops.swapaxes(value, 1, 2)), 1, 2)
        else:
            out = ops.matmul(dropped, value)
    return out, weights, dropped


def _where_empty(weights: Array, others: Array) -> Array:
    """Return `weights`, replaced by `others` for queries that attend to no key; NaN stays."""
    return ops.where(ops.any(weights != 0, axis=-1, keepdims=True), weights, others)


def _boolean(mask: Any) -> Array:
    return ops.cast(mask, "bool")


def _with_axes(mask: Array, count: int, axis: int) -> Array:
    """Return a mask of `count` axes: axes of size 1 are inserted at `axis`."""
    for _ in range(count - len(mask.shape)):
        mask = ops.expand_dims(mask, axis)
    return mask


# ------------------------------------------------------------------ Attention, AdditiveAttention


class _OneHead(_DropIn):
    """Forward pass of the two layers that take a list [query, value] or [query, value, key].

    The method `_scored` of each returns query, key and score of a call.
    """

    def call(
        self: Any,
        inputs: Any,
        mask: Any = None,
        training: bool = False,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> Any:
        """Return the output, and with `return_attention_scores` the weights after dropout."""
        if _is_overridden(self, "_calculate_scores", "_calculate_score_mask", "_apply_scores"):
            return super().call(  # type: ignore[misc]  # of Keras's layer, the next class
                inputs, mask, training, return_attention_scores, use_causal_mask
            )
        self._validate_inputs(inputs=inputs, mask=mask)
        query, value, *rest = map(ops.convert_to_tensor, inputs)
        key = rest[0] if rest else value
        if len(query.shape) > 3 and query.shape[-3] not in (1, key.shape[-3]) and key.shape[-3] != 1:
            # `attend` would share these keys among heads, which the original refuses.
            raise ValueError(message("value", f"{query.shape[-3]} on axis -3, as query has", key.shape[-3]))
        query_mask, value_mask = mask[:2] if mask else (None, None)
        mask_of_scores = _mask_of_scores(value_mask, use_causal_mask, max(len(query.shape), len(key.shape)))
        q, k, score = self._scored(query, key)

        def fill_empty(weights: Array) -> Array:
            # The original subtracts this number from masked scores. Where all keys are masked, its softmax sees the
            # differences that rounding leaves: none in float32, which gives uniform weights.
            scores = self._calculate_scores(query=query, key=key)
            masked = ops.softmax(scores - (65504.0 if weights.dtype == "float16" else 1.0e9), axis=-1)
            return _where_empty(weights, ops.cast(masked, weights.dtype))

        out, _, weights = _pooled(
            q, k, value, score=score, mask=mask_of_scores, strict=self.strict,
            rate=self.dropout if training and self.dropout > 0 else 0.0,
            generator=getattr(self, "seed_generator", None),
            with_weights=return_attention_scores,
            fill_empty=fill_empty if self.strict and value_mask is not None else None,
        )  # fmt: skip
        if query_mask is not None:
            out = ops.where(ops.expand_dims(_boolean(query_mask), -1), out, 0)
        return (out, weights) if return_attention_scores else out


def _mask_of_scores(value_mask: Any, causal: bool, axes: int) -> Mask | None:
    """Return a padding mask of the values, (batch, key), joined with a causal mask, for scores of `axes` axes."""
    parts: list[Mask] = []
    if value_mask is not None:
        value_mask = _boolean(value_mask)
        if axes == 3 and len(value_mask.shape) == 2 and value_mask.shape[-1] != 1:
            parts.append(KeyPadding(value_mask))
        else:
            by_key = causal or len(value_mask.shape) == 2
            # As many axes as the scores have: `attend` could read two axes as (batch, key).
            parts.append(Dense(_with_axes(ops.expand_dims(value_mask, -2) if by_key else value_mask, axes, 0)))
    if causal:
        parts.append(Causal("top_left"))
    return all_of(parts)


@_drop_in
class Attention(_OneHead, keras.layers.Attention):  # type: ignore[misc]  # Keras has no types
    """``keras.layers.Attention``, a subclass of it, with its forward pass by `attend`.

    softmax(scale q . k) v, or softmax(w sum tanh(scale (q + k))) v with ``score_mode="concat"``.

    Parameters
    ----------
    strict : bool
        Compute as Keras does in the two cases that differ otherwise, in O(n^2) memory as in Keras. A query that
        attends to no key gets Keras's output in place of zeros, and dropout drops the same weights from the same seed.
    others
        As the original takes them.

    References
    ----------
    ``keras.layers.Attention``, Keras 3.15.

    Examples
    --------
    >>> import keras, numpy as np
    >>> query, value = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype("float32")
    >>> out = Attention()([query, value], use_causal_mask=True)
    >>> theirs = keras.layers.Attention()([query, value], use_causal_mask=True)
    >>> bool(keras.ops.max(keras.ops.abs(out - theirs)) < 1e-5)
    True
    """

    def _scored(self, query: Array, key: Array) -> tuple[Array, Array, Any]:
        scale = None if self.scale is None else value_of(self.scale)
        if self.score_mode == "dot":
            return query, key, Dot() if scale is None else ScaledDot(scale)
        query, key, w = _with_hidden_units(query, key, value_of(self.concat_score_weight))
        return (query, key, Additive(w)) if scale is None else (query * scale, key * scale, Additive(w))


@_drop_in
class AdditiveAttention(_OneHead, keras.layers.AdditiveAttention):  # type: ignore[misc]  # Keras has no types
    """``keras.layers.AdditiveAttention``, a subclass of it, with its forward pass by `attend`.

    softmax(sum scale tanh(q + k)) v, the sum over the dimension.

    Parameters
    ----------
    strict : bool
        As in `Attention`.
    others
        As the original takes them.

    References
    ----------
    ``keras.layers.AdditiveAttention``, Keras 3.15.

    Examples
    --------
    >>> import keras, numpy as np
    >>> query, value = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype("float32")
    >>> ours, theirs = AdditiveAttention(), keras.layers.AdditiveAttention()
    >>> out = theirs([query, value])
    >>> ours.build([(3, 5, 8), (3, 5, 8)])
    >>> ours.set_weights(theirs.get_weights())
    >>> bool(keras.ops.max(keras.ops.abs(ours([query, value]) - out)) < 1e-5)
    True
    """

    def _scored(self, query: Array, key: Array) -> tuple[Array, Array, Any]:
        scale = ops.ones((), query.dtype) if self.scale is None else value_of(self.scale)
        query, key, scale = _with_hidden_units(query, key, scale)
        return query, key, Additive(scale)


def _with_hidden_units(query: Array, key: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Return queries, keys and weight with one number of hidden units: a size of 1 is repeated to the other's."""
    size = max(query.shape[-1], key.shape[-1])
    query, key = (ops.repeat(x, size, -1) if x.shape[-1] == 1 < size else x for x in (query, key))
    return query, key, ops.broadcast_to(weight, (size,))


# ------------------------------------------------------------------ MultiHeadAttention, GroupQueryAttention

# Methods of the originals that a subclass may replace.
_METHODS = (
    "_compute_attention", "_compute_attention_mask", "_masked_softmax",
    "_compute_causal_mask", "_compute_sliding_window_mask",
)  # fmt: skip


class _ManyHeads(_DropIn):
    """Masks and pooling of the two layers with heads."""

    def _compute_attention_mask(
        self: Any,
        query: Array,
        value: Array,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> Any:
        """Return all masks of a call as one mask object.

        Where a subclass overrides a method, or where there are several axes to attend over, it is an array as in Keras.
        """
        padding = {"query_mask": query_mask, "value_mask": value_mask, "key_mask": key_mask}
        if len(query.shape) != 3 or _is_overridden(self, *_METHODS):
            masks = {**padding, "attention_mask": attention_mask, "use_causal_mask": use_causal_mask}
            return super()._compute_attention_mask(query, value, **masks)  # type: ignore[misc]  # of Keras's layer
        parts: list[Mask] = [] if attention_mask is None else [_over_heads(attention_mask)]
        # In self-attention Keras passes one mask under two names.
        by_key = {id(x): x for x in (value_mask, key_mask) if x is not None}
        parts += [KeyPadding(_boolean(x)) for x in by_key.values()]
        parts += [] if query_mask is None else [Dense(_boolean(query_mask)[:, None, :, None])]
        parts += [Causal("top_left")] if use_causal_mask else []
        if (window := getattr(self, "_sliding_window", None) or getattr(self, "sliding_window", None)) is not None:
            parts.append(SlidingWindow(window - 1, window - 1, "top_left"))
        return all_of(parts)

    def _pool_heads(
        self: Any,
        query: Array,
        key: Array,
        value: Array,
        mask: Mask | None,
        training: bool | None,
        with_weights: bool,
        **options: Any,
    ) -> tuple[Array, Array | None]:
        """Return the output, and the weights before dropout if computed; `options` are passed to `attend`."""
        if self._flash_attention and with_weights:
            hint = (
                "Returning attention scores is not supported when flash attention is enabled. Please disable flash "
                "attention to access attention scores."
            )
            raise ValueError(message("return_attention_scores", "False with flash_attention=True", "True", hint=hint))
        rate = float(self._dropout_layer.rate)
        # A fully masked query gets the mean of all values from the original's fused computation, and from no other.
        is_fused = not (with_weights or rate) and options.get("head_axis") == -2
        # Under a causal mask alone every query attends to a key.
        fills = self.strict and is_fused and mask is not None and type(mask) is not Causal
        out, weights, _ = _pooled(
            query, key, value, mask=mask, strict=self.strict,
            rate=rate if training else 0.0,
            generator=getattr(self._dropout_layer, "seed_generator", None),
            with_weights=with_weights,
            fill_empty=(lambda x: _where_empty(x, ops.softmax(ops.zeros_like(x), axis=-1))) if fills else None,
            **options,
        )  # fmt: skip
        return out, weights


def _over_heads(mask: Any) -> Mask:
    """Return an array (key,), (query, key), (batch, query, key) or (batch, head, query, key) as a mask object."""
    return Dense(_with_axes(_with_axes(_boolean(mask), 2, 0), 4, -3))


def _as_mask(mask: Any, use_causal_mask: bool) -> Mask | None:
    """Return a mask, an array or an object, as a mask object; with `use_causal_mask` joined with the causal mask."""
    parts = [] if mask is None else [mask if isinstance(mask, Mask) else _over_heads(mask)]
    return all_of([*parts, Causal("top_left")] if use_causal_mask else parts)


@_drop_in
class MultiHeadAttention(_ManyHeads, keras.layers.MultiHeadAttention):  # type: ignore[misc]  # Keras has no types
    """``keras.layers.MultiHeadAttention``, a subclass of it, with its forward pass by `attend`.

    W_o concat_h(pool_h) + b_o, where head h pools W_v v + b_v by the scaled dot product of W_q q + b_q and W_k k + b_k.

    Parameters
    ----------
    flash_attention : bool, optional
        True refuses weights and dropout, as in Keras. It does nothing else: memory is linear without it too.
    strict : bool
        Compute as Keras does in the two cases that differ otherwise, in O(n^2) memory as in Keras. A query that
        attends to no key gets the mean of all values where Keras gives that, in place of zeros, and dropout drops the
        same weights from the same seed.
    others
        As the original takes them.

    References
    ----------
    ``keras.layers.MultiHeadAttention``, Keras 3.15.

    Examples
    --------
    >>> import keras, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype("float32")
    >>> ours, theirs = MultiHeadAttention(2, 4), keras.layers.MultiHeadAttention(2, 4)
    >>> out = theirs(x, x, use_causal_mask=True)
    >>> ours.build((3, 5, 8), (3, 5, 8))
    >>> ours.set_weights(theirs.get_weights())
    >>> bool(keras.ops.max(keras.ops.abs(ours(x, x, use_causal_mask=True) - out)) < 1e-5)
    True
    """

    def _compute_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Array, Array | None]:
        if _is_overridden(self, "_masked_softmax", "_compute_causal_mask"):
            return super()._compute_attention(  # type: ignore[no-any-return]  # Keras has no types
                query, key, value, attention_mask, training, return_attention_scores, use_causal_mask
            )
        query, key, value = map(ops.convert_to_tensor, (query, key, value))
        options: dict[str, Any] = {"score": ScaledDot(self._inverse_sqrt_key_dim)}
        axes = tuple(self._attention_axes)
        if len(query.shape) == 4 and axes == (1,):
            mask = _as_mask(attention_mask, use_causal_mask)
            arguments = query, key, value, mask, training, return_attention_scores
            return self._pool_heads(*arguments, head_axis=-2, **options)

        # Several axes to attend over, or another one: they are moved after the rest and joined into one.
        channel_axis, count = len(query.shape) - 1, len(axes)
        lead = channel_axis - count
        last = tuple(range(lead, channel_axis))
        moved = [ops.moveaxis(x, axes, last) for x in (query, key, value)]
        query_lens, key_lens = (ops.shape(x)[lead:-1] for x in moved[:2])
        flat = [ops.reshape(x, (*ops.shape(x)[:lead], -1, x.shape[-1])) for x in moved]
        if use_causal_mask:
            causal = self._compute_causal_mask(query, value)
            attention_mask = causal if attention_mask is None else _boolean(attention_mask) & causal
        mask = None
        if attention_mask is not None:
            array = _with_axes(_boolean(attention_mask), lead + 2 * count, -2 * count - 1)
            shape = ops.shape(array)[:lead]
            array = ops.broadcast_to(array, (*shape, *query_lens, *key_lens))
            mask = Dense(ops.reshape(array, (*shape, *map(math.prod, (query_lens, key_lens)))))
        out, weights = self._pool_heads(flat[0], flat[1], flat[2], mask, training, return_attention_scores, **options)
        out = ops.reshape(out, (*ops.shape(moved[0])[:-1], value.shape[-1]))
        if weights is not None:
            weights = ops.reshape(weights, (*ops.shape(weights)[:lead], *query_lens, *key_lens))
        return ops.moveaxis(out, last, axes), weights


@_drop_in
class GroupedQueryAttention(_ManyHeads, keras.layers.GroupQueryAttention):  # type: ignore[misc]  # Keras has no types
    """``keras.layers.GroupQueryAttention``, a subclass of it, with its forward pass by `attend`.

    Has the parameters of the original, with `strict` and `flash_attention` as in `MultiHeadAttention`. Keras copies
    a KV head for each of the query heads that share it; here nothing is copied.

    References
    ----------
    ``keras.layers.GroupQueryAttention``, Keras 3.15.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.ones((3, 5, 8), "float32")
    >>> tuple(GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=True).shape)
    (3, 5, 8)
    """

    def call(
        self,
        query: Array,
        value: Array,
        key: Array | None = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        """Return the output, and with `return_attention_scores` the weights before dropout."""
        padding = {"query_mask": query_mask, "value_mask": value_mask, "key_mask": key_mask}
        masks = {**padding, "attention_mask": attention_mask, "use_causal_mask": use_causal_mask}
        if _is_overridden(self, *_METHODS):
            options = {"return_attention_scores": return_attention_scores, "training": training}
            return super().call(query, value, key, **masks, **options)
        self._return_attention_scores = return_attention_scores
        mask = self._compute_attention_mask(query, value, **masks)
        key = value if key is None else key
        # The original would copy keys and values for each head of the queries here.
        heads = self._query_dense(query), self._key_dense(key), self._value_dense(value)
        out, weights = self._compute_attention(*heads, mask, training)
        if self.use_gate:
            out = ops.multiply(out, self._gate_dense(query))
        out = self._output_dense(out)
        return (out, weights) if return_attention_scores else out

    def _compute_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        attention_mask: Any = None,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> tuple[Array, Array | None]:
        if _is_overridden(self, "_masked_softmax", "_compute_causal_mask"):
            return super()._compute_attention(  # type: ignore[no-any-return]  # Keras has no types
                query, key, value, attention_mask, training, use_causal_mask
            )
        query, key, value = map(ops.convert_to_tensor, (query, key, value))
        mask, with_weights = _as_mask(attention_mask, use_causal_mask), self._return_attention_scores
        options: dict[str, Any] = {"score": ScaledDot(self._inverse_sqrt_head_dim), "head_axis": -2}
        return self._pool_heads(query, key, value, mask, training, with_weights, **options)


# Keras exports its class GroupedQueryAttention under this name too. The class's name names a layer and its weights.
GroupQueryAttention = GroupedQueryAttention
