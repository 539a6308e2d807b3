// Draws the passes of one step under one strategy: a row for each stage of each rank.

const ROW_HEIGHT = [14, 24];
const ROWS_HEIGHT = 300;
const AXIS_HEIGHT = 34;
const TOP_HEIGHT = 20;
const PASSES = ["forward", "backward", "backward, input", "backward, weights"];
const TABLE_ROWS_MAX = 500;

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

/** A timeline: `scale` multiplies its times, `rows` are those shown, `onPick` gets the bar that is chosen. */
class TimelineChart {
  constructor({ name, basis, study, timeline, rows, scale, view, onPick }) {
    Object.assign(this, { name, basis, study, timeline, rows, scale, view, onPick });
    this.picked = null;
    this.hovered = null;
    this.plot = h("div", {
      class: "plot", tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": `Timeline, ${name}, ${basis}: ${plural(rows.length, "stage")}, ends after ${formatNs(this.endNs)}. ` +
        "Arrow keys go from pass to pass, plus and minus zoom, brackets move, Home shows all.",
      onkeydown: (event) => this.key(event), onfocus: () => this.focus(), onblur: () => this.draw(),
    });
    this.tip = h("div", { class: "tip", role: "presentation" });
    this.plot.append(this.tip);
    onWidth(this.plot, (width) => this.resize(width));
    onTheme(() => this.draw());
    this.view.onChange(() => this.u?.setScale("x", { min: this.view.seen[0], max: this.view.seen[1] }));
  }

  get endNs() {
    return this.timeline.makespan_ns * this.scale;
  }

  start(bar) {
    return bar[0] * this.scale;
  }

  end(bar) {
    return (bar[0] + bar[1]) * this.scale;
  }

  get rowHeight() {
    const [least, most] = ROW_HEIGHT;
    return Math.min(Math.max(Math.floor(ROWS_HEIGHT / this.rows.length), least), most);
  }

  get height() {
    return this.rows.length * this.rowHeight + AXIS_HEIGHT + TOP_HEIGHT;
  }

