"""set_num_threads and get_num_threads: with the native module and without it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import attnscore as ats


def threads_in_new_process(**environment: str) -> str:
    code = "import attnscore as ats; print(ats.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("5,2", 5), (" 4 ", 4), ("2000000", 1024)])
@pytest.mark.slow_rows("5,2-5", "2000000-*", " 4 -4", "3-3")
def test_the_environment_sets_the_threads(text: str, count: int) -> None:
    assert threads_in_new_process(OMP_NUM_THREADS=text) == str(count)
    assert threads_in_new_process(OMP_NUM_THREADS=text, ATTNSCORE_NO_NATIVE="1") == str(count)


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "²"])
def test_threads_that_the_environment_does_not_settle(text: str) -> None:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads_in_new_process(OMP_NUM_THREADS=text) == str(count)


def test_set_num_threads() -> None:
    before = ats.get_num_threads()
    try:
        for n in (3, np.int64(1), 1024):
            ats.set_num_threads(n)
            assert ats.get_num_threads() == n
            assert type(ats.get_num_threads()) is int
    finally:
        ats.set_num_threads(before)


@pytest.mark.parametrize("wrong", [0, -1, 1025, 1.5, "two", None, True])
def test_wrong_numbers_of_threads(wrong: object) -> None:
    before = ats.get_num_threads()
    with pytest.raises(ats.ArgumentError, match="n: expected"):
        ats.set_num_threads(wrong)  # type: ignore[arg-type]
    assert ats.get_num_threads() == before
