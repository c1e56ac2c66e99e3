"""The native kernels in use: different calls from several threads at once, errors between them, memory given back."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

from native_cases import Case, answer, in_new_process, in_threads, native, same

FORMS: tuple[dict[str, Any], ...] = (
    {"query_len": 70, "key_len": 90},
    {"form": "additive", "query_len": 33, "key_len": 65, "intervals": True},
    {"form": "distance", "score_dtype": "float64", "value_dtype": "float64"},
    {"score_dtype": "bfloat16", "value_dtype": "bfloat16", "query_len": 193, "key_len": 64},
    {"lead": (1,), "head": 1, "group": 1, "query_len": 2, "key_len": 4200},
    {"dropout": 0.5, "seed": 7, "caps": ((2.0, 1.0), (float("inf"), 0.5)), "query_len": 20},
)


def test_different_calls_at_once_are_as_alone() -> None:
    """Also while some of them are refused."""
    expected, wrong = [answer(1, **options) for options in FORMS], []

    def caller(first: int) -> None:
        for i in range(first, first + 30):
            which = i % len(FORMS)
            if not same(answer(1 + i % 4, **FORMS[which]), expected[which]):
                wrong.append(which)
            if i % 5 == 0:
                try:
                    Case(**FORMS[which]).run(2, start=np.zeros((9, 9), np.int64))
                except ValueError:
                    continue
                wrong.append("a wrong call got through")

    in_threads(6, caller)
    assert not wrong


def test_a_target_can_be_selected_while_others_run() -> None:
    """Each call runs on one target from its beginning to its end."""
    before, options = native.current_target(), FORMS[0]
    expected = []
    for target in native.targets():
        native.select(target)
        expected.append(answer(1, **options)[0])
    wrong = []

    def caller() -> None:
        for _ in range(40):
            case = Case(**options)
            case.run(2)
            wrong.extend([True] * (not any(np.array_equal(case.out, x) for x in expected)))

    callers = [threading.Thread(target=caller) for _ in range(3)]
    try:
        for thread in callers:
            thread.start()
        while any(thread.is_alive() for thread in callers):
            for target in native.targets():
                native.select(target)
    finally:
        for thread in callers:
            thread.join(60)
        native.select(before)
    assert not wrong


MEMORY = """
import numpy as np, torch, attnscore as ats
rng = np.random.default_rng(0)
def draw(i):
    n, m = 1 + i % 20, 1 + 7 * i % 150
    return [rng.standard_normal((2, 2, k, 17), dtype="f4") for k in (n, m, m)]
def call(i):
    arrays = draw(i)
    score = ats.Additive(np.ones(17, "f4")) if i % 2 else "scaled_dot"
    if i % 3:
        out, pullback = ats.attend_vjp(*arrays, score=score, dropout=0.1, seed=i, kernel="native")
        pullback(out)
    else:
        leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
        ats.attend(*leaves, score="scaled_dot", return_stats=True, kernel="native")[0].sum().backward()
    try:
        ats.attend(arrays[0], arrays[1][..., :3], arrays[2], score="scaled_dot")
    except ValueError:
        return
    raise SystemExit("no error")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
ats.set_num_threads(2)
for i in range(500):
    call(i)
before = resident()
for i in range(2000):
    call(i)
print((resident() - before) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_memory_is_given_back() -> None:
    """2000 calls of all sizes, forward, backward and refused: no growth beyond what an allocator's whims are."""
    done = in_new_process(MEMORY)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16
