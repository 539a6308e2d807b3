//! Connects stores, and runs all requests on a shared runtime.
//!
//! The runtime is separate from the loader runtimes, so that connections outlive any single loader, and a
//! task can be started and awaited both inside and outside a runtime.

use super::retry::RetryConfig;
use super::url::RemoteUrl;
use crate::flow::start_runtime;
use object_store::ObjectStore;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::runtime::{Handle, Runtime};
use tokio::task::JoinHandle;

/// Layer that retries failed requests; never both.
#[derive(Debug, Clone, Copy)]
pub(super) enum Retries {
    /// The readers in this crate, which keep the bytes already received.
    ByReader,
    /// The store itself, with the same policy: for uploads.
    ByStore(RetryConfig),
}

/// Returns the value of an environment variable; `None` if it is empty or not set.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// Returns the user's token for a hub: from `HF_TOKEN`, else from the token file.
#[cfg(feature = "remote")]
pub(super) fn hub_token() -> Option<String> {
    let cache = || {
        let directory = |name: &str| variable(name).map(std::path::PathBuf::from);
        Some(
            directory("XDG_CACHE_HOME")
                .or_else(|| Some(std::env::home_dir()?.join(".cache")))?
                .join("huggingface"),
        )
    };
    let file = || {
        let directory = variable("HF_HOME").map(std::path::PathBuf::from).or_else(cache)?;
        let path =
            variable("HF_TOKEN_PATH").map_or_else(|| directory.join("token"), std::path::PathBuf::from);
        dflop_samples::file::read_text(&path).ok().map(|token| token.trim().to_owned())
    };
    variable("HF_TOKEN").or_else(file).filter(|token| !token.is_empty())
}

#[cfg(not(feature = "remote"))]
pub(super) fn connect(
    url: &RemoteUrl,
    _timeout: Duration,
    retries: Retries,
) -> Result<Arc<dyn ObjectStore>, String> {
    let _ = matches!(retries, Retries::ByStore(config) if config.retry_seconds > 0);
    Err(format!("`{}` needs the cargo feature `remote`, which is disabled in this build", url.root))
}

/// Creates the store without connecting to it.
///
/// # Errors
/// The reason why the configuration is incomplete or invalid.
#[cfg(feature = "remote")]
pub(super) fn connect(
    url: &RemoteUrl,
    timeout: Duration,
    retries: Retries,
) -> Result<Arc<dyn ObjectStore>, String> {
    let with_hint = |error: object_store::Error| format!("{error}; {}", url.kind.credentials_hint());
    cloud::connect(url, timeout, retries).map_err(with_hint)
}

#[cfg(feature = "remote")]
mod cloud {
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
    use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
    use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
    use object_store::{ClientConfigKey, RetryConfig};

    use super::super::http::Connector;
    use super::super::url::StoreKind;
    use super::{Arc, Duration, ObjectStore};
    use super::{RemoteUrl, Retries};

    fn retry_config(retries: Retries) -> RetryConfig {
        let mut config = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        if let Retries::ByStore(own) = retries {
            // Attempts are limited by time, not by number.
            config.max_retries = usize::MAX;
            config.retry_timeout = Duration::from_secs(own.retry_seconds);
            config.backoff.init_backoff = own.backoff.first;
            config.backoff.max_backoff = own.backoff.most;
        }
        config
    }

    pub(super) fn connect(
        url: &RemoteUrl,
        timeout: Duration,
        retries: Retries,
    ) -> object_store::Result<Arc<dyn ObjectStore>> {
        let retry = retry_config(retries);
        // The readers' timeout comes first and keeps the received bytes; this timeout guards all other
        // requests.
        let timeout = format!("{}ms", timeout.as_millis() + 1_000);
        let key = ClientConfigKey::Timeout;
        Ok(match url.kind {
            StoreKind::S3 => Arc::new(
                s3(url, retry)
                    .with_config(AmazonS3ConfigKey::Client(key), timeout)
                    .with_http_connector(Connector)
                    .build()?,
            ),
            StoreKind::Gcs => Arc::new(
                gcs(url, retry)
                    .with_config(GoogleConfigKey::Client(key), timeout)
                    .with_http_connector(Connector)
                    .build()?,
            ),
            StoreKind::Azure => Arc::new(
                azure(url, retry)
                    .with_config(AzureConfigKey::Client(key), timeout)
                    .with_http_connector(Connector)
                    .build()?,
            ),
            StoreKind::Registered | StoreKind::Http | StoreKind::Hub => {
                let source = "it is no store with buckets of this crate".into();
                return Err(object_store::Error::Generic { store: "registered", source });
            }
        })
    }

