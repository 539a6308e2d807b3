//! Parses remote shard URLs.

use std::fmt;

use object_store::path::{Path, PathPart};
use url::{Position, Url};

use super::redact::redact_name;

/// Store kind, by URL scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreKind {
    /// `s3://`, `s3a://`
    S3,
    /// `gs://`
    Gcs,
    /// `az://`, `azure://`, `adl://`, `abfs://`, `abfss://`
    Azure,
    /// `http://`, `https://`
    Http,
    /// `hf://datasets/`
    Hub,
    /// Scheme registered by user code.
    Registered,
}

impl StoreKind {
    fn from_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "s3" | "s3a" => Some(Self::S3),
            "gs" => Some(Self::Gcs),
            "az" | "azure" | "adl" | "abfs" | "abfss" => Some(Self::Azure),
            "http" | "https" => Some(Self::Http),
            "hf" => Some(Self::Hub),
            _ => None,
        }
    }

    /// Returns the credentials to set when a request is rejected.
    pub(crate) fn credentials_hint(self) -> &'static str {
        match self {
            Self::S3 => {
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL \
                 where needed), or AWS_SKIP_SIGNATURE=true for a public bucket"
            }
            Self::Gcs => {
                "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS to a key file, or \
                 GOOGLE_SKIP_SIGNATURE=true for a public bucket"
            }
            Self::Azure => {
                "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN), or \
                 AZURE_SKIP_SIGNATURE=true for a public container"
            }
            Self::Registered => "check the configuration of the registered store",
            Self::Hub => "set HF_TOKEN to a token that may read the dataset, or log in to the hub",
            // Must not look like a URL with credentials, which are removed from messages.
            Self::Http => "put `USER:PASSWORD@` before the host of the URL, or use a signed URL",
        }
    }
}

/// Returns whether a name is a URL on a built-in remote store.
#[must_use]
pub fn is_remote(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| StoreKind::from_scheme(scheme).is_some())
}

/// URL of a remote shard or of a shard directory.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RemoteUrl {
    pub(crate) kind: StoreKind,
    /// Prefix that one connection serves: `s3://BUCKET`, or `https://USER:PASSWORD@HOST`.
    pub(crate) root: String,
    /// Object or directory below the root.
    pub(crate) object: ObjectName,
    /// Whether the URL names a directory.
    pub(crate) is_directory: bool,
}

/// Object name in a store.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum ObjectName {
    /// Key in a bucket.
    Key(Path),
    /// URL for an HTTP server, with credentials.
    Address(Url),
}

impl fmt::Debug for RemoteUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.object {
            ObjectName::Key(path) => write!(formatter, "{}", redact_name(&self.object_url(path))),
            ObjectName::Address(url) => write!(formatter, "{}", redact_name(url.as_str())),
        }
    }
}

impl RemoteUrl {
    /// Parses a URL.
    ///
    /// # Errors
    /// The reason why the URL is invalid.
    pub(crate) fn parse(url: &str) -> Result<Self, String> {
        let (scheme, rest) = url.split_once("://").ok_or("expected a URL with a scheme")?;
        let kind = StoreKind::from_scheme(scheme).ok_or_else(|| format!("`{scheme}://` is not supported"))?;
        match kind {
            StoreKind::Http => Self::parse_http(url),
            StoreKind::Hub => Self::parse_hub(url),
            _ => Self::parse_bucket(kind, scheme, rest),
        }
    }

    /// Parses a URL for a store with buckets.
    ///
    /// # Errors
    /// The reason why the URL is invalid.
    pub(super) fn parse_bucket(kind: StoreKind, scheme: &str, rest: &str) -> Result<Self, String> {
        // Bucket keys are taken literally: `%`, `?` and `#` are part of the name.
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(format!("expected a bucket after `{scheme}://`"));
        }
        let is_directory = key.is_empty() || key.ends_with('/');
        let object = ObjectName::Key(key_path(key)?);
        Ok(Self { kind, root: format!("{scheme}://{bucket}"), object, is_directory })
    }

    fn parse_http(url: &str) -> Result<Self, String> {
        let parsed = Url::parse(url).map_err(|error| error.to_string())?;
        let root = parsed[..Position::BeforePath].to_owned();
        // With a query, a server answers with an object whatever the path is.
        let is_directory = parsed.path().ends_with('/') && parsed.query().is_none();
        Ok(Self { kind: StoreKind::Http, root, object: ObjectName::Address(parsed), is_directory })
    }

    /// Returns the URL for an object listed in this directory.
    pub(crate) fn object_url(&self, path: &Path) -> String {
        format!("{}/{path}", self.root)
    }
}

