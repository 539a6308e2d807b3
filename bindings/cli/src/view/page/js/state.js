// Filter, order, page and chosen sample; kept in the address, so that a reload shows the same.

/** Numbers that samples are sorted and filtered by: name, how people read and write it. */
const COLUMNS = {
  cost_ns: { label: "cost", unit: "ms", scale: 1e6, format: formatNs },
  tokens: { label: "tokens", unit: "", scale: 1, format: formatCount },
  bytes: { label: "bytes", unit: "kB", scale: 1e3, format: formatBytes },
  pixels: { label: "pixels", unit: "kpx", scale: 1e3, format: (value) => `${formatCount(Math.round(value / 1e3))} kpx` },
  audio_ms: { label: "audio", unit: "s", scale: 1e3, format: (value) => formatSeconds(value / 1e3) },
};
const PAGE_ROWS = 50;

const START = { sort: "cost_ns", descending: "1", offset: "0", key: "", text: "", field: "", refused: "0", by: "cost_ns" };

const state = { ...START };
let summary = null;

/** Reads the state from the address. */
const readState = () => {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) state[name] = value;
  if (!(state.by in COLUMNS)) state.by = START.by;
};

/** Writes the state to the address; what is as at the start is left out. */
const writeState = () => {
  const changed = Object.entries(state).filter(([name, value]) => value !== undefined && value !== "" && value !== START[name]);
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
};

/** Bounds of the filter: `COLUMN_min` and `COLUMN_max`. */
const boundNames = Object.keys(COLUMNS).flatMap((column) => [`${column}_min`, `${column}_max`]);

/** Returns the query of the filter. */
const filterQuery = () => {
  const query = new URLSearchParams();
  for (const name of ["key", "text", "field", ...boundNames]) if (state[name]) query.set(name, state[name]);
  if (state.refused === "1") query.set("refused", "1");
  return query;
};

/** Replaces the content of an element. */
const fill = (element, ...children) => element.replaceChildren(...children.flat(Infinity).filter((child) => child instanceof Node));

const isFiltered = () => [...filterQuery()].length > 0;

const notice = (text) => { document.getElementById("notice").textContent = text; };

/** Fetches JSON from this server; a failure is shown and thrown. */
const fetchJson = async (path) => {
  let reply;
  try {
    reply = await fetch(path);
  } catch {
    notice("The server does not answer: dflop view has ended.");
    throw new Error(path);
  }
  if (!reply.ok) {
    notice((await reply.text()).trim());
    throw new Error(path);
  }
  notice("");
  return reply.json();
};

/** Runs a task whose older runs no longer matter; it is given a function that tells whether it is the last one. */
const latest = (task) => {
  let last = 0;
  return async (...parameters) => {
    const own = ++last;
    try {
      return await task(() => own === last, ...parameters);
    } catch (error) {
      if (!document.getElementById("notice").textContent) throw error;
    }
  };
};
