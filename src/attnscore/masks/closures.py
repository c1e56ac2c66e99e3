"""Functions as one call reads them: copies over the arrays that they hold, and keys of the values that they read.

- A Python function reads its defaults, the variables of its closure, and the globals that its code names; functions
  among these read their own. Arrays of all frameworks, numbers, strings and containers of them are compared by value.
- A function that reads a value without equality (an object with attributes, an array that is traced or on a device)
  has no key: no result of such a function may be cached.
- Functions of NumPy, of the frameworks and of the standard library hold nothing that changes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from attnscore import backends

_FRAMEWORKS = ("attnscore", "numpy", "torch", "jax", "jaxlib", "flax", "tensorflow", "keras", "mxnet")
_LIBRARIES = (frozenset(sys.stdlib_module_names) - {"__main__"}).union(_FRAMEWORKS)
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), np.generic)


class Snapshot(NamedTuple):
    """A value as it is now: a copy that later writes to its arrays do not change, and a key, or None."""

    value: Any
    key: Hashable | None


def snapshot(value: Any) -> Snapshot:
    """Return a function, an array or a container of them as it is now."""
    return _Reader().read(value)


class _Reader:
    """Takes snapshots of values, and of the functions among them once each."""

    def __init__(self) -> None:
        self.functions: dict[int, Snapshot] = {}
        """Copies of the functions read so far, by the identity of the original: a function may name itself."""

    def read(self, value: Any) -> Snapshot:
        if isinstance(value, _CONSTANTS):
            # By type and text: True == 1 == 1.0, 0.0 == -0.0, and a NaN equals nothing.
            return Snapshot(value, (type(value), repr(value)))
        if backends.is_array(value):
            return _copy_array(value)
        if _is_of_library(value):
            return Snapshot(value, value)
        if type(value) is FunctionType:
            return self._copy_function(value)
        if type(value) in (tuple, list):
            return self._rebuild(value, value, type(value))
        if type(value) is dict:
            return self._rebuild(value, value.values(), lambda parts: dict(zip(value, parts, strict=True)), *value)
        if type(value) is partial:
            parts = (value.func, value.args, value.keywords)
            return self._rebuild(value, parts, lambda parts: partial(parts[0], *parts[1], **parts[2]))
        return Snapshot(value, None)

    def _rebuild(
        self, value: Any, parts: Iterable[Any], rebuild: Callable[[Sequence[Any]], Any], *constants: Hashable
    ) -> Snapshot:
        """Return ``rebuild(parts)`` of the parts as they are now; `value` itself where nothing in it can change.

        `constants`, the keys of a dictionary, join the key.
        """
        parts = list(parts)
        snapshots = [self.read(x) for x in parts]
        keys = tuple(x.key for x in snapshots)
        key = None if None in keys else (type(value), constants, keys)
        is_mutable = type(value) in (list, dict)
        if not is_mutable and all(x.value is part for x, part in zip(snapshots, parts, strict=True)):
            return Snapshot(value, key)
        return Snapshot(rebuild([x.value for x in snapshots]), key)

    def _copy_function(self, function: FunctionType) -> Snapshot:
        """Return a function as it is now: itself where nothing that it reads is copied, else a copy."""
        if id(function) in self.functions:
            return self.functions[id(function)]
        code, scope = function.__code__, dict(function.__globals__)
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copy = FunctionType(code, scope, function.__name__, None, cells)
        # Registered before its parts are read, which may name it; its number among the functions is then its key.
        number = len(self.functions)
        self.functions[id(function)] = Snapshot(copy, number)
        names = tuple(name for name in sorted(set(_names(code))) if name in scope)
        values = tuple(map(scope.__getitem__, names))
        attributes = tuple(function.__dict__.items())
        parts = (tuple(_contents(function)), names, values, function.__defaults__, function.__kwdefaults__, attributes)
        current, key = self.read(parts)
        key = None if key is None else (code, key)
        if current is parts:
            self.functions[id(function)] = Snapshot(function, number)  # the empty copy is dropped
            return Snapshot(function, key)
        contents, _, values, copy.__defaults__, copy.__kwdefaults__, attributes = current
        scope.update(zip(names, values, strict=True))
        copy.__dict__.update(attributes)
        for cell, x in zip(cells, contents, strict=True):
            cell.cell_contents = x
        return Snapshot(copy, key)


def _contents(function: FunctionType) -> Iterator[Any]:
    """Yield the values of the variables of a closure; for a variable without a value yet, its cell."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield cell


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _copy_array(x: Any) -> Snapshot:
    """Return a copy of an array, with a key of its values where the host can read them."""
    x = backends.variable_value(x)
    ops = backends.of_type(type(x))
    value = x if ops is None else ops.copy(x)
    host = backends.host(value)
    if host is None or host.dtype.kind == "O":
        return Snapshot(value, None)
    digest = hashlib.blake2b(host.tobytes(), digest_size=16).digest()
    return Snapshot(value, (type(x), host.dtype.str, host.shape, digest))


def _is_of_library(x: Any) -> bool:
    """Return whether `x` is a module, class or function of `_LIBRARIES`, or a function in C of any module."""
    if isinstance(x, ModuleType):
        name = x.__name__
    elif isinstance(x, BuiltinFunctionType):
        # A method of an array has this type too, and reads the array.
        return x.__self__ is None or isinstance(x.__self__, ModuleType)
    elif isinstance(x, np.ufunc):
        # Not one of `np.frompyfunc`, which calls a Python function.
        return x is getattr(np, x.__name__, None)
    elif isinstance(x, FunctionType) and "<locals>" in x.__qualname__:
        return False  # it may hold functions of the caller, as FlexAttention's `and_masks` returns one
    elif isinstance(x, (FunctionType, type)) or type(x).__module__.startswith("jaxlib"):
        # The functions of jax.jit, of a type of jaxlib, have the module of the Python function that they compile.
        name = str(x.__module__)
    else:
        return False
    return name.partition(".")[0] in _LIBRARIES
