"""NaN and infinity: what a (query, key) pair's mask hides reaches nothing through that pair, forward or backward; what
is visible does reach the output.

"Reaches nothing" is: every result and every gradient that no visible pair connects with the planted value equals that
of the clean call to rounding, and the planted entries themselves get gradient exactly 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
import oracle
from autodiff import Var
from cases import FRAMEWORKS, MASKS, SCORES, SOME_SCORES, needs_native
from covering import pairs, some
from harness import STATISTICS, Call, array, make_call
from oracle import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("small_tiles", "one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
some_scores = pytest.mark.parametrize("score", [score.name for score in SOME_SCORES])
NONFINITE = {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf}
SCORE_NAMES, SOME_NAMES = tuple(score.name for score in SCORES), tuple(score.name for score in SOME_SCORES)

# Masks that leave something hidden from everybody: keys that no query of a group sees, queries that see nothing.
HIDING = (
    "valid_lens", "valid_lens-empty", "ValidLens-query_lens", "KeyRange", "KeyPadding-scattered", "KeyPadding-nothing",
    "Causal-bottom_right-tall", "SlidingWindow-offset-batch", "Documents", "Documents-scattered",
    "array-4d", "and-scattered", "not-lens", "mask-and-valid_lens",
)  # fmt: skip


def hidden_rows(call: Call) -> np.ndarray:
    """(batch, head, query): rows that see nothing."""
    return ~seen(call).any(-1)


def hidden_keys(call: Call) -> np.ndarray:
    """(batch, KV head, key): keys that no query of any head of the group sees."""
    groups = call.key.shape[-3]
    by_group = seen(call).reshape(call.visible.shape[0], groups, -1, *call.visible.shape[-2:])
    return ~by_group.any((2, 3))


def seen(call: Call) -> np.ndarray:
    return call.visible if call.bias is None else call.visible & (call.bias != -np.inf)


def with_nonfinite(call: Call, nonfinite: float, **where: np.ndarray) -> Call:
    """The call with `nonfinite` in the given entries of the named arrays; ``seed_out`` names the incoming gradient."""
    changes: dict[str, Any] = {}
    for name, index in where.items():
        x = (call.seeds["out"] if name == "seed_out" else getattr(call, name)).copy()
        x[index] = nonfinite
        if name == "seed_out":
            changes["seeds"] = {**call.seeds, "out": x}
        else:
            changes[name] = x
    return dataclasses.replace(call, **changes)


def check_untouched(
    clean: Call, dirty: Mapping[str, Any], found: Mapping[str, Any], where: Mapping[str, np.ndarray] | None = None
) -> None:
    """`dirty` equals `found` but for rounding, and is exactly 0 in the gradient of the planted entries."""
    for name, x in found.items():
        # Of an index, less than 1.
        eps = float(np.finfo(array(x).dtype).eps) if array(x).dtype.kind == "f" else 2.0**-20
        tolerance = 64 * eps * max(1.0, clean.scale[name])
        np.testing.assert_allclose(array(dirty[name]), array(x), rtol=0, atol=tolerance, err_msg=name)
    for name, index in (where or {}).items():
        if f"grad.{name}" in dirty:
            assert (array(dirty[f"grad.{name}"])[index] == 0).all(), name


# ----------------------------------------------------------- hidden from all


@pairs(score=SOME_NAMES, mask=HIDING, framework=FRAMEWORKS)
def test_masked_entries_are_not_read(score: str, mask: str, framework: str) -> None:
    """Padding keys and their values, queries that see nothing, and the gradient that comes into empty rows."""
    call = make_call(score, mask, "float32", "bias-sink" if mask == "valid_lens-empty" else "")
    _check_masked_entries(call, np.nan, framework)


@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(x, marks=pytest.mark.slow) for x in ("jax", "tensorflow"))]
)
def test_the_dense_kernel_drops_what_comes_into_empty_rows(framework: str) -> None:
    """Its gradient is autodiff through a product, where NaN times a weight of 0 is NaN."""
    call = make_call("scaled_dot", "ValidLens-query_lens", "float64", "sink")
    where = {"seed_out": hidden_rows(call)}
    assert where["seed_out"].any()
    dirty = with_nonfinite(call, np.nan, **where)
    check_untouched(call, dirty.run(framework, kernel="dense"), call.run(framework, kernel="dense"))


@pairs(score=SCORE_NAMES, mask=("ValidLens-query_lens", "array-4d"), nonfinite=NONFINITE, framework=FRAMEWORKS)
def test_masked_entries_reach_nothing(score: str, mask: str, nonfinite: float, framework: str) -> None:
    _check_masked_entries(make_call(score, mask, "float32"), nonfinite, framework)


THROUGH_WEIGHTS = ("weights", "hiding-bias-weights")
ADDITIVE_SCORES = tuple(score.name for score in SCORES if score.magnitude == "additive")


@some(
    "score,extras,framework",
    # JAX and TensorFlow take seconds each.
    [(score, THROUGH_WEIGHTS[i // 2 % 2], FRAMEWORKS[i % 2]) for i, score in enumerate(ADDITIVE_SCORES)]
    + [(score, THROUGH_WEIGHTS[i % 2], "tensorflow") for i, score in enumerate(ADDITIVE_SCORES[::6])]
    + [("additive-tanh-bias", "hiding-bias-weights", "jax")],
    [(s, e, f) for s in ADDITIVE_SCORES for e in THROUGH_WEIGHTS for f in (*FRAMEWORKS, "jax", "tensorflow")],
)
@pytest.mark.slow_rows("*-jax")
def test_masked_infinity_and_gradients_through_weights(score: str, extras: str, framework: str) -> None:
    """A gradient that comes in through the returned weights meets no masked query, key or gradient."""
    call = make_call(score, "array-4d", "float32", extras)
    where = {"key": hidden_keys(call), "query": hidden_rows(call)}
    assert any(index.any() for index in where.values())
    clean = call.run(framework)
    for nonfinite in (np.inf, -np.inf, np.nan):
        dirty = with_nonfinite(call, nonfinite, **where)
        into_weights = np.where(seen(call), call.seeds["weights"], np.float32(nonfinite))
        dirty = dataclasses.replace(dirty, seeds=call.seeds | {"weights": into_weights})
        check_untouched(call, dirty.run(framework), clean, where)


@pairs(
    activation=tuple(ACTIVATIONS),
    kernel=("auto", "streaming", "dense"),
    through=("out", "weights", "attention_weights", "attention_scores"),
)
def test_masked_infinity_and_second_derivatives(activation: str, kernel: str, through: str) -> None:
    """Gradients of gradients by every parameter equal the call's without the masked query and key."""
    rng = np.random.default_rng(0)
    query, key, value, w_q, w_k = (torch.tensor(rng.standard_normal((1, 4, 3))) for _ in range(5))
    w_v, bias = torch.tensor(rng.standard_normal((2, 4)))
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[2], visible[:, 1] = False, False

    def both_derivatives(nonfinite: float | None) -> list[torch.Tensor]:
        q, k = query.clone(), key.clone()
        if nonfinite is not None:
            q[0, 2, 1], k[0, 1, 0] = nonfinite, -nonfinite
        leaves = [x.detach().requires_grad_() for x in (q, k, w_v, w_q[0], w_k[0], bias)]
        q, k, *own = leaves
        score = ats.Additive(*own, activation=activation)
        arguments: dict[str, Any] = {"score": score, "mask": ats.Dense(visible)}
        if through == "attention_weights":
            found = ats.attention_weights(q, k, **arguments)
        elif through == "attention_scores":
            found = torch.where(visible, ats.attention_scores(q, k, **arguments), 0.0)
        else:
            results = ats.attend(q, k, value, kernel=kernel, return_weights=True, **arguments)
            found = results[through == "weights"]
        first = torch.autograd.grad((found**3).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum((x**2).sum() for x in first), leaves)]

    wanted = both_derivatives(None)
    for nonfinite in (np.inf, -np.inf, np.nan):
        for x, want in zip(both_derivatives(nonfinite), wanted, strict=True):
            torch.testing.assert_close(x, want)


