//! Parts of URLs: parameters that sign them or are secret, users, escapes.

/// Parameters of a query that sign a URL or describe its signature; they change from one signature to the
/// next and name nothing.
const SIGNATURE: [&str; 25] = [
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-Security-Token",
    "X-Amz-Signature",
    "X-Amz-SignedHeaders",
    "X-Goog-Algorithm",
    "X-Goog-Credential",
    "X-Goog-Date",
    "X-Goog-Expires",
    "X-Goog-Signature",
    "X-Goog-SignedHeaders",
    "AWSAccessKeyId",
    "GoogleAccessId",
    "OSSAccessKeyId",
    "Key-Pair-Id",
    "Signature",
    "sig",
    "q-sign-algorithm",
    "q-ak",
    "q-sign-time",
    "q-key-time",
    "q-signature",
    "q-header-list",
];
/// Parameters that belong to a signature only beside `Signature`.
const BESIDE_SIGNATURE: [&str; 3] = ["Expires", "Policy", "Hash-Algorithm"];
/// Parameters of Azure that belong to a signature only beside `sig`.
const BESIDE_SIG: [&str; 16] = [
    "sv", "ss", "srt", "sr", "sp", "st", "se", "spr", "sip", "skoid", "sktid", "skt", "ske", "sks", "skv",
    "sdd",
];

/// Returns a URL without the parameters of its signature, which change while the object stays the same.
/// Everything else is part of its name.
pub(crate) fn without_signature(url: &str) -> String {
    let is_http = url.split_once("://").is_some_and(|(scheme, _)| matches!(scheme, "http" | "https"));
    let bare = if is_http { url.split('#').next().unwrap_or(url) } else { url };
    let Some((path, query)) = bare.split_once('?').filter(|_| is_http) else { return bare.to_owned() };
    let name = |parameter: &'_ str| parameter.split('=').next().unwrap_or_default().to_owned();
    let names: Vec<String> = query.split('&').map(name).collect();
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    let (has_signature, has_sig) = (has("Signature"), has("sig"));
    let is_signature = |name: &str| {
        SIGNATURE.contains(&name)
            || (has_signature && BESIDE_SIGNATURE.contains(&name))
            || (has_sig && BESIDE_SIG.contains(&name))
    };
    let kept: Vec<&str> = query.split('&').filter(|parameter| !is_signature(&name(parameter))).collect();
    if kept.is_empty() { path.to_owned() } else { format!("{path}?{}", kept.join("&")) }
}

/// Other parameters that are secret.
const SECRET: [&str; 6] = ["token", "access_token", "api_key", "apikey", "password", "secret"];

/// Returns whether a parameter of a query is secret by its name, in any case.
pub(super) fn is_secret(name: &str) -> bool {
    SIGNATURE.iter().chain(&SECRET).any(|known| known.eq_ignore_ascii_case(name))
}

/// Returns the URL of an HTTP server without its user and password.
pub(crate) fn without_user(url: &str) -> String {
    let Some((scheme @ ("http" | "https"), rest)) = url.split_once("://") else { return url.to_owned() };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let host = rest[..end].rfind('@').map_or(0, |at| at + 1);
    format!("{scheme}://{}", &rest[host..])
}

/// Replaces `%NN` by the byte; what is no escape stays.
pub(crate) fn percent_decoded(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let (mut decoded, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 3).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let escaped = digits
            .filter(|_| bytes[at] == b'%')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        decoded.push(escaped.unwrap_or(bytes[at]));
        at += if escaped.is_some() { 3 } else { 1 };
    }
    decoded
}
