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
_NONE: Axes = frozenset()


def axes_of(arrays: Iterable[Any]) -> Axes:
    """Return the mesh axes along which any of these vary: none outside ``shard_map``."""
    return _NONE.union(*(_axes(x) for x in arrays if isinstance(x, jax.core.Tracer)))


def differing(x: Any, axes: Axes) -> Any:
    """Cast `x` to vary along `axes`."""
    missing = tuple(sorted(axes - axes_of((x,)))) if axes else ()
    if not missing:
        return x
    module: Any = lax
    # `pvary` is the name in older versions of JAX.
    return module.pcast(x, missing, to="varying") if hasattr(module, "pcast") else module.pvary(x, missing)


def sharding_of_rows(operands: Sequence[Any]) -> jax.sharding.PartitionSpec | None:
    """Return the sharding of (*lead, head, group) of the queries (operand 0); None without explicit axes."""
    query = operands[0]
    if not isinstance(query, jax.core.Tracer) or not jax.sharding.get_abstract_mesh().explicit_axes:
        return None
    return jax.sharding.PartitionSpec(*jax.typeof(query).sharding.spec[:-2])  # type: ignore[no-untyped-call]  # JAX's own


def is_placed(x: Any) -> bool:
    """Whether the type of `x` names a mesh."""
    return isinstance(x, jax.Array) and not jax.typeof(x).sharding.mesh.empty


def _axes(x: Any) -> Axes:
    kind: Any = jax.typeof(x)
    # `vma` is the name in older versions of JAX.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", _NONE)
