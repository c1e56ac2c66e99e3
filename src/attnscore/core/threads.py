"""How many threads the native kernels use. Kept here, so that it works without the native module too.

The default is read at the first use: OMP_NUM_THREADS, or the CPUs that this process may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from attnscore.core.arguments import check_count
from attnscore.errors import ArgumentError, message

# As many as the pool takes.
MOST_THREADS = 1024
_chosen: list[int] = []
_followers: list[Callable[[int], object]] = []


def set_num_threads(n: int) -> None:
    """Let the native kernels use `n` threads. Results do not depend on it.

    Called from PyTorch they use ``torch.get_num_threads()`` instead.

    Parameters
    ----------
    n : int
        1 or more.

    Raises
    ------
    ArgumentError
        `n` is no whole number from 1 to 1024.

    Examples
    --------
    >>> import attnscore as ats
    >>> before = ats.get_num_threads()
    >>> ats.set_num_threads(1)
    >>> ats.get_num_threads()
    1
    >>> ats.set_num_threads(before)
    """
    check_count("n", n)
    if not 1 <= n <= MOST_THREADS:
        raise ArgumentError(message("n", f"a number of threads from 1 to {MOST_THREADS}", n))
    _chosen[:] = [int(n)]
    for tell in _followers:
        tell(int(n))


def get_num_threads() -> int:
    """The number of threads that the native kernels use, but from PyTorch.

    Returns
    -------
    int
        What `set_num_threads` set; before that OMP_NUM_THREADS, or else the CPUs that this process may use.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.get_num_threads() >= 1
    True
    """
    if not _chosen:
        _chosen.append(_default())
    return _chosen[0]


def follow(tell: Callable[[int], object]) -> None:
    """``tell(n)`` the number of threads now and whenever it is set: for code that cannot ask when it runs."""
    tell(get_num_threads())
    _followers.append(tell)


def _default() -> int:
    # "4,2" means 4 outside and 2 in nested regions; what is no number is ignored, as OpenMP does.
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    count = int(text) if text.isascii() and text.isdigit() else 0
    if count < 1:
        # Fewer than the machine has in a container or under taskset.
        allowed = getattr(os, "sched_getaffinity", None)
        count = len(allowed(0)) if allowed else os.cpu_count() or 1
    return min(count, MOST_THREADS)
