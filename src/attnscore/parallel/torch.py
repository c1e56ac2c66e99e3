"""Attention over a sequence whose rows are shared out among the processes of a `torch.distributed` group.

Requirements met:

- Each rank computes the queries that it holds; the results are those of one device.
- Masks, valid lengths and dropout are those of the whole sequence; a bias has the rank's queries and all keys.
- Scores, kernels, statistics and gradients are those of `attnscore.attend`; what cannot be shared out is refused.
- Nothing here moves bytes: `torch.distributed` does, over gloo, NCCL or any other backend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Never, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from attnscore import backends, scores
from attnscore.analysis.functional import merge
from attnscore.base.arguments import check_flag, hides_unknown, reject_unknown, shown
from attnscore.base.layout import ScoreShape, check_bias_shape
from attnscore.errors import ArgumentError, FrameworkError, ShapeError, message
from attnscore.masks import Mask
from attnscore.parallel.explanation import ParallelExplanation
from attnscore.parallel.options import Options
from attnscore.parallel.parts import arrays_of, result_of
from attnscore.parallel.plan import Exchange, exchange
from attnscore.parallel.shard import Shard, check_shards
from attnscore.parallel.torch_modes import WAYS, PassQueries, Saved, ShardedCall
from attnscore.parallel.torch_ranks import Ranks, Transfers, summed_over_ranks
from attnscore.problem.problem import Problem, check_extra
from attnscore.problem.results import RowGradients, present
from attnscore.problem.statistics import AttentionStats
from attnscore.scores.base import scores_in, with_arrays

__all__ = ["attend", "explain", "gather_rows", "merge_over"]


@hides_unknown
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any,
    queries: Sequence[Shard] | None = None,
    keys: Sequence[Shard] | None = None,
    mode: str = "auto",
    gradient: str = "auto",
    memory: int | None = None,
    check: bool = True,
    sum_parameters: bool = True,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    head_axis: int = -3,
    normalizer: Any = "softmax",
    kernel: str = "auto",
    return_stats: bool | tuple[str, ...] = False,
    **unknown: Never,
) -> Any:
    """Attention pooling over a sequence of which each rank of a group holds some rows: the call of all ranks together.

    The result, its gradients, statistics and dropout are those of `attnscore.attend` on one device.

    Parameters
    ----------
    query, key, value : (..., own rows, dim)
        The rows that this rank holds, as in `attnscore.attend`; tensors, or DTensors sharded on the axis of positions.
    group : ProcessGroup, DeviceMesh of one axis (``mesh["context"]``), or None for the default group
    queries, keys : Shard of each rank, in the order of ranks
        Which rows of the whole sequence the ranks hold. None: consecutive parts in the order of ranks, of any lengths;
        `keys` None where `queries` is given: the same shards.
    mode : "auto", "gather", "ring" or "heads"
        How keys and queries meet, see `attnscore.parallel.explain`.
    gradient : "auto", "reduce" or "queries"
        "reduce" returns gradients of keys and values to their owners, summed in the dtype of sums. "queries" sends the
        queries to the owners of the keys: the gradients then have the same bits on any number of ranks, and the scores
        are computed a second time. "auto" passes the queries where that sends fewer than half of the bytes in the
        backward, or where only that fits into `memory`.
    memory : int, optional
        Bytes that a rank has for its arrays and for the exchange; "auto" then takes a mode that fits.
    check : bool
        Compare the arguments of all ranks first, in one small message, and raise on all of them where they differ.
    sum_parameters : bool
        Whether the gradients of arrays that all ranks have (parameters of the score, sink, a bias without an axis of
        queries) are summed over the ranks. False leaves that to DistributedDataParallel and the like.
    mask, valid_lens
        Of the whole sequence, the same on all ranks.
    bias : broadcastable to (..., own queries, all keys), or (..., 1, all queries + all keys - 1)
        Of one shape on all ranks but for the axis of queries. With one query on each of several ranks, an axis of
        queries of size 1 is that of the rank's own query; leave it out of a bias for all.
    score, sink, dropout, seed, head_axis, normalizer, kernel, return_stats
        As in `attnscore.attend`, the same on all ranks. Results over parts of the keys are merged by their
        log-sum-exp, in a "ring" and where queries are passed: these have the softmax alone.

    Returns
    -------
    out : (..., own queries, value_dim)
    stats : AttentionStats of the rank's queries, with `return_stats`

    Raises
    ------
    ShapeError, DtypeError, DeviceError, FrameworkError, MaskError, ArgumentError, KernelUnavailable
    RuntimeError
        torch's own, where another rank has died or is later than the timeout of the group.

    Examples
    --------
    In each process of ``torchrun --nproc-per-node 4``::

        import attnscore as ats
        from attnscore.parallel import Shard
        from attnscore.parallel.torch import attend

        shards = [Shard.head_tail(length, rank, 4) for rank in range(4)]
        x = shards[rank].take(whole)
        out = attend(x, x, x, group=None, queries=shards, mask=ats.Causal())
    """
    reject_unknown(attend, unknown)
    options = Options(
        queries=queries, keys=keys, mode=mode, gradient=gradient, memory=memory, score=score, mask=mask,
        valid_lens=valid_lens, bias=bias, sink=sink, dropout=dropout, seed=seed, head_axis=head_axis,
        normalizer=normalizer, kernel=kernel, return_stats=return_stats,
    )  # fmt: skip
    ops = backends.load("torch")
    wrap = _like_dtensor(query)
    query, key, value = map(_local, (query, key, value))
    with ops.numeric_scope():
        call, _ = _planned(query, key, value, group, options, check, sum_parameters)
        problem = call.problem
        operands = problem.operands()
        if _is_differentiated(problem):
            outputs = _Attention.apply(call, *operands.values())  # type: ignore[no-untyped-call]  # torch's own
            names = ("out", "log_denom", "row_max", *(x for x in problem.statistics if x != "log_sum_exp"))
            result = result_of(dict(zip(names, outputs, strict=True)))
        else:
            with torch.no_grad():
                result, _ = call.forward(operands)
        if "log_sum_exp" in problem.statistics:
            result.statistics["log_sum_exp"] = result.log_sum_exp
        return wrap(present(problem, result))


def explain(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any, check: bool = True, sum_parameters: bool = True,
    **options: Any,
) -> ParallelExplanation:  # fmt: skip
    """Return the plan of `attend` with the same arguments: mode, bytes sent, pairs and memory of each rank.

    All ranks have to call it.
    """
    query, key, value = map(_local, (query, key, value))
    with backends.load("torch").numeric_scope():
        return _planned(query, key, value, group, Options(**options), check, sum_parameters)[1]


def gather_rows(x: Tensor, shards: Sequence[Shard], group: Any, axis: int = -2) -> Tensor:
    """Return the whole of an array of which each rank holds some rows: the inverse of `Shard.take`.

    The gradient of a rank's rows is the sum of those that all ranks have for them.

    Parameters
    ----------
    x : the rank's rows, on `axis`
    shards : Shard of each rank
    group : as in `attend`
    axis : int

    Raises
    ------
    ShapeError, ArgumentError
    """
    ranks = Ranks.of(group)
    shards = check_shards("shards", shards, ranks.count)
    count, length = len(shards[ranks.rank]), shards[0].length
    if not -x.dim() <= axis < x.dim() or x.shape[axis] != count:
        raise ShapeError(message("x", f"{count} positions on axis {axis}", f"shape {tuple(x.shape)}"))
    rows = x.movedim(axis, 0)
    transfers = Transfers.of(shards, [Shard.whole(length)] * ranks.count, ranks.rank)
    whole: Tensor = _Fetched.apply(rows.reshape(count, math.prod(rows.shape[1:])), ranks, transfers)  # type: ignore[no-untyped-call]  # torch's own
    return whole.reshape(length, *rows.shape[1:]).movedim(0, axis)


def merge_over(out: Tensor, log_sum_exp: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Join the results of all ranks, each for the same queries over keys of its own: decoding with a sharded cache.

    Parameters
    ----------
    out : (..., query, value_dim)
    log_sum_exp : (..., query)
        As `attnscore.attend` returns them, with ``return_stats=("log_sum_exp",)``; those of a rank without keys are 0
        and -inf. A sink belongs to one rank.
    group : as in `attend`

    Returns
    -------
    out, log_sum_exp : the same on all ranks
    """
    ranks = Ranks.of(group)
    shards = [Shard.contiguous(ranks.count, rank, ranks.count) for rank in range(ranks.count)]
    outs, logs = (gather_rows(x[None], shards, group, axis=0) for x in (out, log_sum_exp))
    return merge([*outs], [*logs])


