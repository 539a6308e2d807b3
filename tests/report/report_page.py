"""Opens reports in Chromium, headless, at two widths in both themes, and uses them: clicks, wheel, keys, touch.

    python tests/report/report_page.py --dflop target/debug/dflop [--screenshots DIRECTORY]

Makes a dataset and a run of its own. Needs Chromium (Debian: `apt-get install chromium`) and playwright.
"""

import argparse
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

from playwright.sync_api import Page, sync_playwright

WIDTHS = [390, 1280]
THEMES = ["light", "dark"]
PAGE_BYTES_MAX = 2_000_000
MODEL = ["--model", "omni-7b"]
STEPS = ["--global-batch-size", "24", "--dp-size", "2", "--microbatches", "4", "--set", "plan.stages=1,1,2", "--set", "plan.strategy=search:500"]
EVIL = "</script><img src=x onerror=alert(1)>"


def shards(directory: pathlib.Path) -> pathlib.Path:
    """Writes a shard of texts, images and sounds; a key and a text try to leave their element."""
    directory.mkdir()
    generator = 12345
    with tarfile.open(directory / "shard-000.tar", "w") as tar:

        def add(name: str, payload: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))

        for number in range(72):
            generator = (generator * 1_103_515_245 + 12_345) % 2**31
            key = f"{EVIL.replace('/', '_').replace('.', '_')}{number}" if number == 3 else f"sample-{number:03}"
            add(f"{key}.txt", (EVIL + " a red kite " * (1 + generator % 400)).encode())
            if number % 3 == 0:
                add(f"{key}.bmp", bitmap(64 + 32 * (number % 11), 64 + 16 * (number % 7)))
            if number % 5 == 0:
                add(f"{key}.wav", sound(8_000 * (1 + number % 6)))
    return directory


def texts(shard: pathlib.Path) -> None:
    """Writes a few texts to evaluate on."""
    with tarfile.open(shard, "w") as tar:
        for number in range(8):
            payload = (" a red kite" * (4 + number)).encode()
            info = tarfile.TarInfo(f"held-out-{number}.txt")
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def bitmap(width: int, height: int) -> bytes:
    row = bytes(value for x in range(width) for value in (x % 256, (x * 3) % 256, 120))
    row += bytes(-len(row) % 4)
    size = 54 + len(row) * height
    number = lambda value, length=4: value.to_bytes(length, "little")
    head = b"BM" + number(size) + number(0) + number(54) + number(40) + number(width) + number(height)
    return head + number(1, 2) + number(24, 2) + number(0) + number(len(row) * height) + bytes(16) + row * height


def sound(frames: int) -> bytes:
    number = lambda value, length=4: value.to_bytes(length, "little")
    data = b"".join(number((frame * 97 % 20_000) & 0xFFFF, 2) for frame in range(frames))
    form = b"WAVEfmt " + number(16) + number(1, 2) + number(1, 2) + number(8_000) + number(16_000) + number(2, 2)
    form += number(16, 2) + b"data" + number(len(data)) + data
    return b"RIFF" + number(len(form)) + form


class Reports:
    """The reports under test, made by the commands that users call."""

    def __init__(self, dflop: str, directory: pathlib.Path, root: pathlib.Path) -> None:
        self.dflop, self.directory = dflop, directory
        data = str(shards(directory / "shards"))
        run = directory / "run"
        run.mkdir()
        self.pages = {}
        self.make("simulate", [data, *MODEL, *STEPS, "--steps", "3"])
        self.make("order", [data, *MODEL, *STEPS, "--steps", "1"])
        self.make("stats", [data, *MODEL])
        shapes = root / "bindings/cli/examples/shapes.csv"
        cluster = ["--gpus", "8", "--global-batch-size", "32", "--batches", "4", "--set", "space.kinds=basic"]
        self.make("plan", ["--shapes", str(shapes), "--model", "llava-ov-qwen2.5-7b", *cluster])
        profiles = root / "costmodel/profiles"
        self.make("accuracy", ["--profile", str(profiles / "cpu-miniature.csv"),
                               "--observed", str(profiles / "cpu-miniature-held-out.csv")])
        config = directory / "train.toml"
        example = (root / "executor/examples/train-cpu.toml").read_text()
        small = {"global_batch_size = 32": "global_batch_size = 8", "microbatches = 8": "microbatches = 2", "samples = 640": "samples = 32"}
        for before, after in small.items():
            assert before in example, before
            example = example.replace(before, after)
        held_out = directory / "held-out.tar"
        texts(held_out)
        config.write_text(example + f"\n[evaluation]\nevery = 2\nshards = [{json.dumps(str(held_out))}]\n")
        self.make("train", [str(config), "--steps", "7"])
        for name in ["stats", "simulate", "train"]:
            shutil.copy(directory / f"{name}.json", run)
        self.call(["report", str(run), "-o", str(directory / "all.html")])
        self.pages["all"] = directory / "all.html"

    def call(self, arguments: list[str]) -> None:
        done = subprocess.run([self.dflop, *arguments], capture_output=True, text=True, cwd=self.directory)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"

    def make(self, command: str, arguments: list[str]) -> None:
        """Writes the document, and renders the page from it."""
        document = self.directory / f"{command}.json"
        self.call([command, *arguments, "--report", str(document)])
        assert json.loads(document.read_text())["command"] == command
        self.pages[command] = self.directory / f"{command}.html"
        self.call(["report", str(document), "-o", str(self.pages[command])])


