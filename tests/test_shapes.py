"""Axes, sizes and strides: every layout against the oracle, lengths of 0, 1 and around a tile, any memory order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from cases import FRAMEWORKS, SCORE, MaskCase, Sizes, mask
from covering import pairs
from harness import Call, Layout, array, build_call, tensor

pytestmark = pytest.mark.usefixtures("small_tiles", "one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)

# Masks that fit any sizes.
ANY_SIZE = (
    MaskCase("none", lambda s: {}, lambda s, b, h, i, j: True),
    mask("causal", lambda s: ats.Causal("bottom_right"), lambda s, b, h, i, j: j <= i + s.keys - s.queries),
    mask(
        "lengths", lambda s: ats.ValidLens([s.keys // 2, s.keys][: s.batch]),
        lambda s, b, h, i, j: j < (s.keys // 2, s.keys)[b],
    ),
    mask(
        "array", lambda s: ats.Dense((np.indices((s.queries, s.keys)).sum(0) % 3) > 0),
        lambda s, b, h, i, j: (i + j) % 3 > 0, intervals=False,
    ),
)  # fmt: skip
any_size = pytest.mark.parametrize("case", ANY_SIZE, ids=[case.name for case in ANY_SIZE])


# ------------------------------------------------------------------- layouts

# name: (layout, query, key, value), for 7 queries, 12 keys, dim 5, value_dim 3.
LAYOUTS: dict[str, tuple[Layout, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "nd": (Layout(2), (7, 5), (12, 5), (12, 3)),
    "bnd": (Layout(3), (2, 7, 5), (2, 12, 5), (2, 12, 3)),
    "bnd-one-key-set": (Layout(3), (2, 7, 5), (1, 12, 5), (1, 12, 3)),
    "bnd-keys-without-batch": (Layout(3), (2, 7, 5), (12, 5), (12, 3)),
    "bnd-one-query-set": (Layout(3), (1, 7, 5), (2, 12, 5), (2, 12, 3)),
    "bnd-query-without-batch": (Layout(3), (7, 5), (2, 12, 5), (2, 12, 3)),
    "bnd-values-alone-have-a-batch": (Layout(3), (7, 5), (12, 5), (2, 12, 3)),
    "bhnd": (Layout(4), (2, 4, 7, 5), (2, 4, 12, 5), (2, 4, 12, 3)),
    "bhnd-grouped": (Layout(4), (2, 4, 7, 5), (2, 2, 12, 5), (2, 2, 12, 3)),
    "bhnd-one-key-head": (Layout(4), (2, 4, 7, 5), (2, 1, 12, 5), (2, 1, 12, 3)),
    "bhnd-one-query-head": (Layout(4), (2, 1, 7, 5), (2, 4, 12, 5), (2, 4, 12, 3)),
    "bhnd-one-value-head": (Layout(4), (2, 4, 7, 5), (2, 2, 12, 5), (2, 1, 12, 3)),
    "bhnd-one-key-head-two-value-heads": (Layout(4), (2, 4, 7, 5), (2, 1, 12, 5), (2, 2, 12, 3)),
    "bhnd-one-key-set": (Layout(4), (2, 4, 7, 5), (1, 2, 12, 5), (2, 2, 12, 3)),
    "bhnd-keys-of-two-axes": (Layout(4), (2, 4, 7, 5), (12, 5), (12, 3)),
    "bhnd-keys-of-three-axes": (Layout(4), (2, 4, 7, 5), (2, 12, 5), (2, 12, 3)),
    "bhnd-query-of-two-axes": (Layout(4), (7, 5), (2, 4, 12, 5), (2, 4, 12, 3)),
    "bhnd-three-heads": (Layout(4), (2, 3, 7, 5), (2, 3, 12, 5), (2, 3, 12, 3)),
    "bhnd-six-over-two": (Layout(4), (2, 6, 7, 5), (2, 2, 12, 5), (2, 2, 12, 3)),
    "bnhd": (Layout(4, -2), (2, 7, 4, 5), (2, 12, 4, 5), (2, 12, 4, 3)),
    "bnhd-grouped": (Layout(4, -2), (2, 7, 4, 5), (2, 12, 2, 5), (2, 12, 2, 3)),
    "bnhd-one-key-head": (Layout(4, -2), (2, 7, 4, 5), (2, 12, 1, 5), (2, 12, 1, 3)),
    "bnhd-one-key-set": (Layout(4, -2), (2, 7, 4, 5), (1, 12, 2, 5), (1, 12, 2, 3)),
    "bnhd-keys-of-three-axes": (Layout(4, -2), (2, 7, 4, 5), (12, 2, 5), (12, 2, 3)),
    "abhnd": (Layout(5), (2, 3, 4, 7, 5), (2, 3, 2, 12, 5), (2, 3, 2, 12, 3)),
    "abhnd-broadcast-first": (Layout(5), (2, 3, 4, 7, 5), (1, 3, 2, 12, 5), (3, 2, 12, 3)),
    "abhnd-broadcast-second": (Layout(5), (2, 1, 4, 7, 5), (2, 3, 2, 12, 5), (1, 3, 2, 12, 3)),
    "abnhd": (Layout(5, -2), (2, 3, 7, 4, 5), (2, 3, 12, 2, 5), (2, 3, 12, 2, 3)),
    "abnhd-broadcast": (Layout(5, -2), (2, 3, 7, 4, 5), (1, 1, 12, 2, 5), (2, 1, 12, 2, 3)),
    "value_dim-1": (Layout(4), (2, 4, 7, 5), (2, 2, 12, 5), (2, 2, 12, 1)),
    "value_dim-17": (Layout(3), (2, 7, 5), (2, 12, 5), (2, 12, 17)),
    "dim-1": (Layout(4), (2, 4, 7, 1), (2, 2, 12, 1), (2, 2, 12, 3)),
}  # fmt: skip


def layout_call(
    name: str, score: str, case: MaskCase, *, bias: str | None = None, sink: str | None = None, dtype: str = "float64"
) -> Call:
    """A call on these axes; the mask and the bias lie over (..., head, query, key) in either layout."""
    layout, *shapes = LAYOUTS[name]
    rng = np.random.default_rng(5)
    query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    padded = [(1,) * (layout.axes - len(shape)) + shape for shape in shapes]
    if layout.axes >= 4 and layout.head_axis == -2:
        padded = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in padded]
    heads = max(shape[-3] for shape in padded) if layout.axes >= 4 else 1
    lead = np.broadcast_shapes(*(shape[: -3 if layout.axes >= 4 else -2] for shape in padded)) or (1,)
    row = SCORE[score]
    sizes = Sizes(lead[0], heads, heads, 7, 12, 5, 5, shapes[2][-1])
    visible = case.visible(sizes).reshape(lead[0], *(1,) * (len(lead) - 1), heads, 7, 12)
    visible = np.broadcast_to(visible, (*lead, heads, 7, 12))
    has_heads = (heads,) if layout.axes >= 4 else ()
    bias_shape = {"full": (*lead[: layout.axes - 2], *has_heads, 7, 12), "keys": (12,)}
    seeds = {"out": (*visible.shape[:-1], shapes[2][-1]), "log_sum_exp": visible.shape[:-1]}
    return Call(
        score=row, dtype=dtype, query=query, key=key, value=value, visible=visible, arguments=case.arguments(sizes),
        arrays={name: rng.uniform(0.5, 1.5, shape).astype(dtype) for name, shape in row.shapes(sizes).items()},
        bias=None if bias is None else rng.standard_normal(bias_shape[bias]).astype(dtype),
        sink=None if sink is None else rng.standard_normal((heads,)).astype(dtype),
        seeds={name: rng.standard_normal(shape).astype(dtype) for name, shape in seeds.items()},
        layout=layout,
    )  # fmt: skip


layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pairs(layout=tuple(LAYOUTS), score=("scaled_dot", "gaussian", "cosine"), case=ANY_SIZE, framework=FRAMEWORKS)
def test_layouts(layout: str, score: str, case: MaskCase, framework: str) -> None:
    call = layout_call(layout, score, case)
    call.check(call.run(framework))


@pairs(layout=tuple(LAYOUTS), bias=("full", "keys"), framework=FRAMEWORKS)
def test_layouts_with_bias_and_sink(layout: str, bias: str, framework: str) -> None:
    layout_has_batch = LAYOUTS[layout][0].axes > 2
    call = layout_call(layout, "dot", ANY_SIZE[2 if layout_has_batch else 0], bias=bias, sink="heads")
    if not layout_has_batch and bias == "full":
        call = dataclasses.replace(call, bias=call.bias.reshape(7, 12))
    call.check(call.run(framework))


@pairs(
    layout=[name for name in LAYOUTS if name[:3] in ("bhn", "bnh", "abh", "abn")],
    score=("scaled_dot-heads", "bilinear-heads", "gaussian-heads", "cosine-heads"),
    framework=FRAMEWORKS,
)
def test_layouts_with_parameters_per_head(layout: str, score: str, framework: str) -> None:
    row = SCORE[score]
    if row.dims != (5, 5):
        row = dataclasses.replace(row, dims=(5, 5))
    call = layout_call(layout, score, ANY_SIZE[1])
    heads = call.visible.shape[-3]
    rng = np.random.default_rng(0)
    arrays = {n: rng.uniform(0.5, 1.5, shape) for n, shape in row.shapes(Sizes(heads=heads)).items()}
    call = dataclasses.replace(call, arrays=arrays)
    call.check(call.run(framework))


@frameworks
@pytest.mark.parametrize("key_dim", [5, 3, 8, 1])
@pytest.mark.parametrize("score", ["bilinear", "additive-tanh"])
def test_queries_and_keys_of_different_lengths(score: str, key_dim: int, framework: str) -> None:
    row = dataclasses.replace(SCORE[score], dims=(5, key_dim))
    call = build_call(row, ANY_SIZE[1], "float64", "bias-sink")
    call.check(call.run(framework))


# --------------------------------------------------------------------- sizes

# Around a tile of 4 and around two.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 13)


@pairs(queries=LENGTHS, keys=LENGTHS, framework=FRAMEWORKS)
def test_lengths(queries: int, keys: int, framework: str) -> None:
    for i, case in enumerate(ANY_SIZE):
        score = ("scaled_dot", "additive-tanh-projected", "gaussian-direct", "own-tile_gradient")[(queries + i) % 4]
        call = build_call(SCORE[score], case, "float64", "bias-sink", Sizes(queries=queries, keys=keys))
        call.check(call.run(framework))


@frameworks
@pytest.mark.parametrize("tile", [1, 2, 3, 5, 6, 16])
@pytest.mark.slow_rows("1-torch", "2-torch", "3-numpy", "6-*")
def test_tiles_that_do_not_divide(tile: int, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscore.base.thresholds.SMALLEST_TILE", tile)
    for case in ANY_SIZE:
        call = build_call(SCORE["scaled_dot"], case, "float64", "bias-sink", Sizes(queries=11, keys=13))
        call.check(call.run(framework, kernel="streaming"))


@frameworks
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 1), (3, 6, 2), (5, 1, 1), (2, 5, 5)], ids=str)
def test_batches_and_heads(sizes: tuple[int, int, int], framework: str) -> None:
    batch, heads, key_heads = sizes
    for case in (ANY_SIZE[0], ANY_SIZE[1], ANY_SIZE[3]):
        call = build_call(SCORE["cosine-heads"], case, "float64", "bias-sink", Sizes(batch, heads, key_heads))
        call.check(call.run(framework))


def _empty_call(framework: str, query: Any, key: Any, value: Any, **arguments: Any) -> dict[str, Any]:
    """Results and gradients of a call as NumPy."""
    if framework == "numpy":
        (out, stats), pullback = ats.attend_vjp(query, key, value, return_stats=True, **arguments)
        found = pullback(np.ones_like(out))
        grads = {"query": found.query, "key": found.key, "value": found.value}
        return {"out": out, **stats._asdict(), **grads}
    leaves = [tensor(x, requires_grad=True) for x in (query, key, value)]
    arguments = {n: tensor(x) if isinstance(x, np.ndarray) and x.dtype != bool else x for n, x in arguments.items()}
    out, stats = ats.attend(*leaves, return_stats=True, **arguments)
    grads = torch.autograd.grad(out.sum(), leaves, materialize_grads=True)
    found = {"out": out, **stats._asdict(), **dict(zip(("query", "key", "value"), grads, strict=True))}
    return {name: array(x) for name, x in found.items()}


@frameworks
@pytest.mark.parametrize("score", ["dot", "gaussian", "cosine", "sum", "scaled_dot"])
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 0, 4), (2, 3, 4), (2, 3, 5)),
        ((2, 3, 4), (2, 0, 4), (2, 0, 5)),
        ((2, 0, 4), (2, 0, 4), (2, 0, 5)),
        ((0, 3, 4), (0, 5, 4), (0, 5, 2)),
        ((2, 3, 4), (2, 5, 4), (2, 5, 0)),
        ((0, 4), (3, 4), (3, 5)),
        ((3, 4), (0, 4), (0, 5)),
        ((2, 4, 3, 4), (2, 2, 0, 4), (2, 2, 0, 5)),
        ((0, 4, 3, 4), (0, 2, 5, 4), (0, 2, 5, 3)),
        ((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 3)),
    ],
    ids=["queries", "keys", "both", "batch", "value_dim", "2-queries", "2-keys", "4-keys", "4-batch", "4-heads"],
)  # fmt: skip
def test_axes_of_length_zero(query: Any, key: Any, value: Any, score: str, framework: str) -> None:
    arrays = [np.ones(shape) for shape in (query, key, value)]
    for mask_object in (None, ats.Causal("bottom_right"), ats.Dense(np.ones((query[-2], key[-2]), bool))):
        found = _empty_call(framework, *arrays, score=score, mask=mask_object)
        rows = np.broadcast_shapes(query[:-2], key[:-2] if len(key) < 4 else query[:-2]) + query[-2:-1]
        assert found["out"].shape == (*rows, value[-1])
        for name, x in zip(("query", "key", "value"), arrays, strict=True):
            assert found[name].shape == x.shape
            assert np.isfinite(found[name]).all()
        for name in ats.AttentionStats._fields:
            assert found[name].shape == rows
        if key[-2] == 0:
            assert (found["out"] == 0).all() and (found["log_sum_exp"] == -np.inf).all()
            assert (found["max_score"] == -np.inf).all() and (found["min_score"] == np.inf).all()
            assert (found["argmax_key"] == -1).all()
            assert all((found[name] == 0).all() for name in ("query", "entropy", "max_weight", "sum_weights"))


@frameworks
def test_no_keys_but_a_sink(framework: str) -> None:
    sink = np.array([0.5, -1.0])
    found = _empty_call(framework, np.ones((1, 2, 3, 4)), np.ones((1, 2, 0, 4)), np.ones((1, 2, 0, 5)), sink=sink)
    np.testing.assert_allclose(found["log_sum_exp"], np.broadcast_to(sink[:, None], (1, 2, 3)))
    assert (found["out"] == 0).all() and (found["entropy"] == 0).all()


@frameworks
@pytest.mark.parametrize("score", ["additive-tanh", "bilinear", "gaussian-heads", "own-tile_gradient"])
@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_parameters_get_zero_from_empty_axes(score: str, lengths: tuple[int, int], framework: str) -> None:
    row = SCORE[score]
    sizes = row.sized(Sizes(queries=lengths[0], keys=lengths[1]))
    arrays = {name: np.ones(shape) for name, shape in row.shapes(sizes).items()}
    query = np.ones((2, 4, lengths[0], row.dims[0]))
    key, value = np.ones((2, 2, lengths[1], row.dims[1])), np.ones((2, 2, lengths[1], 3))
    if framework == "numpy":
        out, pullback = ats.attend_vjp(query, key, value, score=row.make(**arrays))
        grads = pullback(np.ones_like(out)).score
    else:
        leaves = {name: tensor(x, requires_grad=True) for name, x in arrays.items()}
        out = ats.attend(*(tensor(x, requires_grad=True) for x in (query, key, value)), score=row.make(**leaves))
        found = torch.autograd.grad(out.sum(), list(leaves.values()), materialize_grads=True)
        grads = dict(zip(leaves, found, strict=True))
    assert tuple(out.shape) == (2, 4, lengths[0], 3)
    for name, x in arrays.items():
        assert grads[name].shape == x.shape and (array(grads[name]) == 0).all()


# ------------------------------------------------------------------- strides


def _readonly(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


STRIDES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "heads-last-in-memory": lambda x: np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3),
    "fortran": np.asfortranarray,
    "negative": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "all-negative": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "every-second": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "every-third-channel": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "slice-of-a-larger-one": lambda x: np.pad(x, 2)[2:-2, 2:-2, 2:-2, 2:-2],
    "read-only": _readonly,
    "misaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
}


@pairs(
    strides=tuple(STRIDES),
    score=("scaled_dot-heads", "additive-tanh-heads", "gaussian", "bilinear-heads"),
    framework=FRAMEWORKS,
)
def test_strides(strides: str, score: str, framework: str) -> None:
    """Any memory order of every array, the incoming gradient's included, gives the same numbers."""
    view = STRIDES[strides]
    call = build_call(SCORE[score], ANY_SIZE[1], "float32", "bias", Sizes(value_dim=5))

    def viewed(x: np.ndarray) -> np.ndarray:
        found = view(x) if x.ndim == 4 else x
        np.testing.assert_array_equal(found, x)
        return found

    if framework == "numpy":
        moved = dataclasses.replace(
            call, query=viewed(call.query), key=viewed(call.key), value=viewed(call.value), bias=viewed(call.bias),
            seeds={name: viewed(x) for name, x in call.seeds.items()},
        )  # fmt: skip
        call.check(moved.numpy())
        return
    if "negative" in strides or strides in ("read-only", "misaligned"):
        return  # torch has no such tensors
    own = {n: tensor(x) for n, x in call.arrays.items()}
    leaves = [torch.from_numpy(viewed(x)).requires_grad_() for x in (call.query, call.key, call.value, call.bias)]
    for x, y in zip(leaves, (call.query, call.key, call.value, call.bias), strict=True):
        assert x.stride() != torch.from_numpy(y).stride()
    out = ats.attend(*leaves[:3], bias=leaves[3], score=call.score.make(**own), **call.arguments)
    wanted = call.reference
    np.testing.assert_allclose(array(out), wanted["out"], atol=1e-5)
    out_only = dataclasses.replace(call, seeds={"out": call.seeds["out"]})
    grads = torch.autograd.grad(out, leaves, torch.from_numpy(viewed(call.seeds["out"])))
    for name, grad in zip(("query", "key", "value", "bias"), grads, strict=True):
        np.testing.assert_allclose(array(grad), out_only.reference[f"grad.{name}"], atol=2e-5, err_msg=name)


