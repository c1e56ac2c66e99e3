"""`attend` under ``torch.compile``, ``torch.export`` and ``torch.jit.trace``, as one operator for the whole call.

- ``attnscore::attend`` and ``attnscore::attend_backward`` take tensors, numbers and strings alone. Scores, masks and
  the other arguments are written as one expression, with slots for tensors and numbers: tensors stay in the graph,
  and a number that changes (a temperature, the offset of a cache) causes no recompilation.
- The operator runs the code of eager mode; lengths are read, tiles planned and errors raised there, at run time.
- A custom score or mask has no such expression and runs outside the graph, by a graph break, as jagged tensors do. A
  trace has no breaks, and would keep the result as a constant: there the call is refused.
- A gradient of the gradient is not compiled; in eager mode there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnscore import api, backends, kernels, scores
from attnscore.analysis import weights as blocks
from attnscore.backends import torch_private as private
from attnscore.backends.base import accumulator
from attnscore.base.arguments import check_flag
from attnscore.errors import FrameworkError, message
from attnscore.integrations import torch_export
from attnscore.integrations.torch_expressions import SAVED, Slots, can_be_written, is_exporting, read
from attnscore.kernels import SinglePlan, tiling
from attnscore.problem.problem import build_problem, requested_statistics
from attnscore.problem.statistics import DIFFERENTIABLE, AttentionStats, in_returned_dtype
from attnscore.scores.base import Pullback

_OPS = backends.load("torch")


# ---------------------------------------------------------------- the operators


def _plan_of(
    query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any], *, pullback: bool = False
) -> tuple[SinglePlan, Pullback | None]:
    """Return the plan of a call of an operator, and the VJP of its score, if `pullback`."""
    kernel, seed = arguments.pop("kernel"), arguments.pop("seed")
    arguments["seed"] = int(seed) if isinstance(seed, Tensor) else seed
    problem, score_pullback = build_problem(query, key, value, **arguments, pullback=pullback)
    chosen = kernels.choose(kernel, problem)
    if pullback and not chosen.has_vjp:
        chosen = kernels.table()["streaming"]
    return SinglePlan(chosen, problem, tiling.plan(problem)), score_pullback


def _gradients(plan: SinglePlan, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, Any]:
    """Return the gradients of the operands, without autograd, which an operator does not have."""
    problem, names = plan.problem, (*SAVED, *plan.problem.statistics)

    def row(rows: Tensor | None, name: str) -> Any:
        """Return one of the rows of an operator's second result, None where it has no such row."""
        has_row = rows is not None and name in names
        return blocks.row_gradient(problem, name, cast(Tensor, rows)[names.index(name)] if has_row else None)

    def canonical(arrays: Sequence[Tensor | None], denominator: str) -> list[Any]:
        """Return results, or their gradients, on the canonical axes; log_denom has the gradient of the log-sum-exp."""
        out, rows, weights = arrays
        entropies = [row(rows, "entropy")] if "entropy" in names else []
        matrices = [] if problem.matrix is None else [blocks.row_gradient(problem, "grad_weights", weights)]
        return [blocks.row_gradient(problem, "grad_out", out), row(rows, denominator), *entropies, *matrices]

    saved = (*canonical(outputs, "log_denom"), row(outputs[1], "row_max"))
    operands = plan.operands()
    gradients = plan.backward(tuple(operands.values()), saved, canonical(grads, "log_sum_exp"))
    return dict(zip(operands, gradients, strict=True))


