"""The CPU targets of the native kernels: which there are, how one is forced, and that all agree with NumPy."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from covering import pairs
from native_cases import Case, in_new_process, native


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The target is the process's own: leave it as it was."""
    target = native.current_target()
    yield
    native.select(target)


# On Arm the one that runs everywhere is NEON, and there are no others of x86.
ARM = platform.machine().lower() in {"aarch64", "arm64"}
IN_ORDER = ("neon_bf16", "neon") if ARM else ("avx512bf16", "avx512", "avx2", "portable")


def test_targets_end_with_the_one_that_runs_everywhere() -> None:
    names = native.targets()
    assert names[-1] == IN_ORDER[-1]
    assert names == [name for name in IN_ORDER if name in names]
    assert native.current_target() in names


@pairs(
    lengths={str(x): x for x in ((5, 7), (1, 1), (67, 131))},
    form=("inner", "additive"),
    dtype=("float32", "float64", "bfloat16"),
    target=native.targets(),
)
def test_every_target_can_be_selected(target: str, dtype: str, form: str, lengths: tuple[int, int]) -> None:
    native.select(target)
    assert native.current_target() == target
    sizes = {"query_len": lengths[0], "key_len": lengths[1], "dim": 33, "value_dim": 17, "scale": 0.1}
    Case(intervals=True, form=form, score_dtype=dtype, value_dtype=dtype, **sizes).check()


MASKS = {"none": None, "lengths": ats.ValidLens([150, 0, 64]), "holes": ats.KeyRange(10, 70) | ats.KeyRange(130, 201)}


@pairs(
    dims={str(x): x for x in ((64, 64), (33, 130), (128, 3), (300, 17))},
    mask=tuple(MASKS),
    heads=(1, 3),
    dtype=("float32", "float64"),
    planted=("nothing", "masked", "unmasked"),
    target=native.targets(),
)
def test_one_query_over_several_tiles(
    target: str, planted: str, dtype: str, heads: int, mask: str, dims: tuple[int, int]
) -> None:
    """A decoder's step, whose values may have turns among the keys of the next tile; NaN or infinity in the values."""
    native.select(target)
    rng = np.random.default_rng(5)
    query, key, value = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((3, heads, 1, dims[0]), (3, 1, 201, dims[0]), (3, 1, 201, dims[1]))
    )
    given = MASKS[mask]
    unmasked = ats.attend(query, 0 * key, value, mask=given, kernel="dense", return_weights=True)[1][:, 0, 0] > 0
    for at in (5, 77, 140, 200):
        for entry in range(3):
            if planted != "nothing" and unmasked[entry, at] == (planted == "unmasked"):
                value[entry, 0, at, ::2] = np.nan if at == 77 else np.inf
    found = ats.attend(query, key, value, mask=given, kernel="native")
    wide = (x.astype(np.float64) for x in (query, key, value))
    close = {"rtol": 0, "atol": 2e-6 if dtype == "float32" else 1e-14}
    np.testing.assert_allclose(found, ats.attend(*wide, mask=given, kernel="dense"), **close)


@pairs(
    # Rows of whole vectors of every target, which are read where they are, and others.
    dims={str(x): x for x in ((64, 64), (128, 32), (40, 30))},
    rows={str(x): x for x in ((1, 1), (1, 4), (2, 2), (4, 1))},
    score=("scaled_dot", "gaussian"),
    planted=("none-nothing", "lengths-masked", "holes-masked", "holes-unmasked"),
    dtype=("float16", "bfloat16"),
    target=native.targets(),
)
def test_few_queries_read_16_bit_keys_as_float32(
    target: str, dtype: str, planted: str, score: str, rows: tuple[int, int], dims: tuple[int, int]
) -> None:
    """The results equal the same numbers' as float32, rounded at the end. `rows`: heads of a group, queries."""
    native.select(target)
    torch.manual_seed(5)
    shapes = (3, 2 * rows[0], rows[1], dims[0]), (3, 2, 201, dims[0]), (3, 2, 201, dims[1])
    query, key, value = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)
    given = MASKS[planted.partition("-")[0]]
    weights = ats.attend(query, 0 * key, value, mask=given, kernel="dense", return_weights=True)[1]
    for at in (5, 77, 140, 160, 200):
        hidden = ~(weights[:, 0, 0, at] > 0)
        if planted.endswith("-masked"):
            key[hidden, :, at], value[hidden, :, at, ::2] = torch.nan, torch.inf
        if planted.endswith("unmasked"):
            value[~hidden, :, at, ::2] = torch.nan if at == 77 else torch.inf
    found = ats.attend(query, key, value, score=score, mask=given, kernel="native")
    wide = (x.float() for x in (query, key, value))
    wanted = ats.attend(*wide, score=score, mask=given, kernel="native").to(found.dtype)
    # Without fused multiply-adds sums are cut in parts, as many bytes long as with float32.
    apart = torch.finfo(found.dtype).eps if target == "portable" else 0
    torch.testing.assert_close(found, wanted, rtol=apart, atol=apart, equal_nan=True)
    assert planted.endswith("unmasked") or found.isfinite().all()


