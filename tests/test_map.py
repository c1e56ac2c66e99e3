"""docs/map.md says which files a query passes through: the list equals a call's."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.backends import torch as torch_backend
from attnscore.base.cache import BoundedCache

SOURCE = Path(ats.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "map.md"
# Of tensors that the native module reads itself.
NATIVE = bool(ats.available()["kernels"]["native"]) and torch_backend._READS_TENSORS
# The operations of the framework are called as NumPy's would be.
OPERATIONS = "backends/torch.py"
pytestmark = [
    pytest.mark.skipif(not NATIVE, reason="the map is that of the native kernel"),
    pytest.mark.usefixtures("first_call"),
]


def profiled(call: Callable[[], Any], profile: Callable[[FrameType, str, Any], None]) -> None:
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)


def entries(call: Callable[[], Any], query: torch.Tensor) -> Counter[str]:
    """Count, for each file, the calls from other files that pass it the query: itself, in a collection, or a view."""
    found: Counter[str] = Counter()

    def holds(x: Any, depth: int = 0) -> bool:
        if isinstance(x, torch.Tensor):
            return x.data_ptr() == query.data_ptr()
        if isinstance(x, np.ndarray):
            return bool(x.ctypes.data == query.data_ptr())
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
        return depth < 2 and any(holds(part, depth + 1) for part in parts)

    def arguments(frame: FrameType) -> Iterator[Any]:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        return (frame.f_locals.get(name) for name in code.co_varnames[:count])

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path, caller = Path(frame.f_code.co_filename), frame.f_back
        if event != "call" or not path.is_relative_to(SOURCE) or caller is None:
            return
        sys.setprofile(None)
        if caller.f_code.co_filename != frame.f_code.co_filename and any(map(holds, arguments(frame))):
            found[path.relative_to(SOURCE).as_posix()] += 1
        sys.setprofile(profile)

    profiled(call, profile)
    return found


def calls_of(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The functions of the package that are called, in order: their file and qualified name."""
    calls: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(SOURCE):
            path = Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix()
            calls.append((path, frame.f_code.co_qualname))

    profiled(call, profile)
    return calls


def files_of(call: Callable[[], Any]) -> set[str]:
    """The files of the package of which some code runs."""
    return {file for file, _ in calls_of(call)}


@pytest.fixture
def first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the next call is known but what any call leaves."""
    ats.attend(*torch.ones(3, 1, 3, 2, 4))
    monkeypatch.setattr("attnscore.plans.plan.PLANS", BoundedCache())


def test_the_map_counts_all_files_of_a_call() -> None:
    query, key, value = torch.randn(3, 2, 3, 5, 8)
    miss, hit = (len(files_of(lambda: ats.attend(query, key, value))) for _ in range(2))
    assert f"a cache miss runs code from {miss} files of the package, and a cache hit from {hit}." in PAGE.read_text()
    assert miss <= 18 and hit <= 6


def test_a_reader_of_a_miss_goes_back_to_a_file_once() -> None:
    """From `attend` to the kernel; operations of backends, checks of arguments and the kernel itself are looked up.

    Methods do not count: they belong to the data that the functions pass on.
    """
    query, key, value = torch.randn(3, 2, 3, 5, 8)
    calls = calls_of(lambda: ats.attend(query, key, value))
    walk = [file for file, name in calls if not {".", "<"} & {*name}]
    path = [file for file in walk if not file.startswith(("backends/", "base/", "kernels/native/"))]
    visits = Counter(file for file, _ in groupby(path))
    assert path[:2] == ["api.py", "plans/plan.py"] and "kernels/__init__.py" in path
    assert max(visits.values()) <= 2, visits


def test_the_map_lists_the_files_of_a_query() -> None:
    query, key, value = torch.randn(3, 2, 3, 5, 8)
    on_hit, on_miss = (
        set(re.findall(r"`([^`]+)`", line)) for line in PAGE.read_text().splitlines() if line.startswith("- cache ")
    )
    for stated, most in ((on_hit | on_miss, 11), (on_hit, 5)):
        found = entries(lambda: ats.attend(query, key, value), query)
        assert set(found) == stated
        assert len(stated) <= most
        assert max(count for file, count in found.items() if file != OPERATIONS) <= 2
