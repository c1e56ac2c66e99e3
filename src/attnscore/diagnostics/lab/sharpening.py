"""Effect of the variance of the logits on the softmax: four logits y, their multiples, weights and Jacobians.

Requirements:
- the numbers are D2L's, to the digits that it prints;
- Jacobians come from `softmax_jacobian`: diag(s) - s s^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import attnscore as ats
from attnscore.diagnostics.lab.experiment import Array, Check, Result, Row
from attnscore.plotting import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOGITS = (0.2, 0.4, 0.1, 0.8)
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
# Expected values for LOGITS, by factor: weights to three digits, Jacobians to five.
WEIGHTS = {1.0: (0.202, 0.247, 0.183, 0.368), 8.0: (0.008, 0.039, 0.004, 0.950)}
JACOBIANS = {
    1.0: (
        (0.16125, -0.04988, -0.03695, -0.07441),
        (-0.04988, 0.1859, -0.04513, -0.09089),
        (-0.03695, -0.04513, 0.14942, -0.06733),
        (-0.07441, -0.09089, -0.06733, 0.23264),
    ),
    8.0: (
        (0.00776, -0.0003, -0.00003, -0.00743),
        (-0.0003, 0.03722, -0.00014, -0.03678),
        (-0.00003, -0.00014, 0.0035, -0.00334),
        (-0.00743, -0.03678, -0.00334, 0.04755),
    ),
}


@dataclass(frozen=True, eq=False)
class Sharpening(Result):
    """Result of `sharpening`: a row of `weights` and a Jacobian for each factor."""

    logits: tuple[float, ...]
    factors: tuple[float, ...]
    weights: Array
    jacobians: Array

    @property
    def norms(self) -> Array:
        """Frobenius norm of each Jacobian."""
        return np.asarray(np.linalg.norm(self.jacobians, axis=(1, 2)))

    @property
    def entropies(self) -> Array:
        """Entropy of the weights in nats, for each factor."""
        positive = np.where(self.weights > 0, self.weights, 1.0)
        return np.asarray(-(self.weights * np.log(positive)).sum(-1))

    def to_rows(self) -> list[Row]:
        variance = float(np.var(self.logits))
        return [
            {
                "factor": factor,
                "variance of the logits": factor**2 * variance,
                **{f"weight {place}": float(weight) for place, weight in enumerate(row)},
                "entropy": float(entropy),
                "norm of the Jacobian": float(norm),
            }
            for factor, row, entropy, norm in zip(self.factors, self.weights, self.entropies, self.norms, strict=True)
        ]

    def summary(self) -> list[Row]:
        """Return the rows with all weights in one column, to the digits that D2L prints."""
        return [
            {
                "factor": row["factor"],
                "variance": row["variance of the logits"],
                "weights": " ".join(f"{weight:.3f}" for weight in weights),
                "entropy": row["entropy"],
                "norm of J": row["norm of the Jacobian"],
            }
            for row, weights in zip(self.to_rows(), self.weights, strict=True)
        ]

    def sentence(self) -> str:
        first, last = (self.factors.index(factor) for factor in (1.0, 8.0))
        return (
            f"Eight times the logits is 64 times their variance: the largest weight goes from "
            f"{self.weights[first].max():.3f} to {self.weights[last].max():.3f}, and the norm of the softmax Jacobian "
            f"from {self.norms[first]:.3f} to {self.norms[last]:.3f}."
        )

    def checks(self) -> tuple[Check, ...]:
        if self.logits != LOGITS:
            return ()
        checks = []
        for factor, weights in WEIGHTS.items():
            place, name = self.factors.index(factor), "y" if factor == 1 else f"{factor:g}y"
            of_weights = float(np.abs(self.weights[place] - weights).max())
            of_jacobian = float(np.abs(self.jacobians[place] - JACOBIANS[factor]).max())
            checks.append(Check(f"softmax({name}) to three digits", of_weights, 0.5e-3 * 1.0001))
            checks.append(Check(f"Jacobian of softmax({name}) to five digits", of_jacobian, 0.5e-5 * 1.0001))
        return tuple(checks)

    def plot(self) -> Figure:
        """Draw the weights of every multiple as bars; the Jacobians of y and 8 y as maps with their numbers."""
        from matplotlib import colormaps

        places = [self.factors.index(factor) for factor in (1.0, 8.0)]
        figure = drawing.new_figure((9.2, 3.1))
        bars, *maps = figure.subplots(1, 3, width_ratios=[1.5, 1.0, 1.0])
        each = 0.84 / len(self.factors)
        # Neither the palest nor the darkest blues: they vanish on a white or on a dark page.
        colours = colormaps["Blues"](np.linspace(0.3, 0.9, len(self.factors)))
        for place, (factor, row, colour) in enumerate(zip(self.factors, self.weights, colours, strict=True)):
            at = np.arange(len(row)) + (place - (len(self.factors) - 1) / 2) * each
            bars.bar(at, row, each * 0.92, color=colour, label="y" if factor == 1 else f"{factor:g} y")
        bars.set_xticks(range(len(self.logits)), [f"{logit:g}" for logit in self.logits])
        bars.set_ylim(0, 1)
        drawing.style_lines(bars, "Softmax of multiples of y", "logit in y", "weight")
        bars.grid(axis="x", visible=False)
        drawing.legend(bars, loc="upper left", ncols=2)
        limits = drawing.limits_of(self.jacobians[places])
        for axis, place, name in zip(maps, places, ("y", "8 y"), strict=True):
            image = drawing.draw_map(axis, self.jacobians[place], limits=limits, every=True)
            drawing.write_numbers(axis, image, self.jacobians[place], lambda value: f"{round(value, 4) + 0.0:.4f}")
            title = f"Jacobian at {name}: norm {self.norms[place]:.3f}"
            drawing.label(axis, title, "logit j", "weight i" if axis is maps[0] else "", title_points=10)
        drawing.colour_bar(figure, image, maps, "derivative of weight i by logit j")
        return figure


def sharpening(logits: Sequence[float] = LOGITS, factors: Sequence[float] = FACTORS) -> Sharpening:
    """Compute the softmax of multiples of some logits, and its Jacobians.

    Parameters
    ----------
    logits : numbers
    factors : numbers; 1 and 8 are always among them

    Returns
    -------
    Sharpening

    Examples
    --------
    >>> found = sharpening()
    >>> found.weights[found.factors.index(8.0)].round(3)
    array([0.008, 0.039, 0.004, 0.95 ])
    """
    y = np.asarray(logits, dtype=np.float64)
    every = tuple(sorted({float(factor) for factor in factors} | {1.0, 8.0}))
    weights = np.stack([ats.masked_softmax(factor * y) for factor in every])
    return Sharpening(tuple(float(logit) for logit in y), every, weights, np.asarray(ats.softmax_jacobian(weights)))
