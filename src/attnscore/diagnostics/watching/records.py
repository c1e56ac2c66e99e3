"""Records of a model's attention: numbers per layer and head, verdicts, tables, JSON lines.

Requirements:
- means are over queries that attend to a key; of all sampled steps, or of the last ones, which the verdicts judge;
- rows are plain dictionaries of the same names, for pandas.DataFrame and json.dumps;
- verdicts, text, table, picture, page and JSON lines say the same;
- rich and matplotlib are imported only for a table or a picture.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.diagnostics.watching.causes import (
    EARLY_SAMPLED_STEPS,
    EARLY_STEPS,
    Failures,
    cause_of,
    describe,
    tau_of,
)
from attnscore.diagnostics.watching.health import (
    FAILURES,
    NO_EFFECT,
    SIGNS,
    WITH_LOSS,
    Memory,
    Period,
    Thresholds,
    Verdict,
    loss_trouble,
)
from attnscore.diagnostics.watching.remedies import Framework, remedy_for
from attnscore.diagnostics.watching.sums import LARGEST, Array, merged
from attnscore.errors import ArgumentError, message
from attnscore.io import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Row = dict[str, Any]
# Means over queries; `NUMBERS` has them in this order.
MEANS = (
    "logit_mean",
    "logit_variance",
    "log_sum_exp",
    "entropy",
    "max_weight",
    "effective_keys",
    "jacobian_trace",
    "first_key",
)
_COUNTS = ("rows", "empty_rows", "nan_rows", "choice_rows")
_MARKS = ("nan_query", "nan_key", "nan_value", "overflow_rows")
# Numbers whose mean is over other queries than `rows` counts, or over sequences, and the name of their count.
_OVER = {
    "saturated_rows": "choice_rows",
    "padding": "padding_rows",
    "query_variance": "sequences",
    "value_spread": "value_sequences",
}
# The one list of numbers: `rows`, `last`, `on_step`, `json_lines` and `history` all give these, in this order.
NUMBERS = (
    "rows", "empty_rows", "nan_rows", *MEANS, "query_variance", "value_spread", "max_logit", "choice_rows",
    "saturated_rows", "padding", "clip",
)  # fmt: skip
_JUDGED = (*NUMBERS, *_MARKS, "dtype_max", "scale_ratio", "biased")
# Columns of tables, and their titles.
COLUMNS = {
    "max_logit": "largest logit",
    "logit_variance": "logit variance",
    "entropy": "entropy",
    "effective_keys": "effective keys",
    "saturated_rows": "saturated",
    "first_key": "on first key",
    "clip": "QK-clip",
}
# Limit of the losses that are kept: of longer runs every second one goes, again and again.
_MOST_LOSSES = 4096
# Fewer losses are not judged.
_LOSSES_TO_JUDGE = 20
# Uniform weights are judged after this number of steps, in which a learning rate warms up.
_STEPS_OF_WARM_UP = 200
# Signs that other layers show too where the whole model's learning rate is too large.
_GROWTH = ("saturated", "sharp", "large logits", "growing logits")


@dataclass
class Layer:
    """Sums per head of one attention call of a model: over all steps, and of each of the last steps."""

    name: str
    heads: int
    steps: deque[tuple[int, dict[str, Array]]]
    total: dict[str, Array] = field(default_factory=dict)
    added: int = 0
    """Number of sampled steps so far."""

    def add(self, step: int, sums: dict[str, Array]) -> None:
        """Add the sums of a step."""
        self.steps.append((step, sums))
        self.added += 1
        self.total = merged([self.total, sums]) if self.total else dict(sums)

    def last(self, count: int) -> dict[str, Array]:
        """Return the sums of the last `count` sampled steps."""
        return merged([sums for _, sums in tuple(self.steps)[-count:]])

    def rows(self, sums: dict[str, Array], tau: float, names: Sequence[str] = NUMBERS) -> list[Row]:
        """Return a row for each head from sums of this layer; `tau` is the largest logit that QK-clip allows."""
        columns = {name: _column(sums, name, tau).tolist() for name in names}
        columns |= {name: [int(x) for x in columns[name]] for name in _COUNTS}
        return [
            {"layer": self.name, "head": head, **{name: values[head] for name, values in columns.items()}}
            for head in range(self.heads)
        ]


def _column(sums: dict[str, Array], name: str, tau: float) -> Array:
    """Return a number of every head; NaN where a mean has no queries, or a factor of QK-clip has no q.k to multiply."""
    if name == "clip":
        # min(1, tau / largest logit), by which QK-clip multiplies q.k
        return np.where(sums["other_score"] > 0, math.nan, tau / np.fmax(sums["max_logit"], tau))
    if name in (*_COUNTS, *LARGEST, *_MARKS):
        return sums[name]
    count = sums[_OVER.get(name, "rows")]
    return np.asarray(np.divide(sums[name], count, out=np.full(len(count), math.nan), where=count > 0))


def _is_causal(sums: dict[str, Array]) -> bool:
    """Return whether a causal mask is likely: in most sequences that have queries of one key, the first is one."""
    return bool((sums["causal_sequences"] > 0).any())


def _has_usual_scale(sums: dict[str, Array], limit: Thresholds) -> bool:
    """Return whether a layer multiplies q.k by about 1/sqrt(d); False where its factor is unknown (NaN)."""
    scale = _column(sums, "scale_ratio", limit.tau)
    return bool(((scale > 1 / limit.scale_factor) & (scale < limit.scale_factor)).all())


def _unlike_siblings(
    flags: Mapping[str, bool], sizes: Mapping[str, tuple[float, float]], *, by_role: bool = False
) -> set[str]:
    """Return the layers without a flag that more than half of the other layers of the same kind have.

    Layers of one kind have names that differ in numbers alone, and the same `sizes`: numbers of queries and of keys.
    `by_role`, for a flag that cross-attention does not have: where names differ in their last number, more than half
    of all layers of the kind need it.

    >>> flags = {"encoder.0": False, "decoder.0": True, "decoder.1": False}
    >>> _unlike_siblings(flags, dict.fromkeys(flags, (64, 16)))
    {'decoder.1'}
    """
    kinds: dict[tuple[str, float, float], list[str]] = {}
    for name in flags:
        kinds.setdefault((kind_of(name), *sizes[name]), []).append(name)
    unlike = set()
    for names in kinds.values():
        # A module's attention_1 may attend to itself and its attention_2 to another sequence: neither is the usual one.
        are_roles = by_role and len({re.sub(r"(?<=[A-Za-z])_?\d+$", "", name) for name in names}) < len(names)
        if 2 * sum(flags[name] for name in names) > len(names) - (not are_roles):
            unlike |= {name for name in names if not flags[name]}
    return unlike


def kind_of(name: str) -> str:
    """Return a name without its numbers: modules of one kind share it. Keras gives the first layer of a class none.

    >>> kind_of("decoder.layers.11.self_attn"), kind_of("attention"), kind_of("attention_1")
    ('decoder.layers.*.self_attn', 'attention', 'attention')
    """
    return re.sub(r"\d+", "*", re.sub(r"_\d+(?=[. ]|$)", "", name))


def _layer_of(name: str) -> str:
    """Return the layer of a call; "attention #2" is the second call of "attention" in a step."""
    return name.partition(" #")[0]


class Records:
    """Numbers that `watch` has collected so far.

    Attributes
    ----------
    layers : dict of name to Layer
    steps, sampled : int
        Number of calls of the model, and of recorded calls.
    unseen : Counter of (module, reason)
        Attention calls that could not be recorded.
    thresholds : Thresholds
        Can be replaced at any time, except ``saturated_weight``, which applies while queries are counted.
    unchecked_padding : str or None
        Argument of the model that looks like a padding mask, where none has a name in `padding_names`.
    clipped : set of (layer, head)
        Heads that `qk_clip` has scaled since the last sampled step.
    """

    framework: Framework = "torch"
    """Framework of the model, for the line of code in a remedy."""
    padding_names = "attention_mask (1 at tokens) or src_key_padding_mask (True at padding)"
    """Arguments of a model that the watch reads as padding masks, for its messages."""

    def __init__(self, thresholds: Thresholds) -> None:
        if not isinstance(thresholds, Thresholds):
            raise ArgumentError(message("thresholds", "Thresholds(...)", type(thresholds).__name__))
        self.thresholds = thresholds
        self.layers: dict[str, Layer] = {}
        self.steps = self.sampled = 0
        self.unseen: Counter[tuple[str, str]] = Counter()
        self.unchecked_padding: str | None = None
        self.clipped: set[tuple[str, int]] = set()
        self._losses: list[tuple[int, float]] = []
        self._stride = 1
        self._lock_of_memory = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        """Empty the memory from which verdicts are made; `_remember` fills it again from the steps that are kept."""
        self._memories: dict[str, Memory] = {}
        self._remembered: Counter[str] = Counter()
        self._first_steps: list[int] = []
        self._judged_by = self.thresholds

    @property
    def _layers(self) -> tuple[Layer, ...]:
        """The layers so far, as a copy: another thread may add to them."""
        return tuple(self.layers.values())

    def rows(self) -> list[Row]:
        """Return a row for each layer and head: means over the queries of all sampled steps, and the largest logit.

        ``pandas.DataFrame(seen.rows())`` is a table of them. Names: layer, head, rows (queries that attend to a key),
        empty_rows (fully masked queries), nan_rows (queries whose weights are NaN), logit_mean, logit_variance,
        log_sum_exp, entropy, max_weight, effective_keys, jacobian_trace, first_key, query_variance (at most so much
        variance do the queries give a logit), value_spread (share of the values' squares that their mean does not
        explain), max_logit, choice_rows (queries that attend to more than one key), saturated_rows (their share),
        padding (share of the weight), clip (the factor of QK-clip, NaN where the score is no multiple of q.k). Numbers
        that are unknown are NaN.
        """
        return [row for layer in self._layers for row in layer.rows(layer.total, self.thresholds.tau)]

    def last(self) -> list[Row]:
        """Return the rows of the last sampled step alone, as a repair needs: the largest logit of a run never falls."""
        last_sums = [(layer, *layer.steps[-1]) for layer in self._layers]
        last_step = max((step for _, step, _ in last_sums), default=-1)
        tau = self.thresholds.tau
        return [row for layer, step, sums in last_sums if step == last_step for row in layer.rows(sums, tau)]

    def recent(self) -> list[Row]:
        """Return the rows of the last ``thresholds.window`` sampled steps, which the verdicts judge."""
        return self._recent(NUMBERS)

    def _recent(self, names: Sequence[str]) -> list[Row]:
        tau, window = self.thresholds.tau, int(self.thresholds.window)
        return [row for layer in self._layers for row in layer.rows(layer.last(window), tau, names)]

    def clear(self) -> None:
        """Forget all numbers, verdicts and losses; the count of steps goes on.

        Call it after a checkpoint was restored: the verdicts are on the weights that are gone.
        """
        with self._lock_of_memory:
            self.layers.clear()
            self.unseen.clear()
            self.clipped.clear()
            self._losses.clear()
            self._stride = 1
            self._forget()
        self.sampled = 0

    def record_loss(self, loss: float, step: int | None = None) -> None:
        """Take the loss of a step, of the last one where `step` is not given; verdicts say when it rises or stays.

        Growing logits, sharp heads and falling entropy are failures only while the loss suffers. A tensor is read with
        ``float(loss)``.
        """
        number = self.steps - 1 if step is None else step
        value = float(getattr(loss, "detach", lambda: loss)())  # PyTorch warns of tensors that need a gradient
        if number % self._stride == 0 or not math.isfinite(value):
            self._losses.append((number, value))
        if len(self._losses) > _MOST_LOSSES:
            self._stride *= 2
            self._losses = self._losses[::2]

    def history(self, layer: str, name: str) -> tuple[list[int], Array]:
        """Return the sampled steps, and a number of each head in each of them: (step, head)."""
        if layer not in self.layers:
            none = "a recorded attention call, of which there is none"
            expected = f"one of {[*self.layers]}" if self.layers else none
            raise ArgumentError(message("layer", expected, repr(layer)))
        if name not in NUMBERS:
            raise ArgumentError(message("name", f"one of {list(NUMBERS)}", repr(name)))
        # A copy, as in `_layers`.
        steps, tau = tuple(self.layers[layer].steps), self.thresholds.tau
        return [step for step, _ in steps], np.array([_column(sums, name, tau) for _, sums in steps])

    def _remember_before_the_history_drops_a_step(self) -> None:
        """Take the sampled steps into the memory before the next step would drop one that the memory lacks."""
        if any(layer.added - self._remembered[layer.name] == layer.steps.maxlen for layer in self._layers):
            with self._lock_of_memory:
                self._remember()

    def _remember(self) -> None:
        """Take the sampled steps since the last call into the memory of each layer, in their order."""
        if self._judged_by != self.thresholds:
            self._forget()
        steps: dict[int, list[tuple[str, dict[str, Array]]]] = {}
        for layer in self._layers:
            new = layer.added - self._remembered[layer.name]
            self._remembered[layer.name] += new
            for step, sums in tuple(layer.steps)[-new:] if new else ():
                steps.setdefault(step, []).append((layer.name, sums))
        for step, of_step in sorted(steps.items()):
            if len(self._first_steps) < EARLY_SAMPLED_STEPS and step not in self._first_steps:
                self._first_steps.append(step)
            limit = self.thresholds
            sizes = {
                name: (max(sums["rows"] + sums["empty_rows"] + sums["nan_rows"]), sums["keys"][0])
                for name, sums in of_step
            }
            leaking = _unlike_siblings({name: _is_causal(sums) for name, sums in of_step}, sizes, by_role=True)
            unscaled = _unlike_siblings({name: _has_usual_scale(sums, limit) for name, sums in of_step}, sizes)
            numbers = {name: {x: _column(sums, x, limit.tau) for x in _JUDGED} for name, sums in of_step}
            # A decoder that reads its keys in order reads the first key alone in its calls for the first tokens.
            use_other_keys = {
                _layer_of(name) for name, columns in numbers.items() if (columns["first_key"] < limit.sink_layer).any()
            }
            for name, sums in of_step:
                # A head without numbers, as with NaN, does not show what its mask hides.
                leaks = name in leaking and bool((sums["rows"] > 0).all())
                memory = self._memories.setdefault(name, Memory(len(sums["rows"])))
                memory.add(
                    step, numbers[name], limit, leaks=leaks, usual_siblings=name in unscaled,
                    uses_other_keys=sums["queries"][0] == 1 and _layer_of(name) in use_other_keys,
                )  # fmt: skip

    def _periods(self) -> list[tuple[str, Period]]:
        """Return layer and period of each sign that a head shows or has shown."""
        with self._lock_of_memory:
            self._remember()
            return [(name, period) for name, memory in self._memories.items() for period in memory.periods()]

    def _failing(
        self, periods: Sequence[tuple[str, Period]], trouble: str, recent: Mapping[tuple[str, int], Row]
    ) -> list[tuple[str, Period]]:
        """Return the periods that are failures now; `trouble` is the loss's, `recent` the numbers of the last steps."""
        limit, heads = self.thresholds, {layer.name: layer.heads for layer in self._layers}
        # A sign that is a failure by itself explains the trouble of the loss: growing logits, say, are none then.
        is_explained = any(period.holds and period.sign in FAILURES for _, period in periods)
        unmasked = {(name, period.head) for name, period in periods if period.holds and period.sign == "padding"}
        idle = Counter((name, period.sign) for name, period in periods if period.holds)
        loss_falls = len(self._losses) >= _LOSSES_TO_JUDGE and not trouble

        def fails(name: str, period: Period) -> bool:
            if not period.holds:
                return False
            if period.sign in NO_EFFECT and (name, period.head) in unmasked:
                return False  # most of its keys are at padding, and alike
            was_always = period.first == self._first_steps[0]
            if period.sign == "dead" and was_always and 0 < len(self._losses) < _LOSSES_TO_JUDGE:
                return idle[name, "dead"] < heads[name]  # weights that start at 0, as some of muP, do not stay so
            if period.sign == "no use of the query" and loss_falls and period.evidence["drifted"]:
                return False  # as latents of a Perceiver, which become alike while it learns
            if period.sign == "no use of the query" and loss_falls and 1 < idle[name, period.sign] == heads[name]:
                # Before the model has learnt much, a post-norm layer may wait so and learn later.
                first, now = (np.mean([loss for _, loss in part]) for part in (self._losses[:5], self._losses[-5:]))
                return bool(first - now > limit.loss_rise * abs(first))
            if period.sign == "saturated" and loss_falls and period.evidence["rise"] < limit.jump:
                bound = limit.loss_allows * limit.saturated_variance
                return not recent[name, period.head]["logit_variance"] < bound
            if period.sign in FAILURES:
                return True
            is_flat = period.sign == "uniform" or (
                period.sign == "unusual scale" and period.evidence["scale_ratio"] < 1
            )
            stays = trouble == "stays at its start"
            # Nothing has grown: such a model may have been trained before. In a warm-up weights stay as they were.
            is_old = was_always and period.sign in ("sharp", "large logits")
            if stays and (is_old or (is_flat and self.steps < _STEPS_OF_WARM_UP)):
                return False
            return bool(trouble) and not is_explained and period.sign in WITH_LOSS and (not is_flat or stays)

        return [(name, period) for name, period in periods if fails(name, period)]

    def _context(self, periods: Sequence[tuple[str, Period]], failing: Sequence[tuple[str, Period]]) -> Failures:
        """Return the failing periods by layer, with the steps and layers from which their causes follow."""
        first, *later = self._first_steps or [0]
        fourth = later[EARLY_SAMPLED_STEPS - 2] if len(later) >= EARLY_SAMPLED_STEPS - 1 else math.inf
        early_until = max(first + EARLY_STEPS, fourth)
        # Logits of healthy layers grow as well, but later than in a layer that fails early. Twice as late still
        # counts: a rate may be too large for all layers.
        growth_until = first + 2 * (early_until - first)
        growing = {
            name for name, period in periods if period.holds and period.sign in _GROWTH and period.first <= growth_until
        }
        failures = Failures(first, early_until, {layer.name: layer.heads for layer in self._layers}, growing=growing)
        for name, period in failing:
            failures.periods.setdefault(name, []).append(period)
        return failures

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts: failures in the order of their first step, then the other signs, in that order.

        The last sampled steps decide (``thresholds.window``). A sign that has ended is no failure: its words say so.
        Heads that hold NaN because an earlier head does are in `followers` of that head's verdict.
        """
        periods, trouble = self._periods(), loss_trouble([loss for _, loss in self._losses], self.thresholds)
        recent = {(row["layer"], row["head"]): row for row in self._recent(_JUDGED)}
        place = {name: number for number, name in enumerate(self._memories)}
        failing = self._failing(periods, trouble, recent)
        failures = self._context(periods, failing)
        with_nan = [each for each in failing if each[1].sign == "not a number"]
        origin = min(((period.first, place[name]) for name, period in with_nan), default=None)
        followers = [(name, period.head) for name, period in with_nan if (period.first, place[name]) != origin]
        no_effect: dict[tuple[str, int], Period] = {}
        for name, period in sorted(periods, key=lambda each: (not each[1].holds, each[1].first)):
            if period.sign in NO_EFFECT:
                no_effect.setdefault((name, period.head), period)
        judged: list[tuple[str, Period, str]] = []
        of_cause: dict[tuple[str, str], list[Period]] = {}
        for name, period in periods:
            failure = (name, period) in failing
            if failure and period.sign == "not a number" and (name, period.head) in followers:
                continue
            if not period.holds and period.sign not in FAILURES:
                continue
            if period.sign in NO_EFFECT and period != no_effect[name, period.head]:
                continue
            cause = cause_of(name, period, failures, self.thresholds) if failure else ""
            judged.append((name, period, cause))
            of_cause.setdefault((name, cause), []).append(period)
        # One remedy for all heads of a layer with the same cause.
        remedies = {}
        for (name, cause), group in of_cause.items():
            heads, first = sorted({period.head for period in group}), min(period.first for period in group)
            tau = tau_of([recent[name, head] for head in heads], self.thresholds)
            remedies[name, cause] = remedy_for(cause, name, heads, first, tau, self.framework) if cause else ""
        verdicts: list[Verdict] = []
        for name, period, cause in judged:
            words = describe(period, recent[name, period.head], self.thresholds)
            words += "" if period.holds else f"; no more after step {period.last}"
            words += f"; earlier from step {period.earlier[0]} to {period.earlier[1]} too" if period.earlier else ""
            words += f"; the loss {trouble}" if cause and period.sign in WITH_LOSS else ""
            verdicts.append(
                Verdict(
                    name, period.head, period.sign, words, bool(cause), period.first, period.last, cause,
                    remedies[name, cause], tuple(followers) if cause and period.sign == "not a number" else (),
                )
            )  # fmt: skip
        order = {sign: number for number, sign in enumerate(SIGNS)}
        return sorted(verdicts, key=lambda v: (not v.failure, v.first_step, place[v.layer], v.head, order[v.sign]))

    def failing(self) -> list[tuple[str, int]]:
        """Return layer and head of every head with a failure, in the order of their first steps."""
        return list(dict.fromkeys((verdict.layer, verdict.head) for verdict in self.verdicts() if verdict.failure))

    def json_lines(self, since: int = 0) -> Iterator[str]:
        """Yield one line for each kept step from `since` on, layer and head: `step`, the names of `rows`, `verdicts`.

        `verdicts` are the signs that the head showed then, in their present or last period. Written as json.dumps does;
        NaN and infinity become null.
        """
        periods: dict[tuple[str, int], list[Period]] = {}
        for name, period in self._periods():
            periods.setdefault((name, period.head), []).append(period)
        steps = [(step, layer, sums) for layer in self._layers for step, sums in tuple(layer.steps) if step >= since]
        for step, layer, sums in sorted(steps, key=lambda entry: entry[0]):
            for row in layer.rows(sums, self.thresholds.tau):
                shown = [x.sign for x in periods.get((layer.name, row["head"]), ()) if x.first <= step <= x.last]
                plain = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
                yield json.dumps({"step": step, **plain, "verdicts": shown}, allow_nan=False)

    def table(self) -> Table:
        """Return a rich table: a line for each head, with its verdicts."""
        require("rich", "table", "pip install 'attnscore[cli]'")
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._title(), "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, column in {"layer": "layer", "head": "head", **COLUMNS, "verdicts": "verdicts"}.items():
            is_text = name in ("layer", "verdicts")
            table.add_column(column, justify="left" if is_text else "right", overflow="fold")
        for row, verdicts in self._judged_rows():
            style = "red" if any(verdict.failure for verdict in verdicts) else ""
            cells = (row["layer"], str(row["head"]), *(f"{row[column]:.3g}" for column in COLUMNS))
            table.add_row(*map(Text, cells), Text(", ".join(verdict.sign for verdict in verdicts), style))
        for (name, why), count in self.unseen.items():
            table.add_row(Text(name), "", *[""] * len(COLUMNS), Text(f"{count} calls not seen: {why}", "yellow"))
        return table

    def _judged_rows(self) -> Iterator[tuple[Row, list[Verdict]]]:
        """Yield each row of the last steps with the verdicts on its head."""
        verdicts: dict[tuple[str, int], list[Verdict]] = {}
        for verdict in self.verdicts():
            verdicts.setdefault((verdict.layer, verdict.head), []).append(verdict)
            for place in verdict.followers:
                verdicts.setdefault(place, []).append(verdict)
        for row in self.recent():
            yield row, verdicts.get((row["layer"], row["head"]), [])

    def _title(self) -> str:
        if self.sampled and not self.layers:
            return f"{self.sampled} of {self.steps} steps sampled, and no attention call in them could be recorded"
        return f"{len(self.layers)} attention calls a step; {self.sampled} of {self.steps} steps sampled"

    def _state(self) -> list[str]:
        """Return one sentence on the model's health; nothing where a head fails or no attention call was recorded."""
        if not self.layers or self.failing():
            return []
        trouble = loss_trouble([loss for _, loss in self._losses], self.thresholds)
        if not trouble:
            return ["No head fails."]
        return [f"No head fails, but the loss {trouble}: attention looks healthy; "
                "look at the MLPs, the data, the learning rate."]  # fmt: skip

    def _lines(self, failures: bool) -> list[str]:
        """Return the verdicts that are failures, or the others; heads of a layer with the same one are in one line."""
        groups: dict[tuple[Any, ...], list[Verdict]] = {}
        for verdict in self.verdicts():
            key = (verdict.layer, verdict.sign, verdict.cause, verdict.first_step)
            if verdict.failure == failures:
                groups.setdefault(key if failures else key[:2], []).append(verdict)
        lines, last_cause = [], ""
        for first, *others in groups.values():
            heads = sorted([first.head, *(each.head for each in others)])
            lines.append(str(first) if not others else _of_heads(first, heads))
            if first.followers:
                lines.append(f"    {len(first.followers)} other heads have followed")
            if first.cause and first.cause != last_cause:
                words, _, code = first.remedy.partition(":\n")
                lines += [f"    cause: {first.cause}", f"    try: {words}:", textwrap.indent(code, " " * 8)]
                last_cause = first.cause
        return lines

    def _other_lines(self) -> list[str]:
        """Return lines on the parts that were not checked or not seen."""
        unseen = [f"{name}: {count} calls not seen: {why}" for (name, why), count in self.unseen.items()]
        if self.unchecked_padding is None:
            return unseen
        words = f"Padding was not checked: the model's argument {self.unchecked_padding!r} looks like its mask;"
        return [f"{words} if it is, call it {self.padding_names}, as other names may mean other masks", *unseen]

    def __str__(self) -> str:
        """Return failures with causes and remedies, the other signs, and the parts that were not checked or seen."""
        observed = self._lines(False)
        header = ["Observed, not failures:"] if observed else []
        return "\n".join([self._title(), *self._state(), *self._lines(True), *header, *observed, *self._other_lines()])

    def to_html(self, path: str | Path, *, title: str = "What a model's attention did") -> Path:
        """Write verdicts, the picture and a table of the heads as one HTML file for offline use (needs matplotlib)."""
        from attnscore.diagnostics.page import Section, write_page
        from attnscore.diagnostics.watching.picture import short_names

        pattern, short = short_names(list(self.layers))
        of_layer = dict(zip(self.layers, short, strict=True))
        rows = [
            {"layer": of_layer[row["layer"]], "head": row["head"]}
            | {title: row[name] for name, title in COLUMNS.items()}
            | {"verdicts": ", ".join(dict.fromkeys(verdict.sign for verdict in verdicts))}
            for row, verdicts in self._judged_rows()
        ]
        failures = [*self._state(), *self._lines(True)] or ["Nothing was recorded."]
        observed = [*self._lines(False), *self._other_lines()]
        sections = [Section("Failures", failures)]
        sections += [Section("Observed, not failures", observed)] if observed else []
        if rows:  # without a sampled step there is nothing to draw
            count, names = min(int(self.thresholds.window), self.sampled), [f"Layer * is {pattern}."] if pattern else []
            means = f"Means over the queries of the last {count} sampled steps."
            sections.append(Section("Heads", [means, *names], rows, self.plot()))
        return write_page(path, title, self._title(), sections)

    def plot(self) -> Figure:
        """Draw maps of layers by heads, of now and of the worst step; under them two numbers over the steps.

        A quantity has the same scale in every picture where it has one: shares from 0 to 1, logits over the powers of
        ten around `tau`. Darker cells are closer to collapse in every map, cells without numbers are violet; heads with
        a failure are framed and named, and a line marks the first failure.
        """
        from attnscore.diagnostics.watching.picture import draw

        return draw(self)


def _of_heads(first: Verdict, heads: Iterable[int]) -> str:
    """Return the text of the same verdict on several heads, with the numbers of the first."""
    text = str(first).replace(f", head {first.head}:", f", heads {', '.join(map(str, heads))}:", 1)
    return text.removesuffix(")") + f"; head {first.head})"
