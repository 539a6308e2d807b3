"""Uses the documentation site in Chromium, headless: search, theme, tabs, copies, links, at two widths.

    python tests/site/site_page.py --site target/site [--screenshots DIRECTORY]

Serves the site on this machine, and fails if a page asks another host for anything. Needs Chromium (Debian:
`apt-get install chromium`) and playwright.
"""

import argparse
import functools
import http.server
import pathlib
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

WIDTHS = [390, 1280]
THEMES = ["light", "dark"]
QUICKSTART = pathlib.Path(__file__).resolve().parents[2] / "docs/quickstart.md"
TABS = re.findall("^### (.+)$", QUICKSTART.read_text(encoding="utf-8").partition("<!-- tabs -->")[2], re.MULTILINE)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


class Links(HTMLParser):
    """Collects the links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))
        name = {"a": "href", "img": "src", "script": "src", "link": "href"}.get(tag)
        # The address of the page itself, for search engines.
        if name and (value := given.get(name)) and given.get("rel") != "canonical":
            self.links.append(value)


def read(site: pathlib.Path) -> dict[pathlib.Path, Links]:
    """Reads all pages of the site, but those of rustdoc, which checks its own links."""
    pages = {}
    for file in sorted(site.rglob("*.html")):
        if site / "rust" in file.parents:
            continue
        pages[file] = Links()
        pages[file].feed(file.read_text(encoding="utf-8"))
    assert len(pages) > 35, f"found {len(pages)} pages"
    return pages


def check_links(site: pathlib.Path) -> int:
    """Checks that every link within the site leads to a file, and to an anchor where it names one."""
    pages, broken, count = read(site), [], 0
    for file, page in pages.items():
        if file.name == "404.html":
            continue  # its links are from the root of the published site
        base = "http://site/" + file.relative_to(site).as_posix()
        for link in page.links:
            target = urlsplit(urljoin(base, link))
            if target.netloc != "site":
                assert target.scheme in ("https", "mailto"), f"{file}: {link}"
                continue
            count += 1
            path = site / unquote(target.path).lstrip("/")
            path = path / "index.html" if path.is_dir() else path
            is_anchor = (
                not target.fragment or path not in pages or unquote(target.fragment) in pages[path].anchors
            )
            if not path.is_file() or not is_anchor:
                broken.append(f"{file.relative_to(site)}: {link}")
    assert not broken, "links lead nowhere:\n" + "\n".join(broken)
    return count


def check_search(page: Page, address: str) -> None:
    """Finds words of the guides and a name of the API, and follows the first result."""
    for word, place in [("BalancedLoader", "api/loaders"), ("makespan", "measured")]:
        page.goto(address)
        field = page.get_by_placeholder("Search")
        field.wait_for(state="attached")
        page.wait_for_load_state("networkidle")  # the shortcut works when the search has been loaded
        page.keyboard.press("Control+k")
        field.fill(word)
        found = page.locator(f"a[href*='{place}'][href*='h={word}']")
        found.first.wait_for()
    address_of_result = found.first.get_attribute("href")
    found.first.click()
    page.wait_for_url(address_of_result.split("#")[0] + "**")
    page.locator("mark", has_text=word).first.wait_for(state="attached")  # the word is marked in the page


def scheme(page: Page) -> str:
    return page.evaluate("document.body.dataset.mdColorScheme")


def check_theme(page: Page, address: str) -> None:
    """Follows the system, and the switch against the system; drawings follow both."""
    page.goto(address)
    seen = {}
    for _ in range(3):
        name = scheme(page)
        seen[name] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shown = [theme for theme in THEMES if page.locator(f"img[src*='timeline.{theme}.svg']").is_visible()]
        assert shown == ["dark" if name == "slate" else "light"], f"drawings of {name}: {shown}"
        page.locator("label[for^=__palette]:visible").first.click()
    assert set(seen) == {"default", "slate"} and len(set(seen.values())) == 2, seen


def check_tabs(page: Page, address: str, width: int) -> None:
    """Chooses every tab of the quickstart, and copies the code of one."""
    page.goto(address + "quickstart/")
    labels = page.locator(".tabbed-labels").first.locator("label")
    assert labels.all_inner_texts() == TABS, labels.all_inner_texts()
    for place, tab in enumerate(TABS):
        # On a phone the row of tabs is swiped, and arrows cover its ends.
        if width < 600:
            labels.nth(place).evaluate("label => label.click()")
        else:
            labels.nth(place).click()
        blocks = page.locator(".tabbed-content").first.locator(".tabbed-block")
        visible = [number for number in range(blocks.count()) if blocks.nth(number).is_visible()]
        assert visible == [place], f"{tab}: {visible}"
    labels.first.evaluate("label => label.click()")
    block = page.locator(".tabbed-block").first
    block.locator("pre").first.hover()
    block.locator("button").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert ".backward()" in copied and "optimizer.step()" in copied, copied


def check_reading(page: Page, address: str) -> None:
    """Goes on by the links to the next page, and back."""
    page.goto(address)
    page.locator("a.md-footer__link--next").click()
    page.wait_for_url("**/quickstart/")
    page.locator("a.md-footer__link--prev").click()
    page.wait_for_url(address)


def check_api(page: Page, address: str) -> None:
    """Shows signatures with types of the stubs, parameters one by one, and highlighted code."""
    page.goto(address + "api/loaders/")
    signature = page.locator("#dflop\\.BalancedLoader ~ .doc-signature").first
    text = " ".join(signature.inner_text().split())
    for part in (
        "global_batch_size: int",
        "plan: Plan | None = None",
        'Literal["numpy", "torch"',
        "os.PathLike",
    ):
        assert part.removeprefix("os.") in text, f"{part} is not in {text}"
    assert not [name for name in text.split() if name.startswith("_")], f"private names: {text}"
    assert signature.locator("a", has_text="Processor").first.get_attribute("href"), "types are links"
    contents = page.locator("#dflop\\.Loader ~ .doc-contents").first
    assert "samples per batch." in contents.locator("li", has_text="batch_size").first.inner_text()
    assert page.locator(".doc-contents .highlight .k").count() > 0, "code of docstrings is highlighted"


# Tables of documents that do not fit into the column of the text, by their first heading.
WIDE_TABLES = """[...document.querySelectorAll(".md-typeset table:not([class])")].filter((table) => {
    const column = table.closest("article").getBoundingClientRect();
    return table.scrollWidth > Math.ceil(column.width) || table.getBoundingClientRect().right > column.right + 1;
}).map((table) => `${table.querySelector("th").innerText} ${table.scrollWidth}`)"""


def check_width(page: Page, address: str, places: list[str], width: int) -> None:
    """No page is wider than the screen, and no table than its page."""
    for place in places:
        page.goto(address + place)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{place} is {wide} wide on a screen of {width}"
        tables = page.evaluate(WIDE_TABLES)
        assert not tables, f"{place}: tables are wider than their page at {width}: {tables}"


def contexts(browser: Browser, address: str) -> Iterator[tuple[int, str, BrowserContext]]:
    """Opens a context for each width and theme; fails if something went wrong in one."""
    for width in WIDTHS:
        for theme in THEMES:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
            context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address.rstrip("/"))
            faults = watched(context, address)
            yield width, theme, context
            assert not faults, f"{width} {theme}: {faults}"
            context.close()


def watched(context: BrowserContext, address: str) -> list[str]:
    """Notes errors of pages, and requests to other hosts."""
    faults: list[str] = []

    def request(one: Request) -> None:
        if not one.url.startswith((address, "data:", "blob:")):
            faults.append(f"a request to another host: {one.url}")

    context.on("request", request)
    context.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    context.on("weberror", lambda error: faults.append(str(error.error)))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=pathlib.Path, required=True)
    parser.add_argument("--screenshots", type=pathlib.Path)
    options = parser.parse_args()
    print(f"{check_links(options.site)} links within the site lead somewhere")
    places = [
        file.parent.relative_to(options.site).as_posix() + "/"
        for file in read(options.site)
        if file.name == "index.html"
    ]
    handler = functools.partial(Quiet, directory=options.site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, theme, context in contexts(browser, address):
            page = context.new_page()
            check_theme(page, address)
            check_tabs(page, address, width)
            check_reading(page, address)
            check_search(page, address)
            check_api(page, address)
            if theme == "light":
                check_width(page, address, places, width)
            if options.screenshots:
                options.screenshots.mkdir(parents=True, exist_ok=True)
                for place in ("", "quickstart/", "api/loaders/", "models/", "faq/"):
                    page.goto(address + place)
                    page.screenshot(
                        path=options.screenshots
                        / f"{place.strip('/').replace('/', '-') or 'index'}-{width}-{theme}.png"
                    )
            print(f"{width} pixels wide, {theme}: search, theme, tabs, copies, signatures, no other host")
        browser.close()
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
