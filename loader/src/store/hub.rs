//! Reads files of datasets on a Hugging Face hub: `hf://datasets/OWNER/NAME[@REVISION]/PATH`.
//!
//! The path is literal, and the revision is a branch, a tag or a commit in which `%NN` is kept, as in
//! `refs%2Fconvert%2Fparquet`; `~parquet` is the same revision. Names are pinned to the commit before
//! anything is read, once per process, so that a branch that moves meanwhile changes nothing.
//! `HF_ENDPOINT` is the address of the hub; the token comes from `HF_TOKEN` or from the file that logging in
//! writes.

use super::connect::variable;
use super::redact::redact_name;
use super::stores::Stores;
use super::url::{ObjectName, RemoteUrl, StoreKind};
use url::Url;

/// Scheme of the names.
pub(super) const SCHEME: &str = "hf://";
/// Number of hexadecimal digits in a commit.
const COMMIT_DIGITS: usize = 40;

/// Parts of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubName {
    /// `OWNER/NAME`, or the name alone.
    repository: String,
    /// Revision with escapes, as one path component; `None` for the default branch.
    revision: Option<String>,
    /// Path in the repository; empty for the top directory.
    path: String,
}

impl HubName {
    /// Parses a name.
    ///
    /// # Errors
    /// The reason why the name is invalid.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let form = || "expected `hf://datasets/OWNER/NAME/PATH`, with `@REVISION` behind the name".to_owned();
        let rest =
            name.strip_prefix(SCHEME).and_then(|rest| rest.strip_prefix("datasets/")).ok_or_else(form)?;
        let (owner, rest) = rest.split_once('/').ok_or_else(form)?;
        let (name, rest) = rest.split_once('/').unwrap_or((rest, ""));
        let (name, revision) = name.split_once('@').map_or((name, None), |(name, rest)| (name, Some(rest)));
        let is_plain = |part: &str| {
            let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
            !part.is_empty() && !part.starts_with('.') && part.chars().all(is_letter)
        };
        if !is_plain(owner) || !is_plain(name) {
            return Err(form());
        }
        let (revision, path) = match revision {
            Some("~parquet") => (Some("refs%2Fconvert%2Fparquet".to_owned()), rest),
            // `refs/convert/parquet` has slashes of its own.
            Some("refs") => {
                let (kind, rest) = rest.split_once('/').ok_or_else(form)?;
                let (name, rest) = rest.split_once('/').unwrap_or((rest, ""));
                (Some(format!("refs%2F{kind}%2F{name}")), rest)
            }
            Some(revision) => (Some(revision.to_owned()), rest),
            None => (None, rest),
        };
        if revision.as_deref().is_some_and(|revision| revision.is_empty() || revision.contains(['?', '#'])) {
            return Err(format!("expected a revision behind `@`; {}", form()));
        }
        let path = path.to_owned();
        let is_odd = |part: &str| matches!(part, "." | "..");
        if path.split('/').any(is_odd) || path.starts_with('/') || path.contains("//") {
            return Err(format!("`{path}` is no path in a repository"));
        }
        Ok(Self { repository: format!("{owner}/{name}"), revision, path })
    }

    fn is_pinned(&self) -> bool {
        let is_digit = |byte: u8| byte.is_ascii_hexdigit();
        self.revision
            .as_deref()
            .is_some_and(|revision| revision.len() == COMMIT_DIGITS && revision.bytes().all(is_digit))
    }

    fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Returns a URL below the endpoint; `before` has escapes, and `path` is literal.
    fn url(endpoint: &str, before: &str, path: &str) -> Result<Url, String> {
        let mut url = Url::parse(&format!("{endpoint}/{before}"))
            .map_err(|error| format!("`HF_ENDPOINT` is `{}`: {error}", redact_name(endpoint)))?;
        if !path.is_empty() {
            let segments = url.path_segments_mut().map_err(|()| "`HF_ENDPOINT` is no address".to_owned());
            segments?.pop_if_empty().extend(path.trim_end_matches('/').split('/'));
        }
        Ok(url)
    }

    /// Returns the address of the file.
    fn address(&self, endpoint: &str) -> Result<Url, String> {
        let before = format!("datasets/{}/resolve/{}", self.repository, self.revision());
        Self::url(endpoint, &before, &self.path)
    }
}

