"""The page "Reference" of the site: signature and docstring of every public name (a hook of mkdocs).

The page is made when the site is built and is not stored, so it is as new as the docstrings. Their examples
are tested by ``tests/test_doctests.py``.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# The layers of Keras, Flax and MXNet have the names of PyTorch's, and a section each on the page on layers.
MODULES = (
    "attnscore",
    "attnscore.layers.torch",
    "attnscore.parallel",
    "attnscore.parallel.torch",
    "attnscore.parallel.jax",
    "attnscore.plotting",
    "attnscore.diagnostics",
    "attnscore.diagnostics.callbacks",
    "attnscore.diagnostics.scaling",
    "attnscore.integrations.transformers",
    "attnscore.compat.jax",
    "attnscore.compat.keras",
    "attnscore.compat.torch",
    "attnscore.testing",
)
UNLISTED = {"attnscore.integrations.transformers": ("register", "attention_mask", "AttentionCall")}
HEADING = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n-{3,}\n", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the page (mkdocs calls this before it reads the navigation)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference.md", content=page()))
    return files


def page() -> str:
    """All of it, as Markdown."""
    parts = [
        "# Reference",
        "Every public name, from its docstring: `help(name)` says the same. Shapes are written `(..., query, dim)`; an "
        "argument without a default is required.",
    ]
    for name in MODULES:
        parts += [f"## {name}", *(part for found in names(importlib.import_module(name)) for part in entry(*found))]
    return "\n\n".join(parts) + "\n"


def names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public names in the order of the alphabet, functions first."""
    public = getattr(module, "__all__", None) or UNLISTED[module.__name__]
    found = [(name, getattr(module, name)) for name in public if callable(getattr(module, name))]
    return iter(sorted(found, key=lambda each: (inspect.isclass(each[1]), each[0].lower())))


def entry(name: str, what: Any) -> list[str]:
    """Heading, signature and docstring of one name."""
    return [f"### {name}", f"```text\n{signature(name, what)}\n```", *sections(inspect.getdoc(what) or "")]


def signature(name: str, what: Any) -> str:
    """The call with its defaults, a line for each argument where it is long; types stand in the docstring."""
    if inspect.isclass(what) and issubclass(what, Exception):
        return f"class {name}({', '.join(base.__name__ for base in what.__bases__)})"
    try:
        parameters = inspect.signature(what).parameters.values()
    except (TypeError, ValueError):
        return name
    shown, starred = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not starred:
            shown.append("*")
        starred = starred or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        default = "" if one.default is one.empty else f"={one.default!r}"
        shown.append({one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name + default)
    line = f"{name}({', '.join(shown)})"
    return line if len(line) <= 88 else f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def sections(docstring: str) -> Iterator[str]:
    """A docstring in numpydoc's form as Markdown: its text, then each section under its title."""
    pieces = HEADING.split(docstring)
    yield prose(pieces[0])
    for title, text in zip(pieces[1::2], pieces[2::2], strict=True):
        yield f"**{title}**"
        if title == "Examples":
            yield f"```text\n{text.strip().replace('<BLANKLINE>', '')}\n```"
        else:
            yield definitions(text) if title not in ("References", "Notes", "See Also") else prose(text)


def definitions(text: str) -> str:
    """``name : what`` with an indented text below it, as a list."""
    items: list[tuple[str, list[str]]] = []
    for line in textwrap.dedent(text).strip().splitlines():
        if line[:1].isspace() and items:
            items[-1][1].append(line.strip())
        elif line.strip():
            name, colon, rest = line.partition(" : ")
            # Without a name what is returned may be a sentence with literals of its own.
            head = f"- {prose(name)}" if "``" in name else f"- `{name}`"
            items.append((head + (f": {prose(rest)}" if colon else ""), []))
    # A literal may go over the end of a line.
    return "\n".join(head + (f"  \n  {prose(' '.join(below))}" if below else "") for head, below in items)


def prose(text: str) -> str:
    """reStructuredText as Markdown: literals, and signs that Markdown would read."""
    text = re.sub(r"``(.+?)``", r"`\1`", text.strip(), flags=re.DOTALL)
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text)
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(each if each.startswith("`") else escaped(each) for each in pieces)


def escaped(text: str) -> str:
    """Signs that Markdown or HTML would read, as themselves."""
    text = re.sub(r"([*_|])", r"\\\1", text.replace("<", "&lt;"))
    return re.sub(r"\](?=\()", r"\]", text)  # an index in front of a call is no link
