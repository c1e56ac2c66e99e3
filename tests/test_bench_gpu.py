"""The benchmark on a GPU, on a machine without one: its arguments, its errors, its two sides on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnscore import FrameworkError
from bench import gpu
from bench.reference import WrongResult

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def test_it_says_that_there_is_no_gpu() -> None:
    with pytest.raises(FrameworkError, match=r"run --device cuda needs a GPU that PyTorch .* sees"):
        gpu.check_device("cuda")
    with pytest.raises(FrameworkError, match="needs a GPU"):
        gpu.run(quick=True)


@pytest.mark.parametrize("name", ["statistics-bfloat16", "window-bfloat16", "additive-float32"])
@pytest.mark.slow_rows("additive-float32")
def test_both_sides_of_a_small_case_agree(name: str) -> None:
    case = dataclasses.replace(next(case for case in gpu.CASES if case.name == name), shape=(1, 2, 24, 16))
    x = gpu.arrays(case, "cpu")
    out = gpu.ours(case, x).float()
    assert out.shape == case.shape
    if name.startswith("additive"):
        baseline = dict(gpu.baselines(case))["eager, a head at a time"]
        torch.testing.assert_close(out, baseline(x).float(), rtol=1e-4, atol=1e-5)
    elif name.startswith("statistics"):
        sides = (x["query"], x["key"], x["value"])
        wanted = torch.nn.functional.scaled_dot_product_attention(*sides, is_causal=True).float()
        torch.testing.assert_close(out, wanted, rtol=0.05, atol=0.02)


def test_a_wrong_gradient_is_a_wrong_result() -> None:
    case, one = gpu.CASES[0], torch.ones(3)
    near = {"outputs": one * 1.001, "gradients of key": one}
    assert gpu.largest_difference(case, near, {"outputs": one, "gradients of key": one}) == pytest.approx(
        1e-3, rel=0.01
    )
    for wrong in (one * 2, one * torch.nan):
        with pytest.raises(WrongResult, match="the gradients of key differ by"):
            gpu.largest_difference(case, near, {"outputs": one, "gradients of key": wrong})
