"""Which framework an array belongs to, without importing any that the caller has not imported.

One file is one framework; a new one adds its file and one line in ``_TABLE``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attnscore.backends.base import Backend
from attnscore.errors import DeviceError, FrameworkError, message


class _Entry(NamedTuple):
    """What is known of a framework before it is imported."""

    words: str
    """Its class in ``attnscore.backends.<name>``."""
    arrays: tuple[str, ...]
    """Whose arrays are its own: packages, where all that has a shape is meant, or one class of a package."""
    install: str = ""
    """What pip must be told, where its name alone is not all."""
    numpy_below: str = ""


_TABLE = {
    "numpy": _Entry("NumpyBackend", ("numpy.ndarray",)),
    "torch": _Entry("TorchBackend", ("torch.Tensor",)),
    "tensorflow": _Entry("TensorFlowBackend", ("tensorflow",)),
    "jax": _Entry("JaxBackend", ("jax", "jaxlib")),
    "mxnet": _Entry("MxnetBackend", ("mxnet",), install="mxnet==1.9.1 'numpy<1.24'", numpy_below="1.24.0"),
}
# By package: the class that is meant, if one is, and the framework. The last ones are recognised so that the error can
# say that they are not served.
_ARRAYS = {
    package: (kind, name)
    for name, patterns in (*((name, entry.arrays) for name, entry in _TABLE.items()), ("cupy", ("cupy",)))
    for package, _, kind in (pattern.partition(".") for pattern in patterns)
}

# NumPy 1.23 makes an array of objects of a ragged list, and warns; later ones raise. Catching warnings costs 3 us.
_RAGGED_WARNS = np.lib.NumpyVersion(np.__version__) < "1.24.0"
_NOTHING = contextlib.nullcontext()

_LOADED: dict[str, Backend] = {}


def load(name: str) -> Backend:
    """The framework called `name`, imported on first use."""
    if name not in _LOADED:
        module = importlib.import_module(f"{__name__}.{name}")
        _LOADED[name] = getattr(module, _TABLE[name].words)()
    return _LOADED[name]


_NAMES: dict[type, str | None] = {}


def _name_of(kind: type) -> str | None:
    """Framework of an array type, read off the packages of its bases (so subclasses count)."""
    if kind not in _NAMES:
        _NAMES[kind] = _find_name(kind)
    return _NAMES[kind]


# torch's ``assume_constant_result``, without importing torch: its compiler cannot walk over the bases of every class.
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _find_name(kind: type) -> str | None:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _ARRAYS:
            meant, name = _ARRAYS[root]
            if base.__name__ == meant if meant else hasattr(kind, "shape"):
                return name
    return None


def of_type(kind: type) -> Backend | None:
    """The framework of an array type, where it is served."""
    name = _name_of(kind) or ""
    return _LOADED.get(name) or (load(name) if name in _TABLE else None)


def of(arrays: Mapping[str, Any]) -> Backend:
    """The one framework that all named arrays belong to.

    Raises
    ------
    FrameworkError
        Something is not an array, the arrays are of several frameworks, or of one that is not served.
    """
    found = {_name_of(type(array)) for array in arrays.values()}
    if len(found) == 1 and (known := _LOADED.get(next(iter(found)) or "")) is not None:
        return known
    names: dict[str, str] = {}
    for argument, array in arrays.items():
        name = _name_of(type(array))
        if name is None:
            raise FrameworkError(
                message(
                    argument,
                    "an array of " + " or ".join(_TABLE),
                    f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins."),
                    hint="convert it first, for example with numpy.asarray",
                )
            )
        names[argument] = name
    kinds = set(names.values())
    if len(kinds) > 1:
        listed = ", ".join(f"{argument}: {name}" for argument, name in names.items())
        raise FrameworkError(message(", ".join(names), "arrays of one framework", listed))
    (name,) = kinds
    if name not in _TABLE:
        raise FrameworkError(message(", ".join(names), "arrays of " + " or ".join(_TABLE), f"arrays of {name}"))
    return load(name)


def check_devices(ops: Backend, query: Any, others: Mapping[str, Any], *, host_passes: bool = False) -> None:
    """Raise DeviceError unless every array lies where `query` does (or, for what is only read, on the host)."""
    home = ops.device(query)
    for name, x in others.items():
        if _name_of(type(x)) != ops.name:
            continue
        place = ops.device(x)
        # An empty place is anywhere: traced, or the framework moves it by itself.
        if "" not in (home, place) and place not in ((home, "cpu") if host_passes else (home,)):
            raise DeviceError(message(name, f"an array on {home}, where query is", f"one on {place}"))


def check_dense(ops: Backend, arrays: Mapping[str, Any]) -> None:
    """Raise FrameworkError when an array of the framework is of a kind that attention cannot take."""
    for name, x in arrays.items():
        kind = ops.unsupported(x) if _name_of(type(x)) == ops.name else None
        if kind is not None:
            raise FrameworkError(message(name, "a dense array", kind[0], hint=f"{kind[1]} makes one"))


def check_not_recorded(ops: Backend, what: str) -> None:
    """Raise FrameworkError while operations are recorded: what was decided by the sizes at hand would stay so."""
    if ops.is_recording():
        expected = "a call outside torch.jit.trace, which records `attend` and the layers alone"
        raise FrameworkError(message(what, expected, "one inside"))


def register_pytree(kind: type) -> None:
    """Tell JAX of a class of scores or masks, where the caller has imported JAX: they are pytrees there."""
    if sys.modules.get("jax") is not None:
        load("jax").register_pytree(kind)


# As above: torch's compiler meets it where a compiled function makes a score, and cannot look into JAX.
register_pytree._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_array(x: object) -> bool:
    """Whether `x` is an array of a framework that we know."""
    return _name_of(type(x)) is not None


def array_signature(x: Any) -> Hashable:
    """All that checks of kind, shape, dtype and device read of an array: those with equal facts pass or fail alike."""
    if getattr(x, "is_nested", False) or not (isinstance(shape := x.shape, tuple) or shape.is_fully_defined()):
        # Has no shape, and no check that it passes; or one that belongs to one graph alone.
        return None
    return type(x), shape, x.dtype, getattr(x, "device", None), getattr(x, "layout", None)


# What stands for `attend` while a framework's compiler reads it, and the module that puts it here when it is imported:
# it calls `attend` itself, so it lies above all rooms, and is known here by name alone.
COMPILED: dict[str, Callable[..., Any]] = {}
_COMPILED_BY = {"torch": "attnscore.integrations.torch_compile"}


def compiled() -> Callable[..., Any] | None:
    """What stands for `attend` while a compiler, or `torch.jit.trace`, reads this line; None in an ordinary call."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None):
        return None
    return COMPILED[_imported("torch")]


