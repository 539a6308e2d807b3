//! Reads and decodes videos through FFmpeg, without unsafe code here.
//!
//! FFmpeg reads from an in-memory file (`memfd`), so the payload never touches a disk. Only demuxers for the
//! listed containers and only files may be opened: a hostile playlist can neither read other files nor reach
//! a network.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use dflop_costmodel::VideoShape;
use ffmpeg::codec::packet::side_data::Type;
use ffmpeg::codec::threading;
use ffmpeg::filter::Graph;
use ffmpeg::format::context::Input;
use ffmpeg::{Dictionary, Packet, Rational, frame, media};
use ffmpeg_next as ffmpeg;

use super::container::is_cut;
use super::sampling::{Stamp, VideoSampling};
use super::{Video, VideoLimits};
use crate::media::DecodeError;
use crate::media::shape::check_limit;

const FORMAT: &str = "video";
/// Demuxers for the supported containers; the MOV and MP4 demuxer has six names in FFmpeg.
const DEMUXERS: &str = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi";
/// Maximum side length that the index can store, in pixels.
const SIDE_MAX: u32 = u16::MAX as u32;
/// Maximum number of frames in a video: nineteen hours at 60 frames per second.
const FRAMES_MAX: u64 = 1 << 22;
/// Maximum difference between equal times, in seconds.
const SECONDS_TOLERANCE: f64 = 1e-4;

/// Reads the number and size of the sampled frames, without decoding any frame.
pub(crate) fn video_shape(bytes: &[u8], sampling: &VideoSampling) -> Result<VideoShape, DecodeError> {
    catch_panics(|| read_shape(bytes, sampling))
}

/// Decodes the frames that the sampling selects.
pub(crate) fn decode_video(bytes: &[u8], limits: &VideoLimits) -> Result<Video, DecodeError> {
    catch_panics(|| decode_sampled(bytes, limits))
}

/// Converts a panic in the FFmpeg binding to an error, also during indexing.
fn catch_panics<T>(work: impl FnOnce() -> Result<T, DecodeError>) -> Result<T, DecodeError> {
    let panicked = |_| Err(DecodeError::codec(FORMAT, "the decoder panicked"));
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(panicked)
}

/// Rejects a truncated file, as for images: the remaining part is a different video.
fn check_whole(bytes: &[u8]) -> Result<(), DecodeError> {
    if is_cut(bytes) { Err(DecodeError::truncated(FORMAT, bytes.len())) } else { Ok(()) }
}

fn read_shape(bytes: &[u8], sampling: &VideoSampling) -> Result<VideoShape, DecodeError> {
    check_whole(bytes)?;
    let mut opened = OpenVideo::new(bytes, &VideoLimits::default())?;
    let stamps = opened.stamps()?;
    let frames = sampling.choose(&stamps).len() as u32;
    let (width, height) = opened.display_size();
    Ok(VideoShape { frames, width, height })
}

/// Reads size, times and rate of the sampled frames from time stamps only.
pub(crate) fn read_times(bytes: &[u8], sampling: &VideoSampling) -> Result<Video, DecodeError> {
    catch_panics(|| {
        check_whole(bytes)?;
        let mut opened = OpenVideo::new(bytes, &VideoLimits::default())?;
        let stamps = opened.stamps()?;
        Ok(opened.without_pixels(&stamps, &sampling.choose(&stamps), sampling))
    })
}

fn decode_sampled(bytes: &[u8], limits: &VideoLimits) -> Result<Video, DecodeError> {
    check_whole(bytes)?;
    let stamps = OpenVideo::new(bytes, limits)?.stamps()?;
    let mut opened = OpenVideo::new(bytes, limits)?;
    let chosen = limits.sampling.choose(&stamps);
    let mut video = opened.without_pixels(&stamps, &chosen, &limits.sampling);
    let frame_bytes = 3 * u64::from(video.width) * u64::from(video.height);
    let decoded = frame_bytes.saturating_mul(chosen.len() as u64);
    check_limit(FORMAT, decoded, "decoded bytes", "decoded_bytes_max", limits.decoded_bytes_max)?;
    video.pixels.reserve_exact(decoded as usize);
    let wanted: Vec<f64> = chosen.iter().map(|&at| stamps[at].seconds).collect();
    let mut selector = FrameSelector { wanted, video, candidate: None };
    opened.decode(&mut selector)?;
    selector.finish()
}