SHORT_MASKS: dict[str, Any] = {
    "none": lambda queries, keys: None,
    "lengths": lambda queries, keys: ats.ValidLens(np.array([keys, 0, (keys + 1) // 2])),
    "rising": lambda queries, keys: ats.ValidLens(np.linspace(0, keys, 3 * queries).astype(int).reshape(3, queries)),
    "falling": lambda queries, keys: ats.ValidLens(np.linspace(keys, 1, 3 * queries).astype(int).reshape(3, queries)),
    "causal": lambda queries, keys: ats.Causal("bottom_right"),
    "window": lambda queries, keys: ats.SlidingWindow(2, 1, align="bottom_right"),
}


@pairs(
    rows={str(x): x for x in ((1, 10), (2, 1), (4, 33), (5, 7), (10, 10), (16, 16), (17, 64), (32, 50))},
    dims={str(x): x for x in ((8, 8), (17, 3), (64, 64), (40, 130))},
    mask=tuple(SHORT_MASKS),
    score=("scaled_dot", "gaussian"),
    dtype=("float16", "bfloat16", "float32", "float64"),
    planted=("nothing", "masked", "unmasked"),
    target=native.targets(),
)
def test_short_heads(
    target: str, planted: str, dtype: str, score: str, mask: str, dims: tuple[int, int], rows: tuple[int, int]
) -> None:
    """Heads with keys of their own, a tile at most: outputs, weights and gradients; NaN among the last keys."""
    native.select(target)
    torch.manual_seed(5)
    shapes = (3, 2, rows[0], dims[0]), (3, 2, rows[1], dims[0]), (3, 2, rows[1], dims[1])
    query, key, value = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)
    given = SHORT_MASKS[mask](*rows)
    seen = ats.attend(query, 0 * key, value, mask=given, kernel="dense", return_weights=True)[1] > 0
    spoiled = planted == "unmasked" or (planted == "masked" and seen.any(dim=2).all())
    if planted == "masked":
        hidden = ~seen.any(dim=2)
        key[hidden], value[hidden] = torch.nan, torch.inf
    if spoiled:
        # Of a key that some rows attend to and others, with most masks, do not.
        value[:, :, rows[1] // 2, ::2] = torch.nan
    arrays = [x.requires_grad_() for x in (query, key, value)]
    found = ats.attend(*arrays, score=score, mask=given, kernel="native", return_weights=True)
    wide = [x.detach().double().requires_grad_() for x in arrays]
    wanted = ats.attend(*wide, score=score, mask=given, kernel="dense", return_weights=True)
    atol = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 4e-6, "float64": 1e-13}[dtype]
    # Gaussian scores are about as large as there are channels, and so is their rounding: with 64 the dense kernel is
    # off by up to 9e-6 in float32.
    atol *= max(dims[0] / 16, 1) if score == "gaussian" else 1
    close = {"rtol": atol, "atol": atol, "equal_nan": True}
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, **close)
    alone = ats.attend(*arrays, score=score, mask=given, kernel="native")
    torch.testing.assert_close(alone, found[0], rtol=0, atol=0, equal_nan=True)
    if not spoiled:
        gradients = [torch.autograd.grad(out.sin().sum(), of) for out, of in ((alone, arrays), (wanted[0], wide))]
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=8 * atol, atol=8 * atol)


