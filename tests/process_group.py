"""Processes of one `torch.distributed` group over gloo, started once, that run functions sent to them.

They are forked from a server that has imported torch and attnscore: a start costs hundredths of a second each.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attnscore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.tensor", "attnscore.parallel.torch", "parallel_torch_calls"])


class RankError(Exception):
    """Errors of ranks, by rank."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in errors.items()))
        self.kinds = {rank: kind for rank, (kind, _, _) in errors.items()}
        self.messages = {rank: text for rank, (_, text, _) in errors.items()}


class ProcessGroup:
    """`count` processes of one group."""

    def __init__(self, count: int, timeout: float = 60.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store, self.count, self._ends = str(Path(self._folder.name) / "store"), count, []
        self.processes = []
        for rank in range(count):
            own, other = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(other, rank, count, store, timeout, attnscore.__file__), daemon=True
            )
            process.start()
            other.close()
            self._ends.append(own)
            self.processes.append(process)

    def run(self, function: str, *arguments: Any, each: list[tuple[Any, ...]] | None = None) -> list[Any]:
        """Run ``module.function(*arguments)`` on all ranks; return the results in the order of ranks.

        `each` has further arguments for each rank.
        """
        for rank, end in enumerate(self._ends):
            end.send((function, (*arguments, *(each[rank] if each else ()))))
        found, errors = [], {}
        for rank, end in enumerate(self._ends):
            try:
                if not end.poll(300):
                    # An answer that comes later would be taken for the next call's.
                    self.stop()
                    group_of.cache_clear()
                    raise TimeoutError(f"rank {rank} has not answered")
                is_ok, value = end.recv()
            except EOFError:
                is_ok, value = False, ("EOFError", "the process has ended", "the process has ended")
            if is_ok:
                found.append(value)
            else:
                errors[rank] = value
        if errors:
            raise RankError(errors)
        return found

    def stop(self) -> None:
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@lru_cache
def group_of(count: int) -> ProcessGroup:
    """Return the processes of this many ranks, started at the first use in a test run."""
    return ProcessGroup(count)


def _serve(end: Connection, rank: int, count: int, store: str, timeout: float, package: str) -> None:
    import torch
    import torch.distributed as dist

    # Another copy than the tests' copy would hide faults in theirs.
    assert attnscore.__file__ == package, attnscore.__file__
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            name, arguments = end.recv()
        except EOFError:
            return
        module, _, own = name.rpartition(".")
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), own)
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        end.send(answer)