    fn s3(url: &RemoteUrl, retry: RetryConfig) -> AmazonS3Builder {
        AmazonS3Builder::from_env().with_url(&url.root).with_retry(retry)
    }

    fn gcs(url: &RemoteUrl, retry: RetryConfig) -> GoogleCloudStorageBuilder {
        GoogleCloudStorageBuilder::from_env().with_url(&url.root).with_retry(retry)
    }

    fn azure(url: &RemoteUrl, retry: RetryConfig) -> MicrosoftAzureBuilder {
        MicrosoftAzureBuilder::from_env().with_url(&url.root).with_retry(retry)
    }
}

#[cfg(all(test, feature = "remote"))]
mod tests {
    use super::*;

    /// Returns a store's debug text; nothing is contacted.
    fn displayed(url: &str) -> String {
        let url = RemoteUrl::parse(url).unwrap();
        connect(&url, Duration::from_secs(30), Retries::ByReader).unwrap().to_string()
    }

    #[test]
    fn urls_become_stores_of_their_bucket() {
        assert_eq!(displayed("s3://bucket/a/b.tar"), "AmazonS3(bucket)");
        assert_eq!(displayed("s3a://bucket/a/b.tar"), "AmazonS3(bucket)");
        assert_eq!(displayed("gs://bucket/a/b.tar"), "GoogleCloudStorage(bucket)");
        let azure = displayed("abfss://container@account.dfs.core.windows.net/a/b.tar");
        assert_eq!(azure, "MicrosoftAzure { account: account, container: container }");
    }

    #[test]
    fn an_azure_container_needs_the_name_of_its_account() {
        if std::env::vars().any(|(name, _)| name.starts_with("AZURE_")) {
            return;
        }
        let url = RemoteUrl::parse("az://container/a.tar").unwrap();
        let error = connect(&url, Duration::from_secs(30), Retries::ByReader).unwrap_err();
        assert!(error.contains("AZURE_STORAGE_ACCOUNT_NAME"), "{error}");
    }
}

/// Number of threads that transfer remote shard bytes; nothing is decoded on them.
const IO_THREADS: usize = 2;

/// Starts a task; it is canceled when the returned handle is dropped.
pub(crate) fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> Task<T> {
    Task(io_runtime().map(|runtime| runtime.spawn(task)))
}

/// Starts a task without a handle; it is dropped if no thread can be started.
pub(super) fn detach(task: impl Future<Output = ()> + Send + 'static) {
    drop(io_runtime().map(|runtime| runtime.spawn(task)));
}

/// Task that is canceled when it is dropped.
#[derive(Debug)]
pub(crate) struct Task<T>(io::Result<JoinHandle<T>>);

impl<T> Task<T> {
    /// Blocks the calling thread until the task is done.
    pub(crate) fn wait(self) -> io::Result<T> {
        futures::executor::block_on(self)
    }
}

impl<T> Future for Task<T> {
    type Output = io::Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = |_| io::Error::other("the task that read the shard ended early");
        match &mut self.0 {
            Ok(task) => Pin::new(task).poll(context).map_err(ended),
            Err(error) => Poll::Ready(Err(io::Error::new(error.kind(), error.to_string()))),
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        if let Ok(task) = &self.0 {
            task.abort();
        }
    }
}

/// Returns the process-wide request runtime; it is never shut down.
fn io_runtime() -> io::Result<Handle> {
    static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let started = match runtime.take() {
        Some(started) => started,
        None => start_runtime("dflop-io", IO_THREADS)?,
    };
    Ok(runtime.insert(started).handle().clone())
}
