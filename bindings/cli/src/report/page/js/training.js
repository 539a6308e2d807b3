// Draws the steps of a training run: times, loss, throughput, on one axis with one cursor.

const trainingSection = (training) => {
  const { steps } = training;
  const view = new Viewport(steps[0].step, steps[steps.length - 1].step);
  const sync = `training-${sections.length}`;
  // A run records what its writer knows: other values are missing.
  const has = (name) => steps.some((step) => isKnown(figure(step, name)));
  const of = (name, factor = 1) => steps.map((step) => (isKnown(figure(step, name)) ? figure(step, name) * factor : null));
  const mean = (name) => of(name).filter(isKnown).reduce((sum, value) => sum + value, 0) / steps.length;
  const ratio = mean("predicted_seconds") > 0 ? mean("pipeline_seconds") / mean("predicted_seconds") : 1;
  // A stated rate weighs steps against each other; its seconds are those of another machine.
  const isScaled = ratio > 1.5 || ratio < 0.67;
  const predicted = isScaled ? `passes, predicted × ${digits(ratio)}` : "passes, predicted";
  const series = (list) => list.filter(([, name]) => has(name))
    .map(([label, name, shade, dash, factor]) => [label, of(name, factor), shade, dash, name === EVALUATION]);
  const charts = [
    ["Time of a step", formatSeconds, series([
      ["whole step", "seconds", "b0"], ["passes, measured", "pipeline_seconds", "b1"],
      ["passes, replayed without other load", "replayed_seconds", "b3"],
      [predicted, "predicted_seconds", "b2", [6, 4], isScaled ? ratio : 1],
      ["waiting for data", "data_wait_seconds", "soft"],
      ["exposed communication", "exposed_communication_seconds", "end"],
    ])],
    ["Time of a step without passes", formatSeconds, has("pass_seconds") ? series([
      ["update", "update_seconds", "b0"], ["waiting for data", "data_wait_seconds", "b1"],
      ["inputs", "input_seconds", "b2"], ["plan", "plan_seconds", "b3"],
      ["results", "result_seconds", "soft"], ["report", "report_seconds", "end"],
      ["checkpoints", "checkpoint_seconds", "soft", [6, 4]],
    ]) : []],
    ["Loss", (value) => value.toFixed(3), series([["loss", "loss", "b0"], ["evaluation loss", EVALUATION, "end"]])],
    ["Throughput", (value) => `${formatCount(Math.round(value))}/s`, series([["tokens per second", "tokens_per_second", "b1"]])],
  ].filter(([, , shown]) => shown.length > 0);
  const number = steps.length > 1 ? charts.map(([name, format, series]) => lineChart(steps.map(({ step }) => step), name, format, series, view, sync)) : [];
  const every = training.taken > steps.length ? ` A point is the mean of ${Math.round(training.taken / steps.length)} steps.` : "";
  return section("Steps of the run", `${plural(training.taken, "step")}. The wheel zooms, a drag selects a range.${every}`,
    h("div", { class: "controls" }, zoomButtons(view, "steps")), number, stepTable(training));
};

const lineChart = (xs, name, format, series, view, sync) => {
  const plot = h("div", {
    class: "plot", tabindex: "0", role: "application", "aria-roledescription": "line chart",
    "aria-label": `${name} by step. Plus and minus zoom, brackets move, Home shows all; the table below has the values.`,
    onkeydown: (event) => { if (zoomByKey(event, view)) event.preventDefault(); },
  });
  let u = null;
  const draw = () => u?.redraw(false, true);
  onTheme(draw);
  onWidth(plot, (width) => {
    const height = series.length > 1 ? 260 : 150;
    if (u) {
      u.setSize({ width, height });
      return;
    }
    const axis = { font: `11px ${FONT}`, stroke: () => color("soft"), ticks: { show: false }, grid: { stroke: () => color("grid"), width: 1 } };
    u = new uPlot({
      width, height, padding: [10, 12, 0, 0],
      cursor: { sync: { key: sync }, drag: { x: true, y: false, setScale: false }, focus: { prox: 24 } },
      legend: { live: true, markers: { dash: (plot, at) => (plot.series[at].dash ? "dashed" : "solid") } },
      scales: { x: zoomedScale(view), y: { range: (_, min, max) => valueRange(min, max) } },
      axes: [{ ...axis, size: 28, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4, 1e5, 1e6] },
        { ...axis, size: 66, values: (_, splits) => splits.map(format) }],
      series: [{ label: "step" }, ...series.map(([label, , shade, dash, isSparse]) => ({
        label, dash, stroke: () => color(shade), width: 1.6, points: { show: isSparse || xs.length < 60, size: 4 },
        spanGaps: isSparse,
        value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
      }))],
      hooks: zoomHooks(view),
    }, [xs, ...series.map(([, values]) => values)], plot);
    follow(u, view);
    zoomByPointer(u, view);
    u.over.addEventListener("dblclick", () => view.reset());
  });
  return h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, name)), plot);
};

/** Starts at zero unless the values are far from it. */
const valueRange = (min, max) => {
  if (min === null || min === undefined) return [0, 1];
  const low = min > 0 && min > 0.6 * max ? min - (max - min || max) * 0.2 : Math.min(0, min);
  return [low, max + (max - low || 1) * 0.06];
};

const isKnown = (value) => value !== null && value !== undefined;

/** Name of a figure that only steps with an evaluation have. */
const EVALUATION = "evaluation_loss";

const figure = (step, name) => (name === EVALUATION ? step.evaluation?.loss : step[name]);

const STEP_COLUMNS = [
  ["Step", "step", String], ["Loss", "loss", (value) => value.toFixed(4)],
  ["Evaluation", EVALUATION, (value) => value.toFixed(4)], ["Whole", "seconds", formatSeconds],
  ["Passes", "pipeline_seconds", formatSeconds], ["Predicted", "predicted_seconds", formatSeconds],
  ["Update", "update_seconds", formatSeconds], ["Data wait", "data_wait_seconds", formatSeconds],
  ["Inputs", "input_seconds", formatSeconds], ["Plan", "plan_seconds", formatSeconds],
  ["Results", "result_seconds", formatSeconds], ["Report", "report_seconds", formatSeconds],
  ["Tokens/s", "tokens_per_second", (value) => formatCount(Math.round(value))], ["Bubble", "bubble_fraction", formatPercent],
];

const stepTable = ({ steps }) => {
  const details = h("details", { class: "table", ontoggle: () => {
    if (!details.open || details.children.length > 1) return;
    const columns = STEP_COLUMNS.filter(([, name]) => steps.some((step) => isKnown(figure(step, name))));
    const cells = steps.map((step) => columns.map(([, name, format]) => (isKnown(figure(step, name)) ? format(figure(step, name)) : "–")));
    details.append(table(columns.map(([label]) => label), cells, "Steps"));
  } }, h("summary", {}, "Steps as a table"));
  return details;
};