def _check_masked_entries(call: Call, nonfinite: float, framework: str, **options: Any) -> None:
    """Nothing of what is hidden from all is read."""
    where = {"key": hidden_keys(call), "value": hidden_keys(call), "query": hidden_rows(call)}
    where["seed_out"] = where["query"]
    assert any(index.any() for index in where.values())
    dirty = with_nonfinite(call, nonfinite, **where)
    check_untouched(call, dirty.run(framework, **options), call.run(framework, **options), where)


@pairs(
    score=SOME_NAMES,
    extras={"plain": "", "sink": "sink", "bias-and-sink": "hiding-bias"},
    array_name=("query", "key", "value", "seed_out"),
    framework=FRAMEWORKS,
)
def test_one_array_at_a_time(score: str, extras: str, array_name: str, framework: str) -> None:
    """One entry of one vector, so that nothing is covered up by what stands beside it."""
    call = make_call(score, "ValidLens-query_lens", "float64", extras)
    hidden = hidden_keys(call) if array_name in ("key", "value") else hidden_rows(call)
    index = (*np.argwhere(hidden)[0], 1)
    for nonfinite in (np.nan, np.inf, -np.inf):
        dirty = with_nonfinite(call, nonfinite, **{array_name: index})
        check_untouched(call, dirty.run(framework), call.run(framework), {array_name: index})


