"""Private names of TensorFlow, and what takes the place of one that a release does not have.

- No other file of the package reads a private name of a TensorFlow module.
- A replacement is slower, never wrong: it assumes that a tape records, and that a graph cannot call Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
# None: `tf.custom_gradient` records calls, and TensorFlow's own gradients products.
record_operation: Callable[..., None] | None = _resolve(
    "tensorflow.python.eager.record.record_operation", None, "gradients are recorded by tf.custom_gradient"
)
stop_recording: Any = _resolve("tensorflow.python.eager.record.stop_recording", None, "products have slower gradients")
# None: each tensor may have a tangent.
pack_tangents: Callable[[Any], Any] | None = _resolve(
    "tensorflow.python.eager.forwardprop_util.pack_tangents",
    None,
    "calls that a tape records take TensorFlow's operations",
)

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
