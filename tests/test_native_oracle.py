"""The native kernels against the oracle on calls drawn by hypothesis: every score, masks of every kind, extras, dtypes,
layouts and lengths around the edges of tiles; every target forced; forward and gradients.

The criterion is as in every other test, with one exception: the portable target has no fused multiply-add where the
compiler does not assume one (x86), so that each product rounds once more before it is added. Its errors may be 1.5
times as large; where the sums of the others reach the criterion it exceeds it by some 10%.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnscore as ats
from attnscore.base import thresholds
from attnscore.problem.statistics import KEYS
from cases import MASK, SCORE, SCORES, Sizes
from harness import EPS, EXTRAS, STATISTICS, Call, array, build_call, dtype_of
from native_cases import native
from strategies import Drawn, calls, law, same
from test_native_reasons import SCORES_LEFT

pytestmark = pytest.mark.usefixtures("one_thread", "restored")
TARGETS = tuple(native.targets())
HAS_FMA = {name: name != "portable" for name in TARGETS}
LENGTHS = (1, 2, 3, 4, 5, 7, 13, 63, 64, 65, 127, 191, 192, 193)
# Names given twice are the same computation; a score in Python is no business of the native kernel.
SCORE_NAMES = tuple(s.name for s in SCORES if s.name not in SCORES_LEFT and "by-name" not in s.name)
DTYPES = ("float32", "float32", "float64", "bfloat16", "float16")


@pytest.fixture(scope="module")
def restored() -> Iterator[None]:
    target = native.current_target()
    yield
    native.select(target)


def problems(call: Call, got: dict[str, Any], slack: float = 1.0, *, by_score: bool = False) -> list[str]:
    """What is further from the reference than `Call.check` allows, times `slack`.

    The error that a score may have becomes p (1 - p) times as much in its weight, and so in outputs and gradients. Of
    thousands of calls drawn, some are a few numbers whose plain version happens to be almost exact at scores of some
    tens: `by_score` counts that error, as `Call.scale` does for statistics of the weights.
    """
    found = []
    for name, x in got.items():
        if name in KEYS:
            found += filter(None, [call.key_problem(name, x)])
            continue
        want = call.reference[name]
        wide = "float64" if call.dtype == "float64" else "float32"
        dtype = wide if name in STATISTICS else call.dtype
        if tuple(x.shape) != want.shape or dtype_of(x) != dtype:
            found.append(f"{name}: expected {dtype} {want.shape}, got {dtype_of(x)} {tuple(x.shape)}")
            continue
        error, plain = largest(array(x), want), largest(call.plain[name], want)
        weights = call.scale["max_weight"] if by_score and name.partition(".")[0] in ("out", "grad") else 1
        scale = call.scale[name] * weights
        allowed = slack * max(2 * plain if np.isfinite(plain) else 0.0, 8 * EPS[dtype_of(x)] * scale)
        # The kernels round numbers below the normal ones to 0.
        allowed = max(allowed, float(np.finfo(wide).tiny))
        if not error <= allowed:
            found.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}")
    return found


def largest(x: np.ndarray, want: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        difference = np.where(x == want, 0, np.abs(x.astype(want.dtype) - want))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def slack_of(target: str) -> float:
    return 1.0 if HAS_FMA[target] else 1.5


# ---- calls ----


def masks_of(sizes: Sizes, rng: np.random.Generator) -> dict[str, ats.Mask | None]:
    b, n, m = sizes.batch, sizes.queries, sizes.keys
    ids = rng.integers(-1, 3, (b, n)), rng.integers(-1, 3, (b, m))
    return {
        "none": None,
        "lengths": ats.ValidLens(rng.integers(0, m + 1, (b, n))),
        "causal": ats.Causal(offset=int(rng.integers(-n, m + 1))),
        "window": ats.SlidingWindow(9, 2, offset=[int(x) for x in rng.integers(-n, m + 1, b)]),
        "array": ats.Dense(rng.random((b, 1, n, m)) < 0.7),
        "keys": ats.KeyPadding(rng.random((b, m)) < 0.7),
        "row": ats.Dense(rng.random((n, 1)) < 0.8),
        "ids": ats.Documents(*ids),
        "sinks": ats.KeyRange(0, [min(4, m), min(1, m)])
        | ats.SlidingWindow(9, 2, offset=[int(x) for x in rng.integers(-n, m + 1, b)]),
        "global": ats.KeyPadding(np.arange(m)[None] % 37 == rng.integers(0, 37)) | ats.SlidingWindow(3, 3, "top_left"),
        "but a window": ~ats.SlidingWindow(9, 2, offset=int(rng.integers(-n, m + 1)))
        & ats.KeyPadding(rng.random((b, m)) < 0.9),
        "arrays": ats.Dense(rng.random((b, 1, n, m)) < 0.7) & ~ats.Dense(rng.random((n, m)) < 0.1),
        "all": ats.Documents(*ids) & ats.Dense(rng.random((n, m)) < 0.9) & ats.ValidLens(rng.integers(0, m + 1, b)),
    }


MASK_NAMES = tuple(masks_of(Sizes(), np.random.default_rng(0)))
LAYOUTS = {
    "C": lambda x: x,
    "F": np.asfortranarray,
    "columns inside": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "apart": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1],
    "shifted": lambda x: np.concatenate([x[..., :1], x], axis=-1)[..., 1:],
}


@st.composite
def problems_drawn(draw: Any) -> tuple[Call, str, str]:
    score = SCORE[draw(st.sampled_from(SCORE_NAMES), label="score")]
    hidden = draw(st.sampled_from((1, 3, 16, 17)), label="hidden")
    if {"W_q", "W_k"} <= set(score.arrays):
        score = dataclasses.replace(score, hidden=hidden)
    elif {"W_q", "W_k"}.isdisjoint(score.arrays) and "w_v" in score.arrays:
        score = dataclasses.replace(score, hidden=hidden, dims=(hidden, hidden))
    lengths = st.sampled_from(LENGTHS)
    heads = draw(st.sampled_from(((1, 1), (2, 2), (4, 2), (3, 1))), label="heads")
    sizes = Sizes(
        2, *heads, draw(lengths, label="queries"), draw(lengths, label="keys"),
        value_dim=draw(st.sampled_from((1, 3, 16, 33)), label="value_dim"),
    )  # fmt: skip
    if score.dims[0] == score.dims[1] and not score.arrays:
        score = dataclasses.replace(score, dims=(dim := draw(st.sampled_from((1, 3, 16, 33)), label="dim"), dim))
    seed = draw(st.integers(0, 2**16), label="seed")
    dtype, extras = draw(st.sampled_from(DTYPES), label="dtype"), draw(st.sampled_from(tuple(EXTRAS)), label="extras")
    call = build_call(score, MASK["none"], dtype, extras, sizes, seed)
    mask = masks_of(sizes, np.random.default_rng(seed))[draw(st.sampled_from(MASK_NAMES), label="mask")]
    if mask is not None:
        full = mask.materialize(sizes.queries, sizes.keys, sizes.batch)
        visible = np.broadcast_to(full if full.ndim == 4 else full[:, None], call.visible.shape)
        call = dataclasses.replace(call, visible=visible, arguments={"mask": mask})
    return call, draw(st.sampled_from(tuple(LAYOUTS)), label="layout"), draw(st.sampled_from(TARGETS), label="target")


@pytest.mark.slow
@settings(law, max_examples=1000)
@given(problems_drawn(), st.booleans())
def test_against_the_oracle(drawn: tuple[Call, str, str], saves_scores: bool) -> None:
    call, layout, target = drawn
    native.select(target)
    kept_pairs = thresholds.SAVED_SCORES if saves_scores else 0
    names = [name for name in ("query", "key", "value", "bias") if getattr(call, name) is not None]
    laid = {name: LAYOUTS[layout](getattr(call, name)) for name in names}
    # Nothing that is drawn may fall to another kernel.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnscore.base.thresholds.SAVED_SCORES", kept_pairs)
        got = dataclasses.replace(call, **laid).numpy(kernel="native")
    found = problems(call, got, slack_of(target), by_score=True)
    where = f"{target}, {layout}, {call.score.name}, {call.dtype}, {call.query.shape}, {call.key.shape}"
    assert not found, f"{where}, {call.arguments}:\n" + "\n".join(found)


# ---- trees of masks, and every kernel's answer to them ----


@settings(law, max_examples=50)
@given(calls(), st.sampled_from(TARGETS), st.sampled_from((0.0, 0.3)))
def test_like_the_dense_and_the_streaming_kernel(drawn: Drawn, target: str, dropout: float) -> None:
    """Any mask, of which what native does not take falls to streaming; dropout with the same bits; empty axes."""
    native.select(target)
    options = {"dropout": dropout, "seed": 7} if dropout else {}
    grad_out = drawn.normal(*drawn.query.shape[:-1], drawn.value.shape[-1])
    rows = drawn.normal(*drawn.query.shape[:-1])
    if 0 in drawn.pairs:
        rows[...] = 0
    expected, found = (drawn.attend(kernel=k, return_stats=True, **options) for k in ("dense", "auto"))
    same(found[0], expected[0])
    for name in STATISTICS:
        if name not in KEYS:  # equal scores may be rounded apart
            same(getattr(found[1], name), getattr(expected[1], name), 1e-10)
    expected, found = (drawn.gradients(grad_out, rows, rows, kernel=k, **options) for k in ("streaming", "auto"))
    for name, grad in expected.items():
        same(found[name], grad, 1e-10)


# ---- long rows, whose keys are cut into ranges that are joined ----


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("score", ["scaled_dot", "additive-tanh-projected", "gaussian-direct"])
@pytest.mark.parametrize("queries", [1, 4, 5])
def test_few_rows_and_many_keys(queries: int, score: str, target: str) -> None:
    native.select(target)
    sizes = Sizes(1, 2, 1, queries, 2113, value_dim=5)
    call = build_call(SCORE[score], MASK["none"], "float32", "bias-sink", sizes)
    visible = np.random.default_rng(0).random((queries, 2113)) < 0.5
    visible[0, 1024:] = False  # whole ranges without a visible key
    visible[-1] = queries == 1
    every = np.broadcast_to(visible, call.visible.shape)
    call = dataclasses.replace(call, visible=every, arguments={"mask": ats.Dense(visible)})
    found = problems(call, call.numpy(kernel="native"), slack_of(target))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_decoding_over_full_tiles(heads: int, dtype: str, target: str) -> None:
    """Whose scores rise from tile to tile, begin very low, or fall; keys end within, at and behind a tile."""
    native.select(target)
    rng = np.random.default_rng(0)
    query = rng.uniform(0.5, 1.5, (4, heads, 1, 32))
    for keys in (65, 128, 8 * 64, 17 * 64 + 5):
        key, value = rng.normal(0, 0.1, (4, 1, keys, 32)), rng.normal(size=(4, 1, keys, 40))
        tiles = np.arange(keys) // 64
        key[0] += 3 * tiles[:, None] / 2
        key[1, :, :64] = -1e37
        key[2] -= tiles[:, None]
        value[2, 0, 3, 5] = np.inf
        query, key, value = (x.astype(dtype).astype(float) for x in (query, key, value))
        lens = np.array([keys, keys - 1, keys, max(1, keys - 64)])
        want = ats.attend(query, key, value, valid_lens=lens, return_stats=True, kernel="dense")
        given = [x.astype(dtype) for x in (query, key, value)]
        # Scores of 140 carry roundings of 1e-5, and so do their weights.
        rtol, atol = (2e-5, 2e-5) if dtype == "float32" else (1e-12, 1e-13)
        found = ats.attend(*given, valid_lens=lens, return_stats=True, kernel="native")
        plain = ats.attend(*given, valid_lens=lens, kernel="native")
        np.testing.assert_allclose(plain, want[0], rtol, atol)
        np.testing.assert_allclose(found[0], want[0], rtol, atol)
        np.testing.assert_allclose(found[1].log_sum_exp, want[1].log_sum_exp, rtol)


@pytest.mark.parametrize("score", ["scaled_dot", "gaussian", "additive", "additive-relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [16, 20, 48])
def test_gradients_of_few_rows(score: str, dtype: str, dim: int) -> None:
    """For 1 to 5 queries and keys of one tile and of several.

    Key by key above 16 channels, and in place where rows are whole vectors.
    """
    rng = np.random.default_rng(0)
    w_v = rng.normal(size=dim).astype(dtype)
    make = {
        "scaled_dot": lambda w_v: "scaled_dot",
        "gaussian": lambda w_v: ats.Gaussian(3.0),
        "additive": ats.Additive,
        "additive-relu": lambda w_v: ats.Additive(w_v, activation="relu"),
    }[score]
    for queries, keys in ((1, 1), (1, 10), (1, 63), (1, 64), (1, 150), (2, 70), (3, 5), (4, 130), (5, 10), (9, 9)):
        q, k, v = (rng.normal(size=(2, 3, n, dim)).astype(dtype) for n in (queries, keys, keys))
        lens = np.array([keys, max(1, keys - 3)])
        arrays = q, k, v, rng.normal(size=q.shape).astype(dtype), rng.normal(size=(queries, keys)).astype(dtype), w_v

        def gradients(arrays: Iterable[np.ndarray], kernel: str, lens: np.ndarray = lens) -> dict[str, np.ndarray]:
            *operands, grad, bias, w_v = arrays
            options = {"score": make(w_v), "valid_lens": lens, "bias": bias, "kernel": kernel}
            result = ats.attend_vjp(*operands, **options)[1](grad)
            return {**result._asdict(), **result.score}

        found, wanted = gradients(arrays, "native"), gradients([x.astype(float) for x in arrays], "streaming")
        for name in wanted.keys() - {"sink", "score"}:
            atol = 5e-5 if dtype == "float32" else 1e-12
            np.testing.assert_allclose(found[name], wanted[name], atol=atol, err_msg=f"{name}, {queries}, {keys}")
