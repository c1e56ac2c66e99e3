"""Rows of a whole sequence in arrays of one size for each device of a mesh axis, padded at their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnscore.backends.base import HostArray
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.parallel.shard import Shard, check_positions, check_shards

# Untyped in JAX.
_sharding: Any = jax.sharding
_typeof: Any = jax.typeof


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
    ShapeError, ArgumentError

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from attnscore.parallel import Shard
    >>> shards = [Shard.head_tail(6, rank, 2) for rank in range(2)]
    >>> split_rows(jnp.arange(6), shards, axis=0).tolist()
    [0, 1, 5, 2, 3, 4]
    """
    device_rows = DeviceRows(check_shards("shards", shards))
    check_positions(x, device_rows.length, axis)
    positions, length = device_rows.positions.reshape(-1), device_rows.length
    rows = jnp.take(_on_each_device(x, axis), jnp.asarray(np.minimum(positions, max(0, length - 1))), axis)
    is_real = jnp.asarray(positions < length).reshape(-1, *(1,) * (x.ndim - 1 - axis % x.ndim))
    return rows if device_rows.is_full else jnp.where(is_real, rows, jnp.zeros((), x.dtype))


def join_rows(x: Array, shards: Sequence[Shard], axis: int = -2) -> Array:
    """Return the rows of all devices, as `split_rows` orders them, in the order of the sequence, without padding.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from attnscore.parallel import Shard
    >>> shards = [Shard.contiguous(5, rank, 2) for rank in range(2)]
    >>> join_rows(split_rows(jnp.arange(5), shards, axis=0), shards, axis=0).tolist()
    [0, 1, 2, 3, 4]
    """
    device_rows = DeviceRows(check_shards("shards", shards))
    check_positions(x, len(device_rows.shards) * device_rows.rows, axis)
    return x if device_rows.is_in_order else jnp.take(_on_each_device(x, axis), jnp.asarray(device_rows.order), axis)


@dataclass(frozen=True)
class DeviceRows:
    """The rows of all devices, in arrays of one size."""

    shards: tuple[Shard, ...]

    @property
    def length(self) -> int:
        """Length of the whole sequence."""
        return self.shards[0].length

    @cached_property
    def rows(self) -> int:
        """Rows of each device's array, with padding."""
        return max(map(len, self.shards))

    @property
    def is_whole(self) -> bool:
        """Whether each device has the whole sequence."""
        return all(len(shard) == self.length for shard in self.shards)

    @property
    def is_full(self) -> bool:
        """Whether no device has padding."""
        return all(len(shard) == self.rows for shard in self.shards)

    @cached_property
    def positions(self) -> HostArray:
        """Global positions, (devices, rows); padding has positions beyond the sequence."""
        padding = self.length + np.arange(self.rows)
        return np.stack([np.append(x.positions(), padding[: self.rows - len(x)]) for x in self.shards])

    @cached_property
    def order(self) -> HostArray:
        """Index of each row of the sequence in the concatenated arrays of all devices."""
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
        return entry(self.positions, device)


def entry(table: HostArray, device: Array) -> Array:
    """Return the device's entry of a table; consecutive numbers are computed, which takes less memory."""
    if table.ndim == 2 and table.shape[-1] and (table - table[:, :1] == np.arange(table.shape[-1])).all():
        return jnp.take(jnp.asarray(table[:, 0]), device) + jnp.arange(table.shape[-1])
    return jnp.take(jnp.asarray(table), device, 0)


def rows_of_devices(name: str, shards: Sequence[Shard] | None, rows: int, axis_name: Any) -> DeviceRows:
    """Return the rows of all devices, checked against the `rows` of a device's array; None: consecutive parts."""
    count = jax.lax.axis_size(axis_name)
    if shards is None:
        return DeviceRows(tuple(Shard.contiguous(rows * count, rank, count) for rank in range(count)))
    device_rows = DeviceRows(check_shards(name, shards))
    if len(device_rows.shards) != count:
        raise ArgumentError(message(name, f"one shard for each of {count} devices", len(device_rows.shards)))
    if device_rows.rows != rows:
        raise ShapeError(message(name, f"at most {rows} positions a device, as its array has rows", device_rows.rows))
    return device_rows


def _on_each_device(x: Array, axis: int) -> Array:
    """Return an array with `axis` whole on each device, as `take` demands, where its type divides the axis."""
    sharding: Any = _typeof(x).sharding
    spec = (*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
    if not sharding.mesh.explicit_axes or spec[axis] is None:
        return x
    replicated = (None if i == axis % x.ndim else names for i, names in enumerate(spec))
    gathered: Array = _sharding.reshard(x, _sharding.NamedSharding(sharding.mesh, _sharding.PartitionSpec(*replicated)))
    return gathered
