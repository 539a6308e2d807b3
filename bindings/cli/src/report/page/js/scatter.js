// Draws predictions beside measurements: a dot each, with the interval of the prediction, on logarithmic axes.

const SCATTER_HEIGHT = 340;
const DOT_RADIUS = 3.2;

const accuracySection = (accuracy) => {
  const { rows, points, count, modules, scale } = accuracy;
  const cells = rows.map((row) => [row.name, formatCount(row.count),
    ...[row.bias, row.mean, row.p50, row.p95, row.max].map(formatPercent)]);
  const facts = [
    `${formatPercent(accuracy.within_interval)} of the measurements are inside the intervals`,
    scale !== 1 && `predictions scaled × ${digits(scale)}`,
    points.length < count && `${formatCount(points.length)} of ${formatCount(count)} points are drawn`,
  ];
  const chart = points.length > 0 && new ScatterChart(accuracy);
  return section("Predictions beside measurements", accuracy.about,
    h("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    chart && h("figure", { class: "chart" },
      h("div", { class: "controls" }, legend(modules, [["b", ""]]), zoomButtons(chart.view, "predictions")), chart.plot, chart.chosen),
    table(["Part", "Points", "Bias", "Mean", "Median", "95 %", "Largest"], cells, "Errors of predictions"));
};

class ScatterChart {
  constructor({ points, scale, modules }) {
    this.modules = modules;
    const log = (ns) => Math.log10(Math.max(ns, 1));
    this.dots = points.map((point) => {
      const predicted = point.predicted_ns * scale;
      return {
        point, predicted, x: log(predicted), y: log(point.measured_ns),
        low: log(Math.max(predicted - point.interval_ns, predicted / 100)), high: log(predicted + point.interval_ns),
      };
    }).sort((a, b) => a.x - b.x);
    const xs = this.dots.map(({ x }) => x);
    const ys = this.dots.map(({ y }) => y);
    this.view = new Viewport(Math.min(...xs) - 0.15, Math.max(...xs) + 0.15);
    this.ys = [Math.min(...ys) - 0.15, Math.max(...ys) + 0.15];
    this.picked = null;
    this.chosen = h("p", { class: "chosen", "aria-live": "polite" }, "Choose a dot, or use the arrow keys.");
    this.plot = h("div", {
      class: "plot", tabindex: "0", role: "application", "aria-roledescription": "scatter plot",
      "aria-label": `Predicted and measured times of ${plural(points.length, "point")}. Arrow keys go from point to point, plus and minus zoom.`,
      onkeydown: (event) => this.key(event), onfocus: () => this.draw(), onblur: () => this.draw(),
    });
    onWidth(this.plot, (width) => this.resize(width));
    onTheme(() => this.draw());
  }

  resize(width) {
    if (this.u) {
      this.u.setSize({ width, height: SCATTER_HEIGHT });
      return;
    }
    const axis = (label) => ({
      label, labelFont: `12px ${FONT}`, labelSize: 20, font: `11px ${FONT}`, stroke: () => color("soft"), ticks: { show: false },
      grid: { stroke: () => color("grid"), width: 1 }, space: 60, values: (_, splits) => splits.map((power) => formatNs(10 ** power)),
    });
    this.u = new uPlot({
      width, height: SCATTER_HEIGHT, padding: [10, 12, 0, 0], legend: { show: false },
      cursor: { points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: zoomedScale(this.view), y: { auto: false, range: this.ys } },
      axes: [axis("predicted"), { ...axis("measured"), size: 62 }],
      series: [{}, { stroke: "transparent", points: { show: false } }],
      hooks: { draw: [(u) => this.paint(u)], setCursor: [(u) => this.hover(u)], ...zoomHooks(this.view) },
    }, [this.view.full, [null, null]], this.plot);
    follow(this.u, this.view);
    zoomByPointer(this.u, this.view);
    this.u.over.addEventListener("click", () => this.hovered && this.pick(this.hovered));
    this.u.over.addEventListener("dblclick", () => this.view.reset());
  }

  draw() {
    this.u?.redraw(false, true);
  }

  paint(u) {
    const { ctx } = u;
    const ratio = uPlot.pxRatio;
    const { left, top, width, height } = u.bbox;
    const [x, y] = ["x", "y"].map((scale) => (value) => u.valToPos(value, scale, true));
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.strokeStyle = color("soft");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath();
    const ends = [Math.min(this.view.full[0], this.ys[0]), Math.max(this.view.full[1], this.ys[1])];
    ctx.moveTo(x(ends[0]), y(ends[0]));
    ctx.lineTo(x(ends[1]), y(ends[1]));
    ctx.stroke();
    ctx.setLineDash([]);
    for (const dot of this.dots) {
      const shade = dot.point.is_extrapolated ? color("end") : moduleColor("b", dot.point.module);
      ctx.globalAlpha = 0.25;
      ctx.fillStyle = shade;
      ctx.fillRect(x(dot.low), y(dot.y) - 0.75 * ratio, Math.max(x(dot.high) - x(dot.low), 1), 1.5 * ratio);
      ctx.globalAlpha = 0.65;
      ctx.beginPath();
      ctx.arc(x(dot.x), y(dot.y), DOT_RADIUS * ratio, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.globalAlpha = 1;
    for (const dot of [this.hovered, this.picked]) {
      if (!dot) continue;
      ctx.strokeStyle = color("ink");
      ctx.lineWidth = 2 * ratio;
      ctx.beginPath();
      ctx.arc(x(dot.x), y(dot.y), (DOT_RADIUS + 2) * ratio, 0, 2 * Math.PI);
      ctx.stroke();
    }
    ctx.restore();
  }

  hover(u) {
    const { left, top } = u.cursor;
    let [best, distance] = [null, 14];
    for (const dot of left >= 0 ? this.dots : []) {
      const away = Math.hypot(u.valToPos(dot.x, "x") - left, u.valToPos(dot.y, "y") - top);
      if (away < distance) [best, distance] = [dot, away];
    }
    if (best !== this.hovered) {
      this.hovered = best;
      if (best) this.describe(best);
      this.draw();
    }
  }

  describe({ point, predicted }) {
    const error = formatPercent(predicted / Math.max(point.measured_ns, 1) - 1);
    const beyond = point.is_extrapolated ? " · outside the measured shapes" : "";
    this.chosen.textContent = `${this.modules[point.module] ?? ""} · ${point.label}: ${formatNs(predicted)} ± ${formatNs(point.interval_ns)} ` +
      `predicted, ${formatNs(point.measured_ns)} measured, ${error} off${beyond}`;
  }

  pick(dot) {
    this.picked = dot;
    this.describe(dot);
    this.draw();
  }

  key(event) {
    if (zoomByKey(event, this.view)) {
      event.preventDefault();
      return;
    }
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const place = this.picked ? this.dots.indexOf(this.picked) + by : 0;
    const dot = this.dots[Math.min(Math.max(place, 0), this.dots.length - 1)];
    this.view.reveal(dot.x, dot.x);
    this.pick(dot);
  }
}
