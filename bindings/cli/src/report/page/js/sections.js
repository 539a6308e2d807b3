// Shows the data profile, the parallelism plan, the origin of a report.

const profileSection = (profile) => {
  const { quantities, dearest, modules, times_median: times } = profile;
  const head = ["Quantity", "n", "Mean", "Min", "5 %", "25 %", "50 %", "75 %", "95 %", "99 %", "Max"];
  const cells = quantities.map((quantity) => [quantityLabel(quantity.name), formatCount(quantity.count),
    ...[quantity.mean, ...quantity.quantiles].map((value) => formatQuantity(quantity.name, value))]);
  const sampled = profile.profiled < profile.samples ? `${formatCount(profile.profiled)} of ` : "";
  const shown = section("Data profile", `Distributions over ${sampled}${plural(profile.samples, "sample")}. The line is the median.`,
    h("div", { class: "histograms" }, quantities.filter(({ range }) => range[1] > range[0]).map(histogram)),
    table(head, cells, "Quantiles"));
  const where = new Map(dearest.map((sample, place) => [sample, `${digits(times[place] ?? 0)} times the median cost`]));
  const samples = dearest.length > 0 && section("The most expensive samples", "What a batch that is cut without regard to cost waits for.",
    sampleList(dearest, modules, { compact: false, where: (sample) => where.get(sample) }));
  return [shown, samples].filter(Boolean);
};

const HISTOGRAM_HEIGHT = 130;

const histogram = ({ name, range, counts, quantiles, count }) => {
  const [min, max] = range;
  const wide = (max - min) / counts.length;
  const edges = counts.map((_, place) => min + place * wide);
  const chosen = h("output", {}, `median ${formatQuantity(name, quantiles[3])}`);
  const plot = h("div", { class: "plot", role: "img", "aria-label": `Histogram of ${quantityLabel(name)}, ${formatCount(count)} values; the table below has its quantiles.` });
  let u = null;
  onTheme(() => u?.redraw(false, true));
  const paint = (own) => {
    const { ctx } = own;
    const ratio = uPlot.pxRatio;
    const [x, y] = ["x", "y"].map((scale) => (value) => own.valToPos(value, scale, true));
    counts.forEach((value, place) => {
      ctx.fillStyle = color(own.cursor.idx === place ? "b2" : "b0");
      const top = value ? Math.min(y(value), y(0) - ratio) : y(0);
      ctx.fillRect(x(edges[place]) + ratio / 2, top, Math.max(x(edges[place] + wide) - x(edges[place]) - ratio, ratio), y(0) - top);
    });
    ctx.fillStyle = color("end");
    ctx.fillRect(x(quantiles[3]) - ratio * 0.75, own.bbox.top, 1.5 * ratio, own.bbox.height);
  };
  const hover = (own) => {
    const place = own.cursor.left >= 0 ? Math.floor((own.posToVal(own.cursor.left, "x") - min) / wide) : -1;
    const value = counts[place];
    chosen.textContent = value === undefined ? `median ${formatQuantity(name, quantiles[3])}`
      : `${formatQuantity(name, edges[place])} to ${formatQuantity(name, edges[place] + wide)}: ${formatCount(value)}`;
  };
  onWidth(plot, (width) => {
    if (u) {
      u.setSize({ width, height: HISTOGRAM_HEIGHT });
      return;
    }
    const axis = { font: `10px ${FONT}`, stroke: () => color("soft"), ticks: { show: false } };
    const ticks = name.endsWith("seconds") ? (_, splits) => timeTicks(splits.map((value) => value * 1e9))
      : (_, splits) => splits.map((value) => (Math.abs(value) >= 1000 ? `${+(value / 1000).toPrecision(3)}k` : String(+value.toPrecision(3))));
    u = new uPlot({
      width, height: HISTOGRAM_HEIGHT, padding: [8, 8, 0, 8], legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, auto: false, range: [min, max] }, y: { auto: false, range: [0, Math.max(...counts, 1)] } },
      axes: [{ ...axis, size: 24, gap: 3, space: 56, grid: { show: false }, values: ticks }, { show: false }],
      series: [{}, { stroke: "transparent", points: { show: false } }],
      hooks: { draw: [paint], setCursor: [hover] },
    }, [edges, counts.map(() => null)], plot);
  });
  return h("figure", { class: "histogram" }, h("figcaption", {}, h("b", {}, quantityLabel(name)), chosen), plot);
};

