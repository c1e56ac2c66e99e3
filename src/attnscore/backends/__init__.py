"""Registry of backends: finds the framework of an array without importing one that the caller has not imported.

A new framework adds its module and one line in ``_TABLE``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from attnscore.backends.base import Backend
from attnscore.errors import DeviceError, FrameworkError, message


class _Entry(NamedTuple):
    """Entry of the registry: a framework that may not be imported yet."""

    backend: str
    """Path of the backend class in this package."""
    arrays: tuple[str, ...]
    """Types of arrays: a package, for every class with a shape, or one class of a package."""
    install: str = ""
    """Arguments of pip, if other than the framework's name."""
    numpy_below: str = ""
    """The first release of NumPy with which the framework does not work, if there is one."""


_TABLE = {
    "numpy": _Entry("numpy.NumpyBackend", ("numpy.ndarray",)),
    "torch": _Entry("torch.TorchBackend", ("torch.Tensor",)),
    "tensorflow": _Entry("tensorflow.backend.TensorFlowBackend", ("tensorflow",)),
    "jax": _Entry("jax.backend.JaxBackend", ("jax", "jaxlib")),
    "mxnet": _Entry(
        "mxnet.backend.MxnetBackend", ("mxnet",), install="mxnet==1.9.1 'numpy<1.24'", numpy_below="1.24.0"
    ),
}
# By package: the array class ("" for every class with a shape) and the framework. cupy is recognised so that the error
# can say that it is not supported. `attnscore.Variable` is an array of a custom score on a tape (``tape.py``). Keras's
# variables are no arrays, though a base of theirs may belong to TensorFlow (`variable_value`).
_ARRAYS = {
    package: (array_class, name)
    for name, patterns in (
        *((name, entry.arrays) for name, entry in _TABLE.items()),
        ("cupy", ("cupy",)),
        ("numpy", ("attnscore.Variable",)),
        (None, ("keras",)),
    )
    for package, _, array_class in (pattern.partition(".") for pattern in patterns)
}

# NumPy 1.23 makes an array of objects of a ragged list, and warns; later ones raise. Catching warnings costs 3 us.
_RAGGED_WARNS = np.lib.NumpyVersion(np.__version__) < "1.24.0"
_NO_SCOPE = contextlib.nullcontext()

_LOADED: dict[str, Backend] = {}


def load(name: str) -> Backend:
    """Return the backend of a framework, imported at first use."""
    if name not in _LOADED:
        module, _, kind = _TABLE[name].backend.rpartition(".")
        # Backends are compared by identity: of two threads that both make one, both get the first.
        _LOADED.setdefault(name, getattr(importlib.import_module(f"{__name__}.{module}"), kind)())
    return _LOADED[name]


_NAMES: dict[type, str | None] = {}
_BY_TYPE: dict[type, Backend] = {}


def _name_of(kind: type) -> str | None:
    """Return the framework of an array type, by the packages of its bases, so that subclasses count; None if none."""
    if kind not in _NAMES:
        _NAMES[kind] = _find_name(kind)
    return _NAMES[kind]


# As torch's ``assume_constant_result``, without importing torch: Dynamo cannot trace the bases of every class.
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _find_name(kind: type) -> str | None:
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in _ARRAYS:
            array_class, framework = _ARRAYS[package]
            if base.__name__ == array_class if array_class else hasattr(kind, "shape"):
                return framework
    return None


def of_type(kind: type) -> Backend | None:
    """Return the backend of an array type; None if there is none."""
    if (backend := _BY_TYPE.get(kind)) is None and (name := _name_of(kind)) in _TABLE:
        backend = _BY_TYPE[kind] = load(name)
    return backend


def of(arrays: Mapping[str, Any]) -> Backend:
    """Return the backend of the framework that all named arrays belong to; raise FrameworkError if there is none."""
    frameworks = {_name_of(type(array)) for array in arrays.values()}
    # The usual case. Below are the errors, and the first call of a framework.
    if len(frameworks) == 1 and (backend := _LOADED.get(next(iter(frameworks)) or "")) is not None:
        return backend
    names: dict[str, str] = {}
    for argument, array in arrays.items():
        name = _name_of(type(variable_value(array)))
        if name is None:
            got = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
            hint = "convert it first, for example with numpy.asarray"
            raise FrameworkError(message(argument, "an array of " + " or ".join(_TABLE), got, hint=hint))
        names[argument] = name
    if len({*names.values()}) > 1:
        listed = ", ".join(f"{argument}: {name}" for argument, name in names.items())
        raise FrameworkError(message(", ".join(names), "arrays of one framework", listed))
    (name,) = set(names.values())
    if name not in _TABLE:
        raise FrameworkError(message(", ".join(names), "arrays of " + " or ".join(_TABLE), f"arrays of {name}"))
    return load(name)


