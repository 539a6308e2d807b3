//! Finds the files of other tools next to local shards.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::energon;
use super::energon::{parse_info, parse_tar_index};
use super::webshart::parse_payloads;
use crate::shard::{Shard, parse_shard_list};
use crate::store::file;
use crate::store::local::read_file;

/// Directories searched for `.nv-meta`, from that of the shard upwards.
const DIRECTORIES_UP_MAX: usize = 4;
/// Most JSON files of a directory that are examined as shard lists of wids.
const LISTS_MAX: usize = 64;
/// Bytes at the start of a shard list that must contain its kind.
const KIND_WITHIN_BYTES: u64 = 512;
/// Longest file that is read.
const BYTES_MAX: u64 = 1 << 30;

/// Numbers that other tools' files claim for a shard, each with the path of the file.
#[derive(Debug, Clone, Default)]
pub(in crate::index) struct Claims {
    pub(in crate::index) samples: Vec<(String, u64)>,
    pub(in crate::index) bytes: Vec<(String, u64)>,
    /// Files that cannot be used.
    pub(in crate::index) warnings: Vec<String>,
}

/// Locations of headers according to another tool's file.
#[derive(Debug, Clone)]
pub(in crate::index) struct HeaderLayout {
    pub(in crate::index) source: String,
    /// Offsets at which chains of headers start; ascending.
    pub(in crate::index) starts: Vec<u64>,
    /// Offsets at which samples start, if the tool groups entries itself.
    pub(in crate::index) samples: Option<Vec<u64>>,
}

/// Collects the claims of `.info.json` and shard lists for each shard.
pub(in crate::index) fn claims(shards: &[Shard]) -> Vec<Claims> {
    let mut claims = vec![Claims::default(); shards.len()];
    let mut directories: Vec<&Path> = shards.iter().filter_map(|shard| shard.path()?.parent()).collect();
    directories.sort_unstable();
    directories.dedup();
    let by_path: HashMap<PathBuf, usize> = shards
        .iter()
        .enumerate()
        .filter_map(|(at, shard)| Some((std::path::absolute(shard.path()?).ok()?, at)))
        .collect();
    let mut files: Vec<PathBuf> = Vec::new();
    for directory in directories {
        let above = directory.ancestors().take(DIRECTORIES_UP_MAX);
        let info =
            above.map(|above| above.join(energon::DIRECTORY).join(".info.json")).find(|path| path.is_file());
        files.extend(info.into_iter().chain(shard_lists(directory, &by_path)));
    }
    files.sort_unstable();
    files.dedup();
    for file in files {
        if let Err(warning) = collect(&file, &by_path, &mut claims) {
            claims[0].warnings.push(format!("`{}` is ignored: {warning}", file.display()));
        }
    }
    claims
}

/// Adds the claims of one file.
fn collect(file: &Path, by_path: &HashMap<PathBuf, usize>, claims: &mut [Claims]) -> Result<(), String> {
    let source = file.display().to_string();
    let bytes =
        read_file(file, BYTES_MAX).map_err(|error| crate::error::reason_of(&error))?.unwrap_or_default();
    let shard_at = |path: &Path| std::path::absolute(path).ok().and_then(|path| by_path.get(&path).copied());
    if file.ends_with(".info.json") {
        let root = file.parent().and_then(Path::parent).unwrap_or(Path::new(""));
        for (path, samples) in parse_info(&bytes)? {
            if let Some(shard) = shard_at(&root.join(path)) {
                claims[shard].samples.push((source.clone(), samples));
            }
        }
        return Ok(());
    }
    let list = parse_shard_list(&bytes)?;
    for listed in &list.shards {
        if let Some(shard) = shard_at(Path::new(&list.resolve(file, &listed.url))) {
            let claims = &mut claims[shard];
            claims.samples.extend(listed.nsamples.map(|samples| (source.clone(), samples)));
            claims.bytes.extend(listed.filesize.map(|bytes| (source.clone(), bytes)));
        }
    }
    Ok(())
}

/// Returns JSON files in a directory that are marked as shard lists; those of webshart, one per shard, are
/// not.
fn shard_lists(directory: &Path, shards: &HashMap<PathBuf, usize>) -> Vec<PathBuf> {
    let is_list = |path: &PathBuf| {
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let of_shard =
            std::path::absolute(path.with_extension("tar")).is_ok_and(|tar| shards.contains_key(&tar));
        is_json && !of_shard
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_list).collect();
    paths.sort_unstable();
    paths.truncate(LISTS_MAX);
    paths.retain(|path| says_its_kind(path));
    paths
}

fn says_its_kind(path: &Path) -> bool {
    use std::io::Read;
    let mut begin = Vec::new();
    let read = file::open(path).and_then(|file| file.take(KIND_WITHIN_BYTES).read_to_end(&mut begin));
    read.is_ok() && begin.windows(20).any(|window| window == b"wids-shard-index-v1\"")
}

/// Returns the header locations of `SHARD.tar.idx`, else of webshart's `SHARD.json`; `None` without either.
///
/// # Errors
/// A warning with the path of the file if it does not match the shard.
pub(in crate::index) fn layout(
    shard: &Shard,
    shard_bytes: u64,
    is_followed: bool,
) -> Result<Option<HeaderLayout>, String> {
    let Some(path) = shard.path() else { return Ok(None) };
    let tar_index = PathBuf::from(format!("{}.idx", path.display()));
    if let Some(layout) = with_file(&tar_index, shard, |bytes| tar_index_layout(bytes, shard_bytes))? {
        return Ok(Some(layout));
    }
    // Reading it takes longer than reading the headers of a local shard.
    if !is_followed {
        return Ok(None);
    }
    let json = path.with_extension("json");
    with_file(&json, shard, |bytes| payloads_layout(bytes, shard, shard_bytes))
}

type HeaderOffsets = (Vec<u64>, Option<Vec<u64>>);

fn with_file(
    path: &Path,
    shard: &Shard,
    parse: impl Fn(&[u8]) -> Result<HeaderOffsets, String>,
) -> Result<Option<HeaderLayout>, String> {
    let source = path.display().to_string();
    let unusable = |reason: String| {
        format!("`{source}` is ignored, shard `{}` is read from its start: {reason}", shard.url)
    };
    let bytes = read_file(path, BYTES_MAX).map_err(|error| unusable(crate::error::reason_of(&error)))?;
    let Some(bytes) = bytes else { return Ok(None) };
    let (starts, samples) = parse(&bytes).map_err(unusable)?;
    Ok(Some(HeaderLayout { source, starts, samples }))
}

fn tar_index_layout(bytes: &[u8], shard_bytes: u64) -> Result<HeaderOffsets, String> {
    let starts = parse_tar_index(bytes, shard_bytes)?;
    let samples = starts[..starts.len() - 1].to_vec();
    Ok((starts, Some(samples)))
}

fn payloads_layout(bytes: &[u8], shard: &Shard, shard_bytes: u64) -> Result<HeaderOffsets, String> {
    let payloads = parse_payloads(bytes)?;
    if payloads.shard != shard.base_name() {
        return Err(format!("it describes another shard, `{}`", payloads.shard));
    }
    if payloads.filesize != shard_bytes {
        return Err(format!(
            "it describes a shard of {} bytes, this one has {shard_bytes}",
            payloads.filesize
        ));
    }
    Ok((payloads.ends, None))
}
