//! Expands shard names: lists, brace patterns, directories and environment variables.
//!
//! `{000..019}` counts (with padding, also descending), `{a,b}` chooses, `*` and `?` match local files, `~`
//! is the home directory, `::` joins lists, `${NAME}` comes from the environment, a directory expands to the
//! shards inside it, a wids shard list (`NAME.json`) to the listed shards. `-` is standard input and `pipe:`
//! starts a command whose output is the shard. `s3://`, `gs://`, `az://`, `abfs://`, `http://` and `https://`
//! name shards in a [store](crate::store); a directory there ends with `/`. The name of an existing file
//! always means that file, whatever it looks like.
//!
//! [`ShardAccess`] decides what names may reach. Names that were read, from lists or directories, are files
//! and objects, never commands.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::access::{ShardAccess, invalid, substituted};
use super::braces::Expansion;
use super::directory::{other_format, remote_shards_in, shards_in};
use super::glob::{has_wildcards, matches_path, matching_files, with_home};
use super::wids::listed_shards;
use crate::error::{Error, Result, StorageError};
use crate::files::{lies_inside, parent_directory};
use crate::store::{
    Location, Opened, ReadMode, RemoteObject, Stores, is_hub_name, is_remote, open, percent_decoded,
    pinned_revision, redact_name,
};

/// Dataset shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Name after expansion, without URL credentials: safe to show and to write.
    pub url: Arc<str>,
    /// Location of the shard bytes.
    pub location: Location,
    /// Read mode for a local file.
    pub read: ReadMode,
}

impl Shard {
    /// Resolves a name that the caller passed.
    fn given(url: String, access: &ShardAccess) -> Result<Self> {
        if url.is_empty() {
            return Err(invalid(&url, "a shard name is empty"));
        }
        if url == "-" {
            return Ok(Self::new(url.into(), Location::StandardInput, access.stores.read_mode()));
        }
        let Some(command) = url.strip_prefix("pipe:") else { return Self::found(url, &access.stores) };
        if command.is_empty() {
            return Err(invalid(&url, "no command follows `pipe:`"));
        }
        if !access.are_pipes_allowed {
            let reason = "it would run a shell command; the setting `allow=pipe` lets names do so";
            return Err(invalid(&url, reason));
        }
        let location = Location::Pipe(command.to_owned());
        Ok(Self::new(redact_name(&url).into(), location, access.stores.read_mode()))
    }

    /// Resolves a name that was read: a remote object or a local file, never a command.
    fn found(url: String, stores: &Stores) -> Result<Self> {
        if stores.is_remote(&url) {
            return Self::remote_at(url, stores);
        }
        let path = local_path(&url)?;
        // A name that is no file may be a mistyped URL; a file name is no secret.
        let name = match redact_name(&url) {
            Cow::Owned(redacted) if !path.exists() => redacted,
            _ => url,
        };
        Ok(Self::new(name.into(), Location::File(path), stores.read_mode()))
    }

    /// Creates a shard from a remote object URL.
    ///
    /// # Errors
    /// [`Error::Selection`] if the URL is malformed or the store cannot be configured.
    pub(crate) fn remote_at(url: String, stores: &Stores) -> Result<Self> {
        let url: Arc<str> = url.into();
        let location = Location::Remote(stores.object(&url)?);
        Ok(Self::new(redact_name(&url).into(), location, stores.read_mode()))
    }

