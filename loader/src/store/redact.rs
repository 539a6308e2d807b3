//! Removes credentials from URLs, before they are shown, logged or written.
//!
//! A URL is recognized by shape and not by a list of stores, because a mistyped URL has credentials, too: a
//! scheme followed by two slashes, with any name and case, or a known scheme followed by anything. Two parts
//! are removed. The user information is everything up to the `@` in the authority; if the text before the
//! path cannot be a host and a port, because a password has a `/`, everything up to the last `@`. The query
//! and the fragment are removed completely, because they contain signatures, also for object stores, whose
//! clients treat both as part of the key.

use std::borrow::Cow;
use std::ops::Range;

use super::url_parts::{is_secret, percent_decoded};

/// Schemes that start a URL even without slashes.
const KNOWN: [&str; 19] = [
    "http", "https", "s3", "s3a", "s3n", "gs", "gcs", "az", "azure", "adl", "wasb", "wasbs", "abfs", "abfss",
    "ftp", "ftps", "sftp", "file", "hf",
];
/// Quotes that enclose names in messages.
const QUOTES: [char; 3] = ['`', '"', '\''];
/// Maximum length of a URL whose closing quote is searched, in bytes.
const QUOTED_BYTES_MAX: usize = 8 << 10;
/// Characters at the end of an unquoted URL that belong to the sentence.
const PUNCTUATION: &[char] = &[')', ']', '}', '>', ',', '.', ';', ':', '\'', '`', '\\', '!'];

/// Returns the text without user information, queries and fragments in URLs.
///
/// A URL after a backtick or a quote ends before the next such mark; any other URL ends at white space or a
/// double quote.
///
/// ```
/// let text = dflop_loader::store::redact("could not read `https://user:secret@host/a.tar?signature=abc`");
/// assert_eq!(text, "could not read `https://host/a.tar`");
/// ```
#[must_use]
pub fn redact(text: &str) -> Cow<'_, str> {
    redact_until(text, url_end)
}

/// Returns a name without credentials; a URL extends to the end of the text. The URLs in a command are
/// redacted.
#[must_use]
pub fn redact_name(name: &str) -> Cow<'_, str> {
    if name.starts_with("pipe:") {
        return redact(name);
    }
    if next_url(name, 0).is_some() { redact_until(name, |name, _| name.len()) } else { redact_bare(name) }
}

