"""Attention over files, one chunk of keys at a time: the results of one call, in little memory, each key read once."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, MaskError, ShapeError
from attnscore.parallel import attend_chunks
from attnscore.problem.statistics import TABLE

RNG = np.random.default_rng(7)
BATCH, HEADS, N, M, DIM = 2, 4, 9, 53, 6
QUERY, KEY, VALUE = (
    RNG.standard_normal(shape) for shape in ((BATCH, HEADS, N, DIM), (BATCH, 2, M, DIM), (BATCH, 2, M, 5))
)
INTERVALS = {
    "none": None,
    "causal": ats.Causal("bottom_right"),
    "window": ats.SlidingWindow(left=5, right=0, align="bottom_right"),
    "sinks": ats.KeyRange(0, 2) | ats.SlidingWindow(left=3, right=0, align="bottom_right"),
    "lengths": ats.ValidLens(np.array([40, 0])),
    "nothing": ats.KeyRange(0, 0),
}
MASKS = INTERVALS | {
    "array": ats.Dense(RNG.random((BATCH, 1, N, M)) < 0.3),
    "padding": ats.KeyPadding(RNG.random((BATCH, M)) < 0.5),
    "graph": ats.Neighbours([0, 3, 3, 3, 3, 3, 3, 3, 3, 4], [1, 20, 52, 7]),
}
W = RNG.standard_normal(3), RNG.standard_normal((3, DIM)), RNG.standard_normal((3, DIM))
EXTRAS = {
    "nothing": {},
    "bias": {"bias": RNG.standard_normal((HEADS, N, M))},
    "bias of keys": {"bias": RNG.standard_normal((BATCH, 1, 1, M))},
    "relative bias": {"bias": RNG.standard_normal((HEADS, 1, N + M - 1))},
    "one bias": {"bias": RNG.standard_normal((HEADS, N, 1))},
    "sink": {"sink": RNG.standard_normal(HEADS)},
    "lengths": {"valid_lens": [50, 3]},
    "additive": {"score": ats.Additive(*W)},
    "gaussian": {"score": "gaussian", "kernel": "streaming"},
}


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 1, 10, 53, 100])
@pytest.mark.parametrize("name", MASKS)
def test_masks_speak_of_all_keys(name: str, chunk: int | None) -> None:
    expected = ats.attend(QUERY, KEY, VALUE, mask=MASKS[name], kernel="dense")
    close(attend_chunks(QUERY, KEY, VALUE, mask=MASKS[name], chunk=chunk), expected)


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("mask", ["none", "window", "array"])
def test_extras(name: str, mask: str) -> None:
    expected = ats.attend(QUERY, KEY, VALUE, mask=MASKS[mask], **EXTRAS[name])
    close(attend_chunks(QUERY, KEY, VALUE, mask=MASKS[mask], chunk=8, **EXTRAS[name]), expected)


@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_merged(name: str, sink: float | None) -> None:
    options = {"mask": MASKS[name], "sink": sink, "return_stats": True}
    out, stats = attend_chunks(QUERY, KEY, VALUE, chunk=7, **options)
    expected_out, expected = ats.attend(QUERY, KEY, VALUE, kernel="dense", **options)
    close(out, expected_out)
    for field in TABLE:
        close(getattr(stats, field), getattr(expected, field))
        assert getattr(stats, field).dtype == getattr(expected, field).dtype


@pytest.mark.parametrize("wanted", [(name,) for name in TABLE])
def test_one_statistic(wanted: tuple[str, ...]) -> None:
    _, stats = attend_chunks(QUERY, KEY, VALUE, chunk=20, return_stats=wanted)
    _, expected = ats.attend(QUERY, KEY, VALUE, return_stats=wanted)
    assert [field for field in TABLE if getattr(stats, field) is not None] == [*wanted]
    close(getattr(stats, wanted[0]), getattr(expected, wanted[0]))


def test_values_without_channels() -> None:
    out, stats = attend_chunks(QUERY, KEY, VALUE[..., :0], chunk=20, return_stats=True)
    assert out.shape == (BATCH, HEADS, N, 0)
    close(stats.mean_score, ats.attend(QUERY, KEY, VALUE, return_stats=True)[1].mean_score)


def test_arrays_of_heads_beside_lengths() -> None:
    """With as many sequences as heads, each of which attends other keys, and with more."""
    for mask, lens in (
        (np.array([[[1, 1, 0, 0]], [[0, 0, 1, 1]]], bool), [4, 2]),
        (np.ones((2, 1, 4), bool), [4, 2, 1]),
    ):
        arrays = [np.random.default_rng(0).normal(size=(len(lens), 2, n, 3)) for n in (1, 4, 4)]
        options = {"mask": mask, "valid_lens": lens}
        close(attend_chunks(*arrays, chunk=2, **options), ats.attend(*arrays, **options))


@pytest.mark.parametrize("shape", [(N, M), (N, 1), (1,), (), (HEADS, 1, N + M - 1)], ids=repr)
@pytest.mark.parametrize("framework", [np.asarray, torch.asarray])
def test_biases_of_files(framework: Callable[[np.ndarray], object], shape: tuple[int, ...], tmp_path: Path) -> None:
    """They are read into arrays of the framework of the query, whatever axes are broadcast."""
    bias = RNG.standard_normal(shape)
    np.save(tmp_path / "bias.npy", bias)
    expected = ats.attend(QUERY, KEY, VALUE, bias=bias, kernel="dense")
    for file in (bias, np.load(tmp_path / "bias.npy", mmap_mode="r"), Recorded(bias)):
        close(attend_chunks(framework(QUERY), KEY, VALUE, chunk=8, bias=file), expected)


def test_means_with_a_bias_that_masks() -> None:
    bias = np.array([[0, -np.inf, 0, 0], [-np.inf, -np.inf, 0, 1]])
    arguments = np.ones((2, 2)), RNG.standard_normal((4, 2)), np.ones((4, 2))
    names = ("mean_score", "var_score", "entropy")
    _, found = attend_chunks(*arguments, chunk=2, bias=bias, return_stats=names)
    _, wanted = ats.attend(*arguments, bias=bias, return_stats=names)
    for name in names:
        close(getattr(found, name), getattr(wanted, name))


def test_lengths_before_heads() -> None:
    arrays = [x.swapaxes(1, 2) for x in (QUERY, KEY, VALUE)]
    options = {"head_axis": -2, "mask": INTERVALS["window"], "return_stats": True}
    out, stats = attend_chunks(*arrays, chunk=6, **options)
    expected_out, expected = ats.attend(*arrays, **options)
    close(out, expected_out)
    close(stats.var_score, expected.var_score)
    close(stats.entropy, expected.entropy)


def test_half_precision_is_summed_in_float32() -> None:
    """The result is rounded once, whatever the number of chunks: by half a unit in the last place."""
    arrays = [x.astype(np.float16) for x in (QUERY, KEY, VALUE)]
    out = attend_chunks(*arrays, chunk=3)
    assert out.dtype == np.float16
    expected = ats.attend(*(x.astype(np.float64) for x in arrays), kernel="dense")
    np.testing.assert_allclose(out, expected, rtol=np.finfo(np.float16).eps / 2, atol=2e-6)


def test_queries_of_a_framework_and_keys_of_a_file(tmp_path: Path) -> None:
    for name, x in {"key": KEY, "value": VALUE}.items():
        np.save(tmp_path / name, x)
    key, value = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("key", "value"))
    query = torch.from_numpy(QUERY).requires_grad_()
    out = attend_chunks(query, key, value, chunk=10, mask=ats.Causal("bottom_right"))
    other = torch.from_numpy(QUERY).requires_grad_()
    expected = ats.attend(other, torch.from_numpy(KEY), torch.from_numpy(VALUE), mask=ats.Causal("bottom_right"))
    close(out.detach(), expected.detach())
    grad = torch.from_numpy(RNG.standard_normal(out.shape))
    out.backward(grad)
    expected.backward(grad)
    close(query.grad, other.grad)
    # Tensors of the framework are sliced as they are.
    tensors = [torch.from_numpy(x) for x in (QUERY, KEY, VALUE)]
    close(attend_chunks(*tensors, chunk=9), ats.attend(QUERY, KEY, VALUE))


class Recorded:
    """A file that records which positions of axis -2 are read."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape, self.dtype, self.read = x, x.shape, x.dtype, []

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        self.read += [i for part in index[-2:-1] for i in range(*part.indices(self.shape[-2]))]
        return self.x[index]


