"""Whether what a document shows is what came out: by words and numbers, not by print.

NumPy 1 writes ``True`` and ``0.25`` where NumPy 2 writes ``np.True_`` and ``np.float64(0.25)``, and the spaces and last
digits of an array move between releases.
"""

from __future__ import annotations

import doctest
import math
import re

NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|inf|nan)(?![\w.])")
NUMPY_2 = re.compile(r"\bnp\.(?:\w+?_?)\(([^()]*)\)|\bnp\.(True|False)_")


class WordsAndNumbers(doctest.OutputChecker):
    """The same words in the same order, and numbers that agree to their last shown digits."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if super().check_output(want, got, optionflags):
            return True
        if optionflags & doctest.ELLIPSIS and "..." in want:
            return False
        want, got = (NUMPY_2.sub(lambda m: m.group(1) or m.group(2), text) for text in (want, got))
        words = [re.sub(r"[\s,]+", "", NUMBER.sub("#", text)) for text in (want, got)]
        numbers = [[float(x) for x in NUMBER.findall(text)] for text in (want, got)]
        return (
            words[0] == words[1]
            and len(numbers[0]) == len(numbers[1])
            and all(_close(a, b) for a, b in zip(*numbers, strict=True))
        )


def _close(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
