//! Divides a checkpoint into files: one piece per rank that owns parameters.

use serde_json::{Value, json};

use crate::optimizer::Ownership;
use dflop_models::weights::WEIGHTS_FILE;

/// Ranks that write files, ascending: each writes one checkpoint piece.
pub(super) struct Pieces {
    owners: Vec<usize>,
}

impl Pieces {
    pub(super) fn of(ownership: &Ownership) -> Self {
        let mut owners: Vec<usize> = ownership.writers().map(|(_, owner)| owner).collect();
        owners.sort_unstable();
        owners.dedup();
        Self { owners }
    }

    /// Returns the ranks that write pieces, by piece.
    pub(super) fn owners(&self) -> &[usize] {
        &self.owners
    }

    /// Returns the piece that a rank writes, if any.
    pub(super) fn rank_piece(&self, rank: usize) -> Option<usize> {
        self.owners.iter().position(|&owner| owner == rank)
    }

    pub(super) fn weights(&self, piece: usize) -> String {
        match self.owners.len() {
            1 => WEIGHTS_FILE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", piece + 1),
        }
    }

    pub(super) fn optimizer(&self, piece: usize) -> String {
        format!("optimizer-{:05}-of-{:05}.safetensors", piece + 1, self.owners.len())
    }

    /// Returns the map from tensors to weight files, for the index.
    ///
    /// - `others`: names of tensors that the model does not use, which are in the first piece
    pub(super) fn weight_map<'a>(
        &self,
        ownership: &Ownership,
        others: impl Iterator<Item = &'a str>,
    ) -> serde_json::Map<String, Value> {
        let own =
            ownership.writers().map(|(name, owner)| (name.to_owned(), self.rank_piece(owner).unwrap_or(0)));
        let others = others.map(|name| (name.to_owned(), 0));
        own.chain(others).map(|(name, piece)| (name, json!(self.weights(piece)))).collect()
    }
}
