//! Arithmetic block coding.
//!
//! Decisions are decoded with adaptive probabilities: a bin holds the estimate state and the more probable
//! value. The bin for a decision depends on earlier decisions.
//!
//! # Source
//! ITU-T T.81 (1992): decoder D.2, states table D.3, sequential models F.1.4.4 and F.2.4, progressive models
//! G.1.3.

use super::frame::{Conditioning, Scan, Tables};
use super::huffman::Segment;
use super::{Block, Coder};

/// Fixed estimate: both values are equally probable.
const EVEN: u16 = 0x5A1D;
/// Number of bins in a DC table and in an AC table.
const DC_BINS: usize = 49;
const AC_BINS: usize = 245;
/// First magnitude bins for DC differences, and for low and high AC coefficients.
const DC_MAGNITUDES: usize = 20;
const AC_MAGNITUDES: [usize; 2] = [189, 217];
/// Number of bins between magnitude size and magnitude bits.
const MAGNITUDE_BITS: usize = 14;
/// Largest encodable magnitude.
const MAGNITUDE_MAX: i32 = 1 << 15;

/// Probability of the less probable value, next state after that value, next state after the more probable
/// value, and whether the values swap.
type State = (u16, u8, u8, bool);

#[rustfmt::skip]
const STATES: [State; 113] = [
    (0x5A1D, 1, 1, true), (0x2586, 14, 2, false), (0x1114, 16, 3, false), (0x080B, 18, 4, false),
    (0x03D8, 20, 5, false), (0x01DA, 23, 6, false), (0x00E5, 25, 7, false), (0x006F, 28, 8, false),
    (0x0036, 30, 9, false), (0x001A, 33, 10, false), (0x000D, 35, 11, false), (0x0006, 9, 12, false),
    (0x0003, 10, 13, false), (0x0001, 12, 13, false), (0x5A7F, 15, 15, true), (0x3F25, 36, 16, false),
    (0x2CF2, 38, 17, false), (0x207C, 39, 18, false), (0x17B9, 40, 19, false), (0x1182, 42, 20, false),
    (0x0CEF, 43, 21, false), (0x09A1, 45, 22, false), (0x072F, 46, 23, false), (0x055C, 48, 24, false),
    (0x0406, 49, 25, false), (0x0303, 51, 26, false), (0x0240, 52, 27, false), (0x01B1, 54, 28, false),
    (0x0144, 56, 29, false), (0x00F5, 57, 30, false), (0x00B7, 59, 31, false), (0x008A, 60, 32, false),
    (0x0068, 62, 33, false), (0x004E, 63, 34, false), (0x003B, 32, 35, false), (0x002C, 33, 9, false),
    (0x5AE1, 37, 37, true), (0x484C, 64, 38, false), (0x3A0D, 65, 39, false), (0x2EF1, 67, 40, false),
    (0x261F, 68, 41, false), (0x1F33, 69, 42, false), (0x19A8, 70, 43, false), (0x1518, 72, 44, false),
    (0x1177, 73, 45, false), (0x0E74, 74, 46, false), (0x0BFB, 75, 47, false), (0x09F8, 77, 48, false),
    (0x0861, 78, 49, false), (0x0706, 79, 50, false), (0x05CD, 48, 51, false), (0x04DE, 50, 52, false),
    (0x040F, 50, 53, false), (0x0363, 51, 54, false), (0x02D4, 52, 55, false), (0x025C, 53, 56, false),
    (0x01F8, 54, 57, false), (0x01A4, 55, 58, false), (0x0160, 56, 59, false), (0x0125, 57, 60, false),
    (0x00F6, 58, 61, false), (0x00CB, 59, 62, false), (0x00AB, 61, 63, false), (0x008F, 61, 32, false),
    (0x5B12, 65, 65, true), (0x4D04, 80, 66, false), (0x412C, 81, 67, false), (0x37D8, 82, 68, false),
    (0x2FE8, 83, 69, false), (0x293C, 84, 70, false), (0x2379, 86, 71, false), (0x1EDF, 87, 72, false),
    (0x1AA9, 87, 73, false), (0x174E, 72, 74, false), (0x1424, 72, 75, false), (0x119C, 74, 76, false),
    (0x0F6B, 74, 77, false), (0x0D51, 75, 78, false), (0x0BB6, 77, 79, false), (0x0A40, 77, 48, false),
    (0x5832, 80, 81, true), (0x4D1C, 88, 82, false), (0x438E, 89, 83, false), (0x3BDD, 90, 84, false),
    (0x34EE, 91, 85, false), (0x2EAE, 92, 86, false), (0x299A, 93, 87, false), (0x2516, 86, 71, false),
    (0x5570, 88, 89, true), (0x4CA9, 95, 90, false), (0x44D9, 96, 91, false), (0x3E22, 97, 92, false),
    (0x3824, 99, 93, false), (0x32B4, 99, 94, false), (0x2E17, 93, 86, false), (0x56A8, 95, 96, true),
    (0x4F46, 101, 97, false), (0x47E5, 102, 98, false), (0x41CF, 103, 99, false), (0x3C3D, 104, 100, false),
    (0x375E, 99, 93, false), (0x5231, 105, 102, false), (0x4C0F, 106, 103, false), (0x4639, 107, 104, false),
    (0x415E, 103, 99, false), (0x5627, 105, 106, true), (0x50E7, 108, 107, false), (0x4B85, 109, 103, false),
    (0x5597, 110, 109, false), (0x504F, 111, 107, false), (0x5A10, 110, 111, true), (0x5522, 112, 109, false),
    (0x59EB, 112, 111, true),
];

