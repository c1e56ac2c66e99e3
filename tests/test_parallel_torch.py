"""Attention over several processes: the numbers of one device, and bytes as explained.

Each call is run by 1 to 4 processes over gloo, put together from their parts, and compared with the reference as a call
on one device is (`harness.Call.check`).
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnscore as ats
from attnscore.parallel import Shard
from cases import MASKS, SCORES, Sizes
from covering import pairs
from harness import STATISTICS, Call, array, make_call
from process_group import ProcessGroup, RankError, group_of

RANKS = (1, 2, 3, 4)
OF_TORCH = ("RuntimeError", "DistNetworkError", "DistBackendError")
"""Errors of torch where another rank has died or is late."""
PLACEMENTS = (
    ("contiguous", "contiguous"),
    ("head_tail", "head_tail"),
    ("balanced", "contiguous"),
    ("uneven", "uneven"),
)
WAYS = {name: {"mode": name} for name in ("gather", "ring", "heads")} | {"queries": {"gradient": "queries"}}
"""Ways in which keys and queries meet."""
MASKS_OF_HEADS = ("array-3d", "array-4d", "Dense-rows", "MaskFunction-heads", "and-array")
EXTRAS = ("", "bias", "bias-sink", "sink", "hiding-bias", "key-bias", "row-bias")
# With an axis of positions in a parameter, see `test_parameters_with_positions_are_refused`.
POSITIONS = ("rows", "keys", "heads-rows", "batch-heads")
SHARED_SCORES = [score.name for score in SCORES if score.name.removeprefix("scaled_dot-") not in POSITIONS]


def whole(call: Call, parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Outputs and gradients of the whole sequence from the parts of the ranks."""
    found = {}
    for name in parts[0]:
        if name in ("rows", "cols"):
            continue
        leaf = call.leaves.get(name.removeprefix("grad."))
        by_query = name in ("out", "grad.query", *STATISTICS) or (name == "grad.bias" and leaf.shape[-2] > 1)
        if not by_query and name not in ("grad.key", "grad.value"):
            # The ranks have the same parameters, and their gradients are the same bits.
            assert all(np.array_equal(part[name], parts[0][name], equal_nan=True) for part in parts), name
            found[name] = parts[0][name]
            continue
        axis = -1 if name in STATISTICS else -2
        order = np.argsort(np.concatenate([part["rows" if by_query else "cols"] for part in parts]))
        found[name] = np.concatenate([part[name] for part in parts], axis).take(order, axis)
    return found


def run(
    ranks: int, score: str, mask: str, extras: str = "", dtype: str = "float64", placement: Any = PLACEMENTS[0],
    call: Call | None = None, **options: Any,
) -> tuple[Call, dict[str, np.ndarray]]:  # fmt: skip
    call = call or make_call(score, mask, dtype, extras)
    sizes = Sizes(queries=call.visible.shape[-2], keys=call.visible.shape[-1])
    parts = group_of(ranks).run(
        "parallel_torch_calls.run", score, mask, sizes, call.leaves, call.seeds, placement, options
    )
    return call, whole(call, parts)


def check(*arguments: Any, **options: Any) -> None:
    ranks, _, mask, *_ = arguments
    if options.get("mode") == "heads":
        arguments = (min(ranks, 2), *arguments[1:])  # of which there are 2 KV heads
        if mask in MASKS_OF_HEADS:
            with pytest.raises(RankError, match="each head has a mask of its own"):
                run(*arguments, **options)
            return
    if options.get("gradient") == "queries" and arguments[3] in ("bias", "hiding-bias", "row-bias"):
        with pytest.raises(RankError, match=r"'reduce' for this call, got 'queries': .*a bias"):
            run(*arguments, **options)
        return
    call, found = run(*arguments, **options)
    call.check(found)