@frameworks
def test_broadcast_views_take_no_copy_of_their_own(framework: str) -> None:
    """Stride 0: a key expanded over batches is read where it lies."""
    call = build_call(SCORE["scaled_dot"], ANY_SIZE[1], "float64")
    key, value = call.key[:1], call.value[:1]
    if framework == "numpy":
        wide = [np.broadcast_to(x, (2, *x.shape[1:])) for x in (key, value)]
        found = ats.attend(call.query, *wide, mask=ats.Causal("bottom_right"))
        wanted = ats.attend(call.query, key, value, mask=ats.Causal("bottom_right"))
    else:
        wide = [tensor(x).expand(2, -1, -1, -1) for x in (key, value)]
        found = ats.attend(tensor(call.query), *wide, mask=ats.Causal("bottom_right"))
        wanted = ats.attend(tensor(call.query), tensor(key), tensor(value), mask=ats.Causal("bottom_right"))
    np.testing.assert_allclose(array(found), array(wanted), atol=1e-12)


@frameworks
def test_the_same_array_three_times(framework: str) -> None:
    """Self-attention on one array: the gradients of its three parts add up."""
    x = np.random.default_rng(0).standard_normal((2, 9, 4))
    if framework == "numpy":
        _, pullback = ats.attend_vjp(x, x, x, mask=ats.Causal())
        found = pullback(np.ones_like(x))
        total = found.query + found.key + found.value
    else:
        leaf = tensor(x, requires_grad=True)
        ats.attend(leaf, leaf, leaf, mask=ats.Causal()).sum().backward()
        total = array(leaf.grad)
    step = 1e-6 * np.random.default_rng(1).standard_normal(x.shape)
    ends = [ats.attend(y, y, y, mask=ats.Causal()).sum() for y in (x + step, x - step)]
    assert abs((ends[0] - ends[1]) / 2 - (total * step).sum()) < 1e-12
