"""Run tutorials and keep what they print and draw: ``python docs/tutorials/run.py [--out FOLDER] [FILE ...]``.

Without files it runs all tutorials; without a folder the outputs go into the files themselves.

Needs ``pip install nbclient ipykernel``. MXNet's runs with the interpreter that ``ATTNSCORE_MXNET_PYTHON`` names, by
default that of ``.venv-mxnet``, which needs ipykernel as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
MXNET = Path(os.environ.get("ATTNSCORE_MXNET_PYTHON") or HERE.parents[1] / ".venv-mxnet" / "bin" / "python")
# As Jupyter sets it for a kernel of its own; and no notes of TensorFlow about the machine.
ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook from its first cell to its last in a fresh kernel, and return it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    python = MXNET if path.stem.endswith("mxnet") else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "kernels", "tutorial", "kernel.json")
        spec.parent.mkdir(parents=True)
        command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": command, "display_name": "tutorial", "env": ENVIRONMENT}), encoding="utf-8")
        os.environ["JUPYTER_PATH"] = folder  # where kernels are looked for first
        client = NotebookClient(
            notebook,
            kernel_name="tutorial",
            resources={"metadata": {"path": folder}},
            timeout=300,
            startup_timeout=300,
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute()
    notebook.metadata.pop("language_info", None)  # the interpreter's version, which is not the tutorial's business
    return notebook


def main() -> None:
    """Run the files named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    for path in given.files or sorted(HERE.glob("*.ipynb")):
        target = path if given.out is None else given.out / path.name
        nbformat.write(execute(path), target)
        print(f"{path.name:<50} {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