def check_devices(
    ops: Backend, query: Any, others: Mapping[str, Any], *, owner: str = "query", host_passes: bool = False
) -> None:
    """Raise DeviceError unless the framework's arrays are on the device of `query`, which the message calls `owner`.

    `host_passes`, for the arrays of masks, allows the CPU too.
    """
    query_device = ops.device(query)
    allowed = (query_device, "cpu") if host_passes else (query_device,)
    for name, x in others.items():
        if _name_of(type(x)) != ops.name:
            continue  # a mask may be a list or an array of NumPy
        device = ops.device(x)
        # "" is no device: the array is traced, or the framework moves it by itself.
        if "" not in (query_device, device) and device not in allowed:
            raise DeviceError(message(name, f"an array on {query_device}, where {owner} is", f"one on {device}"))


def check_dense(ops: Backend, arrays: Mapping[str, Any]) -> None:
    """Raise FrameworkError if an array of the framework is of a kind that attention does not take."""
    for name, x in arrays.items():
        kind = ops.unsupported(x) if _name_of(type(x)) == ops.name else None
        if kind is not None:
            raise FrameworkError(message(name, "a dense array", kind[0], hint=f"{kind[1]} makes one"))


def check_compatible(ops: Backend, query: Any, arrays: Mapping[str, Any]) -> None:
    """Raise FrameworkError or DeviceError unless every array is dense and on the device of `query`."""
    check_dense(ops, arrays)
    check_devices(ops, query, arrays)


def check_not_recorded(ops: Backend, name: str) -> None:
    """Raise FrameworkError while `torch.jit.trace` or `make_fx` records: it would freeze what depends on sizes."""
    if ops.is_recording() or ops.is_in_make_fx():
        expected = "a call outside torch.jit.trace and make_fx, which record `attend` and the layers alone"
        raise FrameworkError(message(name, expected, "one inside"))


_PYTREES: set[type] = set()


def register_pytree(kind: type) -> None:
    """Register a class of scores or masks as a pytree, once, if the caller has imported JAX."""
    if kind not in _PYTREES and sys.modules.get("jax") is not None:
        load("jax").register_pytree(kind)
        # Added last: another thread that finds the class here takes it as registered.
        _PYTREES.add(kind)


# Constant to Dynamo, which meets it where a compiled function makes a score, and cannot trace into JAX.
register_pytree._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_array(x: object) -> bool:
    """Whether `x` is an array of a framework in the registry (or cupy), or a variable of one (`variable_value`)."""
    return _name_of(type(x)) is not None or _reader(type(x)) is not None


# By package, the function that reads a variable. TensorFlow's records the read on gradient tapes. A variable of Keras
# holds a variable or an array of its framework. Of Flax's variables, only those of nnx have `get_value`.
_READERS: dict[str, Callable[[Any], Any]] = {
    "tensorflow": lambda x: load("tensorflow").asarray(x, x),
    "keras": lambda x: variable_value(x.value),
    "flax": lambda x: x.get_value() if hasattr(x, "get_value") else x.value,
}
_READER_OF: dict[type, Callable[[Any], Any] | None] = {}


def _reader(kind: type) -> Callable[[Any], Any] | None:
    """Return the function that reads the variables of a class; None for a class of no variables."""
    if kind not in _READER_OF:
        named = (base for base in kind.__mro__ if base.__name__ == "Variable")
        roots = [base.__module__.partition(".")[0] for base in named]
        _READER_OF[kind] = next((_READERS[root] for root in roots if root in _READERS), None)
    return _READER_OF[kind]


_reader._dynamo_marked_constant = True  # type: ignore[attr-defined]


