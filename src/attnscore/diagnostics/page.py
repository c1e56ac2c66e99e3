"""Pages of sentences, tables and pictures as one HTML file.

Requirements:
- one file without scripts, which fetches nothing; it opens offline and prints;
- readable in light and dark, on a narrow screen and by a screen reader: the text of a picture describes it;
- the file is written whole or not at all.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import urllib.parse
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscore.io import replacing
from attnscore.plotting.drawing import short_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Section(NamedTuple):
    """Section of a page; empty parts are left out."""

    title: str
    sentences: Sequence[str]
    """Sentences, and lines of code where they are indented by eight spaces."""
    rows: Sequence[Mapping[str, Any]] = ()
    figure: Figure | None = None


def write_page(path: str | Path, title: str, facts: str, sections: Iterable[Section]) -> Path:
    """Write sections under a title and a line of facts, and return the path."""
    parts = [*sections]
    links = [f'<li><a href="#part-{number}">{_safe(part.title)}</a></li>' for number, part in enumerate(parts, 1)]
    contents = "\n".join(["<nav><ol>", *links, "</ol></nav>"] if len(parts) > 1 else [])
    return write_html(path, title, facts, contents, "\n".join(_section(*part) for part in enumerate(parts, 1)))


def write_html(path: str | Path, title: str, facts: str, links: str, sections: str, style: str = "") -> Path:
    """Write `links` and `sections`, which are HTML, with the frame of every page and `style` after the shared style."""
    from attnscore import __version__

    folder, target = resources.files("attnscore.diagnostics"), Path(path)
    page, shared_style = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    texts = {"title": _safe(title), "facts": _safe(facts), "version": _safe(__version__)}
    whole = Template(page).substitute(texts, style=shared_style + style, links=links, sections=sections)
    with replacing(target) as file:
        file.write(whole.encode("utf-8"))
    return target


def cell(value: object) -> str:
    """Format a value for a table: three significant digits, four where a number is large.

    >>> [cell(x) for x in (0.12345, 4096.0, 12, 1e-7, "q·k", True)]
    ['0.123', '4096', '12', '1e-07', 'q·k', 'yes']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return short_number(value, 3) if isinstance(value, float) else str(value)


def _section(number: int, section: Section) -> str:
    """Return a section as HTML; the link to it in the list of contents ends in its number."""
    lines = [f'<section aria-labelledby="part-{number}">', f'<h2 id="part-{number}">{_safe(section.title)}</h2>']
    for sentence in section.sentences:
        is_code = sentence.startswith(" " * 8)
        lines.append(
            f'<pre tabindex="0">{_safe(textwrap.dedent(sentence))}</pre>' if is_code else f"<p>{_safe(sentence)}</p>"
        )
    if (figure := section.figure) is not None:
        described = _safe(describe_figure(figure))
        lines.append(f'<p class="picture" tabindex="0"><img src="{_picture(figure)}" alt="{described}"></p>')
    if section.rows:
        lines.append(_table(section.rows, section.title))
    return "\n".join([*lines, "</section>"])


def _table(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return rows of the same columns as an HTML table; columns of words have a class, by which they stand left."""
    columns = [*rows[0]]
    words = {name for name in columns if any(isinstance(row[name], str) and not _is_number(row[name]) for row in rows)}
    classes = {name: ' class="words"' if name in words else "" for name in columns}
    lines = ("".join(f"<td{classes[name]}>{_safe(cell(row[name]))}</td>" for name in columns) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    head = "".join(f'<th scope="col"{classes[name]}>{_safe(name)}</th>' for name in columns)
    head = f"<thead><tr>{head}</tr></thead>"
    # A table wider than the screen is scrolled, by keyboard too.
    opening = f'<div class="scroll" tabindex="0" role="region" aria-label="{_safe("Table: " + title)}">'
    return f"{opening}<table>{head}<tbody>\n{body}\n</tbody></table></div>"


def _is_number(text: str) -> bool:
    """Return whether a text is a number with or without its margin, or empty."""
    return not text or re.fullmatch(r"[-+−\d.e]+( ± [-+\d.e]+)?", text) is not None


def describe_figure(figure: Figure) -> str:
    """Describe a picture by its titles and the names of its axes: the text in place of the picture."""
    title = figure.get_suptitle()
    panels = []
    for axis in figure.axes:
        if axis.get_label() == "<colorbar>":
            continue
        names = " against ".join(name for name in (axis.get_ylabel(), axis.get_xlabel()) if name)
        panels.append(": ".join(" ".join(name.split()) for name in (axis.get_title(), names) if name))
    shown = "; ".join(dict.fromkeys(panel for panel in panels if panel))
    return ". ".join(text for text in (title, shown) if text) + "."


def _picture(figure: Figure) -> str:
    """Return a figure as an SVG in a data address: sharp at any zoom and on paper, its letters drawn as shapes."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Names may be in any script; letters that the font lacks are drawn as boxes, and need no warning.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"<\?xml.*?<svg", "<svg", svg, count=1, flags=re.DOTALL)
    return "data:image/svg+xml," + urllib.parse.quote(" ".join(svg.split()), safe=" =:/,;()!*~")


def _safe(text: str) -> str:
    return html.escape(str(text))
