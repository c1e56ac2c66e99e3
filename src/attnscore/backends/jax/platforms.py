"""One operation with two programs: the CPU's own, and one in JAX's operations for every other platform.

- Which of them a compiled program gets is decided when it is lowered: a jitted function that a CPU runs natively can be
  lowered for a GPU or a TPU on the same machine. A program lowered for several platforms at once is portable.
- The portable program is traced only where it is needed: tracing it takes several times as long as the CPU's. JAX
  differentiates the portable program: a custom call or a callback has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
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
    # As a function: JAX 0.12 asks primitives that hold a program for a rule to lower the program.
    native = jaxpr_as_fun(program)
    return tuple(_attention.bind(*leaves, native=native, portable=flat(portable), types=tuple(program.out_avals)))


def _differentiate(arrays: Sequence[Any], tangents: Sequence[Any], *, native: Any, portable: Any, types: Any) -> Any:
    return jax.jvp(portable, tuple(arrays), tuple(map(ad.instantiate_zeros, tangents)))


def _map(arrays: Sequence[Any], axes: Sequence[Any], *, native: Any, portable: Any, types: Any) -> Any:
    outputs = call(*(jax.vmap(function, tuple(axes)) for function in (native, portable)), *arrays)
    return outputs, (0,) * len(outputs)


def _lower(context: Any, *arrays: Any, native: Any, portable: Any, types: Any) -> Any:
    platforms = context.platforms or context.module_context.platforms
    function = native if tuple(platforms) == ("cpu",) else portable
    return mlir.lower_fun(function, multiple_results=True)(context, *arrays)


_attention.def_impl(lambda *arrays, native, **_: native(*arrays))
_attention.def_abstract_eval(lambda *_, types, **__: types)
ad.primitive_jvps[_attention] = _differentiate
batching.primitive_batchers[_attention] = _map
mlir.register_lowering(_attention, _lower)
