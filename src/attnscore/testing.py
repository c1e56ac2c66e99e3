"""Checks of a new score, kernel or framework, and of an installation; attnscore's own tests call them too.

``python -m attnscore.testing`` checks every score, mask and kernel that this machine has (`main`).

Each draws small random arrays of odd sizes and raises an AssertionError that names the failure and its size.
References are the dense kernel (the definition, whole matrix) and central differences in float64: no formula that is
under test. A framework is imported only when an array of it was given.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
import os
import pickle
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import attnscore as ats
from attnscore import __version__, backends, kernels
from attnscore.analysis.explain import available
from attnscore.analysis.weights import attention_scores
from attnscore.api import attend, attend_vjp
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.backends.numpy import detached
from attnscore.base.arguments import check_choice
from attnscore.errors import FrameworkError
from attnscore.kernels import Kernel, SinglePlan, tiling
from attnscore.kernels.triton import is_interpreted
from attnscore.masks import Mask
from attnscore.problem.problem import Problem, build_problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import STATISTICS
from attnscore.scores import arrays_of, registered, resolve
from attnscore.scores.activations import NAMES as ACTIVATIONS
from attnscore.scores.base import with_arrays, with_new_arrays

__all__ = ["check_framework", "check_kernel", "check_score", "main"]

_STEP = 1e-5
"""Step of a central difference in float64: rounding (1e-16 / step) and curvature (step^2) both stay near 1e-10."""


# ---------------------------------------------------------------- scores


def check_score(
    score: Any,
    *,
    dim: int = 5,
    key_dim: int | None = None,
    heads: int = 2,
    like: Array | None = None,
    seed: int = 0,
) -> None:
    """Check a scoring function: shapes, blocks, values, gradients, and masked keys.

    1. The scores are floating, of shape (*batch, kv head, group, query, key), and chosen rows and columns of them are
       the same numbers.
    2. Computed tile by tile, the attention equals the attention from the whole matrix of ``score.tile``.
    3. The gradients of query, key and of each array of the score agree with finite differences. In NumPy a score has
       none whose ``tile`` calls an operation without a known gradient: pass ``like=`` a torch tensor to check it there.
    4. NaN in a masked key propagates neither to the result nor to the gradients.
    5. No input is changed.
    6. The functions of its ``triton_tile()``, where it has that method and PyTorch and Triton are installed: output and
       gradients of the Triton kernel equal ``tile``'s. They run on the GPU of `like`, or else in Triton's
       interpreter, in a separate process unless ``TRITON_INTERPRET=1`` is set in this one. That process imports the
       module of the class; where it cannot, a warning says that they were not checked.

    Parameters
    ----------
    score : a score object or a registered name
        Its arrays in float64.
    dim, key_dim : int
        Sizes of the query and key vectors that it takes; `key_dim` None: as `dim`.
    heads : int
        Query heads, for a score with one set of parameters per head.
    like : array, optional
        An array that names framework and device of the check; None: the framework of the score's arrays, or NumPy.
    seed : int
        Seed of the random arrays.

    Raises
    ------
    AssertionError
        The check that failed, where, and by how much.
    ShapeError, DtypeError, FrameworkError
        `tile` gives no scores: the error of a call, with the same message.

    Examples
    --------
    >>> import attnscore as ats
    >>> from attnscore.testing import check_score
    >>> class Laplace:
    ...     def tile(self, ops, query, key):
    ...         return -ops.sum(ops.abs(ops.expand_dims(query, -2) - ops.expand_dims(key, -3)), axis=-1)
    >>> check_score(Laplace())
    >>> check_score(ats.SoftCap(ats.Gaussian(0.5), cap=3.0))
    """
    score = resolve(score)
    score_arrays = arrays_of(score)
    like = next(iter(score_arrays.values()), np.zeros(1)) if like is None else like
    ops = backends.of({"like": like})
    rng = np.random.default_rng(seed)
    shapes = {"query": (2, heads, 5, dim), "key": (2, heads, 7, key_dim or dim), "value": (2, heads, 7, 3)}
    inputs = {name: _native(ops, rng.standard_normal(shape), like) for name, shape in shapes.items()}
    before = {name: np.array(_values_of(ops, x)) for name, x in inputs.items()}

    whole = attention_scores(inputs["query"], inputs["key"], score=score)
    for name, x in inputs.items():
        _close(f"{name} was changed by the call", _values_of(ops, x), before[name], tolerance=0)
    _check_blocks(ops, score, inputs, whole)
    with ops.numeric_scope():
        problem, _ = build_problem(inputs["query"], inputs["key"], inputs["value"], score=score, statistics=STATISTICS)
        _against_dense(problem, kernels.table()["streaming"])
    leaves = {**inputs, **score_arrays}
    try:
        gradients = _gradients(ops, score, leaves, None)
    except FrameworkError:
        if ops.has_autodiff:
            raise
        gradients = None
    if gradients is not None:
        _check_differences(ops, "score", lambda **arrays: _attended(score, arrays), leaves, gradients, rng)
    _check_masked(ops, score, leaves, gradients is not None)
    for name, x in inputs.items():
        _close(f"{name} was changed by the gradient", _values_of(ops, x), before[name], tolerance=0)
    if hasattr(getattr(problem.form, "score", None), "triton_tile") and dim == (key_dim or dim):
        _check_triton(ops, score, like, dim, heads, seed)


def _check_blocks(ops: Backend, score: Any, inputs: Mapping[str, Array], whole: Array) -> None:
    query, key = inputs["query"], inputs["key"]
    expected = (*query.shape[:-1], key.shape[-2])
    if tuple(whole.shape) != expected:
        raise AssertionError(f"tile: expected scores of shape {expected}, got {tuple(whole.shape)}")
    rows, cols = [3, 0], [6, 2, 1]
    block = attention_scores(query, key, score=score, query_index=rows, key_index=cols)
    part = _values_of(ops, whole)[..., rows, :][..., cols]
    _close("tile: a block of rows and columns differs from the same part of the whole", _values_of(ops, block), part)


def _check_masked(ops: Backend, score: Any, leaves: Mapping[str, Array], has_gradient: bool) -> None:
    """Check that NaN in masked keys and values changes no result and no gradient, and gets gradient 0."""
    lens = ats.ValidLens([4, 0])
    with_nan = dict(leaves)
    for name in ("key", "value"):
        x = np.array(_values_of(ops, leaves[name]))
        x[0, :, 4:] = x[1] = np.nan
        with_nan[name] = _native(ops, x, leaves[name])
    out, of_nan = (_values_of(ops, _attended(score, each, mask=lens)) for each in (leaves, with_nan))
    _close("NaN in a masked key propagates to the result", of_nan, out)
    if not has_gradient:
        return
    clean, dirty = (_gradients(ops, score, each, lens) for each in (leaves, with_nan))
    for name, grad in clean.items():
        _close(f"NaN in a masked key propagates to the gradient of {name}", dirty[name], grad)


def _check_triton(ops: Backend, score: Any, like: Array, dim: int, heads: int, seed: int) -> None:
    """Check the functions of a score's ``triton_tile()``, on a GPU, in the interpreter or in a process that has it."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return
    plain = with_arrays(score, lambda x: _values_of(ops, x))
    device = str(getattr(like, "device", "cpu")) if ops.name == "torch" else "cpu"
    # Behind TensorFlow Triton is not imported (tests/conftest.py): a separate process then.
    can_import = "triton" in sys.modules or "tensorflow" not in sys.modules
    if can_import and "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        device = "cuda"
    if is_interpreted() or device.startswith("cuda"):
        _against_triton(plain, dim, heads, seed, device)
        return
    untested = "the functions of triton_tile were not checked, as the score cannot be sent to another process"
    try:
        content = pickle.dumps((plain, dim, heads, seed))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        warnings.warn(f"{untested}: {error}", stacklevel=3)
        return
    code = "from attnscore import testing; testing._triton_process()"
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], input=content, env=variables, capture_output=True, check=False)
    printed, traceback = done.stdout.decode().strip(), done.stderr.decode().strip()
    if done.returncode == 1:  # Python's status after a traceback: the score could not be unpickled
        warnings.warn(f"{untested}: {traceback.splitlines()[-1]}", stacklevel=3)
    elif done.returncode:
        raise AssertionError(printed or traceback)


