"""The file ``llms.txt`` of the site: what the library is, and fifteen pages with a sentence each (a hook of mkdocs).

Titles come from the navigation and sentences from the pages, so neither can age.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGES = (
    "concepts/scoring-functions.md",
    "why-scale.md",
    "install.md",
    "masks.md",
    "layers.md",
    "caches.md",
    "frameworks.md",
    "guides/index.md",
    "recipes/index.md",
    "watching.md",
    "diagnosis.md",
    "troubleshooting.md",
    "performance.md",
    "reference.md",
    "support.md",
)
NO_PROSE = re.compile(r"^ *```.*?^ *```$|^#.*?$|<!--.*?-->", re.DOTALL | re.MULTILINE)


def on_post_build(config: Any) -> None:
    """Write the file (mkdocs calls this when the site is built)."""
    text = llms(config["site_name"], config["site_description"], config["nav"], Path(config["docs_dir"]))
    Path(config["site_dir"], "llms.txt").write_text(text, encoding="utf-8")


def llms(name: str, description: str, navigation: list[Any], folder: Path) -> str:
    """Return the text of the file."""
    titles = dict(pages(navigation))
    lines = (f"- [{titles[page]}]({page[:-2]}html): {first_sentence(folder / page)}" for page in PAGES)
    return f"# {name}\n\n> {description}\n\n## Documentation\n\n" + "\n".join(lines) + "\n"


def pages(entry: Any) -> Iterator[tuple[str, str]]:
    """Walk through the navigation: the file and the title of each page."""
    for each in entry:
        for title, below in each.items():
            yield from [(below, title)] if isinstance(below, str) else pages(below)


def first_sentence(path: Path) -> str:
    """Return the sentence with which a page begins, without links."""
    if not path.exists():  # reference.py makes the page when the site is built
        return "Every public name, from its docstring."
    text = NO_PROSE.sub("", path.read_text(encoding="utf-8"))
    paragraph = next(part for part in text.split("\n\n") if part.strip())
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.) ", plain)[0].rstrip(".:") + "."