@pairs(
    rows={str(x): x for x in ((1, 10), (4, 33), (5, 7), (16, 16), (32, 50))},
    options=("bias", "pairs", "documents", "dropout", "holes", "sink"),
    statistics=(False, True),
    dim=(8, 40),
    dtype=("float32", "float64"),
    target=native.targets(),
)
def test_short_heads_with_options(
    target: str, dtype: str, dim: int, statistics: bool, options: str, rows: tuple[int, int]
) -> None:
    """The same with biases, masks of pairs and dropout, and all statistics of scores far from 0; all gradients."""
    native.select(target)
    torch.manual_seed(5)
    of = getattr(torch, dtype)
    query, key, value = (torch.randn(3, 2, x, dim, dtype=of, requires_grad=True) for x in (rows[0], *rows[1:] * 2))
    bias = torch.randn(2, *rows, dtype=of) + 100
    bias[:, :, rows[1] // 2] = -torch.inf
    bias.requires_grad_()
    ids = torch.arange(rows[0] + rows[1]) % 3
    given: dict[str, Any] = {
        "bias": {"bias": bias},
        "pairs": {"mask": torch.rand(3, 1, *rows) < 0.6},
        "documents": {"mask": ats.Documents(ids[: rows[0]], ids[rows[0] :])},
        "dropout": {"dropout": 0.4, "seed": 7, "valid_lens": torch.tensor([rows[1], 0, 3])},
        "holes": {"mask": ats.KeyRange(0, 2) | ats.KeyRange(4, rows[1] - 1)},
        "sink": {"sink": torch.tensor([0.5, -1], dtype=of), "valid_lens": torch.tensor([rows[1], 0, 3])},
    }[options]
    wanted = ats.attend(query, key, value, kernel="dense", return_stats=True, return_weights=True, **given)
    found = ats.attend(query, key, value, kernel="native", return_stats=statistics, return_weights=True, **given)
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-12, "atol": 1e-12}
    for x, y in zip(found[:2], wanted, strict=False):
        torch.testing.assert_close(x, y, **close)
    if statistics:
        for x, y in zip(found[2], wanted[2], strict=True):
            torch.testing.assert_close(x, y, **close)

    def gradients(results: Any) -> tuple[torch.Tensor, ...]:
        loss = results[0].sin().sum() + results[1].square().sum()
        if statistics:
            loss = loss + results[2].entropy.sum() + results[2].log_sum_exp.clamp(min=-1e3).sum()
        return torch.autograd.grad(loss, (query, key, value) + ((bias,) if options == "bias" else ()))

    for x, y in zip(gradients(found), gradients(wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=8 * close["rtol"], atol=8 * close["atol"])


@pairs(
    rows={str(x): x for x in ((1, 10), (2, 9), (4, 33), (5, 7), (12, 12), (32, 64))},
    dims={str(x): x for x in ((8, 8), (64, 64), (40, 3))},
    score=("scaled_dot", "gaussian"),
    planted=("nan", "inf", "large"),
    dtype=("float32", "float64"),
    target=native.targets(),
)
def test_what_short_heads_hide_changes_no_bit(
    target: str, dtype: str, planted: str, score: str, dims: tuple[int, int], rows: tuple[int, int]
) -> None:
    """Two documents: whatever one of them holds, results and gradients of the other keep their bits."""
    native.select(target)
    torch.manual_seed(5)
    of = getattr(torch, dtype)
    shapes = (3, rows[0], dims[0]), (3, rows[1], dims[0]), (3, rows[1], dims[1]), (3, rows[0], dims[1])
    arrays = [torch.randn(shape, dtype=of) for shape in shapes]
    # Rows and keys of the first document are not neighbours.
    ids = [torch.arange(n) % 3 % 2 for n in rows]
    of_rows, of_keys = (own == 0 for own in ids)
    number = {"nan": torch.nan, "inf": torch.inf, "large": torch.finfo(of).max / 4}[planted]

    def results() -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_() for x in arrays[:3]]
        out = ats.attend(*inputs, score=score, mask=ats.Documents(*ids), kernel="native")
        return [out, *torch.autograd.grad(out, inputs, arrays[3])]

    clean = results()
    for x, own in zip(arrays, (of_rows, of_keys, of_keys, of_rows), strict=True):
        x[:, ~own, ::2] = number
    for x, y, own in zip(results(), clean, (of_rows, of_rows, of_keys, of_keys), strict=True):
        assert y.isfinite().all()
        torch.testing.assert_close(x[:, own], y[:, own], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", native.targets())
def test_weights_are_off_by_the_rounding_of_their_scores(target: str, dtype: str) -> None:
    """Of exact scores down to e^-40: exponentials add a few units in the last place, on every target."""
    native.select(target)
    query, key = np.ones((3, 1), dtype), (np.arange(-1280, 1280, 7) / 64)[:, None].astype(dtype)
    _, weights = ats.attend(query, key, np.ones_like(key), score="dot", return_weights=True)
    below = key[:, 0].astype(np.longdouble) - key.max()
    exact = np.exp(below) / np.exp(below).sum()
    allowed = (4 + 0.6 * abs(below)) * np.finfo(dtype).eps
    assert (abs(weights / exact - 1) <= allowed).all()


def test_a_target_that_does_not_exist() -> None:
    before = native.current_target()
    with pytest.raises(ValueError, match=rf"name: expected a target .*'{IN_ORDER[-1]}', got 'sse9'"):
        native.select("sse9")
    assert native.current_target() == before


NATIVE = "import attnscore._native as native\n"


@pytest.mark.parametrize("target", native.targets())
def test_the_environment_forces_a_target(target: str) -> None:
    done = in_new_process(NATIVE + "print(native.current_target())", ATTNSCORE_TARGET=target)
    assert (done.stdout, done.stderr) == (f"{target}\n", "")


@pytest.mark.slow
def test_a_wrong_target_in_the_environment_is_an_error_at_the_first_use() -> None:
    code = "print(native.targets()[-1], flush=True); native.current_target()"
    done = in_new_process(NATIVE + code, ATTNSCORE_TARGET="sse9")
    assert done.stdout == f"{IN_ORDER[-1]}\n"
    assert "ValueError: environment variable ATTNSCORE_TARGET: expected a target" in done.stderr
    assert "got 'sse9'" in done.stderr
    code = f"native.select({IN_ORDER[-1]!r}); native.current_target()"
    assert in_new_process(NATIVE + code, ATTNSCORE_TARGET="sse9").returncode == 0


def test_the_package_can_be_told_to_do_without() -> None:
    code = "import attnscore as ats; print(ats.available()['kernels']['native'])"
    assert in_new_process(code, ATTNSCORE_NO_NATIVE="1").stdout == "turned off by ATTNSCORE_NO_NATIVE=1\n"
    assert in_new_process(code, ATTNSCORE_NO_NATIVE="").stdout == "True\n"
