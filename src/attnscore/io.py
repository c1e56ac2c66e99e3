"""Reading and writing files: arrays by name (.npz, .npy, .safetensors), text and JSON.

- Nothing that could run code is read: pickled object arrays are refused.
- A file that is missing, damaged, of another kind, or holds no numbers is a `FileError` of one line, whatever the
  reader underneath raises: all reading goes through `file_errors`.
- A header that claims more than its file holds is refused before memory is allocated.
- A name that a file has twice is refused: one of the two arrays would silently be left out.
- A file is written under a temporary name and renamed, so that no reader sees half of one, and a failed run leaves an
  older file as it was. A link stays a link; nothing but a file is replaced.
- bfloat16 goes through .safetensors (with ml_dtypes); the NumPy formats have no such dtype, so there it is refused
  instead of being read back as raw bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import secrets
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from attnscore.errors import AttnscoreError, FileError, FrameworkError, message

Array = NDArray[Any]

SUFFIXES = (".npz", ".npy", ".safetensors")
_NUMBERS = "fiub"  # float, signed, unsigned, boolean; complex numbers, text and objects are refused


def read_arrays(path: Path) -> dict[str, Array]:
    """Read every array of a file; the single one of a .npy file is named after the file.

    A missing package that this kind of file needs is a `FrameworkError`; all else that can be wrong is a `FileError`.
    """
    suffix = _known_suffix(path)
    with file_errors(path, f"{suffix} file"):
        if not path.is_file():
            raise FileError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        if suffix == ".npy":
            arrays = {path.stem: _from_npy(path, path.stem, path.read_bytes())}
        else:
            arrays = _read_npz(path) if suffix == ".npz" else _read_safetensors(path)
        return {name: _checked(path, name, array) for name, array in arrays.items()}


def read_text(path: Path) -> str:
    """Read a text file; one that is missing or not UTF-8 is a `FileError`."""
    with file_errors(path, "text file"):
        return path.read_text("utf-8-sig")


def read_json(path: Path) -> Any:
    """Read a JSON document; one that is missing or not JSON is a `FileError`."""
    with file_errors(path, "JSON file"):
        return json.loads(path.read_text("utf-8"))


@contextlib.contextmanager
def file_errors(path: Path, kind: str) -> Iterator[None]:
    """Turn every error of reading `path` into a `FileError`; errors of this library pass."""
    try:
        with warnings.catch_warnings():
            # A damaged header can look like one of Python 2, or like an escape sequence, and warn before it fails.
            warnings.simplefilter("ignore")
            yield
    except AttnscoreError:
        raise
    except Exception as error:
        raise FileError(f"{path}: {_reason(error, kind)}") from error


def _reason(error: Exception, kind: str) -> str:
    """Return why a file of this kind could not be read."""
    match error:
        case PermissionError():
            return "may not be read"
        case FileNotFoundError():
            return "no such file"
        case OSError():
            return f"cannot be read: {error.strerror or _one_line(error)}"
        case UnicodeDecodeError():
            return f"not UTF-8 text (byte {error.start})"
        case json.JSONDecodeError():
            return f"not JSON: {error}"
        case MemoryError():
            return "needs more memory than there is here"
        case NotImplementedError():
            return f"a {kind} of a sort that is not supported: {_one_line(error)}"
        case _:  # readers raise RuntimeError, TokenError, struct.error, KeyError and more
            return f"damaged or truncated {kind}: {_one_line(error)}"


def check_destination(path: Path, *, several: bool = False) -> None:
    """Raise a `FileError` for a path that one array, or `several`, cannot be written to, before a long computation."""
    _known_suffix(path, several=several)
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise a `FileError` for a path that cannot be written, before a long computation."""
    _check_replaceable(path)
    folder = _target(path).parent
    if not folder.is_dir():
        raise FileError(f"{path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise FileError(f"{path}: the folder {folder} cannot be written to")


def _check_replaceable(path: Path) -> None:
    """Raise a `FileError` for a path that a file must not replace: a folder, a pipe, a device."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise FileError(f"{path}: is {kind}; expected the name of a file")


def _target(path: Path) -> Path:
    """Return the file itself where `path` is a link to it, and otherwise the path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_holds(path: Path, arrays: Mapping[str, Array]) -> None:
    """Raise a `FileError` for arrays whose dtype this kind of file cannot hold, before a long computation."""
    suffix = path.suffix.lower()
    for name, array in arrays.items():
        if suffix == ".safetensors":
            fits, hint = array.dtype.name in _SAFETENSORS_TYPES.values(), ""
        else:
            fits, hint = array.dtype.kind in _NUMBERS, "; use .safetensors"
        if not fits:
            raise FileError(f"{path}: {suffix} cannot hold {name} of dtype {array.dtype}{hint}")


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; a .npy file takes exactly one.

    A package that is needed and missing is a `FrameworkError`; a path that cannot be written, or an array that
    this kind of file cannot hold, a `FileError`.
    """
    check_destination(path, several=len(arrays) != 1)
    check_holds(path, arrays)
    suffix = path.suffix.lower()
    with replacing(path) as file:
        if suffix == ".safetensors":
            file.write(_safetensors_bytes(arrays))
        elif suffix == ".npz":
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]  # the stubs take one name for its own flag
        else:
            np.save(file, next(iter(arrays.values())), allow_pickle=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` only when the block ends without an error.

    An exception or an interruption at any point leaves the old file, and no temporary one. A process that is killed
    leaves the old file and a hidden file ``.NAME.RANDOM.part``, which no reader and no pattern for results takes.
    A link goes on pointing to its file; a folder, a pipe or a device is a `FileError`.
    """
    _check_replaceable(path)
    target = _target(path)
    # A new file gets the mode of any other. One that replaces a private file is private from the start.
    is_there = target.exists()
    mode = target.stat().st_mode & 0o777 if is_there else 0o666
    # Named before it is made, so that it is removed whenever it exists.
    # The start of the name only: names have a largest length.
    temporary = target.parent / f".{target.name[:40]}.{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if is_there:
            temporary.chmod(mode)
        temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A full disk names no file.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_json(path: Path, content: Any, *, digits: int, indent: int) -> None:
    """Write a document of arrays, numbers and text as JSON, floats to `digits` digits.

    A number that JSON does not know is a ValueError before the file is opened.
    """
    text = json.dumps(plain(content, digits), indent=indent, ensure_ascii=False, allow_nan=False)
    with replacing(path) as file:
        file.write((text + "\n").encode())


def plain(value: Any, digits: int, *, names: bool = False) -> Any:
    """Turn arrays and tuples into JSON's own types; with `names` infinities and NaN become their names."""
    if isinstance(value, Mapping):
        return {str(key): plain(each, digits, names=names) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, digits, names=names) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist(), digits, names=names)
    if isinstance(value, float):
        return str(value) if names and not math.isfinite(value) else float(f"{value:.{digits}g}")
    return value


