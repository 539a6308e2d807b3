//! Finds an image's orientation in the EXIF block, or in the XMP text.
//!
//! An EXIF block is a small TIFF file; only tag `0x0112` in the first directory is read. A broken block
//! counts as "not rotated", as in other decoders. XMP is read if EXIF has no such tag, as in Pillow.

use image::metadata::Orientation;

use super::tiff::Directory;

/// Start of an XMP segment in a JPEG.
pub(super) const XMP_NAMESPACE: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
const ORIENTATION_TAG: u16 = 0x0112;

/// Returns the orientation in an EXIF block that starts with the TIFF header, or `None` if there is none. An
/// invalid orientation number means "as stored".
pub(super) fn orientation_of_tiff(block: &[u8]) -> Option<Orientation> {
    let number = Directory::first(block)?.number(ORIENTATION_TAG)?;
    Some(orientation_of_number(number))
}

/// Returns the orientation in an EXIF block, which may start with the JPEG segment prefix that some writers
/// copy.
pub(super) fn orientation_of_exif(block: &[u8]) -> Option<Orientation> {
    orientation_of_tiff(block.strip_prefix(b"Exif\0\0").unwrap_or(block))
}

/// Returns the orientation in an XMP text: an attribute or an element with a single digit.
pub(super) fn orientation_of_xmp(text: &[u8]) -> Option<Orientation> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut rest = text;
    loop {
        let found = rest.windows(NAME.len()).position(|window| window == NAME)?;
        rest = &rest[found + NAME.len()..];
        let digit = rest.strip_prefix(b"=\"").or_else(|| rest.strip_prefix(b">")).and_then(<[u8]>::first);
        if let Some(digit) = digit.filter(|digit| digit.is_ascii_digit()) {
            return Some(orientation_of_number(u64::from(digit - b'0')));
        }
    }
}

fn orientation_of_number(number: u64) -> Orientation {
    let known = u8::try_from(number).ok().and_then(Orientation::from_exif);
    known.unwrap_or(Orientation::NoTransforms)
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
        assert_eq!(orientation_of_tiff(&block(true, 9)), Some(Orientation::NoTransforms));
        for cut in 0..20 {
            assert_eq!(orientation_of_tiff(&block(true, 6)[..cut.min(18)]), None);
        }
        let mut far = block(true, 6);
        far[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(orientation_of_tiff(&far), None);
    }

    #[test]
    fn xmp_is_an_attribute_or_an_element() {
        let read = |text: &str| orientation_of_xmp(text.as_bytes());
        assert_eq!(read(r#"<rdf:Description tiff:Orientation="6"/>"#), Some(Orientation::Rotate90));
        assert_eq!(read("tiff:Orientation ... <tiff:Orientation>8<"), Some(Orientation::Rotate270));
        assert_eq!(read("<tiff:Orientation>9<"), Some(Orientation::NoTransforms));
        assert_eq!(read("<tiff:Orientation>"), None);
    }

    #[test]
    fn a_long_number_is_read_as_such() {
        let mut block = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x04\0\0\0\x01".to_vec();
        block.extend([0, 0, 0, 6, 0, 0, 0, 0]);
        assert_eq!(orientation_of_tiff(&block), Some(Orientation::Rotate90));
    }
}