def _triton_process() -> None:
    """Check the functions of the pickled score on the standard input; print the fault, and exit with a status."""
    score, dim, heads, seed = pickle.load(sys.stdin.buffer)
    try:
        _against_triton(score, dim, heads, seed, "cpu")
    except Exception as error:
        print(error if isinstance(error, AssertionError) else f"triton_tile: {type(error).__name__}: {error}")
        sys.exit(2)


def _against_triton(score: Any, dim: int, heads: int, seed: int, device: str) -> None:
    """Compare the Triton kernel in float32 with the streaming kernel in float64, for a score with NumPy's arrays."""
    import torch

    rng, ops = np.random.default_rng(seed), backends.load("torch")
    shapes = {"query": (2, heads, 5, dim), "key": (2, heads, 7, dim), "value": (2, heads, 7, 3)}
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()} | arrays_of(score)
    by_kernel = []
    for kernel, dtype in (("triton", torch.float32), ("streaming", torch.float64)):
        leaves = {n: torch.tensor(x, dtype=dtype, device=device, requires_grad=True) for n, x in values.items()}
        out = _attended(score, leaves, valid_lens=[4, 0], kernel=kernel)
        # `ops.vjp` would differentiate the forward by PyTorch, not run the kernel's backward.
        grads = torch.autograd.grad(out, list(leaves.values()), _native(ops, _grad_out(tuple(out.shape)), out))
        results = zip(("out", *leaves), (out, *grads), strict=True)
        by_kernel.append({name: _values_of(ops, x) for name, x in results})
    for name, expected in by_kernel[1].items():
        result = name if name == "out" else f"gradient of {name}"
        _close(f"triton_tile: {result} differs from that by tile", by_kernel[0][name], expected, tolerance=1e-4)


