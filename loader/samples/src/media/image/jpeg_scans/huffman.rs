//! Reads Huffman-coded JPEG scans bit by bit.

use super::frame::{HuffmanCode, Scan, Tables};
use super::{Block, Coder, Damage, FORMAT};
use crate::media::DecodeError;

/// Maximum code length in bits.
const CODE_BITS_MAX: usize = 16;

/// Symbol lookup in a code, by code length.
struct Lookup<'a> {
    /// First code for each length, and the end after the last code.
    ranges: [(u32, u32); CODE_BITS_MAX],
    /// Index of the first symbol for each length.
    first: [usize; CODE_BITS_MAX],
    symbols: &'a [u8],
}

impl<'a> Lookup<'a> {
    fn new(code: &'a HuffmanCode) -> Self {
        let mut lookup =
            Self { ranges: Default::default(), first: [0; CODE_BITS_MAX], symbols: &code.symbols };
        let (mut next, mut place) = (0, 0);
        for (length, &count) in code.counts.iter().enumerate() {
            lookup.ranges[length] = (next, next + u32::from(count));
            lookup.first[length] = place;
            next = (next + u32::from(count)) << 1;
            place += usize::from(count);
        }
        lookup
    }

    /// Reads a symbol; an invalid code is damage and counts as 0.
    fn symbol(&self, segment: &mut Segment<'_>) -> u8 {
        let mut code = 0;
        for ((start, end), first) in self.ranges.iter().zip(self.first) {
            code = code << 1 | segment.bit();
            if (*start..*end).contains(&code) {
                return self.symbols[first + (code - start) as usize];
            }
        }
        segment.damage.is_corrupt = true;
        0
    }
}

/// Huffman coder for the blocks in a scan.
pub(super) struct HuffmanCoder<'a> {
    /// DC and AC codes by scan member, if the scan uses them.
    codes: Vec<[Option<Lookup<'a>>; 2]>,
    /// DC coefficient of the last block, by scan member.
    last_dc: Vec<i32>,
    band: (usize, usize),
    shift: u32,
    is_progressive: bool,
    is_refinement: bool,
    /// Remaining blocks without a coefficient in the band.
    empty_blocks: u32,
}

impl<'a> HuffmanCoder<'a> {
    pub(super) fn new(scan: &Scan, tables: &'a Tables) -> Result<Self, DecodeError> {
        let has_dc = scan.band.0 == 0 && !scan.is_refinement;
        let has_ac = scan.band.1 > 0;
        let lookup = |is_used: bool, class: usize, number: usize| {
            let code = tables.huffman[class][number].as_ref();
            match (is_used, code) {
                (false, _) => Ok(None),
                (true, Some(code)) => Ok(Some(Lookup::new(code))),
                (true, None) => {
                    let reason = "a scan uses a Huffman table that is missing";
                    Err(DecodeError::malformed(FORMAT, 0, reason))
                }
            }
        };
        let mut codes = Vec::with_capacity(scan.tables.len());
        for &(dc, ac) in &scan.tables {
            codes.push([lookup(has_dc, 0, dc)?, lookup(has_ac, 1, ac)?]);
        }
        Ok(Self {
            last_dc: vec![0; codes.len()],
            codes,
            band: scan.band,
            shift: scan.shift,
            is_progressive: scan.is_progressive,
            is_refinement: scan.is_refinement,
            empty_blocks: 0,
        })
    }

    /// Decodes the DC coefficient in a first scan.
    fn dc(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) {
        let Some(code) = &self.codes[member][0] else { return };
        let size = code.symbol(segment).min(16);
        let difference = segment.signed(size.into());
        self.last_dc[member] = self.last_dc[member].wrapping_add(difference);
        block[0] = (self.last_dc[member] << self.shift) as i16;
    }

    /// Decodes the AC coefficients in a first scan.
    fn ac(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) {
        let Some(code) = &self.codes[member][1] else { return };
        if self.empty_blocks > 0 {
            self.empty_blocks -= 1;
            return;
        }
        let mut at = self.band.0.max(1);
        while at <= self.band.1 {
            let symbol = code.symbol(segment);
            let (run, size) = (symbol >> 4, symbol & 0xF);
            if size > 0 {
                at += usize::from(run);
                // A run beyond the band is damage; the last coefficient in the band receives the value.
                block[at.min(63)] = (segment.signed(size.into()) << self.shift) as i16;
                at += 1;
            } else if run == 15 {
                at += 16;
            } else {
                if self.is_progressive {
                    self.empty_blocks = blocks_of_run(segment, run) - 1;
                }
                break;
            }
        }
    }

