"""Neighbours in compressed sparse rows: the gather kernel against others, its memory, PyTorch Geometric's GATv2."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import attnscore as ats
from attnscore import KernelUnavailable
from attnscore.backends import load
from attnscore.base import thresholds
from attnscore.kernels import gather
from cases import needs_native

pytestmark = pytest.mark.usefixtures("one_thread")


def graph(queries: int, keys: int, most: int, seed: int = 0) -> ats.Neighbours:
    """A graph of up to `most` neighbours a query, in no order."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(keys, rng.integers(0, most + 1), replace=False) for _ in range(queries)]
    return ats.Neighbours(np.cumsum([0, *map(len, rows)]), np.concatenate(rows))


def inputs(kind: Any = torch.tensor, *, lead: tuple[int, ...] = (2,), queries: int = 40, keys: int = 30) -> list[Any]:
    rng = np.random.default_rng(1)
    shapes = ((*lead, 4, queries, 5), (*lead, 2, keys, 5), (*lead, 2, keys, 3))
    return [kind(rng.standard_normal(shape)) for shape in shapes]


@pytest.mark.parametrize("block", [1, 200, 2**22])
@pytest.mark.parametrize("blocks_by", ["auto", "streaming"])
@pytest.mark.parametrize(
    "option", ["nothing", "bias", "key bias", "query bias", "relative bias", "dropout", "valid_lens"]
)
def test_every_gradient_is_that_of_the_streaming_kernel(
    option: str, blocks_by: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of a query each, of several and of all, in the order of edges or by degree."""
    monkeypatch.setattr(thresholds, "GATHERED_NUMBERS", block)
    if blocks_by == "streaming":
        monkeypatch.setitem(ats.kernels._TABLE, "gather", gather.Gather((gather.Streaming(),)))
    rng = np.random.default_rng(2)
    shapes = {"bias": (4, 40, 30), "key bias": (4, 1, 30), "query bias": (2, 1, 40, 1), "relative bias": (4, 1, 69)}
    extra: dict[str, Any] = {"sink": torch.zeros(4, dtype=torch.float64, requires_grad=True)}
    if option in shapes:
        extra["bias"] = torch.tensor(rng.standard_normal(shapes[option]), requires_grad=True)
    extra |= {"dropout": 0.4, "seed": 3} if option == "dropout" else {}
    extra |= {"valid_lens": [30, 11]} if option == "valid_lens" else {}
    leaves = [x.requires_grad_() for x in inputs()] + [x for x in extra.values() if isinstance(x, torch.Tensor)]
    found = []
    for kernel in ("gather", "streaming"):
        out, stats = ats.attend(*leaves[:3], mask=graph(40, 30, 9), kernel=kernel, return_stats=True, **extra)
        total = (out * torch.arange(3.0)).sum() + stats.entropy.sum() + (stats.log_sum_exp.clamp(-9) ** 2).sum()
        found.append([out, *stats, *torch.autograd.grad(total, leaves)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("no_channels", [False, True])
def test_the_weights_and_their_gradient(no_channels: bool) -> None:
    query, key, value = inputs()
    leaves = [x.requires_grad_() for x in (query, key, value[0, ..., :0] if no_channels else value)]
    found = []
    for kernel in ("gather", "streaming"):
        out, weights = ats.attend(*leaves, mask=graph(40, 30, 9), kernel=kernel, return_weights=True)
        grads = torch.autograd.grad(out.sum() + (weights * torch.arange(30.0)).sum(), leaves)
        found.append([out, weights, *grads])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_rows_read_each_row_once(dtype: torch.dtype) -> None:
    """Also of ids that have no row; a gradient that is recorded takes another way."""
    rng, ops = np.random.default_rng(4), load("torch")
    x = torch.tensor(rng.standard_normal((61, 7)), dtype=dtype)
    places = rng.permutation(61)[:50].astype(np.int32)
    ends = np.array([0, 0, 13, 14, 14, 50, 50], np.int32)
    wanted = torch.stack([x[places[first:last]].sum(0) for first, last in pairwise(ends.tolist())])
    torch.testing.assert_close(ops.sums_of_rows(x, places, ends), wanted)
    assert ops.can_sum_rows(x) and not ops.can_sum_rows(x, x.clone().requires_grad_())


@needs_native
@pytest.mark.parametrize("option", ["in order", "valid_lens", "shared value"])
def test_gradients_of_keys_are_the_same_bits_with_any_threads_and_blocks(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a value of one head beside keys of two is summed over the heads, away from where it was made."""
    query, key, value = (x.float() for x in inputs(queries=150))
    value = value[..., :1, :, :] if option == "shared value" else value
    leaves = [x.requires_grad_() for x in (query, key, value)]
    mask = graph(150, 30, 9)
    extra = {"valid_lens": [30, 11]} if option == "valid_lens" else {}
    found = []
    for threads, block in ((1, 2**22), (2, 2**22), (2, 4000)):
        monkeypatch.setattr(thresholds, "GATHERED_NUMBERS", block)
        torch.set_num_threads(threads)
        out = ats.attend(*leaves, mask=mask, kernel="gather", **extra)
        found.append(torch.autograd.grad((out * torch.arange(3.0)).sum(), leaves))
    torch.set_num_threads(1)
    whole = [x.detach().double().requires_grad_() for x in leaves]
    out = ats.attend(*whole, mask=mask, kernel="dense", **extra)
    wanted = torch.autograd.grad((out * torch.arange(3.0)).sum(), whole)
    for x, y, z, right in zip(*found, wanted, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(z, x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_second_derivatives() -> None:
    leaves = [x.requires_grad_() for x in inputs(lead=(1,), queries=4, keys=3)]
    mask = graph(4, 3, 2)
    assert torch.autograd.gradgradcheck(lambda *x: ats.attend(*x, mask=mask, kernel="gather"), leaves)


def test_jax_and_numpy() -> None:
    """Inside jit too: the graph is a constant of the program."""
    arrays, mask = inputs(np.asarray), graph(40, 30, 9)
    cotangent = np.random.default_rng(5).standard_normal((2, 4, 40, 3))
    wanted, pullback = ats.attend_vjp(*arrays, mask=mask, kernel="gather")
    with jax.enable_x64(True):
        traced = [jnp.asarray(x) for x in arrays]
        out, vjp = jax.vjp(jax.jit(lambda *x: ats.attend(*x, mask=mask, kernel="gather")), *traced)
        np.testing.assert_allclose(out, wanted, atol=1e-12)
        for x, y in zip(vjp(jnp.asarray(cotangent)), pullback(cotangent), strict=False):
            np.testing.assert_allclose(x, y, atol=1e-11)


@pytest.mark.parametrize("knows_indptr", [False, True])
@pytest.mark.parametrize(
    ("compiler", "kernel"), [(jax.jit, "auto"), pytest.param(tf.function, "native", marks=needs_native)]
)
def test_a_traced_graph_runs_in_another_kernel(compiler: Any, kernel: str, knows_indptr: bool) -> None:
    arrays, mask = inputs(np.float32), graph(40, 30, 9)

    def attend(query: Any, key: Any, value: Any, indices: Any, indptr: Any = mask.indptr.tolist()) -> Any:  # noqa: B008
        return ats.attend(query, key, value, mask=ats.Neighbours(indptr, indices), kernel=kernel)

    asarray = jnp.asarray if compiler is jax.jit else tf.constant
    found = compiler(attend)(*map(asarray, (*arrays, mask.indices, *([] if knows_indptr else [mask.indptr]))))
    np.testing.assert_allclose(found, ats.attend(*arrays, mask=mask), atol=1e-5)


@pytest.mark.parametrize(
    ("indices", "said"),
    [([0, 1, 2], "indptr: expected a last entry of 3, the number of indices, got 2"), ([0, -1], "indices: .* got -1")],
)
def test_a_graph_is_checked_where_the_number_of_keys_is_unknown(indices: list[int], said: str) -> None:
    mask = ats.Neighbours([0, 1, 1, 1, 2], indices)
    attend = tf.function(lambda x: ats.attend(x, x, x, mask=mask), input_signature=[tf.TensorSpec([None, 2])])
    with pytest.raises(ats.MaskError, match=said):
        attend.get_concrete_function()


def test_the_number_of_traced_neighbours_is_checked() -> None:
    x = jnp.ones((4, 2))
    with pytest.raises(ats.MaskError, match="indptr: expected a last entry of 3"):
        jax.jit(lambda indices: ats.attend(x, x, x, mask=ats.Neighbours([0, 1, 1, 1, 2], indices)))(jnp.arange(3))


def test_when_it_is_taken() -> None:
    x, mask = inputs(np.asarray), graph(40, 30, 9)
    assert ats.explain(*x, mask=mask).kernel == ats.explain(*x, mask=mask & ats.ValidLens([30, 9])).kernel == "gather"
    plan = ats.explain(*x, mask=mask)
    edges = len(mask.indices)
    assert f"{edges} edges, up to 9 a query" in str(plan) and plan.plan.fractions["skip"] > 0.5
    for other in (mask | ats.ValidLens(3), mask & ats.Dense(np.eye(40, 30) > 0), ats.Causal("top_left")):
        assert ats.explain(*x, mask=other).kernel != "gather"
    with pytest.raises(KernelUnavailable, match="the mask has no Neighbours"):
        ats.attend(*x, kernel="gather")
    with pytest.raises(KernelUnavailable, match=r"Dense\(.*beside the neighbours"):
        ats.attend(*x, mask=mask & ats.Dense(np.eye(40, 30) > 0), kernel="gather")


def test_a_graph_that_changes_in_place_is_read_and_checked_again() -> None:
    x, mask = inputs(np.asarray, queries=3, keys=5), ats.Neighbours(np.array([0, 1, 2, 3]), np.array([0, 1, 2]))
    ats.attend(*x, mask=mask)
    mask.indices[:] = [4, 3, 2]
    wanted = ats.attend(*x, mask=mask.materialize(3, 5))
    np.testing.assert_allclose(ats.attend(*x, mask=mask), wanted, atol=1e-14)
    mask.indices[0] = 5
    with pytest.raises(ats.MaskError, match="indices: expected keys from 0 to 4, got 5"):
        ats.attend(*x, mask=mask)


def test_what_is_no_neighbour_propagates_nothing() -> None:
    query, key, value = (x.requires_grad_() for x in inputs(lead=(1,)))
    mask = graph(40, 30, 2)
    hidden = np.setdiff1d(np.arange(30), mask.indices)
    assert hidden.size
    with torch.no_grad():
        key[..., hidden, :], value[..., hidden, :] = torch.nan, torch.inf
    out = ats.attend(query, key, value, mask=mask, kernel="gather")
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(x.isfinite().all() for x in (out, *grads))
    assert (out[..., np.diff(mask.indptr) == 0, :] == 0).all()
    assert all((x[..., hidden, :] == 0).all() for x in grads[1:])


@needs_native
def test_memory_grows_with_the_edges_alone() -> None:
    """50,000 nodes: one row of tiles of all pairs would be 300 MB, the matrix 10 GB."""
    nodes, degree = 50_000, 4
    rng = np.random.default_rng(0)
    indices = (np.arange(nodes)[:, None] + np.cumsum(rng.integers(1, nodes // 8, (nodes, degree)), 1)) % nodes
    mask = ats.Neighbours(degree * np.arange(nodes + 1), indices.reshape(-1))
    x = rng.standard_normal((1, nodes, 8), dtype=np.float32)
    tracemalloc.start()
    out, pullback = ats.attend_vjp(x, x, x, mask=mask)
    pullback(out)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 250e6, most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch Geometric scripts functions at import
def test_gatv2_is_that_of_pytorch_geometric() -> None:
    """Forward and every gradient; PyTorch Geometric adds an edge from each node to itself."""
    from torch_geometric import nn

    torch.manual_seed(0)
    nodes, heads, size = 300, 4, 6
    layer = nn.GATv2Conv(16, size, heads=heads, add_self_loops=False, bias=False)
    x = torch.randn(nodes, 16, requires_grad=True)
    mask = graph(nodes, nodes, 12)
    target = torch.tensor(np.repeat(np.arange(nodes), np.diff(mask.indptr)))
    wanted = layer(x, torch.stack([torch.tensor(mask.indices), target]))
    sent, asking = (f(x).view(1, nodes, heads, size) for f in (layer.lin_l, layer.lin_r))
    score = ats.Additive(layer.att[0], activation="leaky_relu", negative_slope=0.2)
    found = ats.attend(asking, sent, sent, score=score, mask=mask, head_axis=-2).flatten(2)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    cotangent = torch.randn_like(wanted)
    leaves = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(out, leaves, cotangent) for out in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_one_edge_of_many_that_changes() -> None:
    """Tables are found by all entries of the arrays, and hold none of them."""
    indptr, indices = np.array([0, 60, 120]), np.tile(np.arange(60), 2)
    mask, value = ats.Neighbours(indptr, indices), np.eye(99)
    for edge, key in ((61, 98), (61, 97), (1, 98)):
        indices[edge] = key
        weights = ats.attend(np.zeros((2, 3)), np.zeros((99, 3)), value, mask=mask)
        np.testing.assert_array_equal(weights > 0, mask.materialize(2, 99)[0])
        assert weights[edge // 60, key] > 0 and np.count_nonzero(weights) == 120
