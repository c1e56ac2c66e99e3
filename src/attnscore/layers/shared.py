"""Functions of the layers of all frameworks: constructors, checks, masks over heads, PyTorch's checkpoints.

Imports no framework. `attnscore.layers.description` describes the layers themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Backend, HostArray
from attnscore.base.arguments import is_whole, reject_unknown, shown
from attnscore.base.layout import is_unknown, may_equal
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, MaskError, ShapeError, message
from attnscore.masks import And, Dense, Mask, Not, Or
from attnscore.masks.base import map_atoms
from attnscore.masks.shape_spec import shape_of
from attnscore.scores import arrays_of

Class = TypeVar("Class", bound=type)


def arrays_in(mask: Any) -> list[Any]:
    """Return the arrays in a mask; an array itself."""
    return [*mask.arrays().values()] if isinstance(mask, Mask) else [mask] if backends.is_array(mask) else []


def arrays_of_weights(query: Any, key: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the arrays of a call that its weights depend on."""
    others = (arguments.get(name) for name in ("valid_lens", "bias", "sink"))
    others = (x for x in others if backends.is_array(x))
    return [query, key, *others, *arrays_in(arguments["mask"]), *arrays_of(arguments["score"]).values()]


def with_constructor(cls: Class, without: Collection[str], required: Collection[str]) -> Class:
    """Give a layer's class one constructor, whose signature has the arguments of its description and its framework.

    The constructor raises TypeError for an unknown argument or one of `without`, and for a missing one; those of
    `required` have no default. With an `_older_order` of the class, it raises ArgumentError for too many positional
    arguments, with keywords to use.
    """
    layer_class: Any = cls
    described, framework = (inspect.signature(base.__init__).parameters for base in layer_class.__bases__[:2])
    parameters = [x for x in described.values() if x.kind is not x.VAR_KEYWORD]
    parameters += [x for x in framework.values() if x.kind >= x.KEYWORD_ONLY and x.name not in without]
    parameters = [x.replace(default=x.empty) if x.name in required else x for x in parameters]
    inherited, names = layer_class.__init__, {x.name for x in parameters}
    takes_others = any(x.kind is x.VAR_KEYWORD for x in parameters)
    # Those without a default, `self` aside.
    needed = [(i, x.name) for i, x in enumerate(parameters[1:]) if x.default is x.empty and x.kind is not x.VAR_KEYWORD]

    @functools.wraps(inherited)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        known = {*kwargs} - {*without} if takes_others else names
        reject_unknown(cls, {name: x for name, x in kwargs.items() if name not in known})
        if missing := [name for i, name in needed if i >= len(args) and name not in kwargs]:
            raise TypeError(f"{cls.__name__}() misses the required argument {missing[0]!r}")
        if hasattr(cls, "_older_order"):
            _check_positional(cls.__name__, parameters[1:], cls._older_order, args, kwargs)
        inherited(self, *args, **kwargs)

    # Keras reads the signature without following __wrapped__.
    init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    layer_class.__init__ = init
    return cls