    /// Returns the name for opening the shard, with URL credentials: must not be shown or written.
    #[must_use]
    pub fn address(&self) -> Cow<'_, str> {
        match &self.location {
            Location::Remote(object) => Cow::Borrowed(object.url()),
            Location::Pipe(command) => Cow::Owned(format!("pipe:{command}")),
            Location::File(path) if local_path(&self.url).ok().as_ref() != Some(path) => {
                path.to_string_lossy()
            }
            Location::File(_) | Location::StandardInput => Cow::Borrowed(&self.url),
        }
    }

    /// Creates a shard from a path, which is taken literally.
    fn local(path: String, access: &ShardAccess) -> Self {
        let location = Location::File(PathBuf::from(&path));
        Self::new(path.into(), location, access.stores.read_mode())
    }

    fn new(url: Arc<str>, location: Location, read: ReadMode) -> Self {
        Self { url, location, read }
    }

    /// Opens a shard that is not remote.
    ///
    /// # Errors
    /// [`Error::Storage`] if the file cannot be opened, the command cannot be started, or the shard is
    /// remote.
    pub(crate) fn open(&self) -> Result<Opened> {
        open(&self.location, self.read).map_err(|source| self.read_error(source))
    }

    /// Converts a store error to an error that names the shard.
    pub(crate) fn read_error(&self, source: std::io::Error) -> Error {
        Error::Storage(StorageError::Read { shard: self.url.to_string(), source })
    }

    /// Returns the path of a local file; `None` for streams.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.location {
            Location::File(path) => Some(path),
            _ => None,
        }
    }

    /// Returns the remote object; `None` if the shard is not remote.
    #[must_use]
    pub fn remote(&self) -> Option<&RemoteObject> {
        match &self.location {
            Location::Remote(object) => Some(object),
            _ => None,
        }
    }

    /// Returns the last name component.
    #[must_use]
    pub fn base_name(&self) -> &str {
        self.url.rsplit('/').next().unwrap_or(&self.url)
    }

    /// Returns the name in an index: the last name component, with the pinned revision of a file on a hub.
    pub(crate) fn indexed_name(&self) -> String {
        match self.remote().and_then(|object| pinned_revision(object.url())) {
            Some(revision) => format!("{}@{revision}", self.base_name()),
            None => self.base_name().to_owned(),
        }
    }

    /// Returns a name that identifies the shard independent of its directory: the last name component with
    /// the URL query, without credentials and signatures.
    pub(crate) fn portable_name(&self) -> Cow<'_, str> {
        let name = self.remote().map(RemoteObject::name);
        match name.as_deref().and_then(|name| name.split_once('?')) {
            Some((_, query)) => Cow::Owned(format!("{}?{query}", self.base_name())),
            None => Cow::Borrowed(self.base_name()),
        }
    }

    /// Returns a name that distinguishes shards with equal lengths and versions: for a remote shard the whole
    /// URL, without credentials and signatures.
    pub(crate) fn unique_name(&self) -> Cow<'_, str> {
        match self.remote() {
            Some(object) => Cow::Owned(object.name()),
            None => Cow::Borrowed(self.base_name()),
        }
    }
}

/// Returns the path for a local shard name; in a URL (RFC 8089) `%NN` is a byte.
fn local_path(url: &str) -> Result<PathBuf> {
    if let Some(rest) = url.strip_prefix("file:") {
        let path = rest.strip_prefix("//").unwrap_or(rest);
        let path = path.strip_prefix("localhost").filter(|path| path.starts_with('/')).unwrap_or(path);
        return Ok(OsString::from_vec(percent_decoded(path)).into());
    }
    match url.split_once("://") {
        Some((scheme, _)) => {
            let supported = "s3, gs, az, abfs, abfss, hf, http and https are";
            let is_scheme = scheme.chars().all(|next| next.is_ascii_alphanumeric() || "+-.".contains(next));
            let shown = if is_scheme { format!("`{scheme}://`") } else { "what precedes `://`".to_owned() };
            Err(invalid(url, format!("{shown} is not supported; {supported}")))
        }
        None => Ok(url.into()),
    }
}

/// Expands patterns to shards, in order, with the default [`ShardAccess`].
///
/// # Errors
/// See [`expand_shards_in`].
pub fn expand_shards<S: AsRef<str>>(patterns: &[S]) -> Result<Vec<Shard>> {
    expand_shards_in(patterns, &ShardAccess::default())
}

/// Expands patterns to shards, in order, as far as `access` allows.
///
/// Blocks while a bucket directory is listed; no other pattern contacts a store.
///
/// # Errors
/// [`Error::Selection`] if a pattern is malformed, uses an unset variable, an unsupported scheme, a directory
/// without shards, or anything that is not allowed; or if there is no pattern. [`Error::Storage`] if a
/// directory cannot be listed or if a JSON file is not a shard list.
pub fn expand_shards_in<S: AsRef<str>>(patterns: &[S], access: &ShardAccess) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    let mut expansion = Expansion::default();
    let push_names = |expansion: &mut Expansion, shards: &mut Vec<Shard>| {
        let names = std::mem::take(expansion).into_names();
        names.into_iter().try_for_each(|name| push_name(&with_home(name), access, shards))
    };
    for pattern in patterns.iter().map(AsRef::as_ref) {
        if is_existing_file(pattern) {
            push_names(&mut expansion, &mut shards)?;
            push_shards(Shard::local(pattern.to_owned(), access), access, &mut shards)?;
            continue;
        }
        for part in split_list(pattern) {
            expansion.add(&substituted(part, access)?)?;
        }
    }
    push_names(&mut expansion, &mut shards)?;
    if shards.is_empty() {
        return Err(invalid("", "no shard is named"));
    }
    tell_equal_names_apart(&mut shards);
    Ok(shards)
}

