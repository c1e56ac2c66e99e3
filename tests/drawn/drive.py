"""``python tests/drawn/drive.py [--cases 20000] [--minutes M] [--seed S] [--case I]``: drawn calls and the reference.

Prints each case that is wrong with the command that replays it, then how many there were, and what memory grew by.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import secrets
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from checks import Tally, check  # noqa: E402  # found by the line above
from draw import draw  # noqa: E402

CLEAR_EVERY = 200
"""Cases after which compiled programs of JAX, of shapes that do not come again, are dropped."""


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prepare() -> None:
    """Set the frameworks up: float64 in JAX, one thread in PyTorch."""
    faulthandler.enable()
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401  # loaded after TensorFlow it ends in a segmentation fault over two LLVMs
    import jax
    import torch

    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)


def forget_programs() -> None:
    """Drop what frameworks compiled."""
    import jax
    import torch

    jax.clear_caches()
    torch._dynamo.reset()
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].keras.backend.clear_session()


def described(seed: int, index: int, error: Exception, only: dict[str, Any] | None = None) -> str:
    """Return a failure as lines of text: what was wrong, the case, and how to run it alone."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in f.filename]
    limits = "".join(f" --only {name}={value}" for name, value in (only or {}).items())
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    replay = f"python tests/drawn/drive.py --seed {seed} --case {index}{limits}"
    return (f"case {index}: {type(error).__name__}: {str(error)[:600]} (at {place})\n"
            f"  {draw(seed, index, only=only)}\n  {replay}")  # fmt: skip


def main() -> int:
    """Run the cases; return 1 where one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop here, with however many cases there were")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="drawn anew where none is given")
    parser.add_argument("--case", type=int, default=None, help="this case alone, with its traceback")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME=VALUE", help="framework, what, mode, kernel or dtype"
    )
    options = parser.parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    only = dict(pair.split("=", 1) for pair in options.only)
    prepare()
    if options.case is not None:
        print(draw(seed, options.case, only=only))
        check(seed, options.case, Tally(), only)
        return 0
    print(f"seed {seed}", flush=True)
    tally, wrong, start, before = Tally(), 0, time.perf_counter(), resident()
    for index in range(options.first, options.first + options.cases):
        try:
            check(seed, index, tally, only)
        except Exception as error:
            wrong += 1
            print(described(seed, index, error, only), flush=True)
        if (index + 1) % CLEAR_EVERY == 0:
            forget_programs()
        is_late = time.perf_counter() - start > 60 * options.minutes
        if (index + 1) % 500 == 0 or index + 1 == options.first + options.cases or is_late:
            spent = f"{time.perf_counter() - start:.0f} s, {time.process_time():.0f} s of a core"
            print(f"{tally}, {wrong} wrong, {(resident() - before) / 2**20:+.0f} MiB, {spent}", flush=True)
        if is_late:
            break
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
