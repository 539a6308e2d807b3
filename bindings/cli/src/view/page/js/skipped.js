// Samples and shards that are not in the dataset, with the reasons.

const drawSkipped = latest(async (isLast, panel, offset, reason = "") => {
  const answer = await fetchJson(`skipped?${new URLSearchParams({ offset, limit: PAGE_ROWS, reason })}`);
  if (!isLast()) return;
  const { skipped, count, reasons } = answer;
  const item = ({ shard, offset: at, key, field, reason }) =>
    h("li", { class: "field" },
      h("h4", {}, h("code", {}, key === null ? "(key unknown)" : key), field && h("small", {}, `field ${field}`)),
      h("p", { class: "fault" }, reason),
      h("p", { class: "facts" }, `${shard} · offset ${formatCount(at)}`));
  const turn = (by) => drawSkipped(panel, offset + by * PAGE_ROWS, reason);
  const most = Math.max(1, ...reasons.map(([, own]) => own));
  const bar = ([text, own]) => {
    const part = h("i", { class: "meter" });
    part.style.width = `${(own / most) * 100}%`;
    return h("li", {}, h("button", { type: "button", class: "reason", "aria-pressed": String(text === reason), onclick: () => drawSkipped(panel, 0, text === reason ? "" : text) },
      h("span", {}, text), h("span", { class: "track" }, part), h("b", {}, formatCount(own))));
  };
  fill(panel,
    h("h2", {}, "Skipped"),
    h("p", { class: "about" }, count
      ? "By reason; choose one to list its samples. The index leaves these out, because their headers or texts show a fault. Faults that only decoding shows are in the sample itself."
      : "The index leaves nothing out."),
    reasons.length > 0 && h("ul", { class: "reasons" }, reasons.map(bar)),
    count > PAGE_ROWS && h("div", { class: "controls" },
      h("span", {}, `${formatCount(offset + 1)} to ${formatCount(offset + skipped.length)} of ${formatCount(count)}`),
      h("div", { class: "zoom" },
        h("button", { type: "button", disabled: offset === 0, onclick: () => turn(-1), "aria-label": "Previous page" }, "←"),
        h("button", { type: "button", disabled: offset + skipped.length >= count, onclick: () => turn(1), "aria-label": "Next page" }, "→"))),
    h("ul", { class: "fields" }, skipped.map(item)));
});