class Visit:
    """A page that is open; errors, requests and dialogs are failures."""

    def __init__(self, page: Page, path: pathlib.Path) -> None:
        self.page, self.faults = page, []
        page.on("console", lambda message: self.faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.faults.append("dialog"), dialog.dismiss()))
        page.on("request", self.note)
        self.url = path.as_uri()
        page.goto(self.url)
        page.wait_for_selector("#contents li")
        page.wait_for_timeout(400)

    def note(self, request) -> None:
        if request.url != self.url and not request.url.startswith("data:"):
            self.faults.append(f"request: {request.url[:100]}")

    def expect(self, claim: bool, text: str) -> None:
        if not claim:
            self.faults.append(text)

    def axis(self, selector: str) -> str:
        """What a chart draws: its pixels, as a digest."""
        return self.page.locator(selector).first.locator("canvas").first.evaluate("canvas => canvas.toDataURL().slice(-4000)")

    def layout(self) -> None:
        page = self.page
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        self.expect(wide <= 0, f"the page scrolls sideways by {wide} pixels")
        cut = page.evaluate("""[...document.querySelectorAll('main *')].filter((element) => {
            const box = element.getBoundingClientRect();
            return box.width > 0 && box.right > innerWidth + 1 && !element.closest('.scroll, #contents');
        }).length""")
        self.expect(cut == 0, f"{cut} elements leave the screen")
        self.expect(page.locator("h1").count() == 1 and page.locator(".verdict").count() >= 1, "a verdict is on top")
        names = page.evaluate("[...document.querySelectorAll('button, [role=application]')].filter(e => !(e.textContent.trim() || e.ariaLabel)).length")
        self.expect(names == 0, f"{names} controls have no name")
        contrast = page.evaluate(CONTRAST)
        self.expect(not contrast, f"too little contrast: {contrast}")


