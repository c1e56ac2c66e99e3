"""Faults of analysis."""

from __future__ import annotations

from mutants.fault import Fault

_BLOCKS = "src/attnscore/analysis/weights.py"
_MAPS = "src/attnscore/analysis/summaries.py"
_LARGEST = "src/attnscore/analysis/topk.py"
_FUNCTIONAL = "src/attnscore/analysis/functional.py"
_COSTS = "src/attnscore/analysis/explain.py"
_STATISTICS = "src/attnscore/core/statistics.py"
_FILES = "src/attnscore/io.py"
_SELECTED = "tests/test_blocks.py -k 'test_blocks and numpy'"
_TOP = "tests/test_maps.py -k 'top_weights_are'"
_BINS = "tests/test_maps.py -k 'through_bins'"
_POOLED = "tests/test_maps.py -k 'pooled'"
_COST = "tests/test_explain_cost.py -k 'cost or stated or multiply or operations or skipped or table or bytes'"
_STATS = "tests/test_statistics.py -k 'functions or one_key or summary'"
_MERGE = "tests/test_statistics.py -k merge"
_SOFTMAX = "tests/test_softmax.py"

FAULTS: list[Fault] = [
    Fault(
        "blocks-scores-of-a-normalizer",
        _BLOCKS,
        "problem = dataclasses.replace(problem, sink=None, normalizer=None)",
        "problem = dataclasses.replace(problem, sink=None)",
        "tests/test_normalizers.py -k blocks_of_weights",
        "a block of weights is normalized twice",
    ),
    Fault(
        "blocks-negative-index",
        _BLOCKS,
        "return np.where(found < 0, found + length, found)",
        "return found",
        _SELECTED,
        "an index from the end keeps its negative position, and the mask judges that",
    ),
    Fault(
        "blocks-index-past-the-end",
        _BLOCKS,
        "if found.min() < -length or found.max() >= length:",
        "if found.min() < -length or found.max() > length:",
        "tests/test_errors.py -k 'test_bad_input and numpy'",
        "an index equal to the number of positions is not refused",
    ),
    Fault(
        "blocks-mask-of-the-block",
        _BLOCKS,
        "return self.mask.visible(ops, self.score_shape, rows, cols)",
        "return self.mask.visible(ops, score_shape, rows, cols)",
        "tests/test_blocks.py -k under_every_mask",
        "the mask of a block is judged by the lengths of the block",
    ),
    Fault(
        "blocks-pieces-of-the-block",
        _BLOCKS,
        "found = self.mask.interval_set(self.score_shape.query_len, self.score_shape.key_len, batch)",
        "found = self.mask.interval_set(query_len, key_len, batch)",
        "tests/test_blocks.py -k 'under_every_mask or memory'",
        "the tiles of a block skip by the intervals of its first rows",
    ),
    Fault(
        "blocks-bias-not-cut",
        _BLOCKS,
        'for axis, name in ((-2, "query"), (-1, "key")):',
        'for axis, name in ((-2, "query"),):',
        _SELECTED,
        "the bias of a block is not cut to its keys",
    ),
    Fault(
        "blocks-masked-beside-nan",
        _BLOCKS,
        "return _from_canonical(block, ops.where(scores == NEG_INF, 0.0, found))",
        "return _from_canonical(block, found)",
        "tests/test_blocks.py -k beside_nan",
        "masked weights of a block are NaN in a query whose scores hold NaN",
    ),
    Fault(
        "maps-top-index-of-the-range",
        _MAPS,
        "return weights, index if cols is None else index + cols.start",
        "return weights, index",
        "tests/test_maps.py -k 'top_weights_are'",
        "the index of a top weight counts from the first key that its rows attend to",
    ),
    Fault(
        "maps-top-range-too-short",
        _MAPS,
        "return slice(first, max(last, first + k))",
        "return slice(first, last)",
        _TOP,
        "rows that attend to fewer than k keys have fewer than k candidates",
    ),
    Fault(
        "maps-bins-of-equal-width",
        _MAPS,
        "np.arange(first, last) * count // max(1, length)] = 1",
        "np.arange(first, last) // max(1, -(-length // count))] = 1",
        _POOLED,
        "all bins but the last are as wide as the widest",
    ),
    Fault(
        "maps-bins-of-the-first-rows",
        _MAPS,
        "of_bin = _in_bins(first, last, score_shape.query_len, down)",
        "of_bin = _in_bins(0, last - first, score_shape.query_len, down)",
        _POOLED,
        "rows taken a few at a time fall into the bins of the first ones",
    ),
    Fault(
        "maps-bins-nan-spreads",
        _MAPS,
        "part = ops.matmul(of_bin, ops.where(is_nan, 0.0, by_bin))",
        "part = ops.matmul(of_bin, by_bin)",
        _POOLED,
        "a query whose weights are NaN makes the bins of all queries NaN",
    ),
    Fault(
        "maps-key-mass-is-mean",
        _MAPS,
        "rows = RowGradients(ops.full((*score_shape.rows, 1), 1.0, ones))",
        "rows = RowGradients(ops.full((*score_shape.rows, 1), 1.0 / max(1, score_shape.query_len), ones))",
        "tests/test_maps.py -k key_mass",
        "key_mass is the mean over the queries in place of the sum",
    ),
    Fault(
        "maps-bias-on-the-tape",
        _MAPS,
        "bias=detached(problem.bias),",
        "bias=problem.bias,",
        "tests/test_maps.py -k tape",
        "maps of a bias that needs a gradient stay on the tape",
    ),
    Fault(
        "largest-last-bin-lost",
        _LARGEST,
        "high = -(-int(stop[attends].max()) // _BLOCK) if attends.any() else 0",
        "high = int(stop[attends].max()) // _BLOCK if attends.any() else 0",
        _BINS,
        "a block of which only the first keys are attended to is not searched",
    ),
    Fault(
        "largest-fewer-bins-than-k",
        _LARGEST,
        "low = min(low, blocks.count - k)",
        "low = min(low, blocks.count - 1)",
        _BINS,
        "queries that attend to the last blocks alone have fewer than k blocks",
    ),
    Fault(
        "largest-sink-left-out",
        _LARGEST,
        "total = total + ops.exp(sink - highest)",
        "total = total + ops.exp(sink)",
        _BINS,
        "the sink counts at another level than the scores",
    ),
    Fault(
        "largest-bins-despite-a-bias",
        _LARGEST,
        "or problem.bias is not None\n    ):",
        "\n    ):",
        "tests/test_maps.py -k 'do_not_take'",
        "the search by blocks is used although it knows no bias",
    ),
    Fault(
        "merge-empty-part-spreads",
        _FUNCTIONAL,
        "joined = joined + ops.where(share == 0, 0.0, share * ops.astype(out, ops.dtype(share)))",
        "joined = joined + share * ops.astype(out, ops.dtype(share))",
        _MERGE,
        "NaN in an empty part spreads to the merged output",
    ),
    Fault(
        "merge-of-empty-parts-alone",
        _FUNCTIONAL,
        "total = ops.where(is_empty, 1.0, total)",
        "total = ops.where(is_empty, total, total)",
        _MERGE,
        "a query for which all parts are empty gives NaN",
    ),
    Fault(
        "softmax-pullback-unweighted",
        _FUNCTIONAL,
        "ops.sum(weights * grad, axis=-1, keepdims=True)",
        "ops.mean(grad, axis=-1, keepdims=True)",
        _SOFTMAX + " -k jacobian",
        "softmax_pullback subtracts the mean of the gradient, not its mean by the weights",
    ),
    Fault(
        "masked-softmax-axis-not-restored",
        _FUNCTIONAL,
        "return ops.swap_axes(ops.reshape(weights, transposed.shape), int(axis), -1)",
        "return ops.reshape(weights, transposed.shape)",
        _SOFTMAX + " -k axis",
        "masked_softmax over another axis returns transposed weights",
    ),
    Fault(
        "cost-of-the-softmax",
        _COSTS,
        "(own + 4 * pairs + 2 * pairs * value_dim)",
        "(own + 3 * pairs + 2 * pairs * value_dim)",
        _COST,
        "the softmax is counted with three operations a pair",
    ),
    Fault(
        "cost-parameters-per-head",
        _COSTS,
        "bytes=4 * (batch * heads * arrays + parameters),",
        "bytes=4 * batch * heads * (arrays + parameters),",
        _COST,
        "the bytes of the score's parameters are counted for every head and batch row",
    ),
    Fault(
        "explain-operations-of-full-tiles",
        _COSTS,
        'operations=round(whole.operations * (1 - plan.fractions["skip"])),',
        'operations=round(whole.operations * plan.fractions["full"]),',
        _COST,
        "the operations of partial tiles are not counted",
    ),
    Fault(
        "explain-percent-skipped",
        _COSTS,
        'computed = 1 - self.plan.fractions["skip"]',
        'computed = self.plan.fractions["skip"]',
        _COST,
        "the table prints the fraction of tiles skipped as the fraction computed",
    ),
    Fault(
        "explain-output-of-kv-heads",
        _COSTS,
        "moved += math.prod(score_shape.rows) * layout.value_dim",
        "moved += math.prod(score_shape.rows) // score_shape.groups * layout.value_dim",
        _COST,
        "the output is counted once per KV head in place of once per query head",
    ),
    Fault(
        "statistics-trace-of-a-full-row",
        _STATISTICS,
        "return total - squares",
        "return 1 - squares",
        _STATS,
        "jacobian_trace takes the weights to sum to 1, also beside a sink or with no key",
    ),
    Fault(
        "statistics-summary-of-empty-rows",
        _STATISTICS,
        "_values(name, x)[alive]",
        "_values(name, x).ravel()",
        _STATS,
        "the summary counts rows that attend to no key",
    ),
    Fault(
        "files-header-claims-less",
        _FILES,
        "if claimed != held - before:",
        "if claimed > held - before:",
        "tests/test_files.py -k wrong_input",
        "a file with more numbers than its header says is read",
    ),
    Fault(
        "files-member-claims-more",
        _FILES,
        "if member.compress_size > held or member.file_size > most:",
        "if member.compress_size > held:",
        "tests/test_files.py -k 'asked_for or wrong_input'",
        "an archive member may claim more bytes than can be inflated from the file",
    ),
    Fault(
        "files-transposed-safetensors",
        _FILES,
        "np.ascontiguousarray(array).reshape(array.shape)",
        "array",
        "tests/test_cli.py -k transposed",
        "transposed arrays are scrambled in .safetensors",
    ),
    Fault(
        "files-temporary-left-behind",
        _FILES,
        "temporary.unlink(missing_ok=True)",
        "pass",
        "tests/test_files.py -k interruption",
        "an interrupted write leaves its temporary file",
    ),
]