const planSection = (plan) => {
  const { winner, runner_up: next } = plan;
  const longest = Math.max(winner.step_seconds, next?.step_seconds ?? 0);
  const meter = (name, seconds, kind) => {
    const bar = h("i", { class: `meter ${kind}` });
    bar.style.width = `${(seconds / longest) * 100}%`;
    return h("li", {}, h("span", {}, name), h("span", { class: "track" }, bar), h("b", {}, formatSeconds(seconds)));
  };
  return section("Parallelism plan", `Bottleneck: ${plan.bottleneck}.`,
    h("ul", { class: "meters" }, meter("plan", winner.step_seconds, "simulated"),
      winner.step_seconds_p95 && meter("95 % of its steps", Math.min(winner.step_seconds_p95, longest), "soft"),
      next && meter("runner-up", next.step_seconds, "soft"), meter("lower bound", plan.lower_bound_seconds, "bound")),
    h("div", { class: "columns" }, planCard("The plan", winner, plan.memory_limit_gib),
      next && planCard("Runner-up", next, plan.memory_limit_gib, plan.reason)),
    h("p", { class: "facts" }, `Plans searched: ${plan.searched}. No plan of these takes less than ${formatSeconds(plan.lower_bound_seconds)}.`));
};

const planCard = (title, plan, limitGib, reason) => {
  const rows = plan.modules.map((module) => [module.name, module.tp, module.pp, module.dp, layerRuns(module.layers), memory(module.gib, limitGib)]
    .map((cell) => (typeof cell === "number" ? String(cell) : cell)));
  return h("div", { class: "plan" }, h("h3", {}, title, h("small", {}, formatSeconds(plan.step_seconds))),
    table(["Module", "TP", "PP", "DP", "Layers of stages", "Memory"], rows, title),
    h("p", { class: "facts" }, `${plural(plan.microbatches, "microbatch").replace("microbatchs", "microbatches")} per rank, ${plan.placement}`),
    reason && h("p", {}, reason));
};

/** Writes layers by runs of equal stages: `4×7` is four stages of seven layers. */
const layerRuns = (layers) => {
  const runs = [];
  layers.forEach((count) => {
    const last = runs[runs.length - 1];
    if (last?.[1] === count) last[0] += 1;
    else runs.push([1, count]);
  });
  return runs.map(([stages, count]) => `${stages}×${count}`).join(" ");
};

const memory = (gib, limitGib) => {
  if (gib === null || gib === undefined) return "–";
  const bar = h("i", { class: "meter simulated" });
  bar.style.width = `${Math.min(gib / limitGib, 1) * 100}%`;
  return h("span", { class: "memory" }, h("span", { class: "track" }, bar), `${gib.toFixed(1)} GiB`);
};

const originSection = ({ origin, notes }) => {
  const written = origin.written_unix_seconds ? new Date(origin.written_unix_seconds * 1000).toLocaleString() : "";
  const facts = [["Command", h("code", {}, origin.arguments.split(" ").flatMap((word) => [h("span", {}, word), " "]))], ["dflop", origin.version], ["Written", written],
    ["Machine", [origin.processor, plural(origin.cores, "core"), origin.memory_bytes && formatBytes(origin.memory_bytes), origin.system]
      .filter(Boolean).join(", ")]];
  return section("Notes and origin", "", notes.length > 0 && h("ul", { class: "notes" }, notes.map((note) => h("li", {}, note))),
    factList(facts.map(([label, value]) => ({ label, value }))));
};

const factList = (facts) =>
  h("dl", { class: "summary" }, facts.map(({ label, value }) => h("div", {}, h("dt", {}, label), h("dd", {}, value))));
