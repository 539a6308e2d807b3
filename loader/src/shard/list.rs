//! Expands names of shards: lists, brace patterns, directories and environment variables.
//!
//! `{000..019}` counts (with padding, also down), `{a,b}` chooses, `::` joins lists, `${NAME}` is taken from
//! the environment, a directory expands to the shards inside it, a shard list of wids (`NAME.json`) to the
//! shards listed in it. `-` is standard input and `pipe:` starts a command whose output is the shard.
//! `s3://`, `gs://`, `az://`, `abfs://`, `http://` and `https://` name shards of a [store](crate::store); a
//! directory there ends with `/`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::wids::listed_shards;
use crate::error::{Error, Result};
use crate::store::{Location, Opened, RemoteObject, Stores, is_remote, list_directory, open, without_query};

/// Most shards of a pattern.
const SHARDS_MAX: usize = 10_000_000;
/// Rounds of environment substitution, as webdataset allows.
const SUBSTITUTION_ROUNDS: usize = 10;
/// Endings of file names that count as shards of a directory.
const DIRECTORY_ENDINGS: [&str; 6] = [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.zstd"];

/// Shard of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// The name as given, after expansion.
    pub url: Arc<str>,
    /// Location of the shard's bytes.
    pub location: Location,
}

impl Shard {
    fn new(url: String, stores: &Stores) -> Result<Self> {
        let url: Arc<str> = url.into();
        let location = match &*url {
            "-" => Location::StandardInput,
            "pipe:" => return Err(invalid(&url, "no command follows `pipe:`")),
            _ if url.starts_with("pipe:") => Location::Pipe(url["pipe:".len()..].to_owned()),
            _ if is_remote(&url) => Location::Remote(stores.object(&url)?),
            _ => Location::File(local_path(&url)?),
        };
        Ok(Self { url, location })
    }

    /// Opens a shard that is not remote.
    ///
    /// # Errors
    /// [`Error::Read`] if the file cannot be mapped, the command cannot be started, or the shard is remote.
    pub(crate) fn open(&self) -> Result<Opened> {
        open(&self.location).map_err(|source| self.read_error(source))
    }

    /// Converts an error of the store to one that names the shard.
    pub(crate) fn read_error(&self, source: std::io::Error) -> Error {
        Error::Read { shard: self.url.to_string(), source }
    }

    /// Returns the path of a local file, `None` for streams.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.location {
            Location::File(path) => Some(path),
            _ => None,
        }
    }

    /// Returns the object on a remote store, `None` for what is not remote.
    #[must_use]
    pub fn remote(&self) -> Option<&RemoteObject> {
        match &self.location {
            Location::Remote(object) => Some(object),
            _ => None,
        }
    }

    /// Returns the last component of the name, without the signature of a signed URL.
    #[must_use]
    pub fn base_name(&self) -> &str {
        without_query(&self.url).rsplit('/').next().unwrap_or(&self.url)
    }
}

fn local_path(url: &str) -> Result<PathBuf> {
    if let Some(path) = url.strip_prefix("file://") {
        return Ok(path.into());
    }
    match url.split_once("://") {
        Some((scheme, _)) => {
            let supported = "s3, gs, az, abfs, abfss, http and https are";
            Err(invalid(url, format!("`{scheme}://` is not supported; {supported}")))
        }
        None => Ok(url.strip_prefix("file:").unwrap_or(url).into()),
    }
}

fn invalid(pattern: &str, reason: impl Into<String>) -> Error {
    Error::ShardList { pattern: pattern.to_owned(), reason: reason.into() }
}

/// Expands patterns to shards, in order; remote ones are reached with the default settings.
///
/// # Errors
/// See [`expand_shards_in`].
pub fn expand_shards<S: AsRef<str>>(patterns: &[S]) -> Result<Vec<Shard>> {
    expand_shards_in(patterns, &Stores::default())
}

/// Expands patterns to shards, in order; remote ones are reached through `stores`.
///
/// Blocks while the directory of a bucket is listed; no other pattern contacts a store.
///
/// # Errors
/// [`Error::ShardList`] if a pattern is malformed, uses an unset variable, an unsupported scheme, or a
/// directory without shards; or if there is no pattern. [`Error::Read`] if a directory cannot be listed,
/// [`Error::Index`] if a JSON file is not a shard list.
pub fn expand_shards_in<S: AsRef<str>>(patterns: &[S], stores: &Stores) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    for pattern in patterns {
        for part in parts_of(pattern.as_ref()) {
            let part = substitute_environment(part)?;
            let mut names = Vec::new();
            expand_braces(&part, &mut names)?;
            for name in names {
                push_shards(name, stores, &mut shards)?;
            }
        }
    }
    if shards.is_empty() {
        return Err(invalid("", "no shard is named"));
    }
    Ok(shards)
}