@pairs(score=SOME_NAMES, dtype=("float16", "bfloat16", "float64"), nonfinite=NONFINITE, framework=FRAMEWORKS)
def test_in_every_dtype(score: str, dtype: str, nonfinite: float, framework: str) -> None:
    call = make_call(score, "ValidLens-query_lens", dtype)
    where = {"key": hidden_keys(call), "value": hidden_keys(call), "query": hidden_rows(call)}
    dirty = with_nonfinite(call, nonfinite, **where, seed_out=hidden_rows(call)).run(framework)
    clean = call.run(framework)
    for name, x in clean.items():
        allowed = 16 * float(2.0**-7 if dtype == "bfloat16" else np.finfo(call.query.dtype).eps)
        np.testing.assert_allclose(
            array(dirty[name]), array(x), rtol=0, atol=allowed * max(1.0, call.scale[name]), err_msg=name
        )


@pairs(score=SOME_NAMES, kernel=("auto", "streaming", "dense"), framework=FRAMEWORKS)
def test_in_every_kernel(score: str, kernel: str, framework: str) -> None:
    _check_masked_entries(make_call(score, "ValidLens-query_lens", "float32"), np.nan, framework, kernel=kernel)


@frameworks
@pytest.mark.parametrize("score", [score.name for score in SCORES if score.magnitude != "own"])
def test_huge_numbers_in_hidden_places(score: str, framework: str) -> None:
    """Finite entries whose scores overflow are no better than infinity; a user's score answers for its own."""
    _check_masked_entries(make_call(score, "ValidLens-query_lens", "float32"), 3e38, framework)


@pairs(
    score=("scaled_dot-keys", "bilinear-heads", "cosine-heads", "gaussian-heads"),
    kernel=("auto", "streaming"),
    framework=FRAMEWORKS,
)
def test_huge_numbers_in_hidden_places_beside_wider_arrays(score: str, kernel: str, framework: str) -> None:
    """What is finite in the float64 of a score's arrays may overflow in the float32 of the sums."""
    call = make_call(score, "ValidLens-query_lens", "float32").with_extras_in("float64")
    _check_masked_entries(call, 3e38, framework, kernel=kernel)


# ---------------------------------------------------------------- the bias


@pairs(
    score=SOME_NAMES,
    mask=("ValidLens-query_lens", "Documents-scattered", "array-4d", "Causal-bottom_right-tall"),
    nonfinite={"nan": np.nan, "inf": np.inf},
    framework=FRAMEWORKS,
)
def test_bias_at_masked_places(score: str, mask: str, nonfinite: float, framework: str) -> None:
    call = make_call(score, mask, "float64", "bias")
    where = {"bias": ~call.visible}
    check_untouched(call, with_nonfinite(call, nonfinite, **where).run(framework), call.run(framework), where)


@frameworks
@some_scores
def test_a_bias_of_minus_infinity_hides_like_a_mask(score: str, framework: str) -> None:
    """What it hides may be NaN too: keys, values and queries behind it."""
    call = make_call(score, "none", "float64", "bias")
    bias = call.bias.copy()
    bias[0, :, :, 6:] = -np.inf
    bias[1, :, 2:4] = -np.inf
    call = dataclasses.replace(call, bias=bias)
    assert hidden_keys(call).any() and hidden_rows(call).any()
    _check_masked_entries(call, np.nan, framework)
    call.check(call.run(framework))


# ------------------------------------------------------ hidden from some rows


@pairs(score=SCORE_NAMES, name=("key", "value"), framework=FRAMEWORKS)
def test_the_future_under_a_causal_mask(score: str, name: str, framework: str) -> None:
    """NaN at a position reaches the rows from there on and no row before it, in results and in query gradients.

    In the gradient of a key or value it may reach all that those later rows see.
    """
    _check_the_future(score, (name,), 4, np.nan, framework)


