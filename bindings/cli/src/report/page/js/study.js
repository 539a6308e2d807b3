// Shows a study: strategies compared, their timelines, the samples behind a bar, the load of every rank.

const ROWS_AT_ONCE = 12;

const studySection = (study) => {
  const parts = [strategyTable(study)];
  if (study.steps.length) parts.push(new StudyTimelines(study).element);
  const shown = section(study.name, study.about, parts);
  return [shown, study.steps.length && loadSection(study), study.samples.length && dearestSection(study)].filter(Boolean);
};

const strategyTable = (study) => {
  const first = {};
  study.strategies.forEach((strategy) => { first[strategy.basis] ??= strategy; });
  const longest = {};
  study.strategies.forEach(({ basis, step_seconds }) => { longest[basis] = Math.max(longest[basis] ?? 0, step_seconds); });
  const rows = study.strategies.map((strategy) => {
    const { basis, step_seconds } = strategy;
    const bar = h("i", { class: `meter ${basis}` });
    bar.style.width = `${longest[basis] ? (step_seconds / longest[basis]) * 100 : 0}%`;
    const name = h("span", {}, strategy.name, " ", badge(basis), strategy.plan && h("small", {}, strategy.plan));
    const ratio = step_seconds > 0 ? `${(first[basis].step_seconds / step_seconds).toFixed(2)}×` : "–";
    const optional = (value, format) => (value === null || value === undefined ? "–" : format(value));
    return [name, h("span", { class: "track" }, bar), ratio, formatSeconds(step_seconds),
      optional(strategy.bubble_fraction, formatPercent), optional(strategy.step_seconds_p95, formatSeconds)];
  });
  const [bound, about] = boundOf(study, first.simulated, longest.simulated);
  const shown = table(["Strategy", "", "Speed-up", "Step", "Idle", "95 %"], bound ? [...rows, bound] : rows, `Strategies, ${study.name}`);
  shown.classList.add("strategies");
  return about ? h("div", {}, shown, h("p", { class: "facts" }, about)) : shown;
};

/** Returns the row of the lower bound, and which part of the idle time of the last simulated strategy no cut removes. */
const boundOf = (study, first, longest) => {
  const last = study.strategies.filter(({ basis, bubble_fraction: idle, bound_seconds: bound }) => basis === "simulated" && bound > 0 && typeof idle === "number").at(-1);
  if (!last) return [];
  const { bound_seconds: seconds, step_seconds: step, bubble_fraction: idle } = last;
  const busy = step * (1 - idle);
  const bar = h("i", { class: "meter bound" });
  bar.style.width = `${Math.min(1, seconds / longest) * 100}%`;
  const row = [h("span", {}, "no cut is faster", h("small", {}, "lower bound")), h("span", { class: "track" }, bar),
    `${(first.step_seconds / seconds).toFixed(2)}×`, formatSeconds(seconds), formatPercent(Math.max(0, 1 - busy / seconds)), "–"];
  const [unavoidable, left] = [Math.max(0, seconds - busy) / step, Math.max(0, step - seconds) / step];
  return [row, `${last.name} is idle ${formatPercent(idle)} of the time: ${formatPercent(unavoidable)} with every cut of these samples, ` +
    `because of the schedule and the longest samples, and at most ${formatPercent(left)} because of this cut.`];
};

/** The timelines of a study, below each other on one axis. */
class StudyTimelines {
  constructor(study) {
    this.study = study;
    this.step = study.steps[0];
    this.view = new Viewport(0, 1);
    this.shown = this.firstShown();
    this.rank = null;
    this.charts = h("div", { class: "charts" });
    this.panel = h("div", { class: "panel", role: "region", "aria-live": "polite", "aria-label": "Samples of the chosen pass" });
    this.controls = h("div", { class: "controls" });
    this.isScaled = this.factor() > 1.5 || this.factor() < 0.67;
    this.element = h("div", { class: "timelines" },
      h("h3", {}, "One step, stage by stage"),
      h("p", { class: "about" }, "A row is a pipeline stage, a bar a pass, its number the microbatch. Choose a bar to see its samples. " +
        "The wheel zooms, a drag selects a range, shift and drag move; double click or Home shows all."),
      this.controls, legend(study.modules, [["f", "forward"], ["b", "backward"]]), this.charts);
    this.isAllRanks = this.rowsOf(this.step.timelines[0]).length <= ROWS_AT_ONCE;
    this.build();
  }

  /** Shows the first and the last strategy of each basis. */
  firstShown() {
    const byBasis = {};
    this.study.strategies.forEach(({ basis }, place) => { (byBasis[basis] ??= []).push(place); });
    return new Set(Object.values(byBasis).flatMap((all) => [all[0], all[all.length - 1]]));
  }

  rowsOf(timeline) {
    return timeline?.rows ?? [];
  }

