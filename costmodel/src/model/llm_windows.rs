//! Counts the query-key pairs in causal attention, in full and within windows.

use super::{Window, WindowedAttention};

impl WindowedAttention {
    /// Returns twice the query-key pairs in a sequence with `tokens` tokens, where a token counts half the
    /// pair with itself.
    ///
    /// Without windows this is `tokens²`, which is twice the pairs below the diagonal plus half the diagonal.
    /// With a window of `w` it is `tokens² - (tokens - w)²` if windows slide, and the sum of squared chunk
    /// lengths otherwise.
    #[must_use]
    pub fn causal_squares(&self, tokens: u64) -> u64 {
        let window = u64::from(self.tokens.max(1));
        let square = |length: u64| length.saturating_mul(length);
        match self.kind {
            Window::Sliding => square(tokens).saturating_sub(square(tokens.saturating_sub(window))),
            Window::Chunk => {
                (tokens / window).saturating_mul(square(window)).saturating_add(square(tokens % window))
            }
        }
    }

    /// Returns the length of equal windows that give a sequence as many pairs: the sequence has
    /// `tokens / length` windows. 0 without tokens.
    #[must_use]
    pub fn mean_length(&self, tokens: u64) -> f64 {
        if tokens == 0 { 0.0 } else { self.causal_squares(tokens) as f64 / tokens as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::LayerSet;

    /// Counts the pairs between a query and a key that is not after it, individually.
    fn pairs(windows: &WindowedAttention, tokens: u64) -> u64 {
        let window = u64::from(windows.tokens);
        let sees = |query: u64, key: u64| match windows.kind {
            Window::Sliding => key <= query && query - key < window,
            Window::Chunk => key <= query && query / window == key / window,
        };
        (0..tokens).map(|query| (0..tokens).filter(|key| sees(query, *key)).count() as u64).sum()
    }

    /// Twice the pairs, less one for each pair between a token and itself; a sliding window leaves out only
    /// the last half pair among the pairs that it cuts off.
    #[test]
    fn squares_are_twice_the_pairs_but_for_the_diagonal() {
        for kind in [Window::Sliding, Window::Chunk] {
            for window in [1_u32, 2, 5, 8] {
                let windows = WindowedAttention { layers: LayerSet::range(0, 1), tokens: window, kind };
                for tokens in 0..40_u64 {
                    let halves = match kind {
                        Window::Sliding => tokens.min(u64::from(window)),
                        Window::Chunk => tokens,
                    };
                    let expected = 2 * pairs(&windows, tokens) - halves;
                    assert_eq!(windows.causal_squares(tokens), expected, "{kind:?} {window} {tokens}");
                }
            }
        }
    }

    #[test]
    fn a_window_longer_than_the_sequence_is_full_attention() {
        for kind in [Window::Sliding, Window::Chunk] {
            let windows = WindowedAttention { layers: LayerSet::range(0, 1), tokens: 4096, kind };
            assert_eq!(windows.causal_squares(1000), 1_000_000);
            assert!((windows.mean_length(1000) - 1000.0).abs() < 1e-9);
            assert!(windows.mean_length(0).abs() < 1e-9);
        }
    }
}
