//! Lists the shards below a bucket directory, and checks whether a shard exists.

use std::io;

use super::connect::spawn;
use super::object::{RemoteObject, Source};
use super::retry::{is_missing, unwatched};

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
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use object_store::{ObjectStore, ObjectStoreExt};

    use super::super::connect::spawn;
    use crate::shard::expand_shards_in;
    use crate::store::stores::Stores;

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
