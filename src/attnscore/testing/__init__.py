"""Checks of a new score, kernel or framework; attnscore's own tests call them too.

Each draws small random arrays of odd sizes and raises an AssertionError that says what failed and by how much. A
framework is imported only when an array of it was given.
"""

from attnscore.testing.backends import check_framework
from attnscore.testing.kernels import check_kernel
from attnscore.testing.scores import check_score

__all__ = ["check_framework", "check_kernel", "check_score"]
