"""Attention over a sequence whose rows are shared out among the processes of a `torch.distributed` group.

Requirements met:

- Each rank computes the queries that it holds; the results equal a call on one device.
- Masks, valid lengths and dropout cover the whole sequence; a bias has the rank's queries and all keys.
- Scores, kernels and statistics are as in `attnscore.attend`; a call that cannot be divided among ranks raises.
- Nothing here moves bytes: `torch.distributed` does, over gloo, NCCL or any other backend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Never, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnscore import backends, scores
from attnscore.analysis.functional import merge
from attnscore.backends.torch import map_leaves
from attnscore.base.arguments import check_flag, hides_unknown, reject_unknown, shown
from attnscore.base.layout import ScoreShape, check_bias_shape
from attnscore.errors import ArgumentError, FrameworkError, ShapeError, message
from attnscore.masks import Mask
from attnscore.parallel.explanation import ParallelExplanation
from attnscore.parallel.mask import sequence_mask
from attnscore.parallel.options import Options
from attnscore.parallel.parts import Call
from attnscore.parallel.plan import Exchange, Movement, exchange
from attnscore.parallel.shard import Shard, check_positions, check_shards
from attnscore.parallel.torch_modes import MODE_CLASSES, PassQueries
from attnscore.parallel.torch_ranks import Ranks, move_rows, with_summed_gradient
from attnscore.problem.problem import Problem, check_extra
from attnscore.problem.results import present
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

    The result, its gradients, statistics and dropout equal a call of `attnscore.attend` on one device.

    Parameters
    ----------
    query, key, value : (..., own rows, dim)
        The rows that this rank holds, as in `attnscore.attend`; tensors, or DTensors sharded on the axis of positions.
    group : ProcessGroup, DeviceMesh of one axis (``mesh["context"]``), or None for the default group
    queries, keys : Shard of each rank, in the order of ranks
        Rows of the whole sequence on each rank. None: consecutive parts in the order of ranks, of any lengths;
        `keys` None where `queries` is given: the same shards.
    mode : "auto", "gather", "ring" or "heads"
        How keys and queries meet, see `attnscore.parallel.explain`.
    gradient : "auto", "reduce" or "queries"
        How gradients of keys and values are summed, see `attnscore.parallel.explain`.
    memory : int, optional
        Bytes that a rank has for its arrays and for the exchange; "auto" then takes a mode that fits.
    check : bool
        Compare the arguments of all ranks first, in one small message, and raise on all of them where they differ.
    sum_parameters : bool
        Whether the gradients of arrays that all ranks have (parameters of the score, sink, a bias without an axis of
        queries) are summed over the ranks. False leaves that to DistributedDataParallel and the like.
    mask, valid_lens
        Mask and lengths of the whole sequence, the same on all ranks.
    bias : broadcastable to (..., own queries, all keys), or (..., 1, all queries + all keys - 1)
        One shape on all ranks but for the axis of queries. With one query on each of several ranks, an axis of
        queries of size 1 holds the rank's own query; leave the axis out of a bias for all ranks.
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
        Raised by torch where another rank has died or is later than the timeout of the group.

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
    wrap = _like_dtensor(query, key, value)
    query, key, value = map(_local, (query, key, value))
    with ops.numeric_scope():
        call, _ = _plan_call(query, key, value, group, options, check, sum_parameters)
        return wrap(present(call.problem, call.compute()))


def explain(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any, check: bool = True, sum_parameters: bool = True,
    **options: Any,
) -> ParallelExplanation:  # fmt: skip
    """Return the plan of `attend` with the same arguments: mode, bytes sent, pairs and memory of each rank.

    All ranks have to call it.
    """
    query, key, value = map(_local, (query, key, value))
    with backends.load("torch").numeric_scope():
        return _plan_call(query, key, value, group, Options.of(attend, options), check, sum_parameters)[1]


def gather_rows(x: Tensor, shards: Sequence[Shard], group: Any, axis: int = -2) -> Tensor:
    """Gather an array of which each rank holds some rows: the inverse of `Shard.take`.

    The gradient of a rank's rows is the sum of all ranks' gradients of these rows.

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
    check_positions(x, count, axis)
    rows = x.movedim(axis, 0)
    movement = Movement(shards, (Shard.whole(length),) * ranks.count)
    flat = rows.reshape(count, math.prod(rows.shape[1:]))
    sequence_rows = move_rows(ranks, {"x": flat}, {"x": movement})["x"]
    return sequence_rows.reshape(length, *rows.shape[1:]).movedim(0, axis)


