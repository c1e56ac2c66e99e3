"""The Triton kernels compiled for each architecture, without a GPU: what fits and spills, and that none is atomic."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscore as ats
import triton_scores as own
from bench import gpu_code

PAGE = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "gpu-code.md"
# Entries up to dimension 128 that spill: on an H200 they were the fastest all the same (docs/gpu.md).
SPILLING = {
    (90, "bfloat16", 64, "d_key"): 214, (90, "bfloat16", 128, "forward"): 7, (90, "bfloat16", 128, "d_key"): 130,
}  # fmt: skip


@cache
def page() -> dict[tuple[int, str, str, int, str], tuple[int, int, int, str]]:
    """(architecture, score, dtype, dimension, kernel) and what the page says: registers, spills, KB, instruction."""
    found, architecture = {}, 0
    for line in PAGE.read_text().splitlines():
        if line.startswith("## sm_"):
            architecture = int(line.removeprefix("## sm_"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[2].isdigit():
            score, dtype, dim, kernel, _, registers, spills, shared, matrix = cells
            found[architecture, score, dtype, int(dim), kernel] = int(registers), int(spills), int(shared), matrix
    return found


def check(found: dict[str, gpu_code.Code], architecture: int) -> None:
    for name, code in found.items():
        assert code.shared <= gpu_code.SHARED_MEMORY[architecture], name
        assert code.atomics == 0, name


@pytest.mark.slow
def test_the_forward_of_16_bit_numbers_on_hopper() -> None:
    found = gpu_code.compile_call(90, "bfloat16", 64, ["forward"])
    check(found, 90)
    assert found["forward"].spills == 0
    assert found["forward"].matrix == "HGMMA"


def test_the_page_lists_every_entry() -> None:
    entries = [(arch, score, dtype, dim) for arch, dtype, dim, score in gpu_code.ENTRIES]
    assert set(page()) == {(*entry, kernel) for entry in entries for kernel in gpu_code.KERNELS}


def test_what_the_page_says_of_spills() -> None:
    for (architecture, _, dtype, dim, kernel), (registers, spills, shared, matrix) in page().items():
        assert registers <= 255
        assert shared * 1024 <= gpu_code.SHARED_MEMORY[architecture]
        if dtype == "bfloat16" and dim <= 128:
            assert spills <= SPILLING.get((architecture, dtype, dim, kernel), 0), (architecture, dim, kernel)
            assert matrix == ("HGMMA" if architecture == 90 else "HMMA")


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype", "dim", "score"), gpu_code.ENTRIES)
def test_the_page_is_true(architecture: int, dtype: str, dim: int, score: str) -> None:
    found = gpu_code.compile_call(architecture, dtype, dim, score=score)
    assert set(found) == set(gpu_code.KERNELS)
    check(found, architecture)
    for name, code in found.items():
        facts = code.registers, code.spills, round(code.shared / 1024), code.matrix
        assert facts == page()[architecture, score, dtype, dim, name], name


EXTRAS: dict[str, dict[str, Any]] = {
    "statistics": {"statistics": ("log_sum_exp", "mean_score", "entropy", "max_weight", "sum_sq_weights")},
    "shared-bias": {"bias": torch.zeros(1, 64), "sink": torch.zeros(2)},
    "relative-bias": {"bias": torch.zeros(2, 1, 127), "score": ats.SoftCap("scaled_dot", 3.0)},
    "full-bias": {"bias": torch.zeros(1, 2, 64, 64), "dropout": 0.1, "seed": 1},
    "array-mask": {"mask": torch.ones(64, 64, dtype=torch.bool)},
    "documents": {"mask": ats.Documents(torch.arange(64) % 3)},
    "several-intervals": {"mask": ats.SlidingWindow(8, 0) | ats.KeyRange(0, 4)},
    "learned-bandwidth": {"score": ats.Gaussian(torch.ones(2))},
    "one-query": {"shape": (2, 1, 1, 64), "mask": ats.ValidLens([3, 9])},
    "one-key": {"shape": (3, 2, 64, 1), "mask": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("extras", EXTRAS)
def test_all_that_a_call_may_have(extras: str, architecture: int) -> None:
    check(gpu_code.compile_call(architecture, "float32", 64, None, **EXTRAS[extras]), architecture)


CUSTOM: dict[str, Any] = {
    "product": own.Square(torch.tensor(0.3)),
    "distance": own.Student(torch.tensor([0.1, 0.2])),
    "channels": own.SmoothDistance(torch.ones(2, 64), torch.tensor(0.4)),
}
# Most spills at dimension 64 on any of the architectures, by score and dtype; `test_custom_scores` has the spills
# of the gradient of keys of a product on Hopper, whose tile was the fastest on an H200 all the same.
CUSTOM_SPILLS = {
    ("product", "float32"): 12, ("distance", "float32"): 16, ("channels", "float32"): 20,
    ("channels", "bfloat16"): 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("architecture", gpu_code.ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_scores(kind: str, dtype: str, architecture: int) -> None:
    """With their functions, in the tiles of built-in scores."""
    found = gpu_code.compile_call(architecture, dtype, 64, (*gpu_code.KERNELS, "d_parameter"), score=CUSTOM[kind])
    assert set(found) == {*gpu_code.KERNELS, "d_parameter"}
    check(found, architecture)
    for name, code in found.items():
        of_tile = (kind, name, architecture) == ("product", "d_key", 90)
        most = {"bfloat16": 239, "float32": 151}[dtype] if of_tile else CUSTOM_SPILLS.get((kind, dtype), 0)
        assert code.spills <= most, (name, code)
        assert code.matrix == "HGMMA" or architecture < 90 or (kind, dtype) != ("product", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(("functions", "expected"), own.WRONG_RESULTS)
def test_what_the_functions_return(functions: Any, expected: str) -> None:
    """The compiler says it in the same words as the interpreter, in the error that is the cause of its own."""
    with pytest.raises(Exception, match="at ") as found:
        gpu_code.compile_call(90, "bfloat16", 32, score=own.Given(ats.TritonTile("product", *functions)))
    error: BaseException | None = found.value
    while error is not None and expected not in str(error):
        error = error.__cause__
    assert error is not None
