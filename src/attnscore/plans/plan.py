"""Execution plans, cached by the signature of a call, so that a repeated call checks valid lengths alone.

- A signature holds everything that building a plan reads, types included (``True == 1 == 1.0``), so a cached plan gives
  the same results as a new one.
- A call that fails its checks has no plan, so each repetition runs and fails the same checks.
- A score named by a string enters the signature as its class. A name registered for a function may give another score
  at each call, so such a call has no signature.
- Masks enter by the values of their numbers and arrays: offsets, lengths, ids. Only a boolean array that is the whole
  mask, and valid lengths, enter by shape and strides, and each call reads their values.
- A score that projects or normalises queries and keys is lowered at each call, to a score of the computed arrays that
  has a plan too (`plans/lowered.py`).
- A dot product of NumPy or PyTorch that autograd does not record, without options other than a boolean array or valid
  lengths, has one plan for any number of keys: a KV cache grows at each step.
- A cached plan holds no array of a caller. A call without a signature gets a plan for itself alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from attnscore import backends, kernels, scores
from attnscore.backends.base import Array, Backend
from attnscore.base import thresholds
from attnscore.base.arguments import CallArguments, check_flag
from attnscore.base.cache import BoundedCache
from attnscore.kernels import Plan, SinglePlan, tiling
from attnscore.kernels.native.plan import NativePlan
from attnscore.masks import Dense
from attnscore.masks.cached import arguments_signature
from attnscore.plans import lowered
from attnscore.problem.problem import NO_VALUE, Problem, build_problem
from attnscore.scores import Dot, Gaussian, ScaledDot, SoftCap, Temperature
from attnscore.scores.base import Score, arrays_of, with_arrays

PLANS: BoundedCache[Plan] = BoundedCache(256, thresholds.PLANNED_HEADS)
# First in the signatures of plans for any number of keys.
_ANY_KEY_LEN = "any number of keys"
_LENS_DTYPES = ("int32", "int64")
_WRAPPERS = (SoftCap, Temperature)
# Dtypes of NumPy's masks and lengths that each call reads, in the byte order of the machine.
_DTYPES_READ_AT_EACH_CALL = {np.dtype(name): name for name in ("bool", *_LENS_DTYPES)}


def signature(
    arguments: CallArguments, options: tuple[Hashable, ...], *, with_key_len: bool = False
) -> tuple[Hashable, ...] | None:
    """Return the cache key of a call's plan, or None where it cannot be cached; `options` are the other arguments.

    It is the key of a plan for any number of keys where a call may have one, unless `with_key_len`.
    """
    query, key, value, score, mask, valid_lens, bias, sink, seed = arguments
    kind = type(query)
    if (score_signature := _score_signature(score)) is None or (ops := backends.of_type(kind)) is None:
        return None
    for x in (key, value):
        # The types may differ: some arrays may be parameters, or differentiated, and others not.
        if type(x) is not kind and backends.of_type(type(x)) is not ops:
            return None
    score_numbers, score_arrays = score_signature
    is_masked = mask is not None or valid_lens is not None
    mask_array = _read_at_each_call(ops, query, mask, valid_lens) if is_masked else None
    if not with_key_len and bias is sink is seed is None and (mask_array is not None or not is_masked):
        decoding_signature = _decoding_signature(ops, options, score_numbers, [query, key, value], mask_array)
        if decoding_signature is not None:
            return decoding_signature
    _, _, _, dropout, *_ = options
    if type(dropout) is float and dropout and seed is None and ops.draws_seeds_by_example():
        # Inside a vmap each example may draw a seed of its own, which no plan takes.
        return None
    arrays = [query, key, value, *score_arrays]
    numbers: list[Hashable] = [score_numbers, bias is None, sink is None, *map(type, options), options]
    if bias is not None or sink is not None or seed is not None:
        if type(seed) not in (int, type(None)):
            return None
        extras = [x for x in (bias, sink) if x is not None]
        # Their types may differ too: a learned bias is a torch.nn.Parameter.
        if any(backends.of_type(type(x)) is not ops for x in extras):
            return None
        arrays += extras
    if mask_array is not None:
        numbers.append("mask" if valid_lens is None else "valid_lens")
        # `Backend.signature` below reads arrays of the framework alone.
        if type(mask_array) is np.ndarray and kind is not np.ndarray:
            numbers += (mask_array.shape, mask_array.strides)
        else:
            arrays.append(mask_array)
    elif is_masked:
        mask_numbers = arguments_signature(mask, valid_lens)
        if mask_numbers is None:
            return None
        numbers.append(mask_numbers)
    layouts = ops.signature(arrays)
    if layouts is None and _is_scaled_dot(score_numbers):
        # Plans on a GPU are for this score alone (`kernels/triton/plan.py`).
        layouts = ops.device_signature(arrays)
    return None if layouts is None else (*numbers, layouts)


def _decoding_signature(
    ops: Backend, options: tuple[Any, ...], score_numbers: Hashable, arrays: list[Array], mask_array: Array | None
) -> tuple[Hashable, ...] | None:
    """Return the cache key of a plan for any number of keys, or None where a call has no such plan.

    `arrays` are query, key and value, and `mask_array` the boolean mask or the valid lengths, if there are any.
    """
    head_axis, normalizer, kernel_name, dropout, return_weights, return_stats = options
    if return_weights is not False or return_stats is not False or type(dropout) is not float or dropout:
        return None
    if type(kernel_name) is not str or kernel_name not in ("auto", "native"):
        return None
    if type(head_axis) is not int or head_axis not in (-3, -2):
        return None
    if type(normalizer) is not str or normalizer != "softmax" or not _is_dot_product(score_numbers):
        return None
    if mask_array is not None:
        arrays.append(mask_array)
    layouts = ops.decoding_signature(arrays, head_axis)
    return None if layouts is None else (_ANY_KEY_LEN, score_numbers, head_axis, kernel_name, layouts)


def _read_at_each_call(ops: Backend, query: Array, mask: Any, lens: Any) -> Array | None:
    """Return the boolean mask or the valid lengths, if each call of a plan reads their values; otherwise None.

    Lengths combined with another mask, and lengths of two-axis inputs, enter the signature by value instead.
    """
    x = mask if lens is None else lens
    if type(x) is np.ndarray:
        dtype = _DTYPES_READ_AT_EACH_CALL.get(x.dtype) if x.flags.aligned else None
    elif backends.of_type(type(x)) is ops:
        dtype = ops.dtype(x)
    else:
        return None
    if lens is None:
        return x if dtype == "bool" else None
    is_read = mask is None and len(query.shape) > 2 and len(x.shape) in (1, 2)
    return x if is_read and dtype in _LENS_DTYPES else None


def _score_signature(score: Any) -> tuple[Hashable, tuple[Array, ...]] | None:
    """Return `Score.signature`; a name stands for the score of its class, without numbers or arrays."""
    if type(score) is str:
        cls = scores.named(score)
        return (cls, ()) if isinstance(cls, type) else None
    if type(score) not in _WRAPPERS:
        # Not isinstance, which calls Python code of an abstract class.
        return score.signature() if Score in type(score).__mro__ else None
    # Only wrapped dot products have a signature: the plan of another depends on what the wrapped score computes.
    number, inner = getattr(score, score.parameter), _score_signature(score.score)
    if type(number) not in (int, float) or inner is None or not _is_dot_product(inner[0]):
        return None
    return (type(score), type(number), number, inner[0]), ()


def _is_dot_product(score_numbers: Any) -> bool:
    """Whether a score with this signature is a function of q.k and numbers alone."""
    while type(score_numbers) is tuple and score_numbers[0] in _WRAPPERS:
        score_numbers = score_numbers[-1]
    return _is_scaled_dot(score_numbers)


def _is_scaled_dot(score_numbers: Any) -> bool:
    """Whether a score with this signature is q.k, times a number at most: PyTorch's function on GPUs computes it."""
    return score_numbers in (Dot, ScaledDot) or (type(score_numbers) is tuple and score_numbers[0] is ScaledDot)


