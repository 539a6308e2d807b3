//! Decodes any 8-bit JPEG, scan by scan, by libjpeg's rules.
//!
//! Supports Huffman and arithmetic coding, sequential and progressive, any scan order, any integer sampling
//! ratio. All coefficients are held in memory, so this decoder is slower than [`super::jpeg`], which hands
//! over unsupported files and damaged files. Damage is treated as libjpeg does: an invalid code counts as
//! zero, blocks without data are gray up to the next restart marker.
//!
//! # Source
//! ITU-T T.81 (1992): markers annex B, sequential coding annex F, progressive coding annex G.

mod arithmetic;
mod frame;
mod huffman;
mod pixels;

use super::RgbImage;
use crate::media::DecodeError;
use crate::media::probe::JpegHeader;
use crate::media::probe::field::u16_be;
use crate::media::shape::{ImageLimits, Strictness, check_limit};

use self::arithmetic::ArithmeticCoder;
use self::frame::{Component, Frame, Scan, Tables};
use self::huffman::HuffmanCoder;
pub(super) use self::pixels::rgb_of_ycc;
use huffman::Segment;

const FORMAT: &str = "jpeg";
/// Maximum number of scans in a file; encoders write a dozen.
const SCANS_MAX: usize = 1_000;
/// Number of bytes that libjpeg reads ahead; a single-scan file with that many bytes needs no end marker.
const LOOK_AHEAD_BYTES: usize = 4;

/// Block coefficients in zigzag order.
type Block = [i16; 64];

/// Damage in the coded data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Damage {
    /// Bytes that belong to no scan and no segment.
    has_surplus: bool,
    /// Invalid codes, restart markers out of order, or missing data.
    is_corrupt: bool,
    /// The file ends inside a scan, or has no end marker.
    is_cut: bool,
}

/// Decodes the stored image, without its orientation, into `image`.
///
/// # Errors
/// See [`DecodeError`]. In strict mode, any damage; in standard mode, a file that ends too early; in lenient
/// mode, neither.
pub(super) fn decode_into(
    bytes: &[u8],
    header: &JpegHeader,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    check_allocation(header, limits)?;
    let mut frame = Frame::new(header);
    let damage = Walk::new(bytes).decode(&mut frame)?;
    let is_strict = limits.strictness == Strictness::Strict;
    if damage.is_cut && limits.strictness != Strictness::Lenient {
        return Err(DecodeError::truncated(FORMAT, bytes.len()));
    }
    if is_strict && damage.is_corrupt {
        return Err(DecodeError::malformed(FORMAT, bytes.len(), "codes are invalid or data are missing"));
    }
    if is_strict && damage.has_surplus {
        return Err(DecodeError::malformed(FORMAT, bytes.len(), "unused data before a marker"));
    }
    pixels::write(&frame, header, &mut image.pixels)?;
    (image.width, image.height) = (header.width, header.height);
    image.is_truncated = damage.is_cut || damage.is_corrupt;
    Ok(())
}

/// Checks the total allocation: coefficients, component planes and the image.
fn check_allocation(header: &JpegHeader, limits: &ImageLimits) -> Result<(), DecodeError> {
    const BYTES_OF_SAMPLE: u64 = 3;
    const BYTES_OF_PIXEL: u64 = 3;
    let samples: u64 = Frame::blocks(header).map(|blocks| blocks as u64 * 64).sum();
    let pixels = u64::from(header.width) * u64::from(header.height);
    let allocated = samples * BYTES_OF_SAMPLE + pixels * BYTES_OF_PIXEL;
    check_limit(FORMAT, allocated, "bytes to allocate", "alloc_bytes_max", limits.alloc_bytes_max)
}

/// Walk over file segments and scans.
struct Walk<'a> {
    bytes: &'a [u8],
    position: usize,
    tables: Tables,
    damage: Damage,
}