@pytest.mark.parametrize(
    ("score", "mask", "extras", "dtype", "placement", "way"),
    [
        ("scaled_dot", "Causal", "", "float32", PLACEMENTS[1], "gather"),
        ("additive-tanh-bias", "SlidingWindow-both", "bias", "float64", PLACEMENTS[0], "gather"),
        ("gaussian-heads", "valid_lens", "bias-sink", "float64", PLACEMENTS[3], "gather"),
        ("own-tile_gradient", "array-4d", "sink", "float32", PLACEMENTS[2], "gather"),
        ("bilinear-heads", "Neighbours", "hiding-bias", "float64", PLACEMENTS[2], "gather"),
        ("temperature-learned-dot", "none", "row-bias", "bfloat16", PLACEMENTS[0], "gather"),
        ("scaled_dot", "SlidingWindow-both", "sink", "float64", PLACEMENTS[1], "gather"),
        ("additive-tanh-bias", "Causal", "bias-sink", "float64", PLACEMENTS[1], "ring"),
        ("gaussian-heads", "valid_lens-2d", "bias-sink", "float64", PLACEMENTS[1], "heads"),
        ("scaled_dot", "SlidingWindow-both", "sink", "float64", PLACEMENTS[1], "queries"),
        ("scaled_dot", "Causal", "", "bfloat16", PLACEMENTS[1], "ring"),
        ("additive-tanh-bias", "none", "sink", "bfloat16", PLACEMENTS[1], "queries"),
    ],
)
def test_two_processes(score: str, mask: str, extras: str, dtype: str, placement: Any, way: str) -> None:
    check(2, score, mask, extras, dtype, placement, **WAYS[way])


@pairs(mask=("none", "Causal", "SlidingWindow-both", "array-4d"), way=("ring", "queries"), extras=("", "sink"))
def test_all_statistics_of_merged_parts(mask: str, way: str, extras: str) -> None:
    """Means and variances too, whose merge needs the number of unmasked keys of each part."""
    check(2, "scaled_dot", mask, extras, "float64", PLACEMENTS[1], **WAYS[way])


@pytest.mark.parametrize(
    ("score", "query_lens", "key_lens", "dims", "mode"),
    [
        ("bilinear", (2, 7), (5, 1), (4, 6), "gather"),
        ("bilinear", (2, 7), (5, 1), (6, 6), "gather"),
        ("wrapped", (7, 0), (2, 4), (4, 6), "ring"),
        ("gaussian", (640, 3), (640, 5), (8, 8), "gather"),
        ("combination", (5, 6), (200, 1), (8, 8), "ring"),
    ],
)
@pytest.mark.slow_rows("gaussian-query_lens3-key_lens3-dims3-gather")
def test_ranks_of_unequal_lengths_lower_the_score_alike(
    score: str, query_lens: tuple[int, ...], key_lens: tuple[int, ...], dims: tuple[int, int], mode: str
) -> None:
    ranks = group_of(2).run("parallel_torch_calls.unequal", score, query_lens, key_lens, dims, mode)
    for found, wanted in (pair for pairs_of_rank in ranks for pair in pairs_of_rank):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


def test_bytes_are_those_explained() -> None:
    assert_bytes(2, ats.Causal(), 37, "contiguous", {})
    assert_bytes(2, ats.Causal(), 2100, "contiguous", {"gradient": "queries"})


@pytest.mark.parametrize(
    ("call", "ranks"),
    [
        *((name, 2) for name in ("few_queries", "drawn_seeds", "sharded_layer")),
        pytest.param("gathered_and_merged", 3, marks=pytest.mark.slow),
        pytest.param("meshes", 4, marks=pytest.mark.slow),
    ],
)
def test_what_holds_on_every_rank(call: str, ranks: int) -> None:
    """Each function says what."""
    assert all(group_of(ranks).run(f"parallel_torch_calls.{call}"))


def assert_bytes(ranks: int, mask: Any, length: int, placement: str, options: dict[str, Any]) -> None:
    for forward, backward, *planned in group_of(ranks).run(
        "parallel_torch_calls.bytes_sent", mask, length, placement, options
    ):
        assert [forward, backward] == planned


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("mask", "length", "placement"),
    [(ats.SlidingWindow(left=4095, right=0), 2**20, "contiguous"), (ats.Causal(), 2**17, "head_tail")],
    ids=["window", "causal"],
)
def test_memory_is_that_of_the_ranks_rows_and_of_those_fetched(
    mask: ats.Mask, length: int, placement: str, backward: bool
) -> None:
    # What processes of an earlier test have freed and kept would hide a part.
    group = ProcessGroup(4)
    found = group.run("parallel_torch_calls.peak_memory", mask, length, placement, backward)
    group.stop()
    assert all(peak <= arrays + 10**8 for peak, arrays in found), found


