"""Attention over a sequence whose rows are shared out along a mesh axis, inside ``jax.shard_map``.

- Each device computes the queries that it holds; the results are those of one device.
- Masks, valid lengths and dropout are those of the whole sequence; a bias has the device's queries and all keys.
- Who sends which rows follows from the shards and the mask, and is part of the program: JAX's collectives move them,
  and their derivatives return the gradients.
- All devices run one program over arrays of one shape. Shards of different sizes are padded at their end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnscore import backends, kernels
from attnscore.backends.base import HALF_PRECISION, HostArray, SeedHalves, accumulator, itemsize
from attnscore.backends.jax.sharding import axes_of, differing
from attnscore.core import dropout as dropouts
from attnscore.core import plan as plans
from attnscore.core import tiling
from attnscore.core.arguments import check_choice
from attnscore.core.dropout import PairDropout
from attnscore.core.layout import ScoreShape, check_bias_shape
from attnscore.core.prepared import PreparedKeys
from attnscore.core.problem import Problem, build_problem, check_extra, wanted_statistics
from attnscore.core.statistics import AttentionStats
from attnscore.core.tiled import Result
from attnscore.errors import ArgumentError, KernelUnavailable, ShapeError, message
from attnscore.kernels import AttentionOp
from attnscore.masks import Mask, as_mask
from attnscore.parallel.explanation import MODES, ParallelExplanation, RowBytes, choose
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.merging import COUNTED, merge_parts
from attnscore.parallel.plan import Exchange, exchange
from attnscore.parallel.shard import Shard
from attnscore.scores.forms import InnerForm

__all__ = ["attend", "explain", "gather_rows", "join_rows", "merge_over", "split_rows"]

lax: Any = jax.lax
"""JAX's stubs leave the collectives untyped."""
Arrays = Mapping[str, Array]


def attend(
    query: Array,
    key: Any,
    value: Array,
    *,
    axis_name: Any,
    queries: Sequence[Shard] | None = None,
    keys: Sequence[Shard] | None = None,
    mode: str = "auto",
    memory: int | None = None,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    head_axis: int = -3,
    kernel: str = "auto",
    return_stats: bool | tuple[str, ...] = False,
) -> Any:
    """Attention pooling over a sequence of which each device of a mesh axis holds some rows, inside ``jax.shard_map``.

    The result, its gradients, statistics and dropout are those of `attnscore.attend` on one device.

    Parameters
    ----------
    query, key, value : (..., own rows, dim)
        The rows that this device holds, as in `attnscore.attend`; `split_rows` gives arrays that ``shard_map`` divides
        so. Rows behind those of the device's shard are padding.
    axis_name : name of a mesh axis, or several
    queries, keys : Shard of each device, in the order of the axis
        Which rows of the whole sequence the devices hold. None: consecutive parts of one length; `keys` None where
        `queries` is given: the same shards.
    mode : "auto", "gather", "ring" or "heads"
        "gather" fetches the keys that the device's queries attend, at once; in a "ring" the keys of one device after
        the other pass by; "heads" gives each device all rows of some heads. "auto" sends the fewest bytes, see
        `attnscore.parallel.explain`.
    memory : int, optional
        Bytes that a device has for its arrays and the exchange; "auto" then takes a mode that fits.
    mask, valid_lens
        Of the whole sequence, the same on all devices.
    bias : broadcastable to (..., own queries, all keys), or (..., 1, all queries + all keys - 1)
    score, sink, dropout, seed, head_axis, kernel, return_stats
        As in `attnscore.attend`, the same on all devices. Gradients of arrays that are not divided are summed by JAX.

    Returns
    -------
    out : (..., own queries, value_dim)
        0 for padding.
    stats : AttentionStats of the device's queries, with `return_stats`

    Raises
    ------
    ShapeError, DtypeError, FrameworkError, MaskError, ArgumentError, KernelUnavailable
    NameError
        JAX's own, outside of ``shard_map``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, attnscore as ats
    >>> from attnscore.parallel.jax import attend
    >>> mesh = jax.make_mesh((jax.device_count(),), ("context",))
    >>> rows = jax.P(None, None, "context")
    >>> @jax.shard_map(mesh=mesh, in_specs=rows, out_specs=rows)
    ... def call(x):
    ...     return attend(x, x, x, axis_name="context", mask=ats.Causal())
    >>> x = jax.random.normal(jax.random.key(0), (1, 2, 64, 8))
    >>> bool(jnp.allclose(call(x), ats.attend(x, x, x, mask=ats.Causal()), atol=1e-5))
    True
    """
    call, _ = _planned(
        query, key, value, axis_name=axis_name, queries=queries, keys=keys, mode=mode, memory=memory, score=score,
        mask=mask, valid_lens=valid_lens, bias=bias, sink=sink, dropout=dropout, seed=seed, head_axis=head_axis,
        kernel=kernel, return_stats=return_stats,
    )  # fmt: skip
    return plans.present(dataclasses.replace(call.problem, bias=None), call.run())


