//! Entropy-coded scan bytes, up to a marker.

use super::Damage;

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
