"""``python tests/open_site.py [FOLDER]``: the pages of the site, opened as files in Chromium that has no network.

The exit status is 1 where a page asks for anything that is no file, lacks a file, has an error in a script or a picture
that does not draw. The home page's search has to find a word. ``make docs`` makes the site; pictures of some pages go
into FOLDER.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).parents[1] / "build" / "site"
SHOWN = ("index", "concepts/attention-pooling", "performance", "recipes/seq2seq", "reference")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROKEN_PICTURES = "Array.from(document.images).filter(one => !one.complete || !one.naturalWidth).map(one => one.src)"


def complaints(page: Page, path: Path) -> list[str]:
    """Open a page and return what is wrong with it."""
    found: list[str] = []
    outside = lambda request: request.url.split(":")[0] not in ("file", "data", "blob")  # noqa: E731
    handlers = {
        "request": lambda request: found.append(f"asks for {request.url}") if outside(request) else None,
        # What the next page breaks off, an icon as a rule, is no missing file.
        "requestfailed": lambda request: (
            None if request.failure == "net::ERR_ABORTED" else found.append(f"lacks {request.url}")
        ),
        "pageerror": lambda error: found.append(f"script: {error}"),
    }
    for event, handler in handlers.items():
        page.on(event, handler)
    page.goto(path.as_uri())
    page.wait_for_load_state("load")
    found += [f"picture {source}" for source in page.evaluate(BROKEN_PICTURES)]
    for event, handler in handlers.items():
        page.remove_listener(event, handler)
    return found


def main(folder: str | None = None) -> None:
    """Open every page."""
    pages = sorted(path for path in SITE.glob("**/*.html") if path.name != "404.html")  # which a server shows alone
    if CHROMIUM is None or not pages:
        sys.exit("expected Chromium (on Debian: apt-get install chromium) and a site (make docs)")
    with sync_playwright() as playwright:
        # Containers run as root, where Chromium's own sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
        page, wrong = context.new_page(), 0
        for path in pages:
            for complaint in complaints(page, path):
                wrong += 1
                print(f"{path.relative_to(SITE)}: {complaint}")
            name = path.relative_to(SITE).with_suffix("").as_posix()
            if folder is not None and name in SHOWN:
                page.screenshot(path=Path(folder, f"{name.replace('/', '-')}.png"))
        page.goto((SITE / "index.html").as_uri())
        page.click("input[name=query]")
        page.keyboard.type("sliding")
        page.wait_for_selector(".md-search-result__link", state="attached", timeout=120_000)
        results = page.locator(".md-search-result__link").count()
        browser.close()
    print(f"{len(pages)} pages opened without a network, {wrong} complaints; {results} results of a search")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
