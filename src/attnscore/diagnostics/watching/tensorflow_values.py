"""Values that a graph of TensorFlow sends to the host while it runs, for a watch.

Requirements:
- a graph sends queries and keys by ``tf.numpy_function``, in the order of the model's code, which TensorFlow keeps;
- nothing is sent in a step that is not sampled: a condition in the graph leaves the calls out;
- a function that XLA compiles cannot call the host, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import tensorflow as tf

from attnscore.backends.tensorflow import graphs
from attnscore.diagnostics.watching.staged import NOT_SAMPLED, Values


class TensorflowValues(Values):
    """Arrays of TensorFlow, and of its graphs, which have reported their calls when they return."""

    def state(self, leaves: Iterable[Any]) -> Any:
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def is_abstract(self, x: Any) -> bool:
        return isinstance(x, tf.Tensor) and not hasattr(x, "numpy")

    def reason_against(self, key: Hashable) -> str | None:
        if graphs.is_for_xla():
            return "a function compiled with jit_compile=True, which calls nothing outside"
        return "a graph that is rewritten, as to export it" if graphs.is_rewritten() else None

    def send(self, function: Callable[..., Any], *arrays: Any) -> Any:
        number = tf.numpy_function(function, [tf.stop_gradient(tf.convert_to_tensor(x)) for x in arrays], tf.int32)
        number.set_shape(())
        return number

    def send_if_sampled(self, function: Callable[..., Any], number: Any, *arrays: Any) -> Any:
        is_sampled = tf.not_equal(number, NOT_SAMPLED)
        return tf.cond(is_sampled, lambda: self.send(function, number, *arrays), lambda: tf.constant(0))
