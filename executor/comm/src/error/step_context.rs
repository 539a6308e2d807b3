//! Rank activity within a step, which errors name and receivers check.

use std::fmt;

/// Action name, at most 24 bytes so that it fits into every header.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ActionName {
    bytes: [u8; Self::BYTES_MAX],
    length: u8,
}

impl ActionName {
    /// Maximum name length in bytes; longer names are cut at a character boundary.
    pub const BYTES_MAX: usize = 24;

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or("?")
    }

    /// Name padded with zeros.
    pub(crate) fn padded(&self) -> &[u8; Self::BYTES_MAX] {
        &self.bytes
    }

    /// Inverse of [`padded`](Self::padded).
    pub(crate) fn from_padded(bytes: [u8; Self::BYTES_MAX]) -> Self {
        let length = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        Self { bytes, length: length as u8 }
    }
}

impl From<&str> for ActionName {
    fn from(name: &str) -> Self {
        let mut length = name.len().min(Self::BYTES_MAX);
        // the name must stay valid UTF-8 when it is cut
        while !name.is_char_boundary(length) {
            length -= 1;
        }
        let mut bytes = [0; Self::BYTES_MAX];
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        Self { bytes, length: length as u8 }
    }
}

impl fmt::Debug for ActionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Current rank activity: a step, optionally a microbatch, and an action such as `recv`.
///
/// Sent with every message. Sender and receiver must have the same step and microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StepContext {
    /// Step in the run, from 0.
    pub step: u64,
    /// Microbatch in the step, if the action belongs to a microbatch.
    pub microbatch: Option<u32>,
    /// Action, as errors print it.
    pub action: ActionName,
}

impl StepContext {
    /// Returns the context for an action on a complete step.
    #[must_use]
    pub fn step(step: u64, action: &str) -> Self {
        Self { step, microbatch: None, action: action.into() }
    }

    /// Returns the context for an action on a microbatch, which must be below `u32::MAX`.
    #[must_use]
    pub fn microbatch(step: u64, microbatch: u32, action: &str) -> Self {
        Self { step, microbatch: Some(microbatch), action: action.into() }
    }

    /// Replaces the action.
    #[must_use]
    pub fn action(self, action: &str) -> Self {
        Self { action: action.into(), ..self }
    }

    /// Microbatch as sent; `u32::MAX` for none.
    pub(crate) fn wire_microbatch(self) -> u32 {
        self.microbatch.unwrap_or(u32::MAX)
    }

    /// Inverse of [`wire_microbatch`](Self::wire_microbatch).
    pub(crate) fn from_wire(step: u64, microbatch: u32, action: ActionName) -> Self {
        Self { step, microbatch: (microbatch != u32::MAX).then_some(microbatch), action }
    }
}

impl fmt::Display for StepContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, ", self.step)?;
        if let Some(microbatch) = self.microbatch {
            write!(f, "microbatch {microbatch}, ")?;
        }
        write!(f, "`{}`", self.action.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_at_a_character() {
        let name = ActionName::from("twenty-three bytes long\u{e9}t\u{e9}");
        assert_eq!(name.as_str(), "twenty-three bytes long");
        assert_eq!(ActionName::from_padded(*name.padded()), name);
        assert_eq!(StepContext::microbatch(3, 2, "recv").to_string(), "step 3, microbatch 2, `recv`");
    }
}
