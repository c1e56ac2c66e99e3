"""Arrays on several devices: mesh axes that an array's type names.

- Inside ``shard_map`` a type has the mesh axes along which values vary from device to device. A result varies along the
  axes of all its operands, and the carry of a loop must keep its type. The arrays of a call are therefore cast to vary
  along the same axes: gradients then have their types, and JAX sums the gradients of arrays that did not vary.
- On a mesh with explicit axes a type has the sharding. Neither custom calls nor loops have rules for it: a call runs
  with automatic axes, and its results get the sharding of the queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax

Axes = frozenset[str]


def axes_of(arrays: Iterable[Any]) -> Axes:
    """Return the mesh axes along which any of these vary: none outside ``shard_map``."""
    types: list[Any] = [jax.typeof(x) for x in arrays if isinstance(x, jax.core.Tracer)]
    return Axes().union(*(kind.manual_axis_type.varying for kind in types))


def differing(x: Any, axes: Axes) -> Any:
    """Cast `x` to vary along `axes`."""
    missing = tuple(sorted(axes - axes_of((x,)))) if axes else ()
    return lax.pcast(x, missing, to="varying") if missing else x


def sharding_of_rows(operands: Sequence[Any]) -> jax.sharding.PartitionSpec | None:
    """Return the sharding of (*lead, head, group) of the queries (operand 0); None without explicit axes."""
    query = operands[0]
    if not isinstance(query, jax.core.Tracer) or not jax.sharding.get_abstract_mesh().explicit_axes:
        return None
    return jax.sharding.PartitionSpec(*jax.typeof(query).sharding.spec[:-2])  # type: ignore[no-untyped-call]  # JAX's own


def is_placed(x: Any) -> bool:
    """Whether the type of `x` names a mesh."""
    return isinstance(x, jax.Array) and not jax.typeof(x).sharding.mesh.empty