def _known_suffix(path: Path, *, several: bool = False) -> str:
    """Return the suffix in lower case; raise FileError for one that cannot hold an array, or `several`."""
    suffix, suffixes = path.suffix.lower(), [each for each in SUFFIXES if not (several and each == ".npy")]
    if suffix not in suffixes:
        why = "; a .npy file holds one array" if suffix == ".npy" else ""
        raise FileError(f"{path}: expected a name that ends in {', '.join(suffixes)}{why}")
    return suffix


def _read_npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # zipfile finds an archive behind any other content; NumPy takes only files that begin as one.
        start = file.read(len(_NPY_START))
        if not start:
            raise EOFError("no data in it")
        if start == _NPY_START:
            raise FileError(f"{path}: its contents are not those of a .npz file")
        if not start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            raise FileError(f"{path}: not a .npz file, or one with pickled objects, which are never read")
        with zipfile.ZipFile(file) as archive:
            members = _members(path, archive, size)
            return {name: _from_npy(path, _printable(name), archive.read(each)) for name, each in members.items()}


def _members(path: Path, archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive of this size by array name, none of which claims more than the file holds."""
    members = _once(path, [(member.filename.removesuffix(".npy"), member) for member in archive.infolist()])
    for name, member in members.items():
        if member.flag_bits & _ENCRYPTED:
            raise NotImplementedError(f"{_printable(name)} is encrypted")
        if member.compress_type not in _LARGEST_GROWTH:
            raise NotImplementedError(f"compression method {member.compress_type} of {_printable(name)}")
        limit = member.compress_size * _LARGEST_GROWTH[member.compress_type]
        if member.compress_size > size or member.file_size > limit:
            claim = max(member.file_size, member.compress_size)
            raise ValueError(f"{_printable(name)} claims {claim} bytes, and the file holds {size}")
    return members


def _from_npy(path: Path, name: str, content: bytes) -> Array:
    """Return the array of a .npy file; raise unless its header has numbers and describes exactly the bytes after it."""
    if not content.startswith(_NPY_START):
        if path.suffix.lower() == ".npz":
            raise FileError(f"{path}: {name} is not an array")
        if content.startswith(b"PK"):
            raise FileError(f"{path}: its contents are not those of a .npy file")
        if content:
            raise FileError(f"{path}: not a .npy file, or one with pickled objects, which are never read")
        raise EOFError("no data in it")
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):  # 3.0 differs from 2.0 in the names of fields, which numbers lack
        raise NotImplementedError(f".npy format {version[0]}.{version[1]}")
    is_first = version == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream)
    _check_numbers(path, name, dtype)
    if min(shape, default=0) < 0:
        raise ValueError(f"the header of {name} has the shape {shape}")
    # Python's ints: NumPy's overflow.
    claimed = math.prod(map(int, shape)) * dtype.itemsize
    if claimed != (left := len(content) - stream.tell()):
        raise ValueError(f"the header of {name} claims {claimed} bytes of numbers, and there are {left}")
    return np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape, order="F" if is_fortran else "C")


def _read_safetensors(path: Path) -> dict[str, Array]:
    content = path.read_bytes()
    tensors = require("safetensors", ".safetensors", _INSTALL).deserialize(content)
    (length,) = struct.unpack("<Q", content[:8])
    # The package takes the last of two tensors of one name.
    json.loads(content[8 : 8 + length], object_pairs_hook=lambda pairs: _once(path, pairs))
    arrays = {}
    for name, tensor in tensors:
        if (kind := _SAFETENSORS_TYPES.get(tensor["dtype"])) is None:
            raise FileError(f"{path}: {name} has dtype {tensor['dtype']}, which is not supported")
        dtype = bfloat16() if kind == "bfloat16" else np.dtype(kind).newbyteorder("<")
        arrays[name] = np.frombuffer(tensor["data"], dtype=dtype).reshape(tensor["shape"])
    return arrays


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs of a name and a value as a dict; raise FileError for a name that comes twice."""
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        name = next(name for name in by_name if [each for each, _ in pairs].count(name) > 1)
        raise FileError(f"{path}: holds {_printable(name)} twice")
    return by_name


_NPY_START = b"\x93NUMPY"
# Bytes that one byte of a member can become, at most (zlib's documentation: 1032:1).
_LARGEST_GROWTH = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
_ENCRYPTED = 1
_INSTALL = "pip install 'attnscore[cli]'"
# Names of dtypes there, as "F32" and "U8", and NumPy's.
_SAFETENSORS_TYPES = {"BF16": "bfloat16", "BOOL": "bool"} | {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}"
    for kind, sizes in {"float": (16, 32, 64), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}.items()
    for bits in sizes
}


