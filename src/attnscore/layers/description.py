"""Every layer, described once for all frameworks: options, parameters, starting values.

- Imports no framework. A framework's file holds the parameters that a description lists.
- A layer is W_o join(pool(split W_q q, split W_k k, split W_v v)) under its score; a description lists which of these
  projections there are. `layers.base` computes it.
- A score of `MultiHeadAttention` is one line in each of two tables: its parameters, and the score made of them.
- Starting values keep the variance of a score near a scaled dot product's, whatever the dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attnscore import backends
from attnscore.backends.base import Array
from attnscore.base.arguments import check_flag, check_positive, shown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.layers import score_template, shared
from attnscore.problem import normalizers
from attnscore.scores import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot

INPUTS = ("queries", "keys", "values")
# The inputs of the two projections that take no input of the call.
HIDDEN, POOLED = "hidden units", "pooled heads"


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
    on_inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Names of the projections and parameters that are sized by the inputs."""
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
            on_inputs=tuple(part.name for part in self.parts if part.inputs),
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
    return *parameters, *[Parameter(name, (dim,), start=1.0) for name in NORMS if qk_norm]


def _checked_sizes(**sizes: Any) -> dict[str, int | None]:
    return {name: shared.check_size(name, size, optional=True) for name, size in sizes.items()}


def _normalizer_option(normalizer: Any) -> tuple[tuple[str, Any], ...]:
    """Return the option of a normalizer that `attend` takes; none for the softmax, as in older configurations."""
    return () if normalizers.resolve(normalizer) is None else (("normalizer", normalizer),)


def _nested(x: Any) -> Any:
    """Return the numbers of an array as nested tuples, which compare by value."""
    return tuple(map(_nested, x)) if x.ndim else float(x)


# The scales of the norms of queries and keys.
NORMS = ("q_norm", "k_norm")
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