def variable_value(x: Any) -> Any:
    """Return the array that a variable of TensorFlow, Keras or Flax holds; anything else as it is."""
    reader = _reader(type(x))
    return x if reader is None else reader(x)


# The replacement of `attend` while a framework's compiler traces it, and the module that registers it at import. That
# module calls `attend` itself, so it is above all others in the import order, and is named here by its path alone.
COMPILED: dict[str, Callable[..., Any]] = {}
_COMPILED_BY = {"torch": "attnscore.integrations.torch_compile"}
Method = TypeVar("Method", bound=Callable[..., Any])
# Functions outside of graphs, by name: in `_METHODS` each with its reason, in `_OUTSIDE`, from its first compilation
# on, as `torch.compiler.disable` wraps it.
_METHODS: dict[str, tuple[Callable[..., Any], str]] = {}
_OUTSIDE: dict[str, Callable[..., Any]] = {}


def compiled() -> Callable[..., Any] | None:
    """Return the replacement of `attend` under torch.compile and `torch.jit.trace`; None in an ordinary call."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        return None
    return COMPILED[_imported("torch")]


def in_make_fx(ops: Backend) -> Callable[..., Any] | None:
    """Return the replacement of `attend` where `Backend.is_in_make_fx`; None elsewhere."""
    return COMPILED[_imported(ops.name)] if ops.is_in_make_fx() else None


def _imported(name: str) -> str:
    importlib.import_module(_COMPILED_BY[name])
    return name


# Constant to Dynamo, which cannot trace an import.
_imported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def outside_graphs(reason: str = "only attend and layers are operators") -> Callable[[Method], Method]:
    """Return a decorator of functions at which torch.compile breaks its graph; its message gives the reason."""

    def decorate(method: Method) -> Method:
        name = method.__qualname__
        _METHODS[name] = method, reason

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            torch = sys.modules.get("torch")
            # All later calls take the wrapped function: after a graph break Python runs this frame, and Dynamo would
            # compile the frame of `method`.
            if name in _OUTSIDE or (torch is not None and torch.compiler.is_compiling()):
                return _OUTSIDE[_made_outside(name)](*args, **kwargs)
            return method(*args, **kwargs)

        return cast(Method, called)

    return decorate


def _made_outside(name: str) -> str:
    """Wrap a function of `_METHODS` so that the compiler leaves it out; return its name, which is its key."""
    if name not in _OUTSIDE:
        method, reason = _METHODS[name]
        _OUTSIDE[name] = sys.modules["torch"].compiler.disable(method, reason=reason)
    return name


# Constant to Dynamo, which cannot trace `torch.compiler.disable`.
_made_outside._dynamo_marked_constant = True  # type: ignore[attr-defined]


def availability() -> dict[str, str | None]:
    """Return for each framework None if it can be used here, otherwise the reason why not."""
    return {name: _why_unavailable(name) for name in _TABLE}


def fallbacks() -> dict[str, str]:
    """Return the private names that the loaded frameworks lack, each with the cost of its replacement."""
    return {name: cost for backend in _LOADED.values() for name, cost in backend.fallbacks.items()}


def _why_unavailable(name: str) -> str | None:
    entry = _TABLE[name]
    if entry.numpy_below and sys.version_info >= (3, 12):
        return f"it needs NumPy below {entry.numpy_below.removesuffix('.0')}, which Python 3.12 and later do not have"
    if not importlib.util.find_spec(name):
        return f"the package {name} is not installed (pip install {entry.install or name})"
    if entry.numpy_below and np.lib.NumpyVersion(np.__version__) >= entry.numpy_below:
        return f"it needs NumPy below {entry.numpy_below.removesuffix('.0')}, and this is {np.__version__}"
    return None


def host(x: Any) -> np.ndarray[Any, Any] | None:
    """Return an array of any framework, a list or a number as NumPy; None if it is traced or on a device."""
    name = _name_of(type(x))
    if name in _TABLE:
        return load(name).host(x)
    try:
        with warnings.catch_warnings() if _RAGGED_WARNS else _NO_SCOPE:
            if _RAGGED_WARNS:
                warnings.simplefilter("ignore")
            return np.asarray(x)
    except ValueError:
        # A ragged list becomes one object, which every check of a dtype refuses.
        return np.full((), None, dtype=object)
