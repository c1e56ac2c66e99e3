"""Reading and writing arrays by name: .npz, .npy and .safetensors.

What this module meets:
- nothing that could run code is read: pickled object arrays are refused;
- a file that is missing, truncated, of another kind, or holds no numbers is a `FileError` of one line;
- a file is written next to its final place and renamed, so that nobody ever sees half of one, and a failed
  run leaves an older file as it was;
- bfloat16 goes through .safetensors (with ml_dtypes); the NumPy formats cannot say what it is, so there it is
  refused instead of being read back as raw bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from attnscore.errors import AttnscoreError, FrameworkError, message

Array = NDArray[Any]

SUFFIXES = (".npz", ".npy", ".safetensors")
_NUMBERS = "fiub"  # float, signed, unsigned, boolean; complex numbers, text and objects are refused


class FileError(AttnscoreError, ValueError):
    """A file that cannot be read, or a place that cannot be written."""


def read_arrays(path: Path) -> dict[str, Array]:
    """Read every array of a file; the single one of a .npy file is named after the file.

    Raises
    ------
    FileError
        No such file, another kind of file, damaged contents, pickled objects, or something else than numbers.
    FrameworkError
        A package that this kind of file needs is not installed.
    """
    suffix = _known_suffix(path)
    if not path.is_file():
        raise FileError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    try:
        arrays = _read_safetensors(path) if suffix == ".safetensors" else _read_numpy(path, suffix)
    except PermissionError as error:
        raise FileError(f"{path}: may not be read") from error
    return {name: _checked(path, name, array) for name, array in arrays.items()}


def read_text(path: Path) -> str:
    """Read a text file.

    Raises
    ------
    FileError
        A file that is missing, or not UTF-8 text.
    """
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def check_destination(path: Path) -> None:
    """Raise a `FileError` now for a place that could not be written after a long computation."""
    _known_suffix(path)
    if path.is_dir():
        raise FileError(f"{path}: is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise FileError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"{path}: the folder {path.parent} cannot be written to")


def check_holds(path: Path, arrays: Mapping[str, Array]) -> None:
    """Raise a `FileError` now for arrays whose dtype this kind of file cannot hold."""
    suffix = path.suffix.lower()
    for name, array in arrays.items():
        if suffix != ".safetensors" and array.dtype.kind not in _NUMBERS:
            raise FileError(f"{path}: {suffix} cannot hold {name} of dtype {array.dtype}; use .safetensors")


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; a .npy file takes exactly one.

    Raises
    ------
    FileError
        A place that cannot be written, or arrays that this kind of file cannot hold.
    FrameworkError
        A package that this kind of file needs is not installed.
    """
    check_destination(path)
    suffix = path.suffix.lower()
    if suffix == ".npy" and len(arrays) != 1:
        raise FileError(f"{path}: a .npy file holds one array, got {', '.join(arrays)}; use .npz or .safetensors")
    if suffix == ".safetensors":
        content = _safetensors_bytes(path, arrays)
        with replacing(path) as file:
            file.write(content)
        return
    check_holds(path, arrays)
    with replacing(path) as file:
        if suffix == ".npz":
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]  # the stubs take one name for its own flag
        else:
            np.save(file, next(iter(arrays.values())), allow_pickle=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its place only when the block ends well."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:  # it names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_usual_mode(path))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _usual_mode(path: Path) -> int:
    # mkstemp's files are private; a result should be as readable as any file that the user creates.
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _known_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise FileError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    return suffix


def _read_numpy(path: Path, suffix: str) -> dict[str, Array]:
    try:
        # np.load decides by content, so a renamed file would come back as something else than promised.
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray) != (suffix == ".npy"):
                raise FileError(f"{path}: its contents are not those of a {suffix} file")
            if isinstance(loaded, np.ndarray):
                return {path.stem: loaded}
            return {name: loaded[name] for name in loaded.files}
    except FileError:
        raise
    except ValueError as error:
        if "pickle" in str(error) or "Object" in str(error):
            reason = f"not a {suffix} file, or one with pickled objects, which are never read"
        else:
            reason = f"damaged {suffix} file: {_one_line(error)}"
        raise FileError(f"{path}: {reason}") from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, struct.error) as error:
        if isinstance(error, PermissionError):
            raise
        raise FileError(f"{path}: damaged or truncated {suffix} file: {_one_line(error)}") from error


def _read_safetensors(path: Path) -> dict[str, Array]:
    safetensors = _safetensors()
    try:
        names = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: damaged .safetensors file: {_one_line(error)}") from error
    return {name: _from_bytes(path, name, tensor) for name, tensor in names}


_SAFETENSORS_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def _from_bytes(path: Path, name: str, tensor: Mapping[str, Any]) -> Array:
    kind = _SAFETENSORS_TYPES.get(tensor["dtype"])
    if kind is None:
        raise FileError(f"{path}: {name} has dtype {tensor['dtype']}, which is not supported")
    dtype = bfloat16() if kind == "bfloat16" else np.dtype(kind).newbyteorder("<")
    array: Array = np.frombuffer(tensor["data"], dtype=dtype).reshape(tensor["shape"])
    return array


def _safetensors_bytes(path: Path, arrays: Mapping[str, Array]) -> bytes:
    _safetensors()
    from safetensors.numpy import save

    # The package writes the memory as it lies and would scramble transposed arrays: make them contiguous
    # (ascontiguousarray turns a single number into one axis, so its shape is put back).
    plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    for name, array in plain.items():
        if array.dtype.name not in _SAFETENSORS_TYPES.values():
            raise FileError(f"{path}: .safetensors cannot hold {name} of dtype {array.dtype}")
    return bytes(save(plain))


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        hint = "pip install 'attnscore[cli]'"
        raise FrameworkError(message(".safetensors", "the package safetensors", "none here", hint=hint)) from error
    return safetensors


def bfloat16() -> np.dtype[Any]:
    """Return NumPy's bfloat16, which the package ml_dtypes brings.

    Raises
    ------
    FrameworkError
        ml_dtypes is not installed.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        hint = "pip install ml_dtypes, or convert the file to float32"
        raise FrameworkError(message("bfloat16", "the package ml_dtypes", "none here", hint=hint)) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _checked(path: Path, name: str, array: object) -> Array:
    if not isinstance(array, np.ndarray):
        raise FileError(f"{path}: {name} is not an array")
    if array.dtype.kind in _NUMBERS:
        return array.astype(array.dtype.newbyteorder("="), copy=False)  # files of other machines
    if array.dtype.name == "bfloat16":
        return array
    hint = " (bfloat16 has no place in NumPy's formats; use .safetensors)" if array.dtype == "V2" else ""
    raise FileError(f"{path}: {name} has dtype {array.dtype}; expected real numbers{hint}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