/// Adaptive estimate for a decision.
#[derive(Clone, Copy, Default)]
struct Bin {
    state: u8,
    /// The more probable value.
    value: bool,
}

/// Decision decoder.
#[derive(Default)]
struct Decisions {
    /// Code register: 16 bits that are compared with the interval, followed by bits to come.
    code: u32,
    interval: u32,
    /// Number of bits to come.
    bits: u32,
    is_begun: bool,
}

impl Decisions {
    fn take_byte(&mut self, segment: &mut Segment<'_>) {
        // Zeros follow the last byte: an encoder omits them.
        self.code |= u32::from(segment.next_byte().unwrap_or(0)) << 8;
    }

    fn begin(&mut self, segment: &mut Segment<'_>) {
        for _ in 0..2 {
            self.take_byte(segment);
            self.code <<= 8;
        }
        (self.interval, self.is_begun) = (0x1_0000, true);
    }

    /// Decodes a decision with an adaptive bin.
    fn decide(&mut self, segment: &mut Segment<'_>, bin: &mut Bin) -> bool {
        let (probability, lower, higher, swaps) = STATES[usize::from(bin.state)];
        let likely = bin.value;
        let (is_likely, is_adapted) = self.split(segment, probability.into());
        if is_adapted {
            bin.state = if is_likely { higher } else { lower };
            bin.value ^= !is_likely && swaps;
        }
        likely == is_likely
    }

    /// Decodes a decision between equally probable values.
    fn decide_evenly(&mut self, segment: &mut Segment<'_>) -> bool {
        !self.split(segment, EVEN.into()).0
    }

    /// Splits the interval; returns whether the more probable value was coded, and whether the bin adapts.
    fn split(&mut self, segment: &mut Segment<'_>, probability: u32) -> (bool, bool) {
        if !self.is_begun {
            self.begin(segment);
        }
        self.interval -= probability;
        // The larger part belongs to the more probable value, whichever that is.
        let is_swapped = self.interval < probability;
        let is_upper = self.code >> 16 >= self.interval;
        if is_upper {
            self.code -= self.interval << 16;
            self.interval = probability;
        } else if self.interval >= 0x8000 {
            return (true, false);
        }
        self.renormalize(segment);
        (is_upper == is_swapped, true)
    }

    fn renormalize(&mut self, segment: &mut Segment<'_>) {
        while self.interval < 0x8000 {
            if self.bits == 0 {
                self.take_byte(segment);
                self.bits = 8;
            }
            self.interval <<= 1;
            self.code <<= 1;
            self.bits -= 1;
        }
    }
}

/// Bins for a DC or AC table.
type Bins<const COUNT: usize> = [Bin; COUNT];

/// Arithmetic coder for the blocks in a scan.
pub(super) struct ArithmeticCoder {
    decisions: Decisions,
    /// Bins and conditioning, by table number.
    dc_bins: [Bins<DC_BINS>; 4],
    ac_bins: [Bins<AC_BINS>; 4],
    conditioning: [Conditioning; 4],
    /// DC and AC table numbers by scan member.
    tables: Vec<(usize, usize)>,
    /// DC coefficient of the last block, and the bin selected by the last difference, by scan member.
    last_dc: Vec<(i32, usize)>,
    band: (usize, usize),
    shift: u32,
    is_progressive: bool,
    is_refinement: bool,
    /// Whether a code was invalid, so that the rest is skipped up to the next restart.
    is_lost: bool,
}

impl ArithmeticCoder {
    pub(super) fn new(scan: &Scan, tables: &Tables) -> Self {
        Self {
            decisions: Decisions::default(),
            dc_bins: [[Bin::default(); DC_BINS]; 4],
            ac_bins: [[Bin::default(); AC_BINS]; 4],
            conditioning: tables.conditioning,
            tables: scan.tables.clone(),
            last_dc: vec![(0, 0); scan.members.len()],
            band: scan.band,
            shift: scan.shift,
            is_progressive: scan.is_progressive,
            is_refinement: scan.is_refinement,
            is_lost: false,
        }
    }

