"""Faults of analysis."""

from __future__ import annotations

from mutants.fault import Fault

FAULTS: list[Fault] = [
    Fault(
        "blocks-mask-of-the-block",
        "src/attnscore/analysis/weights.py",
        "SlicedMask.visible",
        "self.score_shape",
        "score_shape",
        "tests/test_blocks.py -k under_every_mask",
        "the mask of a block is judged by the lengths of the block",
    ),
    Fault(
        "blocks-masked-beside-nan",
        "src/attnscore/analysis/weights.py",
        "attention_weights",
        "ops.where(A == NEG_INF, 0.0, B)",
        "B",
        "tests/test_blocks.py -k beside_nan",
        "masked weights of a block are NaN in a query whose scores hold NaN",
    ),
    Fault(
        "maps-bias-on-the-tape",
        "src/attnscore/analysis/summaries.py",
        "_detach",
        '("value", "bias", "sink")',
        '("value", "sink")',
        "tests/test_maps.py -k tape",
        "maps of a bias that needs a gradient stay on the tape",
    ),
    Fault(
        "blocks-intervals-of-the-whole",
        "src/attnscore/analysis/weights.py",
        "SlicedMask.interval_set",
        "np.clip(A - B, 0, C)",
        "np.clip(A, 0, C)",
        "tests/test_maps.py -k 'many_keys'",
        "the intervals of keys side by side start at the first key of the whole",
    ),
    Fault(
        "merge-empty-part-spreads",
        "src/attnscore/analysis/functional.py",
        "merge",
        "ops.where(A == 0, 0.0, A * ops.astype(B, ops.dtype(A)))",
        "A * ops.astype(B, ops.dtype(A))",
        "tests/test_statistics.py -k merge",
        "NaN in an empty part spreads to the merged output",
    ),
    Fault(
        "cost-parameters-per-head",
        "src/attnscore/analysis/explain.py",
        "cost",
        "4 * (A * B * C + D)",
        "4 * A * B * (C + D)",
        "tests/test_explain_cost.py -k 'cost or stated or multiply or operations or skipped or table or bytes'",
        "the bytes of the score's parameters are counted for every head and batch row",
    ),
    Fault(
        "statistics-trace-of-a-full-row",
        "src/attnscore/problem/statistics.py",
        "AttentionStats.jacobian_trace",
        "A - B",
        "1 - B",
        "tests/test_statistics.py -k 'functions or one_key or summary'",
        "jacobian_trace takes the weights to sum to 1, also beside a sink or with no key",
    ),
    Fault(
        "files-transposed-safetensors",
        "src/attnscore/io.py",
        "_safetensors_bytes",
        "np.ascontiguousarray(A).reshape(A.shape)",
        "A",
        "tests/test_cli.py -k transposed",
        "transposed arrays are scrambled in .safetensors",
    ),
    Fault(
        "files-temporary-left-behind",
        "src/attnscore/io.py",
        "replacing",
        "A.unlink(missing_ok=True)",
        "pass",
        "tests/test_files.py -k interruption",
        "an interrupted write leaves its temporary file",
    ),
]
