//! Selects the video frames for the model.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Video frame selection; a shorter video delivers all frames.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VideoSampling {
    /// A fixed number of frames, evenly spread over the video.
    Uniform {
        /// Number of frames, at least 1.
        frames: u32,
    },
    /// The frame displayed at 0, `1 / per_second`, `2 / per_second` … seconds, no frame twice.
    Fps {
        /// Frames per second, above 0.
        per_second: f64,
        /// Maximum number of frames; a longer selection is reduced to this number, evenly spread.
        frames_max: u32,
    },
    /// Keyframes: frames that are coded independently.
    Keyframes {
        /// Maximum number of frames; a longer selection is reduced to this number, evenly spread.
        frames_max: u32,
    },
}

impl Default for VideoSampling {
    /// Two frames per second, at most 64.
    fn default() -> Self {
        Self::Fps { per_second: 2.0, frames_max: 64 }
    }
}

impl fmt::Display for VideoSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform { frames } => write!(f, "{frames} frames evenly spread"),
            Self::Fps { per_second, frames_max } => {
                write!(f, "{per_second} frames per second, {frames_max} at most")
            }
            Self::Keyframes { frames_max } => write!(f, "key frames, {frames_max} at most"),
        }
    }
}

/// Frame time stamp, from the packet.
#[cfg(any(feature = "video", test))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stamp {
    /// Display time in seconds, from any origin.
    pub(super) seconds: f64,
    pub(super) is_key: bool,
}

impl VideoSampling {
    /// Returns the reason why the settings are invalid, if they are.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        match *self {
            Self::Uniform { frames: 0 }
            | Self::Fps { frames_max: 0, .. }
            | Self::Keyframes { frames_max: 0 } => Some("must take at least 1 frame"),
            Self::Fps { per_second, .. } if !(per_second > 0.0 && per_second.is_finite()) => {
                Some("the frames per second must be above 0")
            }
            _ => None,
        }
    }

    /// Returns the rate of the chosen frames: the requested rate if there is a requested rate and it was
    /// achieved, else the chosen share of the video's rate; 0 if unknown.
    ///
    /// - `stamps`: all frames in display order, from which `chosen` were selected
    /// - `video_rate`: frames per second declared by the container, or 0
    #[cfg(any(feature = "video", test))]
    pub(super) fn rate(&self, stamps: &[Stamp], chosen: usize, video_rate: f64) -> f64 {
        if let Self::Fps { per_second, .. } = *self
            && chosen < stamps.len()
            && frames_on_grid(stamps, per_second).len() == chosen
        {
            return per_second;
        }
        let video_rate = if video_rate > 0.0 { video_rate } else { mean_rate(stamps) };
        chosen as f64 / stamps.len().max(1) as f64 * video_rate
    }

    /// Chooses frames, in ascending order, each at most once, at least one if there is any.
    ///
    /// - `stamps`: all frames in display order
    #[cfg(any(feature = "video", test))]
    pub(super) fn choose(&self, stamps: &[Stamp]) -> Vec<usize> {
        let all = || (0..stamps.len()).collect();
        match *self {
            Self::Uniform { frames } => take_evenly(all(), frames),
            Self::Fps { per_second, frames_max } => {
                take_evenly(frames_on_grid(stamps, per_second), frames_max)
            }
            Self::Keyframes { frames_max } => {
                let keys: Vec<usize> = (0..stamps.len()).filter(|&at| stamps[at].is_key).collect();
                take_evenly(if keys.is_empty() { all() } else { keys }, frames_max)
            }
        }
    }
}

/// Returns the frames per second between the first and the last time stamp; 0 if they are equal.
#[cfg(any(feature = "video", test))]
fn mean_rate(stamps: &[Stamp]) -> f64 {
    let (Some(first), Some(last)) = (stamps.first(), stamps.last()) else { return 0.0 };
    let seconds = last.seconds - first.seconds;
    if seconds > 0.0 { (stamps.len() - 1) as f64 / seconds } else { 0.0 }
}

/// Selects the middle of each of `most` equal parts of a longer list.
#[cfg(any(feature = "video", test))]
fn take_evenly(frames: Vec<usize>, most: u32) -> Vec<usize> {
    let (length, most) = (frames.len(), most as usize);
    if length <= most {
        return frames;
    }
    (0..most).map(|part| frames[(2 * part + 1) * length / (2 * most)]).collect()
}

