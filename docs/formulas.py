"""Formulas of the site as MathML, which browsers draw without a script (a hook of mkdocs).

A page writes them as blocks of the language `math`, in LaTeX.
"""

from __future__ import annotations

import re
from typing import Any

BLOCK = re.compile(
    r"^(?P<indent> *)```math\n(?P<latex>.*?)^ *```$", re.MULTILINE | re.DOTALL
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the formulas of a page (mkdocs calls this before it converts the page)."""
    from latex2mathml.converter import convert

    def mathml(match: re.Match[str]) -> str:
        formula = convert(" ".join(match["latex"].split()), display="block")
        return f'{match["indent"]}<div class="formula">{formula}</div>'

    return BLOCK.sub(mathml, markdown)
