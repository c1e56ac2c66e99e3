"""How keys and queries meet on the devices of a mesh axis: calls of one device, inside ``shard_map``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnscore.backends.base import HALF_PRECISION, HostArray, SeedHalves, accumulator
from attnscore.backends.jax.sharding import axes_of, differing
from attnscore.base.layout import ScoreShape
from attnscore.kernels import SinglePlan
from attnscore.parallel import parts
from attnscore.parallel.jax_rows import DeviceRows, entry, join_rows, split_rows
from attnscore.parallel.mask import shard_mask
from attnscore.problem import online_softmax
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result
from attnscore.problem.statistics import statistics_to_join

lax: Any = jax.lax
"""JAX's stubs leave the collectives untyped."""
Arrays = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class DeviceCall(parts.Call):
    """A call on one device of a mesh axis."""

    axis_name: Any
    queries: DeviceRows
    keys: DeviceRows

    @property
    def device(self) -> Any:
        return lax.axis_index(self.axis_name)

    def part(self, keys: DeviceRows, cols: Any, operands: Arrays) -> SinglePlan:
        """Return the plan of the device's queries and the keys at `cols`, among `keys` of all devices.

        `operands` may have a bias, of all keys, and a sink.
        """
        rows = self.queries.of_device(self.device)
        padded = not (self.queries.is_full and keys.is_full)
        mask = shard_mask(self.problem.mask, rows, cols, self.queries.length, self.keys.length, padded=padded)
        bias = self.bias_of(operands["bias"], keys, rows, jnp.asarray(cols)) if "bias" in operands else None
        return self.plan_of(operands, rows, cols, mask=mask, bias=bias)

    def bias_of(self, bias: Array, keys: DeviceRows, rows: Array, cols: Array) -> Array:
        """Return the bias of the queries at `rows` and the keys at `cols`; clipped for padding, which is masked."""
        if not self.sequence_shape.is_relative(tuple(bias.shape)):
            return bias if keys.is_whole or bias.shape[-1] == 1 else jnp.take(bias, cols, -1, mode="clip")
        if keys.is_consecutive and self.queries.is_consecutive and rows.shape[0] and cols.shape[0]:
            # One number for each relative offset, key minus query, in rising order.
            count = rows.shape[0] + cols.shape[0] - 1
            begin = cols[0] - rows[0] - rows.shape[0] + self.sequence_shape.query_len
            return jnp.take(bias, begin + jnp.arange(count), -1, mode="clip")
        index = cols - rows[:, None] + self.sequence_shape.query_len - 1
        return jnp.take(bias[..., 0, :], index, -1, mode="clip")


class Gather(DeviceCall):
    """Keys come to the devices whose queries attend them, and stay in the order of the sequence."""

    def compute(self) -> Result:
        arrays = {name: self._fetch(x) for name, x in self.operands("key").items()}
        # Positions are on the host where all devices need all keys.
        cols = np.arange(self.keys.length) if self._needed.is_whole else self._needed.of_device(self.device)
        operands = {**self.operands("query", "shared", "bias", "sink"), **arrays}
        return parts.run_part(self.part(self._needed, cols, operands), cols)

    @cached_property
    def _needed(self) -> DeviceRows:
        """The keys that each device gets."""
        return DeviceRows(self.plan.needed)

    def _fetch(self, x: Array) -> Array:
        """Return the rows that this device needs, of an array (..., own rows, dim)."""
        if x.dtype.name not in HALF_PRECISION:
            return self._rows(x)
        shape, sum_dtype = x.shape, accumulator(x.dtype.name)

        # Gradients from several devices are summed in the dtype of sums.
        @jax.custom_vjp
        def fetch(x: Array) -> Array:
            return self._rows(x)

        def backward(_: None, grad: Array) -> tuple[Array]:
            zeros = differing(jnp.zeros(shape, sum_dtype), axes_of((grad,)))
            (gradient,) = jax.vjp(self._rows, zeros)[1](grad.astype(sum_dtype))
            return (gradient.astype(grad.dtype),)

        fetch.defvjp(lambda x: (self._rows(x), None), backward)
        return fetch(x)

    def _rows(self, x: Array) -> Array:
        """Return the rows that this device needs, by collectives of JAX, which it can differentiate."""
        if self._needed.is_whole:
            gathered = lax.all_gather(x, self.axis_name, axis=x.ndim - 2, tiled=True)
            return join_rows(gathered, self.keys.shards)
        row_blocks = [x]
        for distance, sent in self._sent.items():
            pairs = [(rank, (rank + distance) % self.plan.ranks) for rank, x in enumerate(sent.shards) if len(x)]
            rows = jnp.take(x, entry(self._indices_of(sent, self.keys.positions), self.device), -2)
            row_blocks.append(lax.ppermute(rows, self.axis_name, pairs))
        arrays = jnp.concatenate(row_blocks, -2) if len(row_blocks) > 1 else x
        arrived_positions = [np.roll(sent.positions, distance, 0) for distance, sent in self._sent.items()]
        indices = self._indices_of(self._needed, np.concatenate([self.keys.positions, *arrived_positions], -1))
        return jnp.take(arrays, entry(indices, self.device), -2)

    @cached_property
    def _sent(self) -> dict[int, DeviceRows]:
        """Rows that each device sends, by the distance to the receiving device, where any device sends rows."""
        ranks, sent = range(self.plan.ranks), {}
        for distance in ranks[1:]:
            rows = DeviceRows(tuple(self.plan.transfer(rank, (rank + distance) % self.plan.ranks) for rank in ranks))
            if rows.rows:
                sent[distance] = rows
        return sent

    def _indices_of(self, needed: DeviceRows, positions: HostArray) -> HostArray:
        """Return the indices, in rows at `positions`, of the rows that each device needs; any index for padding."""
        indices = []
        for rows, device_positions in zip(needed.positions, positions, strict=True):
            index = np.zeros(1 + max(rows.max(initial=0), device_positions.max(initial=0)), np.int64)
            index[device_positions] = np.arange(len(device_positions))
            indices.append(index[rows])
        return np.stack(indices)