  /** Returns the measured makespan over the simulated one of the same strategy; 1 without both. */
  factor() {
    const of = (timeline) => this.study.strategies[timeline.strategy];
    const [measured, simulated] = ["measured", "simulated"].map((basis) => this.step.timelines.filter((own) => of(own).basis === basis));
    const last = measured[measured.length - 1];
    const other = simulated.find((own) => of(own).name === of(last ?? own).name) ?? simulated[simulated.length - 1];
    return last && other && other.makespan_ns > 0 ? last.makespan_ns / other.makespan_ns : 1;
  }

  scaleOf(timeline) {
    return this.isScaled && this.study.strategies[timeline.strategy].basis === "simulated" ? this.factor() : 1;
  }

  build() {
    this.panel.remove();
    const timelines = this.step.timelines.filter((timeline) => this.shown.has(timeline.strategy));
    this.view.listeners = [];
    this.view.full = [0, Math.max(1, ...timelines.map((timeline) => timeline.makespan_ns * this.scaleOf(timeline))) * 1.004];
    this.view.seen = [...this.view.full];
    this.charts.replaceChildren(...timelines.map((timeline) => this.chart(timeline)));
    this.controls.replaceChildren(...this.controlParts());
  }

  chart(timeline) {
    const { name, basis } = this.study.strategies[timeline.strategy];
    const rows = this.isAllRanks ? timeline.rows : timeline.rows.filter((row) => row.rank === (this.rank ?? slowest(timeline)));
    const scale = this.scaleOf(timeline);
    const chart = new TimelineChart({
      name, basis, study: this.study, timeline, rows, scale, view: this.view,
      onPick: (own, choice) => this.showSamples(own, choice, figure),
    });
    const rank = this.isAllRanks ? "" : `rank ${this.rank ?? slowest(timeline)}${this.rank === null ? ", the slowest" : ""}`;
    const scaled = scale === 1 ? "" : `, scaled × ${digits(scale)}`;
    const figure = h("figure", { class: "chart" },
      h("figcaption", {}, h("b", {}, name), " ", badge(basis),
        h("small", {}, [`this step ${formatNs(timeline.makespan_ns)}${scaled}`, rank].filter(Boolean).join(" · "))),
      chart.plot, chart.table());
    return figure;
  }

  controlParts() {
    const { study } = this;
    const toggle = (isOn, label, act, hint) =>
      h("button", { type: "button", class: "chip", "aria-pressed": String(isOn), title: hint, onclick: act }, label);
    const strategies = this.step.timelines.map(({ strategy }) => {
      const { name, basis } = study.strategies[strategy];
      return toggle(this.shown.has(strategy), `${name}, ${basis}`, () => {
        if (this.shown.has(strategy) && this.shown.size > 1) this.shown.delete(strategy);
        else this.shown.add(strategy);
        this.build();
      });
    });
    const select = (label, options, value, act) => h("label", {}, `${label} `,
      h("select", { onchange: (event) => { act(event.target.value); this.build(); } },
        options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text))));
    const ranks = [...new Set(this.step.timelines.flatMap((timeline) => timeline.rows.map((row) => row.rank)))].sort((a, b) => a - b);
    const factor = this.factor();
    return [
      h("div", { class: "chips", role: "group", "aria-label": "Strategies" }, strategies),
      study.steps.length > 1 && select("Step", study.steps.map((step, place) => [place, String(step.step)]), study.steps.indexOf(this.step),
        (place) => { this.step = study.steps[Number(place)]; }),
      ranks.length > 1 && select("Ranks", [["slowest", "slowest of each"], ["all", "all"], ...ranks.map((rank) => [rank, `rank ${rank}`])],
        this.isAllRanks ? "all" : this.rank ?? "slowest", (value) => {
          this.isAllRanks = value === "all";
          this.rank = value === "all" || value === "slowest" ? null : Number(value);
        }),
      factor !== 1 && toggle(this.isScaled, `Simulated × ${digits(factor)}`, () => { this.isScaled = !this.isScaled; this.build(); },
        "Scale simulated times to the measured step: a stated rate weighs passes against each other only"),
      zoomButtons(this.view, study.name),
    ].filter(Boolean);
  }

  showSamples(chart, choice, figure) {
    const group = choice.bar[4];
    const samples = (chart.timeline.groups[group] ?? []).map((index) => this.study.samples[index]).filter(Boolean);
    const unlisted = chart.timeline.unlisted?.[group] ?? 0;
    const close = h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => this.panel.remove() }, "×");
    this.panel.replaceChildren(
      h("h4", {}, chart.describe(choice).join(" · "), close),
      samples.length + unlisted ? sampleList(samples, this.study.modules, { unlisted })
        : h("p", { class: "facts" }, "No sample: the microbatch is empty, or the trace does not name its samples."));
    figure.querySelector(".plot").after(this.panel);
  }
}

/** Returns the rank that ends last. */
const slowest = (timeline) => {
  const ends = timeline.rows.map((row) => [row.rank, Math.max(0, ...row.bars.map((bar) => bar[0] + bar[1]))]);
  return ends.reduce((last, own) => (own[1] > last[1] ? own : last), [0, -1])[0];
};

