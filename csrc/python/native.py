"""The native kernel: C++ on the CPU, over the caller's memory. The door to ``csrc``.

- Inner-product and additive forms with interval masks, forward and backward, for any strides and batch axes, without
  copies of the inputs that lie ready.
- What it does not take runs through the streaming engine, and says why: the module may not be built, and a gradient of
  a gradient is the streaming form's.
- Results do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from attnscore import engine, softmax
from attnscore.engine import Result, RowGradients
from attnscore.frameworks.contract import Array, sum_to
from attnscore.kernels.contract import Kernel
from attnscore.problem import Problem
from attnscore.scoring.forms import AdditiveForm, Form, InnerForm
from attnscore.tiling import TilePlan

try:
    from attnscore import _native
except ImportError as missing:
    _native = None  # type: ignore[assignment]  # the package works without it
    _MISSING = f"the native module is not built here ({missing})"

_ACTIVATIONS = ("tanh", "sigmoid", "relu", "leaky_relu")
_DTYPES = ("float16", "bfloat16", "float32", "float64")
HostArray = np.ndarray[Any, Any]
# Numbers that the forward writes for each row (csrc/attention.h).
_STATISTICS = 7


@final
class Native(Kernel):
    """C++ tiles for the CPU at hand."""

    name = "native"
    summary = "C++ on the CPU, O(n) memory"
    own_gradient = True

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        if _native is None:
            return (_MISSING,)
        return tuple(_reasons(problem))

    def forward(self, problem: Problem, plan: TilePlan) -> Result:
        ops, grid, form = problem.ops, problem.grid, _augmented(problem)
        sums = problem.accumulator
        out = _results((*grid.rows, problem.layout.value_dim), problem.dtype)
        full = bool(_FULL & set(problem.statistics))
        numbers = np.empty((*grid.rows, _STATISTICS), sums)
        _native.forward(
            *(_memory(problem, x) for x in (form.query, form.key, problem.value)),
            out,
            numbers,
            *_ends(plan),
            _weights(problem, form),
            full_statistics=full,
            **_arguments(problem, form),
        )
        answer = ops.from_memory(out, problem.dtype, problem.value)
        rows = ops.from_memory(numbers, sums, problem.value)
        maximum, total, tilt, squares, count, mean, deviations = (rows[..., i : i + 1] for i in range(_STATISTICS))
        state = softmax.RowState(
            max=maximum,
            total=total,
            # `out` is divided already; a sink moves it (below) by what the keys' total is of the whole.
            out=ops.zeros((*grid.rows, 0), rows),
            tilt=tilt if "entropy" in problem.statistics else None,
            squares=squares if "sum_sq_weights" in problem.statistics else None,
            moments=(count, mean, 0 * mean, deviations) if full else None,
        )
        sink = None
        if problem.sink is not None:
            sink = ops.astype(ops.reshape(problem.sink, (*problem.sink.shape, 1, 1)), sums)
        _, top, log_total, statistics = softmax.finish(ops, state, sink, (*problem.statistics, "sum_weights"))
        if sink is not None:
            answer = ops.astype(answer * statistics["sum_weights"], problem.dtype)
        return Result(answer, top, log_total, statistics)

    def backward(self, problem: Problem, plan: TilePlan, result: Result, grads: RowGradients) -> dict[str, Array]:
        ops, grid = problem.ops, problem.grid
        known = engine.rows_of(problem, result, grads)
        arrays = tuple(engine.operands(problem).values())
        if grads.entropy is not None or not known.grad_is_finite or ops.on_tape(*arrays, known.grad_out):
            return engine.backward(problem, plan, result, grads)
        form, sums = _augmented(problem), problem.accumulator
        grad_query = np.zeros((*grid.rows, form.query.shape[-1]), sums)
        per_head = isinstance(form, AdditiveForm) and len(form.w_v.shape) > 1
        group = max(form.key.shape[-3], problem.value.shape[-3], form.w_v.shape[-2] if per_head else 1)
        shared = (*grid.rows[:-2], group, grid.key_len)
        grad_key, grad_value = (np.zeros((*shared, x.shape[-1]), sums) for x in (form.key, problem.value))
        additive = isinstance(form, AdditiveForm)
        grad_weights = np.zeros((*shared[:-1], form.w_v.shape[-1]), sums) if isinstance(form, AdditiveForm) else None
        log_total = ops.where(known.log_total == softmax.NEG_INF, float("inf"), known.log_total)
        _native.backward(
            *(_memory(problem, x) for x in (form.query, form.key, problem.value)),
            _memory(problem, known.grad_out),
            *(
                np.ascontiguousarray(_memory(problem, ops.broadcast_to(x, (*grid.rows, 1)))[..., 0])
                for x in (known.top, log_total, known.shift)
            ),
            *_ends(plan),
            _weights(problem, form),
            grad_query,
            grad_key,
            grad_value,
            grad_weights,
            grad_dtype=ops.dtype(known.grad_out),
            **_arguments(problem, form),
        )
        found = {"query": grad_query, "key": grad_key, "value": grad_value}
        if additive:
            found["w_v"] = grad_weights
        gradients = {name: ops.from_memory(x, sums, problem.value) for name, x in found.items()}
        return _as_operands(problem, form, gradients, known)


_FULL = {"entropy", "sum_sq_weights", "mean_score", "var_score"}


def _reasons(problem: Problem) -> list[str]:
    """What this kernel does not take."""
    ops, form, found = problem.ops, problem.form, []
    if not isinstance(form, (InnerForm, AdditiveForm)):
        found.append(f"the score is a {type(form).__name__}, neither an inner product nor additive")
    elif form.caps:
        found.append("soft caps and tempered biases are not in the native kernel")
    if isinstance(form, AdditiveForm) and form.activation.name not in _ACTIVATIONS:
        found.append(f"no native activation {form.activation.name}")
    if problem.bias is not None:
        found.append("a bias is not in the native kernel")
    if problem.dropout is not None:
        found.append("dropout is not in the native kernel")
    arrays = form.arrays() | {"value": problem.value}
    dtypes = {ops.dtype(x) for x in arrays.values()}
    if not dtypes <= set(_DTYPES) or ("float64" in dtypes and len(dtypes) > 1):
        found.append(f"dtypes {', '.join(sorted(dtypes))}")
    if any(ops.memory(x) is None for x in arrays.values()):
        found.append("arrays whose memory the CPU cannot read (on a device, traced, or with tangents)")
        return found
    if problem.mask is not None and not found:
        intervals, rest = problem.visibility
        if rest is not None or intervals is None:
            found.append(f"the mask is no interval of keys per row: {rest!r}")
        elif not ops.surely_finite(*arrays.values()):
            found.append("NaN or infinity beside a mask that could hide it")
    return found


def _memory(problem: Problem, x: Array) -> HostArray:
    found = problem.ops.memory(x)
    assert found is not None  # reasons_against
    return found


def _results(shape: tuple[int, ...], dtype: str) -> HostArray:
    return np.empty(shape, np.uint16 if dtype in ("float16", "bfloat16") else dtype)


def _ends(plan: TilePlan) -> tuple[HostArray | None, HostArray | None]:
    if plan.intervals is None:
        return None, None
    start, stop = (np.ascontiguousarray(end, np.int64) for end in plan.intervals)
    return start, stop


def _augmented(problem: Problem) -> Form | Any:
    """An inner form with its biases as two more coordinates: [scale q, r, 1] . [k, 1, c]."""
    form, ops = problem.form, problem.ops
    if not isinstance(form, InnerForm) or (form.key_bias is None and form.query_bias is None):
        return form
    zero_query, zero_key = 0 * form.query[..., :1], 0 * form.key[..., :1]
    query_bias = zero_query if form.query_bias is None else form.query_bias
    key_bias = zero_key if form.key_bias is None else form.key_bias
    query = ops.concat((form.query * form.scale, query_bias, zero_query + 1), -1)
    return InnerForm(query, ops.concat((form.key, zero_key + 1, key_bias), -1))


def _as_operands(problem: Problem, form: Any, grads: dict[str, Array], known: engine.Rows) -> dict[str, Array]:
    """Gradients in the shapes of the operands; those of folded biases taken out again."""
    ops, own = problem.ops, problem.form
    if form is not own and isinstance(own, InnerForm):
        dim = own.query.shape[-1]
        # [scale q, r, 1] . [k, 1, c]
        folded = {"query_bias": grads["query"][..., dim : dim + 1], "key_bias": grads["key"][..., dim + 1 :]}
        grads = grads | folded | {"query": own.scale * grads["query"][..., :dim], "key": grads["key"][..., :dim]}
    found = {}
    for name, x in engine.operands(problem).items():
        if name == "sink":
            found[name] = engine.sink_gradient(problem, x, known)
        else:
            found[name] = sum_to(ops, grads[name], x.shape)
    return found


def _weights(problem: Problem, form: Any) -> HostArray | None:
    if not isinstance(form, AdditiveForm):
        return None
    return np.ascontiguousarray(_memory(problem, problem.ops.astype(form.w_v, problem.accumulator)))


def _arguments(problem: Problem, form: Any) -> dict[str, Any]:
    ops = problem.ops
    additive = isinstance(form, AdditiveForm)
    return {
        "form": "additive" if additive else "inner",
        "activation": form.activation.name if additive else "tanh",
        "negative_slope": form.activation.negative_slope if additive else 0.0,
        "scale": 1.0 if additive else form.scale,
        "score_dtype": ops.dtype(form.query),
        "value_dtype": problem.dtype,
        "threads": ops.threads(_native.get_num_threads()),
    }
