// Starts the page: tabs, filters, keys.

const element = (id) => document.getElementById(id);
const [list, detail, filters, figure] = [element("list"), element("detail"), element("filters"), h("figure", { class: "distribution" })];
let shown = [];
let again = 0;

const refresh = latest(async (isLast) => {
  writeState();
  const query = filterQuery();
  for (const name of ["sort", "descending", "offset"]) query.set(name, state[name]);
  query.set("limit", PAGE_ROWS);
  const counted = filterQuery();
  counted.set("sort", state.by);
  const [answer, histogram] = await Promise.all([fetchJson(`samples?${query}`), fetchJson(`histogram?${counted}`)]);
  if (!isLast()) return;
  // A search goes on in the server; what it has found so far is shown.
  const isSearching = answer.searched !== null && answer.searched < summary.samples;
  clearTimeout(again);
  if (isSearching) again = setTimeout(refresh, 1000);
  element("searched").textContent = isSearching ? `${formatCount(answer.searched)} of ${formatCount(summary.samples)} samples searched` : "";
  shown = answer.samples.map((sample) => sample.place);
  const focused = document.activeElement?.dataset ?? {};
  drawTable(list, answer, { sort, open, page });
  drawHistogram(figure, histogram, state.by, bound);
  if (focused.turn) list.querySelector(`[data-turn="${focused.turn}"]`)?.focus();
  if (focused.column) list.querySelector(`[data-column="${focused.column}"]`)?.focus();
  element("reset").hidden = !isFiltered();
  list.setAttribute("aria-busy", "false");
});

/** Filters anew from the first page. */
const filter = () => { state.offset = "0"; refresh(); };

const sort = (column) => {
  state.descending = state.sort === column && state.descending === "1" ? "0" : "1";
  state.sort = column;
  filter();
};

const page = (by) => {
  state.offset = String(Math.max(0, Number(state.offset) + by * PAGE_ROWS));
  refresh().then(() => list.scrollIntoView({ block: "nearest" }));
};

const bound = (smallest, largest) => {
  state[`${state.by}_min`] = String(smallest);
  state[`${state.by}_max`] = String(largest);
  showBounds();
  filter();
};

/** Marks the row of the chosen sample. */
const mark = () => {
  for (const row of list.querySelectorAll("tbody tr")) {
    const isChosen = row.querySelector(".open").dataset.place === state.sample;
    row.classList.toggle("chosen-row", isChosen);
    if (isChosen) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
};

const load = latest(async (isLast, place) => {
  const answer = await fetchJson(`sample/${place}`);
  if (!isLast() || state.sample !== String(place)) return;
  const wasHidden = detail.hidden;
  detail.hidden = false;
  element("split").classList.add("beside");
  drawDetail(detail, answer, step, close);
  detail.scrollTop = 0;
  if (wasHidden) detail.focus({ preventScroll: true });
});

const open = (place) => {
  state.sample = String(place);
  writeState();
  mark();
  return load(place);
};

const close = () => {
  const place = state.sample;
  state.sample = undefined;
  writeState();
  mark();
  detail.hidden = true;
  detail.replaceChildren();
  element("split").classList.remove("beside");
  list.querySelector(`.open[data-place="${place}"]`)?.focus();
};

/** Opens the sample that follows or precedes in the list. */
const step = (by) => {
  const at = shown.indexOf(Number(state.sample));
  const next = shown[at < 0 ? 0 : at + by];
  if (next === undefined) return;
  open(next);
  list.querySelector(`.open[data-place="${next}"]`)?.scrollIntoView({ block: "nearest" });
};

/** Moves the focus between rows. */
const moveFocus = (by) => {
  const buttons = [...list.querySelectorAll(".open")];
  const at = buttons.indexOf(document.activeElement);
  buttons[Math.max(0, Math.min(buttons.length - 1, at + by))]?.focus();
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || element("samples").hidden) return;
  if (["INPUT", "SELECT", "AUDIO", "VIDEO"].includes(event.target.tagName)) return;
  const keys = {
    j: () => step(1), k: () => step(-1), Escape: () => { if (!detail.hidden) close(); },
    ...(list.contains(event.target) && { ArrowDown: () => moveFocus(1), ArrowUp: () => moveFocus(-1) }),
    "/": () => filters.elements.key.focus(),
  };
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});

