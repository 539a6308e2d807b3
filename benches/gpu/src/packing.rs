//! Packs with uneven sequences that a model can learn, drawn from a seed.

use std::path::Path;

use dflop_costmodel::random::SplitMix64;
use dflop_device::Device;
use dflop_models::{LlmConfig, MicrobatchContext, TextBatch};
use serde_json::json;

use crate::Result;

/// Number of choices for the next token: a model that knows the rule has a loss equal to the logarithm of
/// this number.
const CHOICES: usize = 4;

/// A pack with several sequences.
pub(crate) struct Pack {
    pub(crate) lengths: Vec<usize>,
    pub(crate) tokens: Vec<i64>,
}

impl Pack {
    /// Draws the pack for a step: lengths from a 128th to a half of the pack, short lengths more often.
    pub(crate) fn new(seed: u64, step: usize, tokens: usize, vocabulary: usize) -> Self {
        let mut random = SplitMix64::new(seed ^ (step as u64 + 1).wrapping_mul(0x9e37_79b9));
        let mut lengths = Vec::new();
        let mut left = tokens;
        while left > 0 {
            // evenly distributed logarithms: 2^-7 to 2^-1 of the pack
            let share = (-1.0 - 6.0 * random.fraction()).exp2();
            let length = ((tokens as f64 * share) as usize).clamp(2, left.max(2));
            // a rest that is too short for a sequence belongs to the last one
            let length = if left - length.min(left) < 2 { left } else { length };
            lengths.push(length);
            left -= length;
        }
        let mut ids = Vec::with_capacity(tokens);
        for &length in &lengths {
            let mut token = random.below(vocabulary);
            for _ in 0..length {
                ids.push(token as i64);
                token = (5 * token + 1 + random.below(CHOICES)) % vocabulary;
            }
        }
        Self { lengths, tokens: ids }
    }

    /// Number of tokens that are predicted.
    pub(crate) fn targets(&self) -> usize {
        self.tokens.len() - self.lengths.len()
    }

    /// Uploads the pack; the loss is the mean over all targets.
    pub(crate) fn context<D: Device>(&self, llm: &LlmConfig, device: &D) -> Result<MicrobatchContext<D>> {
        let positions: Vec<i64> = self.lengths.iter().flat_map(|&length| 0..length as i64).collect();
        let positions = positions.repeat(llm.rope.axes());
        let ends = self.lengths.iter().scan(0, |end, &length| {
            *end += length as i32;
            Some(*end)
        });
        let cu_seqlens: Vec<i32> = std::iter::once(0).chain(ends).collect();
        let batch = TextBatch {
            input_ids: &self.tokens,
            labels: &self.tokens,
            positions: &positions,
            cu_seqlens: &cu_seqlens,
            media_places: &[],
            loss_scale: 1.0 / self.targets() as f64,
        };
        Ok(llm.context(device, &batch)?)
    }
}

/// Writes packs for the PyTorch side: `packs.json`, with lengths and tokens for every step.
pub(crate) fn write(directory: &Path, packs: &[Pack]) -> Result<()> {
    let packs: Vec<_> =
        packs.iter().map(|pack| json!({"lengths": pack.lengths, "tokens": pack.tokens})).collect();
    Ok(std::fs::write(directory.join("packs.json"), json!(packs).to_string())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_fill_the_pack_and_follow_the_rule() {
        for (step, tokens) in [(0, 8192), (1, 8192), (2, 48), (3, 3), (4, 49)] {
            let pack = Pack::new(1, step, tokens, 64);
            assert_eq!(pack.lengths.iter().sum::<usize>(), tokens);
            assert_eq!(pack.tokens.len(), tokens);
            assert!(pack.lengths.iter().all(|&length| length >= 2), "{:?}", pack.lengths);
            let mut first = 0;
            for &length in &pack.lengths {
                let sequence = &pack.tokens[first..first + length];
                assert!(sequence.windows(2).all(|pair| (pair[1] - 5 * pair[0] - 1).rem_euclid(64) < 4));
                first += length;
            }
        }
        let lengths = Pack::new(1, 0, 8192, 64).lengths;
        assert!(lengths.len() > 4 && lengths.iter().max() > lengths.iter().min(), "{lengths:?}");
        assert_ne!(lengths, Pack::new(1, 1, 8192, 64).lengths);
    }
}
