// Zooms and pans the horizontal axis of charts: by wheel, drag, touch, keys and buttons.

/** The part of an axis that is seen, shared by charts. */
class Viewport {
  constructor(min, max) {
    this.full = [min, max > min ? max : min + 1];
    this.seen = [...this.full];
    this.listeners = [];
  }

  get isFull() {
    return this.seen[0] <= this.full[0] && this.seen[1] >= this.full[1];
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  /** Shows a range, within the whole axis and no less than a millionth of it. */
  show(min, max) {
    const whole = this.full[1] - this.full[0];
    const length = Math.min(Math.max(max - min, whole * 1e-6), whole);
    const start = Math.min(Math.max(min, this.full[0]), this.full[1] - length);
    this.seen = [start, start + length];
    this.listeners.forEach((listener) => listener());
  }

  /** Zooms around a value; a factor below 1 zooms in. */
  zoom(factor, at = (this.seen[0] + this.seen[1]) / 2) {
    this.show(at - (at - this.seen[0]) * factor, at + (this.seen[1] - at) * factor);
  }

  /** Moves by a part of what is seen. */
  pan(part) {
    const by = (this.seen[1] - this.seen[0]) * part;
    this.show(this.seen[0] + by, this.seen[1] + by);
  }

  reset() {
    this.show(...this.full);
  }

  /** Replaces the whole axis. */
  span(min, max) {
    this.full = [min, max > min ? max : min + 1];
    this.reset();
  }

  /** Moves just as far that a range is seen. */
  reveal(min, max) {
    if (max > this.seen[1]) this.show(this.seen[0] + max - this.seen[1], max);
    if (min < this.seen[0]) this.show(min, this.seen[1] - (this.seen[0] - min));
  }
}

/** Zooms by the wheel, pans by a drag with the shift key, and does both by touch. */
const zoomByPointer = (u, view) => {
  const at = (event) => {
    const box = u.over.getBoundingClientRect();
    return u.posToVal(event.clientX - box.left, "x");
  };
  u.over.addEventListener("wheel", (event) => {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // A chart that is seen whole lets the page scroll on.
    if (view.isFull && (isSideways || event.deltaY > 0) && !event.ctrlKey) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 30 : 1;
    if (isSideways) view.pan((event.deltaX * lines) / u.over.clientWidth);
    else view.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * lines * 0.003))), at(event));
  }, { passive: false });
  u.over.addEventListener("mousedown", (event) => {
    if (!event.shiftKey) return;
    // The library would select a range.
    event.stopImmediatePropagation();
    event.preventDefault();
    dragPan(u, view, event.clientX);
  }, true);
  zoomByTouch(u, view);
};

const dragPan = (u, view, from) => {
  let last = from;
  const move = (event) => {
    view.pan((last - event.clientX) / u.over.clientWidth);
    last = event.clientX;
  };
  const end = () => {
    removeEventListener("mousemove", move);
    removeEventListener("mouseup", end);
  };
  addEventListener("mousemove", move);
  addEventListener("mouseup", end);
};

const zoomByTouch = (u, view) => {
  const places = (event) => [...event.touches].map((touch) => touch.clientX);
  let before = [];
  u.over.addEventListener("touchstart", (event) => { before = places(event); }, { passive: true });
  u.over.addEventListener("touchmove", (event) => {
    const now = places(event);
    const width = u.over.clientWidth;
    if (now.length === 2 && before.length === 2) {
      event.preventDefault();
      const [was, is] = [before, now].map(([a, b]) => Math.max(Math.abs(a - b), 10));
      const box = u.over.getBoundingClientRect();
      view.zoom(was / is, u.posToVal((now[0] + now[1]) / 2 - box.left, "x"));
    } else if (now.length === 1 && before.length === 1 && !view.isFull) {
      view.pan((before[0] - now[0]) / width);
    }
    before = now;
  }, { passive: false });
};

/** Handles the keys of zoom and pan; returns whether the key was one. */
const zoomByKey = (event, view) => {
  const keys = {
    "+": () => view.zoom(0.6), "=": () => view.zoom(0.6), "-": () => view.zoom(1 / 0.6), 0: () => view.reset(),
    Home: () => view.reset(), "[": () => view.pan(-0.25), "]": () => view.pan(0.25),
  };
  const act = keys[event.key];
  if (act && !event.ctrlKey && !event.metaKey && !event.altKey) act();
  return Boolean(act);
};

/** Buttons that zoom and pan. */
const zoomButtons = (view, name) => {
  const button = (label, title, act) =>
    h("button", { type: "button", title, "aria-label": `${title}, ${name}`, onclick: act }, label);
  return h("div", { class: "zoom", role: "group", "aria-label": `Zoom, ${name}` },
    button("−", "Zoom out", () => view.zoom(2)), button("+", "Zoom in", () => view.zoom(0.5)),
    button("‹", "Move left", () => view.pan(-0.25)), button("›", "Move right", () => view.pan(0.25)),
    button("Reset", "Show all", () => view.reset()));
};

/** Options of a chart whose horizontal axis follows a viewport; a drag selects what is shown. */
const zoomedScale = (view) => ({ time: false, auto: false, range: () => view.seen });

const zoomHooks = (view) => ({
  setSelect: [(u) => {
    if (u.select.width < 4) return;
    const from = u.posToVal(u.select.left, "x");
    const to = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    view.show(from, to);
  }],
});

/** Makes a chart follow a viewport. */
const follow = (u, view) => view.onChange(() => u.setScale("x", { min: view.seen[0], max: view.seen[1] }));
