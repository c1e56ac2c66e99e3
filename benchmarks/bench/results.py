"""Document of a run: its form, checked before it is read, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnscore.errors import FileError
from attnscore.io import file_errors, read_json, write_json

SCHEMA = 2
Row = Mapping[str, Any]

_NUMBER = (int, float)
_TOP = {"schema": int, "date": str, "quick": bool, "threads": list, "machine": dict, "rows": list, "errors": list}
_MACHINE = {"cpu": str, "architecture": str, "cores": int, "flags": list, "kernels": list, "packages": dict}
_EVERY = {"kind": str, "case": str, "what": str, "status": str}
_TIMED = {
    "threads": int,
    "baseline": str,
    "kernel": str,
    "work": dict,
    "accuracy": dict,
    "at_most": bool,
    "rounds": int,
}
_POINTS = {"side": str, "points": list, "parameters": int}
# A shape in one mode: the times are medians, the ratio has its quartiles.
_POINT = {"shape": str, "mode": str, **dict.fromkeys(("ours", "theirs", "ratio", "q1", "q3"), _NUMBER)}
_EXPONENT = (*_NUMBER, type(None))
# By kind: fields of every row, and of one that was measured.
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "limits": ({"threads": int, "products": dict, "reading": _NUMBER}, {}),
    "time": (_TIMED, {"ours": dict, "theirs": dict, "ratio": dict}),
    "shapes": (
        {"threads": int, "baseline": str, "points": list, "left_out": list},
        {"geometric_mean": _NUMBER, "worst": dict, "below": int},
    ),
    "growth": (_POINTS, {"threads": int, "time_exponent": _EXPONENT, "memory_exponent": _EXPONENT}),
    "memory": (_POINTS, {"threads": int, "target": _NUMBER, "reached": bool}),
}


def check(document: Any) -> list[str]:
    """Return the faults in the form of a document, none where it is right."""
    found = _faults(document, _TOP, "document")
    if found:
        return found
    if document["schema"] != SCHEMA:
        return [f"schema: expected {SCHEMA}, got {document['schema']}"]
    found = _faults(document["machine"], _MACHINE, "machine")
    for place, row in enumerate(document["rows"]):
        found += _check_row(row, f"row {place}")
    return found


def _check_row(row: Any, where: str) -> list[str]:
    found = _faults(row, _EVERY, where)
    if found:
        return found
    if row["kind"] not in _KINDS or row["status"] not in ("measured", "not run"):
        return [f"{where}: unknown kind {row['kind']!r} or status {row['status']!r}"]
    every, measured = _KINDS[row["kind"]]
    found = _faults(row, every, where)
    if row["status"] == "not run":
        return found + ([] if row.get("reason") else [f"{where}: not run, without a reason"])
    found += _faults(row, measured, where)
    summaries = [row.get(name) for name in ("ours", "theirs", "ratio")] if row["kind"] == "time" else []
    points = row.get("points") or ()
    if row["kind"] == "shapes":
        found += [fault for point in points for fault in _faults(point, _POINT, where)]
        summaries = [] if found else [{**point, "median": point["ratio"]} for point in points]
    else:
        summaries += [point.get("seconds") for point in points]
    for each in summaries:
        if not each or not 0 < each["q1"] <= each["median"] <= each["q3"]:
            found.append(f"{where}: median and quartiles out of order")
    return found


def _faults(content: Any, form: Mapping[str, Any], where: str) -> list[str]:
    if not isinstance(content, dict):
        return [f"{where}: expected an object, got {type(content).__name__}"]
    return [
        f"{where}: {name} is missing or of the wrong type"
        for name, kind in form.items()
        if not isinstance(content.get(name), kind) or (isinstance(content[name], bool) and kind is int)
    ]


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

    def without_kernels(document: Mapping[str, Any], name: str) -> Any:
        found = document[name]
        return {key: value for key, value in found.items() if key != "kernels"} if name == "machine" else found

    different = [
        name
        for name in ("schema", "quick", "threads", "machine")
        if without_kernels(before, name) != without_kernels(setting, name)
    ]
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
