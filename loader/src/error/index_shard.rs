//! Describes a shard that keeps parts of an index from being merged.

/// Reason why parts do not form the index of a dataset, at one of its shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ShardFault {
    /// No part covers it.
    #[error("no part covers it; index it and merge again")]
    Missing,
    /// More than one part covers it.
    #[error("it is covered more than once; give each part once")]
    Repeated,
    /// Its length, modification time or entity tag has changed.
    #[error("it has changed since its part was made; make the part again")]
    Changed,
    /// It does not belong to the dataset.
    #[error("a part covers it, but it is not in the dataset; parts and dataset have to name the same shards")]
    Unknown,
    /// Its texts were counted by other tokenizers than the texts of the first shard.
    #[error(
        "its texts were counted by other tokenizers than those of the first shard; make all parts with the same"
    )]
    OtherCounters,
    /// Its texts were not counted by the requested tokenizer.
    #[error("its texts were not counted by the requested tokenizer; make its part with it")]
    NotCounted,
    /// Its videos have another sampling than requested.
    #[error("its videos were sampled in another way than requested; make its part with the same sampling")]
    OtherSampling,
}
