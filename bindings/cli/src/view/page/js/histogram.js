// The distribution of a column over the filtered samples; a drag selects a range of it.

const HISTOGRAM_HEIGHT = 64;

/** Draws the histogram into `figure`; `choose(smallest, largest)` is called with a dragged range. */
const drawHistogram = (figure, counted, column, choose) => {
  const { counts, edges, zeros } = counted;
  const { format } = COLUMNS[column];
  if (counts.length === 0) {
    figure.replaceChildren(h("p", { class: "about" }, zeros ? `${plural(zeros, "sample")}, none with ${COLUMNS[column].label}.` : "No samples."));
    return;
  }
  const most = Math.max(...counts);
  const [low, high] = [state[`${column}_min`], state[`${column}_max`]].map((text) => (text ? Number(text) : null));
  const isInside = (bin) => (low === null || edges[bin + 1] > low) && (high === null || edges[bin] <= high);
  // The square root keeps single samples visible beside thousands.
  const height = (count) => (count ? Math.max(2, Math.sqrt(count / most) * HISTOGRAM_HEIGHT) : 0);
  const bars = counts.map((count, bin) => svg("rect", {
    x: bin, y: HISTOGRAM_HEIGHT - height(count), width: 0.9, height: height(count), class: isInside(bin) ? "bar" : "bar outside",
  }));
  const brush = svg("rect", { class: "brush", x: 0, y: 0, width: 0, height: HISTOGRAM_HEIGHT });
  const picture = svg("svg", {
    viewBox: `0 0 ${counts.length} ${HISTOGRAM_HEIGHT}`, preserveAspectRatio: "none", class: "bars", role: "img",
    "aria-label": `Distribution of ${COLUMNS[column].label}: ${format(edges[0])} to ${format(edges.at(-1) - 1)}`,
  }, ...bars, brush);
  const missing = zeros ? `${plural(zeros, "sample")} without ${COLUMNS[column].label}; ` : "";
  const hover = h("output", {}, `${missing}highest bar ${plural(most, "sample")}, heights are square roots`);
  const binAt = (event) => {
    const box = picture.getBoundingClientRect();
    return Math.max(0, Math.min(counts.length - 1, Math.floor(((event.clientX - box.left) / box.width) * counts.length)));
  };
  let start = null;
  picture.addEventListener("pointerdown", (event) => {
    start = binAt(event);
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    const bin = binAt(event);
    hover.textContent = `${format(edges[bin])} to ${format(edges[bin + 1] - 1)}: ${plural(counts[bin], "sample")}`;
    if (start === null) return;
    brush.setAttribute("x", Math.min(start, bin));
    brush.setAttribute("width", Math.abs(bin - start) + 1);
  });
  picture.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [first, last] = [start, binAt(event)].sort((a, b) => a - b);
    start = null;
    choose(edges[first], edges[last + 1] - 1);
  });
  picture.addEventListener("pointercancel", () => { start = null; brush.setAttribute("width", 0); });
  figure.replaceChildren(picture, h("figcaption", {}, h("span", {}, format(edges[0])), hover, h("span", {}, format(edges.at(-1) - 1))));
};
