// One sample: its cost by module, its media, its conversation or texts, its faults.

const fieldUrl = (place, kind, field) => `sample/${place}/${kind}/${field}`;

const shapeText = (field) => {
  const { kind, shape } = field;
  if (!shape) return "";
  if (kind === "image") return `${shape.width} × ${shape.height}`;
  if (kind === "audio") return `${formatSeconds(shape.seconds)} at ${formatCount(shape.sample_rate_hz)} Hz`;
  if (kind === "video") return `${plural(shape.frames, "frame")} ${shape.width} × ${shape.height}`;
  return plural(shape.tokens, "token");
};

/** A bar with the share of every module. */
const costBar = (sample, costMax) => {
  const total = sample.module_ns.reduce((sum, ns) => sum + ns, 0);
  const parts = sample.module_ns.map((ns, module) =>
    h("i", { class: `b${module % MODULE_COLORS}`, width: `${(ns / Math.max(costMax ?? total, 1)) * 100}%` }));
  return h("span", { class: "cost", "aria-hidden": "true" }, parts);
};

const costTimes = (sample) => {
  const total = sample.module_ns.reduce((sum, ns) => sum + ns, 0);
  return h("p", { class: "times" }, h("b", {}, formatNs(total)),
    sample.module_ns.map((ns, module) => [" ", h("i", { class: `dot b${module % MODULE_COLORS}` }), ` ${summary.modules[module]} ${formatNs(ns)}`]));
};

const faultText = (reason) => h("p", { class: "fault" }, h("b", {}, "Bad: "), reason);

/** The image, sound or video of a field. */
const medium = (sample, field, content, place) => {
  const url = fieldUrl(sample.place, content.type || field.kind !== "image" ? "field" : "rendered", place);
  const name = `${field.name}, ${shapeText(field)}`;
  if (content.fault && field.kind !== "image") return h("p", { class: "placeholder" }, `${field.kind} ${name}`);
  if (field.kind === "image") {
    if (content.fault) return h("p", { class: "placeholder" }, `image ${name}`);
    return h("a", { href: url, target: "_blank", rel: "noopener noreferrer", class: "picture" }, h("img", { src: url, alt: name, loading: "lazy" }));
  }
  if (!content.type) return h("p", { class: "placeholder" }, `${field.kind} ${name}: this browser has no player for it`);
  if (field.kind === "audio") return h("audio", { src: url, controls: true, preload: "metadata", "aria-label": name });
  return h("video", { src: url, controls: true, preload: "metadata", "aria-label": name });
};

const isMedium = (field) => ["image", "audio", "video"].includes(field.kind);

/** A turn of a conversation, with the media in their places. */
const turnOf = (sample, contents, turn) => {
  const parts = turn.parts.map((part) => {
    if (part.text !== undefined) return h("p", { class: "words" }, part.text);
    const field = sample.fields[part.field];
    return field ? medium(sample, field, contents[part.field], part.field) : null;
  });
  const side = ["gpt", "assistant", "model"].includes(turn.role) ? "answer" : "question";
  return h("li", { class: `turn ${turn.role ? side : "plain"}` }, turn.role && h("h4", {}, turn.role), parts);
};

const fieldItem = (sample, field, content, place, isPlaced) => {
  const facts = [field.kind, shapeText(field), formatBytes(field.bytes)].filter(Boolean).join(" · ");
  const isText = content.text !== undefined;
  return h("li", { class: "field" },
    h("h4", {}, h("code", {}, field.name), h("a", { class: "download", href: fieldUrl(sample.place, "field", place), download: `${sample.key.split("/").pop()}.${field.name}` }, "download")),
    h("p", { class: "facts" }, facts, content.note && ` · ${content.note}`),
    content.fault && faultText(content.fault),
    isMedium(field) && !isPlaced && medium(sample, field, content, place),
    isText && h("details", { class: "raw", open: !isPlaced && field.kind === "text" }, h("summary", {}, field.kind === "document" ? "document" : "text"),
      h("pre", { tabindex: "0" }, content.text), content.is_cut && h("p", { class: "facts" }, "Cut; the download is whole.")));
};

/** Draws a sample into `panel`. */
const drawDetail = (panel, { sample, content }, move, close) => {
  const placed = new Set(content.turns.flatMap((turn) => turn.parts.map((part) => part.field)));
  const conversation = content.turns.length > 0 && content.turns.some((turn) => turn.parts.length > 0);
  const contents = sample.fields.map((_, place) => content.fields[place] ?? {});
  fill(panel,
    h("div", { class: "detail-head" },
      h("h2", {}, h("code", {}, sample.key)),
      h("div", { class: "zoom" },
        h("button", { type: "button", onclick: () => move(-1), "aria-label": "Previous sample", title: "Previous (k)" }, "↑"),
        h("button", { type: "button", onclick: () => move(1), "aria-label": "Next sample", title: "Next (j)" }, "↓"),
        h("button", { type: "button", onclick: close, "aria-label": "Close", title: "Close (Escape)" }, "×"))),
    h("p", { class: "facts" }, `${sample.shard} · offset ${formatCount(sample.offset)} · place ${formatCount(sample.place)} · ${formatBytes(sample.bytes)}`),
    sample.refusal ? h("p", { class: "fault" }, h("b", {}, "Refused by the model: "), sample.refusal) : [costBar(sample), costTimes(sample)],
    h("p", { class: "facts" }, `${plural(sample.tokens, "token")}, ${formatCount(sample.target_tokens)} of them targets`),
    content.fault && faultText(content.fault),
    conversation && h("ol", { class: "turns", "aria-label": "Content in order" }, content.turns.map((turn) => turnOf(sample, contents, turn))),
    h("h3", {}, plural(sample.fields.length, "field")),
    h("ul", { class: "fields" }, sample.fields.map((field, place) => fieldItem(sample, field, contents[place], place, placed.has(place)))));
};
