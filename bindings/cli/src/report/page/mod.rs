//! Renders documents as a self-contained HTML page.
//!
//! The verdict is plain HTML, so that it is there without scripts; the script draws the rest from the
//! embedded documents. A content security policy allows exactly the style and the script in this build, by
//! hash, and images in the page itself: nothing is fetched, regardless of the data.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};

use super::document::{Basis, RunReport, Verdict};
use super::fit::fit;
use crate::failure::Failure;

/// Maximum page size in bytes.
pub(crate) const PAGE_BYTES_MAX: usize = 2_000_000;

const TEMPLATE: &str = include_str!("template.html");
const STYLE: &str = concat!(include_str!("vendor/uPlot.min.css"), "\n", include_str!("style.css"));
/// Style sheet, and script helpers that other pages share.
pub(crate) const PAGE_STYLE: &str = include_str!("style.css");
pub(crate) const PAGE_FORMAT: &str = include_str!("js/format.js");
pub(crate) const PAGE_DOM: &str = include_str!("js/dom.js");
const LIBRARY: &str = include_str!("vendor/uPlot.iife.min.js");
/// Script parts, in dependency order.
const SCRIPTS: [&str; 10] = [
    PAGE_FORMAT,
    PAGE_DOM,
    include_str!("js/zoom.js"),
    include_str!("js/samples.js"),
    include_str!("js/timeline.js"),
    include_str!("js/scatter.js"),
    include_str!("js/study.js"),
    include_str!("js/training.js"),
    include_str!("js/sections.js"),
    include_str!("js/main.js"),
];

/// Start and end of the embedded documents in a page.
const DOCUMENTS: [&str; 2] = [r#"<script type="application/json" id="reports">"#, "</script>"];

/// Renders reports as a page with at most [`PAGE_BYTES_MAX`] bytes; details that do not fit are left out,
/// with a note.
///
/// # Errors
/// [`Failure::Failed`] if a document cannot be written as JSON, or is too large without its details.
pub(crate) fn render(mut reports: Vec<RunReport>) -> Result<String, Failure> {
    let script = format!("(() => {{\n\"use strict\";\n{LIBRARY}\n{}\n}})();", SCRIPTS.join("\n"));
    let static_bytes = TEMPLATE.len() + STYLE.len() + script.len();
    // Escapes extend the text; the rest is for the verdict.
    let fixed_bytes = static_bytes + 64_000;
    let mut bytes_max = PAGE_BYTES_MAX - fixed_bytes;
    let failed = |error: serde_json::Error| Failure::Failed(error.to_string());
    loop {
        fit(&mut reports, bytes_max);
        let documents = safe_json(&serde_json::to_string(&reports).map_err(failed)?);
        let page = fill(&reports, &documents, &script);
        if page.len() <= PAGE_BYTES_MAX {
            return Ok(page);
        }
        if bytes_max < 1_000 {
            return Err(Failure::Failed(format!(
                "the report takes {} bytes, and a page has at most {PAGE_BYTES_MAX}; report fewer documents",
                page.len()
            )));
        }
        bytes_max /= 2;
    }
}

fn fill(reports: &[RunReport], documents: &str, script: &str) -> String {
    let title = match reports {
        [only] => only.title.clone(),
        _ => "dflop report".to_owned(),
    };
    let verdicts = reports.iter().flat_map(|report| &report.verdict).map(verdict).collect::<String>();
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; img-src data:; base-uri 'none'; form-action 'none'",
        hash(script),
        hash(STYLE)
    );
    // Filled in one pass, so that nothing in the data is taken for a place to fill.
    let mut page = String::with_capacity(TEMPLATE.len() + STYLE.len() + script.len() + documents.len());
    let mut rest = TEMPLATE;
    while let Some((before, after)) = rest.split_once("{{") {
        page.push_str(before);
        let Some((name, after)) = after.split_once("}}") else { break };
        match name {
            "title" => page.push_str(&escape(&title)),
            "policy" => page.push_str(&policy),
            "style" => page.push_str(STYLE),
            "verdict" => page.push_str(&verdicts),
            "documents" => {
                page.push_str(DOCUMENTS[0]);
                page.push_str(documents);
                page.push_str(DOCUMENTS[1]);
            }
            "script" => page.push_str(script),
            _ => {}
        }
        rest = after;
    }
    page.push_str(rest);
    page
}

