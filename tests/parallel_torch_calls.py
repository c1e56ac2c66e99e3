"""What each rank runs in the tests of `attnscore.parallel.torch`. Arrays come and go as NumPy's."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.nn.parallel import DistributedDataParallel

import attnscore as ats
from attnscore.layers.torch import MultiHeadAttention
from attnscore.masks import Mask
from attnscore.parallel import Shard, balanced_shards, exchange
from attnscore.parallel.torch import attend, explain, gather_rows, merge_over
from cases import MASK, SCORE, Sizes

STATISTICS = ats.AttentionStats._fields


def tensor(x: np.ndarray, **options: Any) -> torch.Tensor:
    """A tensor with the same dtype and values; torch cannot read ml_dtypes."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.tensor(x.astype(np.float32), dtype=torch.bfloat16, **options)
    return torch.tensor(x, **options)


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return x.float().numpy().astype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def shards_of(kind: str, length: int, ranks: int, mask: Any = None, key_len: int | None = None) -> list[Shard]:
    """The shards of all ranks. "uneven": rank 0 has nothing, the last one most."""
    if kind == "balanced":
        mask = mask if isinstance(mask, Mask) else None
        return list(balanced_shards(mask, length, ranks, 2, key_len=key_len, batch=2))
    if kind == "uneven" and ranks > 1:
        ends = [0, 0, *(min(length, 2 * rank) for rank in range(1, ranks - 1)), length]
        return [Shard(((ends[rank], ends[rank + 1]),), length) for rank in range(ranks)]
    make: Callable[..., Shard] = Shard.head_tail if kind == "head_tail" else Shard.contiguous
    return [make(length, rank, ranks) for rank in range(ranks)]


def run(
    score: str, mask: str, sizes: Sizes, leaves: dict[str, np.ndarray], seeds: dict[str, np.ndarray],
    placement: tuple[str, str], options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The rank's part of outputs and gradients of a call of the tables, with the positions that it holds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arguments = MASK[mask].arguments(sizes)
    arguments = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    queries = shards_of(placement[0], sizes.queries, ranks, arguments.get("mask"), sizes.keys)
    keys = shards_of(placement[1], sizes.keys, ranks)
    rows, cols = queries[rank], keys[rank]
    own = {}
    for name, x in leaves.items():
        if name == "query" or (name == "bias" and x.shape[-2] > 1):
            part = rows.take(tensor(x))
        else:
            part = cols.take(tensor(x)) if name in ("key", "value") else tensor(x)
        own[name] = part.clone().requires_grad_()
    named = {name.removeprefix("score."): x for name, x in own.items() if name.startswith("score.")}
    extras = {name: own[name] for name in ("bias", "sink") if name in own}
    arrays = [own[name] for name in ("query", "key", "value")]
    out, stats = attend(
        *arrays, group=None, queries=queries, keys=keys, score=SCORE[score].make(**named),
        **{"return_stats": True, **arguments, **extras, **options},
    )  # fmt: skip
    outputs = {"out": out, **{name: x for name, x in stats._asdict().items() if x is not None}}
    incoming = [rows.take(tensor(x), -2 if name == "out" else -1) for name, x in seeds.items()]
    grads = torch.autograd.grad([outputs[name] for name in seeds], list(own.values()), incoming)
    found = outputs | {f"grad.{name}": grad for name, grad in zip(own, grads, strict=True)}
    return {name: array(x) for name, x in found.items()} | {"rows": rows.positions(), "cols": cols.positions()}


OF_ALL_ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bilinear": ats.Bilinear,
    "wrapped": lambda weight: ats.SoftCap(ats.Temperature(ats.Bilinear(weight), 2.0), 5.0),
    "gaussian": lambda _: ats.Gaussian(3.0),
    "combination": lambda _: ats.Dot() + 0.5 * ats.Gaussian(0.3),
}
"""Scores whose lowering on one device depends on the number of queries and keys, or on the values of all keys."""


