"""Threads of the native kernels: the same bits for any number, several callers at once, fork, exit, signals."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
import soak
from attnscore import backends
from native_cases import Case, answer, in_new_process, in_threads, note_calls, same

# JAX, which other tests have imported into this process, warns of every fork; the children here do not call it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
# Python warns of exactly what is tested here: a fork from a process that has threads.
fork_warns = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


MANY_HEADS = {"lead": (4,), "head": 4, "query_len": 70, "key_len": 90}


@pytest.mark.parametrize("threads", [2, 3, 7, 100])
@pytest.mark.parametrize(
    "form",
    [{"form": "inner"}, {"form": "additive"}, {"form": "additive", "saves_scores": True}],
    ids=["inner", "additive", "additive, kept"],
)
@pytest.mark.parametrize(
    "sizes",
    [MANY_HEADS, {"lead": (1,), "head": 1, "group": 1, "query_len": 3, "key_len": 5000, "intervals": True}],
    ids=["many heads", "few queries"],
)
def test_results_do_not_depend_on_the_number_of_threads(
    threads: int, form: dict[str, Any], sizes: dict[str, Any]
) -> None:
    assert same(answer(threads, **form, **sizes), answer(1, **form, **sizes))


def test_many_jobs_in_a_row() -> None:
    """The way in and out of a job, thousands of times: a lost wake-up would hang, a late worker would corrupt."""
    case = Case(query_len=3)
    case.run(1)
    expected = case.out.copy()
    for i in range(3000):
        case.run(2 + i % 3)
        assert np.array_equal(case.out, expected)
        if i % 500 == 0:
            time.sleep(0.01)  # long enough for the workers to fall asleep


def test_mixed_calls_in_several_threads() -> None:
    """In short what `python tests/soak.py --threads 8` does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert soak.wrong_in_threads(400, 8) == 0
    finally:
        sys.setswitchinterval(before)


PROCESSORS = """
import os, time
from native_cases import Case

case = Case(lead=(4,), head=4, query_len=70, key_len=90)
others = {int(x) for x in os.listdir("/proc/self/task")}
whole = os.sched_getaffinity(0)
some, one = set(sorted(whole)[: max(1, len(whole) - 2)]), {min(whole)}

def workers_settle(threads, allowed, expected):
    os.sched_setaffinity(0, allowed)
    for _ in range(500):
        case.run(threads)
        workers = {int(x) for x in os.listdir("/proc/self/task")} - others
        masks = [os.sched_getaffinity(x) for x in workers]
        if masks and all(map(expected, masks)):
            return len(masks)
        time.sleep(0.01)
    raise SystemExit(f"{threads} threads, the caller on {allowed}: {masks}")

def few(allowed):
    return lambda mask: mask <= allowed and len(mask) == max(1, len(allowed) - 1)

for allowed in (some, whole, one, whole):
    workers_settle(3, allowed, few(allowed))
for allowed in (some, whole):
    assert workers_settle(40, allowed, lambda mask: mask == allowed) > 16
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="a thread has no choice here"
)
def test_workers_run_on_the_processors_of_their_caller() -> None:
    """Whoever started them; a few keep off the processor that the caller is on, unless the program has no other."""
    paths = (os.path.dirname(__file__), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, paths))
    done = in_new_process(PROCESSORS, PYTHONPATH=path, OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def child(expected: tuple[np.ndarray, ...], queue: Any) -> None:
    queue.put(all(same(answer(2, **MANY_HEADS), expected) for _ in range(3)))


@needs_fork
@fork_warns
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_pool_lives_through_fork(busy: bool) -> None:
    expected = answer(2, **MANY_HEADS)  # the parent's workers exist now
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            answer(2, **MANY_HEADS)

    other = threading.Thread(target=keep_busy)
    if busy:
        other.start()
    try:
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        children = [context.Process(target=child, args=(expected, queue)) for _ in range(6)]
        for process in children:
            process.start()
        assert all(queue.get(timeout=60) for _ in children)
        for process in children:
            process.join(60)
            assert process.exitcode == 0
    finally:
        stop.set()
        if busy:
            other.join()
    assert same(answer(2, **MANY_HEADS), expected)


@needs_fork
@fork_warns
def test_fork_of_a_fork() -> None:
    expected = answer(2, **MANY_HEADS)

    def grandchild() -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if same(answer(2, **MANY_HEADS), expected) else 3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    pid = os.fork()
    if pid == 0:
        right = same(answer(2, **MANY_HEADS), expected)
        os._exit(grandchild() if right else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Loaded(torch.utils.data.Dataset):
    """Attention inside a data loader's worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((1, 4, 64, 16), float(i))
        return ats.attend(x, x, x)[0, 0, 0]