const showBounds = () => {
  const { scale, unit } = COLUMNS[state.by];
  for (const bound of ["min", "max"]) {
    const value = state[`${state.by}_${bound}`];
    const input = filters.elements[bound];
    input.value = value ? Number((Number(value) / scale).toPrecision(6)) : "";
    input.setAttribute("aria-label", `${bound === "min" ? "Smallest" : "Largest"} ${COLUMNS[state.by].label}${unit && `, ${unit}`}`);
  }
  element("unit").textContent = unit;
};

const drawFilters = () => {
  const labeled = (name, ...inputs) => h("label", {}, h("span", {}, name), inputs);
  let pause = 0;
  const typed = (name, milliseconds) => (event) => {
    clearTimeout(pause);
    pause = setTimeout(() => { state[name] = event.target.value; filter(); }, milliseconds);
  };
  const search = (name, milliseconds) => h("input", {
    name, type: "search", value: state[name], oninput: typed(name, milliseconds), autocomplete: "off", spellcheck: "false",
  });
  const boundTyped = (name) => (event) => {
    const value = Number(event.target.value);
    const isGiven = event.target.value.trim() !== "" && value >= 0;
    state[`${state.by}_${name}`] = isGiven ? String(BigInt(Math.round(value * COLUMNS[state.by].scale))) : "";
    filter();
  };
  const columns = Object.entries(COLUMNS).map(([name, { label }]) => h("option", { value: name, selected: state.by === name }, label));
  const fields = ["", ...summary.extensions].map((name) => h("option", { value: name, selected: state.field === name }, name || "any field"));
  filters.replaceChildren(
    h("div", { class: "controls" },
      labeled("Key contains", search("key", 200)),
      labeled("Text contains", search("text", 500)),
      labeled("Has field", h("select", { name: "field", onchange: (event) => { state.field = event.target.value; filter(); } }, fields)),
      labeled("Distribution of", h("select", { name: "by", onchange: (event) => { state.by = event.target.value; showBounds(); refresh(); } }, columns)),
      h("span", { class: "bounds" },
        h("input", { name: "min", type: "number", min: "0", step: "any", placeholder: "min", onchange: boundTyped("min") }),
        h("span", {}, "to"),
        h("input", { name: "max", type: "number", min: "0", step: "any", placeholder: "max", onchange: boundTyped("max") }),
        h("span", { id: "unit" })),
      summary.refused > 0 && h("label", { class: "check" }, h("input", { name: "refused", type: "checkbox", checked: state.refused === "1",
        onchange: (event) => { state.refused = event.target.checked ? "1" : "0"; filter(); } }), h("span", {}, `only the ${formatCount(summary.refused)} refused by the model`)),
      h("button", { type: "button", id: "reset", hidden: true, onclick: () => {
        for (const name of ["key", "text", "field", "refused", ...boundNames]) state[name] = START[name] ?? "";
        drawFilters();
        filter();
      } }, "Clear the filter")),
    h("p", { class: "facts", id: "searched", role: "status" }),
    figure);
  showBounds();
};

const drawTabs = () => {
  const show = (name) => {
    for (const own of ["samples", "skipped", "unused"]) element(own).hidden = own !== name;
    for (const tab of element("tabs").children) tab.setAttribute("aria-pressed", String(tab.dataset.name === name));
    if (name === "skipped") drawSkipped(element("skipped"), 0);
    if (name === "unused") drawUnused(element("unused"));
  };
  const tab = (name, text) => h("button", { type: "button", class: "chip", "data-name": name, "aria-pressed": "false", onclick: () => show(name) }, text);
  element("tabs").replaceChildren(
    tab("samples", `${formatCount(summary.samples)} samples`),
    tab("skipped", `${formatCount(summary.skipped)} skipped`),
    tab("unused", `${formatCount(summary.unused.length)} not used`));
  show("samples");
};

const start = async () => {
  summary = await fetchJson("summary");
  const shard = summary.first_shard;
  const name = summary.shards === 1 ? shard.split("/").pop() : shard.slice(0, Math.max(shard.lastIndexOf("/"), 0)) || shard;
  document.title = `${name} · dflop view`;
  element("title").textContent = name;
  const split = summary.split === null ? "" : ` · split ${summary.split}`;
  element("facts").textContent = `${plural(summary.shards, "shard")}${split} · costs of ${summary.costs} · dflop ${summary.version}`;
  readState();
  drawTabs();
  drawFilters();
  filters.addEventListener("submit", (event) => event.preventDefault());
  await refresh();
  if (state.sample && /^\d+$/.test(state.sample)) load(Number(state.sample));
};

start().catch((error) => { if (!element("notice").textContent) throw error; });
