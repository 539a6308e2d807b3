// Samples and shards that are not in the dataset, with the reasons.

const drawSkipped = latest(async (isLast, panel, offset) => {
  const answer = await fetchJson(`skipped?${new URLSearchParams({ offset, limit: PAGE_ROWS })}`);
  if (!isLast()) return;
  const { skipped, count } = answer;
  const item = ({ shard, offset: at, key, field, reason }) =>
    h("li", { class: "field" },
      h("h4", {}, h("code", {}, key === null ? "(key unknown)" : key), field && h("small", {}, `field ${field}`)),
      h("p", { class: "fault" }, reason),
      h("p", { class: "facts" }, `${shard} · offset ${formatCount(at)}`));
  const turn = (by) => drawSkipped(panel, offset + by * PAGE_ROWS);
  fill(panel,
    h("h2", {}, "Skipped"),
    h("p", { class: "about" }, count
      ? "The index leaves these out, because their headers or texts show a fault. Faults that only decoding shows are in the sample itself."
      : "The index leaves nothing out."),
    count > PAGE_ROWS && h("div", { class: "controls" },
      h("span", {}, `${formatCount(offset + 1)} to ${formatCount(offset + skipped.length)} of ${formatCount(count)}`),
      h("div", { class: "zoom" },
        h("button", { type: "button", disabled: offset === 0, onclick: () => turn(-1), "aria-label": "Previous page" }, "←"),
        h("button", { type: "button", disabled: offset + skipped.length >= count, onclick: () => turn(1), "aria-label": "Next page" }, "→"))),
    h("ul", { class: "fields" }, skipped.map(item)));
});
