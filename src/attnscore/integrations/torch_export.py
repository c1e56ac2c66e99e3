"""`attend` in exported PyTorch programs, written in torch's own operators: for ``torch.onnx.export`` and AOTInductor.

- The scaled dot product is ``scaled_dot_product_attention``, which is ONNX's operator Attention from opset 23 on. All
  else is the definition (`kernels.dense`): O(n^2) memory.
- Shapes and masks are checked when the program is made; lengths may stay symbolic.
- Queries, keys and values are taken to be finite: a NaN in a masked one propagates, as 0 * NaN does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscore import backends, scores
from attnscore.backends import torch_private as private
from attnscore.backends.base import SeedHalves, accumulator
from attnscore.backends.torch import TorchBackend
from attnscore.base.arguments import check_flag, is_number, shown
from attnscore.base.layout import Unknown, surely_equal
from attnscore.errors import FrameworkError, message
from attnscore.integrations.torch_expressions import SAVED, read
from attnscore.kernels import SinglePlan
from attnscore.kernels.dense import Dense
from attnscore.masks import Causal, as_mask
from attnscore.problem import relative
from attnscore.problem.online_softmax import NEG_INF
from attnscore.problem.problem import Problem, build_problem, requested_statistics
from attnscore.problem.results import Result, present
from attnscore.problem.statistics import AttentionStats
from attnscore.scores.forms import InnerForm

# A symbolic size belongs to one program: no cache may hold it, and comparing it with a number would fix it.
Unknown.register(torch.SymInt)


@surely_equal.register
def _(length: torch.SymInt, other: Any) -> bool:
    # A comparison settles the answer for the program, so only sizes that are equal in the example are compared: keys
    # and values may have two symbols for one length. Unequal ones stay free.
    equal: Any = length == other
    return bool(equal) if isinstance(equal, bool) or (equal.node.has_hint() and equal.node.hint) else False


# So that a saved program can return them.
private.register_namedtuple(AttentionStats, serialized_type_name="attnscore.AttentionStats")


class _Primitive(TorchBackend):
    """PyTorch's operations in a program, which looks at no values."""

    settles_sizes = True

    def asarray(self, x: Any, like: Tensor, dtype: str | None = None) -> Tensor:
        if isinstance(x, (int, torch.SymInt)):
            # No constant of the program: `decompositions` cannot add one.
            x = torch.full((), cast(int, x), dtype=torch.int64)
        elif isinstance(x, (list, tuple)):
            x = torch.stack([self.asarray(part, like) for part in x])
        tensor: Tensor = super().asarray(x, like, dtype)
        return tensor

    def maximum(self, a: Tensor, b: Tensor | float) -> Tensor:
        return torch.maximum(a, b if isinstance(b, Tensor) else a.new_full((), b))

    def known_finite(self, x: Tensor) -> bool:
        return True


_OPS = _Primitive()


def is_active() -> bool:
    """Return whether Python runs to make a program, with symbolic tensors (``torch.export`` unless ``strict=True``)."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    """Run `attnscore.attend` while a program is made, in torch's operators."""
    if not all(isinstance(x, Tensor) for x in (query, key, value)):
        kinds = ", ".join(type(x).__name__ for x in (query, key, value))
        raise FrameworkError(message("query, key, value", "tensors, while a program is exported", kinds))
    has_weights = check_flag("return_weights", arguments.pop("return_weights"))
    arguments["statistics"] = requested_statistics(arguments.pop("return_stats"), arguments["normalizer"])
    with backends.load("torch").numeric_scope():
        return present(*run(query, key, value, matrix="weights" if has_weights else None, **arguments))


def run(query: Tensor, key: Tensor, value: Tensor, *, kernel: str, **arguments: Any) -> tuple[Problem, Result]:
    """Return the problem of a call and its result; `arguments` go to `build_problem`."""
    if arguments["dropout"] != 0:
        if torch.onnx.is_in_onnx_export():
            expected = "0.0 in a program for ONNX, which has no operator that drops the same weights"
            hint = "layer.eval() turns it off"
            raise FrameworkError(message("dropout", expected, shown(arguments["dropout"]), hint=hint))
        seed = arguments["seed"]
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu") if seed is None else seed
        if isinstance(seed, Tensor):
            arguments["seed"] = SeedHalves(_OPS.low_32_bits(seed), _OPS.shift_right(seed, 32))
    sum_dtype = getattr(torch, accumulator(_OPS.dtype(query)))
    for name in ("bias", "sink"):
        if is_number(x := arguments[name]) and not isinstance(x, Tensor):
            arguments[name] = query.new_full((), x, dtype=sum_dtype)
    problem, _ = build_problem(query, key, value, **arguments)
    # The caller's mask: a cached one would be an array of the program.
    mask = as_mask(arguments["mask"], arguments["valid_lens"], problem.score_shape)
    bias = problem.bias
    if problem.has_relative_bias:
        bias = relative.of_pairs(_OPS, bias, problem.score_shape.query_len, problem.score_shape.key_len)
    problem = dataclasses.replace(problem, ops=_OPS, mask=mask, bias=bias)
    out = _scaled_dot_product(problem)
    if out is not None:
        return problem, Result(out, row_max=None, log_denom=None, statistics={})
    # The dense kernel reads no plan.
    plan: Any = None
    return problem, SinglePlan(Dense(), problem, plan)()


