"""Faults of shards, of what ranks exchange, of its cost, and of keys read by chunks."""

from __future__ import annotations

from mutants.fault import Fault

_SHARD = "src/attnscore/parallel/shard.py"
_PAIRS = "src/attnscore/parallel/pairs.py"
_PLAN = "src/attnscore/parallel/plan.py"
_MASK = "src/attnscore/parallel/mask.py"
_SHARDED = "src/attnscore/masks/sharded.py"
_COST = "src/attnscore/parallel/explanation.py"
_MERGING = "src/attnscore/parallel/merging.py"
_CHUNKS = "src/attnscore/parallel/chunks.py"
_MODEL = "src/attnscore/parallel/simulation.py"
_SHARDS = "tests/test_parallel_shard.py"
_EXPLAIN = "tests/test_parallel_explain.py"
_READ = "tests/test_parallel_chunks.py"
_SIMULATE = "tests/test_parallel_simulation.py"

FAULTS: list[Fault] = [
    Fault(
        "queries-passed-for-no-gain",
        _COST,
        "is_less = 2 * max(queries.backward_bytes) < max(reduce.backward_bytes)",
        "is_less = max(queries.backward_bytes) < 2 * max(reduce.backward_bytes)",
        _EXPLAIN,
        "queries are passed where that saves less than computing the scores again costs",
    ),
    Fault(
        "shard-located-without-offset",
        _SHARD,
        "first += stop - start",
        "first += 0",
        _SHARDS,
        "rows of the second range of a shard are looked for in the first",
    ),
    Fault(
        "shard-all-chunks-to-one",
        _SHARD,
        "if count + 1 < share:",
        "if count + 1 < share * ranks:",
        _SHARDS,
        "a rank gets more rows than its share, where chunks have no pairs",
    ),
    Fault(
        "shard-cut-before",
        _SHARD,
        "np.minimum(after - (wanted - sums[after - 1] < sums[np.minimum(after, len(loads))] - wanted), len(loads))",
        "np.minimum(after - 1, len(loads))",
        _SHARDS,
        "consecutive parts are cut before their pairs are equal",
    ),
    Fault(
        "pairs-of-touching-ranges",
        _PAIRS,
        "begins = np.flatnonzero(start[1:] > stop[:-1]) + 1",
        "begins = np.flatnonzero(start[1:] >= stop[:-1] - 1) + 1",
        _SHARDS,
        "ranges of keys that overlap are listed twice",
    ),
    Fault(
        "pairs-of-edges-shifted",
        _PAIRS,
        "first = graph.start[self.rows] - (np.cumsum(lens) - lens)",
        "first = graph.start[self.rows] - np.cumsum(lens)",
        _SHARDS,
        "the keys of a graph are those of other queries",
    ),
    Fault(
        "exchange-received-for-sent",
        _PLAN,
        "return sum(self._counts[rank]) - self._counts[rank][rank]",
        "return sum(row[rank] for row in self._counts) - self._counts[rank][rank]",
        _SHARDS + " " + _EXPLAIN,
        "a rank sends what it receives",
    ),
    Fault(
        "shard-mask-other-keys",
        _MASK,
        "held = np.append(cols, -1)[local] == keys",
        "held = np.append(cols, -1)[local] >= 0",
        _SHARDS,
        "edges to keys that are not there become edges to the next key",
    ),
    Fault(
        "sharded-interval-to-the-right",
        _SHARDED,
        "start, stop = (np.searchsorted(cols, end) for end in (found.start, found.stop))",
        'start, stop = (np.searchsorted(cols, end, "right") for end in (found.start, found.stop))',
        _SHARDS,
        "the intervals of a shard's keys are one key too far to the right",
    ),
    Fault(
        "ring-keeps-the-wrong-share",
        _COST,
        "found = (keys.sum() - np.roll(keys, -1)) * size.key",
        "found = (keys.sum() - np.roll(keys, 1)) * size.key",
        _EXPLAIN,
        "a ring ends its way a rank too early",
    ),
    Fault(
        "merge-entropy-of-parts-alone",
        _MERGING,
        'found["entropy"] = w * (first.entropy - finite[0]) + v * (second.entropy - finite[1])',
        'found["entropy"] = w * first.entropy + v * second.entropy',
        _READ,
        "the entropy of a mixture lacks that of its shares",
    ),
    Fault(
        "chunks-sink-in-each",
        _CHUNKS,
        "sink=sink if joined is None else None",
        "sink=sink",
        _READ,
        "the sink is counted once for each chunk",
    ),
    Fault(
        "chunks-relative-bias",
        _CHUNKS,
        "stop = at[1] + shape.query_len - 1 if shape.is_relative",
        "stop = at[1] + shape.query_len if shape.is_relative",
        _READ,
        "a chunk has a number too many of a relative bias",
    ),
    Fault(
        "simulation-half-duplex",
        _MODEL,
        "found: HostArray = count * self.machine.latency + np.maximum(sent, received) / self.machine.bandwidth",
        "found: HostArray = count * self.machine.latency + (sent + received) / self.machine.bandwidth",
        _SIMULATE,
        "what a rank receives waits for what it sends",
    ),
]