def explain(query: Array, key: Any, value: Array, *, axis_name: Any, **options: Any) -> ParallelExplanation:
    """Return the plan of `attend` with the same arguments: mode, bytes sent, pairs and memory of each device.

    Called where `attend` is; all of it is known while the program is traced. Padding is not counted.
    """
    return _planned(query, key, value, axis_name=axis_name, **options)[1]


def split_rows(x: Array, shards: Sequence[Shard], axis: int = -2) -> Array:
    """Return the rows of a whole array in the order of the devices that hold them, padded with zeros to one size.

    ``shard_map`` over the axis gives each device the rows of its shard. The inverse is `join_rows`.

    Parameters
    ----------
    x : array with all rows on `axis`
    shards : Shard of each device
    axis : int

    Raises
    ------
    ShapeError

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from attnscore.parallel import Shard
    >>> shards = [Shard.head_tail(6, rank, 2) for rank in range(2)]
    >>> split_rows(jnp.arange(6), shards, axis=0)
    Array([0, 1, 5, 2, 3, 4], dtype=int32)
    """
    held = _Held(tuple(shards))
    _check_rows("x", x, held.length, axis)
    table = held.positions.reshape(-1)
    found = jnp.take(x, jnp.asarray(np.minimum(table, max(0, held.length - 1))), axis)
    inside = jnp.asarray(table < held.length).reshape(-1, *(1,) * (x.ndim - 1 - axis % x.ndim))
    return found if held.is_full else jnp.where(inside, found, jnp.zeros((), x.dtype))


def join_rows(x: Array, shards: Sequence[Shard], axis: int = -2) -> Array:
    """Return the rows of all devices, as `split_rows` orders them, in the order of the sequence, without padding.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from attnscore.parallel import Shard
    >>> shards = [Shard.contiguous(5, rank, 2) for rank in range(2)]
    >>> join_rows(split_rows(jnp.arange(5), shards, axis=0), shards, axis=0)
    Array([0, 1, 2, 3, 4], dtype=int32)
    """
    held = _Held(tuple(shards))
    _check_rows("x", x, len(shards) * held.rows, axis)
    return x if held.is_in_order else jnp.take(x, jnp.asarray(held.order), axis)


def gather_rows(x: Array, *, axis_name: Any, shards: Sequence[Shard] | None = None, axis: int = -2) -> Array:
    """Return the rows of the whole sequence from those that each device holds, inside ``shard_map``.

    Parameters
    ----------
    x : array with the device's rows on `axis`
    axis_name : name of a mesh axis, or several
    shards : Shard of each device, optional
        None: consecutive parts of one length.
    axis : int
    """
    axis %= x.ndim
    held = _held("shards", shards, x.shape[axis], axis_name)
    return join_rows(lax.all_gather(x, axis_name, axis=axis, tiled=True), held.shards, axis)


def merge_over(out: Array, log_sum_exp: Array, *, axis_name: Any) -> tuple[Array, Array]:
    """Merge the attention of the same queries over the keys of each device, as in decoding, inside ``shard_map``.

    Parameters
    ----------
    out : (..., query, value_dim)
    log_sum_exp : (..., query), -inf for a query that attends to none of the device's keys
    axis_name : name of a mesh axis, or several

    Returns
    -------
    out, log_sum_exp : over the keys of all devices, the same on each
    """
    sums = jnp.promote_types(log_sum_exp.dtype, jnp.float32)
    logs = log_sum_exp.astype(sums)
    largest = lax.pmax(lax.stop_gradient(logs), axis_name)
    # Without a key anywhere the maximum is -inf, and -inf - -inf NaN.
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = jnp.exp(logs - largest)
    total = lax.psum(weights, axis_name)
    # A query without keys has out = 0; NaN of other devices' padding does not come in.
    shares = jnp.where(weights[..., None] == 0, 0, out.astype(sums) * weights[..., None])
    pooled = lax.psum(shares, axis_name) / jnp.where(total == 0, 1, total)[..., None]
    merged = jnp.where(total == 0, -jnp.inf, jnp.log(jnp.where(total == 0, 1, total)) + largest)
    return pooled.astype(out.dtype), merged.astype(log_sum_exp.dtype)


