//! Finds the orientation of a PNG: in the `eXIf` chunk, in the hex digits that `ImageMagick` writes into a
//! text chunk, or in XMP. The chunks may follow the pixels.

use std::io::Read;

use flate2::read::ZlibDecoder;
use image::metadata::Orientation;

use super::field::u32_be;
use super::tiff;

/// Maximum number of bytes in a decompressed text.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// Returns the orientation that displays the stored image upright.
pub(super) fn orientation(bytes: &[u8]) -> Orientation {
    let mut exif_chunk = None;
    let mut raw_profile = None;
    let mut xmp = None;
    for (name, body) in Chunks::new(bytes) {
        match name {
            b"eXIf" => exif_chunk = Some(body),
            b"tEXt" | b"zTXt" | b"iTXt" => match keyword(body) {
                b"Raw profile type exif" => {
                    raw_profile = text(*name, body).and_then(|text| bytes_of_digits(&text));
                }
                b"XML:com.adobe.xmp" => xmp = text(*name, body),
                _ => {}
            },
            _ => {}
        }
    }
    let of_exif = exif_chunk.or(raw_profile.as_deref()).and_then(tiff::orientation_of_exif);
    let of_xmp = || tiff::orientation_of_xmp(&xmp?);
    of_exif.or_else(of_xmp).unwrap_or(Orientation::NoTransforms)
}

/// Returns whether the bytes end before the pixels.
pub(super) fn ends_before_pixels(bytes: &[u8]) -> bool {
    let mut chunks = Chunks::new(bytes);
    !chunks.any(|(name, _)| name == b"IDAT" || name == b"IEND") && !chunks.is_in_pixels
}

/// PNG chunks: names and bodies, up to the end of the bytes.
struct Chunks<'a> {
    bytes: &'a [u8],
    position: usize,
    is_in_pixels: bool,
}

impl<'a> Chunks<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 8, is_in_pixels: false }
    }
}

impl<'a> Iterator for Chunks<'a> {
    type Item = (&'a [u8; 4], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = u32_be(self.bytes, self.position)? as usize;
        let name: &[u8; 4] = self.bytes.get(self.position + 4..self.position + 8)?.try_into().ok()?;
        self.is_in_pixels = name == b"IDAT";
        let start = self.position + 8;
        let body = self.bytes.get(start..start.checked_add(length)?)?;
        // A checksum follows.
        self.position = start + length + 4;
        Some((name, body))
    }
}

fn keyword(body: &[u8]) -> &[u8] {
    body.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Returns the text after the keyword.
fn text(name: [u8; 4], body: &[u8]) -> Option<Vec<u8>> {
    let rest = body.get(keyword(body).len() + 1..)?;
    match &name {
        b"tEXt" => Some(rest.to_vec()),
        // A byte names the method; only one method exists.
        b"zTXt" => inflated(rest.get(1..)?),
        _ => {
            let (is_compressed, rest) = (*rest.first()? != 0, rest.get(2..)?);
            // Language and translated keyword each end with a zero.
            let text = rest.splitn(3, |&byte| byte == 0).nth(2)?;
            if is_compressed { inflated(text) } else { Some(text.to_vec()) }
        }
    }
}

fn inflated(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    ZlibDecoder::new(bytes).take(TEXT_BYTES_MAX).read_to_end(&mut text).ok()?;
    Some(text)
}

/// Returns the bytes in a raw profile: a line break, a name, a length, and hex digits in lines.
fn bytes_of_digits(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.splitn(4, |&byte| byte == b'\n').nth(3)?;
    let digits: Vec<u8> = digits
        .iter()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map_while(|&byte| char::from(byte).to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::ZlibEncoder;

    use super::*;
    use crate::media::fixtures::{encode, exif_body, gradient};

    /// Creates a PNG with chunks before or after the pixels.
    fn png(chunks: &[(&[u8; 4], Vec<u8>)], is_behind: bool) -> Vec<u8> {
        const HEADER_BYTES: usize = 33;
        const END_BYTES: usize = 12;
        let file = encode(gradient(4, 2), image::ImageFormat::Png);
        let at = if is_behind { file.len() - END_BYTES } else { HEADER_BYTES };
        let mut made = file[..at].to_vec();
        for (name, body) in chunks {
            made.extend((body.len() as u32).to_be_bytes());
            made.extend([&name[..], body, &[0; 4]].concat());
        }
        made.extend(&file[at..]);
        made
    }

    fn deflated(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn raw_profile(orientation: u8) -> Vec<u8> {
        let body = exif_body(orientation);
        let digit = |half: u8| char::from_digit(half.into(), 16).unwrap();
        let digits: String = body.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xF)]).collect();
        format!("\nexif\n{:8}\n{}\n{}\n", body.len(), &digits[..40], &digits[40..]).into_bytes()
    }

    #[test]
    fn every_place_of_an_orientation_is_read_in_front_of_and_behind_the_pixels() {
        let xmp = b"<rdf:Description tiff:Orientation=\"6\"/>";
        let chunks: [(&[u8; 4], Vec<u8>); 6] = [
            (b"eXIf", exif_body(6)[6..].to_vec()),
            (b"eXIf", exif_body(6)),
            (b"tEXt", [b"Raw profile type exif\0", &raw_profile(6)[..]].concat()),
            (b"zTXt", [b"Raw profile type exif\0\0", &deflated(&raw_profile(6))[..]].concat()),
            (b"iTXt", [b"XML:com.adobe.xmp\0\0\0\0\0", &xmp[..]].concat()),
            (b"iTXt", [b"XML:com.adobe.xmp\0\x01\0\0\0", &deflated(xmp)[..]].concat()),
        ];
        for chunk in chunks {
            for is_behind in [false, true] {
                let file = png(std::slice::from_ref(&chunk), is_behind);
                assert_eq!(orientation(&file), Orientation::Rotate90, "{:?} {is_behind}", chunk.0);
            }
        }
    }

    #[test]
    fn the_last_exif_chunk_comes_before_a_profile_and_xmp() {
        let exif = |number| (b"eXIf", exif_body(number)[6..].to_vec());
        let profile = (b"tEXt", [b"Raw profile type exif\0", &raw_profile(6)[..]].concat());
        assert_eq!(orientation(&png(&[exif(6), exif(1)], false)), Orientation::NoTransforms);
        assert_eq!(orientation(&png(&[profile, exif(3)], false)), Orientation::Rotate180);
    }

    #[test]
    fn pixels_are_found_also_where_they_are_cut() {
        let file = png(&[(b"tEXt", b"a\0b".to_vec())], false);
        let pixels = file.windows(4).position(|name| name == b"IDAT").unwrap();
        assert!(ends_before_pixels(&file[..pixels]));
        assert!(!ends_before_pixels(&file[..pixels + 4]));
        assert!(!ends_before_pixels(&file));
    }
}
