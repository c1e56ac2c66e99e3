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
_CALLS = "src/attnscore/parallel/torch.py"
_MODES = "src/attnscore/parallel/torch_modes.py"
_OPTIONS = "src/attnscore/parallel/options.py"
_PARTS = "src/attnscore/parallel/torch_parts.py"
_QUERIES = "src/attnscore/parallel/torch_queries.py"
_RANKS = "src/attnscore/parallel/torch_ranks.py"
_OF_JAX = "src/attnscore/parallel/jax_modes.py"
_PROCESSES = "tests/test_parallel_torch.py"
_DEVICES = "tests/test_parallel_jax.py"
_SHARDS = "tests/test_parallel_shard.py"
_EXPLAIN = "tests/test_parallel_explain.py"
_READ = "tests/test_parallel_chunks.py"
_SIMULATE = "tests/test_parallel_simulation.py"

FAULTS: list[Fault] = [
    Fault(
        "parallel-lowers-by-the-rank's-lengths",
        _OPTIONS,
        "rowwise=True",
        "rowwise=False",
        "tests/test_parallel_torch.py -k unequal",
        "each rank lowers the score by its own lengths and values, so that keys of two ranks differ in kind",
    ),
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
    Fault(
        "ranks-send-other-rows",
        _RANKS,
        "packed[part] = packed[part] if part in packed else _pack(rows, plan.held.locate(part))",
        "packed[part] = packed[part] if part in packed else _pack(rows, [(0, len(part))])",
        _PROCESSES,
        "a rank sends its first rows, not those that are wanted",
    ),
    Fault(
        "ranks-own-rows-in-other-places",
        _RANKS,
        "copy_rows(positions_first(found[name]), plan.wanted.locate(own), positions_first(x), plan.held.locate(own))",
        "copy_rows(positions_first(found[name]), [(0, len(own))], positions_first(x), plan.held.locate(own))",
        _PROCESSES,
        "the rank's own keys are put in front of those fetched, out of order",
    ),
    Fault(
        "ranks-parameters-not-reduced",
        _RANKS,
        "dist.all_reduce(grad, group=ctx.group)",
        "dist.barrier(group=ctx.group)",
        _PROCESSES,
        "gradients of parameters are the rank's share alone",
    ),
    Fault(
        "ranks-returned-gradients-overwrite",
        _RANKS,
        "add_rows(positions_first(sums[name]), at, rows)",
        "copy_rows(positions_first(sums[name]), at, rows)",
        _PROCESSES,
        "the gradients that another rank returns replace the rank's own",
    ),
    Fault(
        "ranks-heads-not-in-order",
        _RANKS,
        "cut(first, held[peer].ranges).contiguous()",
        "cut(first, [(0, len(held[peer]))]).contiguous()",
        _PROCESSES,
        "rows computed by heads return as if head and tail were one range",
    ),
    Fault(
        "modes-outer-results-in-front",
        _MODES,
        "copy_rows(positions_first(x), self.queries.locate(self.outer), positions_first(outer))",
        "copy_rows(positions_first(x), [(0, len(self.outer))], positions_first(outer))",
        _PROCESSES,
        "results of queries that attend keys of others are those of the first queries",
    ),
    Fault(
        "modes-sink-twice",
        _MODES,
        'names = wanted - {"sink"} if self.has_inner_part else wanted',
        "names = wanted",
        _PROCESSES,
        "the gradient of the sink counts the queries of both parts",
    ),
    Fault(
        "parts-merge-by-the-negative-maximum",
        _PARTS,
        "maximum = ops.where(is_empty, -math.inf, result.row_max)",
        "maximum = ops.where(is_empty, -math.inf, -result.row_max)",
        _PROCESSES,
        "parts are merged by exp(-row_max)",
    ),
    Fault(
        "parts-statistics-not-rescaled",
        _PARTS,
        'sums["squares"] = (statistics["sum_sq_weights"] * total * total,)',
        'sums["squares"] = (statistics["sum_sq_weights"] * total,)',
        _PROCESSES,
        "sums of squared weights are merged as if they were sums of weights",
    ),
    Fault(
        "modes-ring-one-step-ahead",
        _MODES,
        "return [(self.ranks.rank - step) % self.ranks.count",
        "return [(self.ranks.rank - step - 1) % self.ranks.count",
        _PROCESSES,
        "the keys that pass by count as those of the rank before",
    ),
    Fault(
        "modes-ring-forgets-gradients",
        _MODES,
        "x.add_(before)",
        "x.copy_(before)",
        _PROCESSES,
        "gradients of keys that arrive replace those of this rank's queries",
    ),
    Fault(
        "parts-dropout-by-local-positions",
        _PARTS,
        "row = dropouts.rows_of_matrices(problem.ops, self.whole, like) + rows.positions(like)[:, None]",
        "row = dropouts.rows_of_matrices(problem.ops, self.whole, like) + torch.arange(len(rows))[:, None]",
        _PROCESSES,
        "which weights are dropped depends on the number of ranks",
    ),
    Fault(
        "modes-dropout-of-other-heads",
        _MODES,
        'row = rows.chunk(self.ranks.count, -4)[self.ranks.rank] + self._positions(self.queries, given["value"])',
        'row = rows.chunk(self.ranks.count, -4)[0] + self._positions(self.queries, given["value"])',
        _PROCESSES,
        "all ranks drop what the first one's heads drop",
    ),
    Fault(
        "parts-lengths-of-the-part",
        _PARTS,
        "return shard_mask(self.problem.mask, rows, cols, self.queries.length, self.keys.length)",
        "return shard_mask(self.problem.mask, rows, cols, len(rows), len(cols))",
        _PROCESSES,
        "a mask speaks of a part's queries and keys, not of the whole sequence's",
    ),
    Fault(
        "queries-passed-with-delta-of-other-sign",
        _QUERIES,
        "delta = -(result.out.to(self.sums) * grad_out.to(self.sums)).sum(-1, keepdim=True)",
        "delta = (result.out.to(self.sums) * grad_out.to(self.sums)).sum(-1, keepdim=True)",
        _PROCESSES,
        "owners of keys add what the softmax subtracts",
    ),
    Fault(
        "ranks-seeds-of-their-own",
        _CALLS,
        "seed=facts.seeds[0]",
        "seed=facts.seeds[ranks.rank]",
        _PROCESSES,
        "each rank drops by the seed that it has drawn",
    ),
    Fault(
        "devices-fetched-rows-not-behind-own",
        _OF_JAX,
        "first = self.keys.rows\n",
        "first = 0\n",
        _DEVICES,
        "rows of other devices are looked for among the device's own",
    ),
    Fault(
        "options-normalizer-not-passed-on",
        _OPTIONS,
        "head_axis=self.head_axis, normalizer=self.normalizer,",
        'head_axis=self.head_axis, normalizer="softmax",',
        _PROCESSES,
        "every normalizer is the softmax",
    ),
    Fault(
        "explain-refused-modes-chosen",
        _COST,
        "modes = [name for name in MODES if name not in reasons]",
        "modes = [name for name in MODES if name not in reasons or name in refused]",
        _EXPLAIN,
        "a mode that cannot run a call is chosen where it sends least",
    ),
]
