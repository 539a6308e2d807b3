//! Decodes videos to RGB frames, with the feature `video`: MP4, MOV, Matroska, WebM and AVI through FFmpeg.
//!
//! A model gets some frames of a video, not all: [`VideoSampling`] selects them from time stamps alone, so
//! the index knows their number without decoding, and the decoder delivers exactly that number. Frames are
//! rotated as the container declares, so width and height are those displayed. If there are several streams,
//! FFmpeg's choice is used. Without the feature a video field stays undecoded.
//!
//! Frames equal those of `ffmpeg -i FILE -fps_mode passthrough -pix_fmt rgb24` of the same FFmpeg, byte for
//! byte: the decoders are the same, and so is the filter graph that rotates and converts, with the default
//! settings of swscale. Tests compare frames of real files of AV1, H.264, H.265, MPEG-2, MPEG-4, VP8 and VP9,
//! 8 to 12 bits, full and limited range, BT.601, BT.709 and BT.2020, and of generated ones in more pixel
//! formats, with B-frames, interlaced, unevenly timed and rotated. Another version of FFmpeg may round
//! differently. A truncated file, or one whose packets or frames are damaged as far as container and codec
//! can tell, is rejected as a whole.

#[cfg(any(feature = "video", test))]
mod container;
#[cfg(feature = "video")]
mod ffmpeg;
mod sampling;

#[cfg(feature = "video")]
pub(crate) use self::ffmpeg::{decode_video, video_shape};
pub use self::sampling::VideoSampling;

/// Sampled frames of a video.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Video {
    /// Columns of every frame.
    pub width: u32,
    /// Rows of every frame.
    pub height: u32,
    /// Display time of each frame in seconds since the first frame of the whole video; never decreases.
    pub times_seconds: Vec<f64>,
    /// Rate of these frames: the requested rate if the sampling kept to it, else their share of the video's
    /// rate; 0 if unknown.
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

    /// Returns one frame, `[height, width, 3]`.
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
    /// Reads a video without its pixels: size, times and rate of the frames that the sampling selects, from
    /// time stamps alone. `None` in a build without video.
    ///
    /// # Errors
    /// [`DecodeError`](super::DecodeError) if the file is damaged or of an unknown format.
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

/// Limits of video decoding, checked before memory of that size is allocated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VideoLimits {
    /// Selection of the frames to decode.
    pub sampling: VideoSampling,
    /// Largest width x height of a frame. Default: 89,478,485, as for images.
    pub pixels_max: u64,
    /// Most bytes of all sampled frames. Default: 2 GiB.
    pub decoded_bytes_max: u64,
}

impl Default for VideoLimits {
    fn default() -> Self {
        Self { sampling: VideoSampling::default(), pixels_max: 89_478_485, decoded_bytes_max: 2 << 30 }
    }
}

#[cfg(all(test, feature = "video"))]
mod tests;
