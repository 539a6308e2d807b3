//! Handles samples that exceed the token limit.
//!
//! Planning uses estimated text tokens; preparation knows the exact number. The user chooses how samples over
//! the limit are handled, and each of them is recorded.

use dflop_samples::inputs::PrepareError;

use super::expand::Expanded;

/// Treatment for a sample with more tokens than the limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LongSample {
    /// The sample is bad: skipped, listed, and counted against the error budget.
    #[default]
    Error,
    /// The text is cut from the end until the sample fits. Media tokens are never cut; a sample whose media
    /// tokens exceed the limit, or that has no target tokens left, is a bad sample.
    TruncateText,
    /// The sample is skipped and listed, and does not count against the error budget.
    Drop,
}

/// Shortens a sample to at most `tokens_max` tokens; returns the number of tokens cut.
pub(super) fn limit(
    expanded: &mut Expanded,
    tokens_max: usize,
    policy: LongSample,
) -> Result<usize, PrepareError> {
    let tokens = expanded.ids.len();
    let too_long = |note, is_dropped| PrepareError::TooLong { tokens, tokens_max, note, is_dropped };
    if tokens <= tokens_max {
        return Ok(0);
    }
    match policy {
        LongSample::Error => Err(too_long("", false)),
        LongSample::Drop => Err(too_long("; dropped, as configured", true)),
        LongSample::TruncateText => {
            let had_targets = expanded.is_target.iter().skip(1).any(|&is_target| is_target);
            let cut = tokens - tokens_max;
            if !cut_text(expanded, cut) {
                return Err(too_long(" by their media alone", false));
            }
            if had_targets && !expanded.is_target.iter().skip(1).any(|&is_target| is_target) {
                return Err(too_long(", and no target tokens are left within it", false));
            }
            Ok(cut)
        }
    }
}

/// Removes the last `cut` ids that do not belong to media; returns `false` if there are fewer.
fn cut_text(expanded: &mut Expanded, cut: usize) -> bool {
    let mut is_media = vec![false; expanded.ids.len()];
    for run in &expanded.runs {
        is_media[run.with_markers()].fill(true);
    }
    let Some(first_cut) = (0..is_media.len()).rev().filter(|&at| !is_media[at]).nth(cut - 1) else {
        return false;
    };
    let is_kept = |at: usize| at < first_cut || is_media[at];
    // Number of kept ids before each index, which is the start of a run after the cut.
    let mut kept = 0;
    let mut begins = Vec::with_capacity(is_media.len());
    for at in 0..is_media.len() {
        begins.push(kept);
        if is_kept(at) {
            expanded.ids[kept] = expanded.ids[at];
            expanded.is_target[kept] = expanded.is_target[at];
            kept += 1;
        }
    }
    begins.push(kept);
    expanded.ids.truncate(kept);
    expanded.is_target.truncate(kept);
    for run in &mut expanded.runs {
        run.start = begins[run.start];
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use dflop_samples::inputs::MediaRun;
    use dflop_samples::media::Modality;

    const MEDIA: u32 = 9;
    const MARKER: u32 = 8;

    /// Creates a sample from one-id texts and media as runs of `MEDIA` between markers; all text but the
    /// first is target.
    fn sample(parts: &[(bool, usize)]) -> Expanded {
        let mut sample = Expanded::default();
        for &(is_media, tokens) in parts {
            if is_media {
                let start = sample.ids.len() + 1;
                sample.ids.push(MARKER);
                sample.ids.extend(std::iter::repeat_n(MEDIA, tokens));
                sample.ids.push(MARKER);
                sample.runs.push(MediaRun { modality: Modality::Image, start, tokens, has_markers: true });
                sample.is_target.resize(sample.ids.len(), false);
            } else {
                sample.ids.extend(std::iter::repeat_n(1, tokens));
                sample.is_target.resize(sample.ids.len(), true);
            }
        }
        sample
    }

    #[test]
    fn text_is_cut_from_the_end_around_media() {
        let mut long = sample(&[(false, 4), (true, 2), (false, 2)]);
        assert_eq!(limit(&mut long, 7, LongSample::TruncateText).unwrap(), 3);
        assert_eq!(long.ids, [1, 1, 1, MARKER, MEDIA, MEDIA, MARKER]);
        assert_eq!(long.runs[0].start, 4);
    }

    #[test]
    fn media_alone_may_be_too_long_and_a_sample_without_anything_to_learn_is_refused() {
        let reason = |tokens_max| {
            let mut long = sample(&[(true, 4), (false, 3)]);
            limit(&mut long, tokens_max, LongSample::TruncateText).unwrap_err().to_string()
        };
        assert_eq!(reason(5), "9 tokens exceed the limit of 5 by their media alone");
        assert_eq!(reason(6), "9 tokens exceed the limit of 6, and no target tokens are left within it");
    }

    #[test]
    fn error_and_drop_name_both_counts() {
        for (policy, is_dropped) in [(LongSample::Error, false), (LongSample::Drop, true)] {
            let error = limit(&mut sample(&[(false, 5)]), 4, policy).unwrap_err();
            assert!(error.to_string().starts_with("5 tokens exceed the limit of 4"), "{error}");
            assert_eq!(error.is_dropped(), is_dropped);
        }
        assert_eq!(limit(&mut sample(&[(false, 5)]), 5, LongSample::Error).unwrap(), 0);
    }

    proptest! {
        #[test]
        fn truncation_keeps_all_media_and_the_first_words(
            parts in prop::collection::vec((any::<bool>(), 0usize..6), 1..6), tokens_max in 1usize..40,
        ) {
            let whole = sample(&parts);
            let mut cut = whole.clone();
            if let Ok(tokens) = limit(&mut cut, tokens_max, LongSample::TruncateText) {
                prop_assert_eq!(cut.ids.len() + tokens, whole.ids.len());
                prop_assert!(cut.ids.len() <= tokens_max);
                prop_assert_eq!(cut.is_target.len(), cut.ids.len());
                let media = |sample: &Expanded| sample.ids.iter().filter(|&&id| id != 1).count();
                prop_assert_eq!(media(&cut), media(&whole));
                for run in &cut.runs {
                    prop_assert_eq!(cut.ids[run.start - 1], MARKER);
                    prop_assert!(cut.ids[run.start..run.start + run.tokens].iter().all(|&id| id == MEDIA));
                    prop_assert_eq!(cut.ids[run.start + run.tokens], MARKER);
                }
                prop_assert!(tokens == 0 || cut.ids.len() == tokens_max);
            } else {
                let words = whole.ids.iter().filter(|&&id| id == 1).count();
                let media = whole.ids.len() - words;
                prop_assert!(tokens_max <= media || parts[0].0 || tokens_max <= media + 1);
            }
        }
    }
}
