// Builds the page from the embedded documents.

const reports = JSON.parse(document.getElementById("reports").textContent);
const content = document.getElementById("content");

for (const report of reports) {
  if (reports.length > 1) content.append(h("header", { class: "part" }, h("h2", {}, report.title)));
  content.append(factList(report.facts));
  if (report.training) content.append(trainingSection(report.training));
  report.studies?.forEach((study) => content.append(...studySection(study)));
  if (report.accuracy) content.append(accuracySection(report.accuracy));
  if (report.plan) content.append(planSection(report.plan));
  if (report.profile) content.append(...profileSection(report.profile));
  content.append(originSection(report));
}

document.getElementById("contents").append(h("ul", {}, sections.map(({ id, title }) => h("li", {}, h("a", { href: `#${id}` }, title)))));
