"""Every layer, described once for all frameworks: options, parameters, starting values, mathematics.

- Imports no framework. A framework's file holds the parameters that a description lists, and gives `BaseAttention`
  three primitives: apply a projection, read a parameter of the score, reshape.
- A layer is W_o join(pool(split W_q q, split W_k k, split W_v v)) under its score; a description lists which of these
  projections there are.
- A score of `MultiHeadAttention` is one line in each of two tables: its parameters, and the score made of them.
- After the projections come the norm of queries and keys, the rotary embedding, and the cache, in this order.
- Starting values keep the variance of a score near a scaled dot product's, whatever the dimension.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from attnscore import backends
from attnscore.analysis.weights import attention_weights
from attnscore.api import attend
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base import thresholds
from attnscore.base.arguments import check_flag, check_positive, shown
from attnscore.base.layout import may_equal
from attnscore.errors import ArgumentError, AttnscoreError, FrameworkError, ShapeError, message
from attnscore.kv_cache import KeyValueCache
from attnscore.layers import score_template, shared
from attnscore.masks import Mask
from attnscore.plans.prepared import PreparedKeys, prepare_keys
from attnscore.problem import normalizers
from attnscore.problem.dropout import check_dropout
from attnscore.scores import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot
from attnscore.scores.base import with_arrays, with_nonfinite_rows_isolated

A = TypeVar("A")
"""The array of a framework."""

INPUTS = ("queries", "keys", "values")
# The inputs of the two projections that take no input of the call.
HIDDEN, POOLED = "hidden units", "pooled heads"
# Added to the mean square of queries and keys before its root.
NORM_EPSILON = 1e-6


# ------------------------------------------------------------------ the parts of a layer


@dataclass(frozen=True)
class Linear:
    """A projection of `size` features to `units`; `input` is one of `INPUTS`, `HIDDEN` or `POOLED`."""

    name: str
    input: str
    size: int | None
    """None: taken from the first call."""
    units: int
    bias: bool = False
    heads: int = 0
    """Number of heads that split the result; 0 leaves it whole."""

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of the weight in PyTorch."""
        return self.units, self.size

    def sized(self, sizes: Sequence[int]) -> Linear:
        """Return the projection with a size of `sizes` in place of an unknown one."""
        return replace(self, size=self.size or sizes[0])

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of the call whose features the last axes of the weight take."""
        return (self.input,) if self.input in INPUTS else ()

    @property
    def torch_names(self) -> tuple[str, ...]:
        """Names in PyTorch's ``state_dict``: the weight, and the bias if there is one."""
        return (f"{self.name}.weight", f"{self.name}.bias")[: 1 + self.bias]