/// Appends the shards for a name, or for the local files that it matches.
fn push_name(name: &str, access: &ShardAccess, shards: &mut Vec<Shard>) -> Result<()> {
    if is_hub_name(name) {
        return push_hub(name, access, shards);
    }
    let shard = Shard::given(name.to_owned(), access)?;
    if !has_wildcards(name) || shard.path().is_none_or(Path::exists) {
        return push_shards(shard, access, shards);
    }
    let read_error = |source| Error::Storage(StorageError::Read { shard: name.to_owned(), source });
    let files = matching_files(name).map_err(read_error)?;
    if files.is_empty() {
        return Err(invalid(name, "no file matches; `*` and `?` match inside a name, `**` over directories"));
    }
    let files = files.into_iter().map(|file| file.display().to_string());
    files.map(|file| Shard::local(file, access)).try_for_each(|shard| push_shards(shard, access, shards))
}

/// Appends the files for a name on a hub, pinned to the present commit: itself, those in a directory, or
/// those that it matches.
fn push_hub(name: &str, access: &ShardAccess, shards: &mut Vec<Shard>) -> Result<()> {
    // Explains an invalid name before anything is requested.
    Shard::remote_at(name.to_owned(), &access.stores)?;
    let read_error = |source| Error::Storage(StorageError::Read { shard: name.to_owned(), source });
    let pinned = access.stores.pinned(name).map_err(read_error)?;
    if !has_wildcards(&pinned) {
        return push_shards(Shard::remote_at(pinned, &access.stores)?, access, shards);
    }
    let first = pinned.find(['*', '?']).unwrap_or(pinned.len());
    let directory = pinned[..first].rfind('/').map_or(&*pinned, |slash| &pinned[..=slash]);
    let files = access.stores.hub_files(directory, pinned[first..].contains('/') || pinned.contains("**"));
    let is_match = |file: &String| matches_path(&pinned, file);
    let files: Vec<String> = files.map_err(read_error)?.into_iter().filter(is_match).collect();
    if files.is_empty() {
        return Err(invalid(name, "no file of the dataset matches"));
    }
    for file in files {
        shards.push(Shard::remote_at(file, &access.stores)?);
    }
    Ok(())
}

/// Marks the shards whose names differ only in hidden URL parts, as in `https://host/get?shard=3`, by a
/// digest, so that a name does not depend on the list position.
fn tell_equal_names_apart(shards: &mut [Shard]) {
    let mut objects: HashMap<Arc<str>, HashSet<String>> = HashMap::new();
    for shard in shards.iter() {
        if let Location::Remote(object) = &shard.location {
            objects.entry(shard.url.clone()).or_default().insert(object.name());
        }
    }
    for shard in shards {
        let Location::Remote(object) = &shard.location else { continue };
        if objects.get(&shard.url).is_some_and(|names| names.len() > 1) {
            shard.url = format!("{} ({:012x})", shard.url, xxh3_64(object.name().as_bytes()) >> 16).into();
        }
    }
}

/// Returns whether a pattern names an existing file or directory: a shell that expands `*.tar` produces such
/// names, and some may look like commands.
fn is_existing_file(pattern: &str) -> bool {
    pattern != "-" && !is_remote(pattern) && Path::new(pattern).exists()
}