@torch.library.custom_op("attnscore::attend", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, arrays: Sequence[Tensor], integers: Sequence[int], expression: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output, an array whose rows are the values saved for the backward and the statistics, the weights.

    Weights are in the accumulator dtype; an empty array (0,) unless the caller requests them.
    """
    arguments = read(expression, arrays=arrays, integers=integers)
    with _OPS.numeric_scope():
        plan, _ = _plan_of(query, key, value, arguments)
        result, layout = plan(), plan.problem.layout
        rows = [result.log_denom, result.row_max, *(result.statistics[name] for name in plan.problem.statistics)]
        out = layout.from_canonical(_OPS, result.out.contiguous())
        weights = rows[0].new_empty(0)
        if result.matrix is not None:
            weights = layout.scores_from_canonical(_OPS, result.matrix).contiguous()
        return out, torch.stack([layout.rows_from_canonical(_OPS, x[..., 0]) for x in rows]), weights


@_attend.register_fake
def _shapes(
    query: Tensor, key: Tensor, value: Tensor, arrays: Sequence[Tensor], integers: Sequence[int], expression: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return arrays like the results of `_attend`, from shapes alone."""
    arguments = read(expression, ("head_axis", "statistics", "matrix"), integers=integers)
    axes = max(query.dim(), key.dim(), value.dim())
    swapped = axes >= 4 and arguments["head_axis"] == -2
    shapes = [(1,) * (axes - x.dim()) + tuple(x.shape) for x in (query, key, value)]
    if swapped:
        shapes = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes]
    trailing = 3 if axes >= 4 else 2
    # Not NumPy's: it would make numbers of symbolic sizes.
    lead = torch.broadcast_shapes(*(x[:-trailing] for x in shapes))  # type: ignore[no-untyped-call]  # torch's own
    heads = [next((shape[-3] for shape in shapes if shape[-3] != 1), 1)] if axes >= 4 else []
    rows = (*lead, *heads, shapes[0][-2])
    out = query.new_empty((*rows, shapes[2][-1]))
    out = out.transpose(-3, -2) if swapped else out
    count = len(SAVED) + len(arguments["statistics"])
    sum_dtype = getattr(torch, accumulator(_OPS.dtype(query)))
    weights = (0,) if arguments.get("matrix") is None else (*rows, shapes[1][-2])
    return out, query.new_empty((count, *out.shape[:-1]), dtype=sum_dtype), query.new_empty(weights, dtype=sum_dtype)


@torch.library.custom_op("attnscore::attend_backward", mutates_args=())
def _attend_backward(
    grad_out: Tensor | None,
    grad_rows: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    rows: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor],
    integers: Sequence[int],
    expression: str,
    requested: Sequence[bool],
) -> list[Tensor]:
    """Compute the gradients of query, key, value and arrays that are requested."""
    # Arrays are distinguished by identity, and one may be passed twice.
    arrays = [x.view_as(x) for x in arrays]
    arguments = read(expression, arrays=arrays, integers=integers)
    inputs = {"query": query, "key": key, "value": value, "bias": arguments["bias"], "sink": arguments["sink"]}
    with _OPS.numeric_scope():
        plan, pullback = _plan_of(query, key, value, arguments, pullback=True)
        gradients = _gradients(plan, (out, rows, weights), (grad_out, grad_rows, grad_weights))
        grads = api.gradients(plan.problem, cast(Pullback, pullback)(gradients), gradients, inputs)
    score_gradients = [(inputs["bias"], grads.bias), (inputs["sink"], grads.sink)]
    score_gradients += [(x, grads.score[name]) for name, x in scores.arrays_of(plan.problem.score).items()]
    array_gradients = [next((grad for x, grad in score_gradients if x is array), None) for array in arrays]
    pairs = zip((query, key, value, *arrays), (grads.query, grads.key, grads.value, *array_gradients), strict=True)
    return [
        torch.zeros_like(x) if grad is None else _with_strides_of(x, grad)
        for (x, grad), is_requested in zip(pairs, requested, strict=True)
        if is_requested
    ]


