"""Execution plans, cached by the signature of a call, so that a repeated call skips all checks.

- A signature holds everything that building a plan reads, types included (``True == 1 == 1.0``), so a cached plan gives
  the same results as a new one.
- A call that fails its checks has no plan, so each repetition runs and fails the same checks.
- A score named by a string enters the signature as its class. A name registered for a function may give another score
  at each call, so such a call has no signature.
- Masks enter by the values of their numbers and arrays: offsets, lengths, ids. Only a boolean array that is the whole
  mask, and valid lengths, enter by shape and strides, and each call reads their values.
- A score that projects or normalises queries and keys is lowered at each call, to a score of the computed arrays that
  has a plan of its own (`plans/lowered.py`).
- A cached plan holds no array of a caller. A call without a signature gets a plan for itself alone.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable
from typing import Any

import numpy as np

from attnscore import backends, kernels, scores
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base import thresholds
from attnscore.base.arguments import CallArguments, check_flag
from attnscore.base.cache import BoundedCache
from attnscore.kernels import Plan, SinglePlan, tiling
from attnscore.kernels.native.plan import NativePlan
from attnscore.masks import Dense
from attnscore.masks.cached import numbers_of
from attnscore.plans.lowered import LoweredPlan, lower
from attnscore.plans.padding import may_save
from attnscore.problem.problem import Problem, build_problem, wanted_statistics
from attnscore.scores import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot
from attnscore.scores.arrays import arrays_of, with_arrays
from attnscore.scores.forms import InnerForm

PLANS: BoundedCache[Plan] = BoundedCache(256, thresholds.PLANNED_HEADS)
_NUMBERS = (int, float)
_LENS_DTYPES = ("int32", "int64")
# Of NumPy's masks and lengths, in the byte order of the machine.
_DTYPES_READ = {np.dtype(name): name for name in ("bool", *_LENS_DTYPES)}


def signature(arguments: CallArguments, options: tuple[Hashable, ...]) -> Hashable | None:
    """Return the cache key of a call's plan, or None where it cannot be cached; `options` are the other arguments."""
    query, key, value, score, mask, valid_lens, bias, sink, seed = arguments
    kind = type(query)
    if (found := _score_signature(score)) is None or (ops := backends.of_type(kind)) is None:
        return None
    for x in (key, value):
        # Some may be parameters, or differentiated, and the others not.
        if type(x) is not kind and backends.of_type(type(x)) is not ops:
            return None
    _, _, _, dropout, *_ = options
    if type(dropout) is float and dropout and seed is None and ops.draws_seeds_by_example():
        # Inside a vmap each example may draw a seed of its own, which no plan takes.
        return None
    of_score, parameters = found
    arrays = [query, key, value, *parameters]
    parts: list[Hashable] = [of_score, bias is None, sink is None, *map(type, options), options]
    if bias is not None or sink is not None or seed is not None:
        if type(seed) not in (int, type(None)):
            return None
        extras = [x for x in (bias, sink) if x is not None]
        # By backend and not by type, unlike key and value: a learned bias is a torch.nn.Parameter, the query a tensor.
        if any(backends.of_type(type(x)) is not ops for x in extras):
            return None
        arrays += extras
    if mask is not None or valid_lens is not None:
        array_read = _read_at_each_call(ops, query, mask, valid_lens)
        if array_read is None:
            of_mask = numbers_of(mask, valid_lens)
            if of_mask is None:
                return None
            parts.append(of_mask)
        else:
            parts.append("mask" if valid_lens is None else "valid_lens")
            if type(array_read) is np.ndarray and kind is not np.ndarray:
                parts += (array_read.shape, array_read.strides)
            else:
                arrays.append(array_read)
    of_arrays = ops.signature(arrays)
    if of_arrays is None and _is_product(of_score):
        of_arrays = ops.device_signature(arrays)
    if of_arrays is None:
        return None
    parts.append(of_arrays)
    return tuple(parts)


def _read_at_each_call(ops: Backend, query: Array, mask: Any, lens: Any) -> Array | None:
    """Return the boolean mask or the valid lengths whose values each call of a plan reads; None where there is neither.

    Lengths combined with another mask, and those of two-axis inputs, enter the signature by value instead.
    """
    x = mask if lens is None else lens
    if type(x) is np.ndarray:
        dtype = _DTYPES_READ.get(x.dtype) if x.flags.aligned else None
    elif backends.of_type(type(x)) is ops:
        dtype = ops.dtype(x)
    else:
        return None
    if lens is None:
        return x if dtype == "bool" else None
    is_read = mask is None and len(query.shape) > 2 and len(x.shape) in (1, 2)
    return x if is_read and dtype in _LENS_DTYPES else None


