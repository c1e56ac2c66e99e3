"""What a layer computes in every framework, and what it keeps of its last call.

- A framework's file gives `BaseAttention` three primitives: apply a projection, read a parameter of the score, reshape.
- After the projections come the norm of queries and keys, the rotary embedding, and the cache, in this order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from attnscore import backends
from attnscore.analysis.weights import attention_weights
from attnscore.api import attend
from attnscore.backends.base import Array, Backend, HostArray, accumulator
from attnscore.base import thresholds
from attnscore.base.arguments import check_flag, shown
from attnscore.base.layout import may_equal
from attnscore.errors import ArgumentError, AttnscoreError, FrameworkError, ShapeError, message
from attnscore.kv_cache import KeyValueCache
from attnscore.layers import shared
from attnscore.layers.description import INPUTS, NORMS, POOLED, Layer, Linear, Parameter
from attnscore.masks import Mask
from attnscore.plans.prepared import PreparedKeys, prepare_keys
from attnscore.problem.dropout import check_dropout
from attnscore.scores.base import with_arrays, with_nonfinite_rows_isolated

A = TypeVar("A")
"""The array of a framework."""

# Added to the mean square of queries and keys before its root.
NORM_EPSILON = 1e-6


class LastCall:
    """The last call of a layer, without a graph: its weights where they are few, else the inputs of its softmax."""

    def __init__(self, ops: Backend, query: Any, key: Any, arguments: dict[str, Any], weights: Any) -> None:
        self.ops = ops
        self.computed = None if weights is None else self.detached(weights)
        if weights is not None:
            return
        self.query, self.key, mask = self.detached(query), self.detached(key), arguments["mask"]
        # Copied, as an optimiser or a decoding loop writes to them.
        small = {name: x for name in ("valid_lens", "bias", "sink") if (x := arguments.get(name)) is not None}
        self.arguments = arguments | {name: self.copied(x) for name, x in small.items()}
        self.arguments["score"] = with_arrays(arguments["score"], self.copied)
        if isinstance(mask, Mask):
            self.arguments["mask"] = mask.map_leaves(self.detached)
        elif backends.is_array(mask):
            self.arguments["mask"] = self.detached(mask)
        arrays = [self.query, self.key, *shared.arrays_in(self.arguments["mask"])]
        arrays = [x for x in arrays if not isinstance(x, np.ndarray)]
        self.versions = [(x, version) for x in arrays if (version := self.ops.version(x)) is not None]

    def copied(self, x: Any) -> Any:
        """Return an array without its graph, in memory that no caller writes to; lists as NumPy arrays."""
        if not backends.is_array(x) or isinstance(x, np.ndarray):
            return np.array(x)
        return self.ops.copy(self.ops.stop_gradient(x) if self.ops.needs_grad(x) else x)

    def detached(self, x: Any) -> Any:
        """Return an array without its graph, copied unless a later write to it would be noticed."""
        return self.copied(x)

    def weights(self) -> Any:
        """Return the weights, detached, for a caller that may write to them."""
        if self.computed is not None:
            return self.copied(self.computed)
        if any(self.ops.version(x) != version for x, version in self.versions):
            hint = "read the weights before writing to the tensors that the layer was called with"
            expected = "inputs as they were in the call"
            raise ArgumentError(message("attention_weights", expected, "changed ones", hint=hint))
        with self.ops.numeric_scope():
            return self.ops.stop_gradient(attention_weights(self.query, self.key, **self.arguments))


class BaseAttention(Generic[A]):
    """The mathematics of a call, over the primitives of a framework, and the weights of the last call."""

    keep_last: bool
    _layer: Layer
    _ops: Backend
    _last_call_type = LastCall
    # The last call, or why nothing is kept of it; None: there was none.
    _last: LastCall | str | None = None
    # Describes the calls of which nothing is kept.
    _calls_not_kept = ""
    # For the error without a call: describes the calls that count, where traced calls leave no trace on the layer.
    _where = ""

    def _set_options(self, layer: Layer, dropout: Any, keep_last: Any) -> None:
        """Set the attributes that a layer has in every framework."""
        self._layer = layer
        check_dropout(dropout, 0, lambda: 0)
        self.dropout = float(dropout)
        self.keep_last = check_flag("keep_last", keep_last)

    @staticmethod
    def _is_traced(*arrays: Any) -> bool:
        """Whether any array stands for values of a later run, or for many values at once."""
        return False

    @abstractmethod
    def _project(self, linear: Linear, x: A) -> A:
        """Apply a projection to an input of the call, with positions that hold a NaN or infinity isolated.

        The framework's module itself is called, so that hooks, parametrisations and replacements (adapters) act.
        """

    def _call_module(self, linear: Linear, x: A) -> Any:
        """Return the module of a projection applied to `x`."""
        return getattr(self, linear.name)(x)

    def _project_unpadded(self, linear: Linear, x: A, lens: Any) -> A:
        """Return `_project` of keys or values, whose rows from `lens` (batch,) on are never read.

        A framework may leave these rows out where no hook or other module would see the difference.
        """
        return self._project(linear, x)

    @abstractmethod
    def _read(self, part: Linear | Parameter, inputs: Mapping[str, A]) -> A:
        """Return an array of the score; `inputs` give the sizes that it lacks."""

    def _vector(self, linear: Linear, like: A) -> Any:
        """Return w of a module h -> w . h + b that replaces a projection of hidden units, from one call of the module.

        Pruning, weight norms and adapters act when a module is called. b adds the same number to all scores of a query.
        """
        ops = backends.of({"queries": like})
        rows, columns = (ops.positions(0, (linear.size or 0) + extra, like) for extra in (1, 0))
        # The unit vectors, whose results are w + b, and zeros, whose result is b.
        units = ops.astype(rows[None, :, None] == columns[None, None], ops.dtype(like))
        outputs = ops.reshape(self._call_module(linear, units), (-1,))
        return outputs[:-1] - outputs[-1:]

    def _reshape(self, x: Any, features: tuple[int, ...]) -> Any:
        """Return (batch, length, ...) as (batch, length, *features)."""
        return x.reshape((*x.shape[:2], *features))

    def _unprepared(self, keys: Any) -> tuple[Any, tuple[Linear, ...]]:
        """Return the keys of a call, and the projections left to apply: keys may be projected already."""
        if type(keys) is not PreparedKeys:
            return keys, self._layer.linears
        if not isinstance(self, PreparesKeys):
            hint = "AdditiveAttention takes prepared keys"
            raise FrameworkError(message("keys", "an array", "PreparedKeys", hint=hint))
        key, linears = keys.key, tuple(linear for linear in self._layer.linears if linear.input != "keys")
        shared.check_features("keys", key.shape[-1], linears[0].units, "w_v")
        return key, linears

    def _operands(
        self,
        inputs: Mapping[str, A],
        linears: Sequence[Linear],
        valid_lens: Any,
        mask: Any,
        bias: Any = None,
        cache: KeyValueCache | None = None,
        positions: Any = None,
        lens: Any = None,
    ) -> tuple[tuple[A, A, A], dict[str, Any]]:
        """Return query, key and value of the softmax, after the projections `linears`, and the arguments of `attend`.

        With a cache, these include it and a copy with the new positions too. `positions` are for a rotary embedding;
        None: 0, 1, 2, ..., or those after the cache. `lens` are the valid lengths if no key beyond them is read.
        """
        layer, projected = self._layer, dict(inputs)
        for linear in linears:
            if linear.input in inputs:
                x = inputs[linear.input]
                is_padded = lens is not None and linear.input != "queries"
                x = self._project_unpadded(linear, x, lens) if is_padded else self._project(linear, x)
                if linear.heads:
                    # Heads are consecutive features: none is moved.
                    x = self._reshape(x, (linear.heads, linear.units // linear.heads))
                projected[linear.input] = x
        arrays = {part.name: self._read(part, inputs) for part in layer.score_parts}
        score = layer.make_score(arrays) if layer.fixed_score is None else layer.fixed_score
        arguments = {"score": score, "valid_lens": valid_lens, "mask": mask, "normalizer": layer.normalizer}
        query, key, value = map(projected.__getitem__, INPUTS)
        if bias is not None:
            arguments["bias"] = bias
        if not layer.heads:
            if cache is not None:
                raise ArgumentError(message("cache", "none in a layer without heads", shown(cache)))
            return (query, key, value), arguments
        if "sink" in arrays:
            arguments["sink"] = arrays["sink"]
        if NORMS[0] in arrays:
            query, key = (_normalized(x, arrays[name]) for x, name in zip((query, key), NORMS, strict=True))
        if (rotary := getattr(self, "rotary", None)) is not None:
            query, key = _rotated(rotary, query, key, cache, positions)
        if cache is not None:
            return _with_cache(cache, query, key, value, arguments)
        shape = shared.scores_shape(*[x.shape for x in inputs.values()])  # type: ignore[attr-defined]
        return (query, key, value), arguments | {"mask": shared.over_heads(mask, shape), "head_axis": -2}

    def _attend(
        self,
        operands: Sequence[Any],
        arguments: dict[str, Any],
        dropout: float,
        seed: Any = None,
        *,
        is_concrete: bool = False,
        returns_weights: bool = False,
    ) -> tuple[A, A | None, KeyValueCache | None]:
        """Return the output for the result of `_operands`, the weights if they were computed, the cache; keep the call.

        `is_concrete` says that no array is traced.
        """
        (query, key, value), heads = operands, self._layer.heads
        cache, appended = arguments.pop("caches", (None, None))
        keeps = keeps_weights = self.keep_last
        if keeps and not is_concrete:
            keeps = not self._is_traced(*shared.arrays_of_weights(query, key, arguments))
            keeps_weights = keeps and not self._is_traced(value)
        if keeps_weights:
            (batch, query_len, *_), (key_batch, key_len, *_) = query.shape, key.shape
            pairs = max(batch, key_batch) * (heads or 1) * query_len * key_len
            # Values of a larger batch would broadcast these weights, but not the weights computed from the inputs.
            keeps_weights = pairs <= thresholds.KEPT_WEIGHTS and value.shape[0] <= max(batch, key_batch)
        weights = None
        if keeps_weights or returns_weights:
            out, weights = attend(query, key, value, dropout=dropout, seed=seed, return_weights=True, **arguments)
            # A traced seed makes the weights traced.
            keeps_weights = keeps_weights and (is_concrete or not self._is_traced(weights))
        else:
            out = attend(query, key, value, dropout=dropout, seed=seed, **arguments)
        last: LastCall | str | None
        if keeps:
            last = self._last_call_type(self._ops, query, key, arguments, weights if keeps_weights else None)
        else:
            last = self._calls_not_kept if self.keep_last else None
        # Past the framework, which looks through modules and parameters, or would track an attribute as state.
        object.__setattr__(self, "_last", last)
        output = self._output(out) if heads else out
        if cache is not None:
            cache = cache._take_over(appended, out)
        return output, weights, cache

    def _output(self, out: A) -> A:
        """Join the heads of the pooled values, and project."""
        for linear in self._layer.linears:
            if linear.input == POOLED:
                out = self._call_module(linear, self._reshape(out, (linear.units,)))
        return out

    @property
    def normalizer(self) -> Any:
        """The constructor's argument `normalizer`."""
        return self._layer.normalizer

    @property
    def attention_weights(self) -> A:
        """The weights of the last call, before dropout, detached: (batch, query, key).

        Multi-head: (batch, head, query, key). Computed when read, in O(n^2) memory, from the queries and keys that
        the call kept. A call itself computes and keeps up to 8192 weights, which takes less time.

        Raises
        ------
        AttnscoreError
            There was no call, the last one was compiled, traced or transformed (``torch.compile``, ``fit``, ``jit``,
            ``vmap``), ``keep_last`` is off, or the inputs were changed in place or donated since.
        """
        # Not an AttributeError: frameworks answer it with a search for attributes, which would hide the reason.
        if (last := self._last) is None:
            got = f"none {self._where}since it was made, copied or loaded"
            got = got if self.keep_last else "keep_last=False, which keeps nothing"
            raise AttnscoreError(message("attention_weights", "a call of the layer first", got))
        if isinstance(last, str):
            hint = "call the layer itself once; attnscore.attention_weights computes weights anywhere"
            raise AttnscoreError(message("attention_weights", "a call outside " + last, "one inside", hint=hint))
        weights: A = last.weights()
        return weights


