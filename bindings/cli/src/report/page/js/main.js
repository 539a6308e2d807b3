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

// With a single study, its name is in the first link only.
const studies = reports.flatMap((report) => report.studies ?? []);
const suffix = studies.length === 1 ? `: ${studies[0].name}` : "";
const label = (title) => (suffix && title.endsWith(suffix) ? title.slice(0, -suffix.length) : title);
document.getElementById("contents").append(
  h("ul", {}, sections.map(({ id, title }) => h("li", {}, h("a", { href: `#${id}` }, label(title))))));
