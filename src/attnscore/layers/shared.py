"""What the layers of all frameworks share: sizes, parameters and their starting values, checks, scores, messages.

- Imports no framework: a layer file brings the arrays, its own way to hold parameters, and nothing else.
- A score of `MultiHeadAttention` is one line in each of two tables: which parameters it has, and what it makes of them.
- Starting values keep the variance of a score near that of a scaled dot product, whatever the width.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, Backend, is_unknown, may_equal
from attnscore.core.arguments import check_choice, is_whole, shown
from attnscore.core.dropout import check_dropout
from attnscore.errors import ArgumentError, AttnscoreError, DtypeError, FrameworkError, MaskError, ShapeError, message
from attnscore.masks import And, Dense, Mask, Not, Or
from attnscore.masks.shape_spec import shape_of
from attnscore.scores import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot

Shape = tuple[int, ...]
Kept = TypeVar("Kept")
"""What a layer keeps of a call."""
Constructor = TypeVar("Constructor", bound=Callable[..., None])

# The order of the constructors' arguments in older editions of "Dive into Deep Learning"; all but bias are required.
D2L_ADDITIVE = ("key_size", "query_size", "num_hiddens", "dropout")
D2L_MULTI_HEAD = ("key_size", "query_size", "value_size", "num_hiddens", "num_heads", "dropout", "bias")


@dataclass(frozen=True)
class Parameter:
    """Shape and starting values of one parameter: the constant `start`, or uniform within ±1/sqrt(fan_in)."""

    shape: Shape
    start: float = 0.0
    fan_in: int | None = None

    @property
    def bound(self) -> float:
        """Largest starting value of a parameter that starts at random; 0 for one that starts constant."""
        return 0.0 if self.fan_in is None else 1 / math.sqrt(max(1, self.fan_in))


def bilinear_parameter(query_size: int, key_size: int, heads: Shape = ()) -> Parameter:
    """W of q . W k. A score sums query_size * key_size products, so that is its fan-in.

    With the usual 1/sqrt(key_size) the variance of the scores grows with query_size, and the softmax starts saturated.
    """
    return Parameter((*heads, query_size, key_size), fan_in=query_size * key_size)


@dataclass(frozen=True)
class Heads:
    """The sizes of a multi-head layer, checked."""

    score: str
    count: int
    key_value_count: int
    width: int
    """Length of a head's values."""
    score_width: int
    """Length of a head's queries and keys; for the additive score its hidden units."""

    @classmethod
    def checked(
        cls, num_hiddens: int, num_heads: int, num_key_value_heads: int | None, score: str, score_hiddens: int | None
    ) -> Heads:
        """The sizes that a constructor's arguments mean.

        Raises
        ------
        ArgumentError
            An unknown score, a size that is no whole number above 0, `score_hiddens` for a score without hidden units.
        ShapeError
            Heads that do not divide.
        """
        check_size("num_hiddens", num_hiddens)
        check_size("num_heads", num_heads)
        check_size("num_key_value_heads", num_key_value_heads, optional=True)
        check_size("score_hiddens", score_hiddens, optional=True)
        check_choice("score", score, tuple(_MAKERS))
        if score_hiddens is not None and score != "additive":
            hint = "only the additive score has hidden units"
            raise ArgumentError(message("score_hiddens", f"None for score={score!r}", score_hiddens, hint=hint))
        kv = num_heads if num_key_value_heads is None else num_key_value_heads
        if num_hiddens % num_heads:
            raise ShapeError(message("num_hiddens", f"a multiple of num_heads ({num_heads})", num_hiddens))
        if num_heads % kv:
            raise ShapeError(message("num_key_value_heads", f"a number that divides num_heads ({num_heads})", kv))
        width = num_hiddens // num_heads
        return cls(score, num_heads, kv, width, score_hiddens or width)

    def parameters(self) -> dict[str, Parameter]:
        """The parameters of the score by name, one set per head on the first axis."""
        return _PARAMETERS[self.score](self) if self.score in _PARAMETERS else {}

    def make_score(self, arrays: Mapping[str, Array]) -> Any:
        """The score object over these parameters."""
        return _MAKERS[self.score](arrays)