impl<'a> Walk<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 2, tables: Tables::default(), damage: Damage::default() }
    }

    /// Decodes all scans.
    fn decode(mut self, frame: &mut Frame) -> Result<Damage, DecodeError> {
        let mut scans = 0;
        while let Some(marker) = self.next_marker() {
            match marker {
                0xD9 => return Ok(self.finished(frame)),
                // Markers without a segment: TEM, restarts and start of image.
                0x01 | 0xD0..=0xD8 => continue,
                _ => {}
            }
            let Some((body, start)) = self.segment()? else { break };
            match marker {
                0xC4 => self.tables.read_huffman(body, start)?,
                0xCC => self.tables.read_conditioning(body, start)?,
                0xDB => self.tables.read_quantization(body, start)?,
                0xDD => self.tables.read_restart_interval(body, start)?,
                0xDA if scans == SCANS_MAX => {
                    return Err(DecodeError::unsupported(FORMAT, format!("more than {SCANS_MAX} scans")));
                }
                0xDA => {
                    scans += 1;
                    let scan = Scan::read(body, start, frame, &self.tables)?;
                    self.decode_scan(frame, &scan)?;
                    let has_all = scan.members.len() == frame.components.len();
                    if has_all && !frame.is_progressive && self.has_look_ahead() {
                        return Ok(self.finished(frame));
                    }
                }
                _ => {}
            }
        }
        self.damage.is_cut = true;
        Ok(self.damage)
    }

    /// Returns the damage in a file whose end marker was read, or whose data were all read. Components
    /// without a scan are left gray.
    fn finished(mut self, frame: &Frame) -> Damage {
        self.damage.is_corrupt |= frame.components.iter().any(|component| component.quantization.is_none());
        self.damage
    }

    /// Looks for bytes after a fully decoded scan; bytes before a marker are surplus.
    fn has_look_ahead(&mut self) -> bool {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        let is_at_marker = matches!(rest, [0xFF, marker, ..] if *marker != 0);
        self.damage.has_surplus |= !is_at_marker;
        is_at_marker || rest.len() >= LOOK_AHEAD_BYTES
    }

    /// Returns the next marker, and moves past it.
    fn next_marker(&mut self) -> Option<u8> {
        let rest = self.bytes.get(self.position..)?;
        let found = rest.windows(2).position(|pair| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF))?;
        // Any number of fill bytes may precede a marker.
        self.damage.has_surplus |= rest[..found].iter().any(|&byte| byte != 0xFF);
        self.position += found + 2;
        Some(rest[found + 1])
    }

    /// Returns the body and offset of the segment at the position, and moves past the segment; `None` if the
    /// segment is truncated.
    fn segment(&mut self) -> Result<Option<(&'a [u8], usize)>, DecodeError> {
        let Some(length) = u16_be(self.bytes, self.position).map(usize::from) else { return Ok(None) };
        let start = self.position + 2;
        if length < 2 {
            return Err(DecodeError::malformed(FORMAT, self.position, "the segment length is below 2"));
        }
        self.position += length;
        Ok(self.bytes.get(start..self.position).map(|body| (body, start)))
    }

    fn decode_scan(&mut self, frame: &mut Frame, scan: &Scan) -> Result<(), DecodeError> {
        let mut segment = Segment::new(self.bytes, self.position);
        if frame.is_arithmetic {
            let mut coder = ArithmeticCoder::new(scan, &self.tables);
            run(frame, scan, self.tables.restart_interval, &mut segment, &mut coder);
            segment.skip_to_marker();
        } else {
            let mut coder = HuffmanCoder::new(scan, &self.tables)?;
            run(frame, scan, self.tables.restart_interval, &mut segment, &mut coder);
        }
        self.position = segment.position();
        self.damage.is_corrupt |= segment.damage.is_corrupt;
        self.damage.has_surplus |= segment.damage.has_surplus;
        self.damage.is_cut |= segment.damage.is_cut;
        Ok(())
    }
}

/// Entropy coder for a scan.
trait Coder {
    /// Restarts after a restart marker.
    fn restart(&mut self);

    /// Decodes a block of scan component `member`; `block` holds the coefficients from earlier scans.
    fn decode(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block);
}

/// Decodes the blocks in a scan.
fn run(frame: &mut Frame, scan: &Scan, interval: u32, segment: &mut Segment<'_>, coder: &mut impl Coder) {
    let mut left = interval;
    let mut restarts = 0;
    let (across, down) = scan.units(frame);
    for unit in 0..across * down {
        if interval > 0 && left == 0 {
            segment.restart(restarts);
            coder.restart();
            restarts = (restarts + 1) % 8;
            left = interval;
        }
        left = left.wrapping_sub(1);
        if segment.is_past_end() {
            return;
        }
        if segment.is_starved {
            continue;
        }
        let (column, row) = (unit % across, unit / across);
        for (member, &component) in scan.members.iter().enumerate() {
            let component: &mut Component = &mut frame.components[component];
            let (wide, high) = if scan.members.len() == 1 { (1, 1) } else { component.unit };
            for y in row * high..(row + 1) * high {
                for x in column * wide..(column + 1) * wide {
                    coder.decode(segment, member, component.block_mut(x, y));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