fn verdict(verdict: &Verdict) -> String {
    let (class, badge) = match verdict.basis {
        Basis::Simulated => ("simulated", "simulated"),
        Basis::Measured => ("measured", "measured"),
        Basis::Counted => ("counted", "counted"),
    };
    let figure = if verdict.figure.is_empty() {
        String::new()
    } else {
        format!("<strong>{}</strong> ", escape(&verdict.figure))
    };
    format!(
        "<p class=\"verdict {class}\">{figure}<span class=\"badge {class}\">{badge}</span> <span>{}</span></p>\n",
        escape(&verdict.text)
    )
}

/// Returns the hash of a style or script, as a content security policy names it.
fn hash(text: &str) -> String {
    format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(text)))
}

/// Escapes JSON for an element of HTML: no text in it ends the element or starts a comment.
fn safe_json(json: &str) -> String {
    json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

/// Escapes text for an element or an attribute.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

/// Returns the documents in a page, as JSON.
pub(super) fn documents_of_page(page: &str) -> Option<&str> {
    let (_, rest) = page.split_once(DOCUMENTS[0])?;
    rest.split_once(DOCUMENTS[1]).map(|(documents, _)| documents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::{Basis, Origin, Sample, Study};
    use crate::report::verdict::verdict;

    fn report(text: &str) -> RunReport {
        let mut report = RunReport::new("simulate", text, Origin::default());
        report.verdict.push(verdict(Basis::Simulated, text));
        report.fact(text, text);
        report.studies.push(Study {
            name: text.to_owned(),
            about: String::new(),
            modules: Vec::new(),
            strategies: Vec::new(),
            samples: vec![Sample { key: text.to_owned(), ..Sample::default() }],
            steps: Vec::new(),
        });
        report
    }

    #[test]
    fn markup_in_data_is_text() {
        let evil = "</script><script>alert(1)</script><!-- & {{script}} \u{2028}";
        let page = render(vec![report(evil)]).unwrap();
        assert!(!page.contains("alert(1)</script>") && !page.contains("<!-- &"));
        assert_eq!(page.matches("<script").count(), 2, "the documents, and the script");
        assert_eq!(page.matches("</script").count(), 2);
        let documents = documents_of_page(&page).unwrap();
        let read: Vec<RunReport> = serde_json::from_str(documents).unwrap();
        assert_eq!(read, [report(evil)]);
        assert!(page.contains("&lt;/script&gt;&lt;script&gt;"));
    }

    #[test]
    fn nothing_is_fetched() {
        let page = render(vec![report("t")]).unwrap();
        for word in
            ["src=", "href=\"http", "@import", "url(", "fetch(", "XMLHttpRequest", "eval(", "innerHTML ="]
        {
            let own = page.replace("img-src data:", "");
            let library = LIBRARY.matches(word).count();
            assert_eq!(own.matches(word).count(), library, "{word}");
        }
        assert!(page.contains("default-src 'none'; script-src 'sha256-"));
    }

    #[test]
    fn the_policy_has_the_hashes_of_what_the_page_contains() {
        let page = render(vec![report("t")]).unwrap();
        let inside = |start: &str, end: &str| {
            let (_, rest) = page.split_once(start).unwrap();
            rest.split_once(end).unwrap().0.to_owned()
        };
        assert!(page.contains(&hash(&inside("<style>", "</style>"))));
        assert!(page.contains(&hash(&inside("<script>", "</script>"))));
    }

    #[test]
    fn a_page_is_never_too_large() {
        let mut large = report("t");
        // Each character becomes six in the page.
        let samples = (0..3_000)
            .map(|number| Sample { key: format!("{number}{}", "<".repeat(400)), ..Sample::default() });
        large.studies[0].samples = samples.collect();
        let page = render(vec![large.clone()]).unwrap();
        assert!(page.len() <= PAGE_BYTES_MAX);
        large.notes.push("<".repeat(PAGE_BYTES_MAX));
        assert!(render(vec![large]).is_err());
    }

    /// The library files are those in the package, and the document next to them has the checksums.
    #[test]
    fn the_library_is_the_published_one() {
        let readme = include_str!("vendor/README.md");
        let files = [
            ("uPlot.iife.min.js", LIBRARY),
            ("uPlot.min.css", include_str!("vendor/uPlot.min.css")),
            ("LICENSE", include_str!("vendor/LICENSE")),
        ];
        for (name, content) in files {
            let bytes = Sha256::digest(content);
            let digest = bytes.iter().fold(String::new(), |digest, byte| format!("{digest}{byte:02x}"));
            let row = format!("| `{name}` | {} | `{digest}` |", content.len());
            assert!(readme.contains(&row), "expected the row {row}");
        }
        assert!(LIBRARY.starts_with("/*! https://github.com/leeoniya/uPlot (v1.6.32) */"));
        assert!(!LIBRARY.contains("</script") && readme.contains("1.6.32"));
    }
}
