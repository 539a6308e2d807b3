//! Writes weights as files that transformers reads.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::{INDEX_FILE, WEIGHTS_FILE};
use crate::error::{Error, Result};

/// Tensor to write.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    /// Values.
    pub values: Vec<f32>,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        4 * self.values.len() as u64
    }
}

/// Writes tensors as `f32` into a directory: one file, or several files with at most `piece_bytes_max` (or
/// one tensor) and an index.
///
/// Each file is written under a temporary name, synced and renamed; the index is written last. Existing files
/// with the same names are replaced, and files from the alternative form are removed, so that the directory
/// has one set of weights.
///
/// # Errors
/// [`Error::File`] if a file cannot be written.
pub fn write(directory: &Path, mut tensors: Vec<Tensor>, piece_bytes_max: u64) -> Result<()> {
    // the same files for any order in which stages return tensors
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut pieces: Vec<Vec<Tensor>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        bytes += tensor.bytes();
        match pieces.last_mut() {
            Some(piece) if piece.is_empty() || bytes <= piece_bytes_max => piece.push(tensor),
            _ => {
                bytes = tensor.bytes();
                pieces.push(vec![tensor]);
            }
        }
    }
    if let [only] = &pieces[..] {
        write_piece(directory, WEIGHTS_FILE, only)?;
        return remove(&directory.join(INDEX_FILE));
    }
    let count = pieces.len();
    let mut map = serde_json::Map::new();
    for (index, piece) in pieces.iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        write_piece(directory, &file, piece)?;
        map.extend(piece.iter().map(|tensor| (tensor.name.clone(), file.clone().into())));
    }
    let total: u64 = pieces.iter().flatten().map(Tensor::bytes).sum();
    let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
    replace(directory, INDEX_FILE, |part| std::fs::write(part, format!("{index:#}\n")))?;
    remove(&directory.join(WEIGHTS_FILE))
}

fn write_piece(directory: &Path, name: &str, tensors: &[Tensor]) -> Result<()> {
    let mut views = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let bytes = bytemuck::cast_slice(&tensor.values);
        let view =
            TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).map_err(|_| Error::TensorShape {
                tensor: tensor.name.clone(),
                expected: vec![tensor.values.len()],
                found: tensor.shape.clone(),
            })?;
        views.push((&tensor.name, view));
    }
    // transformers rejects files without this entry
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    replace(directory, name, |part| {
        safetensors::serialize_to_file(views, Some(metadata), part).map_err(std::io::Error::other)
    })
}

/// Writes a file in a temporary directory that only this user can access, so that no link is followed; syncs
/// and renames it.
fn replace(directory: &Path, name: &str, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let path = directory.join(name);
    let all = || {
        let own = tempfile::Builder::new().prefix(".weights-").suffix(".partial").tempdir_in(directory)?;
        let part = own.path().join(name);
        write(&part)?;
        // before the rename, so that a crash leaves the old file or the complete new one
        File::open(&part)?.sync_all()?;
        std::fs::rename(&part, &path)?;
        // the rename itself is durable only once the directory is synced
        File::open(directory)?.sync_all()
    };
    all().map_err(|source| Error::File { action: "write", path: path.clone(), source })
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::File { action: "remove", path: path.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}
