"""What the Flax layers are made of: the last call, projections, checks at the border.

- A call is kept as the inputs of its softmax, O(n) memory, outside the graph that ``nnx.split`` and ``nnx.jit`` see.
- Rows that hold a NaN or infinity pass a projection without reaching the gradient of its kernel, so that what a mask
  hides afterwards reaches nothing.
- Inputs and parameters are promoted to one dtype, as Flax does it; a wrong shape is named before JAX meets it.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from attnscore import backends
from attnscore.analysis.weights import attention_weights
from attnscore.api import attend
from attnscore.errors import ArgumentError, message
from attnscore.layers import shared
from attnscore.layers.flax_parameters import Unsized, load_torch
from attnscore.masks import Mask
from attnscore.scores import arrays_of
from attnscore.scores.base import with_nonfinite_rows_isolated

_OPS = backends.load("jax")

# Not attributes: those are part of the graph, which ``nnx.jit`` compiles anew for when they change, and keeps alive.
_LAST: weakref.WeakKeyDictionary[nnx.Module, _Call | str] = weakref.WeakKeyDictionary()

# What JAX says where no transformation runs.
_OUTSIDE = get_opaque_trace_state(convention="nnx")  # type: ignore[no-untyped-call]  # JAX's own

Draws: TypeAlias = nnx.Rngs | nnx.RngStream | jax.Array
"""Where the dropout of a call may draw from."""


class Attention(nnx.Module):
    """What every layer has: dropout in training, and the inputs of its last softmax."""

    def __init__(
        self, dropout: float, *, deterministic: bool, keep_last: bool, rngs: nnx.Rngs | None, dtype: Any = None
    ) -> None:
        # Called last: the stream is forked behind the parameters, which are then the same whatever the dropout is.
        self.dropout = shared.check_probability(dropout)
        self.deterministic = deterministic
        self.keep_last = keep_last
        self.dtype = dtype
        self.rngs = nnx.data(rngs.dropout.fork() if rngs is not None and self.dropout else None)

    def __call__(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        valid_lens: Any = None,
        mask: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: Draws | None = None,
    ) -> jax.Array:
        """Attention pooling.

        Parameters
        ----------
        queries : (batch, query, features)
        keys : (batch, key, features)
        values : (batch, key, features)
        valid_lens : (batch,) or (batch, query) whole numbers, optional
        mask : a mask object, or a boolean array broadcastable to (batch, query, key), True = may attend; optional
        deterministic : bool, optional
            Whether to leave dropout out; None: what ``layer.train()`` and ``layer.eval()`` said.
        rngs : nnx.Rngs, nnx.RngStream or a key, optional
            Where dropout draws from; None: the layer's own stream.

        Returns
        -------
        out : (batch, query, features of the values, or num_hiddens)

        Raises
        ------
        ShapeError, DtypeError, DeviceError, FrameworkError, MaskError, ArgumentError
        """
        queries, keys, values = checked_inputs(queries, keys, values)
        shape = shared.scores_shape(queries, keys, values)
        query, key, value, score = self._scored(queries, keys, values)
        # Only what has a head axis takes note of where it is.
        arguments = {"score": score, "valid_lens": valid_lens, "mask": self._over_heads(mask, shape), "head_axis": -2}
        return self._joined(self._pool(query, key, value, mode=(deterministic, rngs), **arguments))

    @abstractmethod
    def _scored(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """What goes into `attend`: queries, keys and values of the softmax, and the score."""

    def _over_heads(self, mask: Any, shape: tuple[int, int, int]) -> Any:
        return mask

    def _joined(self, out: jax.Array) -> jax.Array:
        return out

    @property
    def attention_weights(self) -> jax.Array:
        """The weights of the last concrete call, before dropout, computed now: (batch, query, key).

        Multi-head: (batch, head, query, key). O(n^2) memory while they are held; the call itself kept its queries and
        keys alone. Calls inside ``jit``, ``grad`` and ``vmap`` are not concrete.

        Raises
        ------
        AttnscoreError
            There was no concrete call, ``keep_last`` is off, or the inputs were donated since.
        """
        return shared.last_call(_LAST.get(self), self.keep_last, where="outside jit, grad and vmap ").weights()

    def load_torch(self, state: Mapping[str, Any]) -> None:
        """Take the numbers of a PyTorch layer's ``state_dict()``, this library's or the textbook's.

        Kernels are PyTorch's weights, transposed. Sizes that this layer does not know yet are those of `state`.

        Parameters
        ----------
        state : mapping of names to arrays of any framework

        Raises
        ------
        ArgumentError
            Names that this layer has not, or that it misses.
        ShapeError
            An array of another shape. Nothing has been changed then.

        Examples
        --------
        >>> import numpy as np
        >>> from flax import nnx
        >>> from attnscore.layers.flax import BilinearAttention
        >>> layer = BilinearAttention(rngs=nnx.Rngs(0))
        >>> layer.load_torch({"W.weight": np.eye(3, 5)})
        >>> layer.W.shape
        (3, 5)
        """
        load_torch(self, state)

    def _pool(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mode: tuple[bool | None, Draws | None],
        **arguments: Any,
    ) -> jax.Array:
        """`attend` in this layer's mode, remembered for `attention_weights`."""
        dtype = self.dtype or jnp.result_type(query, key, value)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        deterministic, rngs = mode
        training = not (self.deterministic if deterministic is None else deterministic)
        dropout = self.dropout if training else 0.0
        seed = self._draw(rngs) if dropout else None
        out: jax.Array = attend(query, key, value, dropout=dropout, seed=seed, **arguments)
        _LAST.pop(self, None)
        if self.keep_last:
            _LAST[self] = _Call.of(query, key, arguments)
        return out

    def _draw(self, rngs: Draws | None) -> Any:
        """A key for the dropout of one call."""
        source = self.rngs if rngs is None else rngs
        if isinstance(source, nnx.Rngs):
            source = source.dropout
        if source is None:
            wanted = "an nnx.Rngs, for the layer or for the call, where dropout is active"
            raise ArgumentError(message("rngs", wanted, None, hint="layer.eval() or deterministic=True turns it off"))
        return source() if isinstance(source, nnx.RngStream) else source

    def _project(self, name: str, owner: str, x: jax.Array) -> jax.Array:
        """What the projection called `owner` makes of the input `name`, rows with a NaN or infinity set apart.

        The module itself is called, so that what replaced it (an adapter) has its say.
        """
        layer = self._sized(owner, {name: x})
        kernel = getattr(layer, "kernel", None)
        if isinstance(kernel, nnx.Variable):
            shared.check_features(name, x.shape[-1], kernel.shape[0], owner)
        found: jax.Array = with_nonfinite_rows_isolated(_OPS, x, layer)
        return found

    def _sized(self, owner: str, inputs: Mapping[str, jax.Array]) -> Any:
        """The attribute `owner`, which takes the sizes it lacks from `inputs`, and keeps them."""
        found = getattr(self, owner)
        if isinstance(found, Unsized):
            # A parameter made inside grad would get no gradient, silently.
            if get_opaque_trace_state(convention="nnx") != _OUTSIDE:  # type: ignore[no-untyped-call]  # JAX's own
                hint = "query_size=, key_size= and value_size= say how long the vectors are"
                wanted = f"a first call outside jit, grad and vmap, which makes {owner}"
                raise ArgumentError(message(" and ".join(inputs), wanted, "one inside", hint=hint))
            found = found.made(*(x.shape[-1] for x in inputs.values()))
            setattr(self, owner, found)
        return found