def plan_for(
    cache_key: tuple[Hashable, ...] | None,
    arguments: CallArguments,
    options: tuple[Any, ...],
    *,
    has_value: bool = True,
) -> tuple[Plan, CallArguments]:
    """Return the plan of a call, and its arguments with the seed of its dropout where a new plan has drawn one.

    Raises the errors of `attnscore.attend`. `cache_key` is the `signature` of the call, and `options` are its other
    arguments. Without a value (`has_value`) messages name query and key alone.
    """
    if (cached_plan := PLANS.get(cache_key)) is not None:
        return cached_plan, arguments
    decoding_key = None
    if cache_key is not None and cache_key[0] == _ANY_KEY_LEN:
        # Only a native plan reads the number of keys at each call.
        decoding_key, cache_key = cache_key, signature(arguments, options, with_key_len=True)
        if (cached_plan := PLANS.get(cache_key)) is not None:
            return cached_plan, arguments
    ops = backends.of_type(type(arguments.query)) or backends.of({"query": arguments.query})
    examples = arguments if cache_key is None else _without_gradients(ops, arguments)
    is_detached = examples is not arguments
    query, key, value, score, mask, valid_lens, bias, sink, seed = examples
    head_axis, normalizer, kernel_name, dropout, return_weights, return_stats = options
    with ops.numeric_scope():
        problem, _ = build_problem(
            query, key, value if has_value else NO_VALUE, score=score, mask=mask, valid_lens=valid_lens, bias=bias,
            sink=sink, dropout=dropout, seed=seed, head_axis=head_axis, normalizer=normalizer,
            statistics=return_stats, matrix="weights" if check_flag("return_weights", return_weights) else None,
        )  # fmt: skip
        tiles = tiling.plan(problem)
        kernel = kernels.choose(kernel_name, problem)
        if cache_key is None:
            plan: Plan = SinglePlan(kernel, problem, tiles)
        elif type(problem.score) in lowered.SCORES:
            plan = lowered.prepare(kernel, problem, tiles, _caller_arrays(examples, problem))
        else:
            plan = kernel.prepare(problem, tiles, _caller_arrays(examples, problem))
    if problem.dropout is not None:
        # `build_problem` draws a seed where the caller gave none; with None the plan would draw another.
        arguments = arguments._replace(seed=problem.dropout.seed)
    if plan.is_reusable:
        if decoding_key is not None and type(plan) is NativePlan:
            plan, cache_key = replace(plan, reads_key_len=True), decoding_key
        return PLANS.put(cache_key, plan, plan.cache_weight), arguments
    # A plan of one call runs on the arrays of its problem, which autograd has to record.
    return plan_for(None, arguments, options, has_value=has_value) if is_detached else (plan, arguments)


