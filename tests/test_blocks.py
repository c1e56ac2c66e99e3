"""Weights and scores on demand: the whole matrix and blocks of it, against the oracle's, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from cases import FRAMEWORKS, MASKS, SCORES, SOME_SCORES
from covering import pairs
from harness import EPS, WIDE, Call, array, attend_on, make_call, tensor

pytestmark = pytest.mark.usefixtures("small_tiles", "one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
SCORE_NAMES = tuple(score.name for score in SCORES)

INDICES: dict[str, tuple[Any, Any]] = {
    "rows": (slice(1, 4), None),
    "columns": (None, slice(2, 9)),
    "both": (slice(5, None), slice(None, 3)),
    "step": (slice(None, None, 2), slice(1, None, 3)),
    "backwards": (slice(None, None, -1), slice(10, 2, -2)),
    "lists": ([4, 0, 4], [11, 3, 3, 0]),
    "negative": ([-1, -7], [-12, -1, 5]),
    "number": (3, -2),
    "array": (np.array([2, 6]), np.array([7, 1], np.int32)),
    "nothing": (slice(3, 3), [0, 1]),
    "all": (slice(None), slice(None)),
}


def given(call: Call, framework: str, leaves: dict[str, Any] | None = None) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Query and key, and the keywords of attention_weights."""
    leaves = leaves or {n: tensor(x) if framework == "torch" else x for n, x in call.leaves.items()}
    score = call.score.make(**{name: leaves[f"score.{name}"] for name in call.arrays})
    extras = {name: leaves[name] for name in ("bias", "sink") if name in leaves}
    return (leaves["query"], leaves["key"]), {"score": score, **call.arguments, **extras}


def cut(x: np.ndarray, rows: Any, cols: Any) -> np.ndarray:
    rows, cols = ([i] if isinstance(i, int) else slice(None) if i is None else i for i in (rows, cols))
    return x[..., rows, :][..., cols]


def check_weights(call: Call, found: Any, wanted: np.ndarray) -> None:
    # A weight is an output whose value is 1: the criterion of outputs, with the plain version's softmax.
    leaves = {name: tensor(x) for name, x in call.leaves.items()}
    plain = np.abs(array(call.formulas(leaves, torch.from_numpy)["weights"]) - call.weights).max(initial=0)
    assert found.shape == wanted.shape
    assert np.abs(array(found) - wanted).max(initial=0) <= max(2 * plain, 8 * EPS[call.dtype])


@pairs(
    score=SCORE_NAMES,
    extras={"plain": "", "bias-and-sink": "hiding-bias"},
    dtype=("bfloat16", "float32", "float64"),
    framework=FRAMEWORKS,
)
def test_all_weights(score: str, extras: str, dtype: str, framework: str) -> None:
    """`attention_weights` and ``return_weights``, which also returns the same output as without."""
    call = make_call(score, "nested", dtype, extras)
    arrays, keywords = given(call, framework)
    check_weights(call, ats.attention_weights(*arrays, **keywords), call.weights)
    value = tensor(call.value) if framework == "torch" else call.value
    out, weights = ats.attend(*arrays, value, **keywords, return_weights=True)
    check_weights(call, weights, call.weights)
    np.testing.assert_array_equal(array(out), array(ats.attend(*arrays, value, **keywords)))


@pairs(
    score=SCORE_NAMES,
    extras={"plain": "", "bias": "hiding-bias"},
    dtype=("float16", "float32", "float64"),
    framework=FRAMEWORKS,
)
def test_all_scores(score: str, extras: str, dtype: str, framework: str) -> None:
    """Cap and bias in them, -inf where hidden; the error relative to what `numerics` says for each family."""
    call = make_call(score, "nested", dtype, extras)
    arrays, keywords = given(call, framework)
    keywords.pop("sink", None)
    found = array(ats.attention_scores(*arrays, **keywords))
    leaves = {name: tensor(x) for name, x in call.leaves.items()}
    plain = array(call.formulas(leaves, torch.from_numpy)["scores"])
    wanted = call.scores
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], -np.inf)
    error, plain_error = (np.abs(x[finite].astype(WIDE[dtype]) - wanted[finite]).max() for x in (found, plain))
    assert error <= max(2 * plain_error, 8 * EPS[dtype] * call.scale["max_score"])


@pairs(
    score=("scaled_dot-rows", "scaled_dot-keys", "additive-tanh-heads", "gaussian", "own-tile"),
    mask=("none", "Causal-offset-batch", "Documents-scattered", "nested", "array-4d", "Dense-rows"),
    index=tuple(INDICES),
    framework=FRAMEWORKS,
)
def test_blocks(score: str, mask: str, index: str, framework: str) -> None:
    """Rows and columns equal the whole matrix's, normalised over all keys."""
    call = make_call(score, mask, "float64", "hiding-bias")
    arrays, keywords = given(call, framework)
    rows, cols = INDICES[index]
    found = ats.attention_weights(*arrays, **keywords, query_index=rows, key_index=cols)
    check_weights(call, found, cut(call.weights, rows, cols))
    keywords.pop("sink")
    found = ats.attention_scores(*arrays, **keywords, query_index=rows, key_index=cols)
    np.testing.assert_allclose(array(found), cut(call.scores, rows, cols).astype(float), atol=1e-12)


