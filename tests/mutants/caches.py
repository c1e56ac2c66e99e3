"""Faults of the caches of keys and values."""

from __future__ import annotations

from mutants.fault import Fault

FAULTS: list[Fault] = [
    Fault(
        "cache-crop-of-what-is-lost",
        "src/attnscore/kv_cache.py",
        "KeyValueCache._is_overwritten",
        "A < np.minimum(self._oldest, B)",
        "A < A",
        "tests/test_kv_cache.py -k any_order",
        "a window that the ring has overwritten is attended to after a crop",
    ),
    Fault(
        "cache-sinks-move",
        "src/attnscore/kv_buffers/slots.py",
        "slots_of_positions",
        "A + (B - A) % max(1, C - A)",
        "B % max(1, C)",
        "tests/test_kv_cache.py -k any_order",
        "the ring overwrites the sinks",
    ),
    Fault(
        "cache-writes-into-a-graph",
        "src/attnscore/kv_buffers/storage.py",
        "_needs_copy",
        "is_saved or A or B",
        "A or B",
        "tests/test_kv_cache.py -k 'graph_whole'",
        "an append overwrites buffers that autograd holds for the gradient of a query",
    ),
    Fault(
        "cache-rotary-from-the-start",
        "src/attnscore/layers/base.py",
        "_rotated",
        "ops.asarray(A.next_positions(B), C)",
        "ops.reshape(ops.positions(0, B, C), (1, -1))",
        "tests/test_layers.py -k 'with_a_cache'",
        "a rotary embedding counts the positions of every step from 0",
    ),
]