# ---- who holds what


@dataclass(frozen=True)
class _Held:
    """The rows of all devices, in arrays of one size."""

    shards: tuple[Shard, ...]

    @property
    def length(self) -> int:
        """Of the whole sequence."""
        return self.shards[0].length

    @cached_property
    def rows(self) -> int:
        """Of each device's array."""
        return max(map(len, self.shards))

    @property
    def is_full(self) -> bool:
        """Whether no device has padding."""
        return all(len(shard) == self.rows for shard in self.shards)

    @cached_property
    def positions(self) -> HostArray:
        """Global positions, (devices, rows): those of padding are behind the sequence."""
        padding = self.length + np.arange(self.rows)
        return np.stack([np.append(x.positions(), padding[: self.rows - len(x)]) for x in self.shards])

    @cached_property
    def order(self) -> HostArray:
        """Where each row of the sequence is in the arrays of all devices, one behind the other."""
        return np.argsort(self.positions, axis=None, kind="stable")[: self.length]

    @property
    def is_in_order(self) -> bool:
        return self.is_full and all(len(x.ranges) < 2 for x in self.shards) and bool((np.diff(self.order) == 1).all())

    @property
    def is_consecutive(self) -> bool:
        """Whether the rows of each device are one range."""
        return all(len(shard.ranges) < 2 for shard in self.shards)

    def of_device(self, device: Array) -> Array:
        """Return the positions of a device's rows, (rows,), traced."""
        return _entry(self.positions, device)


def _entry(table: HostArray, device: Array) -> Array:
    """Return the device's entry of a table; computed where that takes less memory than the table."""
    counted = table - table[:, :1] == np.arange(table.shape[-1]) if table.ndim == 2 and table.shape[-1] else np.array(0)
    if counted.all():
        return jnp.take(jnp.asarray(table[:, 0]), device) + jnp.arange(table.shape[-1])
    return jnp.take(jnp.asarray(table), device, 0)


def _held(name: str, shards: Sequence[Shard] | None, rows: int, axis_name: Any) -> _Held:
    """Return the rows of all devices, checked against the rows of this one."""
    count = lax.axis_size(axis_name)
    if shards is None:
        return _Held(tuple(Shard.contiguous(rows * count, rank, count) for rank in range(count)))
    if len(shards) != count:
        raise ArgumentError(message(name, f"one shard for each of {count} devices", len(shards)))
    held = _Held(tuple(shards))
    if held.rows != rows:
        raise ShapeError(message(name, f"at most {rows} positions a device, as its array has rows", held.rows))
    return held