def unequal(
    score: str, query_lens: tuple[int, ...], key_lens: tuple[int, ...], dims: tuple[int, int], mode: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Output and gradients of a rank with these lengths, each with the same array of one device."""
    rank, rng = dist.get_rank(), torch.Generator().manual_seed(0)
    shapes = [(2, sum(query_lens), dims[0]), (2, sum(key_lens), dims[1]), (2, sum(key_lens), 3), dims]
    arrays = [torch.rand(shape, generator=rng, dtype=torch.float64) for shape in shapes]
    at = [slice(sum(lens[:rank]), sum(lens[: rank + 1])) for lens in (query_lens, key_lens, key_lens)]
    parts = [x[:, rows] for x, rows in zip(arrays, at, strict=False)]

    def results(call: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> list[np.ndarray]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves[:3], score=OF_ALL_ROWS[score](leaves[3]), **options)
        grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        return list(map(array, (out, *grads)))

    found = results(attend, *parts, arrays[3], group=None, mode=mode)
    out, query, key, value, weight = results(ats.attend, *arrays, kernel="dense")
    wanted = [*(x[:, rows] for x, rows in zip((out, query, key, value), (at[0], *at), strict=True)), weight]
    return list(zip(found, wanted, strict=True))


@contextmanager
def counted_bytes() -> Any:
    """Count the bytes that this rank sends in messages between two ranks."""
    sent = [0]
    original = dist.batch_isend_irecv

    def counting(messages: list[Any]) -> Any:
        sent[0] += sum(x.tensor.numel() * x.tensor.itemsize for x in messages if x.op is dist.isend)
        return original(messages)

    dist.batch_isend_irecv = counting
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = original


def bytes_sent(mask: Any, length: int, placement: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """(counted forward, counted backward, planned forward, planned backward) of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = shards_of(placement, length, ranks, mask)
    rng = torch.Generator().manual_seed(rank)
    arrays = [
        torch.randn(2, heads, len(shards[rank]), dim, generator=rng).requires_grad_()
        for heads, dim in ((4, 6), (4, 6), (4, 3))
    ]
    planned = explain(*arrays, group=None, queries=shards, mask=mask, **options)
    with counted_bytes() as forward:
        out = attend(*arrays, group=None, queries=shards, mask=mask, **options)
    with counted_bytes() as backward:
        out.sum().backward()
    return forward[0], backward[0], planned.forward_bytes[rank], planned.backward_bytes[rank]


def gradients(mask: Any, length: int, placement: str, options: dict[str, Any]) -> list[np.ndarray]:
    """Positions of the rank, and its rows of the output and of the gradients of query, key and value in float32."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = shards_of(placement, length, ranks, mask)
    rng = torch.Generator().manual_seed(0)
    arrays = [torch.randn(1, 2, length, 32, generator=rng) for _ in range(4)]
    *own, grad = [shards[rank].take(x).clone() for x in arrays]
    own = [x.requires_grad_() for x in own]
    out = attend(*own, group=None, queries=shards, mask=mask, **options)
    grads = torch.autograd.grad(out, own, grad)
    return [shards[rank].positions(), *map(array, (out, *grads))]


def peak_memory(mask: Mask, length: int, placement: str, backward: bool) -> tuple[int, int]:
    """Bytes that this rank's peak adds to its memory before the call, and the bytes of its rows and fetched keys."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = shards_of(placement, length, ranks, mask)
    before = memory("VmRSS")
    # VmHWM, the peak of resident memory, begins anew.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    own = [torch.randn(1, 1, len(shards[rank]), 64).requires_grad_(backward) for _ in range(3)]
    out = attend(*own, group=None, queries=shards, mask=mask)
    if backward:
        out.backward(torch.ones_like(out))
        assert all(x.grad is not None for x in own)
    received = exchange(mask, shards, shards).received(rank)
    arrays = (4 * len(shards[rank]) + 2 * received) * 64 * 4
    return memory("VmHWM") - before, arrays * (2 if backward else 1)


def memory(field: str) -> int:
    """A field of the status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


class NoText:
    """A score that is none, and that has no repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


DIFFERING: dict[str, Callable[[], dict[str, Any]]] = {
    "mask": lambda: {"mask": ats.SlidingWindow(left=1)},
    "dim": lambda: dict.fromkeys(("query", "key", "value"), torch.ones(1, 4, 3)),
    "list": lambda: {"query": [[1.0]]},
    "None": lambda: {"query": None},
    "no tensor": lambda: dict.fromkeys(("query", "key", "value"), np.ones((1, 4, 4), np.float32)),
    "score": lambda: {"score": NoText()},
    "axis": lambda: {"head_axis": "x"},
    "flag": lambda: {"check": "all"},
    "bias of 7 keys": lambda: {"bias": torch.ones(4, 7)},
    "bias of 3 heads": lambda: {"bias": torch.ones(3, 4, 8)},
    "bias of 3 queries": lambda: {"bias": torch.ones(3, 8)},
    "bias that is learned": lambda: {"bias": torch.ones(4, 8, requires_grad=True)},
}
"""Arguments of rank 1 that differ from rank 0's."""


def differing(name: str) -> None:
    """A call whose ranks disagree."""
    call({"mask": ats.Causal(), "bias": torch.ones(4, 8)} | (DIFFERING[name]() if dist.get_rank() else {}))


@dataclasses.dataclass(frozen=True, eq=False)
class Metric:
    """A score whose matrix (dim, dim) has the name of the scale of others."""

    scale: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.matmul(ops.matmul(query, self.scale), ops.matrix_transpose(key))


SCALE_OF_POSITIONS = torch.ones(4, 1)
REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    # As many keys as the bias by relative position has that rank 0 gives.
    "relative bias on one rank": lambda: {"bias": torch.ones(1 + dist.get_rank(), 15)},
    "scale": lambda: {"score": ats.Cosine(SCALE_OF_POSITIONS)},
    "scale, wrapped": lambda: {
        "score": ats.SoftCap(ats.Temperature(ats.ScaledDot(SCALE_OF_POSITIONS), 2.0), 3.0),
    },
    "scale, combined": lambda: {"score": 2.0 * ats.Dot() + ats.SoftCap(ats.Cosine(SCALE_OF_POSITIONS), 3.0)},
    "surplus rows": lambda: {
        **dict.fromkeys(("query", "key", "value"), torch.ones(1, 5, 4)),
        "queries": shards_of("contiguous", 8, 2),
        "check": False,
    },
    "relative bias of ranges": lambda: {
        "queries": shards_of("contiguous", 8, 2),
        "keys": shards_of("head_tail", 8, 2),
        "bias": torch.ones(1, 15),
        "valid_lens": 2,
    },
    "matrix of NumPy's": lambda: {"score": ats.Bilinear(np.ones((4, 4), np.float32))},
}
"""Arguments that every rank refuses."""