# ---------------------------------------------------------------- kernels


def check_kernel(kernel: str | Kernel, *, like: Array | None = None, seed: int = 0) -> None:
    """Check a kernel on odd sizes, masks, bias, sink, dropout and fully masked queries.

    Output, weights and all statistics are compared with the dense kernel in float64, two runs with each other, and
    gradients with finite differences. Problems that `kernel` cannot run (``reasons_against``) are taken without
    weights, then without statistics, and skipped if it cannot run them so either.

    Parameters
    ----------
    kernel : a kernel object, or a name among ``attnscore.available()["kernels"]``
    like : array, optional
        An array of the framework, on the device, to check with; None: NumPy.
    seed : int

    Raises
    ------
    AssertionError
        A result differs, and by how much; or `kernel` can run none of the problems, so that nothing was checked.
    ArgumentError
        There is no kernel of that name.

    Examples
    --------
    >>> from attnscore.testing import check_kernel
    >>> check_kernel("streaming")
    """
    if isinstance(kernel, str):
        kernel = kernels.table()[check_choice("kernel", kernel, [*kernels.table()])]
    reasons = _check_problems(kernel, np.zeros(1) if like is None else like, seed)
    if reasons:
        raise AssertionError(f"{kernel.name}: nothing was checked, it can run none of the problems: {reasons[0]}")


# Results that a problem requests besides the output: all, then fewer for kernels that cannot compute all.
_REQUESTS: tuple[dict[str, Any], ...] = (
    {"statistics": STATISTICS, "matrix": "weights"},
    {"statistics": STATISTICS},
    {},
)


def _check_problems(kernel: Kernel, like: Array, seed: int) -> tuple[str, ...]:
    """Check a kernel on every problem that it can run; return why it cannot run the first one, if it can run none."""
    ops, rng = backends.of({"like": like}), np.random.default_rng(seed)
    ran, refused = False, tuple[str, ...]()
    for label, shapes, arguments in _problems(ops, like, rng):
        inputs = {name: _native(ops, rng.standard_normal(shape), like) for name, shape in shapes.items()}
        with ops.numeric_scope():
            for requested in _REQUESTS:
                problem, _ = build_problem(**inputs, **requested, **arguments)
                if not (reasons := kernel.reasons_against(problem)):
                    break
                refused = refused or reasons
            else:
                continue
            ran = True
            try:
                _against_dense(problem, kernel)
                if ops.has_autodiff or kernel.has_vjp:
                    entropy = ("entropy",) if problem.statistics else ()
                    _check_run(ops, dataclasses.replace(problem, statistics=entropy), kernel, rng)
            except AssertionError as error:
                raise AssertionError(f"{label}: {error}") from None
    return () if ran else refused


