"""What the type of an array says of several devices.

- Inside ``shard_map`` it has the axes of the mesh along which numbers differ from device to device. What is made of
  several arrays differs along the axes of all, and a loop carries what differs as it began. Arrays of one call are made
  to differ alike before it: gradients then have their types, and JAX sums those of arrays that did not differ.
- On a mesh with explicit axes it has the sharding. Neither custom calls nor loops have rules for that: a call runs as
  on a mesh that leaves it to the compiler, and its results are given the sharding of the queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax

Axes = frozenset[str]
_NONE: Axes = frozenset()


def axes_of(arrays: Iterable[Any]) -> Axes:
    """The axes of the mesh along which some of these differ: none outside ``shard_map``."""
    return _NONE.union(*(_axes(x) for x in arrays if isinstance(x, jax.core.Tracer)))


def differing(x: Any, axes: Axes) -> Any:
    """`x` as one that differs along `axes`."""
    missing = tuple(sorted(axes - axes_of((x,)))) if axes else ()
    if not missing:
        return x
    words: Any = lax
    # The second is the older name.
    return words.pcast(x, missing, to="varying") if hasattr(words, "pcast") else words.pvary(x, missing)


def sharding_of_rows(operands: Sequence[Any]) -> jax.sharding.PartitionSpec | None:
    """How (*lead, head, group) of the queries, the first of `operands`, are sharded by their type; None where not."""
    query = operands[0]
    if not isinstance(query, jax.core.Tracer) or not jax.sharding.get_abstract_mesh().explicit_axes:
        return None
    return jax.sharding.PartitionSpec(*jax.typeof(query).sharding.spec[:-2])  # type: ignore[no-untyped-call]  # JAX's own


def is_placed(x: Any) -> bool:
    """Whether the type of `x` names a mesh."""
    return isinstance(x, jax.Array) and not jax.typeof(x).sharding.mesh.empty


def _axes(x: Any) -> Axes:
    kind: Any = jax.typeof(x)
    # The second is the older name.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", _NONE)
