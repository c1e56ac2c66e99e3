"""The benchmark: complete, correct before it times, its results of a known form and the page made from them.

Nothing here asserts a time. The runner runs on toy sizes; every case is computed once and compared with its reference.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnscore.cli import timing
from attnscore.cli.timing import Effort, alternate, summary
from attnscore.errors import ArgumentError, FileError
from bench import cases, charts, inputs, machine, measure, models, reports, results, runner
from bench.baselines import BASELINES, Baseline
from bench.cases import CASES, Case
from bench.inputs import Side, draw
from bench.models import MODELS, Pair
from bench.reference import WrongResult, reference
from bench.runner import exponent

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "benchmarks" / "__main__.py"
entry_main = runpy.run_path(str(ENTRY), run_name="entry")["main"]
SHORT = Effort(min_rounds=3, max_rounds=3, seconds=0.0)
pytestmark = pytest.mark.usefixtures("few_modules")

WATCHED = {case.name for case in CASES if case.watched}
CALLERS = ("numpy", "jax", "tensorflow", "tensorflow-graph")
CALLERS_MEMORY = {"memory-numpy", "memory-jax", "memory-tensorflow", "memory-tensorflow-graph"}
GROWTH = {"growth-dot", "growth-additive"}
# Cases of many shapes: baselines and modes.
EVERY_MODE = ("forward", "weights", "backward")
SHAPES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("small-self-attention", ("sdpa",), ("forward", "backward")),
    ("small-numpy", ("formula",), ("forward", "weights")),
    ("small-torch", ("formula",), EVERY_MODE),
    ("small-jax-eager", ("formula",), EVERY_MODE),
    ("small-jax", ("formula",), EVERY_MODE),
    ("small-tensorflow", ("formula",), EVERY_MODE),
    ("small-tensorflow-graph", ("formula",), EVERY_MODE),
    ("small-layers-torch", ("formula",), EVERY_MODE),
    ("small-layers-keras", ("formula", "keras-layer"), EVERY_MODE),
    ("small-layers-keras-graph", ("formula", "keras-layer"), ("forward", "backward")),
    ("small-layers-flax", ("formula",), EVERY_MODE),
    ("small-layers-flax-jit", ("formula",), ("forward", "backward")),
]
SMALL = {row[0] for row in SHAPES}
# Those that compile something for every shape: two or three seconds each.
COMPILED = {name for name in SMALL if name.endswith(("-graph", "-jit", "jax-eager", "-flax"))}
# Sizes of whole models on a toy: the least that has every feature.
MODEL_SIZES = {
    "batch": 2, "tokens": 9, "layers": 2, "heads": 2, "kv_heads": 1, "width": 16, "vocabulary": 11, "window": 2,
    "prompt": 5, "new": 4, "steps": 3, "dropout": 0.1, "prepares_keys": True, "packs": True,
}  # fmt: skip
COMPILERS = ("compile", "flex", "keops")
MEMORY = {"memory-dot", "memory-additive"}


def toy(case: Case) -> Case:
    """The case on a few dozen positions; more than one tile of no kernel, but every feature."""
    sizes = dict(case.sizes)
    if case.kind == "limits":
        return dataclasses.replace(case, sizes={"side": 32, "numbers": 1000})
    if case.kind == "model":
        return dataclasses.replace(case, sizes={name: MODEL_SIZES[name] for name in sizes})
    if case.kind == "shapes":
        heads = sizes["shapes"][0][1]
        scores = dict.fromkeys(shape[0] for shape in sizes["shapes"])
        return dataclasses.replace(case, sizes={"shapes": [(score, heads and 2, 3, 5, 8, 2) for score in scores]})
    sizes |= {"queries": min(sizes["queries"], 37), "keys": 37 if sizes["queries"] > 1 else 53, "dim": 8}
    sizes |= {"heads": min(sizes["heads"], 2)}
    if "visible" in sizes:
        sizes["visible"] = {"window": 5, "interval-mask": 37}.get(case.name, 19)
    if "lengths" in sizes:
        sizes["lengths"] = [96, 192]
    # A compiler takes many seconds, whatever the size; the slow test below has them.
    wanted = tuple(baseline for baseline in case.baselines if baseline not in COMPILERS)
    return dataclasses.replace(case, sizes=sizes, baselines=wanted)


TOYS = {case.name: toy(case) for case in CASES}
TIMED = [name for name, case in TOYS.items() if case.kind == "time"]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    machine.set_threads(before)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", tuple(TOYS.values()))


# --------------------------------------------------------------- the table


def test_the_shapes_are_those_of_the_page() -> None:
    def shape(name: str) -> tuple[int, ...]:
        sizes = cases.named(name).sizes
        return tuple(sizes[axis] for axis in ("batch", "heads", "queries", "keys", "dim"))

    usual = (1, 8, 2048, 2048, 64)
    others = ("dot-backward", "dot-bfloat16", "causal", "padded", "additive-long", "statistics", "dropout")
    assert all(shape(name) == usual for name in ("dot", *others, "interval-mask", *CALLERS))
    assert shape("additive") == shape("additive-backward") == (1, 0, 512, 512, 256)
    assert shape("decoding") == (1, 32, 1, 32768, 128)
    assert shape("tiny") == shape("tiny-backward") == (2, 8, 16, 16, 64)
    assert shape("watch") == shape("watch-causal") == shape("watch-layer") == shape("watch-one-pass") == usual
    short = ("watch-short", "watch-one-pass-short", "watch-layer-short")
    assert all(shape(name) == (8, 12, 128, 128, 32) for name in short)
    assert shape("watch-wide") == (1, 8, 512, 512, 128)
    assert (shape("window")[2:4], cases.named("window").sizes["visible"]) == ((8192, 8192), 256)
    assert cases.named("padded").sizes["visible"] == 1024
    assert all(cases.named(name).sizes["lengths"] == [1024, 2048, 4096, 8192] for name in GROWTH)
    assert all(shape(name) == (1, 1, 131072, 131072, 64) and cases.named(name).mask == "causal" for name in MEMORY)
    assert all(shape(name) == (1, 1, 32768, 32768, 64) for name in CALLERS_MEMORY)
    assert {cases.named(name).framework for name in {*CALLERS, *CALLERS_MEMORY}} == {"numpy", "jax", "tensorflow"}


def test_names_and_baselines_are_known() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    used = {baseline for case in CASES for baseline in case.baselines}
    assert used == set(BASELINES)


def test_the_long_cases_are_asked_for() -> None:
    assert {case.name for case in cases.chosen((), full=False)} == {case.name for case in CASES} - MEMORY
    assert len(cases.chosen((), full=True)) == len(CASES)
    assert [case.name for case in cases.chosen(["memory-dot", "tiny"], full=False)] == ["tiny", "memory-dot"]
    with pytest.raises(ArgumentError, match=r"--only: expected one of dot, .*, got 'dott'. Hint: did you mean 'dot'"):
        cases.chosen(["dott"], full=False)


@pytest.mark.parametrize(("name", "baselines", "modes"), SHAPES)
def test_every_case_of_many_shapes(name: str, baselines: tuple[str, ...], modes: tuple[str, ...]) -> None:
    case = cases.named(name)
    assert (case.baselines, case.modes) == (baselines, modes)
    points = case.points()
    assert len({each.shape() for each, _ in points}) == 40 and len(points) == 40 * len(modes)
    shapes = {(each.score, *(each.sizes[axis] for axis in ("batch", "queries", "keys", "dim"))) for each, _ in points}
    if name == "small-self-attention":
        assert all(32 <= queries == keys <= 512 and 32 <= dim <= 128 for _, _, queries, keys, dim in shapes)
        assert {each.sizes["heads"] for each, _ in points} <= set(range(4, 17)) and not case.mask
        return
    assert case.mask == "lens" and not any(each.sizes["heads"] for each, _ in points)
    for score in ("scaled_dot", "additive", "bilinear", "gaussian"):
        # D2L's example, its translation model, and queries as many as keys.
        assert {(score, 2, 1, 10, 8), (score, 64, 1, 10, 256), (score, 64, 10, 10, 64)} <= shapes
        assert sum(shape[0] == score for shape in shapes) == 10
    assert all(batch <= 256 and queries <= 10 and keys <= 64 and dim <= 1024 for _, batch, queries, keys, dim in shapes)


# Lengths of an array leave fewer pairs than are counted.
@pytest.mark.parametrize(
    "name", [name for name in TOYS if name not in MEMORY | SMALL | {*MODELS, "limits", "additive-layer"}]
)
def test_pairs_are_those_of_the_mask(name: str) -> None:
    case = TOYS[name]
    allowed = draw(case).allowed()
    count = case.sizes["queries"] * case.sizes["keys"] if allowed is None else int(allowed.sum())
    assert case.pairs() == count * max(1, case.sizes["heads"]) * case.sizes["batch"]


def test_work_by_hand() -> None:
    assert cases.named("dot").work()["operations"] == 4 * 64 * 8 * 2048**2
    assert cases.named("dot-backward").work()["operations"] == 14 * 64 * 8 * 2048**2
    assert cases.named("additive").work()["activations"] == 256 * 512**2
    assert cases.named("additive-backward").work()["activations"] == 3 * 256 * 512**2
    assert cases.named("decoding").work()["bytes"] == 4 * 128 * 32 * (2 + 2 * 32768)


# ----------------------------------------------------- correct, then timed


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.slow_rows("causal")
def test_every_case_on_a_toy(name: str) -> None:
    rows = measure.time_case(TOYS[name], 1, SHORT)
    assert [row["baseline"] for row in rows] == list(TOYS[name].baselines)
    for row in rows:
        assert row["accuracy"]["error"] <= row["accuracy"]["allowed"]
        if row["status"] == "not run":
            # Only what is not installed; what is must be able to do its case.
            assert row["reason"].endswith("is not installed"), row["reason"]
        else:
            assert row["rounds"] == 3
    # As it comes back from the file.
    assert not results.check(json.loads(json.dumps(document(rows))))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COMPILED else ()) for name in sorted(SMALL)]
)
@pytest.mark.slow_rows("small-jax", "small-layers-keras", "small-tensorflow", "small-layers-torch", "small-torch")
def test_every_case_of_many_shapes_on_a_toy(name: str) -> None:
    case = TOYS[name]
    rows = measure.time_shapes(case, 1, dataclasses.replace(SHORT, min_rounds=1, max_rounds=1))
    assert [row["baseline"] for row in rows] == list(case.baselines)
    for row in rows:
        # Keras has no bilinear and no Gaussian attention.
        lacks = ("bilinear", "gaussian") if row["baseline"] == "keras-layer" else ("none",)
        every = {(each.shape(), mode) for each, mode in case.points() if not each.score.startswith(lacks)}
        assert {(point["shape"], point["mode"]) for point in row["points"]} == every
        assert all(text.startswith(lacks) for text in row["left_out"])
        assert row["worst"] == min(row["points"], key=lambda point: point["ratio"])
    assert not results.check(json.loads(json.dumps(document(rows))))


# Loading TensorFlow, or the weights of a pretrained model, and compiling take seconds.
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow_rows("model-keras-classifier", "model-minilm", "model-llama-generate", "model-jax-gpt")
def test_every_model_computes_the_same_on_both_sides(name: str) -> None:
    row = measure.time_model(TOYS[name], 1, SHORT)
    assert row["status"] == "measured" and row["rounds"] == 3, row["reason"]
    assert 0 < row["accuracy"]["error"] <= row["accuracy"]["allowed"]
    found = document([row])
    assert not results.check(json.loads(json.dumps(found)))
    titles = {title for title, _, rows in reports.screen_tables(found) if rows}
    assert titles == {"Speed"}  # no work is counted, so no rates


@pytest.mark.parametrize("name", ["model-gpt", "model-gpt-dropout", "model-encoder-padded", "model-encoder-window"])
def test_a_model_with_a_wrong_side_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = models.ats.attend
    monkeypatch.setattr(models.ats, "attend", lambda *arrays, **options: right(*arrays, **options) * 1.01)
    with pytest.raises(WrongResult, match=rf"^{name}: the sides differ by .*, allowed"):
        measure.time_model(TOYS[name], 1, SHORT)


def test_both_sides_of_a_model_with_dropout_draw() -> None:
    pair = MODELS["model-gpt-dropout"](**TOYS["model-gpt-dropout"].sizes)
    assert all(run()[0] != run()[0] for run in (pair.ours, pair.theirs))


@pytest.mark.parametrize("wrong", [float("nan"), 1.001])
def test_a_difference_in_any_array_is_seen(wrong: float) -> None:
    with pytest.raises(WrongResult, match=r"^model: the sides differ by (nan|0\.001)"):
        Pair(lambda: [1.0, wrong], lambda: [1.0, 1.0]).check("model")
    with pytest.raises(WrongResult, match="differ by inf"):
        Pair(lambda: [np.ones(2)], lambda: [np.ones(1)]).check("model")


def test_a_model_whose_framework_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    row = measure.time_model(TOYS["model-jax-gpt"], 1, SHORT)
    assert (row["status"], row["reason"]) == ("not run", "jax is not installed")
    assert not results.check(json.loads(json.dumps(document([row]))))


@pytest.mark.parametrize("name", sorted(WATCHED))
def test_a_watched_side_is_watched_and_then_no_more(name: str) -> None:
    from torch.nn import functional

    from attnscore.diagnostics.watching import torch_patches

    original, given = functional.scaled_dot_product_attention, draw(TOYS[name])
    side = inputs.ours(given)
    (watching,) = torch_patches._WATCHERS
    side.run()
    side.run()
    assert watching.sampled == watching.steps == 2 and not watching.unseen
    assert [row["rows"] for row in watching.rows()] == [2 * given.case.sizes["batch"] * 37] * 2
    plain = inputs.ours(given, plain=True)
    outputs = plain.outputs(plain.run())[0], side.outputs(side.run())[0]
    assert (
        torch.allclose(*outputs, atol=1e-6) if "one-pass" in name else torch.equal(*outputs)
    ) and watching.steps == 3
    del side
    assert functional.scaled_dot_product_attention is original


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "baseline"),
    [("additive", "compile"), ("additive", "keops"), ("window", "flex")],
)
def test_what_is_compiled_on_a_toy(name: str, baseline: str) -> None:
    case = dataclasses.replace(TOYS[name], baselines=(baseline,))
    (row,) = measure.time_case(case, 1, SHORT)
    if baseline == "keops" and row["reason"] == "pykeops is not installed":
        pytest.skip(row["reason"])
    assert row["status"] == "measured", row["reason"]


@pytest.mark.parametrize("name", ["dot", "dot-backward", "additive-backward", "numpy", "dropout-backward", "window"])
def test_a_wrong_result_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = inputs.ours

    def wrong(given: Any, **more: Any) -> Side:
        side = right(given, **more)

        def outputs(found: Any) -> tuple[Any, ...]:
            *first, last = side.outputs(found)
            # One number of the last result, by a hundredth: eps of float32 is 10^-7.
            last = last.clone() if hasattr(last, "clone") else last.copy()
            last[(0,) * last.ndim] += 0.01
            return (*first, last)

        return Side(side.run, outputs)

    monkeypatch.setattr(measure, "ours", wrong)
    with pytest.raises(WrongResult, match=rf"^{name}, attnscore: error .*, allowed"):
        measure.time_case(TOYS[name], 1, SHORT)


def test_nan_is_a_wrong_result() -> None:
    given = draw(TOYS["dot"])
    with pytest.raises(WrongResult, match="error inf"):
        reference(given).check("dot", (torch.full_like(given.query, float("nan")),))
    with pytest.raises(WrongResult, match="expected 1 results, got 2"):
        reference(given).check("dot", (given.query, given.query))


def test_a_baseline_that_computes_something_else_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(given: Any) -> Side:
        return Side(lambda: given.value * 2, lambda out: (out,))

    def broken(given: Any) -> Side:
        raise RuntimeError("no\ncompiler")

    monkeypatch.setitem(BASELINES, "sdpa", Baseline("other", other))
    monkeypatch.setitem(BASELINES, "naive", Baseline("broken", broken))
    case = dataclasses.replace(TOYS["dot"], baselines=("sdpa", "naive"))
    first, second = measure.time_case(case, 1, SHORT)
    assert first["status"] == second["status"] == "not run"
    assert first["reason"].startswith("its result is another one: dot, sdpa: error")
    assert second["reason"] == "RuntimeError: no compiler"


def test_a_missing_baseline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    (row,) = measure.time_case(dataclasses.replace(TOYS["dot"], baselines=("xla",)), 1, SHORT)
    assert (row["status"], row["reason"], row["ratio"]) == ("not run", "jax is not installed", None)


def test_large_cases_are_compared_on_some_rows_with_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.reference._WHOLE", 10)
    monkeypatch.setattr("bench.reference._ROWS", 5)
    given = draw(TOYS["causal"])
    some = reference(given)
    assert list(some.rows) == [0, 9, 18, 27, 36]
    side = inputs.ours(given)
    some.check("causal", side.outputs(side.run()))


def test_blocks_do_not_matter_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw(TOYS["additive-backward"])
    whole = reference(given)
    monkeypatch.setattr("bench.reference._BLOCK", 1000)
    parts = reference(given)
    for one, other in zip(whole.exact, parts.exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(whole.scale, parts.scale, rtol=1e-12)


# ------------------------------------------------------------------ timing


@pytest.mark.skipif(not timing._TASKS.exists(), reason="no list of this process's threads here")
def test_threads_that_go_on_running_after_a_side_are_seen() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # runs without the interpreter's lock

    timing._wait_until_idle()  # what other tests left running
    assert not timing._others_run()
    thread = threading.Thread(target=spin)
    thread.start()
    seen = any(timing._others_run() for _ in range(10_000))
    stop.set()
    thread.join()
    assert seen
    timing._wait_until_idle()
    assert not timing._others_run()


def test_no_side_begins_before_the_threads_of_the_other_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    running, happened = iter([True, True, False, False]), []
    monkeypatch.setattr("attnscore.cli.timing._others_run", lambda: happened.append("looked") or next(running))
    alternate(lambda: happened.append("ours"), lambda: happened.append("theirs"), Effort(1, 1, 0.0))
    at = len(happened) - 1 - happened[::-1].index("looked")
    assert happened[at - 1] == "ours" and happened[at + 1] == "theirs"
    assert happened.count("looked") == 4
    assert happened[happened.index("looked") :][:4] == ["looked", "looked", "looked", "ours"]


def test_sides_alternate_and_the_order_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    # Calls that seem longer than a sample: one a round.
    monkeypatch.setattr("attnscore.cli.timing._SAMPLE", 1e-9)
    times = alternate(lambda: said.append("a"), lambda: said.append("b"), Effort(min_rounds=4, max_rounds=4, seconds=0))
    assert "".join(said[-8:]) == "abbaabba"
    assert [len(side) for side in times] == [4, 4]


def test_a_first_call_in_cold_caches_does_not_say_how_many_fill_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.004, *[0.0001] * 20])
    monkeypatch.setattr("attnscore.cli.timing._sample", lambda side, repeat: next(seconds))
    assert timing._repeats(lambda: None) == 50


def test_rounds_end_with_the_time_or_their_number() -> None:
    nothing = lambda: None  # noqa: E731
    assert len(alternate(nothing, nothing, Effort(min_rounds=3, max_rounds=9, seconds=60))[0]) == 9
    assert len(alternate(nothing, nothing, Effort(min_rounds=7, max_rounds=101, seconds=0))[0]) == 7


def test_summary_and_exponent() -> None:
    assert summary([4, 1, 2, 3, 5]) == {"median": 3, "q1": 2, "q3": 4}
    assert exponent([1000, 2000, 4000], [5e6, 20e6, 80e6]) == pytest.approx(2)
    assert exponent([1000], [1.0]) is None
    assert exponent([1, 2], [0.0, 1.0]) is None


# --------------------------------------------------- runner, in processes


@pytest.mark.slow
def test_the_runner_in_processes_of_its_own(toys: None) -> None:
    heard: list[str] = []
    chosen = [cases.named("tiny"), cases.named("growth-additive")]
    chosen[1] = dataclasses.replace(chosen[1], baselines=())
    found = runner.run(chosen, [1], quick=True, tell=lambda text, at, of: heard.append(f"{at}/{of} {text}"))
    assert heard[0] == "1/3 tiny, 1 thread" and heard[2] == "3/3 growth-additive, 192 tokens, 1 thread"
    assert not found["errors"] and not results.check(json.loads(json.dumps(found)))
    timed, grown = found["rows"]
    assert (timed["case"], timed["status"], timed["threads"]) == ("tiny", "measured", 1)
    assert [point["length"] for point in grown["points"]] == [96, 192]
    assert all(point["peak"] >= 0 and point["arrays"] == arrays_of(point["length"]) for point in grown["points"])


@pytest.mark.slow
def test_the_limits_of_the_machine(toys: None) -> None:
    """Rates of the libraries, and what part of them a case takes."""
    found = runner.run([cases.named("limits"), cases.named("tiny")], [1], quick=True)
    assert not found["errors"] and not results.check(json.loads(json.dumps(found)))
    limits, timed = found["rows"]
    assert limits["threads"] == 1 and set(limits["products"]) == {"float32", "bfloat16"}
    assert min(limits["reading"], *limits["products"].values()) > 0
    limits |= {"products": {"float32": 1e9, "bfloat16": 2e9}, "reading": 4e9}
    timed |= {"work": {"operations": 10**9, "activations": 0, "bytes": 10**9}, "ours": GOOD_ROW["ours"] | {"median": 2}}
    assert screen_rows(found, "Limits of the machine") == [("1", "1", "2", "4")]
    assert screen_rows(found, "Rates reached") == [("tiny", "1", timed["kernel"], "0.5", "", "0.5", "50%", "12%")]
    timed["case"] = "dot-bfloat16"
    assert screen_rows(found, "Rates reached")[0][-2:] == ("25%", "12%")
    limits["products"]["bfloat16"] = 1e7  # slower than float32, to which it can be widened
    assert screen_rows(found, "Rates reached")[0][-2:] == ("50%", "12%")


def arrays_of(length: int) -> int:
    """Query, key, value, their gradients, out and the gradient into it; w_v and its gradient."""
    return 4 * (8 * length * 8 + 2 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLERS_MEMORY))
def test_memory_of_callers_of_other_frameworks(toys: None, name: str) -> None:
    found = runner.run([cases.named(name)], [1], quick=True)
    assert not found["errors"] and not results.check(json.loads(json.dumps(found)))
    (row,) = found["rows"]
    (point,) = row["points"]
    # Query, key, value, out and the gradient into it, three gradients; w_v is drawn and no input.
    assert point["arrays"] == 4 * 8 * 37 * 8


@pytest.mark.slow
def test_a_failed_process_is_an_error_and_no_row(toys: None) -> None:
    broken = dataclasses.replace(cases.named("tiny"), sizes={"batch": 1})
    found = runner.run([broken, cases.named("tiny")], [1], quick=True)
    assert [row["case"] for row in found["rows"]] == ["tiny"]
    (error,) = found["errors"]
    assert error["case"] == "tiny, 1 thread" and "KeyError: 'heads'" in error["error"]


def test_a_refused_result_is_an_error_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout='{"wrong": "tiny, attnscore: error 1"}', stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    found = runner.run([TOYS["tiny"]], [1])
    assert (found["rows"], found["errors"]) == ([], [{"case": "tiny, 1 thread", "error": "tiny, attnscore: error 1"}])


def test_growth_without_proc_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "can_measure_memory", lambda: "only Linux")
    rows = runner.run([TOYS["growth-dot"]], [1])["rows"]
    assert [(row["side"], row["status"], row["reason"]) for row in rows] == [
        ("attnscore", "not run", "only Linux"),
        ("naive", "not run", "only Linux"),
    ]
    assert not results.check(document(rows))


def printed(code: str, **options: Any) -> str:
    """What code prints in a process of its own."""
    command = [sys.executable, "-c", code]
    folder = ROOT / "benchmarks"
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, **options).stdout


def test_a_process_is_held_to_its_threads() -> None:
    environment = machine.environment(1)
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    code = "from bench import machine; machine.pin(1); print(len(machine.cpus()))"
    assert printed(code, env=environment) == "1\n"


def test_the_benchmark_imports_no_framework_before_it_runs() -> None:
    code = "import sys, bench.runner, bench.reports, bench.measure\n"
    code += "print(*{'torch', 'jax', 'pykeops', 'onnxruntime', 'rich', 'typer'} & set(sys.modules))"
    assert printed(code) == "\n"


# ------------------------------------------------------------- the document

GOOD_ROW: dict[str, Any] = {
    "kind": "time", "case": "dot", "what": "scaled dot", "threads": 1, "kernel": "native", "baseline": "sdpa",
    "work": {"operations": 10**9, "activations": 0, "bytes": 10**6}, "accuracy": {}, "status": "measured",
    "reason": None, "rounds": 7,
    "ours": {"median": 0.02, "q1": 0.019, "q3": 0.021}, "theirs": {"median": 0.03, "q1": 0.03, "q3": 0.031},
    "ratio": {"median": 1.5, "q1": 1.45, "q3": 1.6},
}  # fmt: skip


def document(rows: list[Any], **more: Any) -> dict[str, Any]:
    whole = {"schema": results.SCHEMA, "date": "2026-01-01", "quick": False, "threads": [1], "errors": []}
    return {**whole, "machine": machine.facts(), "rows": copy.deepcopy(rows), **more}


def screen_rows(results: dict[str, Any], title: str) -> list[Sequence[str]]:
    return next(rows for name, _, rows in reports.screen_tables(results) if name == title)


SHAPES_ROW: dict[str, Any] = {
    "kind": "shapes", "case": "small-torch", "what": "small shapes, PyTorch", "threads": 1, "baseline": "formula",
    "status": "measured", "reason": None, "left_out": [], "points": [
        {"shape": "additive (2,1,10) h 8", "mode": mode, "ours": 1e-5, "theirs": ratio * 1e-5, "ratio": ratio,
         "q1": ratio, "q3": ratio} for mode, ratio in (("forward", 4.0), ("weights", 2.0), ("backward", 0.5))
    ],
    "geometric_mean": 1.587,
}  # fmt: skip
SHAPES_ROW["worst"] = SHAPES_ROW["points"][2]


def test_a_good_document_passes() -> None:
    assert not results.check(document([GOOD_ROW, SHAPES_ROW]))


def test_a_row_of_shapes_is_its_mean_and_its_worst() -> None:
    points = SHAPES_ROW["points"]
    row = measure.summed_up(points, ["gaussian (1,1,1) d 8, forward: no gaussian"])
    assert row["geometric_mean"] == pytest.approx(4 ** (1 / 3)) and row["worst"] is points[2]
    assert row["status"] == "measured"
    none = measure.summed_up([], ["additive (1,1,1) h 8, forward: not installed"])
    assert (none["status"], none["reason"]) == ("not run", "additive (1,1,1) h 8, forward: not installed")
    assert not results.check(document([{**SHAPES_ROW, **none}]))


def test_the_report_of_many_shapes() -> None:
    found = document([SHAPES_ROW])
    text = reports.page({"new": found}, [("all", "all.png"), ("Ratios of all small shapes", "shapes.png")])
    assert (
        "| PyTorch | fastest formula | new | 1.59 | 0.50 |  |  |\n\n![Ratios of all small shapes](shapes.png)" in text
    )
    assert screen_rows(found, "Many small shapes")[0][4:] == (
        "3", "1.59", "0.50: additive (2,1,10) h 8, backward",
    )  # fmt: skip
    assert "Many small shapes" not in reports.page({"new": document([])}, [])


def test_the_chart_has_a_panel_for_each_number_of_threads_and_a_dot_for_each_shape() -> None:
    found = document([SHAPES_ROW, {**SHAPES_ROW, "threads": 2}, {**SHAPES_ROW, "status": "not run", "points": []}])
    panels = charts.small_shapes(found).axes
    assert [axis.get_yscale() for axis in panels] == ["log", "log"]
    dots = [line for line in panels[1].lines if line.get_marker() == "o"]
    assert [line.get_ydata()[0] for line in dots] == [4.0, 2.0, 0.5]
    assert charts.has_shapes(found) and not charts.has_shapes(document([GOOD_ROW]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ours": None}, "ours is missing"),
        ({"kernel": None}, "kernel is missing"),
        ({"kind": "tiem"}, "unknown kind 'tiem'"),
        ({"status": "skipped"}, "status 'skipped'"),
        ({"status": "not run"}, "reason is missing"),
    ],
)
def test_a_bad_row_is_seen(change: dict[str, Any], said: str) -> None:
    assert said in results.check(document([{**GOOD_ROW, **change}]))[0]


def test_a_bad_document_is_seen(tmp_path: Path) -> None:
    assert results.check([]) == ["document: expected an object, got list"]
    assert "schema: expected" in results.check(document([], schema=99))[0]
    assert "machine: cpu" in results.check(document([], machine={}))[0]
    path = tmp_path / "results.json"
    damaged = json.dumps(document([GOOD_ROW]) | {"rows": 3})
    for text, said in (
        ("{", "not JSON"),
        ("{}", "schema is missing"),
        ("[" * 10**5, "damaged or truncated JSON file"),
        (damaged, "damaged or truncated file of results"),
        (None, "no such file"),
    ):
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
        with pytest.raises(FileError, match=said):
            results.read(path)


def test_written_is_what_is_read(tmp_path: Path) -> None:
    results.write(document([GOOD_ROW]), tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == document([GOOD_ROW])


def test_cases_measured_again_take_the_place_of_their_own() -> None:
    other, new = {**GOOD_ROW, "case": "tiny"}, {**GOOD_ROW, "rounds": 99}
    errors = [{"case": f"{name}, 1 thread", "error": "wrong"} for name in (GOOD_ROW["case"], "window")]
    before = document([GOOD_ROW, {**GOOD_ROW, "baseline": "xla"}, other], errors=errors)
    found = results.joined(before, document([new]))
    assert found["rows"] == [new, other] and found["errors"] == errors[1:] and not results.check(found)
    added = results.joined(before, document([{**GOOD_ROW, "case": "causal"}]))
    assert [row["case"] for row in added["rows"]] == [GOOD_ROW["case"], GOOD_ROW["case"], "tiny", "causal"]
    failed = results.joined(before, document([], errors=errors[:1]))
    assert failed["rows"] == [other] and len(failed["errors"]) == 2
    with pytest.raises(FileError, match="another threads"):
        results.joined(before, document([new], threads=[1, 2]))
    more = {**before["machine"], "kernels": [*before["machine"]["kernels"], "another"]}
    assert results.joined(before, document([new], machine=more))["machine"] == more
    with pytest.raises(FileError, match="another list of kernels"):
        results.joined(document([new], machine=more), before)


def test_the_report_says_where_a_baseline_is_faster() -> None:
    slower = {"ratio": {"median": 0.5, "q1": 0.5, "q3": 0.5}, "theirs": {**GOOD_ROW["theirs"]}}
    slower["theirs"] |= {"median": 0.01}
    absent = {
        "baseline": "xla",
        "status": "not run",
        "reason": "jax is not installed",
    }
    found = document([GOOD_ROW, {**GOOD_ROW, **slower, "threads": 2}, {**GOOD_ROW, **absent}])
    assert reports.faster_baselines(found) == [
        "scaled dot: torch scaled_dot_product_attention is 2.00 (2 threads) times as fast"
    ]
    rows = screen_rows(found, "Speed")
    assert rows[0][:7] == ("dot", "sdpa", "1", "20 ms", "30 ms", "1.50", "1.45 to 1.60")
    assert rows[2][5:7] == ("not run", "jax is not installed")
    assert screen_rows(found, "Rates reached")[0][:6] == ("dot", "1", "native", "50", "", "0.05")


@pytest.mark.parametrize(("time", "text"), [(1.5, "1.5 s"), (0.0123, "12.3 ms"), (2.5e-5, "25 µs"), (120, "120 s")])
def test_times_have_three_digits(time: float, text: str) -> None:
    assert reports.seconds(time) == text


def test_a_page_without_a_section_is_refused() -> None:
    with pytest.raises(FileError, match="no section between"):
        reports.page_with("# a page", document([]))


# ------------------------------------------------- what lies in the project


def test_a_ratio_is_theirs_over_ours_in_every_row() -> None:
    """Also where an older row has our time over theirs."""
    most = {**GOOD_ROW, "case": "tiny", "at_most": True, "ratio": {"median": 0.5, "q1": 0.4, "q3": 0.8}}
    (row,) = screen_rows(document([most]), "Speed")
    assert row[5:] == ("2.00", "1.25 to 2.50")


def test_the_page_of_all_machines() -> None:
    old = document([{**GOOD_ROW, "threads": 2}], date="2026-01-01", commit="abc1234")
    slow = {"ratio": {"median": 0.5, "q1": 0.5, "q3": 0.5}}
    new = document([{**GOOD_ROW, **slow, "threads": 2}], date="2026-02-02", commit=None)
    documents = {"old": old, "new": new}
    text = reports.page(documents, [("all", "chart.png")])
    assert text.startswith("![all](chart.png)") and "Whole models" not in text
    assert "|  | against | old | new |" in text
    assert "| scaled dot, forward | torch scaled_dot_product_attention | 1.5 | 0.5 |" in text
    assert "| old | 2026-01-01, `abc1234` |" in text and "| new | 2026-02-02 |" in text
    assert "- new: scaled dot: torch scaled_dot_product_attention is 2.00 (2 threads) times as fast" in text
    (axis,) = charts.overview(documents).axes
    marks = [line for line in axis.lines if line.get_marker() != "None"]
    assert len({tuple(line.get_ydata()) for line in marks}) == 2, "no mark hides another"
    assert [list(line.get_xdata()) for line in marks] == [[1.5], [0.5]] and axis.get_xscale() == "log"
    assert [text.get_text() for text in axis.texts] == [*reports.OVERVIEW]
    lines = [*axis.get_yticks(), *(text.get_position()[1] for text in axis.texts)]
    assert len(lines) == len({*lines}) == len(reports.OVERVIEW) + sum(map(len, reports.OVERVIEW.values()))


def test_whole_models_come_first_on_the_page() -> None:
    row = {**GOOD_ROW, "case": "model-gpt", "what": "GPT"}
    text = reports.page({"new": document([row, {**row, "threads": 2}])}, [])
    what = cases.named("model-gpt").what
    assert text.startswith("### Whole models\n\n|  | against | new, 1 thread | new, 2 threads |")
    assert f"| {what} | torch scaled_dot_product_attention | 1.50 | 1.50 |" in text


def test_rows_of_the_overview_are_cases() -> None:
    rows = [row for group in reports.OVERVIEW.values() for row in group]
    assert all(baseline in cases.named(case).baselines for case, baseline, _ in rows)


def test_rows_measured_earlier_say_when() -> None:
    other = {**GOOD_ROW, "case": "tiny"}
    before = document([GOOD_ROW, other], date="2026-01-01", commit="abc1234")
    found = results.joined(before, document([GOOD_ROW], date="2026-02-02", commit="def5678"))
    assert [row.get("commit") for row in found["rows"]] == [None, "abc1234"] and not results.check(found)
    assert reports.measured(found) == "2026-01-01 to 2026-02-02, `abc1234`, `def5678`"


def test_a_checkout_that_does_not_hold_the_package_gives_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one into whose environment it is installed."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.commit() is None


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout="abc1234\n"))
    assert machine.commit() == "abc1234"

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert machine.commit() is None


KEPT = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
# Measured on every machine; other cases are younger than some results.
MEASURED = {"dot", "dot-backward", "causal", "padded", "window", "decoding", "additive", "additive-backward", "limits"}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_results_of_the_project_have_the_form(path: Path) -> None:
    found = results.read(path)
    assert {row["case"] for row in found["rows"]} >= MEASURED | GROWTH | CALLERS_MEMORY | {*CALLERS}
    assert not found["errors"]


def test_the_page_of_performance_shows_the_results_of_the_project() -> None:
    """`python benchmarks --page` makes it so."""
    entry = runpy.run_path(str(ENTRY), run_name="entry")
    assert entry["rendered"]() == (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert all((ROOT / "docs" / "images" / entry[name]).exists() for name in ("OVERVIEW", "SMALL_SHAPES"))
    assert len(entry["documents"]()) == len(KEPT)
    assert [entry["machine_name"](stem) for stem in ("zen4-avx2", "cascade-lake")] == ["Zen 4, AVX2", "Cascade Lake"]


@pytest.fixture
def entry_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The entry with an empty folder of results and of pages."""
    entry = runpy.run_path(str(ENTRY), run_name="entry")
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    (tmp_path / "performance.md").write_text(f"all\n{reports.BEGIN}\nold\n{reports.END}\n", encoding="utf-8")
    for folder in ("HERE", "DOCS"):
        monkeypatch.setitem(entry["main"].__globals__, folder, tmp_path)
    return entry