def merge_over(out: Tensor, log_sum_exp: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over the keys of each rank, as in decoding with a sharded cache.

    Parameters
    ----------
    out : (..., query, value_dim)
    log_sum_exp : (..., query)
        As `attnscore.attend` returns them, with ``return_stats=("log_sum_exp",)``; 0 and -inf on a rank without
        keys. A sink belongs to one rank.
    group : as in `attend`

    Returns
    -------
    out, log_sum_exp : the same on all ranks
    """
    ranks = Ranks.of(group)
    shards = [Shard.contiguous(ranks.count, rank, ranks.count) for rank in range(ranks.count)]
    outs, logs = (gather_rows(x[None], shards, group, axis=0) for x in (out, log_sum_exp))
    return merge([*outs], [*logs])


# ---- planning


def _plan_call(
    query: Tensor, key: Any, value: Tensor, group: Any, options: Options, check: bool, sum_parameters: bool
) -> tuple[Call, ParallelExplanation]:
    """Check a rank's arguments, agree with the others, build shards, mask and bias of the sequence; choose a mode."""
    ranks = Ranks.of(group)
    problem_or_error: Problem | Exception
    try:
        check = check_flag("check", check)
        sum_parameters = check_flag("sum_parameters", sum_parameters)
        problem_or_error = _problem_of_rank(ranks, query, key, value, options, sum_parameters)
    except Exception as error:
        # Raised after the check, in which the other ranks wait for this one.
        problem_or_error, check = error, check is not False
    device = next((x.device for x in (query, key, value) if isinstance(x, Tensor)), None) or ranks.device
    query_lens, key_lens, bias_queries, seeds = _exchange_facts(ranks, problem_or_error, device, options, check)
    problem = cast(Problem, problem_or_error)
    queries = _shards("queries", options.queries, ranks, query_lens, None)
    keys = _shards("keys", options.keys, ranks, key_lens, queries)
    shape = problem.score_shape
    for name, shards, count in (("queries", queries, shape.query_len), ("keys", keys, shape.key_len)):
        # `_shards` has compared the lengths of all ranks; without an exchange only this rank's are known.
        if len(shards[ranks.rank]) != count:
            expected = f"{count} positions for rank {ranks.rank}, which has as many"
            raise ArgumentError(message(name, expected, len(shards[ranks.rank])))
    sequence_shape = dataclasses.replace(problem.score_shape, query_len=queries[0].length, key_len=keys[0].length)
    mask = sequence_mask(problem.ops, options.mask, options.valid_lens, sequence_shape)
    if mask is not None:
        backends.check_devices(problem.ops, query, mask.arrays(), host_passes=True)
    problem = dataclasses.replace(problem, mask=mask)
    if problem.dropout is not None:
        problem = dataclasses.replace(problem, dropout=dataclasses.replace(problem.dropout, seed=seeds[0]))
    bias_has_queries = False
    if problem.bias is not None:
        bias_has_queries = not _check_bias(problem.bias, problem, sequence_shape, queries, keys, bias_queries)
        is_summed = sum_parameters and not bias_has_queries
        bias = with_summed_gradient(problem.bias, ranks.group) if is_summed else problem.bias
        problem = dataclasses.replace(problem, bias=sequence_shape.to_canonical(problem.ops, bias))
    plan = exchange(mask, queries, keys, batch=sequence_shape.batch)
    explanation = _choose_mode(problem, sequence_shape, plan, options, bias_has_queries)
    mode_class = PassQueries if explanation.gradient == "queries" else MODE_CLASSES[explanation.mode]
    return mode_class(plan, sequence_shape, problem, options.kernel, bias_has_queries, ranks), explanation


def _choose_mode(
    problem: Problem, sequence_shape: ScoreShape, plan: Exchange, options: Options, bias_has_queries: bool
) -> ParallelExplanation:
    """Return the explanation of the best mode that can run a call; raise where the caller's mode cannot."""
    reasons = [*PassQueries.reasons_against(problem, sequence_shape), *["a bias of queries"] * bias_has_queries]
    gradient, is_differentiated = options.gradient, any(x.requires_grad for x in problem.operands().values())
    if gradient == "queries" and reasons:
        raise ArgumentError(message("gradient", "'reduce' for this call", f"'queries': {'; '.join(reasons)}"))
    if gradient == "auto" and not (torch.is_grad_enabled() and is_differentiated):
        gradient = "none"
    elif gradient == "auto" and reasons:
        gradient = "reduce"
    return options.choose(problem, sequence_shape, plan, MODE_CLASSES, gradient)


def _problem_of_rank(
    ranks: Ranks, query: Tensor, key: Any, value: Tensor, options: Options, sum_parameters: bool
) -> Problem:
    """Return the problem of the rank's own rows, without a mask, and with the caller's bias."""
    options.check_names()
    key, options = options.unpack(key)
    score = scores.resolve(options.score)
    # The kernels of a part would need the scale of its positions alone.
    for part in scores_in(score):
        shape = tuple(getattr(part.scale, "shape", ())) if isinstance(part, (scores.ScaledDot, scores.Cosine)) else ()
        if len(shape) > 1 and max(shape[-2:]) > 1:
            hint = "multiply the queries or keys with it"
            raise ArgumentError(message("score", "no scale of each position", f"scale {shape}", hint=hint))

    def shared(x: Any) -> Any:
        """Return an array that all ranks have, with the gradient of all ranks unless the caller sums it."""
        if not isinstance(x, Tensor):
            return x  # the checks of the call raise where it has to be one
        # A copy: FSDP frees the memory of parameters, which it cannot where NumPy has seen it.
        return with_summed_gradient(x.clone(), ranks.group) if sum_parameters else x.clone()

    options = dataclasses.replace(options, score=with_arrays(score, shared), sink=shared(options.sink))
    problem = options.own_problem(query, key, value)
    if problem.ops.name != "torch":
        raise FrameworkError(message("query, key, value", "tensors of torch", f"arrays of {problem.ops.name}"))
    if options.bias is None:
        return problem
    return dataclasses.replace(problem, bias=check_extra(problem.ops, "bias", options.bias, query))


# ---- agreement of the ranks


def _exchange_facts(
    ranks: Ranks, problem: Problem | Exception, device: torch.device, options: Options, check: bool
) -> list[tuple[int, ...]]:
    """Return the queries and keys of all ranks, the sizes of their biases' axes of queries, and their seeds.

    Raises on all ranks where their arguments differ. Without `check` nothing is compared, and nothing is sent where the
    caller's shards suffice: the tuples are then empty.
    """
    if not check and isinstance(problem, Exception):
        raise problem
    if not check and options.queries is not None and options.bias is None and not options.dropout:
        return [(), (), (), ()]
    numbers = [0] * 4
    if isinstance(problem, Problem):
        bias = 0 if problem.bias is None else (1, 1, *problem.bias.shape)[-2]
        seed = 0 if problem.dropout is None else int(problem.dropout.seed)  # type: ignore[arg-type]  # no traced one
        numbers = [problem.score_shape.query_len, problem.score_shape.key_len, bias, seed]
    description = _describe(problem, options) if check else {}
    digest = hashlib.blake2b(repr(description).encode(), digest_size=7).digest()
    *facts, digests = zip(*ranks.gather_numbers([*numbers, int.from_bytes(digest, "little")], device), strict=True)
    descriptions = ranks.objects(description) if len(set(digests)) > 1 else []
    if isinstance(problem, Exception):
        raise problem
    if errors := [f"on rank {rank}: {x['error']}" for rank, x in enumerate(descriptions) if "error" in x]:
        raise ArgumentError(message("arguments", "those of a valid call on all ranks", "; ".join(errors)))
    if descriptions:
        name = next(name for name in description if len({x.get(name) for x in descriptions}) > 1)
        got = "; ".join(f"{x.get(name)} on rank {rank}" for rank, x in enumerate(descriptions))
        raise ArgumentError(message(name, "the same on all ranks", got))
    return facts


def _describe(problem: Problem | Exception, options: Options) -> dict[str, str]:
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
    name: str, shards: Sequence[Shard] | None, ranks: Ranks, lens: Sequence[int], default: Sequence[Shard] | None
) -> tuple[Shard, ...]:
    """Return the caller's shards, else `default` where it has the lengths `lens`, else consecutive parts of these.

    `lens` is empty where the ranks have not exchanged their lengths.
    """
    if shards is None and default is not None and (not lens or [*map(len, default)] == [*lens]):
        shards = default
    if shards is None:
        ends = [0, *accumulate(lens)]
        return tuple(Shard(((start, stop),), ends[-1]) for start, stop in pairwise(ends))
    shards = check_shards(name, shards, ranks.count)
    if lens and [*map(len, shards)] != [*lens]:
        raise ArgumentError(message(name, f"a Shard of each rank, with {[*lens]} positions", [*map(len, shards)]))
    return shards