class _Fetched(torch.autograd.Function):
    """Rows of all ranks; their gradients return to the owners."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, transfers: Transfers) -> Tensor:
        ctx.ranks, ctx.transfers = ranks, transfers
        return ranks.fetch({"x": x}, transfers)()["x"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        totals: dict[str, Tensor] = {}
        ctx.ranks.give_back({"x": grad}, ctx.transfers)(totals)
        return totals["x"], None, None


# ---- planning


def _planned(
    query: Tensor, key: Any, value: Tensor, group: Any, options: Options, check: bool, sum_parameters: bool
) -> tuple[ShardedCall, ParallelExplanation]:
    """Return the call of this rank, and the explanation of the call of all."""
    ranks = Ranks.of(group)
    problem_or_error: Problem | Exception
    try:
        check = check_flag("check", check)
        sum_parameters = check_flag("sum_parameters", sum_parameters)
        problem_or_error = _problem_of_rank(ranks, query, key, value, options, sum_parameters)
    except Exception as error:
        # Raised once the others, which wait for this rank's part of the check, know of it.
        problem_or_error, check = error, check is not False
    device = next((x.device for x in (query, key, value) if isinstance(x, Tensor)), None)
    facts = _agreed(ranks, problem_or_error, device or ranks.device, options, check)
    problem = cast(Problem, problem_or_error)
    queries = _shards("queries", options.queries, ranks, facts.query_lens, None)
    keys = _shards("keys", options.keys, ranks, facts.key_lens, queries)
    shape = problem.score_shape
    for name, shards, count in (("queries", queries, shape.query_len), ("keys", keys, shape.key_len)):
        if len(shards[ranks.rank]) != count:  # of all ranks `_shards` knows it, unless nothing was exchanged
            expected = f"{count} positions for rank {ranks.rank}, which has as many"
            raise ArgumentError(message(name, expected, len(shards[ranks.rank])))
    whole = dataclasses.replace(problem.score_shape, query_len=queries[0].length, key_len=keys[0].length)
    mask = options.whole_mask(problem, whole)
    if mask is not None:
        backends.check_devices(problem.ops, query, mask.arrays(), host_passes=True)
    problem = dataclasses.replace(problem, mask=mask)
    if problem.dropout is not None:
        problem = dataclasses.replace(problem, dropout=dataclasses.replace(problem.dropout, seed=facts.seeds[0]))
    bias_has_queries = False
    if problem.bias is not None:
        bias_has_queries = not _check_bias(problem.bias, problem, whole, queries, keys, facts)
        is_summed = sum_parameters and not bias_has_queries
        bias = summed_over_ranks(problem.bias, ranks.group) if is_summed else problem.bias
        problem = dataclasses.replace(problem, bias=whole.to_canonical(problem.ops, bias))
    plan = exchange(mask, queries, keys, batch=whole.batch)
    explanation = _chosen(problem, whole, plan, options, bias_has_queries)
    way = PassQueries if explanation.gradient == "queries" else WAYS[explanation.mode]
    return way(ranks, plan, problem, options.kernel, bias_has_queries), explanation


def _chosen(
    problem: Problem, whole: ScoreShape, plan: Exchange, options: Options, bias_has_queries: bool
) -> ParallelExplanation:
    """Return the explanation of the best way that can run a call; raise where the one named cannot."""
    against = [*PassQueries.reasons_against(problem, whole), *(["a bias of queries"] if bias_has_queries else [])]
    gradient = options.gradient
    if gradient == "queries" and against:
        raise ArgumentError(message("gradient", "'reduce' for this call", f"'queries': {'; '.join(against)}"))
    if gradient == "auto" and not _is_differentiated(problem):
        gradient = "none"
    elif gradient == "auto" and against:
        gradient = "reduce"
    return options.choose(problem, whole, plan, WAYS, gradient)


def _is_differentiated(problem: Problem) -> bool:
    """Return whether a backward may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in problem.operands().values())