@dataclass(frozen=True)
class Parameter:
    """Shape and starting values of an array: the constant `start`, or uniform within ±1/sqrt(fan-in)."""

    name: str
    shape: tuple[int | None, ...]
    start: Any = 0.0
    """A number, or nested tuples of numbers in this shape."""
    fan_in_axes: int = 0
    """Number of trailing axes that a score sums over: their product is the fan-in. 0: the parameter starts constant."""
    inputs: tuple[str, ...] = ()
    """The inputs whose features the axes take; an axis of None is sized at the first call."""

    @property
    def torch_names(self) -> tuple[str, ...]:
        """Name in PyTorch's ``state_dict``, where a matrix that is sized by the inputs is a module."""
        return (f"{self.name}.weight" if self.inputs else self.name,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """`shape`, with 0 for a size that is unknown."""
        return tuple(size or 0 for size in self.shape)

    @property
    def bound(self) -> float:
        """Largest starting value of a parameter that starts at random; 0 for one that starts constant."""
        return 1 / math.sqrt(max(1, math.prod(self.sizes[-self.fan_in_axes :]))) if self.fan_in_axes else 0.0

    def sized(self, sizes: Sequence[int]) -> Parameter:
        """Return the parameter with `sizes` in place of unknown sizes of its first axes."""
        first = [known_size or size for known_size, size in zip(self.shape, sizes, strict=False)]
        return replace(self, shape=(*first, *self.shape[len(first) :]))


@dataclass(frozen=True)
class Layer:
    """One layer: its score, options and parameters. Plain data, compared by value."""

    score: Any
    """A name, or a template of `score_template`."""
    options: tuple[tuple[str, Any], ...] = ()
    """The checked arguments of a configuration, with None resolved where a size follows from others."""
    hidden: tuple[str, ...] = ()
    """The options that ``repr`` leaves out."""
    linears: tuple[Linear, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    heads: int = 0
    """Number of heads; 0: a layer without heads."""
    score_parts: tuple[Linear | Parameter, ...] = field(init=False, repr=False, compare=False)
    """The projections and parameters whose arrays the score has."""
    after_keys: tuple[Linear, ...] = field(init=False, repr=False, compare=False)
    """The projections of a call whose keys are projected already."""
    on_inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Names of the projections and parameters that are sized by the inputs."""
    key: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    """Part of the key under which checked calls are cached, next to the signature of the arrays."""
    fixed_score: Any = field(init=False, repr=False, compare=False)
    """The score of a layer without parameters; else None."""
    normalizer: Any = field(init=False, repr=False, compare=False)
    """How scores become weights, as `attend` takes it."""
    _options: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Past `__setattr__`, which raises in a frozen class.
        vars(self).update(
            _options=dict(self.options),
            normalizer=dict(self.options).get("normalizer", "softmax"),
            score_parts=(*[linear for linear in self.linears if linear.input == HIDDEN], *self.parameters),
            after_keys=tuple(linear for linear in self.linears if linear.input != "keys"),
            on_inputs=tuple(part.name for part in self.parts if part.inputs),
            key=(self.score, self.options),
        )
        vars(self)["fixed_score"] = None if self.parts else self.make_score({})

    @property
    def parts(self) -> tuple[Linear | Parameter, ...]:
        """Projections and parameters, in the order in which they are made."""
        return (*self.linears, *self.parameters)

    def make_score(self, arrays: dict[str, Array]) -> Any:
        """Return the score object over its arrays, by name."""
        arguments = self._options | arrays
        if type(self.score) is str:
            return _SCORES[self.score](arguments)
        return score_template.filled(self.score, arrays, lambda name: _SCORES[name](arguments))

    def to_config(self) -> dict[str, Any]:
        """Return the options as plain data."""
        config = {**self._options}
        if isinstance(entmax := config.get("normalizer"), normalizers.Entmax):
            config["normalizer"] = {"alpha": entmax.alpha}
        return config | ({"score": score_template.to_config(self.score)} if "score" in config else {})

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that `to_config` converted to plain data, as objects again."""
        options = {"score": score_template.from_config(config["score"])} if "score" in config else {}
        if isinstance(entmax := config.get("normalizer"), Mapping):
            options["normalizer"] = normalizers.Entmax(**entmax)
        return options

    def torch_variables(self, modules: Mapping[str, Any], dense: type) -> dict[str, tuple[Any, bool]]:
        """Return the variables of a layer by their names in PyTorch, and whether each is transposed there.

        `modules` are the projections and parameters by name; projections of another class than `dense` are left out.
        """
        variables = {}
        for part in self.parts:
            module = modules[part.name]
            if isinstance(part, Parameter):
                variables[part.torch_names[0]] = module, False
            elif isinstance(module, dense):
                arrays = (module.kernel, True), (module.bias, False)  # type: ignore[attr-defined]
                variables |= dict(zip(part.torch_names, arrays, strict=False))
        return variables

    def sizes_in(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        """Return the features of the inputs according to a ``state_dict``, 1 where it does not say."""
        sizes = dict.fromkeys(INPUTS, 1)
        for part in self.parts:
            weight = arrays.get(part.torch_names[0])
            if part.inputs and weight is not None and weight.ndim == 2:
                sizes |= zip(part.inputs, map(int, weight.shape[-len(part.inputs) :]), strict=True)
        return sizes


def option(name: str) -> Any:
    """Return the property that reads an option of a layer."""
    return property(lambda layer: layer._layer._options[name], doc=f"The constructor's argument `{name}`.")


# ------------------------------------------------------------------ the layers


# In every framework the class of a layer inherits its constructor and options from its description here, which passes
# the arguments `framework` on to the next base, the framework's. Children of `object`, as PyTorch's base needs. The
# docstring of a description begins the docstring of the layer.


class DotProductLayer:
    """Pooling by the (scaled) dot product of queries and keys of one dimension: softmax(q . k / sqrt(dim)) v."""

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        scaled: bool = True,
        normalizer: Any = "softmax",
        keep_last: bool = True,
        **framework: Any,
    ) -> None:
        options = ("scaled", check_flag("scaled", scaled)), *_normalizer_option(normalizer)
        layer = Layer("scaled_dot" if scaled else "dot", options, hidden=("scaled",) if scaled else ())
        super().__init__(layer, dropout, keep_last, **framework)  # type: ignore[call-arg]  # the framework's base

    scaled = option("scaled")


class AdditiveLayer:
    """Pooling by the additive (Bahdanau) score w_v . tanh(W_q q + W_k k), for queries and keys of any dimensions.

    The projections ``W_q`` and ``W_k`` have num_hiddens features, ``w_v`` has one.
    """

    _older_order = ("key_size", "query_size", "num_hiddens", "dropout")

    def __init__(
        self,
        num_hiddens: int,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        normalizer: Any = "softmax",
        keep_last: bool = True,
        **framework: Any,
    ) -> None:
        units = shared.check_size("num_hiddens", num_hiddens)
        sizes = _checked_sizes(key_size=key_size, query_size=query_size)
        linears = (
            Linear("W_q", "queries", sizes["query_size"], units),
            Linear("W_k", "keys", sizes["key_size"], units),
            Linear("w_v", HIDDEN, units, 1),
        )
        options = ("num_hiddens", units), *sizes.items(), *_normalizer_option(normalizer)
        layer = Layer("additive", options, hidden=("num_hiddens", *sizes), linears=linears)
        super().__init__(layer, dropout, keep_last, **framework)  # type: ignore[call-arg]  # the framework's base

    num_hiddens, key_size, query_size = map(option, ("num_hiddens", "key_size", "query_size"))


class BilinearLayer:
    """Pooling by the bilinear (Luong's "general") score q . W k, for queries and keys of any dimensions.

    The parameter ``W``, in PyTorch and MXNet ``W.weight``, is (query_size, key_size).
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        normalizer: Any = "softmax",
        keep_last: bool = True,
        **framework: Any,
    ) -> None:
        sizes = _checked_sizes(key_size=key_size, query_size=query_size)
        shape = sizes["query_size"], sizes["key_size"]
        # A score sums query_size * key_size products: with the usual fan-in, key_size, the variance of the scores grows
        # with query_size, and the softmax starts saturated.
        matrix = Parameter("W", shape, fan_in_axes=2, inputs=("queries", "keys"))
        options = *sizes.items(), *_normalizer_option(normalizer)
        layer = Layer("bilinear", options, hidden=tuple(sizes), parameters=(matrix,))
        super().__init__(layer, dropout, keep_last, **framework)  # type: ignore[call-arg]  # the framework's base

    key_size, query_size = map(option, ("key_size", "query_size"))


class GaussianLayer:
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2): Nadaraya-Watson regression.

    The parameter, if the bandwidth is learned, is ``log_bandwidth``.
    """

    log_bandwidth: Any

    def __init__(
        self,
        bandwidth: float = 1.0,
        dropout: float = 0.0,
        *,
        learn_bandwidth: bool = False,
        normalizer: Any = "softmax",
        keep_last: bool = True,
        **framework: Any,
    ) -> None:
        start, learn = check_positive("bandwidth", bandwidth), check_flag("learn_bandwidth", learn_bandwidth)
        options = ("bandwidth", start), ("learn_bandwidth", learn), *_normalizer_option(normalizer)
        learned = Parameter("log_bandwidth", (), start=math.log(start))
        hidden, parameters = ((), (learned,)) if learn else (("learn_bandwidth",), ())
        layer = Layer("gaussian", options, hidden=hidden, parameters=parameters)
        super().__init__(layer, dropout, keep_last, **framework)  # type: ignore[call-arg]  # the framework's base
        if not learn:
            self.log_bandwidth = None

    start, learn_bandwidth = map(option, ("bandwidth", "learn_bandwidth"))

    @property
    def bandwidth(self) -> Any:
        """The current bandwidth: a number, or an array if it is learned."""
        layer: Any = self
        return self.start if self.log_bandwidth is None else _exp(layer._read(layer._layer.parameters[0], {}))


class MultiHeadLayer:
    """Project queries, keys and values, attend in each head, join the heads, project: W_o concat_h(pool_h).

    Names (``W_q``, ``W_k``, ``W_v``, ``W_o``), shapes and the order of the heads match Dive into Deep Learning. The
    parameters of the score are attributes of the layer.
    """

    _older_order = ("key_size", "query_size", "value_size", "num_hiddens", "num_heads", "dropout", "bias")

    def __init__(
        self,
        num_hiddens: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        score: Any = "scaled_dot",
        score_hiddens: int | None = None,
        num_key_value_heads: int | None = None,
        sink: bool = False,
        qk_norm: bool = False,
        normalizer: Any = "softmax",
        rotary: Any = None,
        query_size: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        keep_last: bool = True,
        **framework: Any,
    ) -> None:
        bias = check_flag("bias", bias)
        units, heads = shared.check_size("num_hiddens", num_hiddens), shared.check_size("num_heads", num_heads)
        counts = _checked_sizes(num_key_value_heads=num_key_value_heads, score_hiddens=score_hiddens)
        sizes = _checked_sizes(query_size=query_size, key_size=key_size, value_size=value_size)
        is_additive = "additive" in score_template.names_in(score, tuple(_SCORES))
        if score_hiddens is not None and not is_additive:
            hint = "only the additive score has hidden units"
            raise ArgumentError(message("score_hiddens", f"None for score={score!r}", score_hiddens, hint=hint))
        kv_heads = counts["num_key_value_heads"] or heads
        if units % heads:
            raise ShapeError(message("num_hiddens", f"a multiple of num_heads ({heads})", units))
        if heads % kv_heads:
            raise ShapeError(message("num_key_value_heads", f"a number that divides num_heads ({heads})", kv_heads))
        dim = units // heads
        # The features of queries and keys in one head; for the additive score its hidden units.
        score_dim = counts["score_hiddens"] or dim
        normalizer_option = _normalizer_option(normalizer)
        if check_flag("sink", sink) and normalizer_option:
            raise ArgumentError(message("sink", "False, as the normalizer is not the softmax", True))
        flags = {"sink": sink, "qk_norm": check_flag("qk_norm", qk_norm)}
        options = (
            ("num_hiddens", units),
            ("num_heads", heads),
            ("bias", bias),
            ("score", score),
            ("score_hiddens", score_dim if is_additive else None),
            ("num_key_value_heads", kv_heads),
            *sizes.items(),
            # Left out where they are off, so that older configurations stay the same.
            *[(name, True) for name, is_on in flags.items() if is_on],
            *normalizer_option,
        )
        is_default_of = {"score_hiddens": score_dim == dim, "num_key_value_heads": kv_heads == heads}
        linears = (
            Linear("W_q", "queries", sizes["query_size"], heads * score_dim, bias, heads),
            Linear("W_k", "keys", sizes["key_size"], kv_heads * score_dim, bias, kv_heads),
            Linear("W_v", "values", sizes["value_size"], kv_heads * dim, bias, kv_heads),
            Linear("W_o", POOLED, units, units, bias),
        )
        layer = Layer(
            score,
            options,
            hidden=("bias", *sizes, *[name for name, is_default in is_default_of.items() if is_default]),
            linears=linears,
            parameters=_parameters_of_heads(score, heads, score_dim, **flags),
            heads=heads,
        )
        super().__init__(layer, dropout, keep_last, **framework)  # type: ignore[call-arg]  # the framework's base
        if rotary is not None and not callable(rotary):
            raise ArgumentError(message("rotary", "a function of queries, keys and positions, or None", shown(rotary)))
        self.rotary = rotary

    num_hiddens, num_heads = map(option, ("num_hiddens", "num_heads"))


def _parameters_of_heads(score: Any, heads: int, dim: int, *, sink: bool, qk_norm: bool) -> tuple[Parameter, ...]:
    """Return the parameters of the score, the sink and the norms of `MultiHeadAttention`."""
    parameters: list[Parameter] = []
    for name in score_template.names_in(score, tuple(_SCORES)):
        parameters += _PARAMETERS[name](heads, dim) if name in _PARAMETERS else ()
    parameters += [Parameter(name, x.shape, start=_nested(x)) for name, x in score_template.arrays_in(score).items()]
    parameters += [Parameter("sink", (heads,))] if sink else []
    return *parameters, *[Parameter(name, (dim,), start=1.0) for name in _NORMS if qk_norm]


def _checked_sizes(**sizes: Any) -> dict[str, int | None]:
    return {name: shared.check_size(name, size, optional=True) for name, size in sizes.items()}


def _normalizer_option(normalizer: Any) -> tuple[tuple[str, Any], ...]:
    """Return the option of a normalizer that `attend` takes; none for the softmax, as in older configurations."""
    return () if normalizers.resolve(normalizer) is None else (("normalizer", normalizer),)


def _nested(x: Any) -> Any:
    """Return the numbers of an array as nested tuples, which compare by value."""
    return tuple(map(_nested, x)) if x.ndim else float(x)


# The scales of the norms of queries and keys.
_NORMS = ("q_norm", "k_norm")
# The parameters of a score in `MultiHeadAttention`, one set per head on the first axis, from (heads, dim). Bandwidth
# and scale are learned as logarithms: a step of the optimiser multiplies, and cannot make them negative.
_PARAMETERS: dict[str, Callable[[int, int], tuple[Parameter, ...]]] = {
    # The additive score shares W_q and W_k with the layer, split into heads.
    "additive": lambda heads, dim: (Parameter("w_v", (heads, dim), fan_in_axes=1),),
    "bilinear": lambda heads, dim: (Parameter("W", (heads, dim, dim), fan_in_axes=2),),
    # exp(-|q - k|^2 / (2 b^2)) has q . k / b^2 in it: b^2 = sqrt(dim) starts like the scaled dot product.
    "gaussian": lambda heads, dim: (Parameter("log_bandwidth", (heads,), start=math.log(dim) / 4),),
    # The cosine of random vectors has variance 1/dim.
    "cosine": lambda heads, dim: (Parameter("log_scale", (heads,), start=math.log(dim) / 2),),
}
# The scores, from options and arrays by name.
_SCORES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "dot": lambda _: Dot(),
    "scaled_dot": lambda _: ScaledDot(),
    "gaussian": lambda arguments: Gaussian(
        _exp(arguments["log_bandwidth"]) if "log_bandwidth" in arguments else arguments["bandwidth"]
    ),
    "cosine": lambda arguments: Cosine(_exp(arguments["log_scale"])),
    "additive": lambda arguments: Additive(arguments["w_v"]),
    "bilinear": lambda arguments: Bilinear(arguments["W"]),
}


def _exp(x: Array) -> Array:
    return backends.of({"parameter": x}).exp(x)


# ------------------------------------------------------------------ the call


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
        key = keys.key
        shared.check_features("keys", key.shape[-1], self._layer.after_keys[0].units, "w_v")
        return key, self._layer.after_keys

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

        With a cache, these include the cache that holds the new positions too. `positions` are for a rotary embedding;
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
        if _NORMS[0] in arrays:
            query, key = (_normalized(x, arrays[name]) for x, name in zip((query, key), _NORMS, strict=True))
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
        cache = arguments.pop("cache", None)
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
        if cache is not None:
            cache.hold_for(out)
        return self._output(out) if heads else out, weights, cache

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
        positions = ops.reshape(ops.positions(0, length, key), (1, -1))
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
    """Append a call's keys and values to a cache, and return its operands and arguments over all positions."""
    if not isinstance(cache, KeyValueCache) or cache.score is not None or cache.head_axis != -2:
        hint = "the score is that of the layer"
        raise ArgumentError(message("cache", "a KeyValueCache(head_axis=-2) without a score", repr(cache), hint=hint))
    prepared = prepare_keys(arguments["score"], key, head_axis=-2)
    # Not with parameters per query head, each of which would need a copy of the keys: few queries gain nothing.
    if prepared.key.shape == key.shape:
        key, arguments["score"] = prepared.key, prepared.score
    cache = cache._append(key, value, "valid_lens", arguments["valid_lens"])
    shape = (query.shape[0], query.shape[1], cache.slots)
    over_slots = cache.arguments(query, mask=shared.over_heads(arguments["mask"], shape))
    operands = query, over_slots.pop("key"), over_slots.pop("value")
    return operands, arguments | over_slots | {"cache": cache}


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
        arrays: dict[str, shared.HostArray] = {}
        for name, x in state.items():
            if (array := backends.of({name: x}).host(x)) is None:
                expected = "an array whose numbers can be seen"
                raise ArgumentError(message(name, expected, "one on a device", hint="x.cpu()"))
            arrays[name] = array
        self._load(arrays)

    @abstractmethod
    def _load(self, arrays: Mapping[str, shared.HostArray]) -> None:
        """Assign a checkpoint, and make the parameters that were not sized yet."""
