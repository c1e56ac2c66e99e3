"""One operation with two programs: the CPU's own, and one in JAX's operations for every other platform.

- Which of them a compiled program gets is decided when it is lowered: a jitted function that a CPU runs natively can be
  lowered for a GPU or a TPU on the same machine. What is lowered for several platforms at once is portable.
- The portable program is traced where it is needed alone: tracing it takes several times as long as the CPU's. It is
  also what JAX differentiates: a custom call or a callback has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

_attention: Any = Primitive("attention")
_attention.multiple_results = True


def call(function: Callable[..., Any], portable: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Stage `function` of `arguments` for programs lowered for a CPU alone, and `portable` for others.

    Both take pytrees of arrays, and return tuples of arrays of the same shapes and dtypes. Where `function` closes over
    traced arrays, it is staged for every platform.
    """
    leaves, structure = jax.tree.flatten(arguments)

    def flat(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        return lambda *leaves: tuple(function(*jax.tree.unflatten(structure, leaves)))

    program = jax.make_jaxpr(flat(function))(*leaves)
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        # A mask or score of the caller's closes over arrays of the program around this one, which a primitive that is
        # lowered later cannot reach.
        staged = jax.custom_jvp(flat(function))
        staged.defjvp(lambda primals, tangents: jax.jvp(flat(portable), primals, tangents))
        return tuple(staged(*leaves))
    return tuple(_attention.bind(*leaves, program=program, portable=flat(portable)))


def _run(*arrays: Any, program: ClosedJaxpr, portable: Any) -> Any:
    return jaxpr_as_fun(program)(*arrays)


def _types(*arrays: Any, program: ClosedJaxpr, portable: Any) -> Any:
    return program.out_avals


def _differentiate(arrays: Sequence[Any], tangents: Sequence[Any], *, program: ClosedJaxpr, portable: Any) -> Any:
    return jax.jvp(portable, tuple(arrays), tuple(map(ad.instantiate_zeros, tangents)))


def _map(arrays: Sequence[Any], axes: Sequence[Any], *, program: ClosedJaxpr, portable: Any) -> Any:
    mapped = (jax.vmap(function, tuple(axes)) for function in (jaxpr_as_fun(program), portable))
    outputs = call(*mapped, *arrays)
    return outputs, (0,) * len(outputs)


def _lower(context: Any, *arrays: Any, program: ClosedJaxpr, portable: Any) -> Any:
    platforms = context.platforms or context.module_context.platforms
    if tuple(platforms) != ("cpu",):
        return mlir.lower_fun(portable, multiple_results=True)(context, *arrays)
    return mlir.core_call_lowering(context, *arrays, name="attention", call_jaxpr=program)


_attention.def_impl(_run)
_attention.def_abstract_eval(_types)
ad.primitive_jvps[_attention] = _differentiate
batching.primitive_batchers[_attention] = _map
mlir.register_lowering(_attention, _lower)