def _scaled_dot_product(problem: Problem) -> Tensor | None:
    """Return the output if ``scaled_dot_product_attention`` of the lowered query and key gives it; otherwise None."""
    shape, dtype = problem.score_shape, problem.value.dtype
    others = (problem.sink, problem.dropout, problem.matrix, problem.normalizer)
    # ONNX Runtime has no Attention of float64.
    if problem.statistics or problem.dtype == "float64" or any(x is not None for x in others):
        return None
    # Rounded to 16 bits, a bias would be infinite where `attend` adds a large number.
    if problem.bias is not None and _OPS.dtype(problem.bias) != problem.dtype:
        return None
    form = scores.lower(_OPS, problem.score, problem.query, problem.key)
    if not isinstance(form, InnerForm) or form.caps or form.key_bias is not None or form.query_bias is not None:
        return None

    def joined(x: Tensor, heads: tuple[int, int], *last: int) -> Tensor:
        """Return an array on the canonical axes as (batch, head, *last)."""
        full = (*shape.lead, *heads, *last)
        x = x if x.shape == full else x.expand(full)
        return x.reshape(math.prod(shape.lead), math.prod(heads), *last)

    heads = (shape.heads, shape.groups)
    # A score with parameters per query head may have lowered the keys to one for each query head.
    of_key = (shape.heads, form.key.shape[-3])
    query = joined(form.query.to(dtype), heads, shape.query_len, form.query.shape[-1])
    key, value = (joined(x.to(dtype), of_key, shape.key_len, x.shape[-1]) for x in (form.key, problem.value))
    is_causal = _is_causal(problem)
    mask = None if is_causal else _mask(problem)
    out: Tensor = F.scaled_dot_product_attention(
        query,
        key,
        value,
        None if mask is None else joined(mask, heads, shape.query_len, shape.key_len),
        is_causal=is_causal,
        scale=form.scale,
        enable_gqa=of_key != heads,
    )
    out = out.reshape(*shape.rows, out.shape[-1])
    if mask is None:
        return out
    # Fully masked queries: torch and ONNX give NaN, zeros or a mean of all values.
    attended = mask if mask.dtype == torch.bool else mask != NEG_INF
    return torch.where(attended.any(-1, keepdim=True), out, 0.0)


def _is_causal(problem: Problem) -> bool:
    """Return whether all masks together are causal: query i attends the keys j <= i, of which there is always one."""
    mask, shape = problem.mask, problem.score_shape
    if type(mask) is not Causal or mask.offset is not None or problem.bias is not None:
        return False
    return mask.align != "bottom_right" or shape.query_len is shape.key_len


def _mask(problem: Problem) -> Tensor | None:
    """Return mask and bias as one array on the canonical axes: boolean, or scores to add."""
    shape, bias, mask = problem.score_shape, problem.bias, None
    if problem.mask is not None:
        rows, cols = (_OPS.positions(0, n, problem.value) for n in (shape.query_len, shape.key_len))
        mask = problem.mask.visible(_OPS, shape, rows[:, None], cols[None, :])
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, NEG_INF)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the table that writes the operator of `attend` in torch's own operators.

    A program of ``torch.export`` holds one operator for each call of `attend`, which runs our kernels and needs Python.
    AOTInductor takes a program without it.

    Returns
    -------
    dict
        For ``ExportedProgram.run_decompositions``.

    Examples
    --------
    >>> import torch
    >>> from attnscore.integrations.torch_export import decompositions
    >>> from attnscore.layers.torch import DotProductAttention
    >>> x = torch.randn(2, 5, 4)
    >>> program = torch.export.export(DotProductAttention().eval(), (x, x, x))
    >>> "attnscore.attend" in str(program.graph)
    True
    >>> "attnscore.attend" in str(program.run_decompositions(decompositions()).graph)
    False
    """
    return {torch.ops.attnscore.attend.default: _decomposed}


def _decomposed(
    query: Tensor, key: Tensor, value: Tensor, arrays: Sequence[Tensor], integers: Sequence[int], expression: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's results, in torch's own operators; rows that only its backward reads are NaN."""
    problem, result = run(query, key, value, **read(expression, arrays=arrays, integers=integers))
    layout = problem.layout
    out = layout.from_canonical(_OPS, result.out)
    unknown = query.new_full((), float("nan"), dtype=getattr(torch, problem.accumulator)).expand(out.shape[:-1])
    statistics = [layout.rows_from_canonical(_OPS, result.statistics[name][..., 0]) for name in problem.statistics]
    has_matrix = result.matrix is not None
    weights = layout.scores_from_canonical(_OPS, result.matrix) if has_matrix else unknown.new_empty(0)
    return out, torch.stack([unknown] * len(SAVED) + statistics), weights
