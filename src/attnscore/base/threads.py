"""Number of threads of the native kernels; works without the native module.

The default, read at the first use, is OMP_NUM_THREADS or the number of CPUs that this process may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from attnscore.base.arguments import is_whole, shown
from attnscore.errors import ArgumentError, message

# The most that the native thread pool takes.
MAX_THREADS = 1024
_chosen: list[int] = []
_followers: list[Callable[[int], object]] = []


def set_num_threads(n: int) -> None:
    """Set the number of threads of the native kernels. Results do not depend on it.

    Called from PyTorch they use ``torch.get_num_threads()`` instead.

    Parameters
    ----------
    n : int
        From 1 to 1024.

    Raises
    ------
    ArgumentError
        `n` is not a whole number from 1 to 1024.

    Examples
    --------
    >>> import attnscore as ats
    >>> before = ats.get_num_threads()
    >>> ats.set_num_threads(1)
    >>> ats.get_num_threads()
    1
    >>> ats.set_num_threads(before)
    """
    if not is_whole(n) or not 1 <= n <= MAX_THREADS:
        raise ArgumentError(message("n", f"a whole number from 1 to {MAX_THREADS}", shown(n)))
    _chosen[:] = [int(n)]
    for set_threads in _followers:
        set_threads(int(n))


def get_num_threads() -> int:
    """Return the number of threads of the native kernels, except in calls from PyTorch.

    Returns
    -------
    int
        The number of `set_num_threads`; by default OMP_NUM_THREADS, or the number of CPUs that this process may use.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.get_num_threads() >= 1
    True
    """
    if not _chosen:
        _chosen.append(_default())
    return _chosen[0]


def follow(set_threads: Callable[[int], object]) -> None:
    """Call ``set_threads(n)`` now and whenever the number is set: for native code that runs without Python."""
    set_threads(get_num_threads())
    _followers.append(set_threads)


def _default() -> int:
    # "4,2" means 4 outside and 2 in nested regions; anything but a number is ignored, as in OpenMP.
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    count = int(text) if text.isascii() and text.isdigit() else 0
    if count < 1:
        # Fewer than the machine has under taskset, or in a container with a set of CPUs.
        allowed = getattr(os, "sched_getaffinity", None)
        count = len(allowed(0)) if allowed else os.cpu_count() or 1
    return min(count, MAX_THREADS)