/// Opens the stream's decoder; with `pixels_max` the decoder rejects frames larger than twice that size.
fn open_decoder(
    stream: &ffmpeg::Stream<'_>,
    pixels_max: Option<u64>,
) -> Result<ffmpeg::decoder::Video, DecodeError> {
    let mut context = ffmpeg::codec::Context::from_parameters(stream.parameters()).map_err(refusal)?;
    // The decode pool already uses all cores.
    context.set_threading(threading::Config::count(1));
    let missing = || DecodeError::unsupported(FORMAT, format!("codec {:?}", context.id()));
    let codec = ffmpeg::decoder::find(context.id()).ok_or_else(missing)?;
    let mut options = Dictionary::new();
    if let Some(pixels_max) = pixels_max {
        // FFmpeg also counts buffer edges and padding.
        let padded = pixels_max.saturating_mul(2).saturating_add(1 << 16);
        options.set("max_pixels", &padded.to_string());
    }
    // By default FFmpeg conceals damage by smearing neighboring pixels over it.
    options.set("err_detect", "explode");
    context.decoder().open_as_with(codec, options).and_then(ffmpeg::decoder::Opened::video).map_err(refusal)
}

/// Video stream, positioned at the start.
struct OpenVideo {
    input: Input,
    stream: usize,
    time_base: Rational,
    /// Frames per second declared by the container, or 0.
    rate: f64,
    decoder: ffmpeg::decoder::Video,
    quarter_turns: u8,
    /// Holds the file in memory until FFmpeg has closed it.
    _file: File,
}

impl OpenVideo {
    /// Describes the chosen frames.
    fn without_pixels(&self, stamps: &[Stamp], chosen: &[usize], sampling: &VideoSampling) -> Video {
        let (width, height) = self.display_size();
        let origin = stamps.first().map_or(0.0, |stamp| stamp.seconds);
        let times_seconds = chosen.iter().map(|&at| stamps[at].seconds - origin).collect();
        let frames_per_second = sampling.rate(stamps, chosen.len(), self.rate);
        Video { width, height, times_seconds, frames_per_second, pixels: Vec::new() }
    }

    fn new(bytes: &[u8], limits: &VideoLimits) -> Result<Self, DecodeError> {
        initialize();
        let file = memory_file(bytes).map_err(|error| DecodeError::codec(FORMAT, error))?;
        let mut options = Dictionary::new();
        options.set("protocol_whitelist", "file");
        options.set("format_whitelist", DEMUXERS);
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let input = ffmpeg::format::input_with_dictionary(&path, options).map_err(refusal)?;
        let missing = || DecodeError::unsupported(FORMAT, "no video stream");
        let stream = input.streams().best(media::Type::Video).ok_or_else(missing)?;
        let quarter_turns = quarter_turns(&stream);
        let (number, time_base) = (stream.index(), stream.time_base());
        let rate = frames_per_second(stream.avg_frame_rate());
        let declared = open_decoder(&stream, None)?;
        let (width, height) = (declared.width(), declared.height());
        if width == 0 || height == 0 || width > SIDE_MAX || height > SIDE_MAX {
            return Err(DecodeError::malformed(FORMAT, 0, format!("frames of {width} x {height} pixels")));
        }
        let pixels = u64::from(width) * u64::from(height);
        check_limit(FORMAT, pixels, "pixels", "pixels_max", limits.pixels_max)?;
        let decoder = open_decoder(&stream, Some(limits.pixels_max))?;
        Ok(Self { input, stream: number, time_base, rate, decoder, quarter_turns, _file: file })
    }

    fn display_size(&self) -> (u32, u32) {
        let (width, height) = (self.decoder.width(), self.decoder.height());
        if self.quarter_turns % 2 == 1 { (height, width) } else { (width, height) }
    }

    /// Returns the next packet in the stream.
    fn packet(&mut self) -> Result<Option<Packet>, DecodeError> {
        loop {
            let mut packet = Packet::empty();
            match packet.read(&mut self.input) {
                Ok(()) if packet.stream() == self.stream && packet.is_corrupt() => {
                    return Err(DecodeError::codec(FORMAT, "a frame is damaged or truncated"));
                }
                Ok(()) if packet.stream() == self.stream => return Ok(Some(packet)),
                Ok(()) => {}
                Err(ffmpeg::Error::Eof) => return Ok(None),
                Err(error) => return Err(refusal(error)),
            }
        }
    }