def _check_bias(
    bias: Tensor, problem: Problem, sequence_shape: ScoreShape, queries: Sequence[Shard], keys: Sequence[Shard],
    bias_queries: tuple[int, ...],
) -> bool:  # fmt: skip
    """Raise where the bias, with `bias_queries` rows on the ranks, does not fit; return whether all have the same."""
    has_one_row = set(bias_queries) == {1}
    if has_one_row and sequence_shape.is_relative(tuple(bias.shape)):
        check_bias_shape(tuple(bias.shape), sequence_shape)
        for name, shards in (("queries", queries), ("keys", keys)):
            if any(len(shard.ranges) > 1 for shard in shards):
                expected = f"one range of {name} a rank, with a bias by relative position"
                raise ArgumentError(message(name, expected, shown([*shards])))
        return True
    check_bias_shape(tuple(bias.shape), dataclasses.replace(sequence_shape, query_len=problem.score_shape.query_len))
    # One query on each rank: a bias with an axis of queries has the row of the rank's query.
    is_per_query = bias.dim() > 1 and set(map(len, queries)) == {1} and len(queries) > 1
    is_shared = has_one_row and not is_per_query
    if not is_shared and bias_queries != tuple(map(len, queries)):
        expected = f"an axis of queries of {[*map(len, queries)]} on the ranks, or of 1 on all"
        raise ShapeError(message("bias", expected, [*bias_queries]))
    return is_shared