def _with_strides_of(x: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` in separate memory, with the strides of `_gradient_shapes`; a copy only where needed."""
    owns_memory = grad.untyped_storage().nbytes() == grad.nbytes
    return grad if owns_memory and grad.is_contiguous() and x.is_contiguous() else torch.empty_like(x).copy_(grad)


@_attend_backward.register_fake
def _gradient_shapes(*arguments: Any) -> list[Tensor]:
    *_, query, key, value, arrays, _, _, requested = arguments
    return [torch.empty_like(x) for x in itertools.compress((query, key, value, *arrays), requested)]


# The tag lets a compiler replay the draw.
@torch.library.custom_op("attnscore::draw_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_seed(apart: Tensor) -> Tensor:
    """Draw a dropout seed; `apart` is new at each draw, as the compiler joins operators of equal arguments."""
    return torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")


@_draw_seed.register_fake
def _seed_shape(apart: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _replayed_seed() -> Tensor:
    return cast(Tensor, torch.ops.attnscore.draw_seed(torch.empty(0, device="cpu")))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, arrays, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, query, key, value, *arrays)
    ctx.non_tensors = rest


def _backward(ctx: Any, *grads_out: Tensor | None) -> tuple[Any, ...]:
    *outputs, query, key, value = ctx.saved_tensors[:6]
    arrays = ctx.saved_tensors[6:]
    of_arrays = list(ctx.needs_input_grad[3]) if arrays else []
    requested = [*ctx.needs_input_grad[:3], *of_arrays]
    if all(grad is None for grad in grads_out):
        return (None,) * 6
    gradients = iter(_attend_backward(*grads_out, *outputs, query, key, value, arrays, *ctx.non_tensors, requested))
    grads = [next(gradients) if is_requested else None for is_requested in requested]
    return *grads[:3], grads[3:], None, None


_attend.register_autograd(_backward, setup_context=_save_inputs)


# ---------------------------------------------------------------- entry point


def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    """Run `attnscore.attend` while a compiler or a trace records it."""
    score = arguments["score"]
    if isinstance(score, (str, scores.Wrapper)) and _is_registered(score):
        arguments["score"] = scores.resolve(score)
    is_possible = all(isinstance(x, Tensor) and not x.is_nested for x in (query, key, value))
    # Operators would silently lose the tangents of forward mode, and have no rule for torch.func.
    is_possible = is_possible and private.dual_levels._current_level < 0 and not private.are_transforms_active()
    is_possible = is_possible and all(can_be_written(x) for x in arguments.values())
    if torch_export.is_active() and (torch.onnx.is_in_onnx_export() or not is_possible):
        return torch_export.attend(query, key, value, **arguments)
    if torch.onnx.is_in_onnx_export():
        # A second attempt of the exporter, after it failed in the first.
        hint = "the cause is the error of the exporter's first attempt, which its report has"
        raise FrameworkError(message("attend", "an export to ONNX that is not strict", "a strict one", hint=hint))
    if not is_possible:
        if torch.compiler.is_compiling():
            return _attend_outside_graph(query, key, value, **arguments)
        if isinstance(query, Tensor):
            expected = "a call that one operator can stand for, while torch.jit.trace or make_fx records"
            got = "a score or mask of your own, a jagged tensor, an array of another framework, or torch.func"
            hint = "torch.compile breaks its graph there and goes on"
            raise FrameworkError(message("attend", expected, got, hint=hint))
        with private.outside_trace():
            return api.attend(query, key, value, **arguments)
    has_weights = check_flag("return_weights", arguments.pop("return_weights"))
    arguments["matrix"] = "weights" if has_weights else None
    arguments["statistics"] = statistics = requested_statistics(arguments.pop("return_stats"), arguments["normalizer"])
    if _OPS.has_autocast(query):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = [x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value)]
    seed, slots = arguments.pop("seed"), Slots()
    written = {name: slots.written(x) for name, x in arguments.items()}
    if arguments["dropout"] != 0 and seed is None:
        # Drawn in the graph: an operator has no state. The compiler may compute any part of the graph again in the
        # backward, but restores the generator for random operators of a checkpoint alone. In a graph without gradients
        # it raises for such an operator.
        is_replayed = torch.compiler.is_dynamo_compiling() and not is_exporting()
        if is_replayed and _OPS.needs_grad(query, key, value, *slots.arrays):
            seed = checkpoint(_replayed_seed, use_reentrant=False)
        else:
            seed = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, int):
        seed %= 2**63  # the seed of `attend`, in 64 bits
    written["seed"] = slots.written(seed)
    expression = f"attend({', '.join(f'{name}={text}' for name, text in written.items())})"
    out, rows, weights = _attend(query, key, value, slots.arrays, slots.integers, expression)
    results: list[Any] = [out]
    if has_weights:
        results.append(weights.to(out.dtype))
    if statistics:
        named = {}
        for i, name in enumerate(statistics, len(SAVED)):
            named[name] = rows[i] if name in DIFFERENTIABLE else in_returned_dtype(_OPS, name, rows[i].detach())
        results.append(AttentionStats(**named))
    return results[0] if len(results) == 1 else tuple(results)


def _is_registered(score: Any) -> bool:
    """Return whether a name, or the one inside wrappers, is registered; if not, the ordinary call raises."""
    while isinstance(score, scores.Wrapper):
        score = score.score
    return not isinstance(score, str) or score in scores.registered()


@torch.compiler.disable(reason="attnscore: no operator for a custom score or mask, jagged tensors, and torch.func")  # type: ignore[untyped-decorator, no-untyped-call]  # torch's own
def _attend_outside_graph(*arrays: Tensor, **arguments: Any) -> Any:
    return api.attend(*arrays, **arguments)


backends.COMPILED["torch"] = attend
