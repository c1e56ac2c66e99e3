"""Files that are damaged, and writing that is interrupted.

- A damaged file is read, or is a `FileError` (exit status 2 of the command line); nothing else comes out, whatever the
  reader underneath raises, and nothing is allocated for a header that claims more than its file holds.
- A file is written whole or not at all, at whatever line an interruption comes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from attnscore import io as files
from attnscore.cli import main
from attnscore.errors import FileError
from attnscore.io import read_arrays

ARRAYS = {"query": np.ones((2, 3), np.float32), "key": np.arange(6.0, dtype=np.float32).reshape(2, 3)}
SOURCE = Path(files.__file__).parent

# ---------------------------------------------------------------- damaged files

# Where a field lies in a zip's directory entry ("PK\1\2"), and in the header of a member ("PK\3\4").
DIRECTORY = {"version": 6, "flags": 8, "method": 10, "crc": 16, "size in the file": 20, "size": 24}
MEMBER = {"version": 4, "flags": 6, "method": 8}


def npz(save: Callable[..., None] = np.savez) -> bytes:
    made = io.BytesIO()
    save(made, **ARRAYS)
    return made.getvalue()


def npy(array: np.ndarray = ARRAYS["query"]) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def archive(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file, pytest.warns() if repeated(members) else contextlib.nullcontext():
        for name, content in members:
            file.writestr(name, content)
    return made.getvalue()


def repeated(members: tuple[tuple[str, bytes], ...]) -> bool:
    return len({name for name, _ in members}) < len(members)


def with_field(field: str, kind: str, value: int, content: bytes | None = None) -> bytes:
    """An archive in which a field is changed, in its directory and in the headers of its members."""
    changed = bytearray(npz() if content is None else content)
    for mark, places in ((b"PK\1\2", DIRECTORY), (b"PK\3\4", MEMBER)):
        for found in re.finditer(re.escape(mark), bytes(changed)):
            if field in places:
                struct.pack_into(kind, changed, found.start() + places[field], value)
    return bytes(changed)


def header(text: str, data: bytes = bytes(8), version: bytes = b"\1\0") -> bytes:
    """A .npy file with this header."""
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(text))
    return b"\x93NUMPY" + version + length + text.encode() + data


def of_shape(shape: str, descr: str = "<f4", data: bytes = bytes(8)) -> bytes:
    return header(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n", data)


def tensors(*entries: str, data: bytes = bytes(8)) -> bytes:
    """A .safetensors file with these entries of its header."""
    text = "{" + ", ".join(entries) + "}"
    return struct.pack("<Q", len(text)) + text.encode() + data


F32 = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
PIB7 = (7, 1024, 1024, 1024, 1024, 256)  # 7 PiB of float32
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "encrypted": (".npz", with_field("flags", "<H", 1), "of a sort that is not supported: query is encrypted"),
    "patched": (".npz", with_field("flags", "<H", 0x20), "not supported: compressed patched data"),
    "strong encryption": (".npz", with_field("flags", "<H", 0x40), "not supported: strong encryption"),
    "unknown compression": (".npz", with_field("method", "<H", 77), "not supported: compression method 77 of query"),
    "bzip2": (".npz", archive(("query.npy", npy()), method=zipfile.ZIP_BZIP2), "compression method 12 of query"),
    "zip version 9.9": (".npz", with_field("version", "<H", 99), "not supported: zip file version 9.9"),
    "another checksum": (".npz", with_field("crc", "<I", 1), "damaged or truncated .npz file: Bad CRC-32"),
    "a size of 4 GB": (
        ".npz",
        with_field("size", "<I", 2**32 - 2),
        "query claims 4294967294 bytes, and the file holds",
    ),
    "4 GB in the file": (".npz", with_field("size in the file", "<I", 2**32 - 2), "claims 4294967294 bytes"),
    "4 GB deflated": (
        ".npz",
        with_field("size", "<I", 2**32 - 2, npz(np.savez_compressed)),
        "query claims 4294967294 bytes, and the file holds",
    ),
    "a member twice": (".npz", archive(*[("mask.npy", npy())] * 2), "holds mask twice"),
    "query and query.npy": (".npz", archive(("query", npy()), ("query.npy", npy())), "holds query twice"),
    "a name that rings": (".npz", archive(("\a.npy", b"text")), r"'\x07' is not an array"),
    "a folder in it": (".npz", archive(("query/", b"")), "query/ is not an array"),
    "an empty member": (".npz", archive(("query.npy", b"")), "query is not an array"),
    "7 PiB in a member": (
        ".npz",
        archive(("query.npy", of_shape(str(PIB7)))),
        "the header of query claims 7881299347898368",
    ),
    "more than a member holds": (".npz", archive(("query.npy", of_shape("(3,)"))), "claims 12 bytes of numbers"),
    "less than a member holds": (".npz", archive(("query.npy", of_shape("(1,)"))), "claims 4 bytes of numbers"),
    "header not closed in a member": (".npz", archive(("query.npy", header("{'descr': '<f4', ("))), "damaged or trunc"),
    "objects in a member": (".npz", archive(("query.npy", of_shape("(1,)", "|O"))), "query holds pickled objects"),
    "empty npy": (".npy", b"", "damaged or truncated .npy file: no data in it"),
    "npz called npy": (".npy", npz(), "its contents are not those of a .npy file"),
    "text called npy": (".npy", b"1, 2, 3", "not a .npy file, or one with pickled objects"),
    "header not closed": (".npy", header("{'descr': '<f4', ("), "damaged or truncated .npy file"),
    "header of brackets": (".npy", header("(" * 5000), "damaged or truncated .npy file"),
    "header that is no dictionary": (".npy", header("[1, 2]\n"), "damaged or truncated .npy file"),
    "header of 4 GB": (".npy", b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1), "damaged or truncated .npy file"),
    "header cut off": (".npy", npy()[:9], "damaged or truncated .npy file"),
    "format 9.9": (".npy", header("{}", version=b"\x09\x09"), "not supported: .npy format 9.9"),
    "7 PiB over 8 bytes": (".npy", of_shape(str(PIB7)), "claims 7881299347898368 bytes of numbers, and there are 8"),
    "more than int64 counts": (".npy", of_shape("(2**62, 2**62)".replace("2**62", str(2**62))), "bytes of numbers"),
    "a negative length": (".npy", of_shape("(-2, -1)"), "has the shape (-2, -1)"),
    "numbers missing": (".npy", npy()[:-1], "claims 24 bytes of numbers, and there are 23"),
    "numbers too many": (".npy", npy() + b"\0", "claims 24 bytes of numbers, and there are 25"),
    "objects": (".npy", of_shape("(1,)", "|O"), "holds pickled objects, which are never read"),
    "text in it": (".npy", of_shape("(1,)", "<U2"), "has dtype <U2; expected real numbers"),
    "a tensor twice": (".safetensors", tensors(f'"query": {F32}', f'"query": {F32}'), "holds query twice"),
    "no data": (".safetensors", tensors(f'"query": {F32}', data=b""), "damaged or truncated .safetensors file"),
    "7 PiB of tensor": (
        ".safetensors",
        tensors(f'"query": {{"dtype": "F32", "shape": {[*PIB7]}, "data_offsets": [0, 8]}}'),
        "damaged or truncated .safetensors file",
    ),
}


@pytest.fixture
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    suffix, content, words = DAMAGED[request.param]
    path = tmp_path / f"in{suffix}"
    path.write_bytes(content)
    return path, words


@pytest.mark.parametrize("damaged", DAMAGED, indirect=True)
@pytest.mark.parametrize("command", ["attend", "look"])
def test_damaged_files_are_wrong_input(
    damaged: tuple[Path, str], command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, words = damaged
    given = ["--query", str(path)] if path.suffix == ".npy" else [str(path)]
    status = main([command, *given, "--out", str(tmp_path / "out.npz")])
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1), said
    assert f"{path}: " in said and words in said and "unexpected" not in said
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damaged", [name for name in DAMAGED if "claims" in DAMAGED[name][2]], indirect=True)
def test_what_a_file_does_not_hold_is_never_asked_for(
    damaged: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("numbers were read")

    monkeypatch.setattr(np, "frombuffer", reached)
    with pytest.raises(FileError, match=re.escape(damaged[1])):
        read_arrays(damaged[0])


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("x"), RecursionError("x"), KeyError("x"), OSError(5, "x")]
)
@pytest.mark.parametrize("read", [files.read_arrays, files.read_text, files.read_json])
def test_whatever_a_reader_raises(
    read: Callable[[Path], Any], error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    path = tmp_path / "x.npy"
    path.write_bytes(npy())
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(FileError, match=re.escape(str(path))):
        read(path)


WHOLE = {
    "npz": (".npz", npz()),
    "compressed npz": (".npz", npz(np.savez_compressed)),
    "npy": (".npy", npy()),
    "safetensors": (".safetensors", save(ARRAYS)),
}


def variants(content: bytes) -> Iterator[bytes]:
    """Every byte changed in three ways, or left out, and the content cut at every place."""
    for place in range(len(content)):
        yield content[:place]
        yield content[:place] + content[place + 1 :]
        for bits in (0x01, 0x80, 0xFF):
            yield content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


@pytest.mark.parametrize("kind", WHOLE)
def test_a_damaged_file_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    suffix, content = WHOLE[kind]
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    assert all(array.dtype == np.float32 for array in read_arrays(path).values())
    refused = 0
    # Opened once: a file that is emptied and filled again is written to the disk each time that it is closed.
    with path.open("r+b", buffering=0) as file:
        for variant in variants(content):
            file.seek(0)
            file.write(variant)
            file.truncate()
            try:
                read_arrays(path)
            except FileError as error:
                refused += 1
                assert str(error).startswith(f"{path}: ") and str(error).isprintable()
    assert refused > len(content)  # at the least, every cut


def test_headers_of_python_2_are_read_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(of_shape("(2L,)"))
    assert read_arrays(path)["x"].tolist() == [0.0, 0.0]


# ---------------------------------------------------------------- interrupted writing


def write_page(path: Path) -> None:
    from attnscore.diagnostics.page import Section
    from attnscore.diagnostics.page import write_page as write

    write(path, "A title", "Facts.", [Section("A part", ["A sentence."])])


def write_report(path: Path) -> None:
    from attnscore.diagnostics.inspection import report

    before, report._data = report._data, lambda *_: {}  # what an inspection becomes
    try:
        report.write(SimpleNamespace(model="m", facts="", tokens=()), path, 1.0)  # type: ignore[arg-type]  # enough
    finally:
        report._data = before


def write_results(path: Path) -> None:
    from bench import results

    results.write({"rows": [1.5] * 1000}, path)


def write_run(path: Path) -> None:
    from attnscore.diagnostics.lab import runs

    settings = runs.Settings("dot", 4, 0, 1)
    made = runs.TrainingRun(settings, "text", (runs.Look(0, 1.0, 1.0, 1.0, 0.0, 1.0),), 1.0, 1.0)
    runs.write(made, path.parent)
    (path.parent / f"{settings.name}.json").replace(path)  # its name is its settings


def demo(path: Path) -> Any:
    from rich.console import Console

    from attnscore.cli.report import Report

    return Report(path.parent, Console(file=io.StringIO()), 0, document=path.name)


def write_picture(path: Path) -> None:
    from matplotlib.figure import Figure

    demo(path).picture(path.stem, Figure(figsize=(1, 1)))


def command(*arguments: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        source = path.parent.parent / "in.npz"
        x = np.ones((2, 3), np.float32)
        if not source.exists():
            np.savez(source, query=x, key=x, value=x)
        name, option = arguments
        status = main([name, str(source), option, str(path)])
        if status == 1:
            raise KeyboardInterrupt
        assert status == 0

    return write


def plot(path: Path) -> None:
    from matplotlib.figure import Figure

    from attnscore import plotting

    before = plotting.show_long_attention
    plotting.show_long_attention = lambda **_: Figure(figsize=(1, 1))  # the maps themselves take a second to draw
    try:
        command("look", "--plot")(path)
    finally:
        plotting.show_long_attention = before


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "attend .npz": ("out.npz", command("attend", "--out")),
    "attend .npy": ("out.npy", command("attend", "--out")),
    "attend .safetensors": ("out.safetensors", command("attend", "--out")),
    "look --out": ("maps.npz", command("look", "--out")),
    "look --plot .png": ("map.png", plot),
    "look --plot .svg": ("map.svg", plot),
    "a page of findings": ("page.html", write_page),
    "a report of an inspection": ("report.html", write_report),
    "results of the benchmark": ("results.json", write_results),
    "a training run": ("run.json", write_run),
    "a picture of the demo": ("01.png", write_picture),
    "the numbers of the demo": ("summary.json", lambda path: demo(path).finish()),
}
OLD = b"what was there"


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], None]]:
    name, write = WRITERS[request.param]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(OLD)
    return folder / name, write


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


class HalfWritten(io.BufferedWriter):
    """Writes half of what is first written, and is interrupted."""

    def write(self, content: Any) -> int:
        half = memoryview(content).cast("B")
        super().write(half[: len(half) // 2])
        self.flush()
        raise KeyboardInterrupt


def half_written(name: Any, mode: str, **options: Any) -> HalfWritten:
    return HalfWritten(io.FileIO(name, mode.replace("b", ""), **options))


@pytest.mark.parametrize("place", WRITERS, indirect=True)
@pytest.mark.parametrize("moment", ["half written", "before the disk has it", "before it takes its place"])
# NumPy 1.23 leaves an archive open that it could not write.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*ZipFile")
def test_an_interruption_leaves_the_old_file(
    place: tuple[Path, Callable[[Path], None]], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = place
    with monkeypatch.context() as patch:
        if moment == "half written":
            patch.setattr(files, "open", half_written, raising=False)
        elif moment == "before the disk has it":
            patch.setattr(os, "fsync", interrupt)
        else:
            patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(path)
    assert path.read_bytes() == OLD
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    write(path)
    assert path.read_bytes() != OLD and [each.name for each in path.parent.iterdir()] == [path.name]


def interrupted_at(line: int, write: Callable[[], None]) -> bool:
    """Whether `write` was interrupted at the `line`-th line of io.py that it runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != files.__file__:
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        write()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


