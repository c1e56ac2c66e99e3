"""The report in a real browser: headless Chromium chooses a head, reads a cell, and makes no request."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnscore.diagnostics import Inspection, inspect_model

pytestmark = pytest.mark.slow

SENTENCES = (Path(__file__).parents[1] / "src/attnscore/cli/demo/sentences.txt").read_text("utf-8")
SHORT = "Astronauts on the night shift watched the planet rise over the lunar horizon."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("no Chromium here; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        # Containers run as root, where Chromium's own sandbox cannot start.
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        opened = playwright.chromium.launch(executable_path=found, args=options)
        yield opened
        opened.close()


class Opened:
    """A page, what it asked for, and what it complained of."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 1600}, **options)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)

    def choose(self, layer: int, head: int) -> None:
        self.page.click(f'#grid button[data-layer="{layer}"][data-head="{head}"]')
        title = f"Layer {layer}, head {head}"
        self.page.wait_for_function('title => document.getElementById("head-title").textContent === title', arg=title)

    def cells(self) -> np.ndarray:
        """The numbers that the map draws."""
        return np.array(self.page.evaluate('document.getElementById("map").data[0].z'))

    def colours(self) -> list[float]:
        """The ends of the map's colour scale."""
        ends = self.page.evaluate('(({ zmin, zmax }) => [zmin, zmax])(document.getElementById("map").data[0])')
        return [float(end) for end in ends]

    def tooltip(self, query: int, key: int) -> str:
        """What the map says of a cell under the pointer."""
        place = self.page.evaluate(
            """([i, j]) => { const plot = document.getElementById("map"), { xaxis, yaxis } = plot._fullLayout,
               box = plot.getBoundingClientRect();
               return [box.x + xaxis._offset + xaxis.c2p(j), box.y + yaxis._offset + yaxis.c2p(i)]; }""",
            [query, key],
        )
        self.page.mouse.move(place[0] + 1, place[1] + 1)
        self.page.mouse.move(*place)
        return str(self.page.locator("#map .hoverlayer .hovertext").text_content(timeout=10_000))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Inspection, Path]:
    found = inspect_model("minilm", SHORT)
    return found, found.to_html(tmp_path_factory.mktemp("short") / "report.html")


@pytest.fixture
def opened(browser: Any, short: tuple[Inspection, Path]) -> Iterator[Opened]:
    page = Opened(browser, short[1])
    yield page
    page.page.close()


def test_a_head_is_chosen_and_a_cell_is_read(opened: Opened, short: tuple[Inspection, Path]) -> None:
    found, path = short
    opened.choose(2, 11)
    weights = found.weights(2, 11)
    np.testing.assert_allclose(opened.cells(), weights, atol=2e-4)
    text = opened.tooltip(5, 4)
    assert f"query {found.tokens[5]} (5)" in text and f"key {found.tokens[4]} (4)" in text
    said = re.search(r"weight (\d\.\d{4})", text)
    assert said and float(said[1]) == pytest.approx(weights[5, 4], abs=2e-4)
    assert opened.requests == [path.as_uri()]
    assert opened.complaints == []


def test_other_scales_are_computed_in_the_page(opened: Opened, short: tuple[Inspection, Path]) -> None:
    opened.choose(3, 4)
    for setting in ("unscaled", "cold", "warm"):
        opened.page.select_option("#setting", setting)
        np.testing.assert_allclose(opened.cells(), short[0].weights(3, 4, setting=setting), atol=2e-3)


def test_colours_are_alike_for_all_heads_or_up_to_the_largest_weight(
    opened: Opened, short: tuple[Inspection, Path]
) -> None:
    for layer, head in ((0, 0), (1, 8)):
        opened.choose(layer, head)
        opened.page.select_option("#scale", "1")
        assert opened.colours() == [0, 1]
        opened.page.select_option("#scale", "")
        assert opened.colours() == pytest.approx([0, short[0].weights(layer, head).max()], abs=2e-4)


def test_uniform_weights_have_one_colour_and_no_strongest_edge(browser: Any, tmp_path: Path) -> None:
    """Bins of two keys and a last one of one key; the queries of a head of zeros see all keys alike."""
    found = inspect_model("minilm", (SENTENCES + " ") * 2, max_tokens=257)
    inputs = found.layers[0].inputs
    zeros = dataclasses.replace(found.layers[0], inputs=inputs | {"query": torch.zeros_like(inputs["query"])})
    opened = Opened(browser, dataclasses.replace(found, layers=(zeros, *found.layers[1:])).to_html(tmp_path / "r.html"))
    opened.choose(0, 0)
    assert opened.cells().shape == (129, 129)
    np.testing.assert_allclose(opened.cells(), 1 / 257, rtol=1e-6)
    assert "Its largest weight, 0.004, is that of 10 edges or more." in (opened.page.text_content("#said") or "")
    opened.page.close()


