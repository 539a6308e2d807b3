//! Reads many ranges from a single object in parallel, with few requests.

use std::io;
use std::ops::Range;

use bytes::Bytes;
use futures::future::try_join_all;

use super::answer::Identity;
use super::coalesce::coalesce;
use super::object::RemoteObject;
use super::tasks::spawn;

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