    fn seconds(&self, stamp: i64) -> f64 {
        stamp as f64 * f64::from(self.time_base)
    }

    /// Returns the time stamps of all displayed frames, in order, from packets only.
    fn stamps(&mut self) -> Result<Vec<Stamp>, DecodeError> {
        let mut stamps = Vec::new();
        while let Some(packet) = self.packet()? {
            let Some(stamp) = packet.pts().or(packet.dts()) else { continue };
            // An edit list assigns times below 0 to the frames that it cuts off at the start.
            if stamp >= 0 {
                check_limit(FORMAT, stamps.len() as u64 + 1, "frames", "frames_max", FRAMES_MAX)?;
                stamps.push(Stamp { seconds: self.seconds(stamp), is_key: packet.is_key() });
            }
        }
        if stamps.is_empty() {
            return Err(DecodeError::unsupported(FORMAT, "no frame has a time stamp"));
        }
        stamps.sort_by(|left, right| left.seconds.total_cmp(&right.seconds));
        Ok(stamps)
    }

    /// Returns the next frame that the decoder has ready.
    fn frame(&mut self) -> Result<Option<frame::Video>, DecodeError> {
        let mut frame = frame::Video::empty();
        match self.decoder.receive_frame(&mut frame) {
            Ok(()) if frame.is_corrupt() => Err(DecodeError::codec(FORMAT, "a frame is damaged")),
            Ok(()) => Ok(Some(frame)),
            Err(ffmpeg::Error::Eof | ffmpeg::Error::Other { errno: ffmpeg::error::EAGAIN }) => Ok(None),
            Err(error) => Err(refusal(error)),
        }
    }

    /// Passes decoded frames to the selector until it has all wanted frames.
    fn decode(&mut self, selector: &mut FrameSelector) -> Result<(), DecodeError> {
        let mut converter = None;
        let mut is_sent = false;
        while !is_sent && !selector.is_full() {
            if let Some(packet) = self.packet()? {
                self.decoder.send_packet(&packet).map_err(refusal)?;
            } else {
                self.decoder.send_eof().map_err(refusal)?;
                is_sent = true;
            }
            while !selector.is_full()
                && let Some(frame) = self.frame()?
            {
                let seconds = self.seconds(frame.timestamp().or(frame.pts()).unwrap_or(0));
                let turns = self.quarter_turns;
                let converter = match &mut converter {
                    Some(converter) => converter,
                    None => converter.insert(Converter::new(&frame, turns)?),
                };
                selector.show(seconds, frame, converter)?;
            }
        }
        selector.end(converter.as_mut())
    }
}

/// Selects the wanted frames: for each wanted time, the last frame that starts no later.
struct FrameSelector {
    wanted: Vec<f64>,
    video: Video,
    /// Last received frame, not yet known to be needed.
    candidate: Option<frame::Video>,
}

impl FrameSelector {
    fn taken_count(&self) -> usize {
        let frame_bytes = 3 * self.video.width as usize * self.video.height as usize;
        self.video.pixels.len() / frame_bytes
    }

    fn is_full(&self) -> bool {
        self.taken_count() == self.wanted.len()
    }

    fn show(
        &mut self,
        seconds: f64,
        frame: frame::Video,
        converter: &mut Converter,
    ) -> Result<(), DecodeError> {
        // A wanted time before this frame belongs to the previous frame.
        while let Some(&wanted) = self.wanted.get(self.taken_count())
            && wanted < seconds - SECONDS_TOLERANCE
            && let Some(before) = self.candidate.take()
        {
            converter.append(&before, &mut self.video)?;
            self.candidate = Some(before);
        }
        if let Some(&wanted) = self.wanted.get(self.taken_count())
            && wanted < seconds + SECONDS_TOLERANCE
        {
            converter.append(&frame, &mut self.video)?;
        }
        self.candidate = Some(frame);
        Ok(())
    }