/// Splits a list at `::`, but not inside the brackets of an IPv6 address: `http://[::1]/a.tar`.
fn parts_of(list: &str) -> Vec<&str> {
    let (mut parts, mut start, mut is_address) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if list[..at].ends_with("://") || is_behind_user(&list[start..at]) => is_address = true,
            b']' => is_address = false,
            b':' if !is_address && at >= start && list[at..].starts_with("::") => {
                parts.push(&list[start..at]);
                start = at + 2;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts
}

/// Returns whether a name ends where the host of a URL starts, after `USER:PASSWORD@`.
fn is_behind_user(name: &str) -> bool {
    let authority = name.split_once("://").map(|(_, authority)| authority);
    authority.is_some_and(|authority| authority.ends_with('@') && !authority.contains('/'))
}

/// Expands the braces of a base name.
///
/// # Errors
/// [`Error::ShardList`] if it expands to too many names.
pub(crate) fn expand_name(pattern: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    expand_braces(pattern, &mut names)?;
    Ok(names)
}

/// Formats a list of shards for a message: the first, and the number of others.
pub(crate) fn display_shards(shards: &[Shard]) -> String {
    match shards {
        [] => "nothing".into(),
        [only] => only.url.to_string(),
        [first, more @ ..] => format!("{} and {} more", first.url, more.len()),
    }
}

fn push_shards(name: String, stores: &Stores, shards: &mut Vec<Shard>) -> Result<()> {
    if name.is_empty() {
        return Err(invalid(&name, "a shard name is empty"));
    }
    let shard = Shard::new(name, stores)?;
    if let Some(directory) = shard.remote().filter(|object| object.is_directory()) {
        for url in remote_shards_in(directory, &shard)? {
            shards.push(Shard::new(url, stores)?);
        }
        return Ok(());
    }
    let looks_like_pattern = shard.path().is_some() && shard.url.contains(['*', '?', '{', '}']);
    if looks_like_pattern && shard.path().is_some_and(|path| !path.exists()) {
        let reason =
            "no such file; patterns are `{000..019}` and `{a,b}`, and a directory stands for its shards";
        return Err(invalid(&shard.url, reason));
    }
    if let Some(list) = shard.path().filter(|path| is_shard_list(path)) {
        for url in listed_shards(list)? {
            shards.push(Shard::new(url, stores)?);
        }
        return Ok(());
    }
    match shard.path().filter(|path| path.is_dir()) {
        Some(directory) => {
            for path in shards_in(directory)? {
                shards.push(Shard::new(path, stores)?);
            }
        }
        None => shards.push(shard),
    }
    Ok(())
}

/// Returns whether a file is a shard list of wids.
fn is_shard_list(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json") && path.is_file()
}

fn remote_shards_in(directory: &RemoteObject, shard: &Shard) -> Result<Vec<String>> {
    let urls = list_directory(directory)
        .map_err(|source| Error::Read { shard: shard.url.to_string(), source })?
        .into_iter()
        .filter(|url| is_shard_name(url))
        .collect::<Vec<_>>();
    if urls.is_empty() {
        return Err(invalid(&shard.url, "no .tar, .tar.gz, .tgz or .tar.zst object lies below it"));
    }
    Ok(urls)
}

fn is_shard_name(name: &str) -> bool {
    let name = name.to_lowercase();
    DIRECTORY_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

fn shards_in(directory: &Path) -> Result<Vec<String>> {
    let shown = directory.display().to_string();
    let read_error = |source| Error::Read { shard: shown.clone(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(read_error)? {
        let path = entry.map_err(read_error)?.path();
        if is_shard_name(&path.to_string_lossy()) {
            let shown = path.display().to_string();
            let path = path.into_os_string().into_string();
            paths.push(path.map_err(|_| invalid(&shown, "the name is not UTF-8; rename the shard"))?);
        }
    }
    paths.sort_unstable();
    if paths.is_empty() {
        let reason = "the directory holds no .tar, .tar.gz, .tgz or .tar.zst file; `dflop pack` makes shards of a directory";
        return Err(invalid(&shown, reason));
    }
    Ok(paths)
}

fn substitute_environment(pattern: &str) -> Result<String> {
    let mut text = pattern.to_owned();
    for _ in 0..SUBSTITUTION_ROUNDS {
        let Some(start) = text.find("${") else { return Ok(text) };
        let Some(length) = text[start..].find('}') else { return Ok(text) };
        let name = &text[start + 2..start + length];
        let value = std::env::var(name)
            .map_err(|_| invalid(pattern, format!("environment variable `{name}` is not set")))?;
        text.replace_range(start..=start + length, &value);
    }
    Ok(text)
}

/// Expands the first brace group of `text` and, for each of its alternatives, the rest.
///
/// # Errors
/// [`Error::ShardList`] if there are too many.
pub(crate) fn expand_braces(text: &str, names: &mut Vec<String>) -> Result<()> {
    let Some((open, close)) = first_group(text) else {
        names.push(text.to_owned());
        return if names.len() > SHARDS_MAX { Err(invalid(text, "too many shards")) } else { Ok(()) };
    };
    let (before, inner, after) = (&text[..open], &text[open + 1..close], &text[close + 1..]);
    for choice in alternatives(text, inner)? {
        expand_braces(&format!("{before}{choice}{after}"), names)?;
    }
    Ok(())
}

/// Returns the first `{…}` that is a range or a choice; others, such as a lone `{a}`, are literal.
fn first_group(text: &str) -> Option<(usize, usize)> {
    let mut from = 0;
    while let Some(open) = text[from..].find('{').map(|at| at + from) {
        let close = matching_brace(text, open)?;
        let inner = &text[open + 1..close];
        if inner.contains(',') || parse_range(inner).is_some() {
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

fn alternatives(pattern: &str, inner: &str) -> Result<Vec<String>> {
    if let Some(range) = parse_range(inner) {
        if range.count() > SHARDS_MAX {
            return Err(invalid(pattern, "too many shards"));
        }
        return Ok(range.names());
    }
    let mut depth = 0usize;
    let mut choices = vec![String::new()];
    for character in inner.chars() {
        match character {
            ',' if depth == 0 => {
                choices.push(String::new());
                continue;
            }
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        choices.last_mut().expect("starts with one").push(character);
    }
    Ok(choices)
}

struct NumberRange {
    from: i64,
    to: i64,
    width: usize,
}

fn parse_range(inner: &str) -> Option<NumberRange> {
    let (from, to) = inner.split_once("..")?;
    let is_padded = [from, to].iter().any(|end| end.len() > 1 && end.starts_with('0'));
    let width = if is_padded { from.len().max(to.len()) } else { 0 };
    Some(NumberRange { from: from.parse().ok()?, to: to.parse().ok()?, width })
}

impl NumberRange {
    fn count(&self) -> usize {
        self.from.abs_diff(self.to).try_into().unwrap_or(usize::MAX)
    }

    fn names(&self) -> Vec<String> {
        let Self { from, to, width } = *self;
        let name = |number: i64| format!("{number:0width$}");
        if from <= to { (from..=to).map(name).collect() } else { (to..=from).rev().map(name).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(pattern: &str) -> Vec<String> {
        expand_shards(&[pattern]).unwrap().iter().map(|shard| shard.url.to_string()).collect()
    }

    #[test]
    fn braces_expand_as_webdataset_expands_them() {
        assert_eq!(urls("{a,b}-{0..1}.tar"), ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]);
        assert_eq!(urls("x.tar::y.tar"), ["x.tar", "y.tar"]);
        assert_eq!(urls("a-{5..3}.tar"), ["a-5.tar", "a-4.tar", "a-3.tar"]);
        assert_eq!(urls("{008..010}.tar"), ["008.tar", "009.tar", "010.tar"]);
        assert_eq!(urls("pipe:cat f-{0..1}.tar"), ["pipe:cat f-0.tar", "pipe:cat f-1.tar"]);
        assert_eq!(urls("{a,{b,c}{0..1}}.tar"), ["a.tar", "b0.tar", "b1.tar", "c0.tar", "c1.tar"]);
    }

    #[test]
    fn lists_are_split_between_urls_and_not_inside_addresses() {
        let lists: [(&str, &[&str]); 6] = [
            ("http://[::1]:8/a.tar::b.tar", &["http://[::1]:8/a.tar", "b.tar"]),
            ("b.tar::https://u:p@[fe80::2]/a.tar", &["b.tar", "https://u:p@[fe80::2]/a.tar"]),
            ("pipe:curl http://[::1]/a.tar::b.tar", &["pipe:curl http://[::1]/a.tar", "b.tar"]),
            ("http://h/[a::b].tar", &["http://h/[a", "b].tar"]),
            ("[a::b]", &["[a", "b]"]),
            ("a:::b::::", &["a", ":b", "", ""]),
        ];
        for (list, parts) in lists {
            assert_eq!(parts_of(list), parts);
        }
        assert_eq!(urls("http://[::1]:8/{0..1}.tar").len(), 2);
    }

    #[test]
    fn environment_variables_are_substituted_or_named_when_missing() {
        let home = std::env::var("PATH").unwrap().replace("::", ":");
        assert_eq!(urls("${PATH}.tar"), [format!("{home}.tar")]);
        let error = expand_shards(&["${DFLOP_NOT_SET}/a.tar"]).unwrap_err();
        assert!(error.to_string().contains("DFLOP_NOT_SET"), "{error}");
    }

    #[test]
    fn unusable_names_say_why() {
        let unusable = [
            ("", "empty"),
            ("ftp://b/a.tar", "ftp://"),
            ("s3:///a.tar", "expected a bucket"),
            ("{0..99999999}", "too many"),
            ("pipe:", "no command"),
            ("{lone}.tar", "patterns are"),
            ("no/*.tar", "patterns are"),
        ];
        for (pattern, reason) in unusable {
            let error = expand_shards(&[pattern]).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        assert!(expand_shards::<&str>(&[]).is_err());
    }
}