def test_each_key_is_read_once_in_order() -> None:
    key, value = Recorded(KEY), Recorded(VALUE)
    calls = []
    attend_chunks(QUERY, key, value, chunk=10, progress=lambda done, total: calls.append((done, total)))
    assert key.read == value.read == [*range(M)]
    assert calls == [(done, M) for done in (10, 20, 30, 40, 50, 53)]


def test_chunks_that_no_query_attends_are_not_read() -> None:
    key, value = Recorded(KEY), Recorded(VALUE)
    calls = []
    mask = ats.SlidingWindow(left=1, right=0, align="bottom_right") | ats.KeyRange(0, 1)
    options = {"mask": mask, "chunk": 10, "progress": lambda done, total: calls.append(done)}
    close(attend_chunks(QUERY, key, value, **options), ats.attend(QUERY, KEY, VALUE, mask=mask))
    assert key.read == [*range(10), *range(40, 53)]
    assert calls == [10, 50, 53]


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (ats.Dense(np.ones((BATCH, 1, N, 0), bool)), 0),
        (ats.KeyPadding(np.ones((BATCH, 0), bool)), 0),
        (ats.KeyPadding([[False], [False]]), 1),
        (ats.Documents([0] * N, [1]), 1),
    ],
    ids=repr,
)
def test_masks_that_no_key_passes(mask: ats.Mask, keys: int) -> None:
    assert not attend_chunks(QUERY, KEY[:, :, :keys], VALUE[:, :, :keys], mask=mask).any()