@pytest.mark.parametrize("index", ["lists", "both"])
@pytest.mark.parametrize("mask", [mask.name for mask in MASKS])
def test_blocks_under_every_mask(mask: str, index: str) -> None:
    call = make_call("scaled_dot", mask, "float64")
    arrays, keywords = given(call, "numpy")
    n, m = call.visible.shape[-2:]
    rows, cols = ([4, 0, 4], [m - 1, 3, 3, 0]) if index == "lists" else (slice(5, None), slice(None, 3))
    found = ats.attention_weights(*arrays, **keywords, query_index=rows, key_index=cols)
    check_weights(call, found, cut(call.weights, rows, cols))
    assert n > 5


@frameworks
@pytest.mark.parametrize("head_axis", [-3, -2])
def test_weights_have_heads_first_in_either_layout(head_axis: int, framework: str) -> None:
    call = make_call("scaled_dot", "nested", "float64")
    query, key = (x if head_axis == -3 else np.ascontiguousarray(x.swapaxes(-2, -3)) for x in (call.query, call.key))
    arrays = (tensor(query), tensor(key)) if framework == "torch" else (query, key)
    check_weights(call, ats.attention_weights(*arrays, **call.arguments, head_axis=head_axis), call.weights)


@pairs(
    score=[score.name for score in SOME_SCORES],
    mask=("none", "nested", "KeyPadding-nothing"),
    what=("attention_weights", "attention_scores", "return_weights"),
)
def test_gradients_of_weights_and_scores(score: str, mask: str, what: str) -> None:
    """They are differentiable in PyTorch; gradients equal autograd's through the whole matrix."""
    call = make_call(score, mask, "float64", "hiding-bias" if what != "attention_scores" else "bias")
    rng = np.random.default_rng(0)
    seed = torch.tensor(rng.standard_normal(call.visible.shape))
    plain = {name: tensor(x, requires_grad=True) for name, x in call.leaves.items()}
    outputs = call.formulas(plain, torch.from_numpy)
    target = outputs["scores" if what == "attention_scores" else "weights"]
    finite = torch.isfinite(target)
    wanted = torch.autograd.grad(
        torch.where(finite, target, 0.0), list(plain.values()), seed, allow_unused=True, materialize_grads=True
    )
    leaves = {name: tensor(x, requires_grad=True) for name, x in call.leaves.items()}
    if what == "return_weights":
        found = attend_on(call, leaves, return_weights=True)[1]
    else:
        arrays, keywords = given(call, "torch", leaves)
        found = getattr(ats, what)(*arrays, **keywords)
    found = torch.where(torch.isfinite(found), found, 0.0)
    grads = torch.autograd.grad(found, list(leaves.values()), seed, allow_unused=True, materialize_grads=True)
    for name, x, y in zip(leaves, grads, wanted, strict=True):
        scale = max(1.0, float(y.detach().abs().max()))
        np.testing.assert_allclose(array(x), array(y), atol=1e-11 * scale, err_msg=name)


@frameworks
def test_a_block_of_a_long_sequence_takes_little_memory(framework: str) -> None:
    """Two rows of a matrix that would take 6.4 GB; normalised over all keys all the same."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((40_000, 4)).astype(np.float32) for _ in range(2))
    arrays = (tensor(query), tensor(key)) if framework == "torch" else (query, key)
    found = array(ats.attention_weights(*arrays, mask=ats.Causal(), query_index=[5, -1], key_index=slice(0, 7)))
    s = query[[5, -1]].astype(np.float64) @ key.T.astype(np.float64) / 2
    s[0, 6:] = -np.inf
    weights = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(found, (weights / weights.sum(-1, keepdims=True))[:, :7], rtol=1e-4, atol=1e-9)


@frameworks
@pytest.mark.parametrize("score", ["additive-tanh", "gaussian-one"])
@pytest.mark.parametrize("extras", ["", "hiding-bias"], ids=["plain", "bias-and-sink"])
def test_keys_by_turns(score: str, extras: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score that holds several numbers for a pair takes a few keys at a time, with the same weights."""
    call = make_call(score, "nested", "float64", extras)
    (query, key), arguments = given(call, framework)
    value = tensor(call.value) if framework == "torch" else call.value
    whole = array(ats.attention_weights(query, key, **arguments))
    for name in ("TILE_SCORES", "SMALLEST_TILE"):
        monkeypatch.setattr(f"attnscore.base.thresholds.{name}", 2)
    _, weights = ats.attend(query, key, value, return_weights=True, kernel="streaming", **arguments)
    assert np.allclose(array(weights), whole, rtol=1e-12, atol=1e-14)


@frameworks
def test_masked_weights_of_a_block_beside_nan_are_zero(framework: str) -> None:
    x = np.zeros((1, 4, 2))
    x[0, 2] = np.nan
    array_of = tensor if framework == "torch" else np.asarray
    found = array(ats.attention_weights(array_of(x), array_of(x), mask=ats.Causal(), key_index=[3, 1]))
    np.testing.assert_array_equal(found[0], [[0, 0], [0, 0.5], [0, np.nan], [np.nan, np.nan]])
