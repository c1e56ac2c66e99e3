"""Faults of the caches of keys and values."""

from __future__ import annotations

from mutants.fault import Fault

_FILE = "src/attnscore/kv_cache.py"
_SLOTS = "src/attnscore/kv_buffers/slots.py"
_STORAGE = "src/attnscore/kv_buffers/storage.py"
_ANY = "tests/test_kv_cache.py -k any_order"
_GRAPH = "tests/test_kv_cache.py -k 'graph_whole'"
_PLAIN = "tests/test_kv_cache.py -k 'plain_attend'"

FAULTS: list[Fault] = [
    Fault(
        "cache-window-of-one-more",
        _SLOTS,
        "in_window = ops.logical_or(key > query - self.window,",
        "in_window = ops.logical_or(key >= query - self.window,",
        _ANY,
        "a query attends to one position more than the window has",
    ),
    Fault(
        "cache-intervals-of-one-more",
        _SLOTS,
        "start = np.maximum(self.sinks, query - self.window + 1)",
        "start = np.maximum(self.sinks, query - self.window)",
        _PLAIN,
        "the intervals of a window begin one position too early",
    ),
    Fault(
        "cache-queries-at-the-end",
        _FILE,
        "start = self._index.maximum(self._starts, self._lens - count)",
        "start = self._lens - count",
        _ANY,
        "the queries of a padded append are taken for the last positions of their sequence",
    ),
    Fault(
        "cache-ring-of-the-window-alone",
        _FILE,
        "return self.sinks + int(self.window or 0) + max(count, 1) - 1",
        "return self.sinks + int(self.window or 0)",
        _ANY,
        "an append of several positions overwrites what its first query attends to",
    ),
    Fault(
        "cache-crop-of-what-is-lost",
        _FILE,
        "lost: np.ndarray[Any, Any] = first < np.minimum(self._oldest, query)",
        "lost: np.ndarray[Any, Any] = first < first",
        _ANY,
        "a window that the ring has overwritten is attended to after a crop",
    ),
    Fault(
        "cache-sinks-move",
        _SLOTS,
        "return index.where(positions < sinks, positions, sinks + (positions - sinks) % max(1, size - sinks))",
        "return index.where(positions < sinks, positions, positions % max(1, size))",
        _ANY,
        "the ring overwrites the sinks",
    ),
    Fault(
        "cache-reorder-in-sequence",
        _STORAGE,
        "changed = np.flatnonzero(indices != np.arange(len(buffer)))",
        "changed = np.flatnonzero(indices > np.arange(len(buffer)))",
        _ANY,
        "a sequence that takes the past of an earlier one keeps its own",
    ),
    Fault(
        "cache-writes-into-a-graph",
        _STORAGE,
        "if is_saved or ops.needs_grad(buffer, block):",
        "if ops.needs_grad(buffer, block):",
        _GRAPH,
        "an append overwrites buffers that autograd holds for the gradient of a query",
    ),
    Fault(
        "cache-selects-padding",
        _SLOTS,
        "return held - self.index.reshape(self.starts, (-1, 1))",
        "return held - self.index.reshape(self.starts, (-1, 1)) + 1",
        "tests/test_kv_cache.py -k 'loop_in_tensorflow'",
        "a slot of a functional cache takes the entry behind its own",
    ),
    Fault(
        "cache-lengths-of-one-more",
        _FILE,
        "lens = index.minimum(positions + 1, self.slots)",
        "lens = index.minimum(positions + 2, self.slots)",
        _ANY,
        "a query attends to the position behind it",
    ),
    Fault(
        "cache-rotary-from-the-start",
        "src/attnscore/layers/description.py",
        "positions = ops.asarray(cache.next_positions(length), key)",
        "positions = ops.reshape(ops.positions(0, length, key), (1, -1))",
        "tests/test_layers.py -k 'with_a_cache'",
        "a rotary embedding counts the positions of every step from 0",
    ),
]
