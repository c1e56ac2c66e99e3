"""Facts of the machine and the software that times depend on; limits on the threads of a process."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import attnscore as ats
from attnscore.cli.versions import version

_PACKAGES = ("numpy", "torch", "jax", "jaxlib", "tensorflow", "keras", "pykeops", "onnxruntime")
# Flags that decide the speed of a kernel; all flags of a CPU fill a page.
_FLAGS = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_bf16", "neon", "asimd", "sve", "sve2", "bf16"),
)
# Variables by which both sides leave out wider instructions. MKL on AMD takes AVX2 by itself.
_ISAS = {
    "avx2": {
        "ATTNSCORE_TARGET": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    }
}
ISAS = tuple(_ISAS)
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# transformers looks nothing up in its hub.
_FRAMEWORKS = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "tensorflow",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def limit_isa(name: str) -> None:
    """Limit all measuring processes that follow to an instruction set of `ISAS`."""
    os.environ.update(_ISAS[name])


def facts() -> dict[str, Any]:
    """Return CPU, system and versions, which times depend on, and the instruction set where it is limited."""
    info = _cpu_info()
    limited = [name for name, variables in _ISAS.items() if variables.items() <= os.environ.items()]
    return {
        **({"isa": limited[0]} if limited else {}),
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(cpus()),
        "flags": [flag for flag in _FLAGS if flag in (info.get("flags") or info.get("Features") or "").split()],
        "memory_gb": _memory_gb(),
        "system": platform.system(),
        "python": platform.python_version(),
        "attnscore": ats.__version__,
        "kernels": [name for name, works in ats.available()["kernels"].items() if works],
        "packages": {name: version(name) for name in _PACKAGES},
    }


def commit() -> str | None:
    """Return the short commit of the checkout that the package is imported from, or None where it is installed."""
    # Installed into the environment of another project, the package is inside a checkout that does not contain it.
    commands = ["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty", "--exclude=*"]
    try:
        for command in commands:
            done = subprocess.run(
                ["git", "-C", str(Path(__file__).parent), *command],
                capture_output=True, text=True, check=True, timeout=10,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpus() -> list[int]:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a process limited to `threads` threads; pools read it once, when they are loaded."""
    return {**os.environ, **dict.fromkeys(_POOLS, str(threads)), **_FRAMEWORKS}


def pin(threads: int) -> None:
    """Restrict this process to `threads` CPUs, on separate cores where these are known.

    XLA sizes its pool by the CPUs that it may use, and has no other setting. Before any framework is imported.
    """
    if hasattr(os, "sched_setaffinity") and threads < len(cpus()):
        os.sched_setaffinity(0, _apart(cpus())[:threads])


def set_threads(threads: int) -> None:
    """Set the threads of PyTorch and of this library."""
    import torch

    torch.set_num_threads(threads)
    ats.set_num_threads(threads)


def _apart(places: list[int]) -> list[int]:
    """Order CPUs so that second hyperthreads of a core come last."""
    seen: set[str] = set()
    first: list[int] = []
    rest: list[int] = []
    for cpu in places:
        siblings = _text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu)
        (rest if siblings in seen else first).append(cpu)
        seen.add(siblings)
    return first + rest


def _cpu_info() -> dict[str, str]:
    pairs = (line.partition(":") for line in _text(Path("/proc/cpuinfo")).splitlines())
    found: dict[str, str] = {}
    for name, _, value in pairs:
        found.setdefault(name.strip(), value.strip())
    return found


def _memory_gb() -> float | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / 2**20, 1)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
