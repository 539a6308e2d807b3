"""Opens `dflop view` in Chromium, headless, at two widths in both themes, and uses it: sorts, filters, opens samples.

    python tests/report/view_page.py --dflop target/debug/dflop [--screenshots DIRECTORY]

Makes a dataset of its own. Needs Chromium (Debian: `apt-get install chromium`) and playwright.
"""

import argparse
import io
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile

from playwright.sync_api import Page, sync_playwright

from report_page import CONTRAST, THEMES, WIDTHS, bitmap, sound

NAME = "<script>alert(1)<_script>"
MARKUP = "<img src=x onerror=alert(1)>"
SAMPLES = 132


def shards(directory: pathlib.Path) -> pathlib.Path:
    """Writes two shards: images, sounds, conversations, a key and texts that are markup, a broken image, HTML, SVG."""
    directory.mkdir()
    for shard in range(2):
        with tarfile.open(directory / f"shard-{shard:03}.tar", "w") as tar:

            def add(name: str, payload: bytes) -> None:
                info = tarfile.TarInfo(name)
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))

            for number in range(shard * 64, shard * 64 + 64):
                key = f"photos/sample-{number:04}"
                if number % 4 == 0:
                    question = {"from": "human", "value": "<image>\nWhat is it, and where? " * (1 if number else 1)}
                    answer = {"from": "gpt", "value": f"{MARKUP} A red kite over the sea. " * (1 + number % 9)}
                    add(f"{key}.bmp", bitmap(64 + 32 * (number % 11), 64 + 16 * (number % 7)))
                    add(f"{key}.json", json.dumps({"image": f"sample-{number:04}.bmp", "conversations": [question, answer]}).encode())
                else:
                    add(f"{key}.txt", b"a red kite " * (1 + number * number % 397))
                    if number % 3 == 0:
                        add(f"{key}.bmp", bitmap(640, 120 + number))
                    if number % 5 == 0:
                        add(f"{key}.wav", sound(8_000 * (1 + number % 6)))
            if shard == 0:
                add(f"{NAME}.txt", MARKUP.encode())
                add(f"{NAME}.html", b"<script>alert(1)</script>")
                add(f"{NAME}.svg", b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>")
                add("broken.png", b"no image at all")
            else:
                # The header is whole, the pixels are missing: only decoding shows it.
                add("cut.bmp", bitmap(300, 200)[:90_000])
                add("cut.txt", b"an image that ends early")
                add("empty/a.txt", b"")
                add("very/long/" + "directory-" * 12 + "name.txt", b"a long name " * 60)
    return directory


class Server:
    """The command, which serves until it is interrupted."""

    def __init__(self, dflop: str, data: pathlib.Path) -> None:
        self.process = subprocess.Popen([dflop, "view", str(data), "--json"], stdout=subprocess.PIPE, text=True)
        serving = json.loads(self.process.stdout.readline())
        self.url, self.samples, self.skipped = serving["url"], serving["samples"], serving["skipped"]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(10) == 0, "Ctrl-C ends it cleanly"


class Visit:
    """A page that is open; errors, dialogs, and requests to elsewhere are failures."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url, self.faults = page, url, []
        page.on("console", lambda message: self.faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.faults.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(url) or self.faults.append(f"request: {request.url[:100]}"))
        page.goto(url)
        page.wait_for_selector("#list tbody tr")

    def expect(self, claim: bool, text: str) -> None:
        if not claim:
            self.faults.append(text)

    def layout(self, where: str) -> None:
        page = self.page
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        self.expect(wide <= 0, f"{where}: the page scrolls sideways by {wide} pixels")
        cut = page.evaluate("""[...document.querySelectorAll('main *')].filter((element) => {
            const box = element.getBoundingClientRect();
            return box.width > 0 && box.right > innerWidth + 1 && !element.closest('.hidden');
        }).map((element) => element.className || element.tagName).slice(0, 5).join(' ')""")
        self.expect(not cut, f"{where}: elements leave the screen: {cut}")
        names = page.evaluate("[...document.querySelectorAll('button, input, select, audio')].filter(e => e.checkVisibility() && !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length")
        self.expect(names == 0, f"{where}: {names} controls have no name")
        contrast = page.evaluate(CONTRAST)
        self.expect(not contrast, f"{where}: too little contrast: {contrast}")

    def until(self, claim: str, arg: str | None = None) -> None:
        """Waits until the page meets a claim; playwright's own wait needs `eval`, which the policy of the page forbids."""
        for _ in range(100):
            if self.page.evaluate(claim, arg):
                return
            self.page.wait_for_timeout(50)
        raise TimeoutError(f"{claim} {arg or ''}")

    def count(self) -> str:
        return self.page.locator("#count").inner_text()

    def settle(self) -> None:
        self.page.wait_for_load_state("networkidle")
        self.page.wait_for_timeout(80)

    def keys(self) -> list[str]:
        return self.page.locator("#list .open").all_inner_texts()

    def open(self, key: str) -> None:
        """Filters by a key and opens the only sample that is left."""
        page = self.page
        page.locator("[name=key]").fill(key)
        self.until("(key) => [...document.querySelectorAll('#list .open')].every((own) => own.textContent.includes(key))", arg=key)
        self.settle()
        page.locator("#list .open").first.click()
        self.until("(key) => document.querySelector('#detail h2')?.textContent.includes(key)", arg=key)
        self.settle()


def use(visit: Visit, shot) -> None:
    page = visit.page
    visit.settle()
    visit.layout("table")
    visit.expect(visit.count() == f"1 to 50 of {SAMPLES} samples", f"the count is {visit.count()}")
    loaded = page.evaluate("[...document.querySelectorAll('#list img')].slice(0, 3).every((image) => image.complete && image.naturalWidth > 0)")
    visit.expect(loaded and page.locator("#list img").count() > 3, "thumbnails appear")
    shot("table")
    dearest = visit.keys()
    heading = page.locator("[data-column=cost_ns]")
    heading.click()
    visit.until("document.querySelector('[aria-sort=ascending] [data-column=cost_ns]')")
    visit.settle()
    visit.expect(visit.keys() != dearest, "a heading reverses the order")
    visit.expect(page.evaluate("document.activeElement.dataset.column") == "cost_ns", "the heading keeps the focus")
    page.locator("[data-column=tokens]").click()
    visit.until("document.querySelector('[aria-sort=descending] [data-column=tokens]')")
    visit.settle()
    tokens = page.evaluate("[...document.querySelectorAll('#list tbody tr')].map((row) => Number(row.children[4].textContent.replaceAll(',', '')))")
    visit.expect(tokens == sorted(tokens, reverse=True) and tokens[0] > tokens[-1], "samples are sorted by tokens")
    page.locator("button[aria-label='Next page']").click()
    visit.until("document.querySelector('#count').textContent.startsWith('51 to 100')")
    page.locator("[name=field]").select_option("wav")
    visit.until(f"!document.querySelector('#count').textContent.includes('{SAMPLES}')")
    visit.settle()
    visit.expect(all("wav" in text for text in page.locator("#list .key small").all_inner_texts()), "only samples with sound are left")
    page.locator("#reset").click()
    visit.until(f"document.querySelector('#count').textContent.includes('of {SAMPLES}')")
    visit.settle()
    bars = page.locator(".bars")
    bars.scroll_into_view_if_needed()
    box = bars.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 30, steps=4)
    page.mouse.up()
    visit.until(f"!document.querySelector('#count').textContent.includes('of {SAMPLES}')")
    visit.settle()
    visit.expect(page.locator("[name=min]").input_value() != "" and page.locator(".bar.outside").count() > 10, "a drag selects a range of costs")
    page.reload()
    page.wait_for_selector("#list tbody tr")
    visit.settle()
    visit.expect(page.locator("[name=min]").input_value() != "" and str(SAMPLES) not in visit.count(), "the filter outlives a reload")
    page.locator("#reset").click()
    visit.until(f"document.querySelector('#count').textContent.includes('of {SAMPLES}')")
    visit.settle()
    page.locator("#list .open").first.focus()
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.textContent")
    visit.expect(second == visit.keys()[1], "arrow keys move in the table")
    page.keyboard.press("Enter")
    visit.until("(key) => document.querySelector('#detail h2')?.textContent === key", arg=second)
    visit.settle()
    page.keyboard.press("j")
    visit.until("(key) => document.querySelector('#detail h2')?.textContent === key", arg=visit.keys()[2])
    visit.settle()
    visit.layout("sample")
    page.keyboard.press("Escape")
    visit.expect(page.locator("#detail").is_hidden(), "Escape closes the sample")
    chosen = page.evaluate("document.activeElement.textContent")
    visit.expect(chosen == visit.keys()[2], "the focus goes back to its row")
    samples(visit, shot)
    page.locator("[data-name=skipped]").click()
    page.wait_for_selector("#skipped .fault")
    text = page.locator("#skipped").inner_text()
    visit.expect("broken" in text and "png" in text and "shard-000.tar" in text, "skipped samples have reasons")
    visit.layout("skipped")
    shot("skipped")


