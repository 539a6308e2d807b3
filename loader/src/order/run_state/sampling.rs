//! Records the video sampling for which a state was saved.

use std::fmt;

use dflop_samples::media::VideoSampling;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::index::Index;

/// Video sampling in an index, in the form in which a state stores it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct SavedSampling(Option<Value>);

impl SavedSampling {
    pub(super) fn of(index: &Index) -> Self {
        Self(index.video_sampling().and_then(|sampling| serde_json::to_value(sampling).ok()))
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// Describes how the sampling has changed; `None` if it has not.
    pub(super) fn change(&self, now: &Self) -> Option<String> {
        (self != now).then(|| format!("were sampled as {self}, and are now as {now}"))
    }
}

impl fmt::Display for SavedSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(value) = &self.0 else { return f.write_str("nothing, undecoded") };
        match serde_json::from_value::<VideoSampling>(value.clone()) {
            Ok(sampling) => write!(f, "{sampling}"),
            Err(_) => write!(f, "{value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(sampling: Option<VideoSampling>) -> SavedSampling {
        SavedSampling(sampling.map(|sampling| serde_json::to_value(sampling).unwrap()))
    }

    #[test]
    fn a_change_names_both() {
        let (rate, spread) = (VideoSampling::default(), VideoSampling::Uniform { frames: 8 });
        let change = saved(Some(rate)).change(&saved(Some(spread))).unwrap();
        let expected =
            "were sampled as 2 frames per second, 64 at most, and are now as 8 frames evenly spread";
        assert_eq!(change, expected);
        let change = saved(None).change(&saved(Some(rate))).unwrap();
        assert_eq!(
            change,
            "were sampled as nothing, undecoded, and are now as 2 frames per second, 64 at most"
        );
        assert_eq!(saved(Some(rate)).change(&saved(Some(rate))), None);
    }

    #[test]
    fn it_comes_back_from_json() {
        let sampling = saved(Some(VideoSampling::Fps { per_second: 0.1, frames_max: 7 }));
        let text = serde_json::to_string(&sampling).unwrap();
        assert_eq!(serde_json::from_str::<SavedSampling>(&text).unwrap(), sampling);
    }
}