def _problems(
    ops: Backend, like: Array, rng: np.random.Generator
) -> Iterator[tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]]:
    """(label, shapes, arguments): sizes of one, prime, grouped heads, broadcast batch; every kind of extra."""

    def numbers(*shape: int) -> Array:
        return _native(ops, rng.standard_normal(shape), like)

    def sizes(query: int, key: int, heads: int = 1, key_heads: int = 1, dim: int = 4) -> dict[str, tuple[int, ...]]:
        lead = (2, key_heads, key)
        return {"query": (2, heads, query, dim), "key": (*lead, dim), "value": (*lead, 3)}

    masking = np.where(rng.random((2, 1, 5, 7)) < 0.3, -np.inf, 0.5)
    yield "one query, one key", sizes(1, 1), {}
    yield "grouped heads", sizes(5, 7, 4, 2), {"score": "dot"}
    yield "causal, fully masked queries", sizes(7, 5, 2, 2), {"mask": ats.Causal("bottom_right")}
    yield "lengths, sink", sizes(5, 7, 4, 2), {"valid_lens": [0, 4], "sink": numbers(4)}
    graph = ats.Neighbours([0, 2, 2, 5, 6, 8], [6, 0, 1, 4, 2, 5, 3, 1])
    yield "neighbours", sizes(5, 7, 2, 2), {"mask": graph}
    yield "array mask", sizes(5, 7), {"mask": ats.Dense(rng.random((2, 1, 5, 7)) < 0.5), "score": ats.Gaussian(0.8)}
    yield "bias that masks", sizes(5, 7, 2, 1), {"bias": _native(ops, masking, like), "score": "cosine"}
    yield "additive", sizes(5, 7, 2, 2), {"score": ats.Additive(numbers(3), numbers(3, 4), numbers(3, 4))}
    yield "dropout", sizes(5, 7, 2, 2), {"dropout": 0.4, "seed": 3}


def _check_run(ops: Backend, problem: Problem, kernel: Kernel, rng: np.random.Generator) -> None:
    """Compare gradients of out, and of log-sum-exp, entropy and weights if requested, with finite differences."""
    plan = SinglePlan(kernel, problem, tiling.plan(problem, (2, 3)))
    operands = plan.operands()

    def outputs_of(result: Result) -> dict[str, Array]:
        outputs = {"out": result.out}
        if problem.statistics:
            outputs |= {"log_sum_exp": result.log_sum_exp, "entropy": result.statistics["entropy"]}
        return outputs if problem.matrix is None else outputs | {"matrix": result.matrix}

    def all_outputs(**arrays: Array) -> Array:
        """Return all finite outputs in one vector, with 0 for the others."""
        outputs = outputs_of(plan.result(plan.forward(tuple(arrays.values())))).values()
        return ops.concat([ops.reshape(ops.where(ops.isfinite(x), x, 0.0), (-1,)) for x in outputs], 0)

    if kernel.has_vjp:
        result = kernel.forward(problem, plan.tiles)
        outputs = outputs_of(result)
        ends = np.cumsum([math.prod(x.shape) for x in outputs.values()])
        output_grads = np.split(_grad_out((int(ends[-1]),)), ends[:-1])
        pairs = zip(outputs.items(), output_grads, strict=True)
        grads = {name: _native(ops, grad.reshape(tuple(x.shape)), x) for (name, x), grad in pairs}
        gradients = kernel.backward(problem, plan.tiles, result, RowGradients(**grads), frozenset(operands))
    else:
        gradients = _vjp(ops, all_outputs, operands)
    finite = {name: x for name, x in operands.items() if ops.known_finite(x)}
    values = {name: _values_of(ops, gradients[name]) for name in finite}
    _check_differences(ops, kernel.name, lambda **arrays: all_outputs(**{**operands, **arrays}), finite, values, rng)


# ---------------------------------------------------------------- frameworks


