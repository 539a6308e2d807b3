//! Decodes videos to RGB frames, with the feature `video`: MP4, MOV, Matroska, WebM and AVI through FFmpeg.
//!
//! A model gets some video frames, not all: [`VideoSampling`] selects frames from time stamps only, so the
//! index knows the number of frames without decoding, and the decoder delivers exactly that number. Frames
//! are rotated as the container declares, so width and height are the displayed sizes. If there are several
//! streams, FFmpeg's choice is used. Without the feature a video field stays undecoded.
//!
//! Frames equal the frames from `ffmpeg -i FILE -fps_mode passthrough -pix_fmt rgb24` with the same FFmpeg,
//! byte for byte: the decoders are the same, and so is the filter graph that rotates and converts, with
//! default swscale settings. Tests compare frames from real AV1, H.264, H.265, MPEG-2, MPEG-4, VP8 and VP9
//! files, 8 to 12 bits, full and limited range, BT.601, BT.709 and BT.2020, and from generated files in more
//! pixel formats, with B-frames, interlaced, unevenly timed and rotated. A different FFmpeg version may round
//! differently. A truncated file is rejected as a whole, and so is a file whose packets or frames are damaged
//! as far as container and codec can tell.

#[cfg(any(feature = "video", test))]
mod container;
#[cfg(feature = "video")]
mod ffmpeg;
mod sampling;

#[cfg(feature = "video")]
pub(crate) use self::ffmpeg::{decode_video, video_shape};
pub use self::sampling::VideoSampling;

/// Sampled video frames.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Video {
    /// Number of columns in every frame.
    pub width: u32,
    /// Number of rows in every frame.
    pub height: u32,
    /// Display time of each frame, in seconds since the first frame of the whole video; never decreases.
    pub times_seconds: Vec<f64>,
    /// Frame rate after sampling, in frames per second: the requested rate if the sampling achieved it, else
    /// the sampled share of the video's rate; 0 if unknown.
    pub frames_per_second: f64,
    /// `[frames, height, width, 3]`: red, green, blue, each 0 to 255.
    pub pixels: Vec<u8>,
}

impl Video {
    /// Returns the number of frames.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.times_seconds.len()
    }

    /// Returns a frame, `[height, width, 3]`.
    ///
    /// # Panics
    /// If `frame` is out of range.
    #[must_use]
    pub fn frame(&self, frame: usize) -> &[u8] {
        let bytes = 3 * self.width as usize * self.height as usize;
        &self.pixels[frame * bytes..(frame + 1) * bytes]
    }
}

impl Video {
    /// Reads a video without pixels: size, times and rate of the sampled frames, from time stamps only.
    /// `None` in a build without video.
    ///
    /// # Errors
    /// [`DecodeError`](super::DecodeError) if the file is damaged or has an unknown format.
    #[must_use]
    pub fn without_pixels(
        bytes: &[u8],
        sampling: &VideoSampling,
    ) -> Option<Result<Self, super::DecodeError>> {
        #[cfg(feature = "video")]
        return Some(self::ffmpeg::read_times(bytes, sampling));
        #[cfg(not(feature = "video"))]
        {
            let _ = (bytes, sampling);
            None
        }
    }
}

/// Video decoding limits, checked before memory of that size is allocated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VideoLimits {
    /// Selects the frames to decode.
    pub sampling: VideoSampling,
    /// Maximum width x height of a frame in pixels. Default: 89,478,485, as for images.
    pub pixels_max: u64,
    /// Maximum number of bytes for all sampled frames. Default: 2 GiB.
    pub decoded_bytes_max: u64,
}

impl Default for VideoLimits {
    fn default() -> Self {
        Self { sampling: VideoSampling::default(), pixels_max: 89_478_485, decoded_bytes_max: 2 << 30 }
    }
}

#[cfg(all(test, feature = "video"))]
mod tests;
