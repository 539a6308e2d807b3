//! Uploads files to remote stores: an object appears whole or not at all.

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};

use super::connect::Retries;
use super::local::map_own;
use super::object::short_reason;
use super::redact::redact_name;
use super::stores::Stores;
use super::tasks::spawn;
use super::url::{RemoteUrl, StoreKind};
use crate::error::{Error, Result, SelectionError, StorageError};

/// Files up to this length are one request; longer ones are uploaded in parts. S3 requires at least 5 MiB per
/// part and at most 10,000 parts, so the parts of very long files are longer.
const PART_BYTES_MIN: u64 = 8 << 20;
/// Most parts of an object.
const PARTS_MAX: u64 = 10_000;
/// Parts that are uploaded in parallel.
const PARTS_AT_ONCE: usize = 8;

/// Uploads a file, see [`Stores::put_file`].
pub(super) fn put_file(stores: &Stores, url: &str, path: &Path) -> Result<()> {
    let invalid = |reason: String| {
        Error::Selection(SelectionError::ShardList { pattern: redact_name(url).into_owned(), reason })
    };
    let parsed = stores.parse(url).map_err(invalid)?;
    if parsed.is_directory {
        return Err(invalid("expected the URL of an object, found a directory".into()));
    }
    let retries = Retries::ByStore(stores.shared.settings.retry);
    let store = stores.connect(&parsed, retries).map_err(invalid)?;
    let file = map_own(path).map_err(|source| Error::file(path, source))?;
    let failed = |source| Error::Storage(StorageError::Upload { url: redact_name(url).into_owned(), source });
    let (kind, stores) = (parsed.kind, stores.clone());
    let put = spawn(async move { put(&stores, store, &parsed, file).await });
    put.wait().map_err(failed)?.map_err(|error| failed(refused(&error, kind)))
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
    url: &RemoteUrl,
    file: Bytes,
) -> object_store::Result<()> {
    let bytes = file.len() as u64;
    if bytes <= PART_BYTES_MIN || url.kind == StoreKind::Http {
        let _permit = stores.shared.requests.acquire().await;
        return store.put(&url.path, PutPayload::from(file)).await.map(|_| ());
    }
    let mut upload = store.put_multipart(&url.path).await?;
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
