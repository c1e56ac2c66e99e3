"""Results of experiments as plain data, their checks, and estimates with confidence intervals.

Requirements:
- a result is frozen data; `to_rows` gives its numbers for other words or another picture;
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

from attnscore.base.arguments import is_whole, shown
from attnscore.errors import ArgumentError, message

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Row = dict[str, Any]
SCORES = ("dot", "scaled_dot")
NAMES = {"dot": "q·k", "scaled_dot": "q·k / √d"}
"""Names of the two compared scores in tables and pictures."""


class Check(NamedTuple):
    """Claim with the measured difference from it and the allowed one."""

    claim: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the difference is allowed; a NaN is not."""
        return bool(self.difference <= self.allowed)


class Result(ABC):
    """Result of one experiment: rows, a sentence, a picture and checks."""

    @abstractmethod
    def to_rows(self) -> list[Row]:
        """Return one dictionary per measurement, with the same names in each, for pandas.DataFrame."""

    def summary(self) -> list[Row]:
        """Return the rows of a table that fits on a screen; none where the sentence has every number."""
        return []

    @abstractmethod
    def sentence(self) -> str:
        """Return the finding and its numbers as a sentence."""

    @abstractmethod
    def plot(self) -> Figure:
        """Draw the finding (needs matplotlib)."""

    def to_html(self, path: str | Path, *, title: str = "Why scores are scaled") -> Path:
        """Write the sentence, the picture and every row as one HTML file, which opens offline (needs matplotlib)."""
        from attnscore.diagnostics.page import Section, write_page

        section = Section(title, [self.sentence()], self.to_rows(), self.plot())
        return write_page(path, title, "One experiment.", [section])

    def checks(self) -> tuple[Check, ...]:
        """Return the claims that must hold; none where the experiment only shows something."""
        return ()


def check_sizes(name: str, sizes: Sequence[int], *, least: int = 1) -> None:
    """Raise unless these are positive whole numbers, `least` of them or more."""
    if not np.iterable(sizes) or len(sizes) < least or not all(is_whole(size) and size >= 1 for size in sizes):
        many = f"{least} or more of them" if least > 1 else "above 0"
        raise ArgumentError(message(name, f"positive whole numbers, {many}", shown(sizes)))


class Estimate(NamedTuple):
    """Number with the half-width of its 95 % confidence interval.

    >>> print(Estimate(64.25, 0.5))
    64.25 ± 0.50
    """

    value: float
    margin: float

    def __str__(self) -> str:
        if not math.isfinite(self.margin):
            return f"{self.value:.4g}"
        # Two significant digits of the margin; more digits of the value would mean nothing.
        digits = max(0, 1 - math.floor(math.log10(self.margin))) if self.margin > 0 else 3
        return " ± ".join(f"{round(number, digits) + 0.0:.{digits}f}" for number in self)


def estimate(samples: Sequence[float] | Array) -> Estimate:
    """Return the mean of independent samples with its confidence interval by Student's t.

    >>> print(estimate([1.0, 2.0, 3.0]))
    2.0 ± 2.5
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size < 2:
        return Estimate(float(values.mean()), float("nan"))
    return Estimate(float(values.mean()), _student(values.size - 1) * float(values.std(ddof=1)) / values.size**0.5)


def exponent(sizes: Sequence[float] | Array, values: Sequence[float] | Array) -> Estimate:
    """Fit the b of values ~ a sizes^b by least squares on logarithms.

    >>> print(exponent([1, 2, 4, 8], [3, 6, 12, 24]).value.__round__(6))
    1.0
    """
    x, y = (np.log(np.asarray(numbers, dtype=np.float64)) for numbers in (sizes, values))
    if np.unique(x).size < 2:
        return Estimate(float("nan"), float("nan"))
    if x.size < 3:
        return Estimate(float(np.polyfit(x, y, 1)[0]), float("nan"))
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    return Estimate(float(slope), _student(x.size - 2) * float(covariance[0, 0]) ** 0.5)


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for degrees of freedom, by a table where the series is off by 1e-3."""
    tabled = (12.706, 4.303, 3.182, 2.776, 2.571)
    if freedom <= len(tabled):
        return tabled[freedom - 1]
    # Cornish-Fisher: 1.96 corrected for the tails.
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return float(z + first / freedom + second / freedom**2 + third / freedom**3)
