"""The native module (``csrc``), where it is built: `module`, or why it is missing.

Backends read the layouts of arrays with it, and kernels run on it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _why_absent() -> str:
    """Return why there is no module: the reason that CMake wrote into the package, if it got so far."""
    try:
        reason = importlib.import_module("attnscore._native_missing").REASON.rstrip(".")
    except ModuleNotFoundError:
        reason = "its compilation failed, or CMake did not run; `pip install -v` shows which"
    return f"no native module: built without it, because {reason}"


_LEFT_OUT = "not compiled: this build is for one CPU (ATTNSCORE_TARGETS=all pip install . compiles every target)"


def targets() -> dict[str, str | None]:
    """Return the CPU targets that this machine could run, best first: None, or why the module does not have one."""
    if module is None:
        return {}
    return dict.fromkeys(module.targets()) | dict.fromkeys(module.targets_left_out(), _LEFT_OUT)


module: Any = None
missing: str | None = None
if os.environ.get("ATTNSCORE_NO_NATIVE") == "1":
    missing = "turned off by ATTNSCORE_NO_NATIVE=1"
else:
    try:
        module = importlib.import_module("attnscore._native")
    except ModuleNotFoundError:
        missing = _why_absent()
    except ImportError as error:
        missing = f"no native module: it is there and does not load: {error}"