@pairs(score=SOME_NAMES, position=(0, 3, 4, 8), nonfinite=NONFINITE, framework=FRAMEWORKS)
def test_infinity_in_the_future(score: str, position: int, nonfinite: float, framework: str) -> None:
    _check_the_future(score, ("key", "value"), position, nonfinite, framework)


def _check_the_future(score: str, names: tuple[str, ...], position: int, nonfinite: float, framework: str) -> None:
    call = make_call(score, "Causal", "float32")
    clean = call.run(framework)
    where = dict.fromkeys(names, (..., slice(position, position + 1), slice(None)))
    dirty = with_nonfinite(call, nonfinite, **where).run(framework)
    for result, x in clean.items():
        if result in ("out", *STATISTICS, "grad.query"):
            before = (slice(None), slice(None), slice(0, position))
            tolerance = 64 * np.finfo(np.float32).eps * max(1.0, call.scale[result])
            np.testing.assert_allclose(array(dirty[result])[before], array(x)[before], atol=tolerance, err_msg=result)
    if "value" in names:
        assert not np.isfinite(array(dirty["out"])[:, :, position:]).any()


@frameworks
@some_scores
def test_the_first_key_under_a_sliding_window(score: str, framework: str) -> None:
    """Rows whose window has left the planted key behind are clean, whatever the tile."""
    call = make_call(score, "SlidingWindow-self", "float32")
    where = {"value": (..., slice(0, 1), slice(None)), "key": (..., slice(0, 1), slice(None))}
    clean, dirty = call.run(framework), with_nonfinite(call, np.nan, **where).run(framework)
    np.testing.assert_array_equal(array(dirty["out"])[:, :, 1:], array(clean["out"])[:, :, 1:])
    if "grad.query" in clean:
        for name in ("grad.query", "grad.key", "grad.value"):
            np.testing.assert_allclose(array(dirty[name])[:, :, 1:], array(clean[name])[:, :, 1:], atol=1e-5)


@frameworks
@pytest.mark.parametrize("mask", [mask.name for mask in MASKS])
def test_pair_by_pair(mask: str, framework: str) -> None:
    """NaN in one value makes NaN of exactly the rows that see it, under every mask."""
    call = make_call("scaled_dot", mask)
    groups = call.visible.shape[1] // call.value.shape[1]
    for key in range(call.value.shape[-2]):
        dirty = with_nonfinite(call, np.nan, value=(..., key, slice(None))).run(framework)
        np.testing.assert_array_equal(np.isnan(array(dirty["out"])).all(-1), call.visible[..., key], err_msg=f"{key}")
        assert groups == 2


# ------------------------------------------------------------ visible pairs


@pairs(mask=("none", "valid_lens", "Causal", "Documents-scattered"), nonfinite=NONFINITE, framework=FRAMEWORKS)
def test_a_visible_value_reaches_the_output(mask: str, nonfinite: float, framework: str) -> None:
    call = make_call("scaled_dot", mask)
    out = array(with_nonfinite(call, nonfinite, value=(0, 0, 1, 2)).run(framework)["out"])
    reached = np.zeros(out.shape, bool)
    reached[0, :2, :, 2] = call.visible[0, :2, :, 1]
    wanted = np.where(reached, nonfinite, call.reference["out"])
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pairs(score=SCORE_NAMES, mask=("valid_lens",), name=("query", "key"), framework=FRAMEWORKS)
def test_a_visible_nan_in_query_or_key_reaches_the_output(score: str, mask: str, name: str, framework: str) -> None:
    call = make_call(score, mask)
    out = array(with_nonfinite(call, np.nan, **{name: (0, 0, 1, 2)}).run(framework)["out"])
    reached = np.zeros(out.shape[:-1], bool)
    if name == "query":
        reached[0, 0, 1] = True
    else:
        reached[0, :2] = call.visible[0, :2, :, 1]
    np.testing.assert_array_equal(np.isnan(out).all(-1), reached)
    np.testing.assert_array_equal(np.isnan(out).any(-1), reached)


@frameworks
def test_a_visible_nan_in_the_bias_reaches_its_row(framework: str) -> None:
    call = make_call("scaled_dot", "valid_lens", "float32", "bias")
    out = array(with_nonfinite(call, np.nan, bias=(0, 1, 2, 3)).run(framework)["out"])
    reached = np.zeros(out.shape[:-1], bool)
    reached[0, 1, 2] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), reached)


