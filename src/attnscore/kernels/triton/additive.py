"""Additive scores in Triton: s = sum_h w_h act(a_h + b_h), and the tables that they are computed from.

- With A = exp(2 a) and B = exp(2 b), tanh(a + b) = 1 - 2 / (1 + A B), and sigmoid likewise. The exponentials are taken
  once per query and key (`Table`); a score then takes a multiply-add per channel, and a division per four channels.
- Four denominators are multiplied where their product stays in the range of float32, else two; beyond that range each
  term is computed by itself. The largest magnitudes of the tile's queries and keys decide, on the device.
- `additive_gradients` has the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attnscore.kernels.triton.operands import Operand, as_strided_operand
from attnscore.kernels.triton.tiles import TABLE_SLACK
from attnscore.scores.forms import AdditiveForm

# Whether Triton's interpreter runs the kernels: it has no inline assembly.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2E = tl.constexpr(1.4426950408889634)
# log2(e) minus its rounding to float32.
_LOG2E_REST = tl.constexpr(1.925963033500e-08)
_LN2 = tl.constexpr(0.6931471805599453)
# Largest |a| + |b| at which a product of four (or two) denominators 1 + exp(2 (a + b)) leaves a factor of 2^12 to the
# largest float32, for the weights w in the numerators. For a sigmoid, 1 + exp(-(a + b)), the limits are doubled.
FOUR_TERMS = tl.constexpr(10.0)
TWO_TERMS = tl.constexpr(20.0)
# Largest |a| and |b| at which exp(2 a), exp(-2 a) and so on are normal numbers.
ONE_TERM = tl.constexpr(43.0)
# Positions, and channels at a time, of a program of `tabulate`.
_BLOCK = 32


# ---- activations


@triton.jit
def reciprocal(x):
    """Return 1 / x, to one unit in the last place; 0 for an infinity."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exponential(x):
    """Return exp(x). It corrects the rounding of x log2(e), up to 30 units in the last place at |x| = 40."""
    power = x * _LOG2E
    rest = tl.fma(x, _LOG2E, -power) + x * _LOG2E_REST
    y = tl.exp2(power)
    # Beyond float32's range y is infinite, and the correction may be inf - inf.
    return tl.where(tl.abs(x) < 88.0, tl.fma(y, rest * _LN2, y), y)


@triton.jit
def gate(z, RATE: tl.constexpr):
    """Return 1 / (1 + exp(RATE z))."""
    return reciprocal(1.0 + tl.exp2(z * (RATE * _LOG2E)))


@triton.jit
def activation_and_slope(z, slope, ACTIVATION: tl.constexpr):
    """Return act(z) and act'(z).

    For tanh they are r = 1 / (1 + exp(2 z)) and r (1 - r), from whose sums the callers compute the sums of
    tanh = 1 - 2 r and tanh' = 4 r (1 - r). NaN has the derivative NaN.
    """
    if ACTIVATION == "relu":
        return tl.where(z <= 0.0, 0.0, z), tl.where(z > 0.0, 1.0, tl.where(z <= 0.0, 0.0, z))
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0.0, z, z * slope), tl.where(z > 0.0, 1.0, tl.where(z <= 0.0, slope, z))
    elif ACTIVATION == "silu":
        r = gate(z, -1.0)
        # gate(z, 1.0) is 1 - r, which would lose its digits where r is almost 1.
        return z * r, tl.fma(z * r, gate(z, 1.0), r)
    elif ACTIVATION == "gelu":
        normal_cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return z * normal_cdf, tl.fma(z, 0.3989422804014327 * tl.exp2(z * z * (-0.5 * _LOG2E)), normal_cdf)
    else:
        r = gate(z, 2.0 if ACTIVATION == "tanh" else -1.0)
        return r, tl.fma(-r, r, r)


# ---- scores


@triton.jit
def _fraction(query, key, w_v, query_column, key_column):
    """Return numerator and denominator of w_0 / d_0 + w_1 / d_1, the terms of two channels, with d = 1 + A B."""
    first = tl.load(query) * tl.load(key) + 1.0
    second = tl.load(query + query_column) * tl.load(key + key_column) + 1.0
    return tl.load(w_v) * second + tl.load(w_v + 1) * first, first * second