def _problem_of_rank(
    ranks: Ranks, query: Tensor, key: Any, value: Tensor, options: Options, sum_parameters: bool
) -> Problem:
    """Return the problem of the rank's own rows, without a mask, and with the bias as it was given."""
    options.check_names()
    key, options = options.unpack(key)
    score = scores.resolve(options.score)
    for part in scores_in(score):
        shape = tuple(getattr(part.scale, "shape", ())) if isinstance(part, (scores.ScaledDot, scores.Cosine)) else ()
        if len(shape) > 1 and max(shape[-2:]) > 1:
            hint = "multiply the queries or keys with it"
            raise ArgumentError(message("score", "no scale of each position", f"scale {shape}", hint=hint))

    def summed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x  # for the checks of the call
        # A copy: FSDP frees the memory of parameters, which it cannot where NumPy has seen it.
        return summed_over_ranks(x.clone(), ranks.group) if sum_parameters else x.clone()

    options = dataclasses.replace(options, score=with_arrays(score, summed), sink=summed(options.sink))
    problem = options.own_problem(query, key, value)
    if problem.ops.name != "torch":
        raise FrameworkError(message("query, key, value", "tensors of torch", f"arrays of {problem.ops.name}"))
    if options.bias is None:
        return problem
    return dataclasses.replace(problem, bias=check_extra(problem.ops, "bias", options.bias, query))


