//! Uploads files to remote stores: an object appears whole or not at all.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};
#[cfg(feature = "remote")]
use url::Url;

use super::connect::{Retries, spawn};
#[cfg(feature = "remote")]
use super::http::HttpServer;
use super::local::map_own;
use super::redact::redact_name;
#[cfg(feature = "remote")]
use super::retry::Attempts;
use super::retry::short_reason;
use super::stores::Stores;
use super::url::{ObjectName, StoreKind};
use crate::error::{Error, Result, SelectionError, StorageError};

/// Maximum size of a single-request upload, in bytes; longer files are uploaded in parts. S3 requires at
/// least 5 MiB per part and at most 10,000 parts, so very long files have longer parts.
const PART_BYTES_MIN: u64 = 8 << 20;
/// Maximum number of parts in an object.
const PARTS_MAX: u64 = 10_000;
/// Number of parts that are uploaded in parallel.
const PARTS_AT_ONCE: usize = 8;

impl Stores {
    /// Uploads a file; blocks until the store has all of it.
    ///
    /// Each request is retried by [`super::RetryConfig`]. Readers see the old object, or none, until
    /// the last byte is there.
    ///
    /// # Errors
    /// [`Error::Selection`] if the URL names no object, [`Error::Storage`] if the file cannot be read or
    /// if the store refuses it for good.
    pub fn put_file(&self, url: &str, path: &std::path::Path) -> Result<()> {
        put_file(self, url, path)
    }
}

/// Uploads a file, see [`Stores::put_file`].
fn put_file(stores: &Stores, url: &str, path: &std::path::Path) -> Result<()> {
    let invalid = |reason: String| {
        Error::Selection(SelectionError::ShardList { pattern: redact_name(url).into_owned(), reason })
    };
    let parsed = stores.parse(url).map_err(invalid)?;
    if parsed.is_directory {
        return Err(invalid("expected the URL of an object, found a directory".into()));
    }
    let failed = |source| Error::Storage(StorageError::Upload { url: redact_name(url).into_owned(), source });
    let file = || map_own(path).map_err(|source| Error::file(path, source));
    match &parsed.object {
        #[cfg(feature = "remote")]
        ObjectName::Address(address) => {
            let server = stores.server(&parsed).map_err(invalid)?;
            let (stores, address, file) = (stores.clone(), address.clone(), file()?);
            let put = spawn(async move { put_to_server(&stores, &server, &address, &file).await });
            put.wait().flatten().map_err(failed)
        }
        #[cfg(not(feature = "remote"))]
        ObjectName::Address(_) => {
            let reason = stores.connect(&parsed, Retries::ByReader).err();
            Err(invalid(reason.unwrap_or_default()))
        }
        ObjectName::Key(key) => {
            let retries = Retries::ByStore(stores.shared.settings.retry);
            let store = stores.connect(&parsed, retries).map_err(invalid)?;
            let (kind, stores, key, file) = (parsed.kind, stores.clone(), key.clone(), file()?);
            let put = spawn(async move { put(&stores, store, &key, file).await });
            put.wait().map_err(failed)?.map_err(|error| failed(refused(&error, kind)))
        }
    }
}

/// Uploads to an HTTP server, with retries.
#[cfg(feature = "remote")]
async fn put_to_server(stores: &Stores, server: &HttpServer, address: &Url, file: &Bytes) -> io::Result<()> {
    let mut attempts = Attempts::new(stores.shared.settings.retry, file.len() as u64);
    loop {
        let permit = stores.shared.requests.acquire().await;
        let sent = server.put(address, file).await;
        drop(permit);
        match sent {
            Ok(()) => return Ok(()),
            Err(fault) => tokio::time::sleep(attempts.next_wait(fault)?.time).await,
        }
    }
}

fn refused(error: &object_store::Error, kind: StoreKind) -> io::Error {
    use object_store::Error::{NotImplemented, PermissionDenied, Unauthenticated};
    let reason = short_reason(error);
    match error {
        PermissionDenied { .. } | Unauthenticated { .. } => {
            io::Error::new(io::ErrorKind::PermissionDenied, format!("{reason}; {}", kind.credentials_hint()))
        }
        NotImplemented { .. } => io::Error::new(io::ErrorKind::Unsupported, reason),
        _ => io::Error::other(reason),
    }
}

async fn put(
    stores: &Stores,
    store: Arc<dyn ObjectStore>,
    key: &Path,
    file: Bytes,
) -> object_store::Result<()> {
    if file.len() as u64 <= PART_BYTES_MIN {
        let _permit = stores.shared.requests.acquire().await;
        return store.put(key, PutPayload::from(file)).await.map(|_| ());
    }
    let mut upload = store.put_multipart(key).await?;
    let sent = send_parts(stores, upload.as_mut(), file).await;
    match sent {
        Ok(()) => upload.complete().await.map(|_| ()),
        Err(error) => {
            // Uploaded parts are discarded; if that fails too, the bucket's lifecycle rules have to remove
            // them.
            let _ = upload.abort().await;
            Err(error)
        }
    }
}

async fn send_parts(
    stores: &Stores,
    upload: &mut dyn MultipartUpload,
    file: Bytes,
) -> object_store::Result<()> {
    let part_bytes = PART_BYTES_MIN.max((file.len() as u64).div_ceil(PARTS_MAX)) as usize;
    let starts = (0..file.len()).step_by(part_bytes);
    // The store numbers parts by the order of calls, so the calls are made in order.
    let parts = starts.map(|start| {
        let part = upload.put_part(file.slice(start..file.len().min(start + part_bytes)).into());
        async move {
            let _permit = stores.shared.requests.acquire().await;
            part.await
        }
    });
    futures::stream::iter(parts).buffer_unordered(PARTS_AT_ONCE).try_collect::<()>().await
}