def _normalized(x: Any, scale: Any) -> Any:
    """Return x / sqrt(mean(x^2) + epsilon) * scale over the features of a head; `x` is (batch, length, head, dim)."""
    ops = backends.of({"parameter": x})
    scale = ops.reshape(scale, (1, 1, 1, -1))

    def norm(x: Array) -> Array:
        wide = ops.astype(x, accumulator(ops.dtype(x)))
        square = ops.sum(wide * wide, -1, keepdims=True) / max(1, x.shape[-1])
        return ops.astype(wide / ops.sqrt(square + NORM_EPSILON) * ops.astype(scale, ops.dtype(wide)), ops.dtype(x))

    return with_nonfinite_rows_isolated(ops, x, norm)


def _rotated(rotary: Any, query: Any, key: Any, cache: KeyValueCache | None, positions: Any) -> tuple[Any, Any]:
    """Return queries and keys (batch, length, head, dim), rotated by positions: a cache's next, these, or 0, 1, ..."""
    ops = backends.of({"keys": key})
    shapes = query_shape, key_shape = ops.shape(query), ops.shape(key)
    length = key_shape[1]
    if not may_equal(length, query_shape[1]):
        raise ShapeError(message("keys", f"as many positions as queries ({query_shape[1]}) for rotary=", length))
    if cache is not None:
        positions = ops.asarray(cache.next_positions(length), key)
    elif positions is None:
        # A recorded program counts positions of other lengths too.
        count = key.shape[1] if ops.is_recording() else length
        positions = ops.reshape(ops.positions(0, count, key), (1, -1))
    rotated = rotary(query, key, positions)
    got = [tuple(getattr(x, "shape", ())) for x in rotated] if isinstance(rotated, tuple) else shown(rotated)
    fits = isinstance(rotated, tuple) and len(rotated) == 2 and all(map(_may_have, rotated, shapes))
    if not fits:
        raise ShapeError(message("rotary", f"queries {tuple(query_shape)} and keys {tuple(key_shape)} back", got))
    query, key = rotated
    return query, key


