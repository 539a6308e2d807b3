//! Reads an object in parallel requests: many ranges with few requests, or the whole object into a file.
//!
//! Also lists the shards below a bucket directory, and checks whether a shard exists.

use super::answer::{Identity, coalesce};
use super::cache::{PartWriter, blocking};
use super::connect::spawn;
use super::hub::is_hub_name;
use super::object::{RemoteObject, Source};
use super::retry::{is_missing, unwatched};
use bytes::Bytes;
use futures::StreamExt;
use futures::future::try_join_all;
use std::io;
use std::ops::Range;

/// Number of chunks per object that are downloaded in parallel.
const CHUNKS_AT_ONCE: usize = 8;

/// Reads `wanted` and returns the bytes for each range, in the same order; ranges in the same request share
/// memory.
///
/// # Errors
/// The first request that failed permanently; all remaining requests are canceled.
pub(crate) async fn fetch_ranges(
    object: &RemoteObject,
    identity: &Identity,
    wanted: &[Range<u64>],
) -> io::Result<Vec<Bytes>> {
    let requests = coalesce(wanted, object.coalesce_limits());
    let read = requests.into_iter().map(|request| {
        let (object, identity) = (object.clone(), identity.clone());
        let range = request.range.clone();
        let task = spawn(async move { object.read(range, &identity).await });
        async move { io::Result::Ok((request, task.await??.0)) }
    });
    let mut bytes = vec![Bytes::new(); wanted.len()];
    for (request, body) in try_join_all(read).await? {
        for at in request.wanted {
            let start = (wanted[at].start - request.range.start) as usize;
            bytes[at] = body.slice(start..start + (wanted[at].end - wanted[at].start) as usize);
        }
    }
    Ok(bytes)
}

/// Downloads a whole object into a file.
pub(crate) async fn download(object: RemoteObject, identity: Identity, part: PartWriter) -> io::Result<()> {
    let chunk_bytes = object.stores().chunk_bytes();
    let starts = (0..identity.bytes).step_by(chunk_bytes as usize);
    let write = |start: u64| {
        let (object, identity, part) = (object.clone(), identity.clone(), part.clone());
        let range = start..identity.bytes.min(start + chunk_bytes);
        async move {
            let (bytes, _) = object.read(range, &identity).await?;
            blocking(move || part.write_at(&bytes, start)).await
        }
    };
    let mut written = futures::stream::iter(starts).map(write).buffer_unordered(CHUNKS_AT_ONCE);
    while let Some(chunk) = written.next().await {
        chunk?;
    }
    Ok(())
}

/// Returns whether an object exists.
///
/// # Errors
/// The store error after all attempts, unless it means a missing object.
pub(crate) fn exists(object: &RemoteObject) -> io::Result<bool> {
    let object = object.clone();
    match spawn(async move { object.identity().await }).wait().flatten() {
        Ok(_) => Ok(true),
        Err(error) if is_missing(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Lists the URLs of all objects directly below a directory, sorted.
///
/// # Errors
/// The store error after all attempts; HTTP servers have no listing.
pub(crate) fn list_directory(directory: &RemoteObject) -> io::Result<Vec<String>> {
    if is_hub_name(directory.url()) {
        return directory.stores().hub_files(directory.url(), false);
    }
    let listed = directory.clone();
    spawn(async move { list_all(&listed).await }).wait()?
}

#[cfg(feature = "remote")]
fn no_listing() -> io::Error {
    let reason = "HTTP servers do not list directories; name the shards, as in `{000..019}.tar`";
    io::Error::new(io::ErrorKind::Unsupported, reason)
}

async fn list_all(directory: &RemoteObject) -> io::Result<Vec<String>> {
    let mut attempts = directory.attempts(0);
    let kind = directory.parsed().kind;
    let (store, path) = match directory.source() {
        Source::Bucket { store, path } => (store, path),
        #[cfg(feature = "remote")]
        Source::Server { .. } => return Err(no_listing()),
    };
    let prefix = (!path.as_ref().is_empty()).then_some(path);
    loop {
        let permit = directory.permit().await;
        let listed = store.list_with_delimiter(prefix).await;
        drop(permit);
        match listed {
            Ok(listed) => {
                let urls = listed.objects.iter().map(|meta| directory.parsed().object_url(&meta.location));
                let mut urls: Vec<_> = urls.collect();
                urls.sort_unstable();
                return Ok(urls);
            }
            Err(error) => directory.pause(&mut attempts, unwatched(&error, kind), 0).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::connect::spawn;
    use crate::shard::expand_shards_in;
    use crate::store::stores::Stores;
    use object_store::memory::InMemory;
    use object_store::{ObjectStore, ObjectStoreExt};
    use std::sync::Arc;

    fn bucket(names: &[&str]) -> Stores {
        let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        for name in names {
            let (store, path) = (memory.clone(), object_store::path::Path::parse(name).unwrap());
            let put = spawn(async move { store.put(&path, path.to_string().into_bytes().into()).await });
            put.wait().unwrap().unwrap();
        }
        let stores = Stores::builder().build().unwrap();
        stores.insert("s3://bucket", &memory);
        stores
    }

    #[test]
    fn a_directory_stands_for_the_shards_directly_in_it() {
        let names = ["f/b.tar", "f/a.tar.zst", "f/readme.md", "f/deeper/c.tar", "fg/d.tar", "top.tar"];
        let stores = bucket(&names);
        let urls = |pattern: &str| {
            let shards = expand_shards_in(&[pattern], &(&stores).into()).unwrap();
            shards.iter().map(|shard| shard.url.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(urls("s3://bucket/f/"), ["s3://bucket/f/a.tar.zst", "s3://bucket/f/b.tar"]);
        assert_eq!(urls("s3://bucket"), ["s3://bucket/top.tar"]);
        assert_eq!(urls("s3://bucket/f/b.tar"), ["s3://bucket/f/b.tar"]);
        let error = expand_shards_in(&["s3://bucket/none/"], &(&stores).into()).unwrap_err().to_string();
        assert!(error.contains("s3://bucket/none/") && error.contains("no .tar"), "{error}");
    }

    #[test]
    fn objects_are_read_by_range_and_missing_ones_are_named() {
        let stores = bucket(&["f/b.tar"]);
        let object = |url: &str| stores.object(&Arc::from(url)).unwrap();
        let read = async |object: crate::store::object::RemoteObject| {
            let identity = object.identity().await?;
            object.read(2..5, &identity).await
        };
        let there = object("s3://bucket/f/b.tar");
        assert_eq!(spawn(async move { read(there).await }).wait().unwrap().unwrap().0, "b.t");
        let missing = object("s3://bucket/f/none");
        let error = spawn(async move { read(missing).await }).wait().unwrap().unwrap_err();
        assert!(error.to_string().contains("a directory ends with `/`"), "{error}");
    }
}
