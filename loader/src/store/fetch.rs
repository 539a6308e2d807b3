//! Reads an object in parallel requests: many ranges with few requests, or the whole object into a file.

use std::io;
use std::ops::Range;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::try_join_all;

use super::answer::Identity;
use super::cache::{PartWriter, blocking};
use super::coalesce::coalesce;
use super::connect::spawn;
use super::object::RemoteObject;

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