def test_the_entry_makes_the_page(entry_elsewhere: Any, tmp_path: Path) -> None:
    for name, rows in (("new", [GOOD_ROW, SHAPES_ROW]), ("old", [GOOD_ROW])):
        results.write(document(rows), tmp_path / "results" / f"{name}.json")
    assert entry_elsewhere["main"](["--page"]) == 0
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert text.startswith("all\n") and {"New", "Old"} <= {cell.strip() for cell in text.split("|")}
    assert "old\n<!--" not in text and "small shapes on New" in text
    made = sorted((tmp_path / "images").iterdir())
    assert [path.name for path in made] == ["performance-small-shapes.png", "performance.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


@pytest.mark.slow
def test_the_entry_keeps_results_under_the_name_of_the_machine(
    entry_elsewhere: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def bench(arguments: list[str]) -> int:
        assert arguments[:-1] == ["run", "--only", "dot", "--out"]
        path = Path(arguments[-1])
        seen.append(path.exists())
        results.write(document([{**GOOD_ROW, "threads": 2}]), path)
        return 0

    monkeypatch.setitem(entry_elsewhere["main"].__globals__, "main", bench)
    for _ in range(2):
        assert entry_elsewhere["main"](["zen9", "--only", "dot"]) == 0
    assert seen == [False, True]  # --again finds what is kept
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["zen9.json"]
    assert "| against | Zen 9 |" in (tmp_path / "performance.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zen5", "--only", "tiny", "--out", "folder"], "`python benchmarks run` has it"),
        ([], "or the name of the machine"),
        (["--only", "tiny"], "or the name of the machine"),
        (["../zen5"], "or the name of the machine"),
        (["gpu-code"], "expected the page"),
    ],
)
def test_wrong_arguments_of_the_entry(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = runpy.run_path(str(ENTRY), run_name="entry")
    assert entry["main"](arguments) == 2
    assert said in capsys.readouterr().err


# --------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_on_a_toy(toys: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = entry_main(["run", "--quick", "--only", "tiny", "--threads", "1", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert printed.err == "[1/1] tiny, 1 thread\n"
    assert "sdpa" in printed.out and "Traceback" not in printed.out
    found = results.read(tmp_path / "out" / "results.json")
    assert found["quick"] is True and [row["case"] for row in found["rows"]] == ["tiny"]
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_measures_a_case_again(toys: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["run", "--quick", "--threads", "1", "--out", str(tmp_path)]
    assert entry_main([*arguments, "--again"]) == 2 and "--again: expected --only" in capsys.readouterr().err
    assert entry_main([*arguments, "--only", "tiny", "--again"]) == 2 and "no such file" in capsys.readouterr().err
    assert entry_main([*arguments, "--only", "tiny"]) == 0
    kept = results.read(tmp_path / "results.json")
    kept["rows"].append({**kept["rows"][0], "case": "dot"})
    results.write(kept, tmp_path / "results.json")
    assert entry_main([*arguments, "--only", "tiny", "--again"]) == 0
    assert [row["case"] for row in results.read(tmp_path / "results.json")["rows"]] == ["tiny", "dot"]


def test_cases_of_another_setting_are_refused_before_they_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results.write(document([GOOD_ROW]), tmp_path / "results.json")
    monkeypatch.delattr("bench.command.run")
    arguments = ["run", "--quick", "--threads", "1", "--only", "tiny", "--again", "--out", str(tmp_path)]
    assert entry_main(arguments) == 2 and "another quick: measure all" in capsys.readouterr().err


def test_a_failure_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failed = document([], errors=[{"case": "tiny, 1 thread", "error": "tiny, attnscore: error 1"}])
    monkeypatch.setattr("bench.command.run", lambda *_, **__: failed)
    assert entry_main(["run", "--only", "tiny", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said == "python benchmarks run: 1 failed, first tiny, 1 thread: tiny, attnscore: error 1\n"
    assert results.read(tmp_path / "results.json")["errors"]


def test_help_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_main(["run", "--help"]) == 0
    words = capsys.readouterr().out.replace("│", " ").split()
    assert {"--quick", "--full", "--only", "--threads", "--out"} <= set(words)
    assert all(any(name in word for word in words) for name in ("dot-bfloat16", "additive", "growth-dot"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "dott"], "python benchmarks run: --only: expected one of dot, "),
        (["--threads", "0"], "python benchmarks run: --threads: expected numbers from 1 to"),
        (["--threads", "1,x"], "got '1,x'"),
        (["--device", "tpu"], "python benchmarks run: --device: expected one of cpu, cuda, got 'tpu'"),
        (["--device", "cuda", "--full"], "python benchmarks run: --device: expected cpu, which has --full, got cuda"),
        (["--isa", "mmx"], "python benchmarks run: --isa: expected one of "),
        (["--threads", "99999"], "CPUs here"),
        (["--out", str(Path(__file__))], "cannot be made a folder"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], toys: None) -> None:
    assert entry_main(["run", *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_both_sides_are_limited_to_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """By variables that the measuring processes inherit; the facts of the machine say so."""
    for name in machine._ISAS["avx2"]:
        monkeypatch.setenv(name, "")
    assert "isa" not in machine.facts()
    machine.limit_isa("avx2")
    assert machine.facts()["isa"] == "avx2"
    assert machine.environment(1)["ATTNSCORE_TARGET"] == "avx2"
