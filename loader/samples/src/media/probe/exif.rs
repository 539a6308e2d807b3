//! Finds the orientation of an image in its EXIF block.
//!
//! An EXIF block is a small TIFF file: byte order, offset of the first directory, entries of 12 bytes. Only
//! tag `0x0112` of the first directory is read; a broken block counts as "not rotated", as in other decoders.

use image::metadata::Orientation;

use super::field::{u16_be, u16_le, u32_be, u32_le};

const ORIENTATION_TAG: u16 = 0x0112;
const ENTRY_BYTES: usize = 12;

/// Reads an integer at an offset.
type Reader<T> = fn(&[u8], usize) -> Option<T>;

/// Returns the orientation in an EXIF block that starts with its TIFF header, or `None` if there is none.
pub(super) fn orientation_of_tiff(block: &[u8]) -> Option<Orientation> {
    let (u16_at, u32_at): (Reader<u16>, Reader<u32>) = match block.get(..4)? {
        b"II*\0" => (u16_le, u32_le),
        b"MM\0*" => (u16_be, u32_be),
        _ => return None,
    };
    let directory = u32_at(block, 4)? as usize;
    let entries = usize::from(u16_at(block, directory)?);
    for entry in 0..entries {
        let at = directory + 2 + entry * ENTRY_BYTES;
        if u16_at(block, at)? == ORIENTATION_TAG {
            // A value of two bytes is stored in the entry itself, in place of an offset.
            return Orientation::from_exif(u8::try_from(u16_at(block, at + 8)?).ok()?);
        }
    }
    None
}

/// Returns whether the orientation swaps width and height.
pub(super) fn swaps_sides(orientation: Orientation) -> bool {
    matches!(
        orientation,
        Orientation::Rotate90
            | Orientation::Rotate270
            | Orientation::Rotate90FlipH
            | Orientation::Rotate270FlipH
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(is_little: bool, orientation: u16) -> Vec<u8> {
        let short = |value: u16| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
        let long = |value: u32| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
        let mut block = if is_little { b"II*\0".to_vec() } else { b"MM\0*".to_vec() };
        block.extend(long(8));
        block.extend(short(1));
        block.extend(short(ORIENTATION_TAG));
        block.extend(short(3));
        block.extend(long(1));
        block.extend(short(orientation));
        block.extend(short(0));
        block.extend(long(0));
        block
    }

    #[test]
    fn both_byte_orders_are_read() {
        assert_eq!(orientation_of_tiff(&block(true, 6)), Some(Orientation::Rotate90));
        assert_eq!(orientation_of_tiff(&block(false, 8)), Some(Orientation::Rotate270));
    }

    #[test]
    fn broken_blocks_mean_not_turned() {
        assert_eq!(orientation_of_tiff(&block(true, 9)), None);
        for cut in 0..20 {
            assert_eq!(orientation_of_tiff(&block(true, 6)[..cut.min(18)]), None);
        }
        let mut far = block(true, 6);
        far[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(orientation_of_tiff(&far), None);
    }
}