# Learned as logarithms: a step of the optimiser multiplies, and cannot make a bandwidth negative.
_PARAMETERS: dict[str, Callable[[Heads], dict[str, Parameter]]] = {
    # W_q and W_k of the additive score are the layer's own, cut into heads.
    "additive": lambda heads: {"w_v": Parameter((heads.count, heads.score_width), fan_in=heads.score_width)},
    "bilinear": lambda heads: {"W": bilinear_parameter(heads.score_width, heads.score_width, heads=(heads.count,))},
    # exp(-|q - k|^2 / (2 b^2)) has q . k / b^2 in it: b^2 = sqrt(width) starts like the scaled dot product.
    "gaussian": lambda heads: {"log_bandwidth": Parameter((heads.count,), start=math.log(heads.score_width) / 4)},
    # The cosine of random vectors has variance 1/width.
    "cosine": lambda heads: {"log_scale": Parameter((heads.count,), start=math.log(heads.score_width) / 2)},
}
_MAKERS: dict[str, Callable[[Mapping[str, Array]], Any]] = {
    "dot": lambda _: Dot(),
    "scaled_dot": lambda _: ScaledDot(),
    "gaussian": lambda arrays: Gaussian(exp(arrays["log_bandwidth"])),
    "cosine": lambda arrays: Cosine(exp(arrays["log_scale"])),
    "additive": lambda arrays: Additive(arrays["w_v"]),
    "bilinear": lambda arrays: Bilinear(arrays["W"]),
}


def naming_arguments(older: tuple[str, ...]) -> Callable[[Constructor], Constructor]:
    """Make a constructor answer too many positional arguments by the keywords to use, and not by a bare TypeError.

    `older` is an order of arguments that such calls are likely to follow. The wrapped constructor raises ArgumentError
    for more positional arguments than it takes, and for one that is given by name as well.
    """

    def decorate(init: Constructor) -> Constructor:
        signature = inspect.signature(init)
        named = list(signature.parameters.values())[1:]
        places = [each.name for each in named if each.kind is each.POSITIONAL_OR_KEYWORD]
        keywords = [each.name for each in named if each.kind is each.KEYWORD_ONLY]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            twice = [name for name in places[: len(args)] if name in kwargs]
            if len(args) > len(places) or twice:
                owner = type(self).__name__
                expected = f"at most {len(places)} positional arguments ({', '.join(places)})"
                got = f"{len(args)}" + "".join(f", and {name} by name" for name in twice)
                hint = _named(owner, older, args, kwargs) or f"{', '.join([*places, *keywords])} may be given by name"
                raise ArgumentError(message(owner, expected, got, hint=hint))
            init(self, *args, **kwargs)

        # Keras reads it, and does not look behind a wrapper.
        checked.__signature__ = signature  # type: ignore[attr-defined]  # functions have room for it
        return cast(Constructor, checked)

    return decorate


