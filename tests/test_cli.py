"""The command line on real files and on bad ones: what it writes, what it says, which status it ends with."""

import io
import json
import os
import re
import stat
import struct
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file
from safetensors.numpy import save as to_safetensors

import attnscore as ats
from attnscore import io as files
from attnscore import plotting
from attnscore.analysis.explain import Unavailable
from attnscore.cli import main

RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=shape).astype(np.float32) for shape in ((2, 4, 8), (2, 6, 8), (2, 6, 3)))
KEYS = {"query": Q, "key": K, "value": V}


@pytest.fixture
def npz(tmp_path):
    def make(name="in.npz", **more):
        path = tmp_path / name
        np.savez(path, **{**KEYS, **more})
        return str(path)

    return make


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, *arguments):
    """Run a command whose input is wrong; return the one line that says so."""
    status, out, err = run(capsys, *arguments)
    assert status == 2, (status, out, err)
    assert err.count("\n") == 1 and "Traceback" not in err, err
    return err


# ---------------------------------------------------------------- attend: what it computes


def test_npz_to_npz_with_weights_and_statistics(capsys, npz, tmp_path):
    out = tmp_path / "out.npz"
    status, printed, err = run(capsys, "attend", npz(), "--out", out, "--weights", "--stats")
    assert (status, err) == (0, "")
    expected, weights, stats = ats.attend(Q, K, V, return_weights=True, return_stats=True)
    with np.load(out, allow_pickle=False) as found:
        assert set(found.files) == {"out", "weights", *stats._fields}
        np.testing.assert_array_equal(found["out"], expected)
        np.testing.assert_array_equal(found["weights"], weights)
        for name, value in stats._asdict().items():
            np.testing.assert_array_equal(found[name], value)
        assert found["out"].dtype == np.float32
    assert "Written" in printed and "2×4×3" in printed and "entropy" in printed


def test_single_files_in_and_out(capsys, tmp_path):
    for name, array in KEYS.items():
        np.save(tmp_path / f"{name}.npy", array)
    options = [part for name in KEYS for part in (f"--{name}", tmp_path / f"{name}.npy")]
    assert run(capsys, "attend", *options, "--out", tmp_path / "o.npy")[0] == 0
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), ats.attend(Q, K, V))


