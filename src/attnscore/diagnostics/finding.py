"""What an experiment gives: plain data that says what was found, as rows, as a sentence, as a picture.

What this module meets:
- a finding is frozen data; whoever wants other words or another picture has `to_rows`;
- a claim that can fail is a `Check` with the difference that was measured and the one that is allowed;
- an exponent comes with the half-width of its 95 % confidence interval.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Row = dict[str, Any]
SCORES = ("dot", "scaled_dot")
NAMES = {"dot": "q·k", "scaled_dot": "q·k / √d"}
"""What tables and pictures call the two scores that are compared."""


class Check(NamedTuple):
    """A claim, the difference from it that was measured, and the one that is allowed."""

    claim: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        """False for NaN too."""
        return bool(self.difference <= self.allowed)


class Finding(ABC):
    """The result of one experiment."""

    @abstractmethod
    def to_rows(self) -> list[Row]:
        """One dictionary per measurement, with the same names in each: what pandas.DataFrame takes."""

    def summary(self) -> list[Row]:
        """The rows of a table that fits on a screen; none where the sentence says it all."""
        return self.to_rows()

    @abstractmethod
    def sentence(self) -> str:
        """What was found, with its numbers."""

    @abstractmethod
    def plot(self) -> Figure:
        """A picture of it (needs matplotlib)."""

    def to_html(self, path: str | Path, *, title: str = "Why scores are scaled") -> Path:
        """Write the sentence, the picture and every row as one HTML file, which opens offline (needs matplotlib)."""
        from attnscore.diagnostics.page import Section, write_page

        return write_page(
            path, title, "One experiment.", [Section(title, [self.sentence()], self.to_rows(), self.plot())]
        )

    def checks(self) -> tuple[Check, ...]:
        """What must be so; none where there is only something to see."""
        return ()


def rounded(value: float, digits: int = 2) -> str:
    """A number to so many decimals, and what rounds to nothing without a sign.

    >>> rounded(-0.001)
    '0.00'
    """
    return f"{round(value, digits) + 0.0:.{digits}f}"


class Estimate(NamedTuple):
    """A number and the half-width of its 95 % confidence interval.

    >>> print(Estimate(64.25, 0.5))
    64.25 ± 0.50
    """

    value: float
    margin: float

    def __str__(self) -> str:
        if not math.isfinite(self.margin):
            return f"{self.value:.4g}"
        # As many digits as the margin gives a meaning to.
        digits = max(0, 1 - math.floor(math.log10(self.margin))) if self.margin > 0 else 3
        return f"{rounded(self.value, digits)} ± {rounded(self.margin, digits)}"


def estimate(samples: Sequence[float] | Array) -> Estimate:
    """The mean of independent samples, with its confidence interval by Student's t.

    >>> print(estimate([1.0, 2.0, 3.0]))
    2.0 ± 2.5
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size < 2:
        return Estimate(float(values.mean()), float("nan"))
    return Estimate(float(values.mean()), _student(values.size - 1) * float(values.std(ddof=1)) / values.size**0.5)


def exponent(sizes: Sequence[float] | Array, values: Sequence[float] | Array) -> Estimate:
    """The b of values ~ a sizes^b, by least squares on logarithms.

    >>> print(exponent([1, 2, 4, 8], [3, 6, 12, 24]).value.__round__(6))
    1.0
    """
    x, y = np.log(np.asarray(sizes, dtype=np.float64)), np.log(np.asarray(values, dtype=np.float64))
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    if x.size < 3:
        return Estimate(slope, float("nan"))
    left = y - slope * x
    return Estimate(slope, _student(x.size - 2) * float(np.sqrt(left @ left / (x.size - 2) / (x @ x))))


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: tabled where it differs from a series in 1/freedom by more than 1e-3."""
    tabled = (12.706, 4.303, 3.182, 2.776, 2.571)
    if freedom <= len(tabled):
        return tabled[freedom - 1]
    # Cornish-Fisher: 1.96 corrected for the tails.
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return float(z + first / freedom + second / freedom**2 + third / freedom**3)