@pytest.mark.slow
@pytest.mark.parametrize("mask", [ats.Causal(), ats.SlidingWindow(left=200, right=0)], ids=["causal", "window"])
def test_passed_queries_give_the_same_bits_on_any_number_of_processes(mask: ats.Mask) -> None:
    every = []
    for ranks, placement in ((1, "contiguous"), (2, "contiguous"), (3, "head_tail"), (4, "contiguous")):
        parts = group_of(ranks).run("parallel_torch_calls.gradients", mask, 1700, placement, {"gradient": "queries"})
        order = np.argsort(np.concatenate([part[0] for part in parts]))
        every.append([np.concatenate(x, -2).take(order, -2) for x in [*zip(*parts, strict=True)][1:]])
    assert all(np.array_equal(x, y) for found in every for x, y in zip(found, every[0], strict=True))


OF_BIAS = "bias: expected the same on all ranks, got float32 of shape (own queries, 8) on rank 0; float32 of shape "
OF_SCALE = "score: expected no scale of each position, got scale (4, 1)"
REFUSED: dict[str, list[tuple[str, Any, str]]] = {
    "ArgumentError": [
        ("differing", "mask", "mask: expected the same on all ranks, got "),
        ("differing", "dim", "query, key, value: expected the same on all ranks, got "),
        ("differing", "bias of 7 keys", OF_BIAS + "(own queries, 7) on rank 1"),
        ("differing", "bias of 3 heads", OF_BIAS + "(3, own queries, 8) on rank 1"),
        (
            *("differing", "bias that is learned"),
            "requires_grad: expected the same on all ranks, got none on rank 0; bias on rank 1",
        ),
        *(("refused", name, OF_SCALE) for name in ("scale", "scale, wrapped", "scale, combined")),
        ("refused", "surplus rows", "queries: expected 5 positions for rank"),
        ("refused", "relative bias of ranges", "keys: expected one range of keys a rank"),
    ],
    "ShapeError": [
        ("differing", "bias of 3 queries", "bias: expected "),
        ("refused", "relative bias on one rank", "bias: expected "),
    ],
    "FrameworkError": [("refused", "matrix of NumPy's", "query, W: expected arrays of one framework")],
}


