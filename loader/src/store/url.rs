//! Parses URLs of remote shards.

use std::fmt;

use object_store::path::Path;
use url::{Position, Url};

use super::redact::redact_name;

/// Kind of store that a URL belongs to.
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
    /// A scheme that user code has registered.
    Registered,
}

impl StoreKind {
    fn of_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "s3" | "s3a" => Some(Self::S3),
            "gs" => Some(Self::Gcs),
            "az" | "azure" | "adl" | "abfs" | "abfss" => Some(Self::Azure),
            "http" | "https" => Some(Self::Http),
            _ => None,
        }
    }

    /// Returns the credentials to set when a request is refused.
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
            Self::Http => "put credentials into the URL, as https://USER:PASSWORD@HOST/ or as a signed URL",
        }
    }
}

/// Returns whether a name is the URL of a built-in remote store.
pub(crate) fn is_remote(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| StoreKind::of_scheme(scheme).is_some())
}

/// URL of a remote shard or of a directory of shards.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RemoteUrl {
    pub(crate) kind: StoreKind,
    /// Prefix that one connection serves: `s3://BUCKET`, or `https://HOST?QUERY`.
    pub(crate) root: String,
    /// Path of the object or directory below the root.
    pub(crate) path: Path,
    /// Whether the URL is that of a directory.
    pub(crate) is_directory: bool,
}

impl fmt::Debug for RemoteUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", redact_name(&self.url_of(&self.path)))
    }
}

impl RemoteUrl {
    /// Parses a URL.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub(crate) fn parse(url: &str) -> Result<Self, String> {
        let (scheme, rest) = url.split_once("://").ok_or("expected a URL with a scheme")?;
        let kind = StoreKind::of_scheme(scheme).ok_or_else(|| format!("`{scheme}://` is not supported"))?;
        if kind == StoreKind::Http {
            return Self::parse_http(url);
        }
        Self::parse_bucket(kind, scheme, rest)
    }

    /// Parses the URL of a store with buckets.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub(super) fn parse_bucket(kind: StoreKind, scheme: &str, rest: &str) -> Result<Self, String> {
        // Keys of buckets are taken literally: `%`, `?` and `#` are part of a name.
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(format!("expected a bucket after `{scheme}://`"));
        }
        let path = Path::parse(key).map_err(|error| error.to_string())?;
        let is_directory = key.is_empty() || key.ends_with('/');
        Ok(Self { kind, root: format!("{scheme}://{bucket}"), path, is_directory })
    }

    fn parse_http(url: &str) -> Result<Self, String> {
        let parsed = Url::parse(url).map_err(|error| error.to_string())?;
        let path = Path::from_url_path(parsed.path()).map_err(|error| error.to_string())?;
        let query = parsed.query().map(|query| format!("?{query}")).unwrap_or_default();
        let root = format!("{}/{query}", &parsed[..Position::BeforePath]);
        Ok(Self { kind: StoreKind::Http, root, path, is_directory: parsed.path().ends_with('/') })
    }

    /// Returns the URL of an object listed in this directory.
    pub(crate) fn url_of(&self, path: &Path) -> String {
        format!("{}/{path}", self.root)
    }
}

/// Returns a URL without its query: signatures change, names do not.
pub(crate) fn without_query(url: &str) -> &str {
    let is_http = url.starts_with("http://") || url.starts_with("https://");
    if is_http { url.split(['?', '#']).next().unwrap_or(url) } else { url }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_store_and_an_object_in_it() {
        let cases = [
            ("s3://bucket/a/b.tar", StoreKind::S3, "s3://bucket", "a/b.tar", false),
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
            ("http://h:9/a%20b.tar?sig=1", StoreKind::Http, "http://h:9/?sig=1", "a b.tar", false),
            ("https://u:p@h/f/", StoreKind::Http, "https://u:p@h/", "f", true),
        ];
        for (url, kind, root, path, is_directory) in cases {
            let parsed = RemoteUrl::parse(url).unwrap();
            assert_eq!(
                (parsed.kind, parsed.root.as_str(), parsed.is_directory),
                (kind, root, is_directory),
                "{url}"
            );
            assert_eq!(parsed.path.as_ref(), path, "{url}");
        }
        assert!(RemoteUrl::parse("s3:///a.tar").unwrap_err().contains("bucket"));
        assert!(RemoteUrl::parse("ftp://h/a.tar").unwrap_err().contains("ftp"));
    }

    #[test]
    fn signatures_are_no_part_of_a_name() {
        assert_eq!(without_query("https://h/a.tar?X-Amz-Date=1"), "https://h/a.tar");
        assert_eq!(without_query("s3://b/a?.tar"), "s3://b/a?.tar");
    }
}
