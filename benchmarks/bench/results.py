"""Document of a run: its form, checked before it is read, and its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnscore.errors import FileError
from attnscore.io import file_errors, read_json, write_json

SCHEMA = 2
Row = Mapping[str, Any]

_TOP = ("schema", "date", "quick", "threads", "machine", "rows", "errors")
_MACHINE = ("cpu", "architecture", "cores", "flags", "kernels", "packages")
_EVERY = ("kind", "case", "what", "status")
# By kind: fields of every row, and those that a row has when it was measured.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "limits": (("threads", "products", "reading"), ()),
    "time": (("threads", "baseline", "kernel", "work", "accuracy", "rounds"), ("ours", "theirs", "ratio")),
    "shapes": (("threads", "baseline", "points", "left_out"), ("geometric_mean", "worst")),
    "growth": (("side", "points"), ("threads",)),
    "memory": (("side", "points"), ("threads",)),
}


def check(document: Any) -> list[str]:
    """Return the fields that a document lacks, none where it has its form."""
    if missing := _missing(document, _TOP, "document"):
        return missing
    if document["schema"] != SCHEMA:
        return [f"schema: expected {SCHEMA}, got {document['schema']}"]
    found = _missing(document["machine"], _MACHINE, "machine")
    for place, row in enumerate(document["rows"]):
        where = f"row {place}"
        missing = _missing(row, _EVERY, where)
        if not missing and (row["kind"] not in _KINDS or row["status"] not in ("measured", "not run")):
            missing = [f"{where}: unknown kind {row['kind']!r} or status {row['status']!r}"]
        if not missing:
            every, measured = _KINDS[row["kind"]]
            missing = _missing(row, (*every, *(measured if row["status"] == "measured" else ("reason",))), where)
        found += missing
    return found


def _missing(content: Any, fields: Iterable[str], where: str) -> list[str]:
    if not isinstance(content, dict):
        return [f"{where}: expected an object, got {type(content).__name__}"]
    return [f"{where}: {name} is missing" for name in fields if content.get(name) is None]


def read(path: Path) -> dict[str, Any]:
    """Read a document from its file; `FileError` where it is none."""
    document = read_json(path)
    with file_errors(path, "file of results"):
        faults = check(document)
    if faults:
        raise FileError(f"{path}: {faults[0]}")
    return dict(document)


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write a document; numbers keep six digits, which is more than a clock gives."""
    write_json(path, document, digits=6, indent=1)


def check_same_setting(before: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
    """Raise FileError unless a run of this setting may replace cases of an earlier one.

    Both must have one schema, effort, threads, machine and packages; kernels may have been added since, not lost.
    """
    machines = [{**each["machine"], "kernels": None} for each in (before, setting)]
    different = [name for name in ("schema", "quick", "threads") if before[name] != setting[name]]
    if machines[0] != machines[1]:
        different.append("machine")
    if not set(before["machine"]["kernels"]) <= set(setting["machine"]["kernels"]):
        different.append("list of kernels")
    if different:
        raise FileError(f"the results that are there have another {different[0]}: measure all of them again")


def joined(before: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document whose cases are replaced by those of a later run on the same machine and packages.

    Rows that stay keep the date and commit of their own run, where those differ.

    Raises
    ------
    FileError
        As for `check_same_setting`.
    """
    check_same_setting(before, again)

    def failed(error: Row) -> str:
        return str(error["case"]).partition(",")[0]  # an error names its case and the threads

    def changed(since: Row, again: Row) -> bool:
        return any(value != again.get(name) for name, value in since.items())

    cases = {*(row["case"] for row in again["rows"]), *map(failed, again["errors"])}
    order = [row["case"] for row in (*before["rows"], *again["rows"])]
    since = {name: before.get(name) for name in ("date", "commit")}
    kept = [{**since, **row} if changed(since, again) else row for row in before["rows"] if row["case"] not in cases]
    return {
        **again,
        "rows": sorted([*kept, *again["rows"]], key=lambda row: order.index(row["case"])),
        "errors": [*(each for each in before["errors"] if failed(each) not in cases), *again["errors"]],
    }
