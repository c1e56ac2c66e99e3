"""The benchmark on a GPU, on a machine without one: its arguments, its errors, its two sides on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import attnscore as ats
from attnscore import ArgumentError, FrameworkError
from attnscore.bench import gpu, gpu_limits
from attnscore.bench.reference import WrongResult
from attnscore.cli.app import app

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def test_it_says_that_there_is_no_gpu() -> None:
    with pytest.raises(FrameworkError, match=r"bench --device cuda needs a GPU that PyTorch .* sees"):
        gpu.check_device("cuda")
    with pytest.raises(FrameworkError, match="needs a GPU"):
        gpu.run(quick=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--device", "tpu"], "expected one of cpu, cuda"), (["--device", "cuda", "--full"], "cpu, which has --full")],
)
def test_arguments(arguments: list[str], expected: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, ArgumentError)
    assert expected in str(done.exception)


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


def test_limits_by_hand() -> None:
    """Each unit limits a case; the page has the table."""
    plain = gpu.Case("plain", (2, 3, 100, 64), "bfloat16")
    assert gpu_limits.unmasked_pairs(plain) == 2 * 3 * 100 * 100
    assert gpu_limits.unmasked_pairs(dataclasses.replace(plain, mask=ats.Causal())) == 6 * 5050
    assert gpu_limits.unmasked_pairs(dataclasses.replace(plain, mask=ats.SlidingWindow(9, 0))) == 6 * (55 + 90 * 10)
    found = gpu_limits.times(plain, 0)
    assert found["matrix units"] == pytest.approx(60000 * 4 * 64 / 989e12)
    assert found["special functions"] == pytest.approx(60000 / (16 * 132 * 1.98e9))
    assert found["memory"] == pytest.approx(4 * 6 * 100 * 64 * 2 / 4.8e12)
    additive = gpu_limits.times(dataclasses.replace(plain, score="additive"), 0)
    assert additive["float32"] == pytest.approx(60000 * (3 + 3.5 * 64) / (128 * 132 * 1.98e9))
    # Products of float32 are three of TF32, which has half the rate of bfloat16.
    slow = gpu_limits.times(dataclasses.replace(plain, dtype="float32"), 1)["matrix units"]
    assert slow == pytest.approx(6 * gpu_limits.times(plain, 1)["matrix units"])


def test_the_page_has_the_limits() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"
    assert gpu_limits.table() in page.read_text()
