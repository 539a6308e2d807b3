//! Weights files and checkpoints.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use dflop_executor::checkpoint::SavedCheckpoint;
use dflop_executor::models::weights::{Checkpoint, WEIGHTS_FILE};
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// Directory for this process.
static PLACE: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("a temporary directory"));

fn directory(name: &str) -> PathBuf {
    let directory = PLACE.path().join(name);
    std::fs::create_dir_all(&directory).expect("the directory is made");
    directory
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("the file is written");
}

/// Reads all tensors in a file; none is larger than the file.
pub(super) fn safetensors(bytes: &[u8]) {
    let path = directory("weights").join(WEIGHTS_FILE);
    write(&path, bytes);
    let Ok(weights) = Checkpoint::open(&path) else { return };
    for name in weights.names() {
        if let Ok((shape, values)) = weights.tensor(name) {
            assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
            assert!(values.len() <= bytes.len(), "{name}");
        }
        let _integers = weights.integers(name);
    }
}

/// Opens a checkpoint with three files, which follow each other in the input after lines of dashes: state,
/// weights and optimizer, under a valid manifest; or with a single file, the manifest.
pub(super) fn checkpoint(bytes: &[u8]) {
    const NAMES: [&str; 3] = ["state.json", WEIGHTS_FILE, "optimizer-00001-of-00001.safetensors"];
    const LINE: &[u8] = b"\n---\n";
    let directory = directory("checkpoint");
    let mut rest = bytes;
    let mut files = Map::new();
    for name in NAMES {
        let end = rest.windows(LINE.len()).position(|window| window == LINE);
        let (file, after) = end.map_or((rest, &[][..]), |end| (&rest[..end], &rest[end + LINE.len()..]));
        write(&directory.join(name), file);
        let digest = json!({"bytes": file.len(), "xxh3": format!("{:016x}", xxh3_64(file))});
        files.insert(name.to_owned(), digest);
        rest = after;
    }
    let step = saved_step(&directory.join(NAMES[0])).unwrap_or(1);
    let manifest = json!({"format": 1, "step": step, "files": files});
    write(&directory.join("manifest.json"), manifest.to_string().as_bytes());
    if let Ok(saved) = SavedCheckpoint::open(&directory) {
        assert_eq!(saved.step(), step);
        for name in saved.weights().names() {
            let _values = saved.weights().tensor(name);
        }
    }
    write(&directory.join("manifest.json"), bytes);
    let opened = SavedCheckpoint::open(&directory);
    assert!(opened.is_err() || bytes.windows(4).any(|window| window == b"xxh3"), "opened without digests");
}

fn saved_step(state: &Path) -> Option<u64> {
    let state: Value = serde_json::from_slice(&std::fs::read(state).ok()?).ok()?;
    state.get("step")?.as_u64()
}
