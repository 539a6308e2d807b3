//! Expands braces in shard names: `{000..019}` counts, `{a,b}` chooses.
//!
//! Patterns also come from files that are published with a dataset, so expansion work is bounded: in groups,
//! in names and in bytes.

use crate::error::{Error, Result, SelectionError};
use crate::store::redact_name;

/// Maximum number of names in an expansion.
const NAMES_MAX: usize = 1_000_000;
/// Maximum size of an expansion in bytes, including intermediate texts.
const BYTES_MAX: usize = 256 << 20;
/// Maximum number of opening braces in a pattern; each may nest the expansion one level deeper.
const GROUPS_MAX: usize = 128;
/// Maximum number of digits in a padded number.
const DIGITS_MAX: usize = 32;

/// Names expanded from patterns, with one limit for all patterns.
#[derive(Debug, Default)]
pub(crate) struct Expansion {
    names: Vec<String>,
    bytes: usize,
}

impl Expansion {
    /// Appends the names that a pattern expands to, in order.
    ///
    /// # Errors
    /// [`Error::Selection`] if there are too many names, groups, bytes or digits.
    pub(crate) fn add(&mut self, pattern: &str) -> Result<()> {
        if pattern.bytes().filter(|byte| *byte == b'{').count() > GROUPS_MAX {
            let reason = format!("a pattern may have at most {GROUPS_MAX} opening braces");
            return Err(Error::Selection(SelectionError::ShardList {
                pattern: excerpt(&redact_name(pattern)),
                reason,
            }));
        }
        let refused = |reason| {
            Error::Selection(SelectionError::ShardList { pattern: excerpt(&redact_name(pattern)), reason })
        };
        self.expand(pattern.to_owned()).map_err(refused)
    }

    /// Returns all names.
    pub(crate) fn into_names(self) -> Vec<String> {
        self.names
    }

    /// Expands the first brace group in `text` and then, for each alternative, the rest.
    fn expand(&mut self, text: String) -> Result<(), String> {
        self.bytes += size_of::<String>() + text.len();
        if self.names.len() == NAMES_MAX || self.bytes > BYTES_MAX {
            return Err(format!("too many shards: more than {NAMES_MAX}, or {BYTES_MAX} bytes of names"));
        }
        let Some((open, close)) = first_group(&text) else {
            self.names.push(text);
            return Ok(());
        };
        let (before, inner, after) = (&text[..open], &text[open + 1..close], &text[close + 1..]);
        if let Some(range) = NumberRange::parse(inner) {
            return range.names()?.try_for_each(|name| self.expand(format!("{before}{name}{after}")));
        }
        choices(inner).into_iter().try_for_each(|choice| self.expand(format!("{before}{choice}{after}")))
    }
}

/// Shortens a pattern for a message.
fn excerpt(pattern: &str) -> String {
    const CHARACTERS: usize = 200;
    match pattern.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{}…", &pattern[..end]),
        None => pattern.to_owned(),
    }
}

/// Returns the first `{…}` that is a range or a choice; all other braces, such as a lone `{a}`, are literal.
fn first_group(text: &str) -> Option<(usize, usize)> {
    let mut from = 0;
    while let Some(open) = text[from..].find('{').map(|at| at + from) {
        let close = matching_brace(text, open)?;
        let inner = &text[open + 1..close];
        if inner.contains(',') || NumberRange::parse(inner).is_some() {
            return Some((open, close));
        }
        from = open + 1;
    }
    None
}

fn matching_brace(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (at, byte) in text.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return Some(at),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Splits a group's content at the top-level commas.
fn choices(inner: &str) -> Vec<&str> {
    let (mut choices, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for (at, byte) in inner.bytes().enumerate() {
        match byte {
            b',' if depth == 0 => {
                choices.push(&inner[start..at]);
                start = at + 1;
            }
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    choices.push(&inner[start..]);
    choices
}

/// Numbers from `from` to `to`, both included, also descending.
#[derive(Clone, Copy)]
struct NumberRange {
    from: i64,
    to: i64,
    /// Number of digits that numbers are padded to.
    width: usize,
}

impl NumberRange {
    fn parse(inner: &str) -> Option<Self> {
        let (from, to) = inner.split_once("..")?;
        let is_padded = [from, to].iter().any(|end| end.len() > 1 && end.starts_with('0'));
        let width = if is_padded { from.len().max(to.len()) } else { 0 };
        Some(Self { from: from.parse().ok()?, to: to.parse().ok()?, width })
    }

    /// Returns the numbers as texts.
    ///
    /// # Errors
    /// The reason, if there are too many numbers or the padding is too wide.
    fn names(self) -> Result<impl Iterator<Item = String>, String> {
        let Self { from, to, width } = self;
        if width > DIGITS_MAX {
            return Err(format!("numbers are padded to at most {DIGITS_MAX} digits, found {width}"));
        }
        let steps = from.abs_diff(to);
        if steps >= NAMES_MAX as u64 {
            return Err(format!("too many shards: more than {NAMES_MAX}"));
        }
        let number = move |step| if from <= to { from + step } else { from - step };
        Ok((0..=steps as i64).map(move |step| format!("{:0width$}", number(step))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand_name(pattern: &str) -> Result<Vec<String>> {
        let mut expansion = Expansion::default();
        expansion.add(pattern)?;
        Ok(expansion.into_names())
    }

    fn refusal(pattern: &str) -> String {
        expand_name(pattern).unwrap_err().to_string()
    }

    #[test]
    fn groups_expand_in_order() {
        let names = |pattern| expand_name(pattern).unwrap();
        assert_eq!(names("{a,b}-{0..1}"), ["a-0", "a-1", "b-0", "b-1"]);
        assert_eq!(names("{5..3}{,x}"), ["5", "5x", "4", "4x", "3", "3x"]);
        assert_eq!(names("{-1..1}{lone}"), ["-1{lone}", "0{lone}", "1{lone}"]);
        assert_eq!(names("{a,{b,c}{08..10}}"), ["a", "b08", "b09", "b10", "c08", "c09", "c10"]);
        assert_eq!(names(&format!("{{{0}1..{0}2}}", "0".repeat(31)))[1].len(), 32);
    }

    #[test]
    fn a_small_pattern_cannot_ask_for_unbounded_work() {
        assert!(refusal("{0..99999999}").contains("too many"));
        assert!(refusal(&format!("{{0..9999999}}{}", "x".repeat(400))).contains("too many"));
        assert!(refusal(&"{0,1}".repeat(40)).contains("too many"));
        assert!(refusal(&"{0..0}".repeat(60_000)).contains("128 opening braces"));
        assert!(refusal(&format!("{{0..{}9}}", "0".repeat(70_000))).contains("32 digits"));
        assert!(refusal(&format!("{{{}..{}}}", i64::MIN, i64::MAX)).contains("too many"));
        // The text around a choice is copied for each alternative, so many short names can still be large.
        assert!(refusal(&format!("{}{{{}}}", "y".repeat(60_000), ",".repeat(9_000))).contains("too many"));
        assert!(refusal(&"{0,1}".repeat(40)).len() < 600);
    }

    #[test]
    fn one_limit_holds_for_all_patterns_of_a_list() {
        let mut expansion = Expansion::default();
        let pattern = format!("{{0..99999}}{}", "x".repeat(900));
        assert!((0..4).any(|_| expansion.add(&pattern).is_err()));
    }
}
