"""JAX's gradient hook: reverse and forward mode, inside jit and outside.

- An attention op has its own VJP (``jax.custom_vjp``), which saves the output, row_max and log_denom.
- Forward mode and derivatives of that VJP use tiled attention in JAX's operations, which JAX differentiates itself.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from attnscore.backends.base import Array, DifferentiableOp, importable
from attnscore.backends.jax import platforms
from attnscore.backends.jax.pytrees import Static
from attnscore.backends.jax.sharding import axes_of, differing, is_placed, sharding_of_rows
from attnscore.backends.jax.tracers import FORWARD, RECORDED, REVERSE, SHARDED, kind_of, layers_of_all
from attnscore.backends.numpy import detached


def differentiable(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """``run.forward(operands)``, with ``run.backward`` as its gradient."""
    variables, with_variables = run.variables()
    # Arrays of masks may belong to another framework, or have strides that JAX does not take.
    constants = [x if isinstance(x, jax.Array) else importable(np.asarray(detached(x))) for x in variables]
    if (sharding := sharding_of_rows(operands)) is not None:
        # With automatic axes: custom calls and loops have no rules for explicit ones.
        def unsharded(operands: Sequence[Array], placed: Sequence[Array]) -> tuple[Array, ...]:
            remaining = iter(placed)
            return differentiable(with_variables([next(remaining) if is_placed(x) else x for x in constants]), operands)

        placed = [x for x in constants if is_placed(x)]
        return tuple(jax.sharding.auto_axes(unsharded, out_sharding=sharding)(tuple(operands), placed))
    axes = axes_of((*operands, *constants))
    operands = [differing(x, axes) for x in operands]
    kinds = set(map(kind_of, layers_of_all((*operands, *constants))))
    # custom_vjp has no forward mode; JAX differentiates the operations of a kernel that is not native.
    # An eager `shard_map` in which nothing is differentiated needs no VJP, and refuses one with symbolic zeros.
    if FORWARD in kinds or (SHARDED in kinds and not kinds & {REVERSE, RECORDED}):
        return run.forward(operands)
    return with_own_vjp(run, operands, constants, with_variables)


def with_own_vjp(
    run: DifferentiableOp,
    operands: Sequence[Array],
    constants: Sequence[Array],
    with_constants: Callable[[Sequence[Array]], DifferentiableOp],
) -> tuple[Array, ...]:
    """``run.forward(operands)``, with ``run.backward`` as its gradient in reverse mode.

    JAX calls back ``with_constants(constants)``, as the op must not close over traced arrays.
    """

    def call(method: str, constants: Sequence[Array], *arguments: Any, requested: Sequence[bool] | None = None) -> Any:
        """Call a method of the op: at once, or in a program, where derivatives and other platforms take `streaming`.

        A program computes all gradients, whatever is `requested`: its two versions return arrays, and no None.
        """
        if not any(kind_of(x) == RECORDED for x in layers_of_all(jax.tree.leaves((constants, arguments)))):
            selection = () if requested is None else (requested,)
            return getattr(with_constants(constants), method)(*arguments, *selection)
        return platforms.call(
            lambda constants, *arguments: getattr(with_constants(constants), method)(*arguments),
            lambda constants, *arguments: getattr(with_constants(constants).streaming(), method)(*arguments),
            *(constants, *arguments),
        )

    def forward(arrays: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, Any]:
        requested = Static([x.perturbed for x in arrays])
        arrays, constants = (tuple(x.value for x in primals) for primals in (arrays, constants))
        outputs = call("forward", constants, arrays)
        return outputs, (arrays, constants, outputs[: run.saved_count], requested)

    def backward(saved: Any, grads: Sequence[Any]) -> tuple[Any, None]:
        arrays, constants, outputs, requested = saved
        # An output without a use would otherwise be an array of zeros in the program, which a kernel reads.
        grads = [None if isinstance(x, SymbolicZero) else x for x in grads[: run.differentiable_count]]
        return tuple(call("backward", constants, arrays, outputs, tuple(grads), requested=requested.value)), None

    function = jax.custom_vjp(lambda arrays, constants: call("forward", constants, arrays))
    function.defvjp(forward, backward, symbolic_zeros=True)
    outputs: tuple[Array, ...] = function(tuple(operands), tuple(constants))
    return outputs


@jax.custom_jvp
def product_of_rows(x: Array, matrix: Array, *bias: Array) -> Array:
    """Return ``x @ matrix + bias``; rows that are not finite pass no gradient on.

    Zeros in place of such rows would take another array of the size of `x`, as XLA fuses nothing into a product, and in
    programs without gradients too. The rule below puts them into the tangent alone.
    """
    product = jnp.matmul(x, matrix)
    return product + jnp.expand_dims(bias[0], tuple(range(product.ndim - 1))) if bias else product


def _differentiate_product(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Array]:
    """Return `product_of_rows` and its tangent, 0 for the rows that are not finite."""
    product, (x, matrix, *_) = product_of_rows(*primals), primals
    # No product with a non-finite row is finite: one column shows it within a fused loop.
    finite = jnp.isfinite(product[..., :1])
    of_x, of_matrix, *of_bias = (None if isinstance(tangent, SymbolicZero) else tangent for tangent in tangents)
    terms = [jnp.expand_dims(x, tuple(range(product.ndim - 1))) for x in of_bias if x is not None]
    if of_x is not None:
        terms.append(jnp.matmul(of_x, matrix))
    if of_matrix is not None:
        # In the gradient of the matrix XLA transposes an operand with two axes of rows while computing its entries:
        # (256, 16) rows of 64 take 1630 us, on one axis 635 (Zen 4, 2026-11-26).
        clean = jnp.where(jnp.isfinite(x), x, 0.0)
        if of_matrix.ndim == 2:
            clean = jnp.reshape(clean, (math.prod(x.shape[:-1]), x.shape[-1]))
        terms.append(jnp.reshape(jnp.matmul(clean, of_matrix), product.shape))
    tangent = functools.reduce(operator.add, terms)
    return product, jnp.where(finite, tangent, jnp.zeros_like(product))


product_of_rows.defjvp(_differentiate_product, symbolic_zeros=True)
# Called eagerly, where each operation takes 20 us and more.
compiled_product_of_rows = jax.jit(product_of_rows)