@needs_fork
@fork_warns
def test_workers_of_a_data_loader() -> None:
    Loaded()[0]
    loader = torch.utils.data.DataLoader(Loaded(), batch_size=2, num_workers=2, timeout=60)
    assert torch.cat(list(loader))[:, 0].tolist() == pytest.approx(range(8))


CALL = """
import attnscore as ats, numpy as np
x = np.ones((1, 8, 64, 16), "f")
ats.set_num_threads(4)
ats.attend(x, x, x, kernel="native")
"""


@pytest.mark.parametrize("pause", ["", "import time; time.sleep(0.05)"], ids=["awake", "asleep"])
def test_exit_with_workers(pause: str) -> None:
    done = in_new_process(CALL + pause)
    assert (done.returncode, done.stderr) == (0, "")


def test_signals_reach_the_main_thread() -> None:
    code = """
import signal
signal.signal(signal.SIGALRM, lambda *_: print("rang"))
signal.setitimer(signal.ITIMER_REAL, 0.1)
signal.pause()
"""
    done = in_new_process(CALL + code)
    assert (done.stdout, done.stderr) == ("rang\n", "")


def _of_torch() -> list[torch.Tensor]:
    x = torch.randn(4, 8, 70, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = ats.attend(x, x, x, mask=ats.Causal())
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads(), ats.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    ats.set_num_threads(before[1])


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("count", [2, 3, 7])
def test_threads_of_torch(count: int) -> None:
    """The bits equal one thread's, between torch's own operations and in several Python threads at once."""
    torch.set_num_threads(1)
    expected = _of_torch()
    found: list[list[torch.Tensor]] = []

    def work(_: int = 0) -> None:
        torch.set_num_threads(count)
        for _ in range(5):
            torch.ones(1 << 20).sum()
            found.append(_of_torch())

    work()
    in_threads(3, work)
    assert len(found) == 20
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, expected, strict=True))


@needs_fork
@fork_warns
@pytest.mark.usefixtures("threads_as_before")
def test_threads_of_torch_after_a_fork() -> None:
    """The parent's OpenMP workers do not exist in the child, which starts a pool."""
    torch.set_num_threads(2)
    x = torch.randn(4, 8, 70, 16)
    expected = (ats.attend(x, x, x, mask=ats.Causal()).numpy(),)
    pid = os.fork()
    if pid == 0:
        # PyTorch's own parallel operations would wait for ever here.
        threading.Timer(30, os._exit, (5,)).start()
        os._exit(0 if same((ats.attend(x, x, x, mask=ats.Causal()).numpy(),), expected) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert same((ats.attend(x, x, x, mask=ats.Causal()).numpy(),), expected)


@pytest.mark.usefixtures("threads_as_before")
def test_called_from_torch_it_takes_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    note_calls(monkeypatch, lambda which, arguments, run: used.append(run[-1]))
    torch.set_num_threads(3)
    ats.set_num_threads(5)
    x = torch.ones(2, 3, 4)
    for _ in range(2):
        ats.attend(x, x, x)
        ats.attend(*[x.numpy()] * 3)
        out = ats.attend(*[x.clone().requires_grad_()] * 3)
        out.sum().backward()
    of_torch = 3 if backends.load("torch").gomp_parallel() is None else -3
    assert used == [of_torch, 5, of_torch, of_torch] * 2


def test_a_daemon_thread_that_still_computes_when_python_ends() -> None:
    code = """
import threading, time
import attnscore as ats, numpy as np
x, begun = np.ones((1, 4, 512, 64), "f"), threading.Event()
def work():
    while True:
        ats.attend(x, x, x)
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
    done = in_new_process(code)
    assert (done.returncode, done.stderr) == (0, "")
