//! Reads shards through the Python package fsspec, where no store has the scheme of a URL.
//!
//! Each request calls `dflop._other_stores` on a thread that may wait for the interpreter.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use dflop_loader::error::BoxError;
use dflop_loader::store::object_store::path::Path;
use dflop_loader::store::object_store::{
    Attributes, CopyOptions, Error, Extensions, GetOptions, GetRange, GetResult, GetResultPayload,
    ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use dflop_loader::store::{ShardStore, serve_other_schemes};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use pyo3::exceptions::{PyFileNotFoundError, PyOSError, PyPermissionError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// Name in messages.
const STORE: &str = "fsspec";

/// Length, seconds of the last change, and tag.
type Version = (u64, f64, String);

/// Lets `fsspec` serve all URLs whose scheme no store has.
pub(crate) fn install() {
    serve_other_schemes(Arc::new(OtherSchemes));
}

struct OtherSchemes;

impl ShardStore for OtherSchemes {
    fn open(&self, root: &str) -> std::result::Result<Arc<dyn ObjectStore>, BoxError> {
        let opened = attached(|py| -> PyResult<Py<PyAny>> {
            let files = py.import("dflop._other_stores")?.getattr("Files")?;
            Ok(files.call1((root,))?.unbind())
        })?;
        let files = opened.map_err(|error| Python::attach(|py| error.value(py).to_string()))?;
        Ok(Arc::new(Files { root: root.to_owned(), files: Arc::new(files) }))
    }
}

/// Files below a root, served by an object of the Python class `Files`.
#[derive(Debug, Clone)]
struct Files {
    root: String,
    files: Arc<Py<PyAny>>,
}

impl fmt::Display for Files {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{STORE}({})", self.root)
    }
}

impl Files {
    /// Calls a method on a thread that may block.
    async fn call<T: Send + 'static>(
        &self,
        key: &Path,
        call: impl for<'py> FnOnce(&Bound<'py, PyAny>, &str) -> PyResult<T> + Send + 'static,
    ) -> Result<T> {
        let (files, key) = (self.files.clone(), key.to_string());
        let called = tokio::task::spawn_blocking(move || {
            attached(|py| call(files.bind(py), &key).map_err(|error| store_error(py, &error, &key)))
        });
        let failed = |source: BoxError| Error::Generic { store: STORE, source };
        called.await.map_err(|error| failed(error.into()))?.map_err(|reason| failed(reason.into()))?
    }

    async fn version(&self, key: &Path) -> Result<ObjectMeta> {
        let version =
            self.call(key, |files, key| files.call_method1("version", (key,))?.extract::<Version>()).await?;
        Ok(meta(key.clone(), version))
    }
}

#[async_trait]
impl ObjectStore for Files {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let length = match options.range {
            Some(GetRange::Bounded(_)) if !options.head => None,
            _ => Some(self.version(location).await?.size),
        };
        let range = match (options.range, length) {
            (Some(GetRange::Bounded(range)), _) => range,
            (Some(GetRange::Offset(start)), Some(length)) => start.min(length)..length,
            (Some(GetRange::Suffix(bytes)), Some(length)) => length.saturating_sub(bytes)..length,
            (_, length) => 0..length.unwrap_or(0),
        };
        let asked = if options.head { 0..0 } else { range };
        let (start, end) = (asked.start, asked.end);
        let read = move |files: &Bound<'_, PyAny>, key: &str| -> PyResult<(Bytes, Version)> {
            let (content, version): (PyBackedBytes, Version) =
                files.call_method1("read", (key, start, end))?.extract()?;
            Ok((Bytes::copy_from_slice(&content), version))
        };
        let (content, version) = self.call(location, read).await?;
        let range = start..start + content.len() as u64;
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream::iter([Ok(content)]).boxed()),
            meta: meta(location.clone(), version),
            range,
            attributes: Attributes::default(),
            extensions: Extensions::default(),
        })
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (files, prefix) = (self.clone(), prefix.cloned());
        let listed = async move { files.list_with_delimiter(prefix.as_ref()).await };
        let objects = |listed: Result<ListResult>| match listed {
            Ok(listed) => listed.objects.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        };
        stream::once(listed).flat_map(move |listed| stream::iter(objects(listed))).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let directory = prefix.cloned().unwrap_or_default();
        let named = self.call(&directory, |files, key| {
            files.call_method1("listed", (key,))?.extract::<Vec<(String, u64)>>()
        });
        let objects = named.await?.into_iter().map(|(name, bytes)| {
            let location = Path::parse(format!("{directory}/{name}").trim_start_matches('/'))?;
            Ok(meta(location, (bytes, 0.0, String::new())))
        });
        let objects = objects.collect::<Result<Vec<_>>>()?;
        Ok(ListResult { common_prefixes: Vec::new(), objects, extensions: Extensions::default() })
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        Err(read_only())
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(read_only())
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        locations.map(|_| Err(read_only())).boxed()
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(read_only())
    }
}

/// Calls Python code, unless the interpreter is ending.
fn attached<T>(call: impl for<'py> FnOnce(Python<'py>) -> T) -> std::result::Result<T, &'static str> {
    Python::try_attach(call).ok_or("the Python interpreter is ending")
}

fn meta(location: Path, (size, seconds, tag): Version) -> ObjectMeta {
    let since = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    let modified = SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH);
    let e_tag = (!tag.is_empty()).then(|| format!("\"{tag}\""));
    ObjectMeta { location, last_modified: modified.into(), size, e_tag, version: None }
}

fn read_only() -> Error {
    let source = "shards are read through fsspec, not written: write to a directory, and copy it".into();
    Error::NotSupported { source }
}

/// Converts an exception: an `OSError` may pass, another one does not.
fn store_error(py: Python<'_>, error: &PyErr, key: &str) -> Error {
    let path = key.to_owned();
    let source = error.to_string().into();
    if error.is_instance_of::<PyFileNotFoundError>(py) {
        Error::NotFound { path, source }
    } else if error.is_instance_of::<PyPermissionError>(py) {
        Error::PermissionDenied { path, source }
    } else if error.is_instance_of::<PyOSError>(py) {
        Error::Generic { store: STORE, source }
    } else {
        Error::NotSupported { source }
    }
}