def _named(owner: str, older: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return a call in the order `older` with all names written out; None where it is no such call."""
    values = dict(zip(older, args, strict=False))
    others = {name: kwargs[name] for name in older if name in kwargs}
    if len(args) > len(older) or values.keys() & others.keys() or {*older} - {"bias"} - {*values, *others}:
        return None
    return f"{owner}({', '.join(f'{name}={shown(value)}' for name, value in (values | others).items())})"


def exp(x: Array) -> Array:
    """The exponential, in the framework of `x`."""
    return backends.of({"parameter": x}).exp(x)


def check_size(name: str, size: Any, *, optional: bool = False) -> None:
    """Raise ArgumentError unless `size` is a whole number above 0 (or None, when `optional`)."""
    if size is None and optional:
        return
    if not is_whole(size) or size <= 0:
        wanted = "a whole number above 0" + (" or None" if optional else "")
        raise ArgumentError(message(name, wanted, shown(size)))


def check_probability(dropout: Any) -> float:
    """The dropout of a layer; ArgumentError unless it is in [0, 1)."""
    check_dropout(dropout, 0, lambda: 0)
    return float(dropout)


def check_axes(shapes: Mapping[str, Shape]) -> None:
    """Raise ShapeError unless queries, keys, values are (batch, length, features) and belong together."""
    for name, shape in shapes.items():
        if len(shape) != 3:
            hint = "attnscore.attend takes any number of axes" if len(shape) > 3 else f"{name}[None] is a batch of 1"
            raise ShapeError(message(name, "3 axes (batch, length, features)", len(shape), shapes=shapes, hint=hint))
    if not may_equal(shapes["keys"][1], shapes["values"][1]):
        wanted = f"as many positions as keys ({shapes['keys'][1]})"
        raise ShapeError(message("values", wanted, shapes["values"][1], shapes=shapes))
    batches = [shape[0] for shape in shapes.values() if not is_unknown(shape[0])]
    # Not a set: lengths in a trace of torch's are equal, and not the same.
    several = [n for n in batches if n != 1]
    if any(n != several[0] for n in several):
        raise ShapeError(message(", ".join(shapes), "one batch size, or 1", batches, shapes=shapes))


def check_features(name: str, got: int, expected: int, owner: str) -> None:
    """Raise ShapeError unless the vectors of input `name` are as long as parameter `owner` takes them."""
    if got != expected:
        raise ShapeError(message(name, f"vectors of length {expected}, which {owner} takes", got))


def split_heads(x: Array, heads: int, width: int) -> Array:
    """(batch, length, heads * width) as (batch, length, head, width): no heads are moved."""
    return x.reshape((*x.shape[:-1], heads, width))


def scores_shape(queries: Array, keys: Array, values: Array) -> tuple[int, int, int]:
    """(batch, query, key) of a call; a batch of 1 serves a larger one."""
    batch = next((x.shape[0] for x in (queries, keys, values) if x.shape[0] != 1), 1)
    return batch, queries.shape[1], keys.shape[1]


def over_heads(mask: Any, shape: tuple[int | None, ...]) -> Any:
    """A caller's mask for scores with a head axis, in which boolean arrays (batch, query, key) hold for all heads.

    Without it an array (batch, query, key) would be read as (head, query, key), silently where the numbers agree.
    `shape` is (batch, query, key). Arrays with four axes say themselves what each head sees.
    """
    if isinstance(mask, (And, Or)):
        parts = {name: over_heads(getattr(mask, name), shape) for name in ("first", "second")}
        return dataclasses.replace(mask, **parts)
    if isinstance(mask, Not):
        return Not(over_heads(mask.mask, shape))
    if mask is None or (isinstance(mask, Mask) and not isinstance(mask, Dense)):
        return mask
    array = mask.array if isinstance(mask, Dense) else mask
    found = shape_of(array)
    if len(found) != 3:
        return mask
    if any(have != 1 and not may_equal(have, want) for have, want in zip(found, shape, strict=True)):
        raise MaskError(message("mask", f"an array that broadcasts to (batch, query, key) = {shape}", found))
    return Dense((array if hasattr(array, "shape") else np.asarray(array))[:, None])


def check_inputs(
    ops: Backend, inputs: Mapping[str, Any], kind: type | tuple[type, ...], *, wanted: str, hint: str
) -> None:
    """Raise unless queries, keys, values are dense floating arrays (batch, length, features) that belong together.

    They are instances of `kind`, which messages call `wanted`; `hint` says what makes one.
    """
    for name, x in inputs.items():
        if not isinstance(x, kind):
            raise FrameworkError(message(name, wanted, type(x).__name__, hint=hint))
        backends.check_dense(ops, {name: x})
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x)))
    check_axes({name: ops.shape(x) for name, x in inputs.items()})


def last_call(kept: Kept | str | None, keep_last: bool, *, where: str = "") -> Kept:
    """What a layer kept of its last call; raises AttnscoreError when it kept nothing (None, or why not).

    It is no AttributeError: frameworks answer that one with a search of their own, which would hide the reason.
    `where` names the calls that count, in a framework whose compiled ones leave no trace on the layer.
    """
    if kept is None:
        if keep_last:
            got = f"none {where}since it was made, copied or loaded"
        else:
            got = "keep_last=False, which keeps nothing"
        raise AttnscoreError(message("attention_weights", "a call of the layer before reading", got))
    if isinstance(kept, str):
        hint = "call the layer itself once; attnscore.attention_weights computes weights anywhere"
        raise AttnscoreError(message("attention_weights", "a call outside " + kept, "one inside", hint=hint))
    return kept