def test_safetensors_in_bfloat16(capsys, tmp_path):
    inputs = {name: array.astype(ml_dtypes.bfloat16) for name, array in KEYS.items()}
    save_file(inputs, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    assert run(capsys, "attend", tmp_path / "in.safetensors", "--out", out, "--stats")[0] == 0
    found = load_file(out)
    assert found["out"].dtype == ml_dtypes.bfloat16 and found["entropy"].dtype == np.float32
    np.testing.assert_array_equal(found["out"], ats.attend(*inputs.values()))


ARRAYS = {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, shape in (("w_v", 5), ("W_q", (5, 8)), ("W_k", (5, 8)), ("W", (8, 8)), ("bias", (4, 6)))
}
W, BIAS = ARRAYS["W"], ARRAYS["bias"]
ADDITIVE = {name: ARRAYS[name] for name in ("w_v", "W_q", "W_k")}
MASK = RNG.random((2, 4, 6)) > 0.4
SINK = np.float32(0.5)


@pytest.fixture
def attended(capsys, npz, tmp_path, monkeypatch):
    """Run `attend` on a file with these arrays, beside W.npy and sink.npy; return what it wrote."""

    def compute(arrays, *options):
        monkeypatch.chdir(tmp_path)
        np.save("W.npy", W)
        np.save("sink.npy", SINK)
        assert run(capsys, "attend", npz(**arrays), *options, "--out", "out.npy")[0] == 0
        return np.load("out.npy")

    return compute


SCORES = [
    ({}, ["--score", "dot"], ats.Dot()),
    ({}, ["--score", "scaled_dot"], ats.ScaledDot()),
    ({}, ["--score", "scaled_dot", "--param", "scale=0.3"], ats.ScaledDot(0.3)),
    ({}, ["--score", "gaussian", "--param", "bandwidth=2"], ats.Gaussian(2.0)),
    ({}, ["--score", "cosine"], ats.Cosine()),
    ({}, ["--score", "sum"], ats.Sum()),
    ({"W": W}, ["--score", "bilinear"], ats.Bilinear(W)),
    ({}, ["--score", "bilinear", "--param", "W=W.npy"], ats.Bilinear(W)),
    (ADDITIVE, ["--score", "additive"], ats.Additive(**ADDITIVE)),
    (ADDITIVE, ["--score", "additive", "--activation", "relu"], ats.Additive(**ADDITIVE, activation="relu")),
    ({}, ["--softcap", "2", "--temperature", "0.5"], ats.Temperature(ats.SoftCap(ats.ScaledDot(), 2.0), 0.5)),
]


@pytest.mark.parametrize(("arrays", "options", "score"), SCORES, ids=[" ".join(row[1]) for row in SCORES])
def test_every_score(attended, arrays, options, score):
    np.testing.assert_array_equal(attended(arrays, *options), ats.attend(Q, K, V, score=score))


NEAR = {"mask": ats.SlidingWindow(left=1, align="top_left")}
PAST = {"mask": ats.SlidingWindow(left=1, right=0, align="bottom_right")}
BOTH = {"mask": ats.Causal("bottom_right") & ats.SlidingWindow(left=2, align="bottom_right")}
OF_THE_CALL = {"mask": MASK, "bias": BIAS, "sink": SINK, "valid_lens": np.array([3, 6])}
CALLS = [
    ({}, ["--causal", "top_left"], {"mask": ats.Causal("top_left")}),
    ({}, ["--causal=bottom_right"], {"mask": ats.Causal("bottom_right")}),
    ({}, ["--valid-lens", "2,5"], {"valid_lens": [2, 5]}),
    ({}, ["--window", "1", "--align", "top_left"], NEAR),
    ({}, ["--window", "1,0", "--align", "bottom_right"], PAST),
    ({}, ["--causal", "bottom_right", "--window", "2"], BOTH),
    ({}, ["--valid-lens", "2,5", "--causal", "top_left"], {"mask": ats.Causal("top_left"), "valid_lens": [2, 5]}),
    ({"mask": MASK}, ["--causal", "top_left"], {"mask": ats.Dense(MASK) & ats.Causal("top_left")}),
    ({}, ["--sink", "-0.5"], {"sink": -0.5}),
    ({}, ["--sink", "sink.npy"], {"sink": SINK}),
    (OF_THE_CALL, [], OF_THE_CALL),
]


@pytest.mark.parametrize(("arrays", "options", "expected"), CALLS, ids=[" ".join(row[1]) for row in CALLS])
def test_masks_lengths_biases_and_sinks(attended, arrays, options, expected):
    np.testing.assert_array_equal(attended(arrays, *options), ats.attend(Q, K, V, **expected))


def test_two_axes_and_a_single_length(attended):
    found = attended({"query": Q[0], "key": K[0], "value": V[0]}, "--valid-lens", "3")
    np.testing.assert_array_equal(found, ats.attend(Q[0], K[0], V[0], valid_lens=3))


def test_bare_causal_before_the_input_file(capsys, npz, tmp_path):
    out = tmp_path / "out.npy"
    assert run(capsys, "attend", "--causal", npz(key=Q, value=Q), "--out", out)[0] == 0
    np.testing.assert_array_equal(np.load(out), ats.attend(Q, Q, Q, mask=ats.Causal()))


def test_head_axis_and_dtype(attended):
    x = RNG.integers(-3, 3, size=(1, 5, 2, 4))
    found = attended({"query": x, "key": x, "value": x}, "--head-axis", "-2", "--dtype", "float64")
    np.testing.assert_array_equal(found, ats.attend(*[x.astype(np.float64)] * 3, head_axis=-2))


def test_big_endian_files(attended):
    found = attended({name: x.astype(">f4") for name, x in KEYS.items()})
    np.testing.assert_array_equal(found, ats.attend(Q, K, V))


def test_nan_is_data(attended):
    bad = V.copy()
    bad[0, 5] = np.nan
    assert np.isfinite(attended({"value": bad}, "--valid-lens", "5,6")).all()


def test_explain_prints_the_plan_and_computes_nothing(capsys, npz, tmp_path):
    status, printed, _ = run(capsys, "attend", npz(), "--explain", "--causal", "top_left")
    assert status == 0 and "kernel" in printed and "tiles" in printed and "ScaledDot" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz"]


def test_explain_and_out_together(capsys, npz, tmp_path):
    status, printed, _ = run(capsys, "attend", npz(), "--explain", "--out", tmp_path / "o.npz")
    assert status == 0 and "tiles" in printed and (tmp_path / "o.npz").exists()


def test_overwrites_and_keeps_the_mode(capsys, npz, tmp_path):
    out = tmp_path / "out.npy"
    out.write_bytes(b"old")
    out.chmod(0o640)
    assert run(capsys, "attend", npz(), "--out", out)[0] == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    fresh = tmp_path / "fresh.npy"
    assert run(capsys, "attend", npz(), "--out", fresh)[0] == 0
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o666 & ~mask


def test_transposed_arrays_survive_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    arrays = {"t": Q.swapaxes(0, 2), "number": np.array(3.0), "empty": np.zeros((0, 2))}
    files.write_arrays(path, arrays)
    found = files.read_arrays(path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    files.write_arrays(path, {"a": Q})
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*x\.npz"):
        files.write_arrays(path, {"a": K})
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["x.npz"]


# ---------------------------------------------------------------- attend: bad files and options


def saved(save, *arrays, **named):
    """The bytes of a file."""
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


def zipped(name, content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def with_bytes(content, place, others):
    return content[:place] + others + content[place + len(others) :]


NPZ, SAFETENSORS = saved(np.savez, **KEYS), to_safetensors(KEYS)
FLOAT8 = to_safetensors({"query": Q.astype(ml_dtypes.float8_e4m3fn)})
COMPRESSED = with_bytes(saved(np.savez_compressed, **KEYS), 60, b"\xff" * 30)
BAD_FILES = {
    "missing": ("none.npz", None, "no such file"),
    "a folder": ("d.npz", None, "is a folder"),
    "another kind": ("x.csv", b"1,2", ".safetensors"),
    "empty npz": ("x.npz", b"", "damaged or truncated"),
    "truncated npz": ("x.npz", NPZ[:500], "damaged or truncated"),
    "flipped bytes": ("x.npz", with_bytes(NPZ, 300, b"\0\1\2"), "damaged or truncated"),
    "flipped bytes, compressed": ("x.npz", COMPRESSED, "damaged or truncated"),
    "text": ("x.npz", b"nan nan nan, not an archive", "never read"),
    "npy called npz": ("x.npz", saved(np.save, Q), "not those of a .npz file"),
    "npz with a text file": ("x.npz", zipped("notes.txt", "hello"), "is not an array"),
    "empty safetensors": ("x.safetensors", b"", "damaged"),
    "truncated safetensors": ("x.safetensors", SAFETENSORS[:200], "damaged"),
    "huge safetensors header": ("x.safetensors", struct.pack("<Q", 2**60) + b"{}", "damaged"),
    "float8": ("x.safetensors", FLOAT8, "F8_E4M3"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(capsys, tmp_path, case):
    name, content, words = BAD_FILES[case]
    path = tmp_path / name
    if case == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    err = refused(capsys, "attend", path, "--out", tmp_path / "out.npz")
    assert words in err and str(path) in err
    assert not (tmp_path / "out.npz").exists()


def test_pickled_objects_are_never_read(capsys, npz, tmp_path):
    trap = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return (open, (str(trap), "w"))

    source = npz(query=np.array([Trap()], dtype=object))
    assert "pickled objects" in refused(capsys, "attend", source, "--out", tmp_path / "o.npz")
    np.save(tmp_path / "q.npy", np.array([Trap()], dtype=object))
    line = refused(capsys, "attend", "--query", tmp_path / "q.npy", "--out", tmp_path / "o.npz")
    assert "pickled objects" in line
    assert not trap.exists()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"query": np.array([["NaN", "1"]])}, ["query", "dtype <U3", "expected real numbers"]),
        ({"query": np.array(["2024"], "datetime64[Y]")}, ["query", "datetime64"]),
        ({"query": Q + 1j}, ["query", "complex"]),
        ({"query": Q.astype(int)}, ["query", "int64"]),
        ({"query": Q.astype(np.float64)}, ["float64", "float32"]),
        ({"query": Q.astype(ml_dtypes.bfloat16)}, ["query", "bfloat16", "safetensors"]),
        ({"key": K[:, :, :5]}, ["key", "8", "5"]),
        ({"value": V[:, :5]}, ["value", "(2, 5, 3)"]),
        ({"valid_len": np.array([1, 2])}, ["unknown array 'valid_len'", "valid_lens"]),
        ({"valid_lens": np.array([1, 7])}, ["valid_lens", "7"]),
        ({"valid_lens": np.array([1, 2, 3])}, ["valid_lens", "3"]),
        ({"mask": np.ones((2, 4, 5), bool)}, ["mask", "(2, 4, 5)"]),
        ({"mask": np.ones((2, 4, 6))}, ["mask", "bool"]),
        ({"W": W}, ["W", "'scaled_dot'", "scale"]),
        ({"query": Q[0, 0, 0]}, ["query"]),
    ],
)
def test_bad_arrays(capsys, npz, tmp_path, arrays, words):
    err = refused(capsys, "attend", npz(**arrays), "--out", tmp_path / "out.npz")
    assert all(word in err for word in words), err
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--out", "--explain"]),
        (["--out", "nowhere/out.npz"], ["nowhere", "does not exist"]),
        (["--out", "out.txt"], ["out.txt", ".npz"]),
        (["--out", "."], ["expected a name that ends in"]),
        (
            ["--out", "o.npy", "--weights"],
            ["o.npy: expected a name that ends in .npz, .safetensors; a .npy file holds one"],
        ),
        (["--out", "o.txt", "--stats"], ["o.txt: expected a name that ends in .npz, .safetensors"]),
        (["--out", "o.npz", "--score", "nope"], ["--score", "'nope'", "scaled_dot"]),
        (["--out", "o.npz", "--score", "additive"], ["'additive'", "w_v"]),
        (["--out", "o.npz", "--score", "bilinear"], ["'bilinear'", "W"]),
        (["--out", "o.npz", "--param", "scale"], ["--param", "NAME=FILE"]),
        (["--out", "o.npz", "--param", "speed=3"], ["--param", "speed"]),
        (["--out", "o.npz", "--param", "bandwidth=1"], ["bandwidth", "'scaled_dot'"]),
        (["--out", "o.npz", "--param", "scale=x"], ["--param scale", "a number, or a file", "'x'"]),
        (["--out", "o.npz", "--sink", "much"], ["--sink", "a number, or a file", "'much'"]),
        (["--out", "o.npz", "--sink", "none.npy"], ["none.npy", "no such file"]),
        (["--out", "o.npz", "--score", "gaussian", "--param", "bandwidth=-1"], ["bandwidth", "-1"]),
        (["--out", "o.npz", "--score", "additive", "--activation", "x"], ["w_v"]),
        (
            ["--out", "o.npz", "--causal"],
            ["--causal: expected an alignment", "4 queries and 6 keys", "--causal top_left"],
        ),
        (["--out", "o.npz", "--window", "2"], ["--window: expected an alignment", "--align bottom_right the last"]),
        (["--out", "o.npz", "--causal", "--window", "2", "--align", "top_left"], ["--causal bottom_right the last"]),
        (["--out", "o.npz", "--causal=sideways"], ["--causal", "sideways"]),
        (["--out", "o.npz", "--window", "x"], ["--window", "LEFT,RIGHT", "'x'"]),
        (["--out", "o.npz", "--align", "top_left"], ["--align", "--window"]),
        (["--out", "o.npz", "--window=-3"], ["--window", "from 0 on", "'-3'"]),
        (["--out", "o.npz", "--activation", "relu"], ["--activation", "'scaled_dot'"]),
        (["--out", "o.npz", "--temperature", "0"], ["--temperature", "above 0"]),
        (["--out", "o.npz", "--softcap", "-3"], ["--softcap", "-3"]),
        (["--out", "o.npz", "--valid-lens", "9,9"], ["valid_lens", "9"]),
        (["--out", "o.npz", "--valid-lens", "3.5,2"], ["--valid-lens", "whole numbers", "'3.5,2'"]),
        (["--out", "o.npz", "--valid-lens", "none.npy"], ["none.npy", "no such file"]),
        (["--out", "o.npz", "--head-axis", "7"], ["head_axis", "7"]),
        (["--out", "o.npz", "--kernel", "warp"], ["kernel", "warp"]),
        (["--out", "o.npz", "--dtype", "int8"], ["--dtype", "float32"]),
        (["--out", "o.npz", "--fast"], ["--fast"]),
        (["extra.npz", "--out", "o.npz"], ["extra.npz"]),
    ],
)
def test_bad_options(capsys, npz, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "attend", npz(), *options)
    assert all(word in err for word in words), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz"]


