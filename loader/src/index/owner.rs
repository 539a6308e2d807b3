//! Decides by owner whether an index file next to the shards is read.
//!
//! An index determines which shard bytes belong to which sample. Whoever can write it can therefore exchange
//! the samples for every reader, so the index must belong to the reader, to root, or to the owner of all
//! shards, who could exchange the samples anyway. A directory that the user set is not checked.

use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use bytes::Bytes;

use super::places::IndexOptions;
use crate::shard::Shard;
use crate::store::file;
use crate::store::local::read_private;

/// Reads an index file, if the owner is trusted or the user set the directory.
///
/// # Errors
/// [`ErrorKind::PermissionDenied`] with the owner; the operating system error.
pub(super) fn read_trusted(path: &Path, shards: &[Shard], options: &IndexOptions) -> io::Result<Bytes> {
    let file = file::open(path)?;
    if options.directory.is_none() {
        check_owner(&file.metadata()?, shards)?;
    }
    read_private(file)
}

/// Returns why an index file, or its directory, is not used; `None` if the file is missing.
pub(super) fn refusal(path: &Path, shards: &[Shard]) -> Option<String> {
    // Also checks the owner of a link, if there is one: the owner decides where the link points, at any time.
    let found = [std::fs::symlink_metadata(path), std::fs::metadata(path)];
    let check =
        |metadata: io::Result<Metadata>| metadata.and_then(|metadata| check_owner(&metadata, shards)).err();
    let refused = found.into_iter().find_map(check)?;
    let is_owner = refused.kind() == ErrorKind::PermissionDenied && refused.get_ref().is_some();
    is_owner.then(|| format!("`{}` is not used: {refused}", path.display()))
}

fn check_owner(metadata: &Metadata, shards: &[Shard]) -> io::Result<()> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    let other = |shard: &&Shard| shard_owner(shard) != Some(owner);
    if owner == user || owner == 0 {
        return Ok(());
    }
    let Some(shard) = shards.iter().find(other) else { return Ok(()) };
    let reason = format!(
        "it belongs to user {owner}, who is neither this user, {user}, nor root, nor the owner of shard `{}`",
        shard.url
    );
    Err(io::Error::new(ErrorKind::PermissionDenied, reason))
}

fn shard_owner(shard: &Shard) -> Option<u32> {
    Some(std::fs::metadata(shard.path()?).ok()?.uid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Index;
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;

    /// Only root can change a file's owner, so other users check nothing here.
    #[test]
    fn an_index_of_another_owner_is_replaced_and_named_unless_the_shards_are_his() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let temporary = tempfile::tempdir().unwrap();
        let data = temporary.path().join("shards");
        let mut writer = ShardWriter::builder(&data).build().unwrap();
        writer.write("kite", &[("txt", b"a red kite")]).unwrap();
        writer.finish().unwrap();
        let shards = expand_shards(&[data.to_str().unwrap()]).unwrap();
        let options = IndexOptions::default();
        let open = || Index::open_or_build(shards.clone(), &options).unwrap();
        let give = |path: &Path| std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        let give_back = |path: &Path| std::os::unix::fs::chown(path, Some(0), None).unwrap();
        let index = open().path().unwrap().to_owned();

        give(&index);
        assert!(refusal(&index, &shards).unwrap().contains("belongs to user 65534"));
        let again = open();
        assert_eq!(again.path().unwrap(), index, "the directory is trusted: the file was replaced");
        assert!(again.warnings()[0].contains(&*shards[0].url), "{:?}", again.warnings());
        assert!(refusal(&index, &shards).is_none() && open().warnings().is_empty());

        give(index.parent().unwrap());
        let elsewhere = open();
        assert!(elsewhere.path().is_none_or(|path| path.parent() != index.parent()));
        assert!(elsewhere.warnings()[0].contains("belongs to user 65534"));

        // A link from the other owner is no better, wherever it points.
        let beside = index.parent().unwrap();
        std::fs::rename(beside, temporary.path().join("mine")).unwrap();
        give_back(&temporary.path().join("mine"));
        std::os::unix::fs::symlink(temporary.path().join("mine"), beside).unwrap();
        assert!(refusal(beside, &shards).is_none());
        std::os::unix::fs::lchown(beside, Some(65_534), None).unwrap();
        assert!(refusal(beside, &shards).unwrap().contains("belongs to user 65534"));
        std::fs::remove_file(beside).unwrap();
        std::fs::rename(temporary.path().join("mine"), beside).unwrap();
        give(beside);

        let directory = temporary.path().join("indexes");
        let chosen = IndexOptions { directory: Some(directory.clone()), ..IndexOptions::default() };
        let chosen_index = Index::open_or_build(shards.clone(), &chosen).unwrap().path().unwrap().to_owned();
        give(&chosen_index);
        let again = Index::open_or_build(shards.clone(), &chosen).unwrap();
        let owner = std::fs::metadata(again.path().unwrap()).unwrap().uid();
        assert_eq!((owner, again.warnings().len()), (65_534, 0), "the user set the directory");

        give(shards[0].path().unwrap());
        give(&index);
        assert_eq!(
            (open().path().unwrap(), open().warnings().len()),
            (&*index, 0),
            "his are the shards, too"
        );
    }
}
