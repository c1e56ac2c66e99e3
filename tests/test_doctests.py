"""Every example in a docstring of the package runs and prints what it shows, compared by ``printed_output.py``."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import numpy as np
import pytest

import attnscore
from attnscore.diagnostics.lab.variance import logit_variance
from printed_output import WordsAndNumbers


def modules() -> list[str]:
    found = [attnscore.__name__]
    for info in pkgutil.walk_packages(attnscore.__path__, "attnscore."):
        # MXNet is not here: in_mxnet/test_layers.py runs these.
        if not info.name.endswith("__main__") and "mxnet" not in info.name:
            found.append(info.name)
    return found


def examples_of(module: ModuleType) -> list[doctest.DocTest]:
    """The examples of a module, in its own names and the public ones, as a reader of its page has them."""
    public = {name: getattr(attnscore, name) for name in attnscore.__all__}
    names = {"np": np, "ats": attnscore, **public, **vars(module)}
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(module, globs=names)
    # The finder takes a decorated function for one of the decorator's module.
    for name, x in vars(module).items():
        if hasattr(x, "__wrapped__") and x.__module__ == module.__name__:
            found += finder.find(x, f"{module.__name__}.{name}", module=False, globs=names)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", modules())
@pytest.mark.slow_rows("attnscore.parallel.jax", "attnscore.layers.flax", "attnscore.compat.jax")
def test_examples_of_a_module(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(str(tmp_path))
    module = importlib.import_module(name)
    if name == "attnscore.diagnostics.scaling":
        # Its example takes the first result of the quick lab, seconds of draws; test_diagnostics_scaling.py has it.
        few = module.EXPERIMENTS[0]._replace(run=lambda quick: logit_variance([1, 2], pairs=8, repeats=2))
        monkeypatch.setattr(module, "EXPERIMENTS", (few, *module.EXPERIMENTS[1:]))
    runner = doctest.DocTestRunner(
        checker=WordsAndNumbers(), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    said: list[str] = []
    for test in examples_of(module):
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


def test_examples_of_each_framework_are_found() -> None:
    """A finder that finds nothing would pass everything."""
    found = {test.name for name in modules() for test in examples_of(importlib.import_module(name))}
    assert {"attnscore.api.attend", "attnscore.scores.dot.Dot", "attnscore.masks.builtin.ValidLens"} <= found
    assert len(found) > 25


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("0.25\n", "np.float64(0.25)\n", True),
        ("True\n", "np.True_\n", True),
        ("array([0.25, 0.5 ])\n", "array([0.25, 0.5])\n", True),
        ("array([0.3333333, 1.])\n", "array([0.33333331, 1.0])\n", True),
        ("array([0.25, 0.5])\n", "array([0.25, 0.6])\n", False),
        ("array([0.25, 0.5])\n", "tensor([0.25, 0.5])\n", False),
        ("[1, 2]\n", "[1, 2, 3]\n", False),
        ("-inf\n", "inf\n", False),
        ("nan\n", "nan\n", True),
        ("(2, 1, 4)\n", "(2, 14)\n", False),
    ],
)
def test_the_comparison_tells_numbers_and_words_apart(want: str, got: str, same: bool) -> None:
    assert WordsAndNumbers().check_output(want, got, 0) is same
