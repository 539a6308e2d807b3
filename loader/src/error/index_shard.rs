//! Describes a shard that prevents merging index parts.

/// Reason why parts do not form a dataset index, at a specific shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ShardFault {
    /// No part covers the shard.
    #[error("no part covers it; index it and merge again")]
    Missing,
    /// More than one part covers the shard.
    #[error("it is covered more than once; give each part once")]
    Repeated,
    /// The shard length, modification time or entity tag has changed.
    #[error("it has changed since its part was made; make the part again")]
    Changed,
    /// The shard does not belong to the dataset.
    #[error("a part covers it, but it is not in the dataset; parts and dataset have to name the same shards")]
    Unknown,
    /// The shard's texts were counted by different tokenizers than the first shard's texts.
    #[error(
        "its texts were counted by other tokenizers than those of the first shard; make all parts with the same"
    )]
    OtherCounters,
    /// The shard's texts were not counted by the requested tokenizer.
    #[error("its texts were not counted by the requested tokenizer; make its part with it")]
    NotCounted,
    /// The shard's videos have a different sampling than requested.
    #[error("its videos were sampled in another way than requested; make its part with the same sampling")]
    OtherSampling,
}