impl RemoteUrl {
    /// Parses a name on a hub.
    ///
    /// # Errors
    /// The reason why the name is invalid, or that no hub is set.
    pub(super) fn parse_hub(name: &str) -> Result<Self, String> {
        let name = HubName::parse(name)?;
        let endpoint = endpoint();
        let object = ObjectName::Address(name.address(&endpoint)?);
        let is_directory = name.path.is_empty() || name.path.ends_with('/');
        Ok(Self { kind: StoreKind::Hub, root: format!("hf:{endpoint}"), object, is_directory })
    }
}

/// Returns the address of the hub: `HF_ENDPOINT`, else that of the public hub.
fn endpoint() -> String {
    let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
    endpoint.trim_end_matches('/').to_owned()
}

/// Returns whether a name is on a hub.
pub(crate) fn is_hub_name(name: &str) -> bool {
    name.starts_with(SCHEME)
}

/// Returns the pinned revision in a name on a hub.
pub(crate) fn pinned_revision(name: &str) -> Option<String> {
    HubName::parse(name).ok().filter(HubName::is_pinned)?.revision
}

#[cfg(not(feature = "remote"))]
impl Stores {
    /// Returns the name itself: opening it explains what is missing.
    pub(crate) fn pinned(&self, name: &str) -> std::io::Result<String> {
        Ok(name.to_owned())
    }

    /// Returns nothing: opening the name explains what is missing.
    pub(crate) fn hub_files(&self, _directory: &str, _is_deep: bool) -> std::io::Result<Vec<String>> {
        Ok(Vec::new())
    }
}

#[cfg(feature = "remote")]
mod listing {
    use super::super::connect::spawn;
    use super::super::object::{RemoteObject, Source};
    use super::super::url::RemoteUrl;
    use super::{HubName, SCHEME, Stores, Url, endpoint};
    use crate::error::BoxError;
    use bytes::Bytes;
    use serde::Deserialize;
    use std::io::{self, ErrorKind};
    use std::sync::Arc;

    /// Maximum number of files that a listing returns.
    const FILES_MAX: usize = 1 << 20;

    /// Answer about a revision.
    #[derive(Deserialize)]
    struct Revision {
        sha: String,
    }

    /// Entry of a directory.
    #[derive(Deserialize)]
    struct Entry {
        #[serde(rename = "type")]
        kind: String,
        path: String,
    }

    fn invalid(reason: impl Into<BoxError>) -> io::Error {
        io::Error::new(ErrorKind::InvalidData, reason)
    }

    impl HubName {
        /// Returns the name in the form in which it was given.
        fn display(&self) -> String {
            let revision = self.revision.as_ref().map(|revision| format!("@{revision}")).unwrap_or_default();
            format!("{SCHEME}datasets/{}{revision}/{}", self.repository, self.path)
        }

        /// Returns the name of a different path in the same revision.
        fn at(&self, path: &str) -> Self {
            Self { path: path.to_owned(), ..self.clone() }
        }
    }

    impl Stores {
        /// Returns a name with the commit in place of the revision; blocks until the hub has answered.
        ///
        /// # Errors
        /// The error of the hub, or the reason why the name is invalid.
        pub(crate) fn pinned(&self, name: &str) -> io::Result<String> {
            let parsed = HubName::parse(name).map_err(invalid)?;
            if parsed.is_pinned() {
                return Ok(parsed.display());
            }
            let known = format!("{}@{}", parsed.repository, parsed.revision());
            let commits = || self.shared.commits.lock().expect("no holder panics");
            let commit = commits().get(&known).cloned();
            let commit = if let Some(commit) = commit {
                commit
            } else {
                let before = format!("api/datasets/{}/revision/{}", parsed.repository, parsed.revision());
                let url = HubName::url(&endpoint(), &before, "").map_err(invalid)?;
                let (page, _) = self.page(name, url)?;
                let found: Revision = serde_json::from_slice(&page).map_err(invalid)?;
                commits().entry(known).or_insert(found.sha).clone()
            };
            let pinned = HubName { revision: Some(commit), ..parsed };
            if !pinned.is_pinned() {
                return Err(invalid("the hub answered with no commit"));
            }
            Ok(pinned.display())
        }