@dataclass(frozen=True, eq=False)
class _Call:
    """The inputs of one softmax. JAX arrays cannot be written to; lengths that can are copied."""

    query: jax.Array
    key: jax.Array
    arguments: dict[str, Any]

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, arguments: dict[str, Any]) -> _Call | str:
        """The call, or why there is nothing to keep of it."""
        lens, mask = arguments["valid_lens"], arguments["mask"]
        masked = mask.arrays().values() if isinstance(mask, Mask) else (mask,)
        if _is_traced(query, key, *arrays_of(arguments["score"]).values(), *masked, lens):
            return "jit, grad and vmap, which keep nothing"
        copied = np.array(lens) if lens is not None and not isinstance(lens, jax.Array) else lens
        return cls(query, key, {**arguments, "valid_lens": copied})

    def weights(self) -> jax.Array:
        held = (self.query, self.key, *arrays_of(self.arguments["score"]).values())
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in held):
            hint = "read the weights before a function takes its arguments over (donate_argnums)"
            raise ArgumentError(
                message("attention_weights", "inputs as they were in the call", "donated ones", hint=hint)
            )
        found: jax.Array = attention_weights(self.query, self.key, **self.arguments)
        return found


def checked_inputs(queries: Any, keys: Any, values: Any) -> tuple[jax.Array, ...]:
    """The inputs as JAX arrays; raises unless they are floating (batch, length, features) and belong together.

    NumPy arrays and variables (a learned query) are taken as every Flax layer takes them.
    """
    inputs = {"queries": queries, "keys": keys, "values": values}
    for name, x in inputs.items():
        if isinstance(x, nnx.Variable):
            inputs[name] = x.get_value()
        elif isinstance(x, np.ndarray):
            inputs[name] = jnp.asarray(x)
    shared.check_inputs(_OPS, inputs, jax.Array, wanted="a jax.Array", hint="jnp.asarray(x) makes one")
    return tuple(inputs.values())


def _is_traced(*arrays: Any) -> bool:
    """Whether some of these stand for values of a later run, for many values at once, or for a derivative too."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)
