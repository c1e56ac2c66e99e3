"""Values that a graph of TensorFlow sends to the host while it runs, for a watch.

Requirements:
- a graph sends queries and keys by ``tf.numpy_function``, in the order of the model's code, which TensorFlow keeps;
- nothing is sent in a step that is not sampled: a condition in the graph leaves the calls out;
- a function that XLA compiles cannot call the host, and is counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from attnscore.backends.tensorflow import graphs
from attnscore.diagnostics.watching import staged
from attnscore.diagnostics.watching.staged import NEWEST, NOT_SAMPLED, Root, Site


class TensorflowValues:
    """Arrays of TensorFlow, and of its graphs. See `staged.Values`."""

    def state(self, leaves: Sequence[Any]) -> Any:
        """Return the graph that is traced; None in eager code."""
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def reason_against(self, key: Hashable) -> str | None:
        """Return why the graph that is traced cannot report; None where it can."""
        if graphs.is_for_xla():
            return "a function compiled with jit_compile=True, which calls nothing outside"
        return "a graph that is rewritten, as to export it" if graphs.is_rewritten() else None

    def is_abstract(self, x: Any) -> bool:
        """Return whether an array stands for values of a later run."""
        return isinstance(x, tf.Tensor) and not hasattr(x, "numpy")

    def numpy(self, x: Any) -> NDArray[Any]:
        """Return the values of an array."""
        return np.asarray(x)

    def begin(self, key: Hashable, inputs: Any, real: Any) -> tuple[Any, Any]:
        """Begin a run of a model when the graph runs; return its number, and the inputs."""

        def call(*masks: NDArray[Any]) -> NDArray[Any]:
            return np.int32(staged.begin(key, *masks))  # type: ignore[return-value]  # a number is an array here

        number = tf.numpy_function(call, [] if real is None else [real], tf.int32)
        number.set_shape(())
        return number, inputs

    def report(self, root: Root, name: str, site: Site, out: Any) -> Any:
        """Record a call when the graph runs; return its output."""
        arrays = [tf.stop_gradient(tf.convert_to_tensor(x)) for x in site.arrays.values()]
        ranks = [len(x.shape) for x in arrays]
        # Not the site or the root, whose values belong to the graph.
        key, build, names = root.key, site.build, tuple(site.arrays)

        def call(number: NDArray[Any], *arrays: NDArray[Any]) -> NDArray[Any]:
            staged.receive(int(number), key, name, build, dict(zip(names, arrays, strict=True)), ranks)
            return np.int32(0)  # type: ignore[return-value]

        # A value of another graph must not go into one that may run again: use the last run that began.
        number = root.number if tf.compat.v1.get_default_graph() is root.state else tf.constant(NEWEST)
        _when_sampled(number, lambda: tf.numpy_function(call, [number, *arrays], tf.int32))
        return out

    def end(self, root: Root, out: Any) -> Any:
        """End a run when the graph has reported its calls; return the output."""

        def call(number: NDArray[Any]) -> NDArray[Any]:
            staged.end_of_program(int(number))
            return np.int32(0)  # type: ignore[return-value]

        _when_sampled(root.number, lambda: tf.numpy_function(call, [root.number], tf.int32))
        return out

    def wait(self) -> None:
        """Return at once: a graph has reported its calls when it returns."""


def _when_sampled(number: Any, send: Any) -> None:
    def nothing() -> Any:
        return tf.constant(0)

    def sent() -> Any:
        done = send()
        done.set_shape(())
        return done

    tf.cond(tf.not_equal(number, NOT_SAMPLED), sent, nothing)