def samples(visit: Visit, shot) -> None:
    """Opens a conversation, a sound, markup and a damaged image."""
    page, detail = visit.page, visit.page.locator("#detail")
    close = page.locator("button[aria-label=Close]")
    visit.open("sample-0036")
    visit.expect(detail.locator(".turn").count() == 2 and MARKUP in detail.locator(".turn.answer").inner_text(), "turns are shown as text")
    image = detail.locator(".turn.question img")
    visit.expect(image.evaluate("image => image.complete && image.naturalWidth > 100"), "the image of a turn is in its place")
    visit.layout("conversation")
    shot("conversation")
    close.click()
    visit.open("sample-0105")
    visit.expect(detail.locator("audio").evaluate("sound => sound.duration") > 0.9, "a sound can be played")
    visit.layout("sound")
    shot("sound")
    close.click()
    visit.open(NAME)
    visit.expect(NAME in detail.inner_text() and MARKUP in detail.inner_text(), "markup in data is text")
    visit.expect(detail.locator(".field img, .field iframe, .field object").count() == 0, "pages and drawings are only downloads")
    visit.layout("markup")
    shot("markup")
    close.click()
    visit.open("cut")
    visit.expect(detail.locator(".fault").count() == 1, "a damaged image has its reason")
    visit.layout("damaged")
    shot("damaged")
    close.click()
    page.locator("#reset").click()
    visit.settle()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dflop", required=True)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--screenshots", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.chromium is None:
        sys.exit("no Chromium: on Debian, apt-get install chromium; --chromium names another")
    failed = 0
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        server = Server(str(pathlib.Path(arguments.dflop).resolve()), shards(pathlib.Path(directory) / "shards"))
        assert (server.samples, server.skipped) == (SAMPLES, 1), (server.samples, server.skipped)
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        for width in WIDTHS:
            for theme in THEMES:
                context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)
                visit = Visit(context.new_page(), server.url)

                def shot(name: str) -> None:
                    if arguments.screenshots:
                        arguments.screenshots.mkdir(parents=True, exist_ok=True)
                        visit.page.screenshot(path=arguments.screenshots / f"view-{name}-{width}-{theme}.png")

                try:
                    use(visit, shot)
                except Exception as error:  # A missing element is a fault of the page like any other.
                    visit.faults.append(f"{type(error).__name__}: {error}")
                    shot("failed")
                print(f"view {width:>5} {theme:<6} {'; '.join(visit.faults) or 'ok'}", flush=True)
                failed += bool(visit.faults)
                context.close()
        browser.close()
        server.end()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