def test_missing_arrays_are_named(capsys, tmp_path):
    np.savez(tmp_path / "in.npz", query=Q, wert=V)
    assert "unknown array 'wert'" in refused(capsys, "attend", tmp_path / "in.npz", "--out", tmp_path / "o.npz")
    np.savez(tmp_path / "in.npz", query=Q)
    err = refused(capsys, "attend", tmp_path / "in.npz", "--out", tmp_path / "o.npz")
    assert "no key and no value" in err and "holds query" in err
    assert "no key" in refused(capsys, "look", tmp_path / "in.npz")
    assert "no input file" in refused(capsys, "attend", "--out", tmp_path / "o.npz")


def test_an_array_given_twice(capsys, npz, tmp_path):
    np.save(tmp_path / "q.npy", Q)
    err = refused(capsys, "attend", npz(), "--query", tmp_path / "q.npy", "--out", tmp_path / "o.npz")
    assert "--query" in err and "twice" in err


def test_the_input_is_not_overwritten(capsys, npz, tmp_path):
    source, text = npz(), tmp_path / "notes.txt"
    assert "overwritten" in refused(capsys, "attend", source, "--out", source)
    text.write_text("words", "utf-8")
    assert "overwritten" in refused(capsys, "inspect", "minilm", "--text", text, "--out", text)
    assert text.read_text("utf-8") == "words"


