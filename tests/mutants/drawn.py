"""Drawn mutants of cosmic-ray: ``python tests/mutants/drawn.py [PACKAGE ...] [--count 60] [--seed 0] [--seconds 600]``.

- A place of the code is drawn, and of the changes that cosmic-ray has for it one: an operator, a number, a condition.
  What changes annotations or docstrings alone is passed over.
- The tests of ``--for MODULE`` run, then of ``--for PACKAGE``. What passes both, or does not end in time, survives;
  some changes have no effect.
- Nothing is recorded: the table of faults is for those that took thought.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.fault import ROOT
from mutants.run import first_failure, installed_module
from selection import SOURCE, module_of


def places(path: Path) -> list[list[tuple[str, int]]]:
    """For each place of a file its changes: an operator of cosmic-ray, and which of its occurrences."""
    nodes = list(ast_nodes(get_ast(path.read_text())))
    changes: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if not operator.arguments():
            spans = (span for node in nodes for span in operator().mutation_positions(node))
            for occurrence, (start, _) in enumerate(spans):
                changes.setdefault(start, []).append((name, occurrence))
    return list(changes.values())


def what_runs(text: str) -> str:
    """The syntax tree without annotations and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        vars(node).update({name: None for name in ("annotation", "returns") if name in node._fields})
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.dump(tree)


def drawn(packages: list[str], seed: int) -> Iterator[tuple[Path, str]]:
    """Files and their mutated texts, in an order that the seed sets."""
    paths = [path for package in packages for path in sorted((SOURCE / package).rglob("*.py"))]
    everywhere = [(path, changes) for path in paths for changes in places(path)]
    draw = random.Random(seed)
    draw.shuffle(everywhere)
    for path, changes in everywhere:
        name, occurrence = draw.choice(changes)
        text = path.read_text()
        mutated = mutate_code(text, plugins.get_operator(name)(), occurrence) or text
        if what_runs(mutated) != what_runs(text):
            yield path, mutated


def failure(name: str, texts: dict[str, str], module: Path | None, seconds: float) -> str | None:
    """The first test of a module or package that fails, or why the package cannot be imported."""
    try:
        return first_failure(f"--for {name}", module, texts, {}, seconds)
    except subprocess.TimeoutExpired:
        return None
    except RuntimeError as error:
        return str(error).splitlines()[-1] if "Traceback" in str(error) else None  # a module may have no tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=["kernels", "masks", "plans", "problem", "scores"])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="the most time for the tests of a change, each time")
    options = parser.parse_args()
    module, killed = installed_module(), 0
    sample = itertools.islice(drawn(options.packages, options.seed), options.count)
    for number, (path, mutated) in enumerate(sample, 1):
        file = str(path.relative_to(ROOT))
        names = [module_of(path), path.relative_to(SOURCE).parts[0]]
        by = next(filter(None, (failure(name, {file: mutated}, module, options.seconds) for name in names)), None)
        killed += by is not None
        lines = difflib.unified_diff(path.read_text().splitlines(), mutated.splitlines(), lineterm="", n=0)
        print(f"{killed} of {number} killed; {file}: {by or 'SURVIVED'}", *list(lines)[2:], sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