# ---- DTensors


def _local(x: Any) -> Any:
    """Return the rank's own part of a DTensor; any other argument as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _like_dtensor(query: Any, *others: Any) -> Callable[[Any], Any]:
    """Return a function that makes DTensors of the rank's results where the query is a DTensor.

    Raise where the results would have more axes than the query, or be split over more axes of the mesh; `others` are
    key and value.
    """
    if not isinstance(query, DTensor):
        return lambda results: results
    mesh, placements, local_shape = query.device_mesh, query.placements, query.to_local().shape
    if query.dim() < (axes := max(getattr(x, "ndim", 0) for x in others)):
        raise ShapeError(message("query", f"{axes} axes, as key and value have, in a DTensor", query.dim()))
    for x in others:
        split = zip(placements, x.placements, strict=False) if isinstance(x, DTensor) else ()
        if any(theirs.is_shard() and not ours.is_shard() for ours, theirs in split):
            expected = f"a DTensor that is split on each axis of the mesh on which key and value are ({x.placements})"
            raise ShapeError(message("query", expected, f"{placements}"))

    def wrap(x: Tensor | None) -> DTensor | None:
        if x is None:
            return None
        # A statistic has one axis less than the output. The query may broadcast over the other axes.
        axes = query.dim() - 1
        rows = (query.shape[i] if local_shape[i] == x.shape[i] else x.shape[i] for i in range(axes))
        shape = torch.Size((*rows, *x.shape[axes:]))
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride)

    return partial(map_leaves, wrap)