@triton.jit
def _ratio_scores(total, query, key, w_v, query_column, key_column, hidden, FOUR: tl.constexpr):
    """Return total + sum_c w_c / (1 + A_c B_c), with two or four channels to a division."""
    for _ in tl.range(0, hidden, 4 if FOUR else 2):
        n, d = _fraction(query, key, w_v, query_column, key_column)
        if FOUR:
            query, key, w_v = query + 2 * query_column, key + 2 * key_column, w_v + 2
            n_2, d_2 = _fraction(query, key, w_v, query_column, key_column)
            n, d = n * d_2 + n_2 * d, d * d_2
        total += n * reciprocal(d)
        query, key, w_v = query + 2 * query_column, key + 2 * key_column, w_v + 2
    return total


@triton.jit
def _direct_scores(total, query, key, w_v, query_column, key_column, hidden, slope, ACTIVATION: tl.constexpr):
    """Return total + sum_c w_c act(a_c + b_c)."""
    for _ in tl.range(0, hidden):
        w = tl.load(w_v)
        y, _ = activation_and_slope(tl.load(query) + tl.load(key), slope, ACTIVATION)
        total += w * y
        query, key, w_v = query + query_column, key + key_column, w_v + 1
    return total


@triton.jit
def table_width(hidden):
    """Return the number of channels in a table: a multiple of four."""
    return (hidden + 3) // 4 * 4


@triton.jit
def additive_scores(query, key, w_v, i, j, hidden, slope, ACTIVATION: tl.constexpr):
    """Return the scores of queries `i` and keys `j`, which broadcast; `query` and `key` are sides of `Table.channels`.

    Entries past the last position are read too: a table has room for a tile of them. The columns of a table are
    `width` values, as many exponentials, and the largest magnitude.
    """
    # Triton passes `hidden` = 1 as a constant; the addition makes a tensor of the width.
    width = tl.zeros((), tl.int64) + table_width(hidden)
    a, b = query.data + i * query.row, key.data + j * key.row
    total = tl.zeros_like(tl.load(a) + tl.load(b))
    direct = hidden
    if ACTIVATION == "tanh" or ACTIVATION == "sigmoid":
        reach: tl.constexpr = 1.0 if ACTIVATION == "tanh" else 2.0
        magnitudes = tl.load(a + 2 * width * query.column) + tl.load(b + 2 * width * key.column)
        bound = tl.max(tl.max(magnitudes, 1), 0)
        exp_a, exp_b = a + width * query.column, b + width * key.column
        # One of three loops runs, the others have 0 channels: with branches the compiler would keep the scores in
        # several layouts, and spill.
        four = tl.where(bound <= reach * FOUR_TERMS, width, 0)
        two = tl.where(bound <= reach * TWO_TERMS, width, 0) - four
        direct = tl.where(bound <= reach * TWO_TERMS, 0, hidden)
        total = _ratio_scores(total, exp_a, exp_b, w_v, query.column, key.column, four, True)
        total = _ratio_scores(total, exp_a, exp_b, w_v, query.column, key.column, two, False)
    total = _direct_scores(total, a, b, w_v, query.column, key.column, direct, slope, ACTIVATION)
    if ACTIVATION == "tanh":
        # The sum of w_v follows its last entry.
        return tl.load(w_v + width) - 2.0 * total
    else:
        return total


# ---- tables


class Table(NamedTuple):
    """One side of the scores, as kernels read it; a broadcast axis has size 1."""

    channels: Operand
    """Positions as rows, 2 width + 1 columns: values, exponentials, the largest magnitude of each position; one column
    after the other in memory. Width is the number of channels, up to a multiple of four."""
    powers: Operand | None
    """The exponentials once more, one position after the other, for gradients; NaN is replaced by 1."""
    sizes: Operand
    """Largest magnitude of each position."""
    largest: Operand | None
    """Largest magnitude of all positions, for gradients."""


