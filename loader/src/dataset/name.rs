//! Names datasets: a user-defined name, or the shard directory.

use std::sync::Arc;

use crate::shard::Shard;

/// Returns the name of the directory that contains the first shard, or the shard name if there is no
/// directory.
pub(super) fn directory_name(shards: &[Shard]) -> Arc<str> {
    let Some(first) = shards.first() else { return "nothing".into() };
    let path = first.url.split(['?', '#']).next().unwrap_or_default();
    let path = path.split_once("://").map_or(path, |(_, path)| path);
    let mut parts = path.rsplit('/').filter(|part| !part.is_empty() && *part != ".");
    let shard = parts.next().unwrap_or(path);
    parts.next().unwrap_or(shard).into()
}

/// Makes names unique: a repeated name receives a number, as in `photos#2`.
pub(crate) fn make_unique(names: impl Iterator<Item = Arc<str>>) -> Vec<Arc<str>> {
    let mut unique: Vec<Arc<str>> = Vec::new();
    for name in names {
        let numbered = |number: usize| -> Arc<str> { format!("{name}#{number}").into() };
        let candidates = std::iter::once(name.clone()).chain((2..).map(numbered));
        unique.extend(candidates.into_iter().find(|candidate| !unique.contains(candidate)));
    }
    unique
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::expand_shards;

    #[test]
    fn the_directory_of_the_first_shard_names_a_dataset() {
        let directory = tempfile::tempdir().unwrap();
        let photos = directory.path().join("photos");
        std::fs::create_dir(&photos).unwrap();
        std::fs::write(photos.join("000.tar"), []).unwrap();
        let shards = expand_shards(&[photos.display().to_string()]).unwrap();
        assert_eq!(&*directory_name(&shards), "photos");
        assert_eq!(&*directory_name(&[]), "nothing");
    }

    #[test]
    fn equal_names_are_numbered() {
        let names = ["a", "b", "a", "a#2", "a"].map(Arc::from);
        let unique = make_unique(names.into_iter());
        let unique: Vec<&str> = unique.iter().map(|name| &**name).collect();
        assert_eq!(unique, ["a", "b", "a#2", "a#2#2", "a#3"]);
    }
}
