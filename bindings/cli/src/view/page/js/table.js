// The table of samples: a page of rows, sorted by a column.

/** First medium of a sample as a small image or a sign. */
const thumbnail = (sample) => {
  const image = sample.fields.findIndex((field) => field.kind === "image");
  if (image >= 0) {
    const element = h("img", { class: "thumbnail", src: fieldUrl(sample.place, "thumbnail", image), alt: "", loading: "lazy" });
    element.addEventListener("error", () => element.replaceWith(h("span", { class: "sign bad", title: "The image cannot be decoded" }, "!")));
    return element;
  }
  const kinds = sample.fields.map((field) => field.kind);
  const sign = kinds.includes("video") ? "▶" : kinds.includes("audio") ? "♪" : kinds.some((kind) => kind === "text" || kind === "document") ? "¶" : "·";
  return h("span", { class: "sign", "aria-hidden": "true" }, sign);
};

/** Describes the media of a sample in a few words. */
const mediaText = (sample) => {
  const of = (kind) => sample.fields.filter((field) => field.kind === kind && field.shape);
  const parts = [];
  const [images, clips, videos] = ["image", "audio", "video"].map(of);
  if (images.length) parts.push(images.length === 1 ? shapeText(images[0]) : `${images.length} images`);
  if (clips.length) parts.push(`♪ ${formatSeconds(clips.reduce((sum, clip) => sum + clip.shape.seconds, 0))}`);
  if (videos.length) parts.push(videos.length === 1 ? shapeText(videos[0]) : `${videos.length} videos`);
  return parts.join(", ") || "text";
};

const HEADS = [["place", "place", "wide"], [null, "media", "medium"], ["tokens", "tokens", ""], ["cost_ns", "cost", ""], ["bytes", "bytes", "wide"]];

/** Draws a page of samples into `list`. */
const drawTable = (list, answer, actions) => {
  const { samples, count } = answer;
  const offset = Number(state.offset);
  const head = ([column, name, only]) => {
    if (!column) return h("th", { scope: "col", class: only }, name);
    const isSorted = state.sort === column;
    const order = isSorted ? (state.descending === "1" ? "descending" : "ascending") : "none";
    const arrow = isSorted ? (state.descending === "1" ? " ↓" : " ↑") : "";
    return h("th", { scope: "col", class: only, "aria-sort": order },
      h("button", { type: "button", class: "sort", onclick: () => actions.sort(column), "data-column": column }, name, h("span", { "aria-hidden": "true" }, arrow)));
  };
  const row = (sample) => {
    const total = sample.module_ns.reduce((sum, ns) => sum + ns, 0);
    const isChosen = state.sample === String(sample.place);
    const open = h("button", { type: "button", class: "open", "data-place": sample.place, onclick: (event) => { event.stopPropagation(); actions.open(sample.place); } }, sample.key);
    return h("tr", { class: isChosen ? "chosen-row" : "", "aria-current": isChosen ? "true" : null, onclick: () => actions.open(sample.place) },
      h("td", { class: "look" }, thumbnail(sample)),
      h("th", { scope: "row", class: "key" }, open, h("small", {}, `${sample.shard} · ${sample.fields.map((field) => field.name).join(" ")}`)),
      h("td", { class: "wide" }, formatCount(sample.place)),
      h("td", { class: "medium" }, mediaText(sample)),
      h("td", {}, sample.refusal ? "" : formatCount(sample.tokens)),
      sample.refusal ? h("td", {}, h("span", { class: "badge refused", title: sample.refusal }, "refused"))
        : h("td", { class: "cost-cell" }, formatNs(total), costBar(sample, answer.cost_ns_max)),
      h("td", { class: "wide" }, formatBytes(sample.bytes)));
  };
  const pages = h("div", { class: "controls pages" },
    h("span", { id: "count" }, count ? `${formatCount(offset + 1)} to ${formatCount(offset + samples.length)} of ${plural(count, "sample")}` : "No sample meets the filter"),
    h("span", { class: "times" }, summary.modules.map((name, module) => [h("i", { class: `dot b${module % MODULE_COLORS}` }), ` ${name}`])),
    h("div", { class: "zoom" },
      h("button", { type: "button", "data-turn": "-1", onclick: () => actions.page(-1), disabled: offset === 0, "aria-label": "Previous page" }, "←"),
      h("button", { type: "button", "data-turn": "1", onclick: () => actions.page(1), disabled: offset + samples.length >= count, "aria-label": "Next page" }, "→")));
  list.replaceChildren(pages, h("table", {},
    h("caption", { class: "hidden" }, "Samples; arrow keys move, Enter opens one"),
    h("thead", {}, h("tr", {}, h("td", { class: "look" }), h("th", { scope: "col", class: "key" }, "key"), HEADS.map(head))),
    h("tbody", {}, samples.map(row))));
};
