//! Opens the store of a URL, configured by the environment variables that its own tools read.

use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;

use super::url::RemoteUrl;

#[cfg(not(feature = "remote"))]
pub(super) fn connect(url: &RemoteUrl, _timeout: Duration) -> Result<Arc<dyn ObjectStore>, String> {
    Err(format!("`{}` needs the cargo feature `remote` of dflop-loader, which this build lacks", url.root))
}

/// Connects to nothing yet.
///
/// # Errors
/// What the configuration lacks.
#[cfg(feature = "remote")]
pub(super) fn connect(url: &RemoteUrl, timeout: Duration) -> Result<Arc<dyn ObjectStore>, String> {
    let with_hint = |error: object_store::Error| format!("{error}; {}", url.kind.credentials_hint());
    cloud::connect(url, timeout).map_err(with_hint)
}

#[cfg(feature = "remote")]
mod cloud {
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
    use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
    use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
    use object_store::http::HttpBuilder;
    use object_store::{ClientConfigKey, RetryConfig};

    use super::{Arc, Duration, ObjectStore, RemoteUrl};
    use crate::store::http::Connector;
    use crate::store::url::StoreKind;

    /// One policy only: that of [`crate::store::RetryConfig`].
    fn no_retry() -> RetryConfig {
        RetryConfig { max_retries: 0, ..RetryConfig::default() }
    }

    pub(super) fn connect(url: &RemoteUrl, timeout: Duration) -> object_store::Result<Arc<dyn ObjectStore>> {
        // The reader's own timeout comes first and keeps what has come; this one guards everything else.
        let timeout = format!("{} milliseconds", timeout.as_millis() + 1_000);
        let key = ClientConfigKey::Timeout;
        Ok(match url.kind {
            StoreKind::S3 => Arc::new(
                s3(url)
                    .with_config(AmazonS3ConfigKey::Client(key), timeout)
                    .with_http_connector(Connector)
                    .build()?,
            ),
            StoreKind::Gcs => Arc::new(
                gcs(url)
                    .with_config(GoogleConfigKey::Client(key), timeout)
                    .with_http_connector(Connector)
                    .build()?,
            ),
            StoreKind::Azure => Arc::new(
                azure(url)
                    .with_config(AzureConfigKey::Client(key), timeout)
                    .with_http_connector(Connector)
                    .build()?,
            ),
            StoreKind::Http => {
                let builder = HttpBuilder::new().with_url(&url.root).with_retry(no_retry());
                let builder =
                    builder.with_config(ClientConfigKey::AllowHttp, "true").with_config(key, timeout);
                Arc::new(builder.with_http_connector(Connector).build()?)
            }
        })
    }

    fn s3(url: &RemoteUrl) -> AmazonS3Builder {
        AmazonS3Builder::from_env().with_url(&url.root).with_retry(no_retry())
    }

    fn gcs(url: &RemoteUrl) -> GoogleCloudStorageBuilder {
        GoogleCloudStorageBuilder::from_env().with_url(&url.root).with_retry(no_retry())
    }

    fn azure(url: &RemoteUrl) -> MicrosoftAzureBuilder {
        MicrosoftAzureBuilder::from_env().with_url(&url.root).with_retry(no_retry())
    }
}
