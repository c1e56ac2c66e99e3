"""Run the tutorials and keep what they print and draw: ``python docs/tutorials/run.py [NAME ...]``; without names, all.

Needs ``pip install nbclient ipykernel``. MXNet's runs with the interpreter that ``ATTNSCORE_MXNET_PYTHON`` names, by
default that of ``.venv-mxnet``, which needs ipykernel as well.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
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
        kernels = KernelSpecManager(kernel_dirs=[str(spec.parents[1])])
        kernel = AsyncKernelManager(kernel_name="tutorial", kernel_spec_manager=kernels)
        client = NotebookClient(notebook, km=kernel, timeout=300, record_timing=False, coalesce_streams=True)
        client.resources = {"metadata": {"path": folder}}
        client.execute()
    notebook.metadata.pop("language_info", None)  # the interpreter's version, which is not the tutorial's business
    return notebook


def main(names: list[str]) -> None:
    """Run the named tutorials, or all, and write them with their outputs."""
    for path in sorted(HERE.glob("*.ipynb")):
        if not names or path.stem in names:
            nbformat.write(execute(path), path)
            print(f"{path.name:<50} {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