/// Returns the path for a literal key, which may have empty components inside.
///
/// # Errors
/// The reason why the bucket client cannot request the key.
fn key_path(key: &str) -> Result<Path, String> {
    // A part that looks like a query may be a signature.
    let shown = key.split(['?', '#']).next().unwrap_or_default();
    if key.starts_with('/') {
        return Err(format!("the key `{shown}` starts with `/`, which the client cannot request; rename it"));
    }
    if key.ends_with('/') && key.contains("//") {
        return Err(format!(
            "`{shown}` has an empty component, which cannot be listed; name the shards in it"
        ));
    }
    let key = key.strip_suffix('/').unwrap_or(key);
    let parts = key.split('/').filter(|_| !key.is_empty());
    parts.map(PathPart::parse).try_fold(Path::default(), |path, part| {
        part.map(|part| path.join(part))
            .map_err(|_| format!("the key `{shown}` has a component that the client cannot request"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::url_parts::{percent_decoded, without_signature};

    #[test]
    fn urls_name_a_store_and_an_object_in_it() {
        let cases = [
            ("s3://bucket/a/b.tar", StoreKind::S3, "s3://bucket", "a/b.tar", false),
            ("s3://bucket/a//b.tar", StoreKind::S3, "s3://bucket", "a//b.tar", false),
            ("s3://bucket", StoreKind::S3, "s3://bucket", "", true),
            ("gs://bucket/a%20?#.tar", StoreKind::Gcs, "gs://bucket", "a%20?#.tar", false),
            ("az://c/f/", StoreKind::Azure, "az://c", "f", true),
            (
                "abfss://c@acc.dfs.core.windows.net/x.tar",
                StoreKind::Azure,
                "abfss://c@acc.dfs.core.windows.net",
                "x.tar",
                false,
            ),
            (
                "http://h:9/a%20b.tar?sig=1",
                StoreKind::Http,
                "http://h:9",
                "http://h:9/a%20b.tar?sig=1",
                false,
            ),
            (
                "https://h/refs%2Fpr//1/a.tar",
                StoreKind::Http,
                "https://h",
                "https://h/refs%2Fpr//1/a.tar",
                false,
            ),
            ("http://h/?shard=3", StoreKind::Http, "http://h", "http://h/?shard=3", false),
            ("https://u:p@h/f/", StoreKind::Http, "https://u:p@h", "https://u:p@h/f/", true),
        ];
        for (url, kind, root, object, is_directory) in cases {
            let parsed = RemoteUrl::parse(url).unwrap();
            assert_eq!(
                (parsed.kind, parsed.root.as_str(), parsed.is_directory),
                (kind, root, is_directory),
                "{url}"
            );
            match parsed.object {
                ObjectName::Key(path) => assert_eq!(path.as_ref(), object, "{url}"),
                ObjectName::Address(url) => assert_eq!(url.as_str(), object),
            }
        }
        for (url, reason) in [
            ("s3:///a.tar", "bucket"),
            ("ftp://h/a.tar", "ftp"),
            ("s3://b//a.tar", "the key `/a.tar` starts with `/`"),
            ("s3://b/d//", "cannot be listed"),
            ("s3://b/../a.tar?sig=1", "the key `../a.tar` has a component"),
        ] {
            let error = RemoteUrl::parse(url).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn only_signatures_are_no_part_of_a_name() {
        let cases = [
            ("https://h/a.tar?X-Amz-Date=1&X-Amz-Signature=2", "https://h/a.tar"),
            ("https://h/get?shard=3&X-Amz-Signature=2#part", "https://h/get?shard=3"),
            ("https://h/a.tar?Expires=1&Signature=2&Key-Pair-Id=3", "https://h/a.tar"),
            ("https://h/a.tar?sv=1&se=2&sp=r&sig=3&v=4", "https://h/a.tar?v=4"),
            ("https://h/get?se=2&sp=3", "https://h/get?se=2&sp=3"),
            ("https://h/get?Expires=2", "https://h/get?Expires=2"),
            (
                "https://h/get?signature=2&x-amz-date=3&X-Amz-Other=4",
                "https://h/get?signature=2&x-amz-date=3&X-Amz-Other=4",
            ),
            ("https://h/get?", "https://h/get?"),
            ("s3://b/a?sig=1#.tar", "s3://b/a?sig=1#.tar"),
        ];
        for (url, name) in cases {
            assert_eq!(without_signature(url), name, "{url}");
        }
    }

    #[test]
    fn escapes_are_decoded_and_everything_else_stays() {
        assert_eq!(percent_decoded("a%20b%2Fc%zz%4"), b"a b/c%zz%4");
        assert_eq!(percent_decoded("%C3%BC"), "ü".as_bytes());
    }
}
