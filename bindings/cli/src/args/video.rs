//! Arguments for video frame sampling.

use clap::{Args, ValueEnum};
use dflop_loader::media::VideoSampling;

use crate::failure::Failure;

/// Video frame sampling; needs a build with the feature `video`.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Videos, in a build with the feature `video`")]
pub(crate) struct VideoArgs {
    /// Video frame sampling; an index built with a different sampling is rebuilt [default: fps].
    #[arg(id = "video_sampling", long = "video-sampling", value_enum, value_name = "HOW")]
    sampling: Option<SamplingArg>,
    /// Frames per video: exactly this many with `uniform`, otherwise at most this many [default: 64].
    #[arg(id = "video_frames", long = "video-frames", value_name = "N")]
    frames: Option<u32>,
    /// Frames per video second, with `fps` [default: 2].
    #[arg(id = "video_fps", long = "video-fps", value_name = "F")]
    per_second: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SamplingArg {
    /// Frames evenly spread over the video.
    Uniform,
    /// A number of frames per video second.
    Fps,
    /// Keyframes, which are coded without reference to other frames.
    Keyframes,
}

impl VideoArgs {
    /// Returns the sampling; `None` if no argument is given.
    ///
    /// # Errors
    /// [`Failure::Misuse`] in a build without the feature `video`, and for a rate without `fps`.
    pub(crate) fn sampling(&self) -> Result<Option<VideoSampling>, Failure> {
        let given = [
            ("--video-sampling", self.sampling.is_some()),
            ("--video-frames", self.frames.is_some()),
            ("--video-fps", self.per_second.is_some()),
        ];
        let Some((first, _)) = given.iter().find(|(_, is_given)| *is_given) else { return Ok(None) };
        if !cfg!(feature = "video") {
            let reason = "this build has no FFmpeg; build with the feature `video`";
            return Err(Failure::Misuse(format!("invalid `{first}`: {reason}")));
        }
        let how = self.sampling.unwrap_or(SamplingArg::Fps);
        if how != SamplingArg::Fps && self.per_second.is_some() {
            let reason = "needs `--video-sampling fps`";
            return Err(Failure::Misuse(format!("invalid `--video-fps`: {reason}")));
        }
        let (rate, most) = defaults();
        let frames = self.frames.unwrap_or(most);
        Ok(Some(match how {
            SamplingArg::Uniform => VideoSampling::Uniform { frames },
            SamplingArg::Keyframes => VideoSampling::Keyframes { frames_max: frames },
            SamplingArg::Fps => {
                VideoSampling::Fps { per_second: self.per_second.unwrap_or(rate), frames_max: frames }
            }
        }))
    }

    /// Returns the video sampling for an index, the library's default unless arguments are given.
    ///
    /// # Errors
    /// The same as for [`Self::sampling`].
    pub(crate) fn index_sampling(&self) -> Result<VideoSampling, Failure> {
        Ok(self.sampling()?.unwrap_or_default())
    }
}

/// Default frame rate and maximum number of frames in the library.
fn defaults() -> (f64, u32) {
    match VideoSampling::default() {
        VideoSampling::Fps { per_second, frames_max } => (per_second, frames_max),
        VideoSampling::Uniform { frames } | VideoSampling::Keyframes { frames_max: frames } => (2.0, frames),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(how: Option<SamplingArg>, frames: Option<u32>, fps: Option<f64>) -> VideoArgs {
        VideoArgs { sampling: how, frames, per_second: fps }
    }

    fn misuse(args: &VideoArgs) -> String {
        match args.sampling() {
            Err(Failure::Misuse(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nothing_given_is_the_default() {
        assert_eq!(args(None, None, None).sampling().unwrap(), None);
        assert_eq!(args(None, None, None).index_sampling().unwrap(), VideoSampling::default());
    }

    #[cfg(feature = "video")]
    #[test]
    fn what_is_given_replaces_its_part_of_the_default() {
        let sampling = |how, frames, fps| args(how, frames, fps).sampling().unwrap().unwrap();
        let fps = |per_second, frames_max| VideoSampling::Fps { per_second, frames_max };
        assert_eq!(sampling(None, Some(8), None), fps(2.0, 8));
        assert_eq!(sampling(None, None, Some(0.5)), fps(0.5, 64));
        let uniform = sampling(Some(SamplingArg::Uniform), None, None);
        assert_eq!(uniform, VideoSampling::Uniform { frames: 64 });
        let keys = sampling(Some(SamplingArg::Keyframes), Some(4), None);
        assert_eq!(keys, VideoSampling::Keyframes { frames_max: 4 });
        let refused = misuse(&args(Some(SamplingArg::Uniform), None, Some(1.0)));
        assert!(refused.contains("`--video-fps`: needs"), "{refused}");
    }

    #[cfg(not(feature = "video"))]
    #[test]
    fn without_ffmpeg_every_argument_is_refused_by_name() {
        for (args, name) in [
            (args(Some(SamplingArg::Fps), Some(8), None), "`--video-sampling`"),
            (args(None, Some(8), None), "`--video-frames`"),
            (args(None, None, Some(1.0)), "`--video-fps`"),
        ] {
            let refused = misuse(&args);
            assert!(refused.contains(name) && refused.contains("feature `video`"), "{refused}");
        }
    }
}