def refused(name: str) -> None:
    """A call with the arguments of this name."""
    call(REFUSED[name]())


def call(options: dict[str, Any]) -> None:
    """A call of 4 queries and keys a rank with these arguments."""
    attend(**dict.fromkeys(("query", "key", "value"), torch.ones(1, 4, 4)) | options, group=None)


def as_on_one_device() -> dict[str, bool]:
    """Whether calls that `attnscore.attend` takes give its results, by what is special about them."""
    rank, rng = dist.get_rank(), torch.Generator().manual_seed(0)
    found = {}

    def same(name: str, lead: tuple[int, ...], length: int, given: dict[str, Any], **options: Any) -> None:
        whole = [torch.randn(*lead, length, 4, generator=rng, dtype=torch.float64).requires_grad_() for _ in range(3)]
        shards = shards_of("contiguous", length, 2)
        own = [shards[rank].take(x.detach()).requires_grad_() for x in whole]
        out = attend(*own, group=None, **given, **{"mode": "gather", "queries": shards, **options})
        wanted = ats.attend(*whole, **given)
        weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).reshape(wanted.shape)
        (out * shards[rank].take(weights)).sum().backward()
        (wanted * weights).sum().backward()
        results, of_one = [out, *(x.grad for x in own)], [wanted, *(x.grad for x in whole)]
        both = zip(results, map(shards[rank].take, of_one), strict=True)
        found[name] = all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in both)

    of_heads = ats.MaskFunction(lambda b, h, i, j: j <= i + 2 * h)
    pairs = torch.rand(6, 6, generator=rng) < 0.6
    same("a function of the head", (1, 4), 8, {"mask": of_heads}, mode="auto")
    same("a list of pairs", (2,), 6, {"mask": ats.Dense(pairs.tolist())})
    same("a number as bias", (2,), 6, {"bias": 0.5})
    same("shards of the queries alone, unchecked", (2,), 6, {}, check=False)
    metric = torch.randn(4, 4, generator=rng, dtype=torch.float64)
    same("a matrix called scale", (2,), 6, {"score": ats.SoftCap(Metric(metric), 3.0)})
    same("batch axes", (2, 3, 2), 6, {"mask": ats.KeyRange([0, 3], [6, 6])}, gradient="queries")
    return found