    /// Assigns the remaining wanted times to the last frame.
    fn end(&mut self, converter: Option<&mut Converter>) -> Result<(), DecodeError> {
        let (Some(last), Some(converter)) = (self.candidate.take(), converter) else { return Ok(()) };
        while !self.is_full() {
            converter.append(&last, &mut self.video)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<Video, DecodeError> {
        if self.is_full() {
            Ok(self.video)
        } else {
            Err(DecodeError::codec(FORMAT, "no frame could be decoded"))
        }
    }
}

/// Rotates frames and converts them to RGB by the declared color space.
struct Converter {
    graph: Graph,
    like: (u32, u32, ffmpeg::format::Pixel),
}

impl Converter {
    fn new(frame: &frame::Video, quarter_turns: u8) -> Result<Self, DecodeError> {
        let mut graph = Graph::new();
        let unknown = || DecodeError::unsupported(FORMAT, "pixel format");
        let (width, height, format) = (frame.width(), frame.height(), frame.format());
        let name = format.descriptor().ok_or_else(unknown)?.name();
        let source = format!("video_size={width}x{height}:pix_fmt={name}:time_base=1/1000:pixel_aspect=1/1");
        let filter =
            |name| ffmpeg::filter::find(name).ok_or_else(|| DecodeError::codec(FORMAT, "no such filter"));
        graph.add(&filter("buffer")?, "in", &source).map_err(refusal)?;
        graph.add(&filter("buffersink")?, "out", "").map_err(refusal)?;
        let turn = ["", "transpose=clock,", "hflip,vflip,", "transpose=cclock,"][usize::from(quarter_turns)];
        let spec = format!("{turn}format=rgb24");
        let parser = graph.output("in", 0).and_then(|parser| parser.input("out", 0)).map_err(refusal)?;
        parser.parse(&spec).map_err(refusal)?;
        graph.validate().map_err(refusal)?;
        Ok(Self { graph, like: (width, height, format) })
    }

    /// Appends a frame as `[height, width, 3]`.
    fn append(&mut self, frame: &frame::Video, video: &mut Video) -> Result<(), DecodeError> {
        if (frame.width(), frame.height(), frame.format()) != self.like {
            return Err(DecodeError::unsupported(FORMAT, "frames change their size or format"));
        }
        let missing = || DecodeError::codec(FORMAT, "the filter graph has no such input or output");
        self.graph.get("in").ok_or_else(missing)?.source().add(frame).map_err(refusal)?;
        let mut rgb = frame::Video::empty();
        self.graph.get("out").ok_or_else(missing)?.sink().frame(&mut rgb).map_err(refusal)?;
        if (rgb.width(), rgb.height()) != (video.width, video.height) {
            return Err(DecodeError::malformed(FORMAT, 0, "the frame size differs from the container's"));
        }
        let row_bytes = 3 * rgb.width() as usize;
        let rows = rgb.data(0).chunks(rgb.stride(0)).take(rgb.height() as usize);
        rows.for_each(|row| video.pixels.extend_from_slice(&row[..row_bytes]));
        Ok(())
    }
}

fn frames_per_second(rate: Rational) -> f64 {
    if rate.numerator() > 0 && rate.denominator() > 0 { f64::from(rate) } else { 0.0 }
}

/// Returns the clockwise quarter turns from the stored to the displayed frame, by the container's display
/// matrix.
fn quarter_turns(stream: &ffmpeg::Stream<'_>) -> u8 {
    let Some(matrix) = stream.side_data().find(|data| data.kind() == Type::DisplayMatrix) else { return 0 };
    let (numbers, _) = matrix.data().as_chunks::<4>();
    let [first, second] = [0, 1].map(|at| numbers.get(at).map_or(0, |number| i32::from_ne_bytes(*number)));
    match (first.unsigned_abs() >= second.unsigned_abs(), first >= 0, second >= 0) {
        (true, true, _) => 0,
        (true, false, _) => 2,
        (false, _, true) => 1,
        (false, _, false) => 3,
    }
}

/// Creates an unnamed in-memory file with these bytes.
fn memory_file(bytes: &[u8]) -> std::io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let mut file = File::from(memfd_create("dflop-video", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

fn initialize() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Errors are returned; FFmpeg must not write to standard error in addition.
        ffmpeg::log::set_level(ffmpeg::log::Level::Quiet);
    });
}

fn refusal(error: ffmpeg::Error) -> DecodeError {
    DecodeError::codec(FORMAT, error)
}