        /// Lists the names of files in a directory with a pinned name, sorted; with `is_deep` also in the
        /// directories below.
        ///
        /// # Errors
        /// The error of the hub.
        pub(crate) fn hub_files(&self, directory: &str, is_deep: bool) -> io::Result<Vec<String>> {
            let parsed = HubName::parse(directory).map_err(invalid)?;
            let before = format!("api/datasets/{}/tree/{}", parsed.repository, parsed.revision());
            let endpoint = endpoint();
            let mut url = HubName::url(&endpoint, &before, &parsed.path).map_err(invalid)?;
            url.set_query(Some(if is_deep { "recursive=true" } else { "recursive=false" }));
            let (mut names, mut next) = (Vec::new(), Some(url));
            while let Some(url) = next {
                let (page, more) = self.page(directory, url)?;
                let entries: Vec<Entry> = serde_json::from_slice(&page).map_err(invalid)?;
                let files = entries.into_iter().filter(|entry| entry.kind == "file");
                names.extend(files.map(|entry| parsed.at(&entry.path).display()));
                if names.len() > FILES_MAX {
                    return Err(invalid(format!("the directory has more than {FILES_MAX} files")));
                }
                next = more;
            }
            names.sort_unstable();
            Ok(names)
        }

        /// Requests a page of the hub's interface, with retries; also returns the address of the next page.
        fn page(&self, name: &str, url: Url) -> io::Result<(Bytes, Option<Url>)> {
            let parsed = RemoteUrl::parse(name).map_err(invalid)?;
            let server = self.server(&parsed).map_err(invalid)?;
            let source = Source::Server { server: server.clone(), address: url.clone() };
            let object = RemoteObject::new(self.clone(), Arc::from(name), parsed, source);
            let page = async move {
                let mut attempts = object.attempts(0);
                loop {
                    let permit = object.permit().await;
                    let page = server.get_page(&url).await;
                    drop(permit);
                    match page {
                        Ok(page) => return Ok(page),
                        Err(refusal) => object.pause(&mut attempts, refusal.fault, 0).await?,
                    }
                }
            };
            spawn(page).wait()?
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_repository_a_revision_and_a_path() {
        for (name, revision, path) in [
            ("hf://datasets/o/n/data/a b.parquet", None, "data/a b.parquet"),
            ("hf://datasets/o/n", None, ""),
            ("hf://datasets/o/n@v1.0/", Some("v1.0"), ""),
            (
                "hf://datasets/o/n@refs%2Fconvert%2Fparquet/d/0.parquet",
                Some("refs%2Fconvert%2Fparquet"),
                "d/0.parquet",
            ),
            (
                "hf://datasets/o/n@refs/convert/parquet/d/0.parquet",
                Some("refs%2Fconvert%2Fparquet"),
                "d/0.parquet",
            ),
            ("hf://datasets/o/n@~parquet/d/", Some("refs%2Fconvert%2Fparquet"), "d/"),
        ] {
            let parsed = HubName::parse(name).unwrap();
            assert_eq!(
                (parsed.repository.as_str(), parsed.revision.as_deref(), &*parsed.path),
                ("o/n", revision, path)
            );
        }
        for name in
            ["hf://o/n/a.parquet", "hf://datasets/n", "hf://datasets/o/n@/a", "hf://datasets/o/n/../a"]
        {
            assert!(HubName::parse(name).is_err(), "{name}");
        }
    }

    #[test]
    fn addresses_keep_escapes_of_the_revision_and_escape_the_path() {
        let name = HubName::parse("hf://datasets/o/n@refs%2Fpr%2F1/a b/c%d.parquet").unwrap();
        let address = name.address("https://hub:8/base").unwrap();
        let expected = "https://hub:8/base/datasets/o/n/resolve/refs%2Fpr%2F1/a%20b/c%25d.parquet";
        assert_eq!(address.as_str(), expected);
        assert!(!name.is_pinned());
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let pinned = format!("hf://datasets/o/n@{commit}/a.parquet");
        assert_eq!(pinned_revision(&pinned).as_deref(), Some(commit));
        assert_eq!(redact_name(&pinned), pinned);
    }
}