@pytest.mark.parametrize("command", ["attend", "look"])
@pytest.mark.parametrize("option", ["--bias", "--sink", "--valid-lens", "--param"])
def test_files_of_options_are_not_overwritten(capsys, npz, tmp_path, command, option):
    source, own = npz(), tmp_path / "own.npz"
    np.savez(own, x=np.array(1, np.float32) if option == "--param" else np.ones(2, np.int64))
    before = own.read_bytes()
    err = refused(capsys, command, source, option, f"scale={own}" if option == "--param" else own, "--out", own)
    assert "own.npz is an input file; it would be overwritten" in err
    assert own.read_bytes() == before


def test_dtypes_that_do_not_hold_the_numbers_or_that_the_file_does_not_hold(capsys, npz, tmp_path):
    err = refused(capsys, "attend", npz(value=V * np.float32(1e6)), "--dtype", "float16", "--out", tmp_path / "o.npz")
    assert "--dtype" in err and "value" in err and "float16" in err
    err = refused(capsys, "attend", npz(), "--dtype", "bfloat16", "--out", tmp_path / "o.npz")
    assert "bfloat16" in err and ".safetensors" in err


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("ml_dtypes", ["attend", "in.npz", "--dtype", "bfloat16", "--out", "o.safetensors"], "pip install ml_dtypes"),
        ("safetensors.numpy", ["attend", "in.npz", "--out", "o.safetensors"], "attnscore[cli]"),
        ("matplotlib.figure", ["look", "in.npz", "--place", "0", "--plot", "map.png"], "attnscore[plot]"),
    ],
)
def test_a_missing_package_is_named(capsys, npz, tmp_path, monkeypatch, module, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    npz()
    status, _, err = run(capsys, *arguments)
    assert status == 1 and words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz"]


# ---------------------------------------------------------------- look


def test_look_prints_the_heaviest_keys(capsys, tmp_path):
    key = K[0].copy()
    key[4] = 3 * Q[0].mean(0)
    np.savez(tmp_path / "in.npz", query=Q[0], key=key)
    status, out, err = run(capsys, "look", tmp_path / "in.npz")
    mass = ats.key_mass(Q[0], key)
    assert (status, err) == (0, "")
    assert "Heaviest of 6 keys" in out
    first = next(line for line in out.splitlines() if line.strip()[:1].isdigit()).split()
    assert first[0] == str(mass.argmax()) and float(first[1]) == pytest.approx(mass.max(), rel=1e-2)
    assert first[2] == f"{mass.max() / 4:.1%}"


@pytest.mark.parametrize("length", [7, 200, 1001])
def test_look_says_that_uniform_weights_are_tied(capsys, tmp_path, length):
    query, key = np.ones((2, length, 3)), np.zeros((2, length, 3))
    key[1, 5] = 9.0  # a sink in the second of two
    np.savez(tmp_path / "one.npz", query=query[0], key=key[0])
    _, out, _ = run(capsys, "look", tmp_path / "one.npz", "--plot", tmp_path / "map.png")
    rows = [line.split() for line in out.splitlines() if "%" in line]
    if length > 8:
        assert rows == [["each", "of", f"{length:,}", "tied", "1.00", f"{1 / length:.1%}"]]
    else:
        assert sorted(row[0] for row in rows) == list("0123456") and {row[1] for row in rows} == {"1.00"}
    np.savez(tmp_path / "two.npz", query=query, key=key)
    rows = [line.split() for line in run(capsys, "look", tmp_path / "two.npz")[1].splitlines() if "%" in line]
    assert rows[0][:5] == ["0", "each", "of", f"{length:,}", "tied"] and rows[1][:2] == ["1", "5"]


def test_look_names_every_head(capsys, tmp_path):
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "in.npz", query=rng.normal(size=(1, 5, 20, 4)), key=rng.normal(size=(1, 5, 7, 4)))
    status, out, _ = run(capsys, "look", tmp_path / "in.npz", "--head-axis", "-2")
    assert status == 2 or "5" in out  # 5 queries and 5 keys of 20 and 7 heads do not divide
    status, out, _ = run(capsys, "look", tmp_path / "in.npz")
    assert status == 0 and all(f"0,{head}" in out for head in range(5)) and "first key" in out
    np.savez(tmp_path / "many.npz", query=rng.normal(size=(3, 7, 2, 4)), key=rng.normal(size=(3, 7, 2, 4)))
    assert "and 5 more" in run(capsys, "look", tmp_path / "many.npz")[1]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_look_writes_the_numbers(capsys, npz, tmp_path, suffix):
    out = tmp_path / f"maps{suffix}"
    options = ("--causal", "top_left", "--valid-lens", "2,5", "--bins", "2x3", "--k", "2", "--score", "gaussian")
    assert run(capsys, "look", npz(), *options, "--out", out)[0] == 0
    found = files.read_arrays(out)
    call = {"mask": ats.Causal("top_left"), "valid_lens": [2, 5], "score": "gaussian"}
    np.testing.assert_array_equal(found["key_mass"], ats.key_mass(Q, K, **call))
    np.testing.assert_array_equal(found["pooled_weights"], ats.pooled_weights(Q, K, (2, 3), **call))
    wanted = ats.top_weights(Q, K, 2, **call)
    np.testing.assert_array_equal(found["top_weights"], wanted.weights)
    np.testing.assert_array_equal(found["top_index"], wanted.index)