class Heads(parts.HeadsCall, DeviceCall):
    """`HeadsCall` by JAX's collectives."""

    def to_heads(self, arrays: Arrays) -> dict[str, Array]:
        keys = self.operands("key")
        return {name: self._rows(x, self.keys if name in keys else self.queries) for name, x in arrays.items()}

    def _rows(self, x: Array, device_rows: DeviceRows) -> Array:
        heads, length = x.ndim - 4, x.ndim - 2
        if x.shape[heads] == 1:
            rows = lax.all_gather(x, self.axis_name, axis=length, tiled=True)
        else:
            rows = lax.all_to_all(x, self.axis_name, heads, length, tiled=True)
        return join_rows(rows, device_rows.shards)

    def to_rows(self, arrays: Arrays) -> dict[str, Array]:
        rows = {name: split_rows(x, self.queries.shards) for name, x in arrays.items()}
        return {name: lax.all_to_all(x, self.axis_name, x.ndim - 2, x.ndim - 4, tiled=True) for name, x in rows.items()}

    def own_heads(self, x: Array, axis: int = -4) -> Any:
        count = self.sequence_shape.heads // self.plan.ranks
        return lax.dynamic_slice_in_dim(x, self.device * count, count, axis % x.ndim)


class Ring(DeviceCall):
    """Keys travel from device to device; the results over the keys of each device are merged.

    Memory holds the keys of two devices, in the backward too: it sends the keys around again, with their gradients, and
    computes each part anew from the log-sum-exp over all keys.
    """

    @staticmethod
    def reasons_against(problem: Problem, sequence_shape: ScoreShape) -> tuple[str, ...]:
        return () if problem.normalizer is None else (parts.SOFTMAX_ALONE,)

    def compute(self) -> Result:
        dropout, mask = self.problem.dropout, self.problem.mask
        seed_halves = dropout.seed if dropout is not None and isinstance(dropout.seed, SeedHalves) else ()
        operands = self.problem.operands()
        axes = axes_of((*operands.values(), self.device))
        # Arrays that all devices have are cast, so that JAX sums their gradients over the devices.
        operands = {name: differing(x, axes) for name, x in operands.items()}
        # Arguments, as a function with a VJP of its own must not close over traced arrays.
        constants = [jnp.asarray(x) for x in (*(() if mask is None else mask.leaves()), *seed_halves)]

        def forward(operands: Arrays, constants: Sequence[Array]) -> Any:
            outputs = self._with_constants(constants)._forward(operands)
            return outputs, (operands, constants, outputs)

        def backward(saved: Any, grads: Arrays) -> Any:
            operands, constants, outputs = saved
            return self._with_constants(constants)._backward(operands, outputs, grads), None

        ring = jax.custom_vjp(lambda operands, constants: forward(operands, constants)[0])
        ring.defvjp(forward, backward)
        outputs = ring(operands, constants)
        return parts.result_of({**outputs, "out": outputs["out"].astype(self.problem.value.dtype)})

    def _with_constants(self, constants: Sequence[Array]) -> Ring:
        """Return the call with the mask's arrays and the seed replaced by `constants`."""
        arrays, problem = iter(constants), self.problem
        mask = None if problem.mask is None else problem.mask.with_leaves(arrays)
        dropout = problem.dropout
        if dropout is not None and isinstance(dropout.seed, SeedHalves):
            dropout = dataclasses.replace(dropout, seed=SeedHalves(*arrays))
        return dataclasses.replace(self, problem=dataclasses.replace(problem, mask=mask, dropout=dropout))

    @property
    def part_statistics(self) -> tuple[str, ...]:
        # A kernel that is chosen without the log-sum-exp may have no gradient of it.
        return statistics_to_join(("log_sum_exp", *self.problem.statistics))

    def _from_previous_device(self, arrays: Arrays) -> dict[str, Array]:
        """Return the previous device's arrays."""
        ranks = self.plan.ranks
        pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        return {name: lax.ppermute(x, self.axis_name, pairs) for name, x in arrays.items()}

    def _part(self, step: int, operands: Arrays) -> tuple[SinglePlan, Array]:
        """Return the plan over the keys that the device has at a step, and their positions."""
        cols = self.keys.of_device((self.device - step) % self.plan.ranks)
        # The parts are merged in the dtype of sums.
        operands = {**operands, "value": operands["value"].astype(self.problem.accumulator)}
        return self.part(self.keys, cols, operands), cols

    def _forward(self, operands: Arrays) -> dict[str, Array]:
        """Return the arrays of the result over the keys of all devices."""
        ops, statistics = self.problem.ops, self.problem.statistics
        key_arrays = {name: x for name, x in operands.items() if name != "sink"}
        state = None
        for step in range(self.plan.ranks):
            if step:
                key_arrays |= self._from_previous_device({name: key_arrays[name] for name in self.operands("key")})
            new = parts.state_of_part(*self._part(step, key_arrays))
            state = new if state is None else online_softmax.merge(ops, state, new)
        return parts.arrays_of(parts.finish(ops, cast(RowState, state), operands.get("sink"), statistics))

    def _backward(self, operands: Arrays, outputs: Arrays, grads: Arrays) -> dict[str, Array]:
        """Return the gradients of the operands; key gradients travel around the ring with the keys."""

        def gradients_at(step: int, keys: Arrays) -> dict[str, Array]:
            shares, vjp = jax.vjp(functools.partial(self._share_of_part, step, outputs), {**operands, **keys})
            (gradients,) = vjp({name: grads[name] for name in shares})
            return {name: x.astype(self.problem.accumulator) for name, x in gradients.items()}

        keys = {name: operands[name] for name in self.operands("key")}
        totals = gradients_at(0, keys)
        # Gradients of the keys that the device holds stay; sums for the keys of other devices start at 0.
        returning = {name: jnp.zeros_like(totals[name]) for name in keys}
        for step in range(1, self.plan.ranks):
            keys = self._from_previous_device(keys)
            gradients = gradients_at(step, keys)
            # After the last step the gradients are at the owners of the keys.
            returning = self._from_previous_device({name: x + gradients.pop(name) for name, x in returning.items()})
            totals |= {name: totals[name] + x for name, x in gradients.items()}
        return {name: (totals[name] + returning.get(name, 0)).astype(x.dtype) for name, x in operands.items()}

    def _share_of_part(self, step: int, outputs: Arrays, operands: Arrays) -> dict[str, Array]:
        """Return functions of a step's part with the derivatives, at this point, of the merged `outputs`.

        With w = exp(lse_part - lse): out = sum w out_part, and the entropy H = sum w (H_part - log w). All w depend on
        lse_part, through lse too: `out` and H, which are constants here like lse, are therefore subtracted.
        """
        # The sink belongs to the first step.
        operands = {name: x for name, x in operands.items() if name != "sink" or step == 0}
        part, total = self._part(step, operands)[0](), outputs["row_max"] + outputs["log_denom"]
        log = part.log_sum_exp - jnp.where(jnp.isneginf(total), 0, total)
        w = jnp.exp(log)
        # As everywhere, log_denom has the gradient of the log-sum-exp.
        shares = {"out": w * (part.out - outputs["out"]), "log_denom": w}
        if "entropy" in part.statistics:
            # w log w is 0 where w is 0; its derivative is (1 + log w) dw.
            shares["entropy"] = w * (part.statistics["entropy"] + 1 - jnp.where(w == 0, 0, log) - outputs["entropy"])
        return shares


MODE_CLASSES: Final[dict[str, type[DeviceCall]]] = {"gather": Gather, "ring": Ring, "heads": Heads}
