"""Private names of TensorFlow, and replacements for names that a release does not have.

- No other file of the package reads a private name of a TensorFlow module.
- A replacement is slower, never wrong: it assumes that a tape records, and that a graph cannot call Python.
- Functions that rewrite a graph are recognised on Python's stack. Their modules and code are read from the public
  functions that they belong to, so that they may move; where that fails, each graph counts as rewritten.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

from attnscore.backends.base import private_name

FALLBACKS: dict[str, str] = {}
_resolve = partial(private_name, FALLBACKS)
_NO_CALLBACKS = "graphs do not call the native kernels"

# ---------------------------------------------------------------- gradient tapes and forward mode

could_possibly_record: Callable[[], bool] = _resolve(
    "tensorflow.python.eager.record.could_possibly_record", lambda: True, "calls take tapes to record them"
)
should_record: Callable[[Any], bool] = _resolve(
    "tensorflow.python.eager.record.should_record_backprop", lambda _: True, "all gradients of a call are computed"
)
# None: `tf.custom_gradient` records calls.
record_operation: Callable[..., None] | None = _resolve(
    "tensorflow.python.eager.record.record_operation", None, "gradients are recorded by tf.custom_gradient"
)
# None: each tensor may have a tangent.
pack_tangents: Callable[[Any], Any] | None = _resolve(
    "tensorflow.python.eager.forwardprop_util.pack_tangents",
    None,
    "calls that a tape records take TensorFlow's operations",
)


def watched_variables(graph: Any) -> Any:
    """Return the variables that a graph has read so far; none where TensorFlow does not tell."""
    return getattr(graph, "_watched_variables", ())


# ---------------------------------------------------------------- graphs

is_for_xla: Callable[[Any], bool] = _resolve(
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext", lambda _: True, _NO_CALLBACKS
)
indexed_case: Callable[..., Any] | None = _resolve("tensorflow.python.ops.cond_v2.indexed_case", None, _NO_CALLBACKS)
cond: Callable[..., Any] | None = _resolve(
    "tensorflow.python.ops.cond_v2.cond_v2", None, "branches that rarely run are inlined"
)
set_lowering: Callable[..., None] | None = _resolve(
    "tensorflow.python.ops.control_flow_util_v2.maybe_set_lowering_attr", None, "branches that rarely run are inlined"
)

# ---------------------------------------------------------------- functions that are recognised on Python's stack

LITE = "tensorflow.lite."


def _package_of(path: str) -> str | None:
    """Return the package of the module that defines a public function; None where there is no such function."""
    module = getattr(_resolve(path, None, _NO_CALLBACKS), "__module__", None)
    return None if module is None else f"{module.rpartition('.')[0]}."


_VECTORIZING = _package_of("tensorflow.vectorized_map")
if importlib.util.find_spec(LITE.strip(".")) is None:
    FALLBACKS[LITE.strip(".")] = f"{_NO_CALLBACKS}, and graphs for TensorFlow Lite are not recognised"


def rewriting_packages() -> tuple[str, ...] | None:
    """Return packages that trace a graph to export or vectorize it; None where a release has them elsewhere.

    A callback is of no use in such a graph, or is called in a loop.
    """
    packages = [_VECTORIZING, None if LITE.strip(".") in FALLBACKS else LITE]
    if keras := sys.modules.get("keras"):  # else it cannot be on the stack
        archive = getattr(getattr(keras, "export", None), "ExportArchive", None)
        if archive is None:
            FALLBACKS["keras.export.ExportArchive"] = _NO_CALLBACKS
        packages.append(None if archive is None else f"{archive.__module__.rpartition('.')[0]}.")
    return None if None in packages else tuple(str(package) for package in packages)


def _functions_in(path: str) -> frozenset[CodeType]:
    """Return the code of the functions that a public function defines."""
    code = getattr(inspect.unwrap(_resolve(path, lambda: None, "dropout needs a seed")), "__code__", None)
    return frozenset(x for x in getattr(code, "co_consts", ()) if isinstance(x, CodeType))


# One of these is on the stack while a function of `tf.recompute_grad` runs.
RECOMPUTING = _functions_in("tensorflow.recompute_grad")
if not RECOMPUTING:
    FALLBACKS["tensorflow.recompute_grad"] = "dropout needs a seed"