def test_older_names_of_options_still_work(capsys, npz, tmp_path):
    status, _, err = run(capsys, "look", npz(), "--top", "2", "--out", tmp_path / "maps.npz")
    assert status == 0 and err == "--top is now --k; the old spelling works until 0.2\n"
    assert files.read_arrays(tmp_path / "maps.npz")["top_weights"].shape[-1] == 2
    assert "--top" not in run(capsys, "look", "--help")[1]


def test_older_names_of_options_of_transformers_models(capsys, tmp_path):
    (text := tmp_path / "text.txt").write_text("two words")
    status, _, err = run(capsys, "inspect", "no folder", "--text", text, "--tokens", "3")
    assert status == 2 and err.startswith("--tokens is now --max-tokens; ")
    assert "--tokens" not in run(capsys, "inspect", "--help")[1]


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
@pytest.mark.slow_rows(".pdf-%PDF")
def test_look_draws(capsys, npz, tmp_path, monkeypatch, suffix, start):
    if suffix != ".png":  # what is drawn is the same, and takes a second
        monkeypatch.setattr(plotting, "show_long_attention", lambda **_: Figure(figsize=(1, 1)))
    plot = tmp_path / f"map{suffix}"
    arguments = ("look", npz(), "--place", "1", "--zoom", "1,2", "--plot", plot)
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "") and str(plot) in out
    assert plot.read_bytes().startswith(start)


