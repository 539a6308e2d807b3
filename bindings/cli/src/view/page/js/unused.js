// Parts of samples that nothing uses, and the number of samples without a training target.

const drawUnused = (panel) => {
  const item = ({ field, part, samples, key, example }) =>
    h("li", { class: "field" },
      h("h4", {}, h("code", {}, part || field), part && h("small", {}, `field ${field}`)),
      example && h("p", {}, h("code", {}, example)),
      h("p", { class: "facts" }, `${plural(samples, "sample")} · first in ${key}`));
  const { unused, without_target: without } = summary;
  fill(panel,
    h("h2", {}, "Not used"),
    h("p", { class: "about" }, without
      ? `${formatCount(without)} of ${plural(summary.samples, "sample")} have no training target.`
      : "Every sample has a training target."),
    h("p", { class: "about" }, unused.length
      ? "Nothing reads these keys and fields. A conversation or a caption among them has a layout that is not known."
      : "Every key and field is read."),
    h("ul", { class: "fields" }, unused.map(item)));
};