def _score_signature(score: Any) -> tuple[Hashable, tuple[Array, ...]] | None:
    """Return what planning reads of a score, and its arrays; None where each call with it is planned anew.

    A name enters as the class that it stands for. A score with parameters per head has no signature: a lowered call
    works on the caller's axes, where the axis of heads depends on `head_axis`.
    """
    kind: Any = type(score)
    if kind is str:
        found = scores.named(score)
        return (found, ()) if isinstance(found, type) else None
    if kind is ScaledDot or kind is Cosine or kind is Gaussian:
        number = score.bandwidth if kind is Gaussian else score.scale
        if kind is Gaussian and getattr(number, "shape", None) == ():
            return (Gaussian,), (number,)
        if number is not None and type(number) not in _NUMBERS:
            return None
        unit_keys = kind is Cosine and score.unit_keys
        return (kind, type(number), number, type(unit_keys), unit_keys), ()
    if kind is Dot:
        return Dot, ()
    if kind is Bilinear:
        return (Bilinear, (score.W,)) if len(getattr(score.W, "shape", ())) == 2 else None
    if kind is Additive:
        slope, arrays = score.negative_slope, (score.W_q, score.W_k, score.bias)
        if type(score.activation) is not str or type(slope) not in _NUMBERS:
            return None
        signature = (Additive, score.activation, type(slope), slope, *(x is None for x in arrays))
        given = tuple(x for x in arrays if x is not None)
        axes = [len(getattr(x, "shape", ())) for x in (score.w_v, *arrays)]
        if given and (axes[0] != 1 or axes[1] > 2 or axes[2] > 2 or axes[3] > 1):
            return None
        return signature, (score.w_v, *given)
    return None


def _is_product(of_score: Any) -> bool:
    """Whether the signature of a score is that of a product of queries and keys, times a number at most."""
    return of_score in (Dot, ScaledDot) or (type(of_score) is tuple and of_score[0] is ScaledDot)


def planned(
    cache_key: Hashable | None, arguments: CallArguments, options: tuple[Any, ...]
) -> tuple[Plan, CallArguments]:
    """Check a call that has no plan yet; return its plan, and its arguments with the seed where one was drawn.

    Raises what `attnscore.attend` does. `cache_key` is the `signature` of the call, `options` are those of it.
    """
    ops = backends.of_type(type(arguments.query))
    # What a score computes while a plan is built is recorded by no autograd: a plan computes it anew, and a checkpoint
    # that runs the first call again would find other saved tensors.
    if cache_key is not None and ops is not None and _records(ops, arguments):
        plan, given = _planned(cache_key, _without_gradients(ops, arguments), options)
        arguments = arguments._replace(seed=given.seed)
        if plan.is_reusable:
            return plan, arguments
    return _planned(cache_key, arguments, options)


def with_held_arrays(arguments: CallArguments) -> CallArguments | None:
    """Return the arguments of a call with the arrays that variables hold in their place; None without variables."""
    query, key, value, score, mask, valid_lens, bias, sink, seed = arguments
    given = query, key, value, mask, valid_lens, bias, sink
    found = tuple(map(backends.held, given))
    held_score = score if type(score) is str else with_arrays(score, backends.held)
    if held_score is score and all(map(operator.is_, given, found)):
        return None
    query, key, value, mask, valid_lens, bias, sink = found
    return CallArguments(query, key, value, held_score, mask, valid_lens, bias, sink, seed)


def _records(ops: Backend, arguments: CallArguments) -> bool:
    """Whether autograd would record what the score of a call computes while its plan is built."""
    score = arguments.score
    computes = score == "cosine" if type(score) is str else type(score) in (Additive, Bilinear, Cosine, Gaussian)
    if not (computes and ops.has_autodiff):
        return False
    arrays = (arguments.query, arguments.key, *arrays_of(score).values())
    # Arrays of another framework are for the checks of the call to name.
    return all(backends.of_type(type(x)) is ops for x in arrays) and ops.needs_grad(*arrays)


def _without_gradients(ops: Backend, arguments: CallArguments) -> CallArguments:
    """Return the arguments of a call with detached arrays."""
    query, key, value, score, mask, valid_lens, bias, sink, seed = arguments
    query, key, value = map(ops.stop_gradient, (query, key, value))
    bias, sink = (ops.stop_gradient(x) if backends.of_type(type(x)) is ops else x for x in (bias, sink))
    score = with_arrays(score, ops.stop_gradient) if type(score) is not str else score
    return CallArguments(query, key, value, score, mask, valid_lens, bias, sink, seed)


