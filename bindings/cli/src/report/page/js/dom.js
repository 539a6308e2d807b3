// Makes elements. Text from data only ever becomes the text of a node or the value of an attribute.

/** Creates an element; a property that starts with `on` is a listener, `class` and the like are attributes. */
const h = (tag, properties, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width") element.style.width = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return element;
};

/** Creates an SVG element. */
const svg = (tag, properties, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

/** Returns a color of the style sheet. */
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const MODULE_COLORS = 4;
const moduleColor = (shade, module) => color(`${shade}${module % MODULE_COLORS}`);

const redraws = new Set();
/** Draws again when the theme changes. */
const onTheme = (draw) => redraws.add(draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((draw) => draw()));

/** Calls `resize` with the width of an element, now and when it changes. */
const onWidth = (element, resize) => {
  let known = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0 && width !== known) {
      known = width;
      // Outside of the observer, because a chart changes the size that is observed.
      requestAnimationFrame(() => resize(width));
    }
  }).observe(element);
};

const badge = (basis) => h("span", { class: `badge ${basis}` }, basis);

const table = (head, rows, caption) =>
  h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, place) =>
        place ? h("td", {}, cell) : h("th", { scope: "row" }, cell)))))));

/** A legend of module colors. */
const legend = (modules, shades) => {
  const entries = modules.flatMap((name, module) => shades.map(([shade, word]) =>
    h("li", {}, h("i", { class: `swatch ${shade}${module % MODULE_COLORS}` }), word ? `${name} ${word}` : name)));
  return h("ul", { class: "legend" }, entries);
};

/** A region of the page with a heading, which the list of sections names. */
const sections = [];
const section = (title, about, ...children) => {
  const id = `section-${sections.length}`;
  const element = h("section", { class: "card", id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title), about && h("p", { class: "about" }, about), children);
  sections.push({ id, title });
  return element;
};
