"""Draws the figures as SVG that follows the theme of the system and is legible on a phone."""

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Light and dark value of each color; drawings are made with light values, which variables then replace.
COLORS = {
    "ink": ("#1a2029", "#e6e9ee"),
    "soft": ("#5a6572", "#9aa5b1"),
    "grid": ("#d9dee4", "#343c46"),
    "page": ("#fefefe", "#12151a"),
    "blue": ("#2c69c4", "#7fb0f5"),
    "orange": ("#b85f0e", "#f0a35c"),
    "green": ("#147a56", "#5cc79d"),
    "violet": ("#7b4fb0", "#b995ea"),
    "red": ("#b3261e", "#ff9d94"),
    "gray": ("#5f6b79", "#a3aebb"),
}
LIGHT = {name: light for name, (light, _) in COLORS.items()}
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
WIDTH_INCHES = 6.2
# Letters of the labels in a row of the legend.
LEGEND_LETTERS = 47


class Series(NamedTuple):
    """Values of a method, by position; `None` where the method has no plan. Marks are open or filled."""

    name: str
    color: str
    marker: str
    values: list[float | None]
    is_open: bool = False


def _begin(height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    pyplot.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "dflop",
            "font.family": "DejaVu Sans",
            "font.size": 12.5,
            "text.color": LIGHT["ink"],
            "axes.labelcolor": LIGHT["ink"],
            "axes.edgecolor": LIGHT["soft"],
            "axes.facecolor": LIGHT["page"],
            "figure.facecolor": LIGHT["page"],
            "xtick.color": LIGHT["ink"],
            "ytick.color": LIGHT["ink"],
            "grid.color": LIGHT["grid"],
        }
    )
    figure, axes = pyplot.subplots(
        panels, 1, figsize=(WIDTH_INCHES, height), squeeze=False, layout="constrained"
    )
    for one in axes[:, 0]:
        one.spines[["top", "right"]].set_visible(False)
        one.set_axisbelow(True)
    return figure, list(axes[:, 0])


def _end(figure: Figure, path: Path, described: str) -> None:
    """Adds the legend below, writes the file, and gives colors and fonts to the style sheet."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=_legend_columns(labels),
        frameon=False,
        handletextpad=0.4,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.get_layout_engine().set(w_pad=0.1)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    path.write_text(themed(path.read_text(encoding="utf-8"), described), encoding="utf-8")


def _legend_columns(labels: list[str]) -> int:
    """Returns 3 if the legend is as narrow as the drawing, which has columns filled from the top, else 2."""
    rows = -(-len(labels) // 3)
    widest = sum(
        max(len(label) for label in labels[start : start + rows]) for start in range(0, len(labels), rows)
    )
    return 3 if widest <= LEGEND_LETTERS else 2


def themed(drawing: str, described: str) -> str:
    """Replaces the colors by variables with a value for each theme, and adds a description."""
    for name, (light, _) in COLORS.items():
        drawing = drawing.replace(light, f"var(--{name})")
    # Names only: sizes stay where they are.
    drawing = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font-size: \1px", drawing)
    drawing = re.sub(r"font-family: [^;\"]*;? ?", "", drawing)
    drawing = re.sub(r" *<metadata>.*?</metadata>\n", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"[ \t]+\n", "\n", drawing)
    light, dark = ("; ".join(f"--{name}: {pair[at]}" for name, pair in COLORS.items()) for at in (0, 1))
    style = (
        f"<title>{described}</title>\n<style>\n  :root {{ {light} }}\n  text {{ font-family: {FONTS} }}\n"
        f"  @media (prefers-color-scheme: dark) {{\n    :root {{ {dark} }}\n  }}\n</style>\n"
    )
    start = drawing.index(">", drawing.index("<svg")) + 1
    return drawing[:start].replace("<svg", '<svg role="img"', 1) + "\n" + style + drawing[start:].lstrip("\n")


def dots(
    path: Path, labels: list[str], series: list[Series], axis: str, limits: tuple[float, float | None]
) -> None:
    """Draws a row for each label, with a mark for each series."""
    figure, [axes] = _begin(1.25 + 0.42 * len(labels))
    rows = range(len(labels))
    for one in series:
        pairs = [(value, row) for row, value in zip(rows, one.values, strict=True) if value is not None]
        axes.scatter(
            [value for value, _ in pairs],
            [row for _, row in pairs],
            s=64,
            facecolor=LIGHT["page" if one.is_open else one.color],
            edgecolor=LIGHT[one.color],
            linewidth=1.5,
            marker=one.marker,
            label=one.name,
            zorder=3,
        )
    axes.set_yticks(list(rows), labels)
    axes.tick_params(length=0)
    axes.invert_yaxis()
    most = max(value for one in series for value in one.values if value is not None)
    axes.set_xlim(limits[0], 1.05 * most if limits[1] is None else limits[1])
    axes.set_xlabel(axis)
    axes.grid(axis="both")
    _end(figure, path, _described(axis, labels, series))


def lines(
    path: Path,
    positions: list[int],
    series: list[Series],
    axes_names: tuple[str, str],
    *,
    starts_at_zero: bool = True,
) -> None:
    """Draws a line for each series over positions on a logarithmic axis."""
    figure, [axes] = _begin(4.0)
    _lines(axes, positions, series, axes_names[1])
    axes.set_xlabel(axes_names[0])
    if starts_at_zero:
        axes.set_ylim(bottom=0)
    _end(figure, path, _described(axes_names[1], [str(one) for one in positions], series))


def two_panels(
    path: Path,
    positions: list[int],
    panels: list[tuple[str, list[Series]]],
    axis: str,
    floors: tuple[float, float],
) -> None:
    """Draws two panels with logarithmic axes, one below the other; values under a floor are drawn on it."""
    figure, all_axes = _begin(6.4, len(panels))
    for axes, (name, series), floor in zip(all_axes, panels, floors, strict=True):
        raised = [
            one._replace(values=[None if value is None else max(value, floor) for value in one.values])
            for one in series
        ]
        _lines(axes, positions, raised, name)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    all_axes[-1].set_xlabel(axis)
    described = "; ".join(
        _described(name, [str(one) for one in positions], series) for name, series in panels
    )
    _end(figure, path, described)


def _lines(axes: Axes, positions: list[int], series: list[Series], name: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(positions))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for one in series:
        pairs = [(at, value) for at, value in zip(positions, one.values, strict=True) if value is not None]
        axes.plot(
            [at for at, _ in pairs],
            [value for _, value in pairs],
            color=LIGHT[one.color],
            marker=one.marker,
            markersize=8,
            linewidth=2,
            label=one.name,
        )
    axes.set_ylabel(name)
    axes.grid()


def _described(axis: str, labels: list[str], series: list[Series]) -> str:
    """Returns the values of a drawing in words."""

    def values(one: Series) -> str:
        shown = ("none" if value is None else f"{value:.3g}" for value in one.values)
        return f"{one.name} {', '.join(shown)}"

    return f"{axis}, for {', '.join(labels)}: {'; '.join(values(one) for one in series)}"
