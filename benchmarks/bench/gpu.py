"""Times on a GPU: attention forward, and forward and backward, against PyTorch's own ways.

Both sides alternate in one process; each time is between two CUDA events, with the second-level cache overwritten
before it. Each result, gradients included, is compared with its baseline first.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import attnscore as ats
from attnscore.cli.timing import summary
from attnscore.errors import FrameworkError
from bench.reference import WrongResult, relative_difference

ROUNDS, QUICK_ROUNDS, WARM_UP = 50, 10, 5
FLUSH_BYTES = 2**28
"""Bytes that are overwritten before each time: more than the second-level cache of any GPU."""
TOLERANCE = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-3}
"""Largest difference from a baseline, relative to its largest number."""
FACTS = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


@dataclass(frozen=True)
class Case:
    """One call, on both sides: (batch, heads, length, dim)."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: str
    score: str = "scaled_dot"
    mask: Any = None
    options: tuple[tuple[str, Any], ...] = ()


LONG, SHORT = (4, 16, 4096, 128), (8, 8, 1024, 64)
CASES = (
    *(Case(f"causal-{kind}", LONG, kind, mask=ats.Causal()) for kind in ("bfloat16", "float32")),
    Case("statistics-bfloat16", LONG, "bfloat16", mask=ats.Causal(), options=(("return_stats", True),)),
    Case("window-bfloat16", LONG, "bfloat16", mask=ats.SlidingWindow(255, 0)),
    *(Case(f"additive-{kind}", SHORT, kind, "additive") for kind in ("bfloat16", "float32")),
)


def check_device(kind: str, command: str = "", hint: str = "") -> None:
    """Raise FrameworkError unless PyTorch has a GPU, which a command (by default the benchmark) needs."""
    command = command or f"run --device {kind}"
    try:
        import torch
    except ImportError as error:
        raise FrameworkError(f"{command} needs PyTorch: pip install 'attnscore[torch]'") from error
    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda}, no GPU found"
        text = f"{command} needs a GPU that PyTorch {torch.__version__} sees: {build}"
        raise FrameworkError(f"{text}. Hint: {hint}" if hint else text)


def facts() -> dict[str, str]:
    """Return name, driver, clocks and temperature of the GPU as its driver says them; empty where it does not."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    values = done.stdout.partition("\n")[0].split(",")
    return dict(zip(FACTS, (value.strip() for value in values), strict=False))


def arrays(case: Case, device: str) -> dict[str, Any]:
    """Return the operands of a case, and the gradient of its output."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": getattr(torch, case.dtype)}
    found = {name: torch.randn(case.shape, **options) for name in ("query", "key", "value", "grad")}
    if case.score == "additive":
        found["w_v"] = torch.randn(case.shape[-1], **options) / case.shape[-1] ** 0.5
    return found


def ours(case: Case, x: dict[str, Any]) -> Any:
    """Return the output of `attend`."""
    score: Any = ats.Additive(x["w_v"]) if case.score == "additive" else case.score
    found = ats.attend(x["query"], x["key"], x["value"], score=score, mask=case.mask, **dict(case.options))
    return found[0] if isinstance(found, tuple) else found