@triton.jit
def tabulate(
    x, channels, powers, length, rows, hidden, heads, groups, pitch,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill the `channels` (matrix, 2 width + 1, pitch) and `powers` (matrix, rows, width) of a `Table`.

    `pitch` and `rows` are the positions that they have room for; `heads` and `groups` are 1 where `x` is broadcast.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.program_id(1).to(tl.int64)
    width = table_width(hidden)
    data = x.data + z // (heads * groups) * x.batch + z // groups % heads * x.head + z % groups * x.group
    channels += z * (2 * width + 1) * pitch
    live = at < length
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, width, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < width
        source = data + at[:, None].to(tl.int64) * x.row + c[None, :] * x.column
        value = tl.load(source, mask=live[:, None] & (c < hidden)[None, :], other=0.0).to(tl.float32)
        # NaN stays NaN in each loop of `additive_scores`; it must not decide which loop the other pairs take.
        largest = tl.maximum(largest, tl.max(tl.where(value == value, tl.abs(value), 0.0), 1))
        target = channels + c.to(tl.int64)[None, :] * pitch + at[:, None]
        tl.store(target, value, mask=inside[None, :])
        if ACTIVATION == "tanh" or ACTIVATION == "sigmoid":
            rate: tl.constexpr = 2.0 if ACTIVATION == "tanh" else -1.0
            power = exponential(rate * value)
            tl.store(target + width * pitch, power, mask=inside[None, :])
            if powers is not None:
                # A NaN reaches gradients through ds; in the table it would reach the gradients of masked pairs too.
                target_powers = powers + z * rows * width + at[:, None] * width + c[None, :]
                mask = (at < rows)[:, None] & inside[None, :]
                tl.store(target_powers, tl.where(value == value, power, 1.0), mask=mask)
    tl.store(channels + 2 * width * pitch + at, largest)


@triton.jit
def pad_w_v(w_v, out, hidden, BLOCK: tl.constexpr):
    """Write w_v, zeros up to a multiple of four channels, and its sum."""
    z, width = tl.program_id(0).to(tl.int64), table_width(hidden)
    total = 0.0
    for first in tl.range(0, width, BLOCK):
        c = first + tl.arange(0, BLOCK)
        w = tl.load(w_v + z * hidden + c, mask=c < hidden, other=0.0)
        tl.store(out + z * (width + 1) + c, w, mask=c < width)
        total += tl.sum(w, 0)
    tl.store(out + z * (width + 1) + width, total)


def table_of(x: Operand, activation: str, runner: Any, *, with_powers: bool = False) -> Table:
    """Return the table of queries or keys; `runner` launches the kernel that fills it."""
    *matrices, length, hidden = x.data.shape
    # A broadcast axis has stride 0.
    sizes = [1 if stride == 0 else n for n, stride in zip(matrices, x[1:4], strict=True)]
    width, pitch = table_width.fn(hidden), -(-length // _BLOCK) * _BLOCK + TABLE_SLACK
    rows = length + 1  # gradients may take two positions at a time
    channels = x.data.new_empty((*sizes, 2 * width + 1, pitch), dtype=torch.float32)
    powers = None
    if with_powers and activation in ("tanh", "sigmoid"):
        powers = x.data.new_empty((*sizes, rows, width), dtype=torch.float32)
    runner.run(
        tabulate, (pitch // _BLOCK, sizes[0] * sizes[1] * sizes[2]),
        x, channels, powers, length, rows, hidden, sizes[1], sizes[2], pitch, ACTIVATION=activation, BLOCK=_BLOCK,
    )  # fmt: skip
    largest = channels[..., -1:, :]
    return Table(
        channels=as_strided_operand(channels.mT),
        powers=None if powers is None else as_strided_operand(powers),
        sizes=as_strided_operand(largest.mT),
        largest=None if powers is None else as_strided_operand(largest.amax(-1, keepdim=True)),
    )


def padded_w_v(w_v: torch.Tensor, heads: int, groups: int, runner: Any) -> Operand:
    """Return w_v, (h,) or (heads or 1, groups or 1, h), as rows of `pad_w_v`."""
    w = w_v.float().expand(heads, groups, w_v.shape[-1]).contiguous()
    hidden = w.shape[-1]
    out = w.new_empty((1, heads, groups, 1, table_width.fn(hidden) + 1))
    runner.run(pad_w_v, (heads * groups,), w, out, hidden, BLOCK=64)
    return as_strided_operand(out)


class AdditiveSides(NamedTuple):
    """An additive form as the kernels take it."""

    query: Operand
    key: Operand
    query_table: Table
    key_table: Table
    w_v: Operand
    """Rows of `pad_w_v`."""


def sides_of(
    form: AdditiveForm, query: Operand, key: Operand, heads: int, groups: int, runner: Any, *, with_powers: bool
) -> AdditiveSides:
    """Return an additive form whose query and key are the operands; `with_powers`: for a backward too."""
    name = form.activation.name
    query_table, key_table = (table_of(x, name, runner, with_powers=with_powers) for x in (query, key))
    w_v = padded_w_v(form.w_v, heads, groups, runner)
    return AdditiveSides(query, key, query_table, key_table, w_v)