/** Returns times by rank and module: predicted, or the sum of the bars. */
const loadsOf = (timeline, modules) => {
  if (timeline.loads_ns.length) return timeline.loads_ns.map((load, rank) => ({ rank, load }));
  const byRank = new Map();
  for (const row of timeline.rows) {
    if (!byRank.has(row.rank)) byRank.set(row.rank, modules.map(() => 0));
    row.bars.forEach((bar) => { byRank.get(row.rank)[row.module] += bar[1]; });
  }
  return [...byRank].sort(([a], [b]) => a - b).map(([rank, load]) => ({ rank, load }));
};

const imbalances = (loads, modules) => modules.map((name, module) => {
  const times = loads.map(({ load }) => load[module]).filter((ns) => ns > 0);
  const sum = times.reduce((all, ns) => all + ns, 0);
  return times.length > 1 ? `${name} ${((Math.max(...times) * times.length) / sum).toFixed(2)}` : "";
}).filter(Boolean).join(", ");

const loadSection = (study) => {
  const [step] = study.steps;
  const all = step.timelines.map((timeline) => ({ timeline, loads: loadsOf(timeline, study.modules) }));
  const longest = {};
  all.forEach(({ timeline, loads }) => {
    const { basis } = study.strategies[timeline.strategy];
    longest[basis] = Math.max(longest[basis] ?? 1, ...loads.flatMap(({ load }) => load));
  });
  const blocks = all.map(({ timeline, loads }) => {
    const { name, basis } = study.strategies[timeline.strategy];
    const panel = h("div", { class: "panel", role: "region", "aria-live": "polite", "aria-label": "Samples of the chosen rank" });
    const off = imbalances(loads, study.modules);
    const rows = loads.map(({ rank, load }) => loadRow(study, timeline, rank, load, longest[basis], panel));
    return h("div", { class: "loads" },
      h("h3", {}, name, " ", badge(basis), h("small", {}, off && `imbalance: ${off}`)), rows);
  });
  return section(`Load of every rank: ${study.name}`,
    `Compute of each rank in step ${step.step}, by module. Imbalance is the longest bar of a module over their mean; at 1 all ranks ` +
    "have the same to do. Choose a rank to see its samples.", legend(study.modules, [["b", ""]]), h("div", { class: "columns" }, blocks));
};

const loadRow = (study, timeline, rank, load, longestNs, panel) => {
  const bars = load.map((ns, module) => {
    const bar = h("i", { class: `b${module % MODULE_COLORS}` });
    bar.style.width = `${(ns / longestNs) * 100}%`;
    return h("span", { class: "load-bar" }, bar, h("small", {}, ns ? formatNs(ns) : ""));
  }).filter((_, module) => load[module] > 0);
  const groups = new Set(timeline.rows.filter((row) => row.rank === rank).flatMap((row) => row.bars.map((bar) => bar[4])));
  const show = () => {
    const indices = new Set([...groups].flatMap((group) => timeline.groups[group] ?? []));
    const unlisted = [...groups].reduce((sum, group) => sum + (timeline.unlisted?.[group] ?? 0), 0);
    const samples = [...indices].map((index) => study.samples[index]).filter(Boolean);
    panel.replaceChildren(h("h4", {}, `Rank ${rank}: ${plural(samples.length + unlisted, "sample")}`,
      h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => panel.remove() }, "×")),
    sampleList(samples, study.modules, { unlisted }));
    button.after(panel);
  };
  const text = load.map((ns, module) => ns > 0 && `${study.modules[module]} ${formatNs(ns)}`).filter(Boolean).join(", ");
  const button = h("button", { type: "button", class: "load-row", onclick: show, "aria-label": `Rank ${rank}: ${text}` },
    h("span", { class: "load-name" }, `rank ${rank}`), h("span", { class: "load-bars" }, bars));
  return button;
};

/** The most expensive samples, with the rank and microbatch that each strategy gives them. */
const dearestSection = (study) => {
  const dearest = study.samples.map((sample, index) => ({ sample, index }))
    .sort((a, b) => totalNs(b.sample) - totalNs(a.sample));
  const shown = dearest.filter(({ sample }, place) => place < 6 || (sample.previews ?? []).length > 0).slice(0, 24);
  const places = new Map(shown.map(({ sample, index }) => [sample, placesOf(study, index)]));
  return section(`The most expensive samples: ${study.name}`,
    "What these steps wait for. Times are predicted, forward and backward on one device.",
    sampleList(shown.map(({ sample }) => sample), study.modules, { compact: false, where: (sample) => places.get(sample) }));
};

const placesOf = (study, sample) => {
  for (const step of study.steps) {
    const found = step.timelines.map((timeline) => {
      const group = timeline.groups.findIndex((samples) => samples.includes(sample));
      const row = group >= 0 && timeline.rows.find((own) => own.bars.some((bar) => bar[4] === group));
      const bar = row && row.bars.find((own) => own[4] === group);
      const { name, basis } = study.strategies[timeline.strategy];
      return bar && basis === "simulated" && `${name}: rank ${row.rank}, microbatch ${bar[3]}`;
    }).filter(Boolean);
    if (found.length) return `step ${step.step} · ${found.join(" · ")}`;
  }
  return "";
};