# Texts whose color differs from their background by less than 4.5 : 1; the first five.
CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let own = element; own; own = own.parentElement) {
      const color = parse(getComputedStyle(own).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('h1, h2, h3, p, td, th, small, button, a, dt, dd, li, .badge, .facts')) {
    if (!element.textContent.trim() || !element.offsetParent || element.closest('.skip')) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.textContent.slice(0, 30)} ${ratio.toFixed(1)}`);
  }
  return poor.slice(0, 5).join('; ');
})()"""


def use_timeline(visit: Visit) -> None:
    """Clicks a bar, zooms by wheel, drag and keys, moves, and reads the table."""
    page, chart = visit.page, "figure.chart .plot[aria-roledescription=timeline]"
    plot = page.locator(chart).first
    plot.scroll_into_view_if_needed()
    over = plot.locator(".u-over")
    box = over.bounding_box()
    whole = visit.axis(chart)
    # The first forward pass starts at the left end of the first row.
    page.mouse.move(box["x"] + 3, box["y"] + 8)
    page.wait_for_timeout(100)
    visit.expect(plot.locator(".tip").is_visible(), "a bar under the mouse is described")
    page.mouse.click(box["x"] + 3, box["y"] + 8)
    page.wait_for_timeout(150)
    panel = page.locator(".timelines .panel")
    visit.expect(panel.count() == 1 and panel.locator(".sample code").count() > 0, "a click on a bar shows its samples")
    visit.expect("microbatch" in panel.inner_text(), "the samples name their microbatch")
    over = plot.locator(".u-over")
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 8)
    scrolled = page.evaluate("scrollY")
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(250)
    zoomed = visit.axis(chart)
    visit.expect(zoomed != whole, "the wheel zooms the axis")
    visit.expect(page.evaluate("scrollY") == scrolled, "the page stays while a chart zooms")
    page.keyboard.press("Escape")
    plot.focus()
    page.keyboard.press("0")
    page.wait_for_timeout(200)
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 10, steps=4)
    page.mouse.up()
    page.wait_for_timeout(250)
    dragged = visit.axis(chart)
    visit.expect(dragged not in (whole, zoomed), "a drag selects a range")
    plot.focus()
    page.keyboard.press("]")
    page.wait_for_timeout(200)
    visit.expect(visit.axis(chart) != dragged, "a key moves the range")
    page.keyboard.press("Home")
    page.keyboard.press("+")
    page.wait_for_timeout(200)
    visit.expect(visit.axis(chart) != whole, "a key zooms")
    before = panel.inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.wait_for_timeout(150)
    visit.expect(page.locator(".timelines .panel").inner_text() != before, "arrow keys go to other passes and show their samples")
    page.keyboard.press("Home")
    table = page.locator("details.table").first
    table.locator("summary").click()
    page.wait_for_timeout(300)
    visit.expect(table.locator("tbody tr").count() > 3, "the passes are also a table")
    table.locator("summary").click()


def use_controls(visit: Visit, name: str) -> None:
    """Switches strategies, ranks and steps."""
    page = visit.page
    figures = lambda: page.locator(".timelines").first.locator("figure.chart").count()
    before = figures()
    page.locator(".timelines .chip[aria-pressed=false]").first.click()
    visit.expect(figures() == before + 1, "a strategy is added")
    stages = lambda: page.locator(".timelines .plot").first.get_attribute("aria-label")
    ranks = page.locator(".timelines").first.locator("select").last
    ranks.select_option("slowest")
    one = stages()
    ranks.select_option("all")
    if name != "train":  # whose job has one rank of each stage
        visit.expect(stages() != one, "all ranks are shown")
    page.locator(".load-row").first.click()
    visit.expect(page.locator(".loads .panel .sample").count() > 0, "a rank shows its samples")


def use(visit: Visit, name: str) -> None:
    """Uses what the page of a command has."""
    page = visit.page
    if name in ("simulate", "order", "train", "all"):
        use_timeline(visit)
    if name in ("simulate", "train"):
        use_controls(visit, name)
    if name in ("simulate", "stats"):
        visit.expect(page.locator("img.preview").count() > 0 and page.locator(".wave").count() > 0, "samples have previews")
        loaded = page.evaluate("[...document.querySelectorAll('img.preview')].slice(0, 3).every((image) => image.src.startsWith('data:image/jpeg'))")
        visit.expect(loaded, "images are in the page")
        visit.expect(EVIL in page.locator("main").inner_text(), "markup in data is shown as text")
    if name in ("accuracy", "train"):
        scatter = page.locator(".plot[aria-roledescription='scatter plot']").first
        scatter.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(100)
        visit.expect("±" in page.locator(".chosen").first.inner_text(), "a point shows its interval")
    if name == "stats":
        page.locator(".histogram .u-over").first.hover()
        page.wait_for_timeout(100)
        visit.expect(page.locator(".histogram canvas").count() > 4, "quantities have histograms")
    if name == "train":
        visit.expect(page.locator(".badge.measured").count() > 1, "measured timelines are beside simulated ones")
        visit.expect(page.locator(".plot[aria-roledescription='line chart']").count() == 4, "the steps are drawn")
        legend = page.locator(".chart", has_text="evaluation loss").locator(".u-series").all_inner_texts()
        visit.expect(any(line.startswith("evaluation loss") for line in legend), f"evaluations are beside the loss: {legend}")
    if name == "plan":
        visit.expect(page.locator(".plan").count() == 2, "the plan has a runner-up")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dflop", required=True)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--screenshots", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.chromium is None:
        sys.exit("no Chromium: on Debian, apt-get install chromium; --chromium names another")
    root = pathlib.Path(__file__).resolve().parents[2]
    failed = 0
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        reports = Reports(str(pathlib.Path(arguments.dflop).resolve()), pathlib.Path(directory), root)
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        for name, path in reports.pages.items():
            size = path.stat().st_size
            for width in WIDTHS:
                for theme in THEMES:
                    context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)
                    visit = Visit(context.new_page(), path)
                    visit.expect(size <= PAGE_BYTES_MAX, f"the page has {size} bytes")
                    visit.layout()
                    try:
                        use(visit, name)
                    except Exception as error:  # A missing element is a fault of the page like any other.
                        visit.faults.append(f"{type(error).__name__}: {error}")
                    if arguments.screenshots:
                        arguments.screenshots.mkdir(parents=True, exist_ok=True)
                        visit.page.evaluate("scrollTo(0, 0)")
                        visit.page.screenshot(path=arguments.screenshots / f"{name}-{width}-{theme}.png", full_page=True)
                    print(f"{name:<10} {width:>5} {theme:<6} {size:>8} bytes  {'; '.join(visit.faults) or 'ok'}", flush=True)
                    failed += bool(visit.faults)
                    context.close()
        browser.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