def test_no_keys() -> None:
    out, stats = attend_chunks(QUERY, KEY[:, :, :0], VALUE[:, :, :0], return_stats=True)
    assert not out.any() and np.isneginf(stats.log_sum_exp).all() and not stats.entropy.any()


BAD = {
    "chunk": ({"chunk": 0}, ArgumentError, "chunk: expected a whole number of keys, 1 or more, got 0"),
    "key": ({"key": [1.0]}, FrameworkError, "key: expected an array or a file of one"),
    "list": ({"bias": [[0.5]]}, FrameworkError, "bias: expected an array or a file of one"),
    "value": ({"value": VALUE[:, :, 1:]}, ShapeError, r"value: expected as many positions as key \(53\), got 52"),
    "mask": ({"mask": ats.Causal()}, MaskError, "Causal"),
    "bias": ({"bias": np.zeros((N, 7))}, ShapeError, "bias: expected a shape that broadcasts"),
    "dtype": ({"key": KEY.astype(np.float32)}, DtypeError, "one dtype"),
    "integers": ({"key": KEY.astype(int)}, DtypeError, "key: expected a floating dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    options, error, text = BAD[name]
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    with pytest.raises(error, match=text):
        attend_chunks(**(arrays | {"chunk": 16} | options))


LIMITED = """
import resource, sys
import numpy as np
import attnscore as ats
from attnscore.parallel import attend_chunks

folder, length, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
key, value = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("key", "value"))
query = np.load(f"{folder}/query.npy")
attend_chunks(query, key[:, :4096], value[:, :4096])  # Threads start, and what is loaded at first use.
# A file that is only read is no part of the data; whatever is allocated is.
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
try:
    np.array(key)
except MemoryError:
    print("the keys alone do not fit")
done = []
out = attend_chunks(query, key, value, progress=lambda now, total: done.append(now))
print(len(done), done == sorted(set(done)), done[-1] == length)
np.save(f"{folder}/out.npy", out)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("megabytes", [192, 1024])
def test_a_file_larger_than_the_memory_of_the_process(tmp_path: Path, megabytes: int) -> None:
    length, limit = megabytes * 2**20 // (2 * 64 * 4), 88 * 2**20
    parts = []
    for name in ("key", "value"):
        x = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (1, length, 64))
        # A few rows many times over, so that the result is known.
        block = RNG.standard_normal((1, 4096, 64)).astype(np.float32)
        for start in range(0, length, 4096):
            x[:, start : start + 4096] = block
        x.flush()
        parts.append(block)
    query = RNG.standard_normal((1, 16, 64)).astype(np.float32)
    np.save(tmp_path / "query.npy", query)
    (tmp_path / "run.py").write_text(textwrap.dedent(LIMITED))
    command = [sys.executable, tmp_path / "run.py", tmp_path, str(length), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "the keys alone do not fit" and last == f"{megabytes // 32} True True"
    # All keys as often as they are repeated: that changes no weight.
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), ats.attend(query, *parts), rtol=2e-5, atol=2e-5)
