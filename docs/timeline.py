"""Draws docs/timeline.svg from the report of `dflop demo`: one step of all ranks, data-blind and balanced.

    cargo run --release -- demo && python3 docs/timeline.py dflop-demo/report.html docs/timeline.svg

Every rank is a band with a line for each pipeline stage; after its last pass a rank waits for the others.
Uses the standard library only; the same report gives the same bytes.
"""

import html
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

LEFT, WIDTH, RIGHT = 74, 846, 20
# Heights in pixels: a line of a stage, the gap below a rank, a panel's title, the gap below a panel.
LINE, GAP, TITLE, PANEL_GAP = 5.5, 7, 26, 14
NAMES = {
    "data-blind": ("Data-blind", "samples are dealt round robin"),
    "dflop": ("Balanced by dflop", "the same samples, cut by predicted cost"),
}
MODULES = ["vision encoder", "audio encoder", "LLM"]
STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1a2029 }
  .p { fill: #fff } .h, .e { font-weight: 600; font-size: 16px } .s { fill: #5a6572 }
  .i { fill: #eceff3 } .w { fill: #fbe3e0 } .x { fill: #b3261e; font-size: 12.5px }
  .l { stroke: #1a2029; stroke-width: 2 }
  .f0 { fill: #8fb8f2 } .f1 { fill: #8fd6b8 } .f2 { fill: #f2bd78 }
  .b0 { fill: #2c69c4 } .b1 { fill: #147a56 } .b2 { fill: #b85f0e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ee } .p { fill: #12151a } .s { fill: #9aa5b1 }
    .i { fill: #262d36 } .w { fill: #4a2422 } .x { fill: #ff9d94 } .l { stroke: #e6e9ee }
    .f0 { fill: #9cc2f7 } .f1 { fill: #8fd8ba } .f2 { fill: #f5c78e }
    .b0 { fill: #3f7fdd } .b1 { fill: #1f8f67 } .b2 { fill: #c56a17 }
  }
"""


class Pass(NamedTuple):
    """A pass of a stage; times in seconds."""

    stage: int
    module: int
    is_backward: bool
    start: float
    seconds: float


def study(report: str) -> dict:
    """Returns the first study of the report: the simulated steps of the demo."""
    documents = re.search(r'<script type="application/json" id="reports">(.*?)</script>', report, re.S)
    return json.loads(documents[1])[0]["studies"][0]


def passes(timeline: dict) -> dict[int, list[Pass]]:
    """Returns the passes of a step by rank; stages are counted within their rank."""
    ranks: dict[int, list[Pass]] = {}
    stages: dict[int, int] = {}
    for row in timeline["rows"]:
        stage = stages[row["rank"]] = stages.get(row["rank"], -1) + 1
        for start, length, kind, _, _ in row["bars"]:
            one = Pass(stage, row["module"], bool(kind), start / 1e9, length / 1e9)
            ranks.setdefault(row["rank"], []).append(one)
    return ranks


def end_of(one_rank: list[Pass]) -> float:
    """Returns the time at which a rank has finished, in seconds."""
    return max(one.start + one.seconds for one in one_rank)


def band(rank: int, one_rank: list[Pass], last: float, top: float, scale: float) -> list[str]:
    """Draws a rank: its name, a line for each stage, and the time that it waits for the last rank."""
    stages = 1 + max(one.stage for one in one_rank)
    height, end = stages * LINE, end_of(one_rank)
    middle = top + height / 2 + 5
    lines = [f'<text class="s" x="{LEFT - 10}" y="{middle:.1f}" text-anchor="end">rank {rank}</text>']
    lines.append(
        f'<rect class="i" x="{LEFT}" y="{top:.1f}" width="{end * scale:.1f}" height="{height - 1:.1f}"/>'
    )
    for one in sorted(one_rank):
        left, width = LEFT + one.start * scale, max(one.seconds * scale - 0.5, 0.5)
        kind, y = "fb"[one.is_backward], top + one.stage * LINE
        size = f'x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LINE - 1}"'
        lines.append(f'<rect class="{kind}{one.module}" {size}/>')
    waits = (last - end) * scale
    if waits > 2:
        left = LEFT + end * scale
        lines.append(
            f'<rect class="w" x="{left:.1f}" y="{top:.1f}" width="{waits:.1f}" height="{height - 1:.1f}"/>'
        )
        if waits > 80:
            x = left + waits / 2
            place = f'x="{x:.1f}" y="{middle:.1f}" text-anchor="middle"'
            lines.append(f'<text class="x" {place}>waits {last - end:.2f} s</text>')
    return lines


def panel(name: str, ranks: dict[int, list[Pass]], top: float, scale: float) -> tuple[list[str], float]:
    """Draws the step of a strategy; returns the lines and the y below them."""
    title, about = NAMES[name]
    last = max(map(end_of, ranks.values()))
    lines = [
        f'<text x="{LEFT}" y="{top + 14:.1f}"><tspan class="h">{html.escape(title)}</tspan>'
        f'<tspan class="s" dx="10">{html.escape(about)}</tspan></text>'
    ]
    y = first = top + TITLE
    for rank, one_rank in sorted(ranks.items()):
        lines += band(rank, one_rank, last, y, scale)
        y += LINE * (1 + max(one.stage for one in one_rank)) + GAP
    x = LEFT + last * scale
    lines.append(f'<line class="l" x1="{x:.1f}" x2="{x:.1f}" y1="{first - 4:.1f}" y2="{y - GAP + 3:.1f}"/>')
    # The time stands beside the line where there is room, else above it.
    place = (
        f'x="{x + 10:.1f}" y="{(first + y) / 2:.1f}"'
        if x < LEFT + WIDTH - 150
        else f'x="{x:.1f}" y="{top + 14:.1f}" text-anchor="end"'
    )
    lines.append(f'<text class="e" {place}>{last:.2f} s a step</text>')
    return lines, y + PANEL_GAP


def draw(report: str) -> str:
    """Returns the drawing."""
    found = study(report)
    names = [strategy["name"] for strategy in found["strategies"]]
    steps = {names[timeline["strategy"]]: passes(timeline) for timeline in found["steps"][0]["timelines"]}
    steps = {name: steps[name] for name in NAMES}
    ends = {name: max(map(end_of, ranks.values())) for name, ranks in steps.items()}
    scale = WIDTH / max(ends.values())
    lines: list[str] = []
    y = 16.0
    for name, ranks in steps.items():
        drawn, y = panel(name, ranks, y, scale)
        lines += drawn
    y += 8
    x = float(LEFT)
    for module, name in enumerate(MODULES):
        lines += [
            f'<rect class="{kind}{module}" x="{x + 13 * place:.1f}" y="{y - 11:.1f}" width="12" height="12"/>'
            for place, kind in enumerate("fb")
        ]
        lines.append(f'<text class="s" x="{x + 32:.1f}" y="{y:.1f}">{name}</text>')
        x += 32 + 7.4 * len(name) + 24
    lines.append(f'<text class="s" x="{x:.1f}" y="{y:.1f}">light: forward, dark: backward</text>')
    described = "; ".join(f"{NAMES[name][0]}: {seconds:.2f} s" for name, seconds in ends.items())
    size = f"0 0 {LEFT + WIDTH + RIGHT} {y + 16:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-labelledby="title desc">\n'
        '<title id="title">One training step of four ranks, data-blind and balanced</title>\n'
        f'<desc id="desc">Simulated 1F1B timelines of a step of the demo. {html.escape(described)}.</desc>\n'
        f'<style>{STYLE}</style>\n<rect class="p" width="100%" height="100%" rx="8"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(source.read_text(encoding="utf-8")), encoding="utf-8")