# Between two steps of a with statement a file is left to the garbage collector, which closes it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", [".npz", ".npy", ".safetensors"])
def test_an_interruption_at_any_line(suffix: str, tmp_path: Path) -> None:
    path, arrays = tmp_path / f"x{suffix}", {"a": np.ones(3)}
    files.write_arrays(path, arrays)
    new = path.read_bytes()
    line = done = 0
    while True:
        path.write_bytes(OLD)
        line += 1
        again = interrupted_at(line, lambda: files.write_arrays(path, arrays))
        assert [each.name for each in tmp_path.iterdir()] == [path.name], line
        found = path.read_bytes()
        assert found in (OLD, new), line
        if not again:
            break
        done += found == new
    assert line > 15 and found == new
    assert done <= 3  # lines that follow the renaming


KILLED = """
import io, os, signal, sys
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../benchmarks"]
from test_files import WRITERS, HalfWritten, files

class Killed(HalfWritten):
    def write(self, content):
        try:
            super().write(content)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)

files.open = lambda name, mode, **options: Killed(io.FileIO(name, mode.replace("b", ""), **options))
for name, path in zip(sys.argv[2::2], sys.argv[3::2]):
    child = os.fork()
    if not child:
        WRITERS[name][1](Path(path))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    paths = {}
    for name in ("attend .npz", "a page of findings", "results of the benchmark"):
        paths[name] = tmp_path / name / "folder" / WRITERS[name][0]
        paths[name].parent.mkdir(parents=True)
        paths[name].write_bytes(OLD)
    # Each is killed in a process of its own; what they import is imported once.
    places = [str(word) for pair in paths.items() for word in pair]
    arguments = [sys.executable, "-c", KILLED, str(Path(__file__).parent), *places]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * 3, done.stderr
    for path in paths.values():
        assert path.read_bytes() == OLD
        (left,) = (each for each in path.parent.iterdir() if each != path)
        # What is left behind is hidden, ends in what no reader takes, and is found by no pattern for results.
        assert left.name.startswith(f".{path.name}.") and left.suffix == ".part"
        assert left not in path.parent.rglob(f"*{path.suffix}")
        with pytest.raises(FileError, match="expected a name that ends in"):
            read_arrays(left)


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 251}.npy"
    files.write_arrays(path, {"a": np.ones(3)})
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_errors_name_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "no such folder" / "x.html"
    with pytest.raises(OSError, match="No such file") as found, files.replacing(path):
        pass
    assert found.value.filename == str(path)


@pytest.mark.parametrize("name", ["there.npz", "not yet.npz"])
def test_a_link_goes_on_pointing_to_its_file(name: str, tmp_path: Path) -> None:
    real, link = tmp_path / "elsewhere" / name, tmp_path / "link.npz"
    real.parent.mkdir()
    if name == "there.npz":
        real.write_bytes(OLD)
        real.chmod(0o640)
    link.symlink_to(Path("elsewhere") / name)
    files.write_arrays(link, {"a": np.ones(3)})
    assert link.is_symlink() and not real.is_symlink() and list(read_arrays(link)) == ["a"]
    assert name != "there.npz" or real.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in real.parent.iterdir()] == [name] and len([*tmp_path.iterdir()]) == 2


def test_a_link_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    link = tmp_path / "link.npz"
    link.symlink_to(tmp_path / "gone" / "x.npz")
    with pytest.raises(FileError, match=r"link\.npz: the folder .*gone does not exist"):
        files.write_arrays(link, {"a": np.ones(3)})


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a pipe or a device"),
        (lambda path: path.symlink_to("/dev/null"), "a pipe or a device"),
        (Path.mkdir, "a folder"),
    ],
)
def test_only_a_file_is_replaced(make: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    make(path)
    before = path.stat().st_mode
    for write in (files.check_destination, lambda path: files.write_arrays(path, {"a": np.ones(3)}), write_page):
        with pytest.raises(FileError, match=rf"x\.npz: is {kind}; expected the name of a file"):
            write(path)
    assert path.stat().st_mode == before and [each.name for each in tmp_path.iterdir()] == ["x.npz"]


# Files of the system (a pipe, a switch of the kernel) and memory, not results; a log, which grows by rows.
NOT_RESULTS = {
    'path.open("a" if self._has_header',
    'os.fdopen(out, "w"',
    'Path("/proc/self/clear_refs").write_text(',
    "figure.savefig(buffer",
}


def test_every_writer_uses_the_one_helper() -> None:
    writes = re.compile(
        r"^.*(?:\.write_text\(|\.write_bytes\(|open\([^)]*[\"'][wax]b?\+?[\"']|savefig\(|np\.save).*$", re.M
    )
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path != Path(files.__file__)
        for line in writes.findall(path.read_text("utf-8"))
        if not any(known in line for known in NOT_RESULTS) and "figure.savefig(file," not in line and "``" not in line
    ]
    assert not found


def test_no_line_of_json_is_half_written(tmp_path: Path) -> None:
    """Numbers with no place in JSON fail before the file is opened."""
    from bench import results

    path = tmp_path / "results.json"
    path.write_text(json.dumps(1))
    with pytest.raises(ValueError, match="JSON"):
        results.write({"x": float("nan")}, path)
    assert path.read_text() == "1"