def _check_positional(
    owner: str,
    parameters: Sequence[inspect.Parameter],
    older_order: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Raise ArgumentError for more positional arguments than `owner` takes, and for one that is given by name as well.

    The hint names the keywords of a call in the order of older editions of "Dive into Deep Learning".
    """
    places = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    twice = [name for name in places[: len(args)] if name in kwargs]
    if len(args) > len(places) or twice:
        expected = f"at most {len(places)} positional arguments ({', '.join(places)})"
        got = f"{len(args)}" + "".join(f", and {name} by name" for name in twice)
        keywords = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
        hint = f"{', '.join([*places, *keywords])} may be given by name"
        values = dict(zip(older_order, args, strict=False))
        others = {name: kwargs[name] for name in older_order if name in kwargs}
        # All but bias are required there.
        is_older = {*older_order} - {"bias"} <= {*values, *others} and not values.keys() & others.keys()
        if is_older and len(args) <= len(older_order):
            hint = f"{owner}({', '.join(f'{name}={shown(value)}' for name, value in (values | others).items())})"
        raise ArgumentError(message(owner, expected, got, hint=hint))


def check_size(name: str, size: Any, *, optional: bool = False) -> Any:
    """Return a size as an int; raise ArgumentError unless it is a whole number above 0 (or None, when `optional`)."""
    if size is None and optional:
        return None
    if not is_whole(size) or size <= 0:
        expected = "a whole number above 0" + (" or None" if optional else "")
        raise ArgumentError(message(name, expected, shown(size)))
    return int(size)


def check_axes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ShapeError unless queries, keys, values are (batch, length, features) and belong together."""
    for name, shape in shapes.items():
        if len(shape) != 3:
            hint = "attnscore.attend takes any number of axes" if len(shape) > 3 else f"{name}[None] is a batch of 1"
            raise ShapeError(message(name, "3 axes (batch, length, features)", len(shape), shapes=shapes, hint=hint))
    if not may_equal(shapes["keys"][1], shapes["values"][1]):
        expected = f"as many positions as keys ({shapes['keys'][1]})"
        raise ShapeError(message("values", expected, shapes["values"][1], shapes=shapes))
    batches = [shape[0] for shape in shapes.values() if not is_unknown(shape[0])]
    # Not a set: in a trace by PyTorch two equal lengths are different objects.
    several = [n for n in batches if n != 1]
    if any(n != several[0] for n in several):
        raise ShapeError(message(", ".join(shapes), "one batch size, or 1", batches, shapes=shapes))


def check_features(name: str, got: int, expected: int, owner: str) -> None:
    """Raise ShapeError unless input `name` has the features that parameter `owner` takes."""
    if got != expected:
        raise ShapeError(message(name, f"vectors of length {expected}, which {owner} takes", got))


def scores_shape(queries: Sequence[Any], keys: Sequence[Any], values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return (batch, query, key) of a call from the shapes of its inputs; a batch of 1 broadcasts to a larger one."""
    batch = next((shape[0] for shape in (queries, keys, values) if shape[0] != 1), 1)
    return batch, queries[1], keys[1]


def over_heads(mask: Any, shape: tuple[int | None, ...]) -> Any:
    """Return a caller's mask with a head axis in its boolean arrays (batch, query, key).

    Otherwise an array (batch, query, key) would be read as (head, query, key), silently where the sizes agree. `shape`
    is (batch, query, key). Arrays with four axes already differ by head.
    """
    if isinstance(mask, (And, Or, Not)):
        return map_atoms(mask, functools.partial(over_heads, shape=shape))
    if mask is None or (isinstance(mask, Mask) and not isinstance(mask, Dense)):
        return mask
    array = mask.array if isinstance(mask, Dense) else mask
    mask_shape = shape_of(array)
    if len(mask_shape) != 3:
        return mask
    if any(size != 1 and not may_equal(size, full) for size, full in zip(mask_shape, shape, strict=True)):
        raise MaskError(message("mask", f"an array that broadcasts to (batch, query, key) = {shape}", mask_shape))
    return Dense((array if hasattr(array, "shape") else np.asarray(array))[:, None])


def check_inputs(
    ops: Backend, inputs: Mapping[str, Any], kind: type | tuple[type, ...], *, expected: str, hint: str
) -> None:
    """Raise unless queries, keys, values are dense floating arrays (batch, length, features) that belong together.

    They are instances of `kind`, which messages call `expected`; `hint` says how to make one.
    """
    for name, x in inputs.items():
        if not isinstance(x, kind):
            raise FrameworkError(message(name, expected, type(x).__name__, hint=hint))
    backends.check_dense(ops, inputs)
    for name, x in inputs.items():
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x)))
    check_axes({name: ops.shape(x) for name, x in inputs.items()})


def check_names(arrays: Mapping[str, HostArray], names: Iterable[str]) -> None:
    """Raise ArgumentError unless a state has arrays of these names."""
    if set(names) != set(arrays):
        raise ArgumentError(message("state", "the names " + ", ".join(sorted(names)), ", ".join(sorted(arrays))))


def load_state(
    arrays: Mapping[str, HostArray],
    variables: Mapping[str, tuple[Any, bool]],
    assign: Callable[[Any, HostArray], object],
) -> None:
    """Assign arrays to variables of the same names; a variable marked True is transposed in PyTorch.

    All are checked before the first is assigned.
    """
    check_names(arrays, variables)
    for name, (variable, transposed) in variables.items():
        shape = tuple(variable.shape[::-1] if transposed else variable.shape)
        if arrays[name].shape != shape:
            raise ShapeError(message(name, f"shape {shape}", arrays[name].shape))
    for name, (variable, transposed) in variables.items():
        assign(variable, arrays[name].T if transposed else arrays[name])