@pytest.mark.parametrize("width", [1000, 1600])
def test_nothing_is_wider_than_the_page(browser: Any, short: tuple[Inspection, Path], width: int) -> None:
    opened = Opened(browser, short[1])
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.wait_for_function('document.querySelector("#map svg").getBoundingClientRect().right <= innerWidth')
    wide = "one => [one.scrollWidth, one.clientWidth]"
    for element in ("html", ".scroll", "#map", "#mass"):
        needed, there = opened.page.eval_on_selector(element, wide)
        assert needed <= there, element
    opened.page.close()


def test_a_block_is_exact(opened: Opened, short: tuple[Inspection, Path]) -> None:
    opened.choose(1, 8)
    for field, value in (("query-from", 3), ("query-to", 6), ("key-from", 2), ("key-to", 9)):
        opened.page.fill(f"#{field}", str(value))
    opened.page.click("#show")
    block = short[0].weights(1, 8, query_index=slice(3, 7), key_index=slice(2, 10))
    np.testing.assert_allclose(opened.cells(), block, atol=2e-4)


def test_the_keyboard_reaches_every_head(opened: Opened) -> None:
    opened.page.focus('#grid button[data-layer="0"][data-head="0"]')
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "Enter"):
        opened.page.keyboard.press(key)
    assert opened.page.text_content("#head-title") == "Layer 2, head 1"
    pressed = opened.page.locator('#grid button[aria-pressed="true"]')
    assert pressed.get_attribute("aria-label").startswith("layer 2, head 1: Entropy")


def test_statistics_and_links_stand_in_tables(opened: Opened, short: tuple[Inspection, Path]) -> None:
    found = short[0]
    opened.page.select_option("#statistic", "logit_variance")
    cell = opened.page.text_content('#grid button[data-layer="4"][data-head="5"]')
    assert float(cell or "nan") == pytest.approx(found.statistics["logit_variance"][4, 5], rel=5e-3)
    opened.choose(4, 5)
    query, key, weight = found.top_links(4, 5, 1)[0]
    row = opened.page.locator("#links tr").nth(1).locator("td").all_text_contents()
    assert row == [f"{found.tokens[query]} ({query})", f"{found.tokens[key]} ({key})", f"{weight:.4f}"]


def test_links_and_mass_are_those_of_the_scale_that_is_shown(opened: Opened, short: tuple[Inspection, Path]) -> None:
    opened.choose(3, 4)
    for setting in ("unscaled", "warm", "model"):
        opened.page.select_option("#setting", setting)
        weights = short[0].weights(3, 4, setting=setting)
        rows = opened.page.locator("#links tr").all()[1:]
        shown = [float(row.locator("td").nth(2).text_content()) for row in rows]
        np.testing.assert_allclose(shown, np.sort(weights, axis=None)[::-1][:10], atol=2e-3)
        mass = opened.page.evaluate('document.getElementById("mass").data[0].y')
        np.testing.assert_allclose(mass, weights.sum(0), atol=1e-2)


def test_nothing_is_offered_that_needs_a_network(opened: Opened) -> None:
    titles = opened.page.eval_on_selector_all(".modebar-btn", "all => all.map(one => one.dataset.title)")
    assert "Zoom" in titles and not [title for title in titles if "share" in title.lower() or "cloud" in title.lower()]


def test_tokens_are_no_tags(browser: Any, tmp_path: Path) -> None:
    """Plotly reads tags in labels: <s> and </s> are tokens of many models."""
    found = inspect_model("minilm", SHORT)
    tokens = ("<s>", "a&b", "<b>bold", *found.tokens[3:-1], "x" * 40)
    opened = Opened(browser, dataclasses.replace(found, tokens=tokens).to_html(tmp_path / "report.html"))
    labels = opened.page.locator("#map .xtick text").all_text_contents()
    assert labels[:3] == ["<s>", "a&b", "<b>bold"] and labels[-1] == "x" * 17 + "…"
    assert "key <s> (0)" in opened.tooltip(5, 0)
    opened.page.close()


def test_paper_is_light(browser: Any, short: tuple[Inspection, Path]) -> None:
    opened = Opened(browser, short[1], color_scheme="dark")
    ground = 'document.querySelector("#map .bglayer .bg, #map .main-svg").style.background'
    dark = opened.page.evaluate(ground)
    opened.page.evaluate('dispatchEvent(new Event("beforeprint"))')
    assert opened.page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    opened.page.emulate_media(media="print")
    assert not opened.page.locator(".controls").is_visible()
    assert opened.page.locator("#grid button").first.is_visible()
    opened.page.emulate_media(media="screen")
    opened.page.evaluate('dispatchEvent(new Event("afterprint"))')
    assert opened.page.evaluate(ground) == dark
    opened.page.close()