def _may_have(x: Any, shape: Sequence[Any]) -> bool:
    """Whether an array may have `shape`, which may contain unknown sizes."""
    got = tuple(getattr(x, "shape", ()))
    return len(got) == len(shape) and all(map(may_equal, got, shape))


def _with_cache(
    cache: KeyValueCache, query: Any, key: Any, value: Any, arguments: dict[str, Any]
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Append a call's keys and values to a copy of a cache; return its operands and arguments over all positions.

    A call that raises leaves the cache as it was; `_attend` ends with the change.
    """
    if not isinstance(cache, KeyValueCache) or cache.score is not None or cache.head_axis != -2:
        hint = "the score is that of the layer"
        raise ArgumentError(message("cache", "a KeyValueCache(head_axis=-2) without a score", repr(cache), hint=hint))
    if query.shape[1] > key.shape[1]:
        expected = f"at most as many positions as keys ({key.shape[1]}) with a cache"
        raise ShapeError(message("queries", expected, query.shape[1]))
    prepared = prepare_keys(arguments["score"], key, head_axis=-2)
    # Not with parameters per query head, each of which would need a copy of the keys: few queries gain nothing.
    if prepared.key.shape == key.shape:
        key, arguments["score"] = prepared.key, prepared.score
    appended = cache._append({"keys": key, "values": value}, {"valid_lens": arguments["valid_lens"]}, on_copy=True)
    shape = (query.shape[0], query.shape[1], appended.slots)
    over_slots = appended.arguments(query, mask=shared.over_heads(arguments["mask"], shape))
    operands = query, over_slots.pop("key"), over_slots.pop("value")
    return operands, arguments | over_slots | {"caches": (cache, appended)}


class PreparesKeys(BaseAttention[A]):
    """A layer of the additive score, whose keys can be projected once for many calls."""

    def prepare_keys(self, keys: A) -> PreparedKeys:
        """Project keys once for many calls: ``layer(queries, layer.prepare_keys(keys), values)``.

        A step of a recurrent decoder then costs no projection of the keys. Features of each key, such as the convolved
        weights of the step before (location-sensitive attention), are a further term:
        ``layer(queries, prepared + features, values)`` with features (batch, key, num_hiddens).

        Parameters
        ----------
        keys : (batch, key, features)

        Returns
        -------
        prepared : PreparedKeys
            Its score takes queries that ``W_q`` has projected. Gradients flow to `keys` and ``W_k``.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, FrameworkError
        """
        layer = self._layer
        (linear,) = (linear for linear in layer.linears if linear.input == "keys")
        keys = self._checked_keys(keys, linear)
        score = layer.make_score({part.name: self._read(part, {"queries": keys}) for part in layer.score_parts})
        return PreparedKeys(self._project(linear, keys), score)

    @abstractmethod
    def _checked_keys(self, keys: A, linear: Linear) -> A:
        """Return keys as an array; raise unless they are (batch, length, features) that their projection takes."""


class LoadsTorch:
    """A layer that takes the checkpoints of its PyTorch counterpart."""

    def load_torch(self, state: Mapping[str, Any]) -> None:
        """Take the parameters of a PyTorch layer's ``state_dict()``, from this library or from D2L.

        Kernels are PyTorch's weights, transposed. Sizes that this layer does not know yet come from `state`.

        Parameters
        ----------
        state : mapping of names to arrays of any framework

        Raises
        ------
        ArgumentError
            Names that this layer does not have, or that `state` lacks.
        ShapeError
            An array of another shape. No parameter has been changed then.
        """
        arrays: dict[str, HostArray] = {}
        for name, x in state.items():
            if (array := backends.of({name: x}).host(x)) is None:
                expected = "an array whose numbers can be seen"
                raise ArgumentError(message(name, expected, "one on a device", hint="x.cpu()"))
            arrays[name] = array
        self._load(arrays)

    @abstractmethod
    def _load(self, arrays: Mapping[str, HostArray]) -> None:
        """Assign a checkpoint, and make the parameters that were not sized yet."""
