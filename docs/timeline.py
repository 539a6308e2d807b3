"""Draws docs/timeline.svg from the report of `dflop demo`: one step, data-blind and balanced.

    cargo run --release -- demo && python3 docs/timeline.py dflop-demo/report.html docs/timeline.svg

Takes the rank that ends last under each strategy. Uses the standard library only; the same report gives the same bytes.
"""

import html
import json
import re
import sys
from pathlib import Path

LEFT, WIDTH, ROW, GAP, PANEL = 92, 868, 21, 3, 46
STAGES = ["vision", "audio", "LLM 0", "LLM 1", "LLM 2", "LLM 3"]
NAMES = {
    "data-blind": "Data-blind: dealt round robin",
    "dflop": "Balanced: same samples, cut by predicted cost",
}
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1a2029 }
  .p { fill: #fff } .h { font-weight: 600; font-size: 14px } .s, .t { fill: #5a6572 } .n { font-size: 10px; fill: #16202c } .w { fill: #fff }
  .i { fill: #eceff3 } .g { stroke: #c3cad2; stroke-width: 1 } .e { stroke: #b3261e; stroke-width: 2 } .r { fill: #b3261e }
  .f0 { fill: #a9c9f5 } .b0 { fill: #2c69c4 } .f1 { fill: #9fdcc3 } .b1 { fill: #147a56 } .f2 { fill: #f6cf9f } .b2 { fill: #b85f0e }
  @media (prefers-color-scheme: dark) {
    .p { fill: #12151a } text { fill: #e6e9ee } .s, .t { fill: #9aa5b1 } .n { fill: #16202c } .w { fill: #fff }
    .i { fill: #262d36 } .g { stroke: #46505c } .e { stroke: #ff8a80 } .r { fill: #ff8a80 }
    .f0 { fill: #9cc2f7 } .b0 { fill: #3f7fdd } .f1 { fill: #8fd8ba } .b1 { fill: #1f8f67 } .f2 { fill: #f5c78e } .b2 { fill: #c56a17 }
  }
"""


def study(report: str) -> dict:
    """Returns the first study of the report: the simulated steps of the demo."""
    documents = re.search(r'<script type="application/json" id="reports">(.*?)</script>', report, re.S)
    return json.loads(documents[1])[0]["studies"][0]


def panels(found: dict, percent: float) -> dict[str, dict[int, list[tuple[str, int, float, float, int]]]]:
    """Returns (pass and module, row, start, width, microbatch) of every pass, by strategy and rank; x in percent of the plot.

    `percent` is that of a nanosecond.
    """
    result = {}
    for timeline in found["steps"][0]["timelines"]:
        name = found["strategies"][timeline["strategy"]]["name"]
        ranks: dict[int, list[tuple[str, int, float, float, int]]] = {}
        rows: dict[int, int] = {}
        for row in timeline["rows"]:
            rank = row["rank"]
            place = rows[rank] = rows.get(rank, -1) + 1
            for start, length, kind, microbatch, _ in row["bars"]:
                color = f"{'b' if kind else 'f'}{row['module']}"
                ranks.setdefault(rank, []).append((color, place, start * percent, length * percent, microbatch))
        if name in NAMES:
            result[name] = ranks
    return result


def draw(report: str) -> str:
    """Returns the drawing."""
    found = study(report)
    longest = max(timeline["makespan_ns"] for timeline in found["steps"][0]["timelines"])
    percent = 99.6 / longest
    second = percent * 1e9
    idle = {strategy["name"]: f"{strategy['bubble_fraction'] * 100:.1f} %" for strategy in found["strategies"]}
    ends = {}
    lines = []
    y = 30
    for name, ranks in panels(found, percent).items():
        rank = max(ranks, key=lambda rank: max(x + width for _, _, x, width, _ in ranks[rank]))
        end = max(x + width for _, _, x, width, _ in ranks[rank])
        ends[name] = end / second
        title = f"{NAMES[name]}"
        lines.append(f'<text class="h" x="{LEFT}" y="{y}">{html.escape(title)}</text>')
        note = f"this step {end / second:.2f} s; stages idle {idle[name]} of all steps"
        lines.append(f'<text class="s" x="{LEFT + WIDTH}" y="{y}" text-anchor="end">{note}</text>')
        y += 9
        scale = WIDTH / 100
        for row, stage in enumerate(STAGES):
            top = y + row * (ROW + GAP)
            lines.append(f'<text class="s" x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{stage}</text>')
            lines.append(f'<rect class="i" x="{LEFT}" y="{top}" width="{end * scale:.1f}" height="{ROW}"/>')
        for color, row, x, width, microbatch in ranks[rank]:
            top, left, wide = y + row * (ROW + GAP), LEFT + x * scale, width * scale
            lines.append(
                f'<rect class="{color}" x="{left:.1f}" y="{top}" width="{max(wide - 0.6, 0.4):.1f}" height="{ROW}"/>'
            )
            if wide > 9:
                ink = "n w" if color[0] == "b" else "n"
                lines.append(
                    f'<text class="{ink}" x="{left + wide / 2:.1f}" y="{top + 14.5}" text-anchor="middle">{microbatch}</text>'
                )
        bottom = y + len(STAGES) * (ROW + GAP)
        at = LEFT + end * scale
        lines.append(f'<line class="e" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{bottom}"/>')
        y = bottom + PANEL - 16
    axis = y - PANEL + 24
    for tick in range(int(100 / second) + 1):
        x = LEFT + tick * second * WIDTH / 100
        lines.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{axis - 6}" y2="{axis}"/>')
        lines.append(f'<text class="t" x="{x:.1f}" y="{axis + 15}" text-anchor="middle">{tick} s</text>')
    y = axis + 42
    x = LEFT
    for name, number in [("vision encoder", 0), ("audio encoder", 1), ("LLM stages", 2)]:
        lines.append(f'<rect class="f{number}" x="{x}" y="{y - 11}" width="12" height="13"/>')
        lines.append(f'<rect class="b{number}" x="{x + 13}" y="{y - 11}" width="12" height="13"/>')
        lines.append(f'<text class="s" x="{x + 31}" y="{y}">{name}</text>')
        x += 31 + 7 * len(name) + 26
    lines.append(f'<text class="s" x="{x}" y="{y}">light: forward, dark: backward, number: microbatch</text>')
    described = "; ".join(f"{NAMES[name]}, {seconds:.2f} s" for name, seconds in ends.items())
    height = y + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img" '
        f'aria-labelledby="title desc">\n<title id="title">One training step, data-blind and balanced</title>\n'
        f'<desc id="desc">Simulated 1F1B timelines of the slowest rank of the demo. {html.escape(described)}.</desc>\n'
        f'<style>{STYLE}</style>\n<rect class="p" width="100%" height="100%" rx="8"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(source.read_text(encoding="utf-8")), encoding="utf-8")