/// Returns the frames displayed at the points of a regular time grid.
#[cfg(any(feature = "video", test))]
fn frames_on_grid(stamps: &[Stamp], per_second: f64) -> Vec<usize> {
    let Some(first) = stamps.first() else { return Vec::new() };
    let mut chosen = vec![0];
    for (at, stamp) in stamps.iter().enumerate().skip(1) {
        // The offset assigns a point at a frame's time to that frame, despite rounded time stamps.
        let point = |stamp: &Stamp| ((stamp.seconds - first.seconds) * per_second + 1e-6).floor();
        if point(stamp) > point(&stamps[at - 1]) {
            // The point belongs to this frame if it coincides with the frame start, else to the previous
            // frame.
            let is_exact = (stamp.seconds - first.seconds) * per_second - point(stamp) < 1e-3;
            let shown = if is_exact { at } else { at - 1 };
            if chosen.last() != Some(&shown) {
                chosen.push(shown);
            }
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamps(frames: usize, per_second: f64) -> Vec<Stamp> {
        let stamp =
            |at: usize| Stamp { seconds: 5.0 + at as f64 / per_second, is_key: at.is_multiple_of(12) };
        (0..frames).map(stamp).collect()
    }

    #[test]
    fn uniform_takes_the_middles_of_even_parts() {
        assert_eq!(VideoSampling::Uniform { frames: 4 }.choose(&stamps(100, 25.0)), [12, 37, 62, 87]);
        assert_eq!(VideoSampling::Uniform { frames: 8 }.choose(&stamps(3, 25.0)), [0, 1, 2]);
        assert!(VideoSampling::Uniform { frames: 8 }.choose(&[]).is_empty());
    }

    #[test]
    fn frames_per_second_follow_a_grid_in_time() {
        let fps = |per_second, frames_max| VideoSampling::Fps { per_second, frames_max };
        assert_eq!(fps(2.0, 64).choose(&stamps(60, 30.0)), [0, 15, 30, 45]);
        assert_eq!(fps(2.0, 2).choose(&stamps(60, 30.0)), [15, 45]);
        assert_eq!(fps(30.0, 64).choose(&stamps(5, 30.0)), [0, 1, 2, 3, 4]);
        assert_eq!(fps(60.0, 64).choose(&stamps(3, 30.0)), [0, 1, 2]);
        // Points at 0, 0.5 and 1.0 s; frames start at 0, 0.4, 0.8 and 1.2 s.
        assert_eq!(fps(2.0, 64).choose(&stamps(4, 2.5)), [0, 1, 2]);
    }

    #[test]
    fn keyframes_are_thinned_out_to_the_most() {
        assert_eq!(VideoSampling::Keyframes { frames_max: 9 }.choose(&stamps(40, 25.0)), [0, 12, 24, 36]);
        assert_eq!(VideoSampling::Keyframes { frames_max: 2 }.choose(&stamps(40, 25.0)), [12, 36]);
    }

    #[test]
    fn the_rate_is_what_was_asked_for_or_the_share_that_was_taken() {
        let fps = |per_second, frames_max| VideoSampling::Fps { per_second, frames_max };
        let eight = VideoSampling::Uniform { frames: 8 };
        // Sampling, number of video frames, video rate, declared rate, and expected rate after sampling.
        for (sampling, frames, per_second, video_rate, expected) in [
            // 100 frames at 30 per second cover 7 points on a grid with 2 per second: still 2 per second.
            (fps(2.0, 64), 100, 30.0, 30.0, 2.0),
            (fps(2.0, 5), 100, 30.0, 30.0, 1.5),
            (fps(60.0, 64), 30, 30.0, 30.0, 30.0),
            (eight, 40, 10.0, 10.0, 2.0),
            (eight, 40, 8.0, 0.0, 1.6),
            (eight, 1, 8.0, 0.0, 0.0),
        ] {
            let stamps = stamps(frames, per_second);
            let rate = sampling.rate(&stamps, sampling.choose(&stamps).len(), video_rate);
            assert!((rate - expected).abs() < 1e-9, "{sampling} of {frames}: {rate}");
        }
    }

    #[test]
    fn it_says_what_it_takes() {
        assert_eq!(VideoSampling::default().to_string(), "2 frames per second, 64 at most");
        assert_eq!(VideoSampling::Uniform { frames: 8 }.to_string(), "8 frames evenly spread");
        assert_eq!(VideoSampling::Keyframes { frames_max: 9 }.to_string(), "key frames, 9 at most");
    }

    #[test]
    fn numbers_that_make_no_sense_have_a_fault() {
        assert!(VideoSampling::Uniform { frames: 0 }.fault().is_some());
        assert!(VideoSampling::Fps { per_second: f64::NAN, frames_max: 1 }.fault().is_some());
        assert!(VideoSampling::default().fault().is_none());
    }
}
