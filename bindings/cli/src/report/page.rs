//! Assembles the page: headline, summary, charts, table, notes.

use std::fmt::Write;

use super::svg::escape;
use super::{Report, StrategyView, loads, number, spread, timeline};

/// HTML after the content.
pub(super) const CLOSING: &str = "</main>\n</body>\n</html>\n";

const STYLE: &str = include_str!("style.css");

/// Hatch pattern of idle time; charts refer to it by name.
const PATTERNS: &str = "<svg class=\"patterns\" width=\"0\" height=\"0\" aria-hidden=\"true\"><defs>\
    <pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
    <rect class=\"hatch-ground\" width=\"6\" height=\"6\"/><rect class=\"hatch-line\" width=\"1.5\" height=\"6\"/>\
    </pattern></defs></svg>\n";

/// Renders the page.
///
/// All given text is escaped. The page needs no other file, fetches nothing and runs no script.
#[must_use]
pub(crate) fn render(report: &Report) -> String {
    let mut page = opening(&report.title);
    page.push_str(&headline(&report.strategies));
    page.push_str(&summary(&report.summary));
    page.push_str(&table(&report.strategies));
    page.push_str(&timeline::section(report));
    page.push_str(&loads::section(report));
    page.push_str(&spread::section(report));
    page.push_str(&notes(&report.notes));
    page.push_str(CLOSING);
    page
}

/// Returns the HTML before the content.
pub(super) fn opening(title: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{PATTERNS}<main>\n<header><h1>{title}</h1></header>\n"
    )
}

/// Writes the speed-up of the last strategy over the first, marked as simulated.
fn headline(strategies: &[StrategyView]) -> String {
    let [first, .., last] = strategies else { return String::new() };
    let speedup = number::speedup(first.step_seconds, last.step_seconds);
    let steps = [first, last].map(|strategy| number::seconds(strategy.step_seconds));
    let idle = [first, last].map(|strategy| number::percent(strategy.bubble_fraction));
    format!(
        "<section class=\"headline\"><p class=\"speedup\"><strong>{speedup}</strong> \
         <span class=\"badge\">simulated</span></p>\n<p>With <b class=\"name\">{}</b> a step takes {} in place of {} with <b class=\"name\">{}</b>; \
         stages are idle {} of the time in place of {}. No device ran: predicted stage times were put through \
         the pipeline schedule.</p></section>\n",
        escape(&last.name),
        steps[1],
        steps[0],
        escape(&first.name),
        idle[1],
        idle[0],
    )
}

pub(super) fn summary(entries: &[(String, String)]) -> String {
    if entries.is_empty() {
        return String::new();
    }
    let mut out = String::from("<dl class=\"summary\">\n");
    for (label, value) in entries {
        // Writing to a string never fails.
        let _ = writeln!(out, "<div><dt>{}</dt><dd>{}</dd></div>", escape(label), escape(value));
    }
    out.push_str("</dl>\n");
    out
}

fn table(strategies: &[StrategyView]) -> String {
    let Some(first) = strategies.first() else { return String::new() };
    let mut out = String::from(
        "<section><h2>Strategies</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th scope=\"col\">Strategy</th>\
         <th scope=\"col\">Step</th><th scope=\"col\">Idle</th><th scope=\"col\">Speed-up</th></tr></thead>\n<tbody>\n",
    );
    for strategy in strategies {
        let _ = writeln!(
            out,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&strategy.name),
            number::seconds(strategy.step_seconds),
            number::percent(strategy.bubble_fraction),
            number::speedup(first.step_seconds, strategy.step_seconds),
        );
    }
    out.push_str("</tbody></table></div></section>\n");
    out
}

pub(super) fn notes(notes: &[String]) -> String {
    if notes.is_empty() {
        return String::new();
    }
    let mut out = String::from("<section class=\"notes\"><h2>Notes</h2>\n<ul>\n");
    for note in notes {
        let _ = writeln!(out, "<li>{}</li>", escape(note));
    }
    out.push_str("</ul></section>\n");
    out
}
