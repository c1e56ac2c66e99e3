"""What a call costs and how it would run: cost() against the stated formulas, explain() against the call itself.

Wall time and memory are not measured here: formulas are exact, and ``explain`` runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore import kernels
from attnscore.backends import native
from attnscore.kernels.base import Kernel
from attnscore.problem.problem import build_problem
from attnscore.scores.forms import DistanceForm, InnerForm
from cases import AUTOMATIC, FRAMEWORKS, SMALL_CALLS
from harness import tensor

frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
SIZES = {"query_len": 7, "key_len": 11, "dim": 5}
SCORES: dict[str, Callable[[], Any]] = {
    "dot": ats.Dot,
    "scaled_dot": ats.ScaledDot,
    "cosine": ats.Cosine,
    "gaussian": ats.Gaussian,
    "sum": ats.Sum,
    "additive": lambda: ats.Additive(np.ones(8), np.ones((8, 5)), np.ones((8, 5))),
    "bilinear": lambda: ats.Bilinear(np.ones((5, 5))),
    "soft_cap": lambda: ats.SoftCap("dot", 2.0),
    "temperature": lambda: ats.Temperature("dot", 2.0),
    "combination": lambda: ats.Dot() + 0.5 * ats.Cosine(),
}


# ------------------------------------------------------------------ cost


def test_dot_costs_what_is_stated() -> None:
    """QK^T 2 n m d, softmax 4 n m, weighted sum 2 n m v."""
    n, m, d, v = 7, 11, 5, 3
    found = ats.cost("dot", query_len=n, key_len=m, dim=d, value_dim=v)
    assert found.operations == 2 * n * m * d + 4 * n * m + 2 * n * m * v
    assert found.parameters == 0
    assert found.bytes == 4 * (n * d + m * d + m * v + n * v)
    assert found.matrix_bytes == 4 * 2 * n * m


def test_additive_costs_what_is_stated() -> None:
    """O(n m h) with a tanh each, and in the textbook form O(n m h) memory."""
    n, m, h, query_dim, key_dim = 7, 11, 8, 20, 2
    score = ats.Additive(np.ones(h), np.ones((h, query_dim)), np.ones((h, key_dim)))
    found = ats.cost(score, query_len=n, key_len=m, dim=query_dim, key_dim=key_dim, value_dim=4)
    projections = 2 * n * query_dim * h + 2 * m * key_dim * h
    assert found.operations == projections + 4 * n * m * h + 4 * n * m + 2 * n * m * 4
    assert found.parameters == h + h * query_dim + h * key_dim
    assert found.matrix_bytes == 4 * n * m * (h + 2)
    both = ats.cost(score + score, query_len=n, key_len=m, dim=query_dim, key_dim=key_dim, value_dim=4)
    assert both.matrix_bytes == 4 * n * m * (2 * h + 2)


@pytest.mark.parametrize("name", SCORES)
def test_batch_and_heads_multiply(name: str) -> None:
    score = SCORES[name]()
    one, many = ats.cost(score, **SIZES), ats.cost(score, **SIZES, batch=3, heads=4)
    assert many.operations == 12 * one.operations
    assert many.matrix_bytes == 12 * one.matrix_bytes
    assert many.bytes - 4 * many.parameters == 12 * (one.bytes - 4 * one.parameters)
    assert many.parameters == one.parameters


@pytest.mark.parametrize("name", SCORES)
def test_operations_grow_with_the_square_of_the_length_and_inputs_with_the_length(name: str) -> None:
    costs = [ats.cost(SCORES[name](), query_len=n, key_len=n, dim=5) for n in (2**12, 2**16)]

    def exponent(field: str) -> float:
        first, second = (getattr(cost, field) for cost in costs)
        return math.log(second / first, 2**4)

    assert abs(exponent("operations") - 2) < 0.01
    assert abs(exponent("matrix_bytes") - 2) < 0.01
    assert abs(exponent("bytes") - 1) < 0.01


@pytest.mark.parametrize("name", SCORES)
def test_costs_are_whole_numbers_and_empty_calls_are_free(name: str) -> None:
    found = ats.cost(SCORES[name](), **SIZES)
    assert all(isinstance(x, int) and x >= 0 for x in found)
    empty = ats.cost(SCORES[name](), query_len=0, key_len=0, dim=5)
    assert empty.operations == 0 and empty.matrix_bytes == 0


@pytest.mark.parametrize("lengths", [(7, 11), (1, 1), (0, 3), (2**20, 2**20)])
@pytest.mark.parametrize(("dim", "key_dim", "value_dim"), [(5, None, None), (20, 2, 4), (1, 1, 1), (0, 3, 2)])
@pytest.mark.parametrize("h", [0, 1, 8])
def test_additive_and_bilinear_by_name(
    lengths: tuple[int, int], dim: int, key_dim: int | None, value_dim: int | None, h: int
) -> None:
    """By name they are what objects with arrays of these sizes are."""
    sizes: dict[str, Any] = {"query_len": lengths[0], "key_len": lengths[1], "dim": dim, "heads": 4, "batch": 3}
    sizes |= {"key_dim": key_dim, "value_dim": value_dim}
    wide = dim if key_dim is None else key_dim
    additive = ats.Additive(np.ones(h), np.ones((h, dim)), np.ones((h, wide)))
    assert ats.cost("additive", num_hiddens=h, **sizes) == ats.cost(additive, **sizes)
    assert ats.cost("additive", num_hiddens=h, **sizes).parameters == h + h * dim + h * wide
    assert ats.cost("bilinear", **sizes) == ats.cost(ats.Bilinear(np.ones((dim, wide))), **sizes)


def test_parameters_by_name_are_those_of_the_layers() -> None:
    from attnscore.layers.torch import AdditiveAttention, BilinearAttention

    layers = {
        "additive": AdditiveAttention(key_size=2, query_size=20, num_hiddens=8),
        "bilinear": BilinearAttention(key_size=2, query_size=20),
    }
    for name, layer in layers.items():
        given = {"num_hiddens": 8} if name == "additive" else {}
        found = ats.cost(name, query_len=1, key_len=10, dim=20, key_dim=2, value_dim=4, **given)
        assert found.parameters == sum(x.numel() for x in layer.parameters())


def test_a_million_hidden_units_take_no_memory() -> None:
    found = ats.cost("additive", query_len=8, key_len=8, dim=2**30, num_hiddens=2**30)
    assert found.parameters == 2 * 2**60 + 2**30


def test_a_registered_score_of_that_name_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnscore import scores

    monkeypatch.setitem(scores._TABLE, "additive", lambda: ats.Additive(np.ones(5)))
    assert ats.cost("additive", **SIZES).parameters == 5
    with pytest.raises(ats.ArgumentError, match='num_hiddens: expected None unless score="additive", got 3'):
        ats.cost("additive", **SIZES, num_hiddens=3)


def test_scores_by_name_and_own_scores() -> None:
    @dataclass(frozen=True, eq=False)
    class Own:
        weight: Any

        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return ops.matmul(query * self.weight, ops.matrix_transpose(key))

    assert ats.cost("cosine", **SIZES) == ats.cost(ats.Cosine(), **SIZES)
    assert ats.cost(Own(np.ones(5)), **SIZES).parameters == 5
    assert ats.cost(Own(np.ones(5)), **SIZES).operations >= 2 * 7 * 11 * 5


# ------------------------------------------------------------------ explain


def inputs(length: int = 64, *lead: int) -> tuple[np.ndarray, ...]:
    x = np.ones((*lead, length, 4))
    return x, x, x


def test_explain_names_the_kernel_and_the_reasons_against_each_other_one() -> None:
    plan = ats.explain(*inputs())
    others = set(kernels.table()) - {plan.kernel}
    assert plan.kernel in kernels.table()
    assert set(plan.reasons) == others
    assert all(reasons and all(isinstance(x, str) and x for x in reasons) for reasons in plan.reasons.values())


@pytest.mark.parametrize(
    "kernel", [x for x in kernels.table() if x not in ("triton", *SMALL_CALLS)]
)  # triton needs a GPU
def test_a_kernel_asked_for_is_the_one_that_is_named(kernel: str) -> None:
    if kernel in ("fused", "triton"):
        with pytest.raises(ats.KernelUnavailable, match="arrays of numpy: it takes PyTorch's"):
            ats.explain(*inputs(), kernel=kernel)
        return
    if (missing := kernels.table()[kernel].missing()) is not None:
        assert AUTOMATIC != "native", missing
        with pytest.raises(ats.KernelUnavailable, match=missing):
            ats.explain(*inputs(), kernel=kernel)
        return
    arrays = inputs()
    # The gather kernel takes graphs alone.
    every = ats.Neighbours(np.arange(arrays[0].shape[-2] + 1), np.zeros(arrays[0].shape[-2], int))
    plan = ats.explain(*arrays, mask=every if kernel == "gather" else None, kernel=kernel)
    assert plan.kernel == kernel
    assert set(plan.reasons) == set(kernels.table()) - {kernel}


def test_what_a_kernel_declares_agrees_with_its_reasons() -> None:
    """`auto` asks no reasons of a kernel whose needs a problem does not meet, nor of one that is never slower."""
    problem, _ = build_problem(*inputs(4))
    needs: set[str] = set()
    for kernel in kernels.table().values():
        needs |= kernel.needs
        if kernel.needs:
            assert kernel.reasons_against(problem), kernel.name
        if not kernel.is_sometimes_slower:
            assert type(kernel).reasons_not_automatic is Kernel.reasons_not_automatic, kernel.name
    assert needs == {"masked", "staged"}


def test_automatic_never_takes_quadratic_memory_by_surprise() -> None:
    assert ats.explain(*inputs(8)).kernel != "dense"
    assert "quadratic" in " ".join(ats.explain(*inputs(4096)).reasons["dense"])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_explain_runs_nothing(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> Any:
        raise AssertionError("explain() ran a kernel")

    for kernel in kernels.table().values():
        for way in ("forward", "prepare"):
            monkeypatch.setattr(type(kernel), way, forward)
    x = inputs()[0] if framework == "numpy" else torch.ones(64, 4)
    with pytest.raises(AssertionError, match="ran a kernel"):
        ats.attend(x, x, x)
    ats.explain(x, x, x)


def test_explain_takes_the_arguments_of_attend_and_checks_them() -> None:
    x = inputs(8, 2, 4)
    arguments: dict[str, Any] = {
        "score": ats.SoftCap("scaled_dot", 30.0),
        "mask": ats.Causal() & ats.SlidingWindow(left=3),
        "valid_lens": [3, 8],
        "bias": np.zeros(8),
        "sink": np.zeros(4),
        "dropout": 0.1,
        "seed": 1,
        "head_axis": -3,
        "kernel": "auto",
        "return_weights": True,
        "return_stats": ("entropy",),
    }
    plan = ats.explain(*x, **arguments)
    ats.attend(*x, **arguments)
    assert "Causal" in plan.mask and "SlidingWindow" in plan.mask and "ValidLens" in plan.mask
    with pytest.raises(ats.MaskError, match="valid_lens"):
        ats.explain(*x, valid_lens=[3, 9])
    with pytest.raises(ats.ShapeError, match="value"):
        ats.explain(x[0], x[1], np.ones((2, 4, 7, 4)))


def test_explain_prints_a_table() -> None:
    text = str(ats.explain(*inputs(64, 2), mask=ats.Causal(), score="gaussian"))
    lines = text.splitlines()
    for name, content in (
        ("kernel", AUTOMATIC),
        ("not dense", "quadratic"),
        ("score", "Gaussian"),
        ("mask", "Causal()"),
        ("operations", "%"),
        ("bytes", "in and out"),
        ("tiles", "queries"),
    ):
        (line,) = [line for line in lines if line.startswith(name)]
        assert content in line.removeprefix(name)
    assert all(len(line) < 120 for line in lines)


def test_operations_and_bytes_are_those_of_cost() -> None:
    query, key, value = np.ones((2, 6, 7, 5)), np.ones((2, 3, 11, 5)), np.ones((2, 3, 11, 4))
    plan = ats.explain(query, key, value)
    whole = ats.cost("scaled_dot", query_len=7, key_len=11, dim=5, value_dim=4, heads=6, batch=2)
    assert plan.operations == whole.operations
    # Grouped heads: keys and values are read once for the heads that share them, in float64.
    assert plan.bytes == 8 * (query.size + key.size + value.size + 2 * 6 * 7 * 4)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_bytes_follow_the_dtype(dtype: str, size: int) -> None:
    x = torch.ones(6, 4, dtype=getattr(torch, dtype))
    assert ats.explain(x, x, x).bytes == size * 4 * 6 * 4


def test_skipped_tiles_are_not_counted() -> None:
    x = inputs(4096)
    whole = ats.explain(*x)
    assert whole.plan.fractions == {"skip": 0, "full": 1, "partial": 0}
    for mask, least, most in (
        (ats.Causal(), 0.5, 0.6),
        (ats.ValidLens(1024), 0.25, 0.26),
        (ats.SlidingWindow(left=63, right=0), 64 / 4096, 0.2),
        (ats.ValidLens(0), 0, 0),
    ):
        plan = ats.explain(*x, mask=mask)
        kept = 1 - plan.plan.fractions["skip"]
        assert least - 0.01 <= kept <= most, mask
        assert math.isclose(plan.operations, whole.operations * kept, rel_tol=1e-6, abs_tol=1)
        assert f"({kept:.0%} of all pairs)" in str(plan)


def test_a_mask_that_is_no_interval_leaves_its_bounds() -> None:
    scattered = ats.Dense(np.arange(64)[None] % 2 == 0)
    plan = ats.explain(*inputs(64), mask=ats.KeyRange(16, 48) & scattered)
    assert plan.plan.fractions["skip"] == 0.5
    assert plan.plan.fractions["full"] == 0
    assert ats.explain(*inputs(64), mask=scattered).plan.fractions == {"skip": 0, "full": 0, "partial": 1}


native_only = pytest.mark.skipif(AUTOMATIC != "native", reason="the plan of the native kernel")
MASKS: dict[str, Any] = {
    "causal": ats.Causal(),
    "window": ats.SlidingWindow(left=70, right=3),
    "lengths": ats.ValidLens(130),
    "range": ats.KeyRange(5, 300),
    "sinks and a window": (ats.KeyRange(0, 4) | ats.SlidingWindow(left=80)) & ats.Causal(),
    "a hole": ~ats.KeyRange(60, 260),
    "nothing": ats.ValidLens(0),
}


@native_only
@pytest.mark.parametrize("name", MASKS)
def test_native_tiles_are_those_in_which_a_strip_sees_a_key(name: str) -> None:
    """Against the mask itself: a tile of 6 queries x 64 keys is skipped where no pair is seen, full where all are."""
    length, (rows, keys) = 401, (6, 64)
    plan = ats.explain(*inputs(length), mask=MASKS[name]).plan
    assert (plan.query_tile, plan.key_tile) == (rows, keys)
    seen = np.asarray(MASKS[name].materialize(length, length, 1)).reshape(-1, length, length)[0]
    columns = np.flatnonzero(seen.any(0))
    first, stop = (columns[0], columns[-1] + 1) if len(columns) else (0, 0)
    for strip, segments in enumerate(plan.segments):
        own = seen[strip * rows : (strip + 1) * rows]
        for key in range(0, length, keys):
            # Outside of what any query sees there are no tiles.
            start, end = max(first, key), min(stop, key + keys)
            if end <= start:
                assert not any(s.start < key + keys and s.stop > key for s in segments)
                continue
            (kind,) = {next((s.partial for s in segments if s.start <= j < s.stop), None) for j in range(start, end)}
            block = own[:, start:end]
            # Of several pieces a row, short gaps are tested and not left out: never the other way.
            want = {None} if not block.any() else {False} if block.all() else {True}
            assert kind in (want | {True} if name == "sinks and a window" else want), (strip, key)


@native_only
def test_an_evaluated_mask_is_named() -> None:
    odd = ats.MaskFunction(lambda batch, head, query, key: (query * key) % 3 == 0)
    (remark,) = ats.explain(*inputs(200), mask=ats.Causal() & odd).remarks
    assert "MaskFunction" in remark and "evaluated" in remark and "200 queries" in remark
    assert remark in str(ats.explain(*inputs(200), mask=ats.Causal() & odd))
    for mask in (None, ats.Causal(), ats.Dense(np.eye(200, dtype=bool))):
        assert ats.explain(*inputs(200), mask=mask).remarks == ()


def test_the_dense_kernel_skips_nothing() -> None:
    plan = ats.explain(*inputs(200), mask=ats.Causal(), kernel="dense")
    assert plan.plan.fractions == {"skip": 0, "full": 0, "partial": 1}
    assert plan.operations == ats.explain(*inputs(200), kernel="dense").operations
    assert str(ats.explain(*inputs(0), kernel="dense"))
    assert plan.reasons["streaming"] == ("dense was asked for",)


def test_tiles_that_are_all_alike_are_one_line_of_the_map() -> None:
    lines = str(ats.explain(*inputs(600)).plan).splitlines()
    assert len(lines) == 3


@pytest.mark.slow
def test_a_long_plan_is_made_without_a_matrix() -> None:
    """131072 positions: the plan holds two numbers a row, no matrix, and prints as a map of a screen."""
    x = np.broadcast_to(np.float32(1), (131072, 4))
    plan = ats.explain(x, x, x, mask=ats.Causal() & ats.SlidingWindow(left=255))
    assert plan.plan.fractions["skip"] > 0.9
    assert len(str(plan).splitlines()) < 40


def test_the_forms_are_named() -> None:
    x = inputs(4)
    for score, form in (("dot", "InnerForm"), (ats.Additive(np.ones(4)), "AdditiveForm")):
        assert ats.explain(*x, score=score).form == form
    far = np.linspace(1900, 2020, 8)[:, None]
    assert ats.explain(far, far, far, score="gaussian").form == "DistanceForm"


GAUSSIAN_FORMS: dict[tuple[int, ...], tuple[str, str]] = {
    # (batch, queries, keys, dim): the form natively, and in a framework's own operations
    (64, 1, 64, 256): ("DistanceForm", "DistanceForm"),
    (64, 1, 128, 64): ("DistanceForm", "DistanceForm"),
    (64, 8, 128, 64): ("DistanceForm", "InnerForm"),
    (64, 64, 128, 64): ("DistanceForm", "InnerForm"),
    (1, 512, 512, 64): ("InnerForm", "InnerForm"),
    (1, 2048, 2048, 64): ("InnerForm", "InnerForm"),
    (8, 256, 256, 32): ("InnerForm", "InnerForm"),
    (1, 1, 100_000, 8): ("DistanceForm", "DistanceForm"),
    (1, 0, 64, 8): ("DistanceForm", "DistanceForm"),
}


@frameworks
@pytest.mark.parametrize("runs", ["natively", "in-operations"])
@pytest.mark.parametrize("sizes", GAUSSIAN_FORMS, ids=str)
def test_the_form_of_a_gaussian_by_its_cost(
    sizes: tuple[int, ...], runs: str, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries for each key do not pay for a look at the keys."""
    if runs == "in-operations":
        monkeypatch.setattr("attnscore.backends.native.module", None)
    elif AUTOMATIC != "native":
        pytest.skip("turned off by ATTNSCORE_NO_NATIVE=1")
    batch, queries, keys, dim = sizes
    query, key = (np.full((batch, length, dim), 0.1, "float32") for length in (queries, keys))
    arrays = (tensor(query), tensor(key)) if framework == "torch" else (query, key)
    assert ats.explain(*arrays, arrays[1], score="gaussian").form == GAUSSIAN_FORMS[sizes][runs != "natively"]


