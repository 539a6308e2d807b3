//! Removes credentials from URLs, before they are shown, logged or written.

use std::borrow::Cow;

/// Characters that end a URL within a text.
const ENDS: [char; 3] = ['"', '`', '\\'];

/// Returns the text without the user information of its URLs, and without the queries of those for HTTP,
/// which carry signatures. A URL ends at white space, a double quote or a backtick.
///
/// ```
/// let text = dflop_loader::store::redact("could not read `https://user:secret@host/a.tar?signature=abc`");
/// assert_eq!(text, "could not read `https://host/a.tar`");
/// ```
#[must_use]
pub fn redact(text: &str) -> Cow<'_, str> {
    redact_until(text, |character| character.is_whitespace() || ENDS.contains(&character))
}

/// Returns a name without credentials; if it is a URL, it ends with the text. The URLs in a command are
/// redacted.
pub(crate) fn redact_name(name: &str) -> Cow<'_, str> {
    if name.starts_with("pipe:") { redact(name) } else { redact_until(name, |_| false) }
}

fn redact_until(text: &str, is_end: impl Fn(char) -> bool) -> Cow<'_, str> {
    let mut redacted = String::new();
    let mut kept = 0;
    let mut from = 0;
    while let Some(colon) = text[from..].find("://").map(|at| from + at) {
        let url_end = text[colon..].find(&is_end).map_or(text.len(), |at| colon + at);
        let scheme = scheme_before(&text[..colon]);
        let authority = colon + 3;
        let authority_end =
            text[authority..url_end].find(['/', '?', '#']).map_or(url_end, |at| authority + at);
        if let Some(user) = user_bytes(scheme, &text[authority..authority_end]) {
            redacted.push_str(&text[kept..authority]);
            kept = authority + user;
        }
        if matches!(scheme, "http" | "https")
            && let Some(query) = text[authority..url_end].find(['?', '#'])
        {
            redacted.push_str(&text[kept..authority + query]);
            kept = url_end;
        }
        from = url_end.max(authority);
    }
    if kept == 0 {
        return Cow::Borrowed(text);
    }
    redacted.push_str(&text[kept..]);
    Cow::Owned(redacted)
}

fn scheme_before(text: &str) -> &str {
    text.rsplit(|character: char| !character.is_ascii_alphanumeric()).next().unwrap_or("")
}

/// Returns the length of the user information, with its `@`; the part before the `@` of `abfss://` is a
/// container.
fn user_bytes(scheme: &str, authority: &str) -> Option<usize> {
    let at = authority.rfind('@')?;
    let is_container = scheme.starts_with("abfs") && !authority[..at].contains(':');
    (!is_container).then_some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_removed_and_everything_else_is_kept() {
        let cases = [
            ("https://u:p@h:8/a.tar?X-Amz-Signature=S", "https://h:8/a.tar"),
            ("http://token@h/a.tar#k", "http://h/a.tar"),
            ("https://u:p@ss@h/{a,b}.tar", "https://h/{a,b}.tar"),
            ("s3://key:secret@bucket/a?b#c.tar", "s3://bucket/a?b#c.tar"),
            ("abfss://container@account.dfs/a.tar", "abfss://container@account.dfs/a.tar"),
            ("/data/a?b@c.tar", "/data/a?b@c.tar"),
            ("https://h?sig=1", "https://h"),
            ("über://u:p@h/ä.tar", "über://h/ä.tar"),
            ("://", "://"),
        ];
        for (url, name) in cases {
            assert_eq!(redact_name(url), name);
            assert_eq!(redact(&format!("see `{url}`, \"{url}\"")), format!("see `{name}`, \"{name}\""));
        }
        assert_eq!(redact_name("https://h/a b.tar?sig=a b"), "https://h/a b.tar");
        assert_eq!(redact_name("pipe:curl http://u:p@h/a?s=1 | cat"), "pipe:curl http://h/a | cat");
        assert!(matches!(redact_name("s3://bucket/a.tar"), Cow::Borrowed(_)));
    }
}
