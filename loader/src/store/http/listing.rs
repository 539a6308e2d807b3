//! Removes names that the bucket client cannot hold from listings, because a single such name would end the
//! listing.
//!
//! A key may have empty components, as in `a//b.tar`, but a listed key may not. Common prefixes are not used
//! here. Both are cut out of the response text; every other name stays as it is.

use std::borrow::Cow;

/// Listing elements that are names: prefixes, and objects with a name element.
const PREFIXES: [&str; 2] = ["CommonPrefixes", "BlobPrefix"];
const OBJECTS: [(&str, &str); 2] = [("Contents", "Key"), ("Blob", "Name")];

/// Returns whether a request query asks for a listing.
pub(super) fn is_listing(query: Option<&str>) -> bool {
    let mut parameters = query.unwrap_or_default().split('&');
    parameters.any(|parameter| matches!(parameter, "list-type=2" | "comp=list"))
}

/// Removes names that the client cannot hold from a listing, and warns about removed objects.
pub(super) fn without_unusable_names(listing: &str) -> Cow<'_, str> {
    let mut kept = Cow::Borrowed(listing);
    for prefix in PREFIXES {
        kept = without_elements(kept, prefix, |_| true);
    }
    for (object, name) in OBJECTS {
        kept = without_elements(kept, object, |element| {
            let key = inside(element, name).map(unescaped).unwrap_or_default();
            let is_unusable = !is_usable(&key);
            if is_unusable {
                tracing::warn!(%key, "an object is left out of a listing: the client cannot name it");
            }
            is_unusable
        });
    }
    kept
}

/// Removes the `name` elements that `is_removed` selects.
fn without_elements<'a>(
    text: Cow<'a, str>,
    name: &str,
    mut is_removed: impl FnMut(&str) -> bool,
) -> Cow<'a, str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let (mut kept, mut from, mut at) = (String::new(), 0, 0);
    while let Some(start) = text[at..].find(&open).map(|start| at + start) {
        let Some(end) = text[start..].find(&close).map(|end| start + end + close.len()) else { break };
        if is_removed(&text[start..end]) {
            kept.push_str(&text[from..start]);
            from = end;
        }
        at = end;
    }
    if from == 0 {
        return text;
    }
    kept.push_str(&text[from..]);
    Cow::Owned(kept)
}

fn inside<'a>(element: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = element.split_once(&format!("<{name}>"))?;
    Some(rest.split_once(&format!("</{name}>"))?.0)
}

/// Returns whether a key is a valid object path: no component is empty, `.` or `..`, or has control
/// characters.
fn is_usable(key: &str) -> bool {
    let key = key.strip_suffix('/').unwrap_or(key);
    object_store::path::Path::parse(key).is_ok_and(|path| path.as_ref() == key)
}

/// Replaces XML entities by the corresponding characters.
fn unescaped(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('&') {
        plain.push_str(&rest[..start]);
        let entity = rest[start..].split_once(';');
        let character = entity.and_then(|(entity, behind)| Some((entity_character(&entity[1..])?, behind)));
        let (character, behind) = character.unwrap_or(('&', &rest[start + 1..]));
        plain.push(character);
        rest = behind;
    }
    plain.push_str(rest);
    plain
}

fn entity_character(entity: &str) -> Option<char> {
    match entity {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => {
            let number = entity.strip_prefix('#')?;
            let code = match number.strip_prefix('x') {
                Some(digits) => u32::from_str_radix(digits, 16).ok()?,
                None => number.parse().ok()?,
            };
            char::from_u32(code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_client_cannot_hold_are_removed_and_others_stay() {
        let object = |key: &str| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
        let listing = |keys: &[&str]| {
            let objects: String = keys.iter().map(|key| object(key)).collect();
            format!("<ListBucketResult><Prefix>a/</Prefix>{objects}</ListBucketResult>")
        };
        let usable = ["a/b.tar", "a/b &amp; c.tar", "a/%2F?#.tar", "a/"];
        let all = [
            "a/b.tar",
            "a//b.tar",
            "a/b &amp; c.tar",
            "a/&#x2e;./b.tar",
            "/a.tar",
            "a/%2F?#.tar",
            "a/&#10;",
            "a/",
        ];
        assert_eq!(without_unusable_names(&listing(&all)), listing(&usable));
        assert!(matches!(without_unusable_names(&listing(&usable)), Cow::Borrowed(_)));
        let prefixes = "<L><CommonPrefixes><Prefix>a//</Prefix></CommonPrefixes><K>1</K></L>";
        assert_eq!(without_unusable_names(prefixes), "<L><K>1</K></L>");
        let blobs = "<Blobs><Blob><Name>a//b</Name></Blob><BlobPrefix><Name>a/</Name></BlobPrefix></Blobs>";
        assert_eq!(without_unusable_names(blobs), "<Blobs></Blobs>");
        assert_eq!(without_unusable_names("<Contents><Key>a"), "<Contents><Key>a");
    }

    #[test]
    fn only_listings_are_changed() {
        assert!(is_listing(Some("delimiter=%2F&list-type=2&prefix=a")));
        assert!(is_listing(Some("restype=container&comp=list")));
        assert!(!is_listing(Some("uploads")) && !is_listing(None));
    }
}
