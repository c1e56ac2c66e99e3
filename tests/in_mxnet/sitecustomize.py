"""Run by MXNet's interpreter when it starts: it imports the attnscore that the tests of the first environment import.

The environment itself has the sources of the clone in which it was made.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

# The sources, and the folders of the package, one of which has the native module.
FOLDERS = os.environ["ATTNSCORE_TESTED"].split(os.pathsep)


class TestedPackage:
    """Finds the package and its modules, in front of the finder that the environment's installation has."""

    @staticmethod
    def find_spec(name: str, path: list[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "attnscore":
            return None
        return PathFinder.find_spec(name, [*(path or ()), *FOLDERS])


sys.meta_path.insert(0, TestedPackage)