def _planned(
    cache_key: Hashable | None, arguments: CallArguments, options: tuple[Any, ...]
) -> tuple[Plan, CallArguments]:
    query, key, value, score, mask, valid_lens, bias, sink, seed = arguments
    head_axis, normalizer, kernel, dropout, return_weights, return_stats = options
    problem, _ = build_problem(
        query, key, value, score=score, mask=mask, valid_lens=valid_lens, bias=bias, sink=sink, dropout=dropout,
        seed=seed, head_axis=head_axis, normalizer=normalizer,
        statistics=wanted_statistics(return_stats, normalizer),
        matrix="weights" if check_flag("return_weights", return_weights) else None,
    )  # fmt: skip
    plan = build(cache_key, problem, kernel, arguments)
    # `build_problem` has drawn a seed where the caller gave none; a plan that is given None would draw another.
    return plan, arguments if problem.dropout is None else arguments._replace(seed=problem.dropout.seed)


def build(cache_key: Hashable | None, problem: Problem, kernel: str, arguments: CallArguments) -> Plan:
    """Return the plan of a problem, cached under `cache_key` where its kernel can reuse it for other arrays."""
    tiles, chosen = tiling.plan(problem), kernels.choose(kernel, problem)
    if cache_key is None:
        return SinglePlan(chosen, problem, tiles)
    arrays = _arrays_of(arguments, problem)
    plan = chosen.prepare(problem, tiles, arrays)
    if not plan.is_reusable and _is_lowered(problem):
        plan = _build_lowered(problem, kernel, arrays) or plan
    return PLANS.get_or_compute(cache_key, lambda: plan, plan.heads) if plan.is_reusable else plan


def _arrays_of(arguments: CallArguments, problem: Problem) -> dict[str, Array]:
    """Return the caller's arrays that each call of a plan passes, by name."""
    query, key, value, _, mask, valid_lens, bias, sink, _ = arguments
    score = problem.score
    found = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "w_v": score.w_v if type(score) is Additive else None,
        "bandwidth": score.bandwidth if type(score) is Gaussian and backends.is_array(score.bandwidth) else None,
        "mask": mask if isinstance(problem.mask, Dense) else None,
        "valid_lens": None if valid_lens is None else _read_at_each_call(problem.ops, query, mask, valid_lens),
        "sink": sink,
    }
    return {name: x for name, x in found.items() if x is not None}


def _build_lowered(problem: Problem, kernel: str, arrays: dict[str, Array]) -> LoweredPlan | None:
    """Return the plan of a call whose score is lowered, or None where the kernel has none for the lowered call."""
    ops, score, form, dropout = problem.ops, problem.score, problem.form, problem.dropout
    computed = form.query is not problem.query, form.key is not problem.key
    query, key = (ops.stop_gradient(arrays[name]) for name in ("query", "key"))
    query, key, *w_v = lower(ops, score, query, key, computed)
    lowered: Any = ScaledDot(form.scale) if isinstance(form, InnerForm) else None
    if w_v:
        lowered = Additive(w_v[0], activation=score.activation, negative_slope=score.negative_slope)
    given = {**arrays, "query": query, "key": key}
    lowered_problem, _ = build_problem(
        query, key, arrays["value"], score=lowered, mask=problem.mask,
        bias=arrays.get("bias"), sink=arrays.get("sink"),
        dropout=0.0 if dropout is None else dropout.probability, seed=0,
        head_axis=problem.layout.head_axis,
        normalizer="softmax" if problem.normalizer is None else problem.normalizer,
        statistics=problem.statistics, matrix=problem.matrix,
    )  # fmt: skip
    if "w_v" in given:
        given["w_v"] = lowered.w_v
        # The plan is cached, and holds no array of a caller: each call passes its w_v.
        lowered = dataclasses.replace(lowered, w_v=None)
    chosen, tiles = kernels.choose(kernel, lowered_problem), tiling.plan(lowered_problem)
    plan = chosen.prepare(lowered_problem, tiles, given)
    if type(plan) is not NativePlan:
        return None
    # `plain_product` enters no `numeric_scope`: calls with a signature are outside of PyTorch's autocast.
    is_product = type(score) is Bilinear and ops.dtype(score.W) == accumulator(problem.dtype)
    # Normalised keys (cosine) are no product.
    is_projected = computed[1] and type(score) is not Cosine
    # With heads, an axis in front of a key's positions is theirs.
    is_unpadded = is_projected and plan.reads_lens and problem.layout.axes == 3
    leaves_out_padding = is_unpadded and may_save(ops, arrays["key"], key.shape[-1])
    return LoweredPlan(ops, plan, lowered, computed, is_product, leaves_out_padding)


def _is_lowered(problem: Problem) -> bool:
    """Return whether lowering replaces query or key by computed arrays (projected, normalised) of the value's dtype."""
    form = problem.form
    if type(problem.score) not in (Additive, Bilinear, Cosine) or problem.ops.dtype(form.query) != problem.dtype:
        return False
    return form.query is not problem.query or form.key is not problem.key