# ---- what the ranks have to agree on


@dataclass(frozen=True)
class _Facts:
    """What each rank has, in the order of ranks."""

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    bias_queries: tuple[int, ...]
    """Size of the axis of queries of the bias."""
    seeds: tuple[int, ...]


def _agreed(
    ranks: Ranks, problem: Problem | Exception, device: torch.device, options: Options, check: bool
) -> _Facts:  # fmt: skip
    """Exchange what the ranks have to know of each other, and raise on all of them where their arguments differ.

    Without `check` nothing is compared, and nothing sent where the shards are given and tell all.
    """
    if not check and isinstance(problem, Exception):
        raise problem
    if not check and options.queries is not None and options.bias is None and not options.dropout:
        return _Facts((), (), (), ())
    numbers = [0] * 4
    if isinstance(problem, Problem):
        bias = 0 if problem.bias is None else (1, 1, *problem.bias.shape)[-2]
        seed = 0 if problem.dropout is None else int(problem.dropout.seed)  # type: ignore[arg-type]  # no traced one
        numbers = [problem.score_shape.query_len, problem.score_shape.key_len, bias, seed]
    described = _described(problem, options) if check else {}
    digest = hashlib.blake2b(repr(described).encode(), digest_size=7).digest()
    *facts, digests = zip(*ranks.agree([*numbers, int.from_bytes(digest, "little")], device), strict=True)
    every = ranks.objects(described) if len(set(digests)) > 1 else []
    if isinstance(problem, Exception):
        raise problem
    if errors := [f"on rank {rank}: {each['error']}" for rank, each in enumerate(every) if "error" in each]:
        raise ArgumentError(message("arguments", "those of a valid call on all ranks", "; ".join(errors)))
    if every:
        name = next(name for name in described if len({each.get(name) for each in every}) > 1)
        got = "; ".join(f"{each.get(name)} on rank {rank}" for rank, each in enumerate(every))
        raise ArgumentError(message(name, "the same on all ranks", got))
    return _Facts(*facts)


def _described(problem: Problem | Exception, options: Options) -> dict[str, str]:
    """Return the arguments that have to be the same on all ranks, by name, as text; or the error of a rank."""
    if not isinstance(problem, Problem):
        return {"error": f"{type(problem).__name__}: {problem}"}
    shape, layout = problem.score_shape, problem.layout
    texts = {
        "query, key, value": f"batch {shape.lead}, heads {shape.heads} x {shape.groups}, dims {layout.dim}, "
        f"{layout.key_dim}, {layout.value_dim}, {problem.dtype} on {problem.value.device.type}",
    }
    names = [field.name for field in dataclasses.fields(options) if field.name != "bias"]
    texts |= {name: _text(getattr(options, name)) for name in names}
    texts["bias"] = "none"
    if problem.bias is not None:
        sizes = [*map(str, problem.bias.shape)]
        # Each rank has the bias of its queries.
        sizes[-2:-1] = ["own queries"] * len(sizes[-2:-1])
        texts["bias"] = f"{problem.ops.dtype(problem.bias)} of shape ({', '.join(sizes)})"
    differentiated = [name for name, x in problem.operands().items() if x.requires_grad and torch.is_grad_enabled()]
    return {**texts, "requires_grad": ", ".join(differentiated) or "none"}


def _text(x: Any) -> str:
    """Return a description of an argument that is the same in all processes."""
    if isinstance(x, Mask):
        values = [_text(array) for array in x.arrays().values()]
        return f"{_text(repr(x))} {' '.join(values)}".rstrip()
    if backends.is_array(x):
        host = None if getattr(x, "requires_grad", False) else backends.host(x)
        content = "" if host is None else _digest(np.ascontiguousarray(host).tobytes())
        return f"{type(x).__name__} {tuple(x.shape)} {x.dtype} {content}".rstrip()
    if isinstance(x, (list, tuple)) and all(isinstance(part, Shard) for part in x) and x:
        return _digest(repr(x).encode())
    # Addresses of functions differ from process to process.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _shards(
    name: str, shards: Sequence[Shard] | None, ranks: Ranks, lens: Sequence[int], otherwise: Sequence[Shard] | None
) -> tuple[Shard, ...]:
    """Return the shards of all ranks: the caller's, or consecutive parts of these lengths."""
    if shards is None and otherwise is not None and (not lens or [*map(len, otherwise)] == [*lens]):
        shards = otherwise
    if shards is None:
        ends = [0, *accumulate(lens)]
        return tuple(Shard(((start, stop),), ends[-1]) for start, stop in pairwise(ends))
    shards = check_shards(name, shards, ranks.count)
    if lens and [*map(len, shards)] != [*lens]:
        raise ArgumentError(message(name, f"a Shard of each rank, with {[*lens]} positions", [*map(len, shards)]))
    return shards


