//! Finds a dataset index and compares it with the shards, without building or writing one.

use std::path::{Path, PathBuf};

use super::cache::{has_counts, open_fitting, stats};
use super::file::decode_index;
use super::owner::read_trusted;
use super::places::{IndexOptions, check_options, directories, file_name};
use crate::error::Result;
use crate::shard::Shard;

/// Search result, by what [`open_or_build`](super::Index::open_or_build) would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundIndex {
    /// The index fits the shards and is opened.
    Fresh(PathBuf),
    /// The index fits the shards, but lacks the required token counts: it is rebuilt.
    Uncounted(PathBuf),
    /// Shards with the same names have changed since the index was built: it is rebuilt.
    Stale(PathBuf),
    /// There is no index: it is built.
    Missing,
}

/// Returns a shard's length in bytes, as reported by the file system or the store.
///
/// # Errors
/// [`crate::Error::Storage`] if the shard cannot be found, [`crate::Error::Config`] if it is a stream.
pub fn shard_bytes(shard: &Shard) -> Result<u64> {
    Ok(stats(std::slice::from_ref(shard))?[0].bytes)
}

pub(super) fn find(shards: &[Shard], options: &IndexOptions) -> Result<FoundIndex> {
    check_options(shards, options)?;
    let stats = stats(shards)?;
    let (name, candidates) = (file_name(shards, &stats), directories(shards, options));
    for path in candidates.iter().map(|directory| directory.join(&name)) {
        if let Some(decoded) = open_fitting(&path, shards, &stats, options) {
            let is_counted = has_counts(&decoded, options);
            return Ok(if is_counted { FoundIndex::Fresh(path) } else { FoundIndex::Uncounted(path) });
        }
    }
    let earlier = candidates.iter().find_map(|directory| same_named_index(directory, shards, options));
    Ok(earlier.map_or(FoundIndex::Missing, FoundIndex::Stale))
}

/// Returns an index in a directory for shards with the same names; the shard sizes may differ, so the file
/// name may differ as well.
fn same_named_index(directory: &Path, shards: &[Shard], options: &IndexOptions) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "arrow"));
    paths.sort();
    let has_same_names = |path: &PathBuf| {
        let Ok(read) = read_trusted(path, shards, options) else { return false };
        let Ok(decoded) = decode_index(&read) else { return false };
        let indexed = decoded.metadata.shards.iter().map(|shard| shard.name.as_str());
        indexed.eq(shards.iter().map(Shard::base_name))
    };
    paths.into_iter().find(has_same_names)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::index::Index;
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;

    fn write(directory: &Path, text: &str) -> Vec<Shard> {
        let _ = std::fs::remove_dir_all(directory.join("new"));
        let mut writer = ShardWriter::builder(directory.join("new")).build().unwrap();
        writer.write("kite", &[("txt", text.as_bytes())]).unwrap();
        writer.finish().unwrap();
        let to = directory.join("shard-000.tar");
        let from =
            std::fs::read_dir(directory.join("new")).unwrap().filter_map(|entry| Some(entry.ok()?.path()));
        let from = from.into_iter().find(|path| path.extension().is_some_and(|ext| ext == "tar")).unwrap();
        std::fs::rename(from, &to).unwrap();
        expand_shards(&[to.to_str().unwrap()]).unwrap()
    }

    #[test]
    fn an_index_is_missing_then_fresh_then_stale_and_nothing_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let options = IndexOptions { directory: Some(directory.path().join("index")), ..Default::default() };
        let shards = write(directory.path(), "a red kite");
        assert_eq!(find(&shards, &options).unwrap(), FoundIndex::Missing);
        assert!(!directory.path().join("index").exists());
        let built = Index::open_or_build(shards.clone(), &options).unwrap();
        let path = built.path().unwrap().to_owned();
        assert_eq!(find(&shards, &options).unwrap(), FoundIndex::Fresh(path.clone()));
        let later = SystemTime::now() + Duration::from_hours(1);
        File::options().write(true).open(shards[0].path().unwrap()).unwrap().set_modified(later).unwrap();
        assert_eq!(find(&shards, &options).unwrap(), FoundIndex::Stale(path.clone()), "another time");
        let longer = write(directory.path(), &"a red kite ".repeat(2000));
        assert_eq!(find(&longer, &options).unwrap(), FoundIndex::Stale(path), "another size");
        assert_eq!(
            shard_bytes(&longer[0]).unwrap(),
            std::fs::metadata(longer[0].path().unwrap()).unwrap().len()
        );
        std::fs::remove_file(longer[0].path().unwrap()).unwrap();
        assert!(shard_bytes(&longer[0]).is_err() && find(&longer, &options).is_err());
    }
}