@pairs(
    name=("query", "key"), infinity=(np.inf, -np.inf), kernel=("dense", "streaming"),
    normalizer=("softmax", "sigmoid", "entmax15"),
)  # fmt: skip
def test_the_score_of_an_infinite_vector(name: str, infinity: float, kernel: str, normalizer: str) -> None:
    """It is the infinite product in a plain call, and NaN in every unmasked pair beside a mask."""
    rng = np.random.default_rng(0)
    vectors, value = {"query": rng.random((4, 3)), "key": rng.random((6, 3))}, rng.random((6, 2))
    vectors[name][2, 1] = infinity
    options: dict[str, Any] = {"value": value, "normalizer": normalizer}
    out = ats.attend(**vectors, **options, score="dot", kernel=kernel)
    scores = vectors["query"] @ vectors["key"].T
    wanted = ats.attend(np.zeros((4, 1)), np.zeros((6, 1)), **options, bias=scores, kernel="dense")
    np.testing.assert_allclose(out, wanted, atol=1e-12)
    masked = ats.attend(**vectors, **options, score="dot", kernel=kernel, valid_lens=5)
    np.testing.assert_array_equal(np.isnan(masked).any(-1), [name == "key" or row == 2 for row in range(4)])


# ---------------------------------------------- infinity in additive scores

KERNELS = ("auto", "streaming", "dense")
ADDITIVE = (*(f"additive-{name}-projected" for name in ACTIVATIONS), "additive-tanh", "soft_cap-additive")
ONE = (0, 0, 1, 2)
INFINITE: dict[str, dict[str, dict[tuple[int, ...], float]]] = {
    "key": {"key": {ONE: np.inf}},
    "key-minus": {"key": {ONE: -np.inf}},
    "query": {"query": {(0, 1, 4, 2): np.inf}},
    "query-minus": {"query": {(0, 1, 4, 2): -np.inf}},
    # inf - inf in row 4 alone, where it is seen
    "opposite": {"query": {(0, 1, 4, 2): np.inf}, "key": {ONE: -np.inf}},
}
"""What is planted where."""
CASES = tuple(case for case in INFINITE if case != "opposite")


def infinite(call: Call, case: str) -> Call:
    for name, entries in INFINITE[case].items():
        for place, x in entries.items():
            call = with_nonfinite(call, x, **{name: place})
    return call


def by_the_formula(call: Call) -> np.ndarray:
    """The output, without the detours of `Call.reference`, on which 0 * inf lies."""
    leaves = {name: Var(x) for name, x in call.leaves.items()}
    heads = call.visible.shape[-3]
    query, key, value = (oracle.spread(leaves[name], heads) for name in ("query", "key", "value"))
    with np.errstate(all="ignore"):
        scores = call.score.formula(query, key, **{name: leaves[f"score.{name}"] for name in call.arrays})
        scores, _ = oracle.masked_scores(scores, call.visible)
        found: np.ndarray = oracle.attention(scores, value, call.visible)["out"].data
    return found


@pairs(score=ADDITIVE, mask=("none", "Causal"), case=CASES, framework=FRAMEWORKS)
def test_infinity_in_an_additive_score(score: str, mask: str, case: str, framework: str) -> None:
    """It is a number where the formula makes one of it, tanh(inf) = 1, and NaN where that is NaN; in every kernel."""
    call = infinite(make_call(score, mask, "float64"), case)
    wanted = by_the_formula(call)
    for kernel in KERNELS:
        found = array(call.run(framework, kernel=kernel)["out"])
        np.testing.assert_allclose(found, wanted, atol=1e-13, err_msg=kernel)


@pairs(
    where={
        f"{name}-{case}": (name, case)
        for name in ("tanh", "sigmoid", "relu")
        for case in CASES
        if name != "relu" or "minus" in case
    },
    mask=("none", "Causal", "valid_lens"),
    framework=FRAMEWORKS,
)
def test_gradients_where_infinity_makes_a_number(where: tuple[str, str], mask: str, framework: str) -> None:
    """The slope there is 0, and all else is as accurate as beside any other number."""
    activation, case = where
    call = infinite(make_call(f"additive-{activation}-projected", mask, "float64", "bias-sink"), case)
    for kernel in KERNELS:
        call.check(call.run(framework, kernel=kernel))