def test_look_takes_dtypes_masks_and_more_links_than_keys(capsys, npz, tmp_path):
    out = tmp_path / "o.npz"
    source = npz(mask=MASK, bias=RNG.normal(size=(4, 6)).astype(np.float32), sink=np.float32(0.5))
    assert run(capsys, "look", source, "--dtype", "float64", "--k", "50", "--out", out)[0] == 0
    assert np.load(out)["top_weights"].shape == (2, 4, 6) and np.load(out)["key_mass"].dtype == np.float64


def test_look_at_nothing(capsys, tmp_path):
    np.savez(tmp_path / "in.npz", query=np.zeros((3, 2)), key=np.zeros((0, 2)))
    assert "No keys" in run(capsys, "look", tmp_path / "in.npz")[1]
    assert "(3, 0)" in refused(capsys, "look", tmp_path / "in.npz", "--out", tmp_path / "o.npz")
    np.savez(tmp_path / "in.npz", query=Q[0], key=K[0], mask=np.zeros((4, 6), bool))
    assert "No query sees a key" in run(capsys, "look", tmp_path / "in.npz")[1]
    np.savez(tmp_path / "in.npz", query=Q[0] * np.nan, key=K[0])
    assert "NaN" in run(capsys, "look", tmp_path / "in.npz")[1]
    some = Q[0].copy()
    some[1] = np.nan
    np.savez(tmp_path / "in.npz", query=some, key=K[0])
    _, said, err = run(capsys, "look", tmp_path / "in.npz", "--causal", "top_left")
    assert not err, err
    assert "2 keys receive weights that are NaN" in said and "nan%" not in said


