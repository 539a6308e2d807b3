//! Videos to RGB frames, with the feature `video`: MP4, MOV, Matroska, WebM and AVI through FFmpeg.
//!
//! A model sees some frames of a video, not all: [`VideoSampling`] says which, from time stamps alone, so the index
//! knows their number without decoding and the decoder delivers just that many. Frames are turned as the container
//! says, so width and height are those that are shown. Of several streams FFmpeg's choice is taken. Without the feature
//! a video field stays undecoded.
//!
//! Frames are those of `ffmpeg -i FILE -fps_mode passthrough -pix_fmt rgb24` of the same FFmpeg, byte for byte: the
//! decoders are the same, and so is the graph that turns and converts, with swscale's own settings. Tests compare frames
//! of real files of AV1, H.264, H.265, MPEG-2, MPEG-4, VP8 and VP9, 8 to 12 bits, full and limited range, BT.601, BT.709
//! and BT.2020, and of made ones in more pixel formats, with B-frames, interlaced, uneven in time and turned. Another
//! version of FFmpeg may round otherwise. A file that was cut, or whose packets or frames are damaged as far as container
//! and codec can tell, is refused as a whole.

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
    /// When each frame is shown, in seconds since the first frame of the whole video; never falls.
    pub times_seconds: Vec<f64>,
    /// How many of these frames stand for a second: the rate that was asked for, or their share of the video's; 0 if
    /// nothing says.
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
    /// If there is no such frame.
    #[must_use]
    pub fn frame(&self, frame: usize) -> &[u8] {
        let bytes = 3 * self.width as usize * self.height as usize;
        &self.pixels[frame * bytes..(frame + 1) * bytes]
    }
}

/// Limits of video decoding, checked before memory of that size is allocated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VideoLimits {
    /// Which frames are decoded.
    pub sampling: VideoSampling,
    /// Largest width x height of a frame. Default: 89,478,485, as of images.
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