def _check_bias(
    bias: Tensor, problem: Problem, whole: ScoreShape, queries: Sequence[Shard], keys: Sequence[Shard], facts: _Facts
) -> bool:
    """Raise where the bias does not fit; return whether all ranks have the same one."""
    has_one_row = set(facts.bias_queries) == {1}
    if has_one_row and whole.is_relative(tuple(bias.shape)):
        check_bias_shape(tuple(bias.shape), whole)
        for name, shards in (("queries", queries), ("keys", keys)):
            if any(len(shard.ranges) > 1 for shard in shards):
                expected = f"one range of {name} a rank, with a bias by relative position"
                raise ArgumentError(message(name, expected, shown([*shards])))
        return True
    check_bias_shape(tuple(bias.shape), dataclasses.replace(whole, query_len=problem.score_shape.query_len))
    # One query on each rank: a bias with an axis of queries has the row of the rank's query.
    is_of_query = bias.dim() > 1 and set(map(len, queries)) == {1} and len(queries) > 1
    is_shared = has_one_row and not is_of_query
    if not is_shared and facts.bias_queries != tuple(map(len, queries)):
        expected = f"an axis of queries of {[*map(len, queries)]} on the ranks, or of 1 on all"
        raise ShapeError(message("bias", expected, [*facts.bias_queries]))
    return is_shared


# ---- the gradient


class _Attention(torch.autograd.Function):
    """A call of all ranks: saves the operands, the fetched keys, the output, row_max, log_denom and any entropy."""

    @staticmethod
    def forward(ctx: Any, call: ShardedCall, *operands: Tensor) -> tuple[Tensor, ...]:
        arrays = dict(zip(call.problem.operands(), operands, strict=True))
        result, saved = call.forward(arrays)
        # The mode `heads` saves the result of its own heads, not that of its rows.
        outputs, saved_outputs = arrays_of(result), arrays_of(saved.result or result)
        ctx.call, ctx.parts, ctx.outputs = call, saved.parts, tuple(outputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for name, x in outputs.items() if name not in _DIFFERENTIABLE))
        saved_outputs = {name: x for name, x in saved_outputs.items() if name in (*_DIFFERENTIABLE, "row_max")}
        groups = arrays, saved.fetched, saved_outputs
        ctx.names = [tuple(group) for group in groups]
        ctx.save_for_backward(*(x for group in groups for x in group.values()))
        return tuple(outputs.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, of_outputs = iter(ctx.saved_tensors), dict(zip(ctx.outputs, grads, strict=True))
        operands, fetched, outputs = ({name: next(tensors) for name in names} for names in ctx.names)
        # row_max has no gradient, so that of log_denom is that of the log-sum-exp.
        incoming = RowGradients(
            out=of_outputs["out"], log_sum_exp=of_outputs["log_denom"], entropy=of_outputs.get("entropy")
        )
        requested = frozenset(itertools.compress(operands, ctx.needs_input_grad[1:]))
        with ctx.call.problem.ops.numeric_scope():
            saved = Saved(ctx.parts, fetched)
            gradients = ctx.call.backward(operands, saved, result_of(outputs), incoming, requested)
        return None, *(gradients[name].to(x.dtype) if name in requested else None for name, x in operands.items())


_DIFFERENTIABLE = ("out", "log_denom", "entropy")


# ---- DTensors


def _local(x: Any) -> Any:
    """Return the rank's own part of a DTensor; any other argument as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _like_dtensor(query: Any) -> Callable[[Any], Any]:
    """Return a function that makes DTensors of the rank's results where the query is a DTensor."""
    if not isinstance(query, DTensor):
        return lambda results: results
    mesh, placements = query.device_mesh, query.placements

    def wrap(x: Any) -> Any:
        if isinstance(x, tuple):
            parts = [None if part is None else wrap(part) for part in x]
            return AttentionStats(*parts) if isinstance(x, AttentionStats) else tuple(parts)
        shape = torch.Size((*query.shape[: x.dim() - 1], x.shape[-1])) if x.dim() == query.dim() else query.shape[:-1]
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride)

    return wrap