def _without_gradients(ops: Backend, arguments: CallArguments) -> CallArguments:
    """Return the arguments of a call with detached arrays, where its score would compute from arrays on a tape.

    Autograd does not record the arrays that a score computes while a plan is built: the plan computes them again, and a
    checkpoint that reruns the first call would find other saved tensors.
    """
    score = arguments.score
    # Of the scores that a name can select and a plan can serve, only the cosine computes arrays.
    computes = score == "cosine" if type(score) is str else type(score) in (*lowered.SCORES, Gaussian)
    if not (computes and ops.has_autodiff):
        return arguments
    arrays = (arguments.query, arguments.key, *arrays_of(score).values())
    # An array of another framework stays, for the checks of the call to name it in their message.
    if any(backends.of_type(type(x)) is not ops for x in arrays) or not ops.needs_grad(*arrays):
        return arguments
    return change_arrays(arguments, lambda x: ops.stop_gradient(x) if backends.of_type(type(x)) is ops else x)


def change_arrays(arguments: CallArguments, change: Callable[[Any], Any]) -> CallArguments:
    """Return the arguments with ``change(x)`` for each array, the score's too; the same object if nothing changes."""
    query, key, value, score, mask, valid_lens, bias, sink, seed = arguments
    query, key, value, mask, valid_lens, bias, sink = map(change, (query, key, value, mask, valid_lens, bias, sink))
    score = score if type(score) is str else with_arrays(score, change)
    changed = CallArguments(query, key, value, score, mask, valid_lens, bias, sink, seed)
    return arguments if all(map(operator.is_, arguments, changed)) else changed


def _caller_arrays(arguments: CallArguments, problem: Problem) -> dict[str, Array]:
    """Return the caller's arrays that each call of a plan passes, by name."""
    query, key, value, score, mask, valid_lens, bias, sink, _ = arguments
    # The arrays of a score that is named are not the caller's.
    score_arrays = {} if type(score) is str else arrays_of(problem.score)
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        **{name: x for name, x in score_arrays.items() if name in ("w_v", "bandwidth")},
        "mask": mask if isinstance(problem.mask, Dense) else None,
        "valid_lens": None if valid_lens is None else _read_at_each_call(problem.ops, query, mask, valid_lens),
        "sink": sink,
    }
    return {name: x for name, x in arrays.items() if x is not None}