def check_framework(like: Array, *, seed: int = 0) -> None:
    """Check a framework: its operations against NumPy's, then calls and gradients against the NumPy framework.

    Parameters
    ----------
    like : array
        Any array of the framework, on the device to check on.
    seed : int

    Raises
    ------
    AssertionError
    FrameworkError
        `like` is no array, or of a framework that is not served.

    Examples
    --------
    >>> import numpy as np
    >>> from attnscore.testing import check_framework
    >>> check_framework(np.zeros(1))
    """
    ops, plain = backends.of({"like": like}), backends.load("numpy")
    rng = np.random.default_rng(seed)
    with ops.numeric_scope(), plain.numeric_scope():
        for name, call in _OPERATIONS.items():
            arrays = [rng.standard_normal((2, 3, 4)) for _ in range(2)]
            arrays[0][0, 0, :3] = 0.0, np.nan, -np.inf
            got = call(ops, *(_native(ops, x, like) for x in arrays))
            _close(f"{ops.name}: {name}", _values_of(ops, got), np.asarray(call(plain, *arrays)))
    score = ats.Additive(rng.standard_normal(3), rng.standard_normal((3, 4)), rng.standard_normal((3, 4)))
    shapes = {"query": (2, 4, 5, 4), "key": (2, 2, 7, 4), "value": (2, 2, 7, 3)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()} | arrays_of(score)
    leaves = {name: _native(ops, x, like) for name, x in inputs.items()}
    for label, mask in (("no mask", None), ("lengths", ats.ValidLens([0, 5])), ("causal", ats.Causal("bottom_right"))):
        expected = _gradients(plain, score, inputs, mask)
        for name, grad in _gradients(ops, score, leaves, mask).items():
            _close(f"{ops.name}: {label}: gradient of {name}", grad, expected[name])
    for kernel in kernels.table().values():
        _check_problems(kernel, like, seed)


# Operations of the contract that make an array, as functions of two arrays (2, 3, 4), the first with 0, NaN and -inf.
_OPERATIONS: dict[str, Callable[[Backend, Array, Array], Array]] = {
    "exp": lambda ops, x, y: ops.exp(x),
    "tanh": lambda ops, x, y: ops.tanh(x),
    "abs": lambda ops, x, y: ops.abs(x),
    "isfinite": lambda ops, x, y: ops.isfinite(x),
    "isnan": lambda ops, x, y: ops.isnan(x),
    "zeros": lambda ops, x, y: ops.zeros((2, 0, 3), x),
    "full": lambda ops, x, y: ops.full((2, 3), 0.5, x),
    "positions": lambda ops, x, y: ops.positions(3, 4, x),
    "astype": lambda ops, x, y: ops.astype(y, "float32"),
    "slice_axis": lambda ops, x, y: ops.slice_axis(y, -2, 1, 2),
    "add_at": lambda ops, x, y: ops.add_at(ops.zeros((2, 3, 4), y), -1, 2, ops.slice_axis(y, -1, 0, 2)),
    "concat": lambda ops, x, y: ops.concat((y, y), -2),
    "reshape": lambda ops, x, y: ops.reshape(y, (6, -1)),
    "broadcast_to": lambda ops, x, y: ops.broadcast_to(y, (5, 2, 3, 4)),
    "swap_axes": lambda ops, x, y: ops.swap_axes(y, -3, -1),
    "expand_dims": lambda ops, x, y: ops.expand_dims(y, -2),
    "take": lambda ops, x, y: ops.take(y, ops.positions(1, 2, y), -1),
    "matmul": lambda ops, x, y: ops.matmul(y, ops.matrix_transpose(y)),
    "log": lambda ops, x, y: ops.log(y * y),
    "sigmoid": lambda ops, x, y: ops.sigmoid(800 * y),
    "erf": lambda ops, x, y: ops.erf(y),
    "sqrt": lambda ops, x, y: ops.sqrt(y * y),
    "maximum": lambda ops, x, y: ops.maximum(x, y),
    "where": lambda ops, x, y: ops.where(y > 0, y, -1.0),
    "equal": lambda ops, x, y: ops.equal(ops.abs(y), ops.slice_axis(y, -1, 0, 1)),
    "logical_and": lambda ops, x, y: ops.logical_and(y > 0, ops.slice_axis(y, -1, 0, 1) < 0.5),
    "logical_or": lambda ops, x, y: ops.logical_or(y > 0, ops.slice_axis(y, -2, 1, 1) < 0.5),
    "sum": lambda ops, x, y: ops.sum(y, axis=(0, -1), keepdims=True),
    "max": lambda ops, x, y: ops.max(y, axis=-2),
    "any": lambda ops, x, y: ops.any(y > 1, axis=-1, keepdims=True),
    "low_32_bits": lambda ops, x, y: ops.low_32_bits(
        (ops.positions(0, 9, y) * 0x7FEB352D) ^ ops.shift_right(ops.positions(0, 9, y), 1)
    ),
    "loop": lambda ops, x, y: ops.loop(3, lambda i, carry: carry * 2 + i, y),
    "map_tiles": lambda ops, x, y: ops.concat([part[0] for part in ops.map_tiles(3, lambda i: (y * i,))], 0),
    "stop_gradient": lambda ops, x, y: ops.stop_gradient(y),
}