  resize(width) {
    if (this.u) {
      this.u.setSize({ width, height: this.height });
      return;
    }
    const isNarrow = width < 560;
    const label = (row) => (isNarrow ? row.label.replace("rank ", "r") : row.label);
    const longest = Math.max(...this.rows.map((row) => label(row).length));
    const options = {
      width, height: this.height, padding: [TOP_HEIGHT, 8, 0, 0],
      legend: { show: false },
      cursor: { x: true, y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: zoomedScale(this.view), y: { auto: false, range: [0, this.rows.length], dir: -1 } },
      axes: [
        { font: `11px ${FONT}`, stroke: () => color("soft"), size: AXIS_HEIGHT, gap: 4, space: 70,
          grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false },
          values: (_, splits) => timeTicks(splits) },
        { font: `11px ${FONT}`, stroke: () => color("soft"), grid: { show: false }, ticks: { show: false },
          size: Math.min(longest * 6.2 + 14, isNarrow ? 100 : 180), gap: 6,
          splits: () => this.rows.map((_, place) => place + 0.5), values: () => this.rows.map(label) },
      ],
      series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
      hooks: { draw: [(u) => this.paint(u)], setCursor: [(u) => this.hover(u)], ...zoomHooks(this.view) },
    };
    this.u = new uPlot(options, [this.view.full, [null, null]], this.plot);
    zoomByPointer(this.u, this.view);
    this.u.over.addEventListener("click", () => this.hovered && this.pick(this.hovered));
    this.u.over.addEventListener("dblclick", () => this.view.reset());
    this.u.over.addEventListener("mouseleave", () => { this.hovered = null; this.tip.hidden = true; });
    this.tip.hidden = true;
  }

  draw() {
    this.u?.redraw(false, true);
  }

  /** Paints bars, ends and the chosen bar; all lengths are device pixels. */
  paint(u) {
    const { ctx } = u;
    const ratio = uPlot.pxRatio;
    const { left, top, width, height } = u.bbox;
    const x = (ns) => u.valToPos(ns, "x", true);
    const row = (place) => u.valToPos(place, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, 0, width, top + height);
    ctx.clip();
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    const [from, until] = this.view.seen;
    const end = x(this.endNs);
    for (let place = 0; place < this.rows.length; place += 1) {
      const y = row(place) + ratio;
      const tall = row(place + 1) - row(place) - 2 * ratio;
      ctx.fillStyle = color("idle");
      ctx.fillRect(left, y, Math.max(Math.min(end, left + width) - left, 0), tall);
      if (place > 0 && this.rows[place].rank !== this.rows[place - 1].rank) {
        ctx.fillStyle = color("line");
        ctx.fillRect(left, row(place) - ratio / 2, width, ratio);
      }
      const own = this.rows[place];
      for (const bar of own.bars) {
        if (this.end(bar) < from || this.start(bar) > until) continue;
        this.paintBar(ctx, bar, own, [x(this.start(bar)), x(this.end(bar))], y, tall, ratio);
      }
    }
    for (const [choice, line] of [[this.hovered, 1.5], [this.picked, 2.5]]) {
      if (!choice) continue;
      const y = row(choice.place) + ratio;
      const [a, b] = [x(this.start(choice.bar)), x(this.end(choice.bar))];
      ctx.strokeStyle = color("ink");
      ctx.lineWidth = line * ratio;
      ctx.strokeRect(a, y, Math.max(b - a, ratio), row(choice.place + 1) - row(choice.place) - 2 * ratio);
    }
    this.paintEnd(ctx, end, { left, top, width, height }, ratio);
    ctx.restore();
  }

  paintBar(ctx, bar, row, [start, end], y, tall, ratio) {
    const shade = bar[2] === 0 ? "f" : "b";
    const wide = Math.max(end - start - 0.5 * ratio, ratio);
    ctx.globalAlpha = bar[2] === 3 ? 0.7 : 1;
    ctx.fillStyle = moduleColor(shade, row.module);
    ctx.fillRect(start, y, wide, tall);
    ctx.globalAlpha = 1;
    const text = String(bar[3]);
    if (wide > (text.length * 7 + 4) * ratio && tall >= 11 * ratio) {
      ctx.font = `${10 * ratio}px ${FONT}`;
      ctx.fillStyle = color(shade === "f" ? "on-f" : "on-b");
      ctx.fillText(text, start + wide / 2, y + tall / 2 + ratio * 0.5);
    }
  }

  paintEnd(ctx, end, { left, top, width, height }, ratio) {
    if (end > left + width + ratio) return;
    ctx.fillStyle = color("end");
    ctx.fillRect(end - ratio, top - 4 * ratio, 2 * ratio, height + 4 * ratio);
    ctx.font = `bold ${12 * ratio}px ${FONT}`;
    const isRight = end > left + width / 2;
    ctx.textAlign = isRight ? "right" : "left";
    ctx.fillText(formatNs(this.endNs), end + (isRight ? -5 : 5) * ratio, top - 11 * ratio);
  }

  hover(u) {
    const { left, top } = u.cursor;
    const before = this.hovered;
    this.hovered = left >= 0 && top >= 0 ? this.at(u.posToVal(left, "x"), u.posToVal(top, "y")) : null;
    if (this.hovered?.bar !== before?.bar) this.draw();
    this.tip.hidden = !this.hovered;
    u.over.style.cursor = this.hovered ? "pointer" : "crosshair";
    if (!this.hovered) return;
    this.tip.replaceChildren(...this.describe(this.hovered).map((line) => h("div", {}, line)));
    const edge = u.over.clientWidth + u.over.offsetLeft;
    const x = left + u.over.offsetLeft;
    const isRight = x > edge / 2;
    this.tip.style.left = isRight ? "auto" : `${x + 14}px`;
    this.tip.style.right = isRight ? `${this.plot.clientWidth - x + 14}px` : "auto";
    this.tip.style.top = `${top + TOP_HEIGHT + 12}px`;
  }

  /** Returns the bar at a time in a row, or the next one within three pixels. */
  at(time, place) {
    const row = this.rows[Math.floor(place)];
    const near = Math.abs(this.u.posToVal(3, "x") - this.u.posToVal(0, "x"));
    const bar = row?.bars.find((own) => time >= this.start(own) - near && time <= this.end(own) + near
      && (time <= this.end(own) || !row.bars.some((other) => other !== own && time >= this.start(other) && time <= this.end(other))));
    return bar ? { bar, place: Math.floor(place) } : null;
  }

  describe({ bar, place }) {
    const row = this.rows[place];
    const [startNs, lengthNs, pass, microbatch, group] = bar;
    const samples = (this.timeline.groups[group]?.length ?? 0) + (this.timeline.unlisted?.[group] ?? 0);
    const lines = [
      `${row.label}: microbatch ${microbatch}, ${PASSES[pass]}`,
      `${formatNs(lengthNs * this.scale)}, from ${formatNs(startNs * this.scale)}`,
    ];
    if (samples > 0) lines.push(plural(samples, "sample"));
    return lines;
  }

  pick(choice, isShown = true) {
    this.picked = choice;
    this.draw();
    if (isShown) this.onPick(this, choice);
  }

  focus() {
    if (!this.picked && this.rows[0]?.bars.length) this.picked = { bar: this.sorted(0)[0], place: 0 };
    this.draw();
  }

  sorted(place) {
    return [...this.rows[place].bars].sort((a, b) => a[0] - b[0]);
  }

  key(event) {
    if (zoomByKey(event, this.view)) {
      event.preventDefault();
      return;
    }
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if ((event.key === "Enter" || event.key === " ") && this.picked) {
      event.preventDefault();
      this.pick(this.picked);
    } else if (move) {
      event.preventDefault();
      this.step(move);
    }
  }

  /** Goes to the next pass of the row, or to the pass at that time in the next row. */
  step([along, down]) {
    if (!this.picked) return;
    const { bar, place } = this.picked;
    const next = Math.min(Math.max(place + down, 0), this.rows.length - 1);
    const bars = this.sorted(next);
    if (bars.length === 0) return;
    let target = bar;
    if (along) target = bars[Math.min(Math.max(bars.indexOf(bar) + along, 0), bars.length - 1)];
    else target = bars.reduce((best, other) => (Math.abs(other[0] - bar[0]) < Math.abs(best[0] - bar[0]) ? other : best));
    this.view.reveal(this.start(target), this.end(target));
    this.pick({ bar: target, place: next });
  }

  /** All passes as a table, made when it is opened. */
  table() {
    const details = h("details", { class: "table", ontoggle: () => {
      if (details.open && details.children.length === 1) details.append(this.rowsTable());
    } }, h("summary", {}, `Passes as a table, ${this.name}`));
    return details;
  }

  rowsTable() {
    const all = this.rows.flatMap((row) => row.bars.map((bar) => ({ row, bar }))).sort((a, b) => a.bar[0] - b.bar[0]);
    const cells = all.slice(0, TABLE_ROWS_MAX).map(({ row, bar }) => [
      row.label, String(bar[3]), PASSES[bar[2]], formatNs(this.start(bar)), formatNs(bar[1] * this.scale),
      (this.timeline.groups[bar[4]] ?? []).map((sample) => this.study.samples[sample]?.key).slice(0, 4).join(", "),
    ]);
    const head = ["Stage", "Microbatch", "Pass", "Start", "Length", "Samples"];
    const note = all.length > TABLE_ROWS_MAX && h("p", { class: "facts" }, `The first ${TABLE_ROWS_MAX} of ${formatCount(all.length)}.`);
    return h("div", {}, table(head, cells, `Passes, ${this.name}`), note);
  }
}

/** Labels times on an axis, all in one unit. */
const timeTicks = (splits) => {
  const step = splits.length > 1 ? Math.abs(splits[1] - splits[0]) / 1e9 : 1;
  const largest = Math.max(...splits.map(Math.abs)) / 1e9;
  const [size, name] = timeUnit(largest || step);
  const decimals = Math.min(Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)), 6);
  return splits.map((ns) => `${(ns / 1e9 / size).toFixed(decimals)} ${name}`);
};