def _safetensors_bytes(arrays: Mapping[str, Array]) -> bytes:
    save = require("safetensors.numpy", ".safetensors", _INSTALL).save
    # The package writes the memory in its order and would scramble transposed arrays: make them contiguous
    # (ascontiguousarray turns a single number into one axis, so its shape is put back).
    return bytes(save({name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}))


def bfloat16() -> np.dtype[Any]:
    """Return NumPy's bfloat16, of the package ml_dtypes; a `FrameworkError` where that is not installed."""
    package = require("ml_dtypes", "bfloat16", "pip install ml_dtypes, or convert the file to float32")
    dtype: np.dtype[Any] = np.dtype(package.bfloat16)
    return dtype


def require(module: str, what: str, hint: str) -> Any:
    """Import a module that `what` needs; a `FrameworkError` with the hint where its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise FrameworkError(message(what, f"the package {package}", "none here", hint=hint)) from error


def _checked(path: Path, name: str, array: Array) -> Array:
    _check_numbers(path, _printable(name), array.dtype)
    if array.dtype.name == "bfloat16":
        return array
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # files of machines with another byte order


def _check_numbers(path: Path, name: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind in _NUMBERS or dtype.name == "bfloat16":
        return
    if dtype.hasobject:
        raise FileError(f"{path}: {name} holds pickled objects, which are never read")
    hint = " (bfloat16 has no place in NumPy's formats; use .safetensors)" if dtype == "V2" else ""
    raise FileError(f"{path}: {name} has dtype {dtype}; expected real numbers{hint}")


def _printable(text: str) -> str:
    """Return a name, quoted where it holds control characters."""
    return text if text.isprintable() else ascii(text)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text if text.isprintable() else ascii(text)) or type(error).__name__
