"""Versions of the installed packages."""

from __future__ import annotations

import contextlib
from importlib import metadata


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    names = (package, f"{package}-cpu", "tf-nightly") if package == "tensorflow" else (package,)
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None
