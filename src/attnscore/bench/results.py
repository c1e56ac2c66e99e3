"""The document of a run: its form, and its file.

What this module meets:
- `check` says whether a document has the form that readers of results.json rely on; nothing without it is read;
- files are written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnscore.files import FileError, file_errors, read_json, replacing

SCHEMA = 1
Row = Mapping[str, Any]

_NUMBER = (int, float)
_TOP = {"schema": int, "date": str, "quick": bool, "threads": list, "machine": dict, "rows": list, "errors": list}
_MACHINE = {"cpu": str, "architecture": str, "cores": int, "flags": list, "kernels": list, "packages": dict}
_EVERY = {"kind": str, "case": str, "what": str, "status": str}
_BY_KIND: dict[str, dict[str, Any]] = {
    "limits": {"threads": int, "products": dict, "reading": _NUMBER},
    "time": {
        "threads": int,
        "peer": str,
        "kernel": str,
        "work": dict,
        "accuracy": dict,
        "at_most": bool,
        "rounds": int,
    },
    "growth": {"side": str, "points": list, "parameters": int},
    "memory": {"side": str, "points": list, "parameters": int},
}
_MEASURED: dict[str, dict[str, Any]] = {
    "limits": {},
    "time": {"ours": dict, "theirs": dict, "ratio": dict},
    "growth": {"threads": int, "time_exponent": (*_NUMBER, type(None)), "memory_exponent": (*_NUMBER, type(None))},
    "memory": {"threads": int, "must": _NUMBER, "reached": bool},
}


def check(document: Any) -> list[str]:
    """What is wrong with the form of a document; nothing where it is right."""
    found = _missing(document, _TOP, "document")
    if found:
        return found
    if document["schema"] != SCHEMA:
        return [f"schema: expected {SCHEMA}, got {document['schema']}"]
    found = _missing(document["machine"], _MACHINE, "machine")
    for place, row in enumerate(document["rows"]):
        found += _check_row(row, f"row {place}")
    return found


def _check_row(row: Any, where: str) -> list[str]:
    found = _missing(row, _EVERY, where)
    if found:
        return found
    if row["kind"] not in _BY_KIND or row["status"] not in ("measured", "not run"):
        return [f"{where}: unknown kind {row['kind']!r} or status {row['status']!r}"]
    found = _missing(row, _BY_KIND[row["kind"]], where)
    if row["status"] == "not run":
        return found + ([] if row.get("reason") else [f"{where}: not run, without a reason"])
    found += _missing(row, _MEASURED[row["kind"]], where)
    summaries = [row.get(name) for name in ("ours", "theirs", "ratio")] if row["kind"] == "time" else []
    summaries += [point.get("seconds") for point in row.get("points") or ()]
    for each in summaries:
        if not each or not 0 < each["q1"] <= each["median"] <= each["q3"]:
            found.append(f"{where}: median and quartiles out of order")
    return found


def _missing(content: Any, form: Mapping[str, Any], where: str) -> list[str]:
    if not isinstance(content, dict):
        return [f"{where}: expected an object, got {type(content).__name__}"]
    return [
        f"{where}: {name} is missing or of the wrong type"
        for name, kind in form.items()
        if not isinstance(content.get(name), kind) or (isinstance(content[name], bool) and kind is int)
    ]


# ------------------------------------------------------------------ files


def read(path: Path) -> dict[str, Any]:
    """A document from its file; `FileError` where it is none."""
    document = read_json(path)
    with file_errors(path, "file of results"):
        wrong = check(document)
    if wrong:
        raise FileError(f"{path}: {wrong[0]}")
    return dict(document)


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write a document, whole or not at all; numbers keep six digits, which is more than a clock gives."""
    text = json.dumps(_rounded(document), indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(path) as file:
        file.write((text + "\n").encode())


def joined(before: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """A document with the cases of a later run in the place of its own; both must be of one machine and its packages.

    Raises
    ------
    FileError
        The runs differ in more than their cases.
    """
    for name in ("schema", "quick", "threads", "machine"):
        if before[name] != again[name]:
            raise FileError(f"the results that lie there have another {name}: measure all of them again")
    # An error names its case and the threads.
    failed = {id(each): each["case"].partition(",")[0] for each in (*before["errors"], *again["errors"])}
    cases = {*(row["case"] for row in again["rows"]), *(failed[id(each)] for each in again["errors"])}
    places: dict[str, int] = {row["case"]: place for place, row in reversed([*enumerate(before["rows"])])}

    def place(row: Row) -> int:
        return places.get(row["case"], len(places))

    return {
        **again,
        "rows": sorted([*(row for row in before["rows"] if row["case"] not in cases), *again["rows"]], key=place),
        "errors": [*(each for each in before["errors"] if failed[id(each)] not in cases), *again["errors"]],
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