def _imported(name: str) -> str:
    importlib.import_module(_COMPILED_BY[name])
    return name


# As above: its compiler cannot read an import, and calls this.
_imported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def availability() -> dict[str, str | None]:
    """For each framework: None where it can be used here, otherwise the reason why not."""
    return {name: _missing(name) for name in _TABLE}


def _missing(name: str) -> str | None:
    entry = _TABLE[name]
    if not importlib.util.find_spec(name):
        return f"the package {name} is not installed (pip install {entry.install or name})"
    if entry.numpy_below and np.lib.NumpyVersion(np.__version__) >= entry.numpy_below:
        return f"it needs NumPy below {entry.numpy_below.removesuffix('.0')}, and this is {np.__version__}"
    return None


def host(x: Any) -> np.ndarray[Any, Any] | None:
    """The values of an array of any framework, a list or a number; None when they cannot be seen from here."""
    name = _name_of(type(x))
    if name in _TABLE:
        return load(name).host(x)
    try:
        with warnings.catch_warnings() if _RAGGED_WARNS else _NOTHING:
            if _RAGGED_WARNS:
                warnings.simplefilter("ignore")
            return np.asarray(x)
    except ValueError:
        # A ragged list: one object, which every check of a dtype refuses.
        return np.full((), None, dtype=object)