def refusal(call: str, argument: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        group_of(2).run(f"parallel_torch_calls.{call}", argument)
    return caught.value


def check_refusal(kind: str, text: str, call: str, argument: Any) -> None:
    error = refusal(call, argument)
    assert error.kinds == {0: kind, 1: kind}
    assert all(message.startswith(text) for message in error.messages.values()), error.messages


@pytest.mark.parametrize(
    ("kind", "call", "name", "text"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows]
)
def test_calls_that_every_rank_refuses(kind: str, call: str, name: str, text: str) -> None:
    check_refusal(kind, text, call, name)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": "1GB"}, "memory: expected a whole number, 0 or more, got '1GB'"),
        ({"memory": -1}, "memory: expected a whole number, 0 or more, got -1"),
        ({"queries": 5}, "queries: expected a Shard of each rank, got 5"),
        ({"queries": [Shard.whole(8), None]}, "queries: expected a Shard of each rank, got [Shard("),
        ({"queries": [Shard.whole(8)]}, "queries: expected one shard for each of 2 ranks, got 1"),
        ({"keys": Shard.whole(8)}, "keys: expected a Shard of each rank, got Shard("),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_options_that_every_rank_refuses(options: dict[str, Any], text: str, check: bool) -> None:
    check_refusal("ArgumentError", text, "call", options | {"check": check})


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("list", "FrameworkError", "query"),
        ("None", "FrameworkError", "query"),
        ("no tensor", "FrameworkError", "query, key, value: expected tensors of torch, got arrays of numpy"),
        ("score", "RuntimeError", "no text"),
        ("axis", "ArgumentError", "head_axis: expected -3"),
        ("flag", "ArgumentError", "check: expected True or False, got 'all'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(name: str, kind: str, text: str) -> None:
    error = refusal("differing", name)
    assert error.kinds == {0: "ArgumentError", 1: kind}
    assert text in error.messages[1]
    others = f"arguments: expected those of a valid call on all ranks, got on rank 1: {kind}: "
    assert error.messages[0] == others + error.messages[1]


@pytest.mark.parametrize(
    ("length", "shape"), [(2, (2,)), (4, (4,)), (4, (1, 4)), (3, (1, 1, 1, 3)), (8, (1, 15))], ids=repr
)
def test_a_bias_of_keys_or_relative_positions_has_the_gradient_of_all_queries(
    length: int, shape: tuple[int, ...]
) -> None:
    for found, wanted in group_of(2).run("parallel_torch_calls.shared_bias", length, shape):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_one_row_of_a_bias_is_that_of_the_only_query_of_a_rank() -> None:
    """Where each rank has one: the ranks together have the gradient of a bias that all share."""
    results = group_of(2).run("parallel_torch_calls.shared_bias", 2, (1, 2))
    np.testing.assert_allclose(sum(found for found, _ in results), results[0][1], rtol=1e-12, atol=1e-12)
    assert not np.allclose(results[0][0], results[0][1])


def test_calls_are_those_of_one_device() -> None:
    for found in group_of(2).run("parallel_torch_calls.as_on_one_device"):
        assert all(found.values()), found


@pytest.mark.slow
def test_a_rank_that_has_died_ends_the_others_with_an_error_of_torch() -> None:
    group = ProcessGroup(2, timeout=5)
    with pytest.raises(RankError) as caught:
        group.run("parallel_torch_calls.dying")
    assert caught.value.kinds[1] == "EOFError"
    assert caught.value.kinds[0] in OF_TORCH
    group.stop()


@pytest.mark.slow
@pairs(where=("forward", "backward"), mode=("gather", "ring", "heads"))
def test_a_rank_that_is_late_ends_all_with_the_timeout_of_torch(where: str, mode: str) -> None:
    group = ProcessGroup(2, timeout=2)
    with pytest.raises(RankError) as caught:
        group.run("parallel_torch_calls.late", where, mode)
    assert {*caught.value.kinds} == {0, 1} and {*caught.value.kinds.values()} <= {*OF_TORCH}
    assert "Timed out" in caught.value.messages[0]
    group.stop()


@pytest.mark.slow
@pytest.mark.parametrize("score", [f"scaled_dot-{name}" for name in POSITIONS])
def test_parameters_with_positions_are_refused(score: str) -> None:
    with pytest.raises(RankError, match="score: expected no scale of each position"):
        run(2, score, "none")


@pytest.mark.slow
@pairs(ranks=(2, 3, 4), mask={"none": None, "causal": ats.Causal(), "window": ats.SlidingWindow(left=3, right=0)},
       placement=("contiguous", "head_tail", "uneven"), mode=("gather", "ring", "heads"))  # fmt: skip
def test_bytes_of_every_way(ranks: int, mask: Any, placement: str, mode: str) -> None:
    length = 48 if mode == "heads" else 37
    assert_bytes(2 if mode == "heads" and ranks == 3 else ranks, mask, length, placement, {"mode": mode})


@pytest.mark.slow
def test_the_example_of_training_gives_the_losses_of_one_process() -> None:
    # Standalone: the launcher takes a free port, and the ranks meet in its own store.
    many = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    found = [losses_of_the_example(), losses_of_the_example(*many)]
    assert len(found[0]) == 3
    assert np.allclose(*found, atol=2e-3)


def losses_of_the_example(*launcher: str) -> list[float]:
    """The losses that the example prints; where it fails, what the launcher and the ranks have written."""
    command = [sys.executable, *launcher, str(Path(__file__).parents[1] / "examples" / "sequence_over_processes.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"status {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


PLACED = dict(zip(("whole", "tails", "balanced", "uneven"), PLACEMENTS, strict=True))
SOME_MASKS = (
    "none",
    "Causal",
    "SlidingWindow-both",
    "valid_lens-2d",
    "array-4d",
    "Neighbours-and",
    "MaskFunction-heads",
)
# Not gaussian-direct, whose scores reach 40: on one row, over 2 ranks in float64, an output is off by 9.8 roundings of
# the largest value, where 8 are allowed. A rounding of such a score alone may move a weight by 20.
OTHER_SCORES = (
    "scaled_dot-heads",
    "additive-gelu-heads",
    "gaussian-heads-dims",
    "own-tile_gradient",
    "combination-mixed",
)
DTYPES = ("float64", "float32")


@pytest.mark.slow
@pairs(score=SHARED_SCORES, extras=EXTRAS, mask=SOME_MASKS, ways=WAYS, ranks=RANKS, placement=PLACED, dtype=DTYPES)
def test_every_score(
    score: str, extras: str, mask: str, ways: Any, ranks: int, placement: Any, dtype: str
) -> None:  # fmt: skip
    check(ranks, score, mask, extras, dtype, placement, **ways)


@pytest.mark.slow
@pairs(mask=[mask.name for mask in MASKS], score=OTHER_SCORES, ways=WAYS, ranks=RANKS, placement=PLACED, extras=EXTRAS,
       dtype=DTYPES)  # fmt: skip
def test_every_mask(
    mask: str, score: str, ways: Any, ranks: int, placement: Any, extras: str, dtype: str
) -> None:  # fmt: skip
    check(ranks, score, mask, extras, dtype, placement, **ways)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_of_two_processes(way: str) -> None:
    check_dropout("scaled_dot", "Causal", 2, PLACEMENTS[1], WAYS[way])


@pytest.mark.slow
@pairs(score=("scaled_dot", "additive-tanh-bias"), mask=("none", "Causal", "valid_lens-2d"), ways=WAYS, ranks=RANKS,
       placement=PLACED)  # fmt: skip
def test_dropout_drops_what_one_device_drops(score: str, mask: str, ways: Any, ranks: int, placement: Any) -> None:
    ranks = min(ranks, 2) if ways.get("mode") == "heads" else ranks  # of which there are 2 KV heads
    check_dropout(score, mask, ranks, placement, ways)


def check_dropout(score: str, mask: str, ranks: int, placement: Any, ways: dict[str, str]) -> None:
    dropout = {"dropout": 0.4, "seed": 11}
    call, found = run(ranks, score, mask, "", "float64", placement, return_stats=("entropy",), **dropout, **ways)
    wanted = call.torch(**dropout)
    for name in ("out", *(f"grad.{name}" for name in call.leaves)):
        np.testing.assert_allclose(found[name], array(wanted[name]), rtol=1e-10, atol=1e-12, err_msg=name)


NORMALIZERS = {"sigmoid": "sigmoid", "sparsemax": "sparsemax", "entmax15": "entmax15", "entmax": ats.Entmax(1.2)}


@pytest.mark.parametrize(
    ("normalizer", "mode"), [("sigmoid", "gather"), ("sparsemax", "gather"), ("entmax15", "heads")]
)
def test_normalizers_of_two_processes(normalizer: str, mode: str) -> None:
    check_normalizer(NORMALIZERS[normalizer], "additive-tanh-bias", "Causal", "bias", 2, PLACEMENTS[1], mode)


@pytest.mark.slow
@pairs(normalizer=NORMALIZERS, mode=("auto", "gather", "heads"),
       mask=("none", "Causal", "SlidingWindow-both", "valid_lens-2d", "array-4d", "Neighbours"),
       score=("scaled_dot", "additive-tanh-bias", "gaussian-heads", "own-tile_gradient"),
       extras=("", "bias", "row-bias"), ranks=RANKS, placement=PLACED)  # fmt: skip
def test_normalizers_are_those_of_one_device(
    normalizer: Any, mask: str, score: str, mode: str, extras: str, ranks: int, placement: Any
) -> None:
    if mode == "heads":
        ranks, mask = min(ranks, 2), mask.replace("array-4d", "none")  # of 2 KV heads, which have one mask
    check_normalizer(normalizer, score, mask, extras, ranks, placement, mode)


def check_normalizer(
    normalizer: Any, score: str, mask: str, extras: str, ranks: int, placement: Any, mode: str
) -> None:
    """Output, gradients and statistics equal a call on one device."""
    call = make_call(score, mask, "float64", extras)
    # Log-sum-exp and entropy belong to the softmax.
    call = dataclasses.replace(call, seeds={"out": call.seeds["out"]})
    _, found = run(ranks, score, mask, extras, "float64", placement, call, mode=mode, normalizer=normalizer)
    wanted = {name: array(x) for name, x in call.torch(normalizer=normalizer).items() if x is not None}
    assert {*wanted} == {*found}
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("way", ["ring", "queries"])
def test_normalizers_are_refused_where_parts_are_merged(way: str) -> None:
    with pytest.raises(RankError, match=f"got '{way}': a normalizer other than the softmax") as caught:
        run(2, "scaled_dot", "Causal", normalizer="sparsemax", **WAYS[way])
    assert {*caught.value.kinds.values()} == {"ArgumentError"}


def test_attend_dispatches_operations_of_distributed_tensors() -> None:
    """`ats.attend` itself, by operations of torch; positions are refused, as they would be plain tensors."""
    for out, gradient, text in group_of(2).run("parallel_torch_calls.attend_of_distributed_tensors"):
        assert out and gradient
        assert "DTensor" in text and "to_local" in text and "Hint" in text
