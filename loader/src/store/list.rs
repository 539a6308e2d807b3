//! The shards below a folder of a bucket.

use std::io::{self, ErrorKind};

use super::fault::unwatched;
use super::object::RemoteObject;
use super::tasks::spawn;
use super::url::StoreKind;

/// Lists the URLs of all objects directly below a folder, sorted.
///
/// # Errors
/// What the store says after all attempts; HTTP servers have no listing.
pub(crate) fn list_folder(folder: &RemoteObject) -> io::Result<Vec<String>> {
    if folder.parsed().kind == StoreKind::Http {
        let reason = "HTTP servers do not list folders; name the shards, as in `{000..019}.tar`";
        return Err(io::Error::new(ErrorKind::Unsupported, reason));
    }
    let listed = folder.clone();
    spawn(async move { list_all(&listed).await }).wait()?
}

async fn list_all(folder: &RemoteObject) -> io::Result<Vec<String>> {
    let mut attempts = folder.attempts(0);
    let kind = folder.parsed().kind;
    let path = &folder.parsed().path;
    let prefix = (!path.as_ref().is_empty()).then_some(path);
    loop {
        let permit = folder.permit().await;
        let listed = folder.store().list_with_delimiter(prefix).await;
        drop(permit);
        match listed {
            Ok(listed) => {
                let urls = listed.objects.iter().map(|meta| folder.parsed().url_of(&meta.location));
                let mut urls: Vec<_> = urls.collect();
                urls.sort_unstable();
                return Ok(urls);
            }
            Err(error) => folder.pause(&mut attempts, unwatched(&error, kind), 0).await?,
        }
    }
}
