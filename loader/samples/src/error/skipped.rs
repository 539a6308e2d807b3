//! Describes a sample, or the rest of a shard, that was not delivered.

/// A sample, or the rest of a shard, that was not delivered, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Skipped {
    /// URL of the shard.
    pub shard: String,
    /// Offset in the shard, after decompression, of the sample or of the fault.
    pub offset: u64,
    /// Key of the sample; `None` if the fault hides it.
    pub key: Option<String>,
    /// Extension of the field at fault; `None` if it is the sample or the shard.
    pub field: Option<String>,
    /// Reason for skipping it.
    pub reason: String,
}

/// Formats an error and its causes as one line; a cause already contained in the line is left out.
#[must_use]
pub fn reason_of(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.map(ToString::to_string).fold(error.to_string(), |line, cause| {
        if line.contains(&cause) { line } else { format!("{line}: {cause}") }
    })
}