@frameworks
def test_the_form_of_a_gaussian_by_its_values(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read once where nothing cancels, and centred where that may help; the form keeps what it can."""
    monkeypatch.setattr("attnscore.base.thresholds.INNER_TERMS", 0)

    def form_of(x: np.ndarray, bandwidth: float = 1.0) -> Any:
        arrays = (tensor(x), tensor(x)) if framework == "torch" else (x, x)
        problem, _ = build_problem(*arrays, arrays[0], score=ats.Gaussian(bandwidth))
        return problem, problem.form

    near = np.random.default_rng(0).standard_normal((3, 64, 2)).astype("float32")
    problem, form = form_of(near)
    assert isinstance(form, InnerForm)
    assert form.query is problem.query and form.key is problem.key
    problem, form = form_of(near + 1000)
    assert isinstance(form, InnerForm)
    assert float(abs(form.query).max()) < 10
    for x, bandwidth in ((near * 100, 1.0), (near + 1000, 0.1), (near * np.nan, 1.0), (near * np.inf, 1.0)):
        assert isinstance(form_of(x, bandwidth)[1], DistanceForm)
    assert isinstance(form_of(near * 100, 200.0)[1], InnerForm)


# ------------------------------------------------------------------ what works here


def test_available_lists_every_framework_and_kernel() -> None:
    found = ats.available()
    assert set(found) == {"frameworks", "kernels", "targets", "fallbacks"}
    assert {"numpy", "torch"} <= set(found["frameworks"])
    assert found["frameworks"]["numpy"] is True and found["frameworks"]["torch"] is True
    assert set(found["kernels"]) == set(kernels.table())


def test_targets_that_were_not_compiled_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(targets=lambda: ["avx2", "portable"], targets_left_out=lambda: ["avx512"])
    monkeypatch.setattr(native, "module", module)
    found = ats.available()["targets"]
    assert found["avx2"] is True and found["portable"] is True
    assert not found["avx512"] and "ATTNSCORE_TARGETS=all" in str(found["avx512"])
    monkeypatch.setattr(native, "module", None)
    assert ats.available()["targets"] == {}


def test_a_framework_that_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    reason = ats.available()["frameworks"]["torch"]
    assert not reason and str(reason) == "the package torch is not installed (pip install torch)" == reason


def test_a_kernel_asked_for_that_cannot_run_gives_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a silent fallback; and "auto" passes over it."""

    class Never(Kernel):
        name, summary, has_vjp = "never", "for this test", False

        def reasons_against(self, problem: Any) -> tuple[str, ...]:
            return ("too many moons", "the tide is out")

        def forward(self, problem: Any, plan: Any) -> Any:
            raise AssertionError

        backward = forward

    monkeypatch.setitem(kernels._TABLE, "never", Never())
    with pytest.raises(ats.KernelUnavailable, match=r"never.*too many moons; the tide is out"):
        ats.attend(*inputs(4), kernel="never")
    assert ats.explain(*inputs(4)).reasons["never"] == ("too many moons", "the tide is out")


@pytest.mark.parametrize(
    ("kernel", "source"), [("auto", "the pass"), ("streaming", "a second pass"), ("dense", "the pass")]
)
def test_explain_tells_of_weights(kernel: str, source: str) -> None:
    if kernel == "auto" and AUTOMATIC != "native":
        source = "a second pass"
    arrays = [np.ones((2, 3, length, 4), np.float32) for length in (5, 7, 7)]
    without = ats.explain(*arrays, kernel=kernel)
    found = ats.explain(*arrays, kernel=kernel, return_weights=True)
    assert without.weights is None and "weights" not in str(without)
    assert found.weights is not None and found.weights.startswith(f"(2, 3, 5, 7), 840 bytes, from {source}")
    assert f"weights         {found.weights}" in str(found)
    assert found.bytes - without.bytes == 840
