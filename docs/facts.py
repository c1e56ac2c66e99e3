"""Write the facts of ``facts.toml`` into the pages that show them: ``python docs/facts.py``.

A page shows a fact between ``<!--name-->`` and ``<!--/-->``, so it can be read where nothing builds it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FACTS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "docs" / "facts.toml").read_text(encoding="utf-8"))
SHOWN = re.compile(r"<!--(?P<name>[\w-]+)-->(?P<text>.*?)<!--/-->", re.DOTALL)


def with_facts(page: str) -> str:
    """Return the text of a page with each fact as the file has it; line breaks stay where the words are the same."""

    def fact(match: re.Match[str]) -> str:
        entry = FACTS[match["name"]]
        text = entry["text"].format_map(entry)
        return match[0] if match["text"].split() == text.split() else f"<!--{match['name']}-->{text}<!--/-->"

    return SHOWN.sub(fact, page)


if __name__ == "__main__":
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        if (after := with_facts(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))