/// Splits a list at `::`, but not inside IPv6 address brackets: `http://[::1]/a.tar`.
fn split_list(list: &str) -> Vec<&str> {
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

/// Returns whether a name ends where a URL host starts, after `USER:PASSWORD@`.
fn is_behind_user(name: &str) -> bool {
    let authority = name.split_once("://").map(|(_, authority)| authority);
    authority.is_some_and(|authority| authority.ends_with('@') && !authority.contains('/'))
}

/// Formats a shard list for a message: the first shard, and the number of further shards.
pub(crate) fn display_shards(shards: &[Shard]) -> String {
    match shards {
        [] => "nothing".into(),
        [only] => only.url.to_string(),
        [first, more @ ..] => format!("{} and {} more", first.url, more.len()),
    }
}

/// Appends the shards for a name: itself, or the shards in a directory or a list.
fn push_shards(shard: Shard, access: &ShardAccess, shards: &mut Vec<Shard>) -> Result<()> {
    if let Some(directory) = shard.remote().filter(|object| object.is_directory()) {
        for url in remote_shards_in(directory, &shard)? {
            shards.push(Shard::found(url, &access.stores)?);
        }
        return Ok(());
    }
    let Some(path) = shard.path() else {
        shards.push(shard);
        return Ok(());
    };
    if path.is_dir() {
        shards.extend(shards_in(path)?.into_iter().map(|path| Shard::local(path, access)));
    } else if is_shard_list(path) {
        push_listed(path, access, shards)?;
    } else if shard.url.contains(['{', '}']) && !path.exists() {
        let reason =
            "no such file; patterns are `{000..019}`, `{a,b}` and `*`, and a directory stands for its shards";
        return Err(invalid(&shard.url, reason));
    } else if let Some(reason) = other_format(path) {
        return Err(invalid(&shard.url, reason));
    } else {
        shards.push(shard);
    }
    Ok(())
}

/// Appends the shards in a list. They must be in the list's directory unless `access` allows other locations.
fn push_listed(list: &Path, access: &ShardAccess, shards: &mut Vec<Shard>) -> Result<()> {
    let directory = parent_directory(list);
    for url in listed_shards(list)? {
        let shard = Shard::found(url, &access.stores)?;
        let is_inside = shard.path().is_some_and(|path| lies_inside(directory, path));
        if !is_inside && !access.is_outside_allowed {
            let reason = format!(
                "it names `{}`, outside its directory; the setting `allow=outside` lets a list that you \
                 trust do so",
                shard.url
            );
            return Err(Error::Storage(StorageError::Index { path: list.display().to_string(), reason }));
        }
        shards.push(shard);
    }
    Ok(())
}

/// Returns whether a file is a wids shard list.
fn is_shard_list(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json") && path.is_file()
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
        let pipes = ShardAccess::default().allow_pipe(true);
        let shards = expand_shards_in(&["pipe:cat f-{0..1}.tar"], &pipes).unwrap();
        assert_eq!(shards[1].location, Location::Pipe("cat f-1.tar".into()));
        assert_eq!(urls("{a,{b,c}{0..1}}.tar"), ["a.tar", "b0.tar", "b1.tar", "c0.tar", "c1.tar"]);
    }

    #[test]
    fn shards_that_differ_in_their_query_alone_have_names_of_their_own() {
        let names = urls("http://h/get?s={7..8}::http://h/get?s=7&X-Amz-Signature=0");
        assert!(names[0] != names[1] && names[0] == names[2], "{names:?}");
        assert!(names.iter().all(|name| name.starts_with("http://h/get (")), "{names:?}");
        // A name does not depend on the rest of the list.
        assert_eq!(urls("http://h/get?s={8..7}")[..], [names[1].clone(), names[0].clone()]);
        assert_eq!(urls("http://h/get?s=7"), ["http://h/get"]);
        let shards = expand_shards(&["http://u:p@h/d/get?s={7..8}"]).unwrap();
        assert_eq!(shards[1].unique_name(), "http://h/d/get?s=8");
        assert!(
            shards[1].portable_name().starts_with("get (") && shards[1].portable_name().ends_with("?s=8")
        );
    }

    #[test]
    fn file_urls_are_decoded() {
        for (url, path) in [
            ("file:///d/a%20b%25.tar", "/d/a b%.tar"),
            ("file://localhost/d/a?b#.tar", "/d/a?b#.tar"),
            ("file:/d/a.tar", "/d/a.tar"),
            ("file:d/a.tar", "d/a.tar"),
            ("d/a%20b.tar", "d/a%20b.tar"),
        ] {
            assert_eq!(local_path(url).unwrap(), Path::new(path), "{url}");
        }
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
            assert_eq!(split_list(list), parts);
        }
        assert_eq!(urls("http://[::1]:8/{0..1}.tar").len(), 2);
    }

    #[test]
    fn unusable_names_say_why() {
        let unusable = [
            ("", "empty"),
            ("ftp://b/a.tar", "ftp://"),
            ("s3:///a.tar", "expected a bucket"),
            ("{0..99999999}", "too many"),
            ("pipe:", "no command"),
            ("pipe:cat a.tar", "`allow=pipe`"),
            ("a.tar::pipe:cat a.tar", "`allow=pipe`"),
            ("a.tar::", "empty"),
            ("{lone}.tar", "patterns are"),
            ("no/*.tar", "no file matches"),
        ];
        for (pattern, reason) in unusable {
            let error = expand_shards(&[pattern]).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        assert!(expand_shards::<&str>(&[]).is_err());
    }
}