/// Redacts the URLs in a text; `end` returns where a URL ends.
fn redact_until(text: &str, end: impl Fn(&str, &Found<'_>) -> usize) -> Cow<'_, str> {
    let without_queries = cut(text, |found| {
        let url_end = end(text, found);
        let user = found.authority + user_bytes(found, &text[found.authority..url_end]).unwrap_or(0);
        let query = query_at(&text[user..url_end]).map_or(url_end, |query| user + query);
        (query..url_end, url_end)
    });
    let text = &*without_queries;
    // A path may contain a second URL, with user information, which ends together with the first URL.
    let mut outer_end = 0;
    let bare = cut(text, |found| {
        if found.start >= outer_end {
            outer_end = end(text, found);
        }
        let user = found.authority + user_bytes(found, &text[found.authority..outer_end]).unwrap_or(0);
        (found.authority..user, user)
    });
    match bare {
        Cow::Owned(bare) => Cow::Owned(bare),
        Cow::Borrowed(_) => without_queries,
    }
}

/// Cuts parts out of a text; `part` returns the part for a URL, and where to search for the next URL.
fn cut(text: &str, mut part: impl FnMut(&Found<'_>) -> (Range<usize>, usize)) -> Cow<'_, str> {
    let mut left = String::new();
    let (mut kept, mut from) = (0, 0);
    while let Some(found) = next_url(text, from) {
        let (range, next) = part(&found);
        if !range.is_empty() {
            left.push_str(&text[kept..range.start]);
            kept = range.end;
        }
        from = next.max(found.authority);
    }
    if kept == 0 {
        return Cow::Borrowed(text);
    }
    left.push_str(&text[kept..]);
    Cow::Owned(left)
}

/// URL in a text.
struct Found<'a> {
    scheme: &'a str,
    /// Scheme position.
    start: usize,
    slashes: usize,
    /// Position after the slashes.
    authority: usize,
}

/// Returns the first URL whose colon is at `from` or later.
fn next_url(text: &str, from: usize) -> Option<Found<'_>> {
    for (at, _) in text[from..].match_indices(':') {
        let colon = from + at;
        let scheme = scheme_before(&text[..colon]);
        let rest = &text[colon + 1..];
        let slashes = rest.len() - rest.trim_start_matches(['/', '\\']).len();
        let is_known = || {
            KNOWN.iter().any(|known| known.eq_ignore_ascii_case(scheme))
                && rest.starts_with(|first: char| !first.is_whitespace() && !QUOTES.contains(&first))
        };
        if slashes >= 2 || is_known() {
            let (start, authority) = (colon - scheme.len(), colon + 1 + slashes);
            return Some(Found { scheme, start, slashes, authority });
        }
    }
    None
}

fn scheme_before(text: &str) -> &str {
    let is_other = |character: char| !character.is_ascii_alphanumeric() && !['+', '-'].contains(&character);
    text.rsplit(is_other).next().unwrap_or("").trim_start_matches(['+', '-'])
}

/// Returns where a URL in a sentence ends.
fn url_end(text: &str, found: &Found<'_>) -> usize {
    let start = found.authority;
    let line = text[start..].split('\n').next().unwrap_or_default();
    let near = &line[..line.floor_char_boundary(QUOTED_BYTES_MAX)];
    let quote = text[..found.start].chars().next_back().filter(|before| QUOTES.contains(before));
    let closing = quote.and_then(|quote| {
        // A quote inside the URL is followed by more URL text.
        let is_after = |next: char| next.is_whitespace() || next == '"' || PUNCTUATION.contains(&next);
        let is_closing = |at: &usize| line.len() == at + 1 || line[at + 1..].starts_with(is_after);
        near.match_indices(quote).map(|(at, _)| at).find(is_closing)
    });
    let end = closing.unwrap_or_else(|| {
        let url = line.find(|end: char| end.is_whitespace() || end == '"').map_or(line, |end| &line[..end]);
        url.trim_end_matches(PUNCTUATION).len()
    });
    // A quote inside nested quoted text is escaped.
    start + line[..end].trim_end_matches('\\').len()
}

/// Returns the length of the user information after the slashes, including the `@`.
fn user_bytes(found: &Found<'_>, url: &str) -> Option<usize> {
    let authority = &url[..url.find(['/', '?', '#', '\\']).unwrap_or(url.len())];
    let is_of = |scheme: &str| {
        found.scheme.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    let password = |user: &str| user.contains(':');
    match authority.rfind('@') {
        // The part before the `@` is a container.
        Some(at) if (is_of("abfs") || is_of("wasb")) && !password(&authority[..at]) => None,
        // A path, without user information.
        Some(at) if is_of("file") && found.slashes != 2 && !password(&authority[..at]) => None,
        // The path contains a user's password before a second `@`.
        Some(at) if password(&authority[..at]) => {
            let path = url.find(['?', '#']).unwrap_or(url.len());
            url[..path].rfind('@').map(|last| last.max(at) + 1)
        }
        Some(at) => Some(at + 1),
        None if has_port(authority) => None,
        None => url.rfind('@').map(|at| at + 1),
    }
}

/// Returns whether an authority without a user is a host with or without a port.
fn has_port(authority: &str) -> bool {
    let after_address = authority.rsplit(']').next().unwrap_or(authority);
    after_address.split_once(':').is_none_or(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns where the query, the fragment, or a signature among the path parameters starts.
fn query_at(url: &str) -> Option<usize> {
    let query = url.find(['?', '#']);
    let signed = url.match_indices([';', '&']).map(|(at, _)| at).find(|at| is_signed(&url[at + 1..]));
    query.into_iter().chain(signed).min()
}

/// Returns whether a text starts with a signature parameter and its value.
fn is_signed(text: &str) -> bool {
    text.split_once('=').is_some_and(|(name, _)| is_secret(name))
}

/// Cuts a name without a scheme where it can only be the rest of a URL: a user with a password before the
/// first slash, a signature parameter, or an encoded colon followed by the rest of a URL.
fn redact_bare(name: &str) -> Cow<'_, str> {
    if name.to_ascii_lowercase().contains("%3a") && !name.contains('\0') {
        let decoded = String::from_utf8_lossy(&percent_decoded(name)).into_owned();
        if next_url(&decoded, 0).is_some() {
            return Cow::Owned(redact_name(&decoded).into_owned());
        }
    }
    let start = if name.starts_with("//") { 2 } else { 0 };
    let first = &name[start..name[start..].find('/').map_or(name.len(), |at| start + at)];
    let user = first
        .rfind('@')
        .filter(|&at| start > 0 || first[..at].contains(':'))
        .map_or(start, |at| start + at + 1);
    let rest = &name[user..];
    let marks = rest.match_indices(['?', '&', ';']).map(|(at, _)| at);
    let signed = marks.clone().find(|at| is_signed(&rest[at + 1..]));
    let end = signed.map_or(rest.len(), |signed| rest.find('?').map_or(signed, |query| query.min(signed)));
    if user == start && end == rest.len() {
        return Cow::Borrowed(name);
    }
    Cow::Owned(format!("{}{}", &name[..start], &rest[..end]))
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
            ("s3://key:secret@bucket/a?b#c.tar", "s3://bucket/a"),
            ("s3://key:se/cr/et@bucket/a.tar", "s3://bucket/a.tar"),
            ("abfss://container@account.dfs/a.tar?sig=S", "abfss://container@account.dfs/a.tar"),
            ("/data/a?b@c.tar", "/data/a?b@c.tar"),
            ("https://h?sig=1", "https://h"),
            ("über://u:p@h/ä.tar", "über://h/ä.tar"),
            ("http://h:8080/pkg@1.0/a.tar", "http://h:8080/pkg@1.0/a.tar"),
            ("http://[::1]:80/a@b.tar", "http://[::1]:80/a@b.tar"),
            ("file:///data/a@b.tar?sig=S", "file:///data/a@b.tar"),
            ("https://proxy/http://u:p@h/a?s", "https://proxy/http://h/a"),
            ("://", "://"),
        ];
        for (url, name) in cases {
            assert_eq!(redact_name(url), name);
            assert_eq!(redact(&format!("see `{url}`, \"{url}\"")), format!("see `{name}`, \"{name}\""));
            assert_eq!(redact(&format!("({url}): no")), format!("({name}): no"));
            assert_eq!(
                redact(&format!("{:?}", format!("is \"{url}\""))),
                format!("{:?}", format!("is \"{name}\""))
            );
        }
        assert_eq!(redact_name("https://h/a b.tar?sig=a b"), "https://h/a b.tar");
        assert_eq!(redact_name("pipe:curl http://u:p@h/a?s=1 | cat"), "pipe:curl http://h/a | cat");
        assert!(matches!(redact_name("s3://bucket/a.tar"), Cow::Borrowed(_)));
        for name in ["a:1/b@2.tar", "d/a:1@2.tar", "/d/x:y@z?w=1", "12:30?.tar", "a%3Ab.tar"] {
            assert!(matches!(redact_name(name), Cow::Borrowed(_)), "{name}");
        }
        for text in ["error: file: u@h?", "http: a@b", "key `a:1@2` at 12:30?", "(https: yes)"] {
            assert!(matches!(redact(text), Cow::Borrowed(_)), "{text}");
        }
    }

    #[test]
    fn no_shape_of_a_url_keeps_its_secret() {
        let schemes = [
            "http", "https", "HTTP", "Https", "s3", "S3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss",
            "ftp", "sftp", "file", "hf", "svn+ssh", "x-other",
        ];
        let users = [
            "u:CANARY@",
            "u:CAN/CANARY@",
            "u:CAN@CANARY@",
            "u:CAN?CANARY@",
            "u:a/b@CANARY/c@",
            "u:`CANARY`@",
        ];
        let queries = [
            "?sig=CANARY",
            "?sv=1&X-Amz-Signature=CANARY",
            "#CANARY",
            ";Signature=CANARY",
            "&sig=CANARY",
            "?a=`CANARY",
            "?a='CANARY'x",
            "?CANARY?b#c",
        ];
        for scheme in schemes {
            for slashes in ["", "/", "//", "///", "////", "\\\\"] {
                let is_known = KNOWN.iter().any(|known| known.eq_ignore_ascii_case(scheme));
                if !is_known && slashes.len() < 2 {
                    continue;
                }
                let with_users = users.map(|user| format!("{scheme}:{slashes}{user}h/n.tar"));
                let with_queries = queries.map(|query| format!("{scheme}:{slashes}h/d/n.tar{query}"));
                for url in with_users.iter().chain(&with_queries) {
                    let name = redact_name(url);
                    assert!(!name.contains("CANARY") && name.contains("n.tar"), "{url}: {name}");
                    for text in [
                        format!("could not read `{url}`: no"),
                        format!("for url ({url}), x"),
                        format!(" {url} "),
                    ] {
                        assert!(!redact(&text).contains("CANARY"), "{text}: {}", redact(&text));
                    }
                }
            }
        }
    }

    #[test]
    fn the_rest_of_a_url_without_its_scheme_is_a_url_among_names() {
        for name in [
            "u:CANARY@h/n.tar",
            "//u:CANARY@h/n.tar",
            "//CANARY@h/n.tar",
            "h/n.tar?X-Amz-Signature=CANARY",
            "h/n.tar?a=CANARY&sig=1",
            "http%3A//u:CANARY@h/n.tar",
            "http%3a%2F%2Fu:CANARY%40h/n.tar",
            " http://u:CANARY@h/n.tar",
            "x=http://u:CANARY@h/n.tar",
        ] {
            let redacted = redact_name(name);
            assert!(!redacted.contains("CANARY") && redacted.contains("n.tar"), "{name}: {redacted}");
        }
    }
}
