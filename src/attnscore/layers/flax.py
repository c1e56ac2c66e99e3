"""Attention layers for Flax: parameters, training mode and state as ``flax.nnx`` has them.

- All are called as ``layer(queries, keys, values, valid_lens=None, mask=None)`` on (batch, length, features);
  `attnscore.layers` has the rules of all frameworks.
- Projections are ``nnx.Linear``; `load_torch` takes the checkpoints of Dive into Deep Learning (D2L). Sizes not given
  come with the first call, outside ``jit``.
- Inputs and parameters are promoted to one dtype, as Flax does it.
- Dropout draws from the ``dropout`` stream, in training only: ``model.train()``, ``model.eval()``, ``deterministic``.
- ``attention_weights`` belong to the last concrete call: ``jit``, ``grad``, ``vmap``, copies and pickle keep
  nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Never, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from attnscore import backends
from attnscore.backends.base import HostArray
from attnscore.backends.jax.tracers import trace_state
from attnscore.base.arguments import hides_unknown, reject_unknown
from attnscore.errors import ArgumentError, message
from attnscore.kv_cache import KeyValueCache
from attnscore.layers import description, shared
from attnscore.layers.base import BaseAttention, LastCall, LoadsTorch, PreparesKeys
from attnscore.layers.description import Layer, Linear, Parameter
from attnscore.layers.documentation import RETURNS_CACHE, Documentation, documented_call
from attnscore.scores import arrays_of
from attnscore.scores.base import with_nonfinite_rows_isolated

__all__ = ["AdditiveAttention", "BilinearAttention", "DotProductAttention", "GaussianAttention", "MultiHeadAttention"]

_OPS = backends.load("jax")
_CALL_OPTIONS = """
deterministic : bool, optional
    Whether to leave dropout out; None: as ``layer.train()`` and ``layer.eval()`` set it.
rngs : nnx.Rngs, nnx.RngStream or a key, optional
    Where dropout draws from; None: the stream of the layer.
"""
_documented = Documentation(
    "from flax import nnx; from jax.numpy import ones",
    options="""
query_size, key_size, value_size : int, optional
    Features of the inputs; None: inferred at the first call, which is then one outside ``jit``, ``grad`` and ``vmap``.
deterministic : bool
    Whether dropout is off; ``layer.train()`` and ``layer.eval()`` set it.
dtype : dtype, optional
    Dtype of the computation; None: promoted from inputs and parameters.
param_dtype : dtype
    Dtype of the parameters.
rngs : nnx.Rngs
    Streams ``params`` and ``dropout``.
""",
    more="rngs=nnx.Rngs(0)",
)

# Not attributes, which belong to the graph: ``nnx.jit`` compiles anew when they change, and keeps them alive.
_LAST: weakref.WeakKeyDictionary[nnx.Module, LastCall | str | None] = weakref.WeakKeyDictionary()

# The trace state of JAX where no transformation runs.
_OUTSIDE = trace_state()

Draws: TypeAlias = nnx.Rngs | nnx.RngStream | jax.Array
"""Random source of a call's dropout."""


# ------------------------------------------------------------------ parameters


class Unsized(nnx.Module):
    """Placeholder for a parameter or a projection of unknown sizes, which the first call makes and puts here.

    It is a module, so that copies and states have it too.
    """

    def __init__(self, part: Linear | Parameter, options: Mapping[str, Any], rngs: nnx.Rngs) -> None:
        self.part = part
        self.options = tuple(options.items())
        self.rngs = rngs.params.fork()

    def made(self, sizes: Mapping[str, int]) -> Any:
        """Return the parameter or the projection; `sizes` are the inputs' features by name."""
        part = self.part.sized([sizes[name] for name in self.part.inputs])
        return _made(part, dict(self.options), nnx.Rngs(params=self.rngs()))


def _made(part: Linear | Parameter, options: Mapping[str, Any], rngs: Any) -> Any:
    """Return a projection or a parameter with its starting values, or a stand-in until its sizes are known."""
    if None in part.shape:
        return Unsized(part, options, rngs)
    if isinstance(part, Linear):
        return nnx.Linear(part.size or 0, part.units, use_bias=part.bias, rngs=rngs, **options)
    dtype, bound = options["param_dtype"], part.bound
    if not bound:
        return nnx.Param(jnp.full(part.sizes, jnp.asarray(part.start, dtype), dtype))
    return nnx.Param(jax.random.uniform(rngs.params(), part.sizes, dtype, -bound, bound))