@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_of_findings(browser: Any, tmp_path: Path, width: int) -> None:
    """The lab's page and a watched model's page: pictures are there, nothing is asked for, nothing is wider."""
    from attnscore.diagnostics import scaling, watch

    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with watch(model) as seen:
        model(torch.zeros(1, 3, 8))
    lab = scaling.report_page([("sharpening", scaling.sharpening())], tmp_path / "lab.html")
    for path in (lab, seen.to_html(tmp_path / "watched.html")):
        page, requests, complaints = browser.new_page(viewport={"width": width, "height": 800}), [], []
        page.on("request", lambda request, seen=requests: seen.append(request.url))
        page.on("console", lambda said, seen=complaints: seen.append(said.text))
        page.goto(path.as_uri())
        pictures = page.evaluate("[...document.images].map(one => [one.complete, one.naturalWidth, one.alt.length])")
        assert pictures and all(done and wide > 100 and words > 20 for done, wide, words in pictures)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert (requests, complaints) == ([path.as_uri()], [])
        page.close()


def test_every_control_has_a_name(opened: Opened) -> None:
    nameless = opened.page.evaluate(
        """() => [...document.querySelectorAll("button, select, input")].filter((one) => !one.closest(".modebar")
           && !one.closest("label") && !one.getAttribute("aria-label") && !one.textContent.trim()).length"""
    )
    assert nameless == 0
    assert opened.page.get_attribute("html", "lang") == "en"
    assert opened.page.locator("#map[role=img][aria-label]").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(browser: Any, short: tuple[Inspection, Path], scheme: str) -> None:
    """A contrast of at least 4 on every cell of the grid (WCAG asks 4.5 of small text and 3 of large)."""
    opened = Opened(browser, short[1], color_scheme=scheme)
    pairs = opened.page.evaluate(
        """() => { const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
           const rgb = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
             return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
           return [...document.querySelectorAll("#grid button")].map((one) => { const style = getComputedStyle(one);
             return [rgb(style.color), rgb(style.backgroundColor)]; }); }"""
    )
    opened.page.close()

    def luminance(colour: list[int]) -> float:
        linear = [x / 255 / 12.92 if x / 255 <= 0.04045 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in colour]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    for ink, ground in pairs:
        low, high = sorted((luminance(ink), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4


def test_a_long_text_is_binned_and_zooms_to_exact_blocks(browser: Any, tmp_path: Path) -> None:
    found = inspect_model("minilm", (SENTENCES + " ") * 2, max_tokens=256)
    path = found.to_html(tmp_path / "report.html")
    assert len(found.tokens) == 256 and path.stat().st_size < 10e6
    opened = Opened(browser, path)
    opened.choose(1, 8)
    weights, binned = found.weights(1, 8), opened.cells()
    # 160 cells a side cannot hold 256 tokens: the mean weight of two queries and two keys.
    np.testing.assert_allclose(binned, weights.reshape(128, 2, 128, 2).mean((1, 3)), atol=5e-4)
    assert opened.colours() == [0, 0.5], "all weight of a query in one bin is as dark as a weight of 1"
    assert "A cell is 2 × 2 tokens" in (opened.page.text_content("#said") or "")
    # What a box drawn on the map sends.
    box = {"xaxis.range[0]": -0.5, "xaxis.range[1]": 63.5, "yaxis.range[0]": 63.5, "yaxis.range[1]": -0.5}
    opened.page.evaluate('box => { Plotly.relayout("map", box); }', box)
    opened.page.wait_for_function('document.getElementById("query-to").value === "127"')
    np.testing.assert_allclose(opened.cells(), weights[:128, :128], atol=5e-4)
    assert opened.colours() == [0, 1]
    assert "A cell is" not in (opened.page.text_content("#said") or "")
    assert opened.complaints == [] and opened.requests == [path.as_uri()]
    opened.page.close()


@pytest.mark.parametrize("heads", ["some", "none"])
def test_a_page_without_the_map_of_the_first_head(browser: Any, tmp_path: Path, heads: str) -> None:
    """It opens on a head that has one, and a box drawn on its map zooms; without any map there are numbers."""
    found = inspect_model("minilm", (SENTENCES + " ") * 2, max_tokens=256)
    opened = Opened(browser, found.to_html(tmp_path / "report.html", megabytes=0.2 if heads == "some" else 0))
    title = opened.page.text_content("#head-title") or ""
    if heads == "none":
        assert title == "Layer 0, head 0" and not opened.page.locator("#map").is_visible()
    else:
        layer, head = map(int, re.findall(r"\d+", title))
        assert (layer, head) != (0, 0) and opened.page.locator("#map").is_visible()
        pressed = opened.page.locator('#grid button[aria-pressed="true"]')
        assert (pressed.get_attribute("data-layer"), pressed.get_attribute("data-head")) == (f"{layer}", f"{head}")
        opened.choose(0, 0)
        assert not opened.page.locator("#map").is_visible()
        opened.choose(layer, head)
        box = {"xaxis.range[0]": -0.5, "xaxis.range[1]": 63.5, "yaxis.range[0]": 63.5, "yaxis.range[1]": -0.5}
        opened.page.evaluate('box => { Plotly.relayout("map", box); }', box)
        opened.page.wait_for_function('document.getElementById("query-to").value === "127"')
        np.testing.assert_allclose(opened.cells(), found.weights(layer, head)[:128, :128], atol=5e-4)
    assert opened.complaints == []
    opened.page.close()