def shared_bias(length: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Gradients of a bias of this shape, which all queries share: of a rank, and of one device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    shards = shards_of("contiguous", length, ranks)
    own, alone = (torch.zeros(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    arrays = [shards[rank].take(x) for x in (query, key, value)]
    out = attend(*arrays, group=None, queries=shards, bias=own)
    wanted = ats.attend(query, key, value, bias=alone)
    return [array(torch.autograd.grad(x.square().sum(), bias)[0]) for x, bias in ((out, own), (wanted, alone))]


def dying() -> None:
    """A call that rank 1 does not live to make."""
    if dist.get_rank() == 1:
        os._exit(1)
    call({})


def late(where: str, mode: str) -> None:
    """A call whose forward or backward rank 1 begins only after the timeout of 2 seconds has passed."""
    x = torch.ones(1, 2, 4, 4, requires_grad=True)
    for step in ("forward", "backward"):
        if step == where and dist.get_rank() == 1:
            time.sleep(5)
        if step == "forward":
            out = attend(x, x, x, group=None, mode=mode, check=False)
        else:
            out.sum().backward()


def drawn_seeds() -> bool:
    """Whether all ranks drop by the seed that rank 0 draws, in the backward too."""
    rank = dist.get_rank()
    x = torch.randn(1, 2, 9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    shards = shards_of("head_tail", 9, 2)
    own = shards[rank].take(x.detach()).requires_grad_()
    torch.manual_seed(rank)
    found = attend(own, own, own, group=None, queries=shards, mask=ats.Causal(), dropout=0.4)
    found.square().sum().backward()
    torch.manual_seed(0)
    wanted = ats.attend(x, x, x, mask=ats.Causal(), dropout=0.4)
    wanted.square().sum().backward()
    pairs = (found, shards[rank].take(wanted)), (own.grad, shards[rank].take(x.grad))
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in pairs)


def few_queries() -> bool:
    """Whether ``gradient="auto"`` passes few queries to many keys, with the gradients of one device."""
    rank, rng = dist.get_rank(), torch.Generator().manual_seed(0)
    arrays = [torch.randn(1, 3, n, 8, generator=rng, dtype=torch.float64).requires_grad_() for n in (7, 2100, 2100)]
    rows, cols = (shards_of("contiguous", n, 2) for n in (7, 2100))
    own = [shards[rank].take(x.detach()).requires_grad_() for x, shards in zip(arrays, (rows, cols, cols), strict=True)]
    options: dict[str, Any] = {"group": None, "queries": rows, "keys": cols}
    with torch.no_grad():
        plain = explain(*own, **options)
    found = explain(*own, **options)
    with counted_bytes() as sent:
        attend(*own, **options).square().sum().backward()
    ats.attend(*arrays).square().sum().backward()
    wanted = [shards[rank].take(x.grad) for x, shards in zip(arrays, (rows, cols, cols), strict=True)]
    return (
        (plain.gradient, found.mode, found.gradient) == ("none", "gather", "queries")
        and sent[0] == found.forward_bytes[rank] + found.backward_bytes[rank]
        and all(torch.allclose(x.grad, y, rtol=1e-10, atol=1e-12) for x, y in zip(own, wanted, strict=True))
    )


def gathered_and_merged() -> bool:
    """Whether `gather_rows` undoes `take`, and parts of the keys merge to the whole, both with gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = torch.Generator().manual_seed(0)
    x, key, value = (torch.randn(2, n, 4, generator=rng, dtype=torch.float64) for n in (7, 11, 11))
    shards = shards_of("head_tail", 7, ranks)
    own = shards[rank].take(x).clone().requires_grad_()
    whole = gather_rows(own, shards, None)
    (grad,) = torch.autograd.grad((whole * x).sum(), own)
    cols = Shard.contiguous(11, rank, ranks)
    out, stats = ats.attend(x, cols.take(key), cols.take(value), return_stats=("log_sum_exp",))
    merged, _ = merge_over(out, stats.log_sum_exp, None)
    return (
        torch.equal(whole, x)
        and torch.allclose(grad, ranks * shards[rank].take(x))
        and torch.allclose(merged, ats.attend(x, key, value), rtol=1e-12, atol=1e-12)
    )


class Whole(torch.nn.Module):
    """A model of one layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, mask: Any) -> torch.Tensor:
        return self.layer(x, y, z, mask=mask)


def meshes() -> bool:
    """Whether DTensors and layers over a mesh of (data, context) give the numbers of one process."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = distribute_tensor(x, mesh, [Sharded(0), Sharded(1)])
    found = attend(own, own, own, group=mesh["context"], mask=ats.Causal()).full_tensor()
    is_same = torch.allclose(found, ats.attend(x, x, x, mask=ats.Causal()), rtol=1e-12, atol=1e-12)
    one, two = x[:1], distribute_tensor(x, mesh, [Replicate(), Sharded(1)])
    query = distribute_tensor(one, mesh, [Replicate(), Sharded(1)])
    out, stats = attend(query, two, two, group=mesh["context"], return_stats=("entropy",))
    wanted, wanted_stats = ats.attend(one, x, x, return_stats=("entropy",))
    for ours, theirs in ((out, wanted), (stats.entropy, wanted_stats.entropy)):
        is_same = is_same and ours.shape == theirs.shape
        is_same = is_same and torch.allclose(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
    # A query of one part of the sequences beside keys of others, and a query with an axis less.
    for arrays in ((query, own, own), (own[0], one[0], own)):
        try:
            attend(*arrays, group=mesh["context"])
        except ats.ShapeError as error:
            is_same = is_same and "query: expected" in str(error)
        else:
            is_same = False
    sizes = dict.fromkeys(("query_size", "key_size", "value_size"), 16)
    for kind in ("ddp", "fsdp", "fsdp of a layer alone"):
        layers = []
        for group in (None, mesh["context"]):
            torch.manual_seed(0)
            options = {"score": "gaussian", "sink": True, "keep_last": False, "dtype": torch.float64}
            layers.append(MultiHeadAttention(16, 2, context_group=group, **options, **sizes))
        alone, layer = layers
        wanted = alone(x, x, x, mask=ats.Causal())
        wanted.square().mean().backward()
        if kind == "ddp":
            whole: Any = DistributedDataParallel(layer)
        else:
            whole = fully_shard(Whole(layer) if kind == "fsdp" else layer, mesh=mesh._flatten("all"))
        part = x[rank // 2, None, rank % 2 * 4 : rank % 2 * 4 + 4]
        found = whole(part, part, part, mask=ats.Causal())
        is_same = is_same and torch.allclose(found, wanted[rank // 2, None, rank % 2 * 4 : rank % 2 * 4 + 4])
        found.square().mean().backward()
        for theirs, ours in zip(alone.parameters(), layer.parameters(), strict=True):
            grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            is_same = is_same and torch.allclose(grad, theirs.grad, rtol=1e-10, atol=1e-12)
    for normalizer in ("sigmoid", ats.Entmax(1.5)):
        alone, layer = (
            MultiHeadAttention(16, 2, normalizer=normalizer, context_group=group, dtype=torch.float64, **sizes)
            for group in (None, mesh["context"])
        )
        layer.load_state_dict(alone.state_dict())
        wanted = alone(x, x, x, mask=ats.Causal())[rank // 2, None, rank % 2 * 4 : rank % 2 * 4 + 4]
        part = x[rank // 2, None, rank % 2 * 4 : rank % 2 * 4 + 4]
        is_same = is_same and torch.allclose(layer(part, part, part, mask=ats.Causal()), wanted)
        # An array (batch, query, key) with as many sequences as heads.
        mask = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.7
        rows = slice(rank % 2 * 4, rank % 2 * 4 + 4)
        found = layer(*[x[:, rows]] * 3, mask=mask)
        is_same = is_same and torch.allclose(found, alone(x, x, x, mask=mask)[:, rows])
    # An array (head, query, key) beside lengths of each sequence.
    heads, options = x.unflatten(-1, (2, 8)).transpose(1, 2), {"mask": mask, "valid_lens": torch.tensor([8, 5])}
    for mode in ("gather", "ring"):
        found = attend(*[heads[:, :, rows]] * 3, group=mesh["context"], mode=mode, **options)
        is_same = is_same and torch.allclose(found, ats.attend(heads, heads, heads, **options)[:, :, rows])
    return bool(is_same)


def sharded_layer() -> bool:
    """Whether a layer alone, its parameters sharded by FSDP2, gives the output and gradients of a plain one."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=rng, dtype=torch.float64)
    sizes = dict.fromkeys(("query_size", "key_size", "value_size"), 8)
    plain, layer = (MultiHeadAttention(8, 2, score="gaussian", dtype=torch.float64, **sizes) for _ in range(2))
    for i, own in enumerate(plain.parameters()):
        torch.nn.init.normal_(own, mean=i % 2, std=0.1, generator=rng)
    layer.load_state_dict(plain.state_dict())
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    outs = [each(x, x, x, mask=ats.Causal()) for each in (plain, layer)]
    for out in outs:
        out.square().sum().backward()
    grads = [
        (one.grad, other.grad.full_tensor()) for one, other in zip(plain.parameters(), layer.parameters(), strict=True)
    ]
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in (outs, *grads))


def attend_of_distributed_tensors() -> tuple[bool, bool, str]:
    """Whether `ats.attend` gives a DTensor, and its gradients, the numbers of one process; its message with a mask."""
    from attnscore.errors import FrameworkError

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(48, dtype=torch.float64).reshape(4, 3, 4).sin().requires_grad_()
    own = distribute_tensor(whole.detach(), mesh, [Sharded(0)]).requires_grad_()
    outs = [ats.attend(x, x, x, score="gaussian") for x in (whole, own)]
    for out in outs:
        out.square().sum().backward()
    same = [torch.allclose(a, b.full_tensor()) for a, b in (outs, (whole.grad, own.grad))]
    try:
        ats.attend(own, own, own, mask=ats.Causal())
    except FrameworkError as error:
        return *same, str(error)
    return *same, ""