def baselines(case: Case) -> Iterator[tuple[str, Callable[[dict[str, Any]], Any]]]:
    """Yield the baselines of a case by name."""
    import torch
    from torch.nn import attention

    def additive(x: dict[str, Any]) -> Any:
        hidden = torch.tanh(x["query"].unsqueeze(-2) + x["key"].unsqueeze(-3))
        return (hidden @ x["w_v"]).softmax(-1) @ x["value"]

    if case.score == "additive":
        # The array of hidden units of the whole batch does not fit.
        yield "eager, a head at a time", lambda x: _by_heads(additive, x)
        yield "torch.compile", torch.compile(additive)
        return
    is_causal = isinstance(case.mask, ats.Causal)
    if is_causal:
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            backend = getattr(attention.SDPBackend, name)

            def run(x: dict[str, Any], backend: Any = backend) -> Any:
                with attention.sdpa_kernel(backend):
                    sides = (x["query"], x["key"], x["value"])
                    return torch.nn.functional.scaled_dot_product_attention(*sides, is_causal=True)

            yield f"SDPA {name.lower()}", run
    from torch.nn.attention import flex_attention

    left = None if is_causal else case.mask.left

    def visible(batch: Any, head: Any, i: Any, j: Any) -> Any:
        return i >= j if left is None else (i >= j) & (i - j <= left)

    length = case.shape[2]
    blocks = flex_attention.create_block_mask(visible, None, None, length, length)
    compiled = torch.compile(flex_attention.flex_attention)
    yield "FlexAttention", lambda x: compiled(x["query"], x["key"], x["value"], block_mask=blocks)


def _by_heads(function: Callable[[dict[str, Any]], Any], x: dict[str, Any]) -> Any:
    import torch

    def head(b: int, h: int) -> dict[str, Any]:
        return {name: part if name == "w_v" else part[b, h] for name, part in x.items()}

    batch, heads = x["query"].shape[:2]
    return torch.stack([torch.stack([function(head(b, h)) for h in range(heads)]) for b in range(batch)])


def run(quick: bool, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure all cases; return facts of the GPU before and after, and a row for each baseline and pass."""
    import torch

    check_device("cuda")
    before, rows = facts(), []
    for case in CASES:
        x = arrays(case, "cuda")
        for name, baseline in baselines(case):
            for with_grad in (False, True):
                tell(f"{case.name}, {name}, {'forward and backward' if with_grad else 'forward'}")
                row = {"case": case.name, "baseline": name, "backward": with_grad}
                try:
                    times = _times(case, baseline, x, with_grad, QUICK_ROUNDS if quick else ROUNDS)
                    rows.append(row | times)
                except WrongResult as wrong:
                    rows.append(row | {"error": str(wrong), "is_wrong": True})
                except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                    rows.append(row | {"error": str(error).partition("\n")[0]})
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "attnscore": ats.__version__}
    return {"device": "cuda", "before": before, "after": facts(), "versions": versions, "rows": rows}


def _times(case: Case, baseline: Callable[..., Any], x: dict[str, Any], with_grad: bool, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of both sides, and the ratio of their medians."""
    import torch

    leaves = {name: part.detach().requires_grad_(with_grad and name != "grad") for name, part in x.items()}
    event: Any = torch.cuda.Event
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def step(function: Callable[[], Any]) -> list[Any]:
        out = function()
        if not with_grad:
            return [out]
        inputs = [part for name, part in leaves.items() if name != "grad"]
        return [out, *torch.autograd.grad(out, inputs, leaves["grad"])]

    sides = {"ours": lambda: ours(case, leaves), "theirs": lambda: baseline(leaves)}
    names = ["outputs", *(f"gradients of {name}" for name in leaves if name != "grad" and with_grad)]
    difference = largest_difference(case, *(dict(zip(names, step(side), strict=True)) for side in sides.values()))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for at in range(WARM_UP + rounds):
        for name, side in sides.items():
            flush.zero_()
            start, end = (event(enable_timing=True) for _ in range(2))
            start.record()
            step(side)
            end.record()
            end.synchronize()
            if at >= WARM_UP:
                found[name].append(start.elapsed_time(end))
    ms = {name: summary(times) for name, times in found.items()}
    return {"ms": ms, "ratio": ms["theirs"]["median"] / ms["ours"]["median"], "difference": difference}


def largest_difference(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of two sides, over the largest number; raise WrongResult where it is too large."""
    found = {}
    for name, x in theirs.items():
        found[name] = relative_difference(ours[name], x)
        if not found[name] <= TOLERANCE[case.dtype]:  # as it is not of NaN
            raise WrongResult(f"the {name} differ by {found[name]:.2g} of the largest number")
    return max(found.values())
