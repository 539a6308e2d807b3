//! Page files: static, and the same for every dataset.

use crate::report::{PAGE_DOM, PAGE_FORMAT, PAGE_STYLE};

pub(super) const PAGE: &str = include_str!("view.html");
pub(super) const ICON: &str = include_str!("icon.svg");
/// Thumbnail for an image that cannot be decoded.
pub(super) const BROKEN: &str = include_str!("broken.svg");
/// Script parts after the report script parts, in dependency order.
const SCRIPTS: [&str; 7] = [
    include_str!("js/state.js"),
    include_str!("js/histogram.js"),
    include_str!("js/detail.js"),
    include_str!("js/table.js"),
    include_str!("js/skipped.js"),
    include_str!("js/unused.js"),
    include_str!("js/main.js"),
];

/// Returns the report style sheet with the additions for this page.
pub(super) fn style() -> String {
    format!("{PAGE_STYLE}\n{}", include_str!("view.css"))
}

/// Returns the script, which shares helpers with reports.
pub(super) fn script() -> String {
    format!("(() => {{\n\"use strict\";\n{PAGE_FORMAT}\n{PAGE_DOM}\n{}\n}})();\n", SCRIPTS.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_inline_or_from_elsewhere() {
        assert!(!PAGE.contains("<style") && !PAGE.contains(" style=") && !PAGE.contains("http"));
        assert!(!PAGE.contains(" onclick") && PAGE.matches("<script").count() == 1);
        let script = script();
        for unsafe_call in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!script.contains(unsafe_call), "{unsafe_call}");
        }
    }
}
