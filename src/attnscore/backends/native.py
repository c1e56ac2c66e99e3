"""The native module (``csrc``), where it is built: `module`, or why it is missing.

Backends read layouts of arrays by it, kernels run on it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

module: Any = None
missing: str | None = None
try:
    if os.environ.get("ATTNSCORE_NO_NATIVE") == "1":
        raise ImportError("turned off by ATTNSCORE_NO_NATIVE=1")
    module = importlib.import_module("attnscore._native")
except ModuleNotFoundError:
    missing = (
        "the native module is not built here: reinstall attnscore where there are a C++ compiler and Python's headers"
    )
except ImportError as error:
    missing = str(error)