def _check_rows(name: str, x: Array, rows: int, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != rows:
        raise ShapeError(message(name, f"{rows} positions on axis {axis}", f"shape {tuple(x.shape)}"))


# ---- planning


def _planned(
    query: Array,
    key: Any,
    value: Array,
    *,
    axis_name: Any,
    queries: Sequence[Shard] | None = None,
    keys: Sequence[Shard] | None = None,
    mode: str = "auto",
    memory: int | None = None,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    kernel: str = "auto",
    return_stats: Any = False,
    **options: Any,
) -> tuple[_Call, ParallelExplanation]:
    """Return the call of this device, and the explanation of the call of all."""
    check_choice("mode", mode, ("auto", *MODES))
    if type(key) is PreparedKeys:
        key, score = key.unpack(score)
    problem, _ = build_problem(query, key, value, score=score, statistics=wanted_statistics(return_stats), **options)
    ops, own = problem.ops, problem.score_shape
    held_queries = _held("queries", queries, own.query_len, axis_name)
    held_keys = _held("keys", queries if keys is None else keys, own.key_len, axis_name)
    whole = dataclasses.replace(own, query_len=held_queries.length, key_len=held_keys.length)
    checked = as_mask(mask, valid_lens, whole)
    if checked is not None:
        backends.check_dense(ops, checked.arrays())
        checked.check(ops, whole)
    if bias is not None:
        bias = check_extra(ops, "bias", bias, query)
        rows = whole if whole.is_relative(tuple(bias.shape)) else dataclasses.replace(own, key_len=whole.key_len)
        check_bias_shape(tuple(bias.shape), rows)
        bias = rows.to_canonical(ops, bias)
    problem = dataclasses.replace(problem, mask=checked, bias=bias)
    plan = exchange(checked, held_queries.shards, held_keys.shards, batch=whole.batch)
    reason = _reason_against_heads(problem, plan.ranks)
    if mode == "heads" and reason:
        raise ArgumentError(message("mode", "one that this call allows", f"'heads': {reason}"))
    explanation = choose(
        plan, _row_bytes(problem), mode=mode, gradient="reduce", memory=memory,
        mask="none" if checked is None else repr(checked),
    )  # fmt: skip
    if explanation.mode == "heads" and reason:
        explanation = choose(plan, _row_bytes(problem), mode="gather", gradient="reduce", mask=explanation.mask)
        explanation = dataclasses.replace(explanation, reasons={**explanation.reasons, "heads": reason})
    kind = {"gather": _Gather, "ring": _Ring, "heads": _Heads}[explanation.mode]
    return kind(axis_name, held_queries, held_keys, plan, whole, problem, kernel), explanation


def _row_bytes(problem: Problem) -> RowBytes:
    """Return the bytes of a position of each array that is sent."""
    shape, size = problem.score_shape, itemsize(problem.dtype)
    moved = {**problem.form.arrays(), "value": problem.value}

    def of(roles: Sequence[str]) -> int:
        found = [x for name, x in moved.items() if _role(problem, name) in roles]
        return sum(x.size // max(1, x.shape[-2]) * x.dtype.itemsize for x in found)

    queries = int(np.prod(shape.rows[:-1]))
    sums = itemsize(accumulator(problem.dtype))
    return RowBytes(
        query=of(["query"]),
        out=queries * problem.layout.value_dim * size,
        key=of(["key"]),
        key_gradient=of(["key"]) * sums // size,
        row=queries * sums,
        heads=shape.heads * shape.groups,
        kv_heads=shape.heads,
    )


def _role(problem: Problem, name: str) -> str:
    return "key" if name == "value" else problem.form.role(name)


def _reason_against_heads(problem: Problem, devices: int) -> str | None:
    """Return why the heads of a call cannot be divided among the devices."""
    heads = problem.score_shape.heads
    if heads % devices:
        return f"{devices} devices do not divide {heads} KV heads"
    if problem.mask is not None and problem.mask.heads:
        return "each head has a mask of its own"
    if any(x.ndim > 2 for name, x in problem.form.arrays().items() if _role(problem, name) == "shared"):
        return "each head has parameters of its own"
    return None


# ---- calls


@dataclass(frozen=True, eq=False)
class _Call:
    """One call, of all devices; `problem` is that of this device's rows, with the mask of the whole sequence."""

    axis_name: Any
    queries: _Held
    keys: _Held
    plan: Exchange
    whole: ScoreShape
    problem: Problem
    kernel: str

    @property
    def device(self) -> Any:
        return lax.axis_index(self.axis_name)

    def operands(self, *roles: str) -> dict[str, Array]:
        """Return the arrays of the form, and the value, of some roles."""
        found = {**self.problem.form.arrays(), "value": self.problem.value}
        return {name: x for name, x in found.items() if _role(self.problem, name) in roles}

    def run(self) -> Result:
        """Return the result of the device's queries."""
        raise NotImplementedError

    def compute(
        self, shape: ScoreShape, arrays: Arrays, mask: Mask | None, bias: Array | None, dropout: Any, sink: Any,
        statistics: tuple[str, ...] | None = None,
    ) -> Result:  # fmt: skip
        """Run attention over the arrays of a part, lowered already; `statistics` None: those of the call."""
        problem = self.problem
        form = problem.form.with_arrays({name: arrays[name] for name in problem.form.arrays()})
        problem = dataclasses.replace(
            problem, layout=dataclasses.replace(problem.layout, score_shape=shape), query=form.query, key=form.key,
            value=arrays["value"], form=form, mask=mask, bias=bias, dropout=dropout, sink=sink,
            statistics=problem.statistics if statistics is None else statistics,
        )  # fmt: skip
        kernel = kernels.choose(self.kernel, problem)
        if not kernel.has_vjp:
            raise KernelUnavailable(message("kernel", "one that takes lowered keys", repr(self.kernel)))
        return AttentionOp(kernel, problem, tiling.plan(problem))()

    def pairs_dropout(self, rows: Array, cols: Array, heads: Callable[[Array], Array] | None = None) -> Any:
        """Return the dropout of a part by the positions in the whole sequence: its bits are those of one device.

        `heads` takes the heads of the part from an array of all.
        """
        dropout = self.problem.dropout
        if dropout is None:
            return None
        first = dropouts.rows_of_matrices(self.problem.ops, self.whole, self.problem.value)
        first = first if heads is None else heads(first)
        return PairDropout(dropout.probability, dropout.seed, first + jnp.reshape(rows, (-1, 1)), cols[None])

    def bias_of(self, bias: Array, rows: Array, cols: Array, *, consecutive: bool) -> Array:
        """Return the bias of the device's queries and the keys `cols`, which may be consecutive."""
        if not self.whole.is_relative(tuple(bias.shape)):
            return bias if bias.shape[-1] == 1 else jnp.take(bias, cols, -1, mode="clip")
        if consecutive and self.queries.is_consecutive and rows.shape[0] and cols.shape[0]:
            # One number for each key - query, from that of the last query and the first key on.
            count = rows.shape[0] + cols.shape[0] - 1
            begin = cols[0] - rows[0] - rows.shape[0] + self.whole.query_len
            return jnp.take(bias, begin + jnp.arange(count), -1, mode="clip")
        index = cols - rows[:, None] + self.whole.query_len - 1
        return jnp.take(bias[..., 0, :], index, -1, mode="clip")


class _Gather(_Call):
    """Keys come to the devices whose queries attend them, and stay in the order of the sequence."""

    def run(self) -> Result:
        fetch = _Fetch(self.axis_name, self.plan, self.keys)
        arrays = {name: fetch(x) for name, x in self.operands("key").items()}
        rows, cols = self.queries.of_device(self.device), fetch.wanted(self.device)
        shape = dataclasses.replace(self.whole, query_len=self.queries.rows, key_len=cols.shape[0])
        padded = not self.queries.is_full or not fetch.is_full
        mask = shard_mask(self.problem.mask, rows, cols, self.whole.query_len, self.whole.key_len, padded=padded)
        dropout = self.pairs_dropout(rows, jnp.asarray(cols))
        bias = self.problem.bias
        if bias is not None and not (fetch.is_whole and bias.shape[-1] == self.whole.key_len):
            bias = self.bias_of(bias, rows, jnp.asarray(cols), consecutive=fetch.is_consecutive)
        given = {**self.operands("query", "shared"), **arrays}
        return self.compute(shape, given, mask, bias, dropout, self.problem.sink)


@dataclass(frozen=True, eq=False)
class _Fetch:
    """Rows of the keys that each device needs, from those that hold them."""

    axis_name: Any
    plan: Exchange
    keys: _Held

    @property
    def is_whole(self) -> bool:
        """Whether all devices need all keys, which are then gathered at once."""
        return all(len(shard) == self.keys.length for shard in self.plan.needed)

    @property
    def is_full(self) -> bool:
        """Whether all devices need the same number of keys."""
        return len({len(shard) for shard in self.plan.needed}) == 1

    @property
    def is_consecutive(self) -> bool:
        return _Held(self.plan.needed).is_consecutive

    def wanted(self, device: Array) -> Any:
        """Return the positions of the keys that a device gets: of the host where they are the same for all."""
        return np.arange(self.keys.length) if self.is_whole else _Held(self.plan.needed).of_device(device)

    def __call__(self, x: Array) -> Array:
        """Return the rows that this device needs, of an array (..., own rows, dim)."""
        if x.dtype.name not in HALF_PRECISION:
            return self._rows(x)
        shape, sums = x.shape, accumulator(x.dtype.name)

        # Gradients from several devices are summed in the dtype of sums.
        @jax.custom_vjp
        def fetch(x: Array) -> Array:
            return self._rows(x)

        def backward(_: None, grad: Array) -> tuple[Array]:
            axes = axes_of((grad,))
            (found,) = jax.vjp(self._rows, differing(jnp.zeros(shape, sums), axes))[1](grad.astype(sums))
            return (found.astype(grad.dtype),)

        fetch.defvjp(lambda x: (self._rows(x), None), backward)
        return fetch(x)

    def _rows(self, x: Array) -> Array:
        if self.is_whole:
            whole = lax.all_gather(x, self.axis_name, axis=x.ndim - 2, tiled=True)
            return join_rows(whole, self.keys.shards)
        device, parts = lax.axis_index(self.axis_name), [x]
        for step in self._steps:
            sent = jnp.take(x, _entry(step.rows, device), -2)
            parts.append(lax.ppermute(sent, self.axis_name, step.pairs))
        found = jnp.concatenate(parts, -2) if len(parts) > 1 else x
        return jnp.take(found, _entry(self._places, device), -2)

    @cached_property
    def _steps(self) -> tuple[_Step, ...]:
        found, ranks = [], self.plan.ranks
        for distance in range(1, ranks):
            parts = [self.plan.transfer(rank, (rank + distance) % ranks) for rank in range(ranks)]
            if any(map(len, parts)):
                held = zip(self.keys.shards, parts, strict=True)
                rows = [_indices(shard.locate(part)) for shard, part in held]
                pairs = tuple((rank, (rank + distance) % ranks) for rank, part in enumerate(parts) if len(part))
                found.append(_Step(distance, tuple(parts), _padded(rows), pairs))
        return tuple(found)

    @cached_property
    def _places(self) -> HostArray:
        """Where the rows that a device needs are among its own, with those of each step behind."""
        places = []
        for rank, needed in enumerate(self.plan.needed):
            own = self.keys.shards[rank] & needed
            at, where = [own.positions()], [_indices(self.keys.shards[rank].locate(own))]
            first = self.keys.rows
            for step in self._steps:
                part = step.parts[(rank - step.distance) % self.plan.ranks]
                at.append(part.positions())
                where.append(first + np.arange(len(part)))
                first += step.rows.shape[-1]
            places.append(np.concatenate(where)[np.argsort(np.concatenate(at), kind="stable")])
        return _padded(places)


@dataclass(frozen=True, eq=False)
class _Step:
    """What each device sends to the one at a distance: parts of its rows, and where they are in its array."""

    distance: int
    parts: tuple[Shard, ...]
    rows: HostArray
    pairs: tuple[tuple[int, int], ...]
    """Sender and receiver of those that send any."""


def _indices(ranges: Sequence[tuple[int, int]]) -> HostArray:
    return np.concatenate([np.arange(0), *(np.arange(*pair) for pair in ranges)])


def _padded(rows: Sequence[HostArray]) -> HostArray:
    """Return indices as one table, padded with the last one or 0."""
    count = max(map(len, rows))
    return np.stack([np.pad(x, (0, count - len(x)), mode="edge") if len(x) else np.zeros(count, x.dtype) for x in rows])


class _Heads(_Call):
    """Each device gets all rows of some heads, and gives back the results of the rows of the others."""

    def run(self) -> Result:
        arrays = {name: self._rows(x, self.queries) for name, x in self.operands("query").items()}
        arrays |= {name: self._rows(x, self.keys) for name, x in self.operands("key").items()}
        shape = dataclasses.replace(self.whole, heads=self._count)
        rows, cols = jnp.arange(self.whole.query_len), jnp.arange(self.whole.key_len)
        dropout = self.pairs_dropout(rows, cols, self._own_heads)
        bias = None if self.problem.bias is None else self._bias(self.problem.bias)
        sink = self.problem.sink
        sink = sink if sink is None or sink.shape[-2] == 1 else self._own_heads(sink, -2)
        found = self.compute(shape, {**arrays, **self.operands("shared")}, self.problem.mask, bias, dropout, sink)
        statistics = {name: self._back(x) for name, x in found.statistics.items()}
        out, row_max, log_denom = (self._back(x) for x in (found.out, found.row_max, found.log_denom))
        return Result(out, row_max, log_denom, statistics)

    @property
    def _count(self) -> int:
        """KV heads of each device."""
        return self.whole.heads // self.plan.ranks

    def _own_heads(self, x: Array, axis: int = -4) -> Any:
        return lax.dynamic_slice_in_dim(x, self.device * self._count, self._count, axis % x.ndim)

    def _rows(self, x: Array, held: _Held) -> Array:
        """Return all rows of the device's heads, of an array (*lead, head or 1, group, own rows, dim)."""
        heads, length = x.ndim - 4, x.ndim - 2
        if x.shape[heads] == 1:
            found = lax.all_gather(x, self.axis_name, axis=length, tiled=True)
        else:
            found = lax.all_to_all(x, self.axis_name, heads, length, tiled=True)
        return join_rows(found, held.shards)

    def _back(self, x: Array) -> Any:
        """Return the device's rows of all heads, of an array (*lead, own heads, group, all rows, dim)."""
        found = split_rows(x, self.queries.shards)
        return lax.all_to_all(found, self.axis_name, x.ndim - 2, x.ndim - 4, tiled=True)

    def _bias(self, bias: Array) -> Array:
        if self.whole.is_relative(tuple(bias.shape)) or (bias.shape[-2] == 1 and self.queries.rows > 1):
            return bias if bias.shape[-4] == 1 else self._own_heads(bias)
        return self._rows(bias, self.queries)


class _Ring(_Call):
    """The keys of one device after the other pass by, and the results over them are merged.

    Memory is that of two devices' keys, in the backward too: it sends the keys around again, with their gradients, and
    computes each part anew from the log-sum-exp of the whole.
    """

    def run(self) -> Result:
        dropout, mask = self.problem.dropout, self.problem.mask
        seed = () if dropout is None or not isinstance(dropout.seed, SeedHalves) else tuple(dropout.seed)
        read = [*(() if mask is None else mask.leaves()), *seed]
        extras = {name: x for name, x in (("bias", self.problem.bias), ("sink", self.problem.sink)) if x is not None}
        given = {**self.operands("query", "key", "shared"), **extras}
        axes = axes_of((*given.values(), self.device))
        # Arrays that all devices have are cast, so that JAX sums their gradients over the devices.
        given = {name: differing(x, axes) for name, x in given.items()}
        constants = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in read]

        @jax.custom_vjp
        def ring(given: Arrays, constants: Sequence[Array]) -> dict[str, Array]:
            return self._reading(constants)._forward(given)

        def forward(given: Arrays, constants: Sequence[Array]) -> Any:
            found = self._reading(constants)._forward(given)
            return found, (given, constants, {name: found[name] for name in ("out", *self._differentiable)})

        def backward(saved: Any, grads: Arrays) -> Any:
            given, constants, found = saved
            return self._reading(constants)._backward(given, found, grads), None

        ring.defvjp(forward, backward)
        found = ring(given, constants)
        out, total = found.pop("out").astype(self.problem.value.dtype), found["log_sum_exp"]
        return Result(out, total, jnp.zeros_like(total), found)

    def _reading(self, constants: Sequence[Array]) -> _Ring:
        """Return the call over these arrays of the mask, and this seed."""
        left, problem = iter(constants), self.problem
        mask = None if problem.mask is None else problem.mask.with_leaves(left)
        dropout = problem.dropout
        if dropout is not None and isinstance(dropout.seed, SeedHalves):
            dropout = dataclasses.replace(dropout, seed=SeedHalves(*left))
        return dataclasses.replace(self, problem=dataclasses.replace(problem, mask=mask, dropout=dropout))

    @property
    def _differentiable(self) -> tuple[str, ...]:
        """Statistics with a gradient: the log-sum-exp is always needed."""
        return ("log_sum_exp", *(("entropy",) if "entropy" in self.problem.statistics else ()))

    @property
    def _sums(self) -> Any:
        return jnp.dtype(accumulator(self.problem.dtype))

    def _is_attended(self, step: int) -> bool:
        """Whether any device's queries attend the keys that it has at a step."""
        ranks = self.plan.ranks
        return step == 0 or any(len(self.plan.transfer((rank - step) % ranks, rank)) for rank in range(ranks))

    def _next(self, arrays: Arrays) -> dict[str, Array]:
        """Return the arrays of the device before."""
        ranks = self.plan.ranks
        pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        return {name: lax.ppermute(x, self.axis_name, pairs) for name, x in arrays.items()}

    def _part(self, step: int, given: Arrays, statistics: tuple[str, ...]) -> dict[str, Array]:
        """Return output and statistics over the keys that the device has at a step; the sink belongs to the first."""
        rows = self.queries.of_device(self.device)
        cols = self.keys.of_device((self.device - step) % self.plan.ranks)
        shape = dataclasses.replace(self.whole, query_len=self.queries.rows, key_len=self.keys.rows)
        padded = not (self.queries.is_full and self.keys.is_full)
        mask = shard_mask(self.problem.mask, rows, cols, self.whole.query_len, self.whole.key_len, padded=padded)
        bias = given.get("bias")
        if bias is not None:
            bias = self.bias_of(bias, rows, cols, consecutive=self.keys.is_consecutive)
        # The parts are merged in the dtype of sums.
        arrays = {**given, "value": given["value"].astype(self._sums)}
        sink, dropout = given.get("sink") if step == 0 else None, self.pairs_dropout(rows, cols)
        found = self.compute(shape, arrays, mask, bias, dropout, sink, statistics)
        result = {"out": found.out, **{name: found.statistics[name] for name in statistics}}
        if not any(name in statistics for name in COUNTED):
            return result
        return {**result, "count": self._count(shape, arrays, mask, bias)}

    def _count(self, shape: ScoreShape, arrays: Arrays, mask: Mask | None, bias: Array | None) -> Array:
        """Return how many keys of a part each query attends: the sum of exp(0)."""
        hides = None if bias is None else jnp.where(jnp.isneginf(bias), bias, 0)
        query, key = (jnp.zeros_like(arrays[name][..., :1]) for name in ("query", "key"))
        form = InnerForm(query, key)
        given = {"query": query, "key": key, "value": arrays["value"][..., :1]}
        layout = dataclasses.replace(self.problem.layout, value_dim=1)
        call = dataclasses.replace(self, problem=dataclasses.replace(self.problem, form=form, layout=layout))
        found = call.compute(shape, given, mask, hides, None, None, ("log_sum_exp",))
        return jnp.round(jnp.exp(lax.stop_gradient(found.statistics["log_sum_exp"])))

    def _forward(self, given: Arrays) -> dict[str, Array]:
        statistics = ("log_sum_exp", *(name for name in self.problem.statistics if name != "log_sum_exp"))
        if "var_score" in statistics and "mean_score" not in statistics:
            statistics = (*statistics, "mean_score")
        keys = {name: given[name] for name in self.operands("key")}
        found = self._part(0, given, statistics)
        for step in range(1, self.plan.ranks):
            keys = self._next(keys)
            if self._is_attended(step):
                found = _merged(found, self._part(step, {**given, **keys}, statistics))
        return {
            name: x for name, x in found.items() if name in ("out", *self._differentiable, *self.problem.statistics)
        }

    def _backward(self, given: Arrays, found: Arrays, grads: Arrays) -> dict[str, Array]:
        keys = {name: given[name] for name in self.operands("key")}
        totals = {name: jnp.zeros_like(x, self._sums) for name, x in given.items()}
        of_keys = {name: totals.pop(name) for name in keys}
        for step in range(self.plan.ranks):
            if step:
                keys = self._next(keys)
            if self._is_attended(step):
                part, vjp = jax.vjp(lambda x, step=step: self._part(step, x, self._differentiable), {**given, **keys})
                (grad,) = vjp(_gradients_of_part(part, found, grads))
                totals = {name: x + grad[name].astype(x.dtype) for name, x in totals.items()}
                of_keys = {name: x + grad[name].astype(x.dtype) for name, x in of_keys.items()}
            # After the last step the gradients are back where the keys came from.
            of_keys = self._next(of_keys)
        return {name: ({**totals, **of_keys})[name].astype(x.dtype) for name, x in given.items()}


def _merged(first: Arrays, second: Arrays) -> dict[str, Array]:
    """Return output, statistics and counts over the keys of two parts, (..., query, n) each."""
    names = [name for name in first if name not in ("out", "count")]
    stats = [AttentionStats(**{name: part[name][..., 0] for name in names}) for part in (first, second)]
    counts = (first["count"][..., 0], second["count"][..., 0]) if "count" in first else None
    out, merged = merge_parts((first["out"], second["out"]), (stats[0], stats[1]), counts)
    found = {"out": out, **{name: getattr(merged, name)[..., None] for name in names}}
    return found if counts is None else {**found, "count": first["count"] + second["count"]}


def _gradients_of_part(part: Arrays, found: Arrays, grads: Arrays) -> dict[str, Array]:
    """Return the gradients of the output and statistics of a part, from those of all keys.

    With w = exp(lse_part - lse): out = sum w out_part, and the entropy H = sum w (H_part - log w). lse_part moves all w,
    which leaves the differences from out and H.
    """
    total = found["log_sum_exp"]
    log = part["log_sum_exp"] - jnp.where(jnp.isneginf(total), 0, total)
    w = jnp.exp(log)
    grad_out = grads["out"].astype(w.dtype)
    of_total = (grad_out * (part["out"] - found["out"])).sum(-1, keepdims=True) + grads["log_sum_exp"]
    result = {"out": (w * grad_out).astype(part["out"].dtype)}
    if "entropy" in part:
        # w log w is 0 where w is.
        of_total = of_total + grads["entropy"] * (part["entropy"] - jnp.where(w == 0, 0, log) - found["entropy"])
        result["entropy"] = w * grads["entropy"]
    return {**result, "log_sum_exp": w * of_total}
