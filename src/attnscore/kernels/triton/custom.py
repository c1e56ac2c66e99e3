"""Custom scores in Triton: the functions that a score brings (`scores.triton_tile`), inside the kernels.

- A function of a product or a squared distance is applied to a tile of products or distances, before the caps.
- A function of channels is summed one channel after the other, as a distance is.
- A row with a NaN or an infinity has scores of NaN, as under a mask in the streaming kernel, whatever the function.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl

from attnscore.backends.base import sum_to
from attnscore.errors import ShapeError, message
from attnscore.problem.problem import Problem
from attnscore.scores.base import per_head
from attnscore.scores.forms import PARAMETER
from attnscore.scores.triton_tile import TritonTile, triton_tile_of


class Parameter(NamedTuple):
    """A parameter of a custom score: a float32 array (head, group, channel) and its strides, 0 where it is shared."""

    data: Any
    head: Any
    group: Any
    channel: Any


@triton.jit
def load_parameters(parameters, m, c):
    """Return the parameters of the head of a matrix and a channel, as a tuple."""
    values = ()
    for k in tl.static_range(len(parameters)):
        x = parameters[k]
        values = values + (tl.load(x.data + m.h * x.head + m.g * x.group + c * x.channel),)
    return values


@triton.jit
def channel_of(x, c):
    """Return channel c of a `SideTile`, float32; 0 past the last position."""
    at = x.side.data + x.at.to(tl.int64) * x.side.row + c * x.side.column
    return tl.load(at, mask=x.live, other=0.0).to(tl.float32)


@triton.jit
def _derivative(derivatives, INDEX: tl.constexpr):
    """Return one of the derivatives that a gradient function returned."""
    tl.static_assert(not isinstance(derivatives, tl.tensor), "gradient of a custom score has to return a tuple")
    tl.static_assert(
        len(derivatives) > INDEX,
        "gradient of a custom score has to return a derivative for each argument that is an array",
    )
    return derivatives[INDEX]


@triton.jit
def scaled_derivative(ds, x, parameters, m, GRADIENT: tl.constexpr, INDEX: tl.constexpr):
    """Return ds times a derivative of value(x)."""
    scaled = ds * _derivative(GRADIENT(x, *load_parameters(parameters, m, 0)), INDEX)
    tl.static_assert(scaled.shape == ds.shape, "gradient of a custom score has to return one number for each pair")
    # A masked pair has ds = 0, whose product with a non-finite derivative would be NaN.
    return tl.where(ds == 0, 0.0, scaled)


@triton.jit
def channel_scores(queries, keys, parameters, m, dim, VALUE: tl.constexpr):
    """Return sum_c value(q_c, k_c) of a tile of queries and one of keys."""
    total = (queries.at + keys.at).to(tl.float32) * 0.0
    # 0, or NaN where a channel is not finite.
    query_nan, key_nan = queries.at.to(tl.float32) * 0.0, keys.at.to(tl.float32) * 0.0
    for c in tl.range(0, dim):
        a, b = channel_of(queries, c), channel_of(keys, c)
        s = VALUE(a, b, *load_parameters(parameters, m, c))
        tl.static_assert(
            (s + total).shape == total.shape, "value of a custom score has to return one number for each pair"
        )
        total += s
        query_nan += a - a
        key_nan += b - b
    return total + (query_nan + key_nan)


@triton.jit
def channel_gradient(
    acc, ds, queries, keys, parameters, m, dim, GRADIENT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr
):
    """Return acc plus, in column c, the sums of ds times a derivative of channel c over the second axis of `ds`."""
    channel = tl.arange(0, D)[None, :]
    for c in tl.range(0, dim):
        a, b = channel_of(queries, c), channel_of(keys, c)
        scaled = ds * _derivative(GRADIENT(a, b, *load_parameters(parameters, m, c)), INDEX)
        tl.static_assert(scaled.shape == ds.shape, "gradient of a custom score has to return one number for each pair")
        # As in `scaled_derivative`.
        column = tl.sum(tl.where(ds == 0, 0.0, scaled), 1)
        acc += tl.where(channel == c, column[:, None], 0.0)
    return acc


class Custom(NamedTuple):
    """A custom score as the kernels take it."""

    tile: TritonTile
    parameters: tuple[Parameter, ...]
    learned_names: tuple[str, ...]
    """Names of the operands that are parameters, in the order of the derivatives."""


def custom_of(problem: Problem) -> Custom:
    """Return the functions and parameters of a problem's custom score."""
    form: Any = problem.form
    tile = cast(TritonTile, triton_tile_of(form.score))
    parameters = []
    for name in tile.names:
        x = form.parameters.get(name, getattr(form.score, name))
        if isinstance(x, torch.Tensor):
            values = _per_head(problem, name, x.float(), name in tile.channel_parameters)
        else:
            # Written on the device: nothing is copied to it.
            values = torch.full((1, 1, 1), float(x), device=problem.value.device)
        strides = (0 if n == 1 else stride for n, stride in zip(values.shape, values.stride(), strict=True))
        parameters.append(Parameter(values, *strides))
    learned_names = tuple(PARAMETER + name for name in tile.names if name in form.parameters)
    return Custom(tile, tuple(parameters), learned_names)


def _per_head(problem: Problem, name: str, x: torch.Tensor, has_channels: bool) -> torch.Tensor:
    """Return a parameter as (head or 1, group or 1, channel or 1)."""
    x = per_head(problem.ops, name, x, problem.form.query, problem.form.key, axes=int(has_channels))
    if not has_channels:
        x = x[..., None]
    elif x.shape[-1] != (dim := problem.form.query.shape[-1]):
        raise ShapeError(message(name, f"one number for each of {dim} channels", x.shape[-1]))
    return x.reshape((1,) * (3 - x.ndim) + tuple(x.shape))


def parameter_gradient(problem: Problem, custom: Custom, name: str, sums: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the operand `name` from sums (batch, head, group, query tile, channel or 1)."""
    x = problem.operands()[name]
    field = name.removeprefix(PARAMETER)
    shape = _per_head(problem, field, x, field in custom.tile.channel_parameters).shape
    gradient: torch.Tensor = sum_to(problem.ops, sums.sum((0, 3)), shape)
    return gradient.reshape(x.shape)