def test_look_at_matrices_without_weights(capsys, tmp_path):
    """One is whole, one has a query of NaN, one is NaN and one fully masked."""
    query, key, mask = np.ones((4, 3, 2)), np.ones((4, 5, 2)), np.ones((4, 3, 5), bool)
    query[1, 0], query[2], mask[3] = np.nan, np.nan, False
    mask[1, 0, 1:], key[0, 4] = False, 9.0
    np.savez(tmp_path / "in.npz", query=query, key=key, mask=mask)
    _, out, err = run(capsys, "look", tmp_path / "in.npz")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert not err and rows == [
        ["0", "4", "3.00", "100.0%", "0.0%"],
        ["1", "each", "of", "4", "tied", "0.400", "25.0%", "nan"],
        ["2", "none", "nan", "nan", "nan"],
        ["3", "none", "0", "nan", "nan"],
        ["2", "of", "4", "matrices", "have", "weights", "that", "are", "NaN."],
    ]
    np.savez(tmp_path / "in.npz", query=query[:0], key=key[:0])
    assert "No matrices: batch and heads are (0,)" in run(capsys, "look", tmp_path / "in.npz")[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plot", "map.gif"], ["map.gif", ".png"]),
        (["--plot", "nowhere/map.png"], ["nowhere", "does not exist"]),
        (["--out", "maps.npy"], ["maps.npy: expected a name that ends in .npz, .safetensors; a .npy file holds one"]),
        (["--out", "in.npz"], ["overwritten"]),
        (["--bins", "64"], ["--bins", "'64'"]),
        (["--bins", "axb"], ["--bins", "two whole numbers"]),
        (["--bins", "0x4"], ["--bins", "above 0", "'0x4'"]),
        (["--zoom", "3", "--plot", "map.png"], ["--zoom", "'3'"]),
        (["--zoom", "3,1"], ["--zoom", "--plot"]),
        (["--place", "0", "--out", "o.npz"], ["--place", "--plot"]),
        (["--zoom", "99,0", "--place", "0", "--plot", "map.png"], ["zoom", "(4, 6)"]),
        (["--place", "x", "--plot", "map.png"], ["--place", "'x'"]),
        (["--plot", "map.png"], ["--place", "(2,)", "none", "--place 0"]),
        (["--place", "2", "--plot", "map.png"], ["--place", "(2,)", "got 2"]),
        (["--place", "0,0", "--plot", "map.png"], ["--place", "(2,)", "got 0,0"]),
        (["--k", "0"], ["--k"]),
        (["--causal"], ["top_left", "bottom_right"]),
        (["--score", "additive"], ["w_v"]),
        (["--value", "v.npy"], ["--value"]),
    ],
)
def test_look_refuses(capsys, npz, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    npz()
    err = refused(capsys, "look", "in.npz", *options)
    assert all(word in err for word in words), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz"]


# ---------------------------------------------------------------- the program as a whole


def program(*arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "attnscore", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **settings,
    )


@pytest.mark.slow
def test_the_program_ends_with_its_status(npz, tmp_path):
    """On a terminal that is not UTF-8; without colour, into a pipe, whatever an empty FORCE_COLOR asks for."""
    settings = {**os.environ, "FORCE_COLOR": "", "PYTHONIOENCODING": "ascii"}
    done = program("attend", npz(), "--out", tmp_path / "o.npz", "--stats", env=settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2?4?3" in done.stdout and "\x1b" not in done.stdout
    wrong = program("attend", tmp_path / "none.npz", "--out", tmp_path / "o.npz")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == f"attnscore: {tmp_path / 'none.npz'}: no such file\n"


def test_version_and_info(capsys):
    status, out, _ = run(capsys, "--version")
    assert (status, out) == (0, f"attnscore {ats.__version__}\n")
    status, out, _ = run(capsys, "info")
    assert status == 0
    for part in ats.available().values():
        assert all(name in out for name in part)
    assert np.__version__ in out and "\x1b" not in out and "Kernels, in order of preference" in " ".join(out.split())


def test_info_says_why_not(capsys, monkeypatch):
    monkeypatch.setattr(
        ats,
        "available",
        lambda: {"frameworks": {"jax": Unavailable("not installed")}, "kernels": {"x": True}, "targets": {}},
    )
    _, out, _ = run(capsys, "info")
    assert re.search(r"jax +no +not installed", out) and re.search(r"x +yes *\n", out)


@pytest.mark.parametrize("command", [[], ["demo"], ["attend"], ["look"], ["bench"], ["info"]])
def test_help(capsys, command):
    status, out, err = run(capsys, *command, "--help")
    assert status == 0 and "Usage" in out and not err


def test_no_command_shows_the_help(capsys):
    status, out, err = run(capsys)
    assert status == 2 and "demo" in out + err


def test_unknown_command(capsys):
    assert "'atend'" in refused(capsys, "atend")


@pytest.mark.slow
def test_no_colour_with_no_color():
    asked = program("info", env={**os.environ, "NO_COLOR": "1"})
    assert "\x1b[3" not in asked.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error():
    script = f"{sys.executable} -m attnscore info | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


WITHOUT = """
import os, sys, attnscore
from attnscore.cli import main

print([x for x in ("typer", "rich", "click", "matplotlib") if x in sys.modules], flush=True)
for package in ("typer", "rich"):
    child = os.fork()
    if not child:
        sys.modules[package] = None
        os._exit(main(["info"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_missing_extras_are_one_line():
    """Each is missing in a process of its own, which has imported attnscore and none of them."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["[]", "1", "1"]
    needs = "attnscore: the command line needs the package {}: pip install 'attnscore[cli]'"
    assert done.stderr.splitlines() == [needs.format(package) for package in ("typer", "rich")]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("oops"), "ZeroDivisionError: oops"),
        (KeyboardInterrupt(), "interrupted"),
        (MemoryError("3 GiB"), "not enough memory"),
        (OSError(28, "No space left on device"), "No space left"),
        (ats.KernelUnavailable("kernel: expected one that can run"), "kernel"),
    ],
)
def test_what_is_not_the_inputs_fault_is_status_1(capsys, npz, tmp_path, monkeypatch, error, words):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(ats, "attend", broken)
    arguments = ["attend", npz(), "--out", str(tmp_path / "o.npz")]
    status, _, err = run(capsys, *arguments)
    assert status == 1 and words in err and err.count("\n") == 1
    monkeypatch.setenv("ATTNSCORE_TRACEBACK", "1")
    if isinstance(error, ZeroDivisionError):  # a bug
        with pytest.raises(ZeroDivisionError):
            main(arguments)


