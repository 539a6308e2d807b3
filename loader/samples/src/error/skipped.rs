//! Describes a sample, or the rest of a shard, that was not delivered.

/// A sample, or the rest of a shard, that was not delivered, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Skipped {
    /// URL of the shard.
    pub shard: String,
    /// Offset of the sample or the fault in the shard, after decompression.
    pub offset: u64,
    /// Sample key; `None` if the fault hides it.
    pub key: Option<String>,
    /// Extension of the field at fault; `None` if the sample or the shard is at fault.
    pub field: Option<String>,
    /// Reason for skipping the sample.
    pub reason: String,
}

/// Formats an error and its causes as a single line; causes already contained in the line are omitted.
#[must_use]
pub fn error_reason(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.map(ToString::to_string).fold(error.to_string(), |line, cause| {
        if line.contains(&cause) { line } else { format!("{line}: {cause}") }
    })
}
