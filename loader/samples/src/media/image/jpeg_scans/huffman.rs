//! Huffman block coding.

use super::bits::Segment;
use super::frame::{HuffmanCode, Scan, Tables};
use super::{Block, Coder, FORMAT};
use crate::media::error::DecodeError;

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