@frameworks
def test_infinity_less_infinity_is_nan_in_the_row_that_sees_it(framework: str) -> None:
    for mask, rows in (("none", [4]), ("Causal", [4]), ("valid_lens", [4])):
        call = infinite(make_call("additive-tanh-projected", mask, "float64"), "opposite")
        for kernel in KERNELS:
            out = array(call.run(framework, kernel=kernel)["out"])
            broken = np.argwhere(np.isnan(out).any(-1))
            np.testing.assert_array_equal(broken, [(0, 1, row) for row in rows], err_msg=kernel)


# --------------------------------------------------------------- empty rows


@pairs(
    score=SOME_NAMES,
    mask=[mask for mask in HIDING if mask != "valid_lens-empty"],
    extras={"plain": "", "bias-and-sink": "hiding-bias"},
    framework=FRAMEWORKS,
)
def test_rows_with_nothing_visible_are_exact_zeros(score: str, mask: str, extras: str, framework: str) -> None:
    """Output, weights and gradients of empty rows and of keys without a query, and the documented statistics."""
    call = make_call(score, mask, "float32", extras)
    found = {name: array(x) for name, x in call.run(framework).items()}
    empty, unseen = hidden_rows(call), hidden_keys(call)
    assert (found["out"][empty] == 0).all()
    for name in ("mean_score", "var_score", "max_weight", "sum_sq_weights", "sum_weights"):
        assert (found[name][empty] == 0).all(), name
    assert (found["max_score"][empty] == -np.inf).all() and (found["min_score"][empty] == np.inf).all()
    assert (found["argmax_key"][empty] == -1).all()
    assert (found["entropy"][empty] == 0).all()
    if call.sink is None:
        assert (found["log_sum_exp"][empty] == -np.inf).all()
    else:
        sink = np.broadcast_to(np.reshape(call.sink, (-1, 1)), empty.shape)
        np.testing.assert_allclose(found["log_sum_exp"][empty], sink[empty], rtol=1e-6)
    assert (found["grad.query"][empty] == 0).all()
    assert (found["grad.key"][unseen] == 0).all()
    assert (found["grad.value"][unseen] == 0).all()
    if call.bias is not None:
        assert (found["grad.bias"][~seen(call)] == 0).all()
    for name, x in found.items():
        assert not np.isnan(x).any(), name


@frameworks
def test_nothing_visible_anywhere(framework: str) -> None:
    """Parameters get gradient exactly 0 too."""
    for score in SOME_SCORES:
        call = make_call(score.name, "KeyPadding-nothing", "float32")
        for name, x in call.run(framework).items():
            if name not in ("log_sum_exp", "max_score", "min_score", "argmax_key"):
                assert (array(x) == 0).all(), (score.name, name)


@pytest.mark.parametrize("kernel", ["dense", "streaming", pytest.param("native", marks=needs_native)])
def test_a_visible_infinity_beside_a_sink(kernel: str) -> None:
    found = ats.attend(np.zeros((1, 1)), np.zeros((1, 1)), np.array([[np.inf]]), sink=0.0, kernel=kernel)
    assert found == np.inf


@pytest.mark.parametrize("kernel", ["dense", "streaming", pytest.param("native", marks=needs_native)])
def test_a_row_without_keys_beside_a_sink_that_is_nan(kernel: str) -> None:
    query, key = np.ones((2, 4)), np.ones((3, 4))
    out, stats = ats.attend(
        query, key, key, valid_lens=[0, 2], sink=np.array(np.nan), kernel=kernel, return_stats=("sum_weights",)
    )
    np.testing.assert_array_equal(out, [[0] * 4, [np.nan] * 4])
    np.testing.assert_array_equal(stats.sum_weights, [0, np.nan])


@needs_native
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("queries", [2, 40])
def test_the_slope_at_nan_is_nan_for_few_pairs_and_many(queries: int, activation: str) -> None:
    torch.manual_seed(0)
    query, key, w = (torch.randn(shape, requires_grad=True) for shape in ((queries, 16), (64, 16), (16,)))
    with torch.no_grad():
        key[5] = torch.nan
    scores = ats.attention_scores(query, key, score=ats.Additive(w, activation=activation))
    scores[:, 5].sum().backward()
    assert query.grad is not None and query.grad.isnan().all()
    assert key.grad is not None and key.grad[5].isnan().all() and (key.grad[:5] == 0).all()