    /// Adds a bit to AC coefficients from earlier scans, and decodes coefficients that become nonzero.
    fn refine_ac(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) {
        let Some(code) = &self.codes[member][1] else { return };
        let bit = 1_i16 << self.shift;
        let mut at = self.band.0;
        while self.empty_blocks == 0 && at <= self.band.1 {
            let symbol = code.symbol(segment);
            let (run, size) = (symbol >> 4, symbol & 0xF);
            let mut value = 0;
            if size > 0 {
                segment.damage.is_corrupt |= size != 1;
                value = if segment.bit() == 1 { bit } else { -bit };
            } else if run < 15 {
                self.empty_blocks = blocks_of_run(segment, run);
                break;
            }
            let mut zeros_left = run;
            while at <= self.band.1 {
                if block[at] != 0 {
                    refine(segment, &mut block[at], bit);
                } else if zeros_left == 0 {
                    break;
                } else {
                    zeros_left -= 1;
                }
                at += 1;
            }
            if value != 0 {
                block[at.min(63)] = value;
            }
            at += 1;
        }
        if self.empty_blocks > 0 {
            for coefficient in block.iter_mut().take(self.band.1 + 1).skip(at).filter(|value| **value != 0) {
                refine(segment, coefficient, bit);
            }
            self.empty_blocks -= 1;
        }
    }
}

/// Returns the number of blocks in an end-of-band run, including the current block.
fn blocks_of_run(segment: &mut Segment<'_>, run: u8) -> u32 {
    (1 << run) + segment.bits(run.into())
}

/// Adds a bit to a nonzero coefficient.
fn refine(segment: &mut Segment<'_>, coefficient: &mut i16, bit: i16) {
    if segment.bit() == 1 && *coefficient & bit == 0 {
        *coefficient = coefficient.wrapping_add(if *coefficient > 0 { bit } else { -bit });
    }
}

impl Coder for HuffmanCoder<'_> {
    fn restart(&mut self) {
        self.last_dc.fill(0);
        self.empty_blocks = 0;
    }

    fn decode(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) {
        match (self.band.0, self.is_refinement) {
            (0, true) => block[0] |= (segment.bit() << self.shift) as i16,
            (0, false) => {
                self.dc(segment, member, block);
                if !self.is_progressive {
                    self.ac(segment, member, block);
                }
            }
            (_, true) => self.refine_ac(segment, member, block),
            (_, false) => self.ac(segment, member, block),
        }
    }
}

/// Coded bytes in a scan: between markers, with stuffed zeros removed.
pub(super) struct Segment<'a> {
    bytes: &'a [u8],
    position: usize,
    /// Bits that were read from bytes and not yet consumed; the lowest `count` are valid.
    buffer: u32,
    count: u32,
    /// Whether bits were missing since the last restart, so that later units are skipped.
    pub(super) is_starved: bool,
    /// Damage found so far.
    pub(super) damage: Damage,
}

impl<'a> Segment<'a> {
    pub(super) fn new(bytes: &'a [u8], position: usize) -> Self {
        Self { bytes, position, buffer: 0, count: 0, is_starved: false, damage: Damage::default() }
    }

    /// Returns the offset of the next byte to decode.
    pub(super) fn position(&self) -> usize {
        self.position.min(self.bytes.len())
    }

    /// Returns whether bytes were requested after the end of a file without a marker.
    pub(super) fn is_past_end(&self) -> bool {
        self.damage.is_cut
    }

    /// Returns the next coded byte; `None` at a marker and at the end of the file.
    pub(super) fn next_byte(&mut self) -> Option<u8> {
        let Some(&byte) = self.bytes.get(self.position) else {
            self.damage.is_cut = true;
            return None;
        };
        if byte != 0xFF {
            self.position += 1;
            return Some(byte);
        }
        let fills = self.bytes[self.position..].iter().take_while(|&&byte| byte == 0xFF).count();
        match self.bytes.get(self.position + fills) {
            Some(0) => {
                self.position += fills + 1;
                Some(0xFF)
            }
            Some(_) => None,
            None => {
                self.damage.is_cut = true;
                None
            }
        }
    }

