//! Keys that decoder tokens attend to: all earlier tokens, a window, or a complete image.

use std::ops::Range;

use dflop_costmodel::model::{Window, WindowedAttention};

use super::LlmConfig;
use crate::error::Result;
use dflop_device::{Device, HostSegments, KeyRanges, Segments};

impl LlmConfig {
    /// Returns the segments for layers with full attention and for layers with windows; `None` if these are
    /// the same.
    ///
    /// - `starts`: first token in every sample, then the number of tokens
    /// - `media`: media token rows
    pub(super) fn key_segments<D: Device>(
        &self,
        device: &D,
        starts: &[u32],
        media: &[u32],
    ) -> Result<(Segments<D>, Option<Segments<D>>)> {
        let plain = HostSegments::new(starts);
        let blocks = if self.form.has_media_blocks { runs(starts, media) } else { Vec::new() };
        let ranged = |windows: Option<WindowedAttention>| -> Result<Segments<D>> {
            let ranges = KeyRanges::new(&keys(starts, &blocks, windows));
            Ok(Segments::of(device, plain.clone().ranged(ranges))?)
        };
        let full = if blocks.is_empty() { Segments::of(device, plain.clone())? } else { ranged(None)? };
        // a window that covers every complete sample hides nothing
        let windows = self.spec.windows.filter(|windows| windows.tokens < plain.longest());
        Ok((full, windows.map(|windows| ranged(Some(windows))).transpose()?))
    }
}

/// Finds the runs of consecutive media tokens, which never cross sample boundaries.
fn runs(starts: &[u32], media: &[u32]) -> Vec<Range<u32>> {
    let mut places = media.to_vec();
    places.sort_unstable();
    let mut runs: Vec<Range<u32>> = Vec::new();
    for place in places {
        match runs.last_mut() {
            Some(run) if run.end == place && starts.binary_search(&place).is_err() => run.end += 1,
            _ => runs.push(place..place + 1),
        }
    }
    runs
}

/// Returns the first key and the end of the key range, for every token.
///
/// Windows cut off keys before a token, but not later keys in the image that contains the token.
fn keys(starts: &[u32], blocks: &[Range<u32>], windows: Option<WindowedAttention>) -> Vec<[u32; 2]> {
    let mut keys = Vec::new();
    let mut blocks = blocks.iter().peekable();
    for pair in starts.windows(2) {
        for token in pair[0]..pair[1] {
            while blocks.next_if(|block| block.end <= token).is_some() {}
            let block = blocks.peek().filter(|block| block.contains(&token));
            let first = match windows {
                None => pair[0],
                Some(WindowedAttention { tokens, kind: Window::Sliding, .. }) => {
                    (token + 1).saturating_sub(tokens).max(pair[0])
                }
                Some(WindowedAttention { tokens, kind: Window::Chunk, .. }) => {
                    token - (token - pair[0]) % tokens
                }
            };
            keys.push([first, block.map_or(token + 1, |block| block.end)]);
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::model::LayerSet;

    fn windows(tokens: u32, kind: Window) -> WindowedAttention {
        WindowedAttention { layers: LayerSet::range(0, 1), tokens, kind }
    }

    #[test]
    fn images_are_seen_as_a_whole_and_windows_end_at_samples() {
        let starts = [0, 5, 5, 9];
        let blocks = runs(&starts, &[2, 3, 1, 4, 5, 7]);
        assert_eq!(blocks, [1..5, 5..6, 7..8]);
        let full = [[0, 1], [0, 5], [0, 5], [0, 5], [0, 5], [5, 6], [5, 7], [5, 8], [5, 9]];
        assert_eq!(keys(&starts, &blocks, None), full);
        let sliding = [[0, 1], [0, 5], [1, 5], [2, 5], [3, 5], [5, 6], [5, 7], [6, 8], [7, 9]];
        assert_eq!(keys(&starts, &blocks, Some(windows(2, Window::Sliding))), sliding);
        let chunks = [[0, 1], [0, 2], [2, 3], [2, 4], [4, 5], [5, 6], [5, 7], [7, 8], [7, 9]];
        assert_eq!(keys(&starts, &[], Some(windows(2, Window::Chunk))), chunks);
    }
}
