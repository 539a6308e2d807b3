//! Encoder shapes and ranks in a plan.

use crate::item_size::ENCODERS_MAX;
use std::ops::{Deref, DerefMut};

/// Encoder shape and ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EncoderPart {
    /// Shape index; joint shape index if placement is joint.
    pub(crate) shape: u32,
    /// Number of ranks that share the media; every GPU if placement is joint.
    pub(crate) dp: u32,
}

/// Parts for all encoders, in model order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EncoderParts {
    parts: [EncoderPart; ENCODERS_MAX],
    count: u8,
}

impl EncoderParts {
    /// Creates the part for a single encoder.
    pub(crate) const fn one(shape: usize, dp: u32) -> Self {
        let mut parts = [EncoderPart { shape: 0, dp: 0 }; ENCODERS_MAX];
        parts[0] = EncoderPart { shape: shape as u32, dp };
        Self { parts, count: 1 }
    }

    /// Creates equal parts for several encoders.
    pub(crate) fn alike(part: EncoderPart, count: usize) -> Self {
        (0..count).map(|_| part).collect()
    }
}

impl FromIterator<EncoderPart> for EncoderParts {
    fn from_iter<I: IntoIterator<Item = EncoderPart>>(iter: I) -> Self {
        let mut all = Self::default();
        for (own, part) in all.parts.iter_mut().zip(iter) {
            *own = part;
            all.count += 1;
        }
        all
    }
}

impl Deref for EncoderParts {
    type Target = [EncoderPart];

    fn deref(&self) -> &[EncoderPart] {
        &self.parts[..usize::from(self.count)]
    }
}

impl DerefMut for EncoderParts {
    fn deref_mut(&mut self) -> &mut [EncoderPart] {
        &mut self.parts[..usize::from(self.count)]
    }
}