    /// Moves to the next marker. Arithmetic coding may leave bytes that the decoder does not need.
    pub(super) fn skip_to_marker(&mut self) {
        while self.next_byte().is_some() {}
    }

    /// Reads a bit; a missing bit is 0.
    pub(super) fn bit(&mut self) -> u32 {
        if self.count == 0 {
            let byte = self.next_byte();
            self.is_starved |= byte.is_none();
            self.damage.is_corrupt |= byte.is_none();
            (self.buffer, self.count) = (byte.unwrap_or(0).into(), 8);
        }
        self.count -= 1;
        self.buffer >> self.count & 1
    }

    /// Reads up to 16 bits, highest first.
    pub(super) fn bits(&mut self, count: u32) -> u32 {
        (0..count).fold(0, |number, _| number << 1 | self.bit())
    }

    /// Reads the bits of a signed number with this size.
    pub(super) fn signed(&mut self, size: u32) -> i32 {
        let number = self.bits(size) as i32;
        let is_negative = size > 0 && number >> (size - 1) == 0;
        if is_negative { number - (1 << size) + 1 } else { number }
    }

    /// Moves past the restart marker with this number. A missing or misplaced marker is damage: a recent
    /// marker number is skipped, a marker number that is due soon is kept for the data that follow it.
    pub(super) fn restart(&mut self, number: u8) {
        self.count = 0;
        loop {
            let rest = self.bytes.get(self.position..).unwrap_or_default();
            let is_marker = |pair: &[u8]| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF);
            let Some(found) = rest.windows(2).position(is_marker) else {
                (self.position, self.damage.is_cut) = (self.bytes.len(), true);
                return;
            };
            self.damage.has_surplus |= rest[..found].iter().any(|&byte| byte != 0xFF);
            let marker = rest[found + 1];
            let ahead = marker.wrapping_sub(0xD0 + number) % 8;
            match marker {
                0xD0..=0xD7 if matches!(ahead, 0 | 3..=5) => {
                    self.position += found + 2;
                    self.damage.is_corrupt |= ahead != 0;
                    self.is_starved = false;
                    return;
                }
                0x01..0xC0 | 0xD0..=0xD7 if !matches!(ahead, 1 | 2) || marker < 0xC0 => {
                    self.position += found + 2;
                    self.damage.is_corrupt = true;
                }
                _ => {
                    self.position += found;
                    self.damage.is_corrupt = true;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuffed_zeros_are_removed_and_markers_end_the_data() {
        let mut segment = Segment::new(&[0xFF, 0x00, 0x12, 0xFF, 0xFF, 0xD9], 0);
        assert_eq!(
            (segment.next_byte(), segment.next_byte(), segment.next_byte()),
            (Some(0xFF), Some(0x12), None)
        );
        assert_eq!((segment.position(), segment.is_past_end()), (3, false));
        let mut cut = Segment::new(&[0x80], 0);
        assert_eq!((cut.bits(9), cut.is_past_end(), cut.is_starved), (0x100, true, true));
    }

    #[test]
    fn small_numbers_have_their_sign_in_the_first_bit() {
        let numbers = |byte: u8, size| Segment::new(&[byte, 0, 0], 0).signed(size);
        assert_eq!((numbers(0b0000_0000, 2), numbers(0b0100_0000, 2)), (-3, -2));
        assert_eq!((numbers(0b1000_0000, 2), numbers(0b1100_0000, 2), numbers(0xFF, 0)), (2, 3, 0));
    }

    #[test]
    fn restart_markers_are_found_by_their_numbers() {
        let at = |bytes: &[u8], number| {
            let mut segment = Segment::new(bytes, 0);
            segment.restart(number);
            (segment.position(), segment.damage.is_corrupt)
        };
        assert_eq!(at(&[0xFF, 0xD3, 9], 3), (2, false));
        assert_eq!(at(&[7, 7, 0xFF, 0xD3, 9], 3), (4, false), "bytes in front are skipped");
        assert_eq!(at(&[0xFF, 0xD4, 9], 3), (0, true), "the next one waits");
        assert_eq!(at(&[0xFF, 0xD2, 9, 0xFF, 0xD3], 3), (5, true), "a former one is skipped");
        assert_eq!(at(&[0xFF, 0xD7, 9], 3), (2, true), "one far away is taken");
        assert_eq!(at(&[9, 0xFF, 0xD9], 3), (1, true), "the end stays");
    }
}