    /// Decodes the DC coefficient in a first scan.
    fn dc(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) -> Option<()> {
        let table = self.tables[member].0;
        let bins = &mut self.dc_bins[table];
        let (last, context) = &mut self.last_dc[member];
        let decisions = &mut self.decisions;
        if decisions.decide(segment, &mut bins[*context]) {
            let is_negative = decisions.decide(segment, &mut bins[*context + 1]);
            let mut at = *context + 2 + usize::from(is_negative);
            let mut size = i32::from(decisions.decide(segment, &mut bins[at]));
            if size != 0 {
                at = DC_MAGNITUDES;
                size = grow(decisions, segment, bins, &mut at, size)?;
            }
            let (small, large) = self.conditioning[table].dc;
            *context = match size {
                _ if size < 1 << small >> 1 => 0,
                _ if size > 1 << large >> 1 => 12 + 4 * usize::from(is_negative),
                _ => 4 + 4 * usize::from(is_negative),
            };
            let magnitude = magnitude(decisions, segment, bins, at, size);
            *last = last.wrapping_add(if is_negative { -magnitude } else { magnitude });
        } else {
            *context = 0;
        }
        block[0] = (*last << self.shift) as i16;
        Some(())
    }

    /// Decodes the AC coefficients in a first scan.
    fn ac(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) -> Option<()> {
        let table = self.tables[member].1;
        let bins = &mut self.ac_bins[table];
        let decisions = &mut self.decisions;
        let mut at = self.band.0.max(1);
        while at <= self.band.1 {
            if decisions.decide(segment, &mut bins[3 * (at - 1)]) {
                break;
            }
            while !decisions.decide(segment, &mut bins[3 * (at - 1) + 1]) {
                at += 1;
                if at > self.band.1 {
                    return None;
                }
            }
            let is_negative = decisions.decide_evenly(segment);
            let mut bin = 3 * (at - 1) + 2;
            let mut size = i32::from(decisions.decide(segment, &mut bins[bin]));
            if size != 0 && decisions.decide(segment, &mut bins[bin]) {
                bin = AC_MAGNITUDES[usize::from(at > usize::from(self.conditioning[table].ac))];
                size = grow(decisions, segment, bins, &mut bin, 2)?;
            }
            let magnitude = magnitude(decisions, segment, bins, bin, size);
            block[at] = ((if is_negative { -magnitude } else { magnitude }) << self.shift) as i16;
            at += 1;
        }
        Some(())
    }

    /// Adds a bit to AC coefficients from earlier scans, and decodes coefficients that become nonzero.
    fn refine_ac(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) -> Option<()> {
        let bins = &mut self.ac_bins[self.tables[member].1];
        let decisions = &mut self.decisions;
        let bit = 1_i16 << self.shift;
        let known = (1..=self.band.1).rev().find(|&at| block[at] != 0).unwrap_or(0);
        let mut at = self.band.0;
        while at <= self.band.1 {
            if at > known && decisions.decide(segment, &mut bins[3 * (at - 1)]) {
                break;
            }
            loop {
                let bin = 3 * (at - 1);
                if block[at] != 0 {
                    if decisions.decide(segment, &mut bins[bin + 2]) {
                        block[at] = block[at].wrapping_add(if block[at] < 0 { -bit } else { bit });
                    }
                    break;
                }
                if decisions.decide(segment, &mut bins[bin + 1]) {
                    block[at] = if decisions.decide_evenly(segment) { -bit } else { bit };
                    break;
                }
                at += 1;
                if at > self.band.1 {
                    return None;
                }
            }
            at += 1;
        }
        Some(())
    }
}

/// Decodes a magnitude size, which is a power of two; `None` if the size has no code.
fn grow(
    decisions: &mut Decisions,
    segment: &mut Segment<'_>,
    bins: &mut [Bin],
    at: &mut usize,
    size: i32,
) -> Option<i32> {
    let mut size = size;
    while decisions.decide(segment, &mut bins[*at]) {
        size <<= 1;
        if size == MAGNITUDE_MAX {
            return None;
        }
        *at += 1;
    }
    Some(size)
}

/// Decodes the magnitude bits below the magnitude size.
fn magnitude(
    decisions: &mut Decisions,
    segment: &mut Segment<'_>,
    bins: &mut [Bin],
    at: usize,
    size: i32,
) -> i32 {
    let mut magnitude = size;
    let mut bit = size >> 1;
    while bit > 0 {
        if decisions.decide(segment, &mut bins[at + MAGNITUDE_BITS]) {
            magnitude |= bit;
        }
        bit >>= 1;
    }
    magnitude + 1
}

impl Coder for ArithmeticCoder {
    fn restart(&mut self) {
        self.decisions = Decisions::default();
        self.dc_bins = [[Bin::default(); DC_BINS]; 4];
        self.ac_bins = [[Bin::default(); AC_BINS]; 4];
        self.last_dc.fill((0, 0));
        self.is_lost = false;
    }

    fn decode(&mut self, segment: &mut Segment<'_>, member: usize, block: &mut Block) {
        if self.is_lost {
            return;
        }
        let decoded = match (self.band.0, self.is_refinement) {
            (0, true) => {
                block[0] |= i16::from(self.decisions.decide_evenly(segment)) << self.shift;
                Some(())
            }
            (0, false) => self
                .dc(segment, member, block)
                .and_then(|()| if self.is_progressive { Some(()) } else { self.ac(segment, member, block) }),
            (_, true) => self.refine_ac(segment, member, block),
            (_, false) => self.ac(segment, member, block),
        };
        if decoded.is_none() {
            (self.is_lost, segment.damage.is_corrupt) = (true, true);
        }
    }
}
