// Lists samples with what they look like, what they cost, and where they are.

const SAMPLES_FIRST = 12, GALLERY_FIRST = 8;

const preview = (item) => {
  if (item.image) return h("img", { src: item.image, alt: "", class: "preview", loading: "lazy" });
  if (item.audio) {
    const bars = item.audio.map((peak, place) => {
      const height = Math.max(peak * 0.4, 1);
      return svg("rect", { x: place * 2, y: 20 - height / 2, width: 1.4, height });
    });
    const box = `0 0 ${item.audio.length * 2} 40`;
    return svg("svg", { class: "preview wave", viewBox: box, preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars);
  }
  return h("q", { class: "preview excerpt" }, item.text);
};

const totalNs = (sample) => sample.module_ns.reduce((sum, ns) => sum + ns, 0);

/** A bar with the time of each module, and the times as text. */
const costBar = (sample, modules, longestNs) => {
  const total = totalNs(sample);
  const parts = sample.module_ns.map((ns, module) => {
    const part = h("i", { class: `b${module % MODULE_COLORS}` });
    part.style.width = `${total ? (ns / total) * 100 : 0}%`;
    return part;
  });
  const bar = h("span", { class: "cost", "aria-hidden": "true" }, parts);
  bar.style.width = `${longestNs ? Math.max((total / longestNs) * 100, 0.5) : 0}%`;
  const times = sample.module_ns.map((ns, module) => ns > 0 && `${modules[module]} ${formatNs(ns)}`).filter(Boolean);
  return [bar, h("span", { class: "times" }, h("b", {}, formatNs(total)), times.length > 1 ? ` ${times.join(", ")}` : "")];
};

const sampleItem = (sample, modules, longestNs, more) => {
  const previews = sample.previews ?? [];
  const facts = [sample.media, sample.tokens && `${formatCount(sample.tokens)} LLM tokens`, sample.shard];
  return h("li", { class: "sample" },
    previews.length > 0 && h("div", { class: "previews" }, previews.map(preview)),
    h("div", { class: "text" },
      h("code", {}, sample.key), costBar(sample, modules, longestNs),
      h("span", { class: "facts" }, facts.filter(Boolean).join(" · ")),
      more && h("span", { class: "facts" }, more)));
};

/** A list of samples, the most expensive first; long ones grow on request. */
const sampleList = (samples, modules, { unlisted = 0, where, compact = true } = {}) => {
  const sorted = [...samples].sort((a, b) => totalNs(b) - totalNs(a));
  const longest = sorted.length ? totalNs(sorted[0]) : 0;
  const list = h("ol", { class: compact ? "samples" : "samples gallery" });
  const show = (from, to) =>
    list.append(...sorted.slice(from, to).map((sample) => sampleItem(sample, modules, longest, where?.(sample))));
  const first = Math.min(compact ? SAMPLES_FIRST : GALLERY_FIRST, sorted.length);
  show(0, first);
  const rest = sorted.length - first;
  const button = rest > 0 && h("button", {
    type: "button", class: "more", onclick: () => { show(first, sorted.length); button.remove(); },
  }, `Show ${plural(rest, "more sample")}`);
  return h("div", {}, list, button,
    unlisted > 0 && h("p", { class: "facts" }, `${plural(unlisted, "cheaper sample")} not listed.`));
};