# ---------------------------------------------------------------- an installation


def main() -> int:
    """Check this installation, and print the results; ``python -m attnscore.testing`` runs it.

    It needs NumPy alone, and some seconds. Every kernel that can run here is checked with every score under every mask:

    1. In float64 output, weights and statistics against the dense kernel, gradients against finite differences.
    2. In float32 and float16 the output against the dense kernel in float64: at most twice the error of the dense
       kernel in the same dtype, and 4 roundings. Gradients against float64.
    3. Everything that `check_score` and `check_kernel` check.

    Returns
    -------
    int
        The exit status: 0, or 1 where a check failed.

    Examples
    --------
    >>> from attnscore.testing import main
    >>> main()  # doctest: +SKIP
    """
    print(
        f"attnscore {__version__}, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"{platform.system()} {platform.machine()}"
    )
    for kind, by_name in available().items():
        for name, works in by_name.items():
            print(f"{kind[:-1] + ' ' + name:<48} {'available' if works else works}")
    checks, failed, start = _checks(), 0, time.perf_counter()
    for label, check in checks.items():
        verdict = "ok"
        try:
            check()
        except Exception as error:  # whatever it is, the others are checked too
            failed, verdict = failed + 1, f"FAILED: {type(error).__name__}: {error}"
        print(f"{label:<48} {verdict}", flush=True)
    if (missing := kernels.table()["native"].missing()) is not None:
        print(f"Not checked: the native kernels ({missing}). Without them results are the same, and calls slower.")
    for name, reason in _refused().items():
        print(f"Not checked: the kernel {name!r} ({reason}); check_kernel({name!r}, like=array) does")
    print(f"{len(checks)} checks, {failed} failed, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


def _checks() -> dict[str, Callable[[], None]]:
    """Return the checks by label: of each kernel, of each score, and of the two together under every mask."""
    table, refused = kernels.table(), _refused()
    here = {name: kernel for name, kernel in table.items() if kernel.missing() is None and name not in refused}
    checks: dict[str, Callable[[], None]] = {
        f"kernel {name}": functools.partial(check_kernel, kernel) for name, kernel in here.items()
    }
    for label, score in _every_score().items():
        checks[f"score {label}"] = functools.partial(check_score, score, dim=4)
        for name, kernel in here.items():
            if name != "dense":
                checks[f"score {label}, {name}, every mask"] = functools.partial(_check_masks, kernel, score)
    return checks


def _refused() -> dict[str, str]:
    """Return the kernels of this machine that take no NumPy arrays, with their reason."""
    x = np.zeros((1, 1))
    # A graph, as one of the kernels takes no other mask.
    with backends.load("numpy").numeric_scope():
        problem, _ = build_problem(x, x, x, mask=ats.Neighbours([0, 1], [0]))
    here = [kernel for kernel in kernels.table().values() if kernel.missing() is None]
    return {kernel.name: reasons[0] for kernel in here if (reasons := kernel.reasons_against(problem))}


def _every_score() -> dict[str, Any]:
    """Return one score of each kind, and of each activation, for vectors of 4."""
    rng = np.random.default_rng(0)
    examples = {name: resolve(name) for name in registered()}
    w_v, w_q, w_k = (rng.standard_normal(shape) for shape in ((3,), (3, 4), (3, 4)))
    examples |= {f"additive {name}": ats.Additive(w_v, w_q, w_k, activation=name) for name in ACTIVATIONS}
    examples["bilinear"] = ats.Bilinear(rng.standard_normal((4, 4)))
    examples["combination"] = ats.Combination(("scaled_dot", examples["bilinear"]), (0.5, 1.0))
    return examples | {"softcap": ats.SoftCap("scaled_dot", 2.0), "temperature": ats.Temperature("scaled_dot", 2.0)}


def _every_mask() -> dict[str, Mask | None]:
    """Return one mask of each kind, and combined ones, for 2 batches, 2 heads, 5 queries and 7 keys."""
    rng = np.random.default_rng(1)
    masks = (
        ats.ValidLens([0, 5]),
        ats.KeyRange([1, 0], [4, 2]),
        ats.KeyPadding(rng.random((2, 7)) < 0.6),
        ats.Causal("bottom_right"),
        ats.SlidingWindow(1, 1, align="top_left"),
        ats.PrefixLM(2),
        ats.Documents([0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2, 3]),
        ats.Packed([0, 2, 5], [0, 3, 7]),
        ats.Neighbours([0, 2, 2, 5, 6, 8], [6, 0, 1, 4, 2, 5, 3, 1]),
        ats.Dense(rng.random((2, 1, 5, 7)) < 0.5),
        ats.MaskFunction(lambda batch, head, query, key: (query + key + head) % 3 > 0),
        ats.Causal("bottom_right") & ats.ValidLens([2, 7]),
        ats.Causal("bottom_right") | ats.Documents([0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2, 3]),
        ~ats.SlidingWindow(1, 1, align="bottom_right"),
    )
    return {"no mask": None} | {repr(mask): mask for mask in masks}


def _check_masks(kernel: Kernel, score: Any) -> None:
    """Check a kernel with a score under every mask, in every dtype that NumPy has."""
    rng = np.random.default_rng(2)
    shapes = ((2, 2, 5, 4), (2, 1, 7, 4), (2, 1, 7, 3))
    exact = [rng.standard_normal(shape) for shape in shapes]
    with backends.load("numpy").numeric_scope():
        for label, mask in _every_mask().items():
            try:
                problem, _ = build_problem(*exact, score=score, mask=mask, statistics=STATISTICS, matrix="weights")
                if kernel.name == "gather" and kernel.reasons_against(problem):
                    continue  # it takes graphs alone
                _against_dense(problem, kernel)
                if kernel.has_vjp:
                    _check_run(problem.ops, dataclasses.replace(problem, statistics=("entropy",)), kernel, rng)
                for dtype in ("float32", "float16"):
                    _check_rounding(kernel, score, mask, [x.astype(dtype) for x in exact])
            except AssertionError as error:
                raise AssertionError(f"{label}: {error}") from None


def _check_rounding(kernel: Kernel, score: Any, mask: Mask | None, inputs: Sequence[HostArray]) -> None:
    """Compare a kernel's output and gradients in the dtype of `inputs` with float64 on the same numbers."""
    dtype = inputs[0].dtype
    leaves = dict(zip(("query", "key", "value"), inputs, strict=True))
    leaves |= {name: np.asarray(x).astype(dtype) for name, x in arrays_of(score).items()}
    exact = {name: x.astype(np.float64) for name, x in leaves.items()}
    outs, gradients = {}, {}
    for which, arrays, run in (("got", leaves, kernel.name), ("dense", leaves, "dense"), ("exact", exact, "dense")):
        outs[which] = np.asarray(_attended(score, arrays, mask=mask, kernel=run), np.float64)
        if which != "dense":
            gradients[which] = _numpy_gradients(score, arrays, dtype, mask=mask, kernel=kernel.name)
    rounding = float(np.finfo(dtype).eps)
    dense_error = np.abs(outs["dense"] - outs["exact"]).max(initial=0)
    allowed = 4 * rounding + 2 * float(dense_error) / max(1.0, float(np.abs(outs["exact"]).max(initial=0)))
    _close(f"{kernel.name}: {dtype}: out", outs["got"], outs["exact"], allowed)
    for name, expected in gradients["exact"].items():
        _close(f"{kernel.name}: {dtype}: gradient of {name}", gradients["got"][name], expected, 64 * rounding)


# ---------------------------------------------------------------- shared by the checks


def _against_dense(problem: Problem, kernel: Kernel) -> None:
    """Compare `kernel` in small tiles with the whole matrix (output, weights, statistics), and two of its runs."""
    ops = problem.ops
    plan = tiling.plan(problem, (2, 3))
    expected = kernels.table()["dense"].forward(problem, plan)
    got, again = (kernel.forward(problem, plan) for _ in range(2))
    out = _values_of(ops, got.out)
    _close(f"{kernel.name}: out", out, _values_of(ops, expected.out))
    _close(f"{kernel.name}: out differs from run to run", out, _values_of(ops, again.out), tolerance=0)
    if problem.matrix is not None:
        if got.matrix is None:
            raise AssertionError(f"{kernel.name}: expected Result.matrix, which the problem asks for, got None")
        _close(f"{kernel.name}: {problem.matrix}", _values_of(ops, got.matrix), _values_of(ops, expected.matrix))
    for name in problem.statistics:
        statistic, exact = (r.log_sum_exp if name == "log_sum_exp" else r.statistics[name] for r in (got, expected))
        _close(f"{kernel.name}: {name}", _values_of(ops, statistic), _values_of(ops, exact))


def _gradients(ops: Backend, score: Any, leaves: Mapping[str, Array], mask: Mask | None) -> dict[str, HostArray]:
    """Return the gradient of sum(out * cos(position)) for every leaf."""
    if not ops.has_autodiff:
        return _numpy_gradients(score, leaves, mask=mask)
    gradients = _vjp(ops, lambda **arrays: _attended(score, arrays, mask=mask), leaves)
    return {name: _values_of(ops, grad) for name, grad in gradients.items()}


def _vjp(ops: Backend, call: Callable[..., Array], leaves: Mapping[str, Array]) -> dict[str, Array]:
    """Return the gradient of sum(call(**leaves) * cos(position)) for every leaf, by the framework's autodiff."""
    out, pullback = ops.vjp(lambda *arrays: call(**dict(zip(leaves, arrays, strict=True))), tuple(leaves.values()))
    gradients = pullback(_native(ops, _grad_out(tuple(out.shape)), out))
    return dict(zip(leaves, gradients, strict=True))


def _attended(score: Any, arrays: Mapping[str, Array], function: Callable[..., Any] = attend, **options: Any) -> Any:
    """Return `attend`, or `function`, of arrays by name, among them the arrays of the score or of a wrapped one."""
    score = with_new_arrays(score, (arrays.get(name, x) for name, x in arrays_of(score).items()))
    return function(arrays["query"], arrays["key"], arrays["value"], score=score, **options)


def _numpy_gradients(
    score: Any, arrays: Mapping[str, Array], dtype: Any = np.float64, **options: Any
) -> dict[str, HostArray]:
    """Return the gradient of sum(out * cos(position)) by `attend_vjp`, the cosines rounded to a dtype."""
    out, pullback = _attended(score, arrays, attend_vjp, **options)
    grads = pullback(_grad_out(out.shape).astype(dtype))
    return {"query": grads.query, "key": grads.key, "value": grads.value, **grads.score}


def _check_differences(
    ops: Backend,
    label: str,
    call: Callable[..., Array],
    leaves: Mapping[str, Array],
    gradients: Mapping[str, HostArray],
    rng: np.random.Generator,
) -> None:
    """Compare each gradient with a central difference in a random direction."""
    for name, x in leaves.items():
        if tuple(gradients[name].shape) != tuple(x.shape):
            shapes = f"expected shape {tuple(x.shape)}, got {gradients[name].shape}"
            raise AssertionError(f"{label}: gradient of {name}: {shapes}")
        here, direction = _values_of(ops, x).astype(np.float64), rng.standard_normal(tuple(x.shape))
        ends = []
        for step in (_STEP, -_STEP):
            out = _values_of(ops, call(**{**leaves, name: _native(ops, here + step * direction, x)}))
            ends.append(float(np.sum(_grad_out(out.shape) * out)))
        expected = (ends[0] - ends[1]) / (2 * _STEP)
        got = float(np.sum(gradients[name] * direction))
        _close(f"{label}: gradient of {name}, along a random direction", got, expected, tolerance=1e-6)


def _grad_out(shape: tuple[int, ...]) -> HostArray:
    """Return the gradient of all outputs in these checks, cos(position): all different, none zero."""
    return np.cos(np.arange(int(np.prod(shape)), dtype=np.float64)).reshape(shape)


def _native(ops: Backend, x: HostArray, like: Array) -> Array:
    """Return a copy of `x` as an array of the framework, on the device of `like`."""
    return ops.asarray(np.array(x), like)


def _values_of(ops: Backend, x: Array) -> HostArray:
    """Return the values of an array, on the host."""
    x = ops.stop_gradient(x)
    values = ops.host(x)
    return np.asarray(detached(x)) if values is None else values


def _close(label: str, got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Raise AssertionError unless equal to `tolerance` of the largest entry; NaN and infinities must agree."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        raise AssertionError(f"{label}: expected shape {expected.shape}, got {got.shape}")
    finite = np.isfinite(expected)
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0)))
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        raise AssertionError(f"{label}: NaN or infinity where there should be none, or none where there should be")
    error = float(np.abs(got[finite] - expected[finite]).max(initial=0))
    if error > tolerance * scale:
        raise AssertionError(f"{label}: off by {error:.3g}, where {tolerance * scale:.3g} is allowed")


if __name__ == "__main__":
    argparse.ArgumentParser("python -m attnscore.testing", description="Check this installation.").parse_args()
    sys.exit(main())
