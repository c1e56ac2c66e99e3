"""Checks for whoever adds a score, a kernel or a framework; attnscore's own tests call them too.

Each draws small random arrays of odd sizes, raises AssertionError that says what failed and by how much, and returns
nothing when all holds. A framework is imported only when an array of it was given.
"""

from attnscore.testing.scores import check_score
from attnscore.testing.ways import check_kernel
from attnscore.testing.words import check_framework

__all__ = ["check_framework", "check_kernel", "check_score"]