def test_summary_numbers_are_json(tmp_path):
    path = tmp_path / "summary.json"
    content = files.plain({"a": np.float32(0.1), 3: (np.inf, float("nan"), np.arange(2))}, 7, names=True)
    files.write_json(path, content, digits=7, indent=2)
    assert json.loads(path.read_text()) == {"a": 0.1, "3": ["inf", "nan", [0, 1]]}


# ---------------------------------------------------------------- bench


def pairs_of(error):
    from attnscore.cli.bench import Pair

    yield Pair("NumPy, tiny", "the same", lambda: ats.attend(Q, K, V), lambda: ats.attend(Q, K, V) + np.float32(error))


@pytest.fixture
def tiny_bench(monkeypatch):
    import attnscore.cli.app  # noqa: F401 - so that the command can be changed

    module = sys.modules["attnscore.cli.bench"]

    def use(error):
        monkeypatch.setattr(module, "_of_torch", lambda: pairs_of(error))
        monkeypatch.setattr(module, "_of_numpy", lambda: iter(()))
        monkeypatch.setattr(module, "_of_tensorflow", lambda: iter(()))

        def missing():
            raise ModuleNotFoundError(name="jax")

        monkeypatch.setattr(module, "_of_jax", missing)

    return use


def test_bench_is_one_table_and_says_what_is_left_out(capsys, tiny_bench):
    tiny_bench(0)
    status, out, err = run(capsys, "bench", "--seconds", "0.01")
    assert status == 0 and "NumPy, tiny" in out and "ours / ms" in out
    assert "ratio: their time over ours" in " ".join(out.split()) and "target" not in out
    assert err == "NumPy, tiny, beside the same\nleft out: jax is not installed\n"


def test_bench_refuses_a_wrong_result_and_a_wrong_time(capsys, tiny_bench):
    tiny_bench(1)
    status, out, err = run(capsys, "bench", "--seconds", "0.01")
    assert status == 1 and not out and "NumPy, tiny: the results differ by" in err
    assert "--seconds: expected a positive number, got 0" in refused(capsys, "bench", "--seconds", "0")


@pytest.mark.slow
def test_bench_as_it_is(capsys):
    status, out, _ = run(capsys, "bench", "--seconds", "0.01")
    assert status == 0
    assert all(word in out for word in ("decoding", "additive", "NumPy", "JAX", "TensorFlow"))
