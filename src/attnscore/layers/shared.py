"""What the layers of all frameworks do alike: checks, masks over heads, PyTorch's checkpoints, messages.

Imports no framework. What a layer consists of and computes is in `attnscore.layers.description`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Backend
from attnscore.base.arguments import is_whole, shown
from attnscore.base.sizes import is_unknown, may_equal
from attnscore.errors import ArgumentError, AttnscoreError, DtypeError, FrameworkError, MaskError, ShapeError, message
from attnscore.masks import And, Dense, Mask, Not, Or
from attnscore.masks.base import map_atoms
from attnscore.masks.shape_spec import shape_of
from attnscore.problem.dropout import check_dropout
from attnscore.scores import arrays_of

Shape = tuple[int, ...]
HostArray = np.ndarray[Any, Any]
Class = TypeVar("Class", bound=type)
Constructor = TypeVar("Constructor", bound=Callable[..., None])

# The order of the constructors' arguments in older editions of "Dive into Deep Learning"; all but bias are required.
D2L_ADDITIVE = ("key_size", "query_size", "num_hiddens", "dropout")
D2L_MULTI_HEAD = ("key_size", "query_size", "value_size", "num_hiddens", "num_heads", "dropout", "bias")


def copied(x: Any, kind: type = object) -> Any:
    """Return a copy of an array of a kind, or a mask with copies of such arrays; anything else as it is."""
    if isinstance(x, Mask):
        return x.with_leaves(iter([copied(array, kind) for array in x.leaves()]))
    if not (backends.is_array(x) and isinstance(x, kind)):
        return x
    array: Any = x
    return array.copy()


def arrays_in(mask: Any) -> list[Any]:
    """Return the arrays in a mask; an array itself."""
    return [*mask.arrays().values()] if isinstance(mask, Mask) else [mask] if backends.is_array(mask) else []


def arrays_of_weights(query: Any, key: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the arrays of a call that its weights depend on."""
    others = (arguments.get(name) for name in ("valid_lens", "bias", "sink"))
    others = (x for x in others if backends.is_array(x))
    return [query, key, *others, *arrays_in(arguments["mask"]), *arrays_of(arguments["score"]).values()]


def naming_arguments(older: tuple[str, ...]) -> Callable[[Constructor], Constructor]:
    """Make a constructor name the keywords to use where a call has too many positional arguments.

    `older` is the order of arguments that such a call is likely to follow. The wrapped constructor raises ArgumentError
    in place of TypeError for more positional arguments than it takes, and for one that is given by name as well.
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

        # Keras reads the signature without following __wrapped__.
        checked.__signature__ = signature  # type: ignore[attr-defined]  # functions take any attribute
        return cast(Constructor, checked)

    return decorate


def with_constructor(cls: Class, without: Collection[str], required: Collection[str]) -> Class:
    """Give a layer's class one constructor, whose signature has the arguments that its bases take by name.

    Each passes its ``**`` arguments on to that of the next base; the last is the framework's, which takes a `layer`.
    The constructor raises TypeError for the arguments `without`, and where one of those `required` is missing.
    """
    found: list[inspect.Parameter] = []
    for base in (base for base in cls.__mro__ if "__init__" in vars(base)):
        given = inspect.signature(vars(base)["__init__"]).parameters
        found = [x for x in found if x.kind is not x.VAR_KEYWORD]
        found += [x for x in given.values() if base is cls.__mro__[0] or not found or x.kind >= x.KEYWORD_ONLY]
        if "layer" in given:
            break
    made: Any = cls
    inherited = made.__init__

    @functools.wraps(inherited)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in (*without, *required):
            if (name in kwargs) == (name in without):
                problem = "got an unexpected" if name in kwargs else "misses the required"
                raise TypeError(f"{cls.__name__}.__init__() {problem} keyword argument {name!r}")
        inherited(self, *args, **kwargs)

    found = [x.replace(default=x.empty) if x.name in required else x for x in found if x.name not in without]
    # Keras reads the signature without following __wrapped__.
    init.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    made.__init__ = init
    return cls


def _named(owner: str, older: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return a call in the order `older` with all names written out; None where it is no such call."""
    values = dict(zip(older, args, strict=False))
    others = {name: kwargs[name] for name in older if name in kwargs}
    if len(args) > len(older) or values.keys() & others.keys() or {*older} - {"bias"} - {*values, *others}:
        return None
    return f"{owner}({', '.join(f'{name}={shown(value)}' for name, value in (values | others).items())})"


def check_size(name: str, size: Any, *, optional: bool = False) -> Any:
    """Return a size as an int; raise ArgumentError unless it is a whole number above 0 (or None, when `optional`)."""
    if size is None and optional:
        return None
    if not is_whole(size) or size <= 0:
        wanted = "a whole number above 0" + (" or None" if optional else "")
        raise ArgumentError(message(name, wanted, shown(size)))
    return int(size)


def check_probability(dropout: Any) -> float:
    """Return the dropout of a layer as a float; raise ArgumentError unless it is in [0, 1)."""
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
    backends.check_dense(ops, inputs)
    for name, x in inputs.items():
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x)))
    check_axes({name: ops.shape(x) for name, x in inputs.items()})


def last_call(kept: Any, keep_last: bool, *, where: str = "") -> Any:
    """Return what a layer kept of its last call; raise AttnscoreError when it kept nothing (None, or why not).

    Not an AttributeError: frameworks answer that one with a search for attributes, which would hide the reason.
    `where` names the calls that count, in a framework whose compiled calls leave no trace on the layer.
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


def torch_state(state: Mapping[str, Any]) -> dict[str, HostArray]:
    """Return a ``state_dict``, of arrays of any framework, as NumPy arrays."""
    arrays = {}
    for name, x in state.items():
        found = backends.of({name: x}).host(x)
        if found is None:
            raise ArgumentError(message(name, "an array whose numbers can be seen", "one on a device", hint="x.cpu()"))
        arrays[name] = found
    return arrays


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
