"""Statistics: what is asked for and only that, at any level of the scores, and what is computed from them.

That every field is right under every score, mask, dtype, bias and sink is part of ``test_every_score``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore import ArgumentError
from attnscore.problem.statistics import KEYS
from cases import FRAMEWORKS, needs_native
from harness import STATISTICS, array, make_call, tensor

pytestmark = pytest.mark.usefixtures("small_tiles", "one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
NUMBERS = tuple(name for name in STATISTICS if name not in KEYS)


def statistics_of(framework: str, scores: np.ndarray, asked: object = True, **arguments: object) -> ats.AttentionStats:
    """Statistics of rows whose scores are exactly `scores` (query, key): one-hot queries pick them out of the keys."""
    n, m = scores.shape
    arrays = [np.eye(n, dtype=scores.dtype), np.ascontiguousarray(scores.T), np.ones((m, 1), scores.dtype)]
    if framework == "torch":
        arrays = [tensor(x) for x in arrays]
    _, stats = ats.attend(*arrays, score="dot", return_stats=asked, **arguments)
    return stats


@frameworks
@pytest.mark.parametrize("asked", STATISTICS)
def test_one_at_a_time(asked: str, framework: str) -> None:
    call = make_call("scaled_dot", "nested", "float64", "bias-sink")
    everything = call.run(framework)
    arrays = [tensor(x) if framework == "torch" else x for x in (call.query, call.key, call.value)]
    extras = {n: tensor(x) if framework == "torch" else x for n, x in (("bias", call.bias), ("sink", call.sink))}
    for names in ((asked,), asked, [asked]):
        _, stats = ats.attend(*arrays, **call.arguments, **extras, return_stats=names)
        np.testing.assert_array_equal(array(getattr(stats, asked)), array(everything[asked]))
        assert all(getattr(stats, name) is None for name in STATISTICS if name != asked)


def exact(s: np.ndarray, level: float = 0.0) -> dict[str, np.ndarray]:
    """The statistics of rows of scores s + level by their definitions, in the dtype of `s`."""
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    mean = s.mean(-1, keepdims=True)
    return {
        "log_sum_exp": s.max(-1) + np.log(e.sum(-1)) + level, "max_score": s.max(-1) + level,
        "mean_score": mean[:, 0] + level, "var_score": ((s - mean) ** 2).mean(-1),
        "entropy": -(p * np.log(np.where(p > 0, p, 1))).sum(-1),
        "max_weight": p.max(-1), "sum_sq_weights": (p * p).sum(-1), "sum_weights": p.sum(-1),
        "min_score": s.min(-1) + level, "argmax_key": s.argmax(-1),
    }  # fmt: skip


@frameworks
@pytest.mark.parametrize("level", [0.0, 100.0, 1e4, -1e4, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_digits_do_not_depend_on_the_level(dtype: str, level: float, framework: str) -> None:
    """Whole-number scores, which floats hold exactly, far from 0: all but the level itself stay as exact as at 0."""
    scores = np.random.default_rng(0).integers(-4, 4, (6, 23)).astype(dtype)
    shifted = scores + np.asarray(level, dtype)
    stats = statistics_of(framework, shifted)
    plain = exact(shifted)
    for name, wanted in exact(scores.astype(np.longdouble), level).items():
        error, plain_error = (np.abs(x - wanted).max() for x in (array(getattr(stats, name)), plain[name]))
        scale = max(float(np.abs(wanted).max()), 1.0)
        assert error <= max(2 * plain_error, 8 * np.finfo(dtype).eps * scale), name


@frameworks
@pytest.mark.parametrize("sink", [-3.0, 0.0, 2.0, 50.0, -50.0])
@pytest.mark.parametrize("level", [0.0, 1e4])
def test_a_sink_at_any_level(level: float, sink: float, framework: str) -> None:
    """The sink is one more logit: entropy and log-sum-exp include it, the weights that are summed do not."""
    rng = np.random.default_rng(0)
    scores = rng.integers(-4, 4, (6, 23)).astype(np.float32)
    stats = statistics_of(framework, scores + np.float32(level), sink=level + sink)
    s = np.concatenate([scores, np.full((6, 1), sink)], -1).astype(np.longdouble)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    keys = p[:, :-1]
    wanted = {
        "entropy": -(p * np.log(p)).sum(-1), "max_weight": keys.max(-1), "sum_weights": keys.sum(-1),
        "sum_sq_weights": (keys**2).sum(-1),
    }  # fmt: skip
    for name, x in wanted.items():
        np.testing.assert_allclose(array(getattr(stats, name)), x.astype(float), rtol=1e-6, atol=2e-6, err_msg=name)


@frameworks
def test_one_key_has_it_all(framework: str) -> None:
    scores = np.zeros((2, 9), np.float32)
    scores[:, 4] = 300
    stats = statistics_of(framework, scores)
    np.testing.assert_array_equal(array(stats.max_weight), 1)
    np.testing.assert_array_equal(array(stats.entropy), 0)
    np.testing.assert_array_equal(array(stats.jacobian_trace()), 0)
    np.testing.assert_array_equal(array(stats.effective_keys()), 1)
    assert array(stats.saturated()).all()


@frameworks
def test_functions_of_the_statistics(framework: str) -> None:
    call = make_call("scaled_dot", "nested", "float64", "sink")
    p = call.weights
    arrays = [tensor(x) if framework == "torch" else x for x in (call.query, call.key, call.value)]
    sink = tensor(call.sink) if framework == "torch" else call.sink
    _, stats = ats.attend(*arrays, **call.arguments, sink=sink, return_stats=True)
    np.testing.assert_allclose(array(stats.jacobian_trace()), (p.sum(-1) - (p * p).sum(-1)).astype(float), atol=1e-12)
    np.testing.assert_allclose(
        array(stats.effective_keys()), np.exp(call.reference["entropy"].astype(float)), rtol=1e-12
    )
    for threshold in (0.2, 0.5, 1.0):
        np.testing.assert_array_equal(array(stats.saturated(threshold)), call.reference["max_weight"] >= threshold)
    summary = stats.summary()
    alive = call.reference["sum_weights"] > 0
    for name in NUMBERS:
        rows = call.reference[name][alive].astype(float)
        assert summary[name] == pytest.approx({"mean": rows.mean(), "min": rows.min(), "max": rows.max()}, rel=1e-9)


@frameworks
def test_the_summary_is_over_the_queries_that_see_a_key(framework: str) -> None:
    summary = statistics_of(framework, np.array([[1.0, 5.0], [2.0, 2.0]]), valid_lens=[2, 0]).summary()
    assert summary["max_score"] == {"mean": 5, "min": 5, "max": 5}
    assert summary["sum_weights"]["min"] == pytest.approx(1)


def test_a_summary_needs_values() -> None:
    import jax

    def summed(scores: jax.Array) -> dict[str, dict[str, float]]:
        return ats.attend(scores, scores, scores, return_stats=True)[1].summary()

    with pytest.raises(ats.ArgumentError, match="sum_weights: expected an array with values, got a traced one"):
        jax.jit(summed)(np.ones((1, 2, 3), np.float32))


@frameworks
@pytest.mark.parametrize("kernel", ["dense", "streaming", pytest.param("native", marks=needs_native), "auto"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [1, 2, 7, 63, 64, 65, 300])
def test_the_first_key_of_the_largest_score(keys: int, dtype: str, kernel: str, framework: str) -> None:
    """Whole scores, most of which are equal to another, under masks that leave some rows without a key."""
    rng = np.random.default_rng(keys)
    scores = rng.integers(-2, 3, (9, keys)).astype(dtype)
    for mask in (None, ats.Causal("top_left"), ats.Dense(rng.random((9, keys)) < 0.2), ats.KeyRange(1, keys)):
        stats = statistics_of(framework, scores, ("argmax_key", "min_score"), mask=mask, kernel=kernel)
        visible = np.ones(scores.shape, bool) if mask is None else mask.materialize(*scores.shape)[0]
        some = visible.any(-1)
        want = np.where(visible, scores, -np.inf).argmax(-1)
        assert array(stats.argmax_key).dtype == np.int32
        np.testing.assert_array_equal(array(stats.argmax_key), np.where(some, want, -1))
        smallest = np.where(visible, scores, np.inf).min(-1)
        np.testing.assert_array_equal(array(stats.min_score), smallest)


@frameworks
@pytest.mark.parametrize("kernel", ["dense", "streaming", pytest.param("native", marks=needs_native)])
def test_without_a_number_there_is_no_largest_score(kernel: str, framework: str) -> None:
    scores = np.array([[1.0, np.nan, 2.0], [1.0, 3.0, 2.0], [np.nan, 4.0, 4.0]])
    stats = statistics_of(framework, scores, ("argmax_key", "min_score"), kernel=kernel)
    # NaN of a score is NaN of its query or key, and so of a column.
    assert (array(stats.argmax_key) == -1).all() and np.isnan(array(stats.min_score)).all()


def test_more_keys_than_float32_counts() -> None:
    zeros = np.broadcast_to(np.zeros((1, 1), np.float32), (2**24 + 1, 1))
    with pytest.raises(ArgumentError, match=r"return_stats: expected at most 16777216 keys of float32.* got 16777217"):
        ats.attend(zeros[:1], zeros, zeros, return_stats=("argmax_key",))


@frameworks
def test_the_first_key_among_gathered_neighbours(framework: str) -> None:
    """Neighbours in any order, whose scores are equal."""
    scores = np.random.default_rng(0).integers(0, 2, (3, 40)).astype(np.float32)
    keys = [*np.random.default_rng(1).permutation(40), 7, 3, 5]
    mask = ats.Neighbours([0, 40, 40, 43], keys)
    stats = statistics_of(framework, scores, ("argmax_key", "entropy"), mask=mask, kernel="gather")
    last = min((3, 5, 7), key=lambda key: (-scores[2, key], key))
    np.testing.assert_array_equal(array(stats.argmax_key), [scores[0].argmax(), -1, last])


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_first_key_of_split_keys(threads: int) -> None:
    """A query of decoding, whose keys several tasks share; equal scores in all of them."""
    before = ats.get_num_threads()
    scores = np.random.default_rng(0).integers(-3, 4, (2, 9000)).astype(np.float32)
    ats.set_num_threads(threads)
    try:
        stats = statistics_of("numpy", scores, ("argmax_key", "min_score"), kernel="native")
    finally:
        ats.set_num_threads(before)
    np.testing.assert_array_equal(stats.argmax_key, scores.argmax(-1))
    np.testing.assert_array_equal(stats.min_score, scores.min(-1))


@frameworks
@pytest.mark.parametrize("parts", [1, 2, 3, 12])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_of_parts_equals_the_whole(dtype: str, parts: int, framework: str) -> None:
    """Keys dealt out over parts, some of which are empty for some rows."""
    call = make_call("scaled_dot", "nested", dtype)
    outs, lses = [], []
    for keys in np.array_split(np.arange(12), parts):
        mask = ats.Dense(call.visible[..., keys])
        arrays = [call.query, call.key[..., keys, :], call.value[..., keys, :]]
        arrays = [tensor(x) if framework == "torch" else x for x in arrays]
        out, stats = ats.attend(*arrays, mask=mask, return_stats=("log_sum_exp",))
        outs.append(out)
        lses.append(stats.log_sum_exp)
    out, lse = ats.merge(outs, lses)
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(array(out), call.reference["out"].astype(float), atol=16 * eps * call.scale["out"])
    np.testing.assert_allclose(array(lse), call.reference["log_sum_exp"].astype(float), rtol=16 * eps, atol=16 * eps)


@frameworks
@pytest.mark.parametrize("level", [0.0, 1e3, 1e7])
def test_merge_is_as_exact_among_large_scores(level: float, framework: str) -> None:
    """The shares of the parts add up to 1, however coarse the log-sum-exps are."""
    lses = [np.full(3, level, np.float32) for _ in range(7)]
    outs = [np.full((3, 2), i + 1, np.float32) for i in range(7)]
    if framework == "torch":
        outs, lses = [torch.tensor(x) for x in outs], [torch.tensor(x) for x in lses]
    out, lse = ats.merge(outs, lses)
    np.testing.assert_allclose(array(out), 4, rtol=1e-6)
    np.testing.assert_allclose(array(lse), level + np.log(7), rtol=2e-7)


@pytest.mark.parametrize("name", ["outs", "log_sum_exps"])
def test_merge_takes_one_dtype(name: str) -> None:
    parts = {"outs": [np.ones((2, 3))] * 2, "log_sum_exps": [np.ones(2)] * 2}
    parts[name] = [parts[name][0], parts[name][0].astype("f")]
    with pytest.raises(ats.DtypeError, match=rf"{name}: expected one dtype, got \['float32', 'float64'\]"):
        ats.merge(*parts.values())


@frameworks
def test_merge_ignores_what_empty_parts_hold(framework: str) -> None:
    outs = [np.full((2, 3), np.nan), np.ones((2, 3)), np.full((2, 3), np.inf)]
    lses = [np.full(2, -np.inf), np.array([0.5, -np.inf]), np.full(2, -np.inf)]
    if framework == "torch":
        outs, lses = [torch.tensor(x) for x in outs], [torch.tensor(x) for x in lses]
    out, lse = ats.merge(outs, lses)
    np.testing.assert_array_equal(array(out), [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(array(lse), [0.5, -np.inf])


def test_merge_is_differentiable() -> None:
    torch.manual_seed(0)
    outs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    torch.autograd.gradcheck(lambda a, b, c, d: ats.merge([a, b], [c, d]), (*outs, *lses))
    empty = torch.full((2,), -torch.inf, dtype=torch.float64)
    found = torch.autograd.grad(ats.merge(outs, [lses[0], empty])[0].sum(), [*outs, lses[0]])
    np.testing.assert_array_equal(array(found[0]), np.ones((2, 3)))
    np.testing.assert_array_equal(array(found[1]), np.zeros((2, 3)))
    np.testing.assert_array_equal(array(found[2]), np.zeros(2))


@pytest.mark.parametrize("names", [STATISTICS, STATISTICS[::2], STATISTICS[:2]], ids=["all", "half", "two"])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2), (2, 3, 5, 2)], ids=str)
@pytest.mark.parametrize("head_axis", [-3, -2])
def test_statistics_of_torch_are_tensors_of_their_own(head_axis: int, shape: tuple[int, ...], names: list[str]) -> None:
    """Each has a version, a gradient and memory of its own."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    for arrays in ((query, key, value), (query.detach(), key.detach(), value.detach())):
        options = {"head_axis": head_axis, "return_stats": tuple(names)}
        for _ in range(2):  # a new plan, and a cached one
            out, stats = ats.attend(*arrays, **options)
        _, expected = ats.attend(*(x.detach().numpy() for x in arrays), **options)
        for name in STATISTICS:
            if name not in names:
                assert getattr(stats, name) is None
                continue
            found = getattr(stats, name)
            np.testing.assert_allclose(array(found), getattr(expected, name), atol=1e-5, rtol=1e-5)
            assert (found._version, found.shape) == (0, out.shape[:-1])
            assert found.requires_grad == (arrays[0].requires_grad and name in ("log_sum_exp", "entropy"))
        detached = [name for name in names if not getattr(stats, name).requires_grad]
        before = {name: getattr(stats, name).clone() for name in detached[1:]}
        getattr(stats, detached[0]).add_(1)
        for name, x in before.items():
            assert torch.equal(getattr(stats, name), x) and getattr(stats, name)._version == 0
        if query.requires_grad and arrays[0] is query:
            # The saved outputs have not been changed.
            torch.autograd.grad(sum(x.sum() for x in (out, *stats) if x is not None and x.requires_grad), arrays)