# ------------------------------------------------------------------ the call


class _LastCall(LastCall):
    """JAX's arrays cannot be written to, but donated."""

    def weights(self) -> Any:
        arrays, expected = [self.computed], "the weights as they were read before"
        if self.computed is None:
            in_score = arrays_of(self.arguments["score"]).values()
            arrays, expected = jax.tree.leaves((vars(self), *in_score)), "inputs as they were in the call"
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
            hint = "read the weights before a function takes its arguments over (donate_argnums)"
            raise ArgumentError(message("attention_weights", expected, "donated ones", hint=hint))
        return super().weights()


class Attention(BaseAttention[jax.Array], LoadsTorch, nnx.Module):
    """Base of the layers: their parameters, dropout in training, and the inputs of the last softmax."""

    _ops, _last_call_type = _OPS, _LastCall
    _calls_not_kept = "jit, grad and vmap, which keep nothing"
    _where = "outside jit, grad and vmap "

    def __init__(
        self,
        layer: Layer,
        dropout: float,
        keep_last: bool,
        *,
        deterministic: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self._set_options(layer, dropout, keep_last)
        options = {"dtype": dtype, "param_dtype": param_dtype}
        for part in layer.parts:
            setattr(self, part.name, _made(part, options, rngs))
        self.deterministic = deterministic
        self.dtype = dtype
        # Forked after the parameters, so that these are the same whatever the dropout is.
        self.rngs = nnx.data(rngs.dropout.fork() if rngs is not None and self.dropout else None)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the mode of a copy by ``nnx.view``; ``nnx.view_info`` reads this text.

        Args:
          deterministic: if True, dropout is off.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    @documented_call(_CALL_OPTIONS + RETURNS_CACHE + "    The cache has a capacity or a window.\n")
    @hides_unknown
    def __call__(  # with a cache the new cache is returned too
        self,
        queries: Any,
        keys: Any,
        values: Any,
        valid_lens: Any = None,
        mask: Any = None,
        *,
        bias: jax.Array | None = None,
        cache: KeyValueCache | None = None,
        deterministic: bool | None = None,
        rngs: Draws | None = None,
        **unknown: Never,
    ) -> Any:
        reject_unknown(self.__call__, unknown)
        keys, linears = self._unprepared(keys)
        inputs = _checked({"queries": queries, "keys": keys, "values": values})
        operands, arguments = self._operands(inputs, linears, valid_lens, mask, bias, cache)
        training = not (self.deterministic if deterministic is None else deterministic)
        dropout = self.dropout if training else 0.0
        seed = self._draw(rngs) if dropout else None
        out, _, cache = self._attend(_promoted(operands, self.dtype), arguments, dropout, seed)
        return out if cache is None else (out, cache)

    @staticmethod
    def _is_traced(*arrays: Any) -> bool:
        return any(isinstance(x, jax.core.Tracer) for x in arrays)

    @property
    def _last(self) -> LastCall | str | None:
        return _LAST.get(self)

    @_last.setter
    def _last(self, last: LastCall | str | None) -> None:
        _LAST[self] = last

    def _draw(self, rngs: Draws | None) -> Any:
        """Return a key for the dropout of one call."""
        source = self.rngs if rngs is None else rngs
        if isinstance(source, nnx.Rngs):
            source = source.dropout
        if source is None:
            expected = "an nnx.Rngs, for the layer or for the call, where dropout is active"
            raise ArgumentError(message("rngs", expected, None, hint="layer.eval() or deterministic=True turns it off"))
        return source() if isinstance(source, nnx.RngStream) else source

    def _project(self, linear: Linear, x: jax.Array) -> Any:
        module = self._sized(linear, {linear.input: x})
        if isinstance(module, nnx.Linear):
            shared.check_features(linear.input, x.shape[-1], module.in_features, linear.name)
        if _is_plain(module):
            operands = x, module.kernel[...], None if module.bias is None else module.bias[...]
            if module.dtype is not None or any(each is not None and each.dtype != x.dtype for each in operands):
                operands = module.promote_dtype(operands, dtype=module.dtype)
            if (product := _OPS.product_of_rows(*operands)) is not None:
                return product
        return with_nonfinite_rows_isolated(_OPS, x, module)

    def _read(self, part: Linear | Parameter, inputs: Mapping[str, jax.Array]) -> Any:
        if isinstance(part, Linear):
            module = getattr(self, part.name)
            return jnp.ravel(module.kernel[...]) if _is_plain(module) else self._vector(part, inputs["queries"])
        array = self._sized(part, inputs)[...]
        for name, size in zip(part.inputs, array.shape, strict=False):
            shared.check_features(name, inputs[name].shape[-1], size, part.name)
        return array

    def _sized(self, part: Linear | Parameter, inputs: Mapping[str, jax.Array]) -> Any:
        """Return the attribute of `part`, which takes the sizes it lacks from `inputs`, and keeps them."""
        attribute = getattr(self, part.name)
        if isinstance(attribute, Unsized):
            # A parameter made inside grad would get no gradient, silently.
            if trace_state() != _OUTSIDE:
                hint = "query_size=, key_size= and value_size= say how long the vectors are"
                expected = f"a first call outside jit, grad and vmap, which makes {part.name}"
                raise ArgumentError(message(" and ".join(part.inputs), expected, "one inside", hint=hint))
            attribute = attribute.made({name: x.shape[-1] for name, x in inputs.items()})
            setattr(self, part.name, attribute)
        return attribute

    def _load(self, arrays: Mapping[str, HostArray]) -> None:
        sizes = self._layer.sizes_in(arrays)
        parts = {part.name: getattr(self, part.name) for part in self._layer.parts}
        made = {name: part.made(sizes) for name, part in parts.items() if isinstance(part, Unsized)}
        shared.load_state(arrays, self._layer.torch_variables(parts | made, nnx.Linear), _assign)
        for name, part in made.items():
            setattr(self, name, part)


def _assign(parameter: Any, array: HostArray) -> None:
    parameter[...] = jnp.asarray(array, parameter.dtype)


def _checked(inputs: dict[str, Any]) -> dict[str, jax.Array]:
    """Return the inputs as JAX arrays; raise unless they are floating (batch, length, features) and belong together.

    NumPy arrays and variables (a learned query) are taken as every Flax layer takes them.
    """
    for name, x in inputs.items():
        if isinstance(x, nnx.Variable):
            inputs[name] = x.get_value()
        elif isinstance(x, np.ndarray):
            inputs[name] = jnp.asarray(x)
    shared.check_inputs(_OPS, inputs, jax.Array, expected="a jax.Array", hint="jnp.asarray(x) makes one")
    return inputs


def _is_plain(module: Any) -> bool:
    """Whether a module is a plain projection: a user may have replaced it by one with other options."""
    if type(module) is not nnx.Linear:
        return False
    return module.dot_general is lax.dot_general and not (module.precision or module.preferred_element_type)


def _promoted(operands: Sequence[jax.Array], dtype: Any) -> list[jax.Array]:
    """Return the operands in `dtype`, or in their promoted dtype; a cast to the same dtype takes 5 us."""
    dtypes = {x.dtype for x in operands}
    dtype = jnp.dtype(dtype) if dtype else dtypes.pop() if len(dtypes) == 1 else jnp.result_type(*operands)
    return [x if x.dtype == dtype and not x.weak_type else x.astype(dtype) for x in operands]


# ------------------------------------------------------------------ the layers


@final
@_documented(without=("param_dtype",))
class DotProductAttention(description.DotProductLayer, Attention):
    """Pooling by the dot product of queries and keys, softmax(q . k / sqrt(dim)) v."""


@final
@_documented(required=("rngs",))
class AdditiveAttention(description.AdditiveLayer, Attention, PreparesKeys[jax.Array]):
    """Pooling by the additive score w_v . tanh(W_q q + W_k k)."""

    def _checked_keys(self, keys: Any, linear: Linear) -> jax.Array:
        return _checked({"keys": keys, "values": keys})["keys"]


@final
@_documented(required=("rngs",))
class BilinearAttention(description.BilinearLayer, Attention):
    """Pooling by the bilinear score q . W k."""


@final
@_documented()
class GaussianAttention(description.GaussianLayer, Attention):
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2)."""


@final
@_documented(required=("rngs",))
class MultiHeadAttention(description.MultiHeadLayer, Attention):
    """Pooling in several heads, W_o concat_h(pool_h)."""
