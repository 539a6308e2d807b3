//! Provides test media: encoded here, or a few hundred bytes in hex where no encoder is available.

#[cfg(feature = "avif")]
pub(crate) mod avif;

use std::io::Cursor;

use image::{DynamicImage, ImageFormat};

/// A progressive 4:2:0 JPEG with 40 x 24 pixels: red grows to the right, green to the bottom, blue is 128.
pub(crate) const PROGRESSIVE_JPEG: &str = "\
     ffd8ffe000104a46494600010100000100010000ffdb0043000d090a0b0a080d0b0a0b0e0e0d0f13201513121213271c\
     1e17202e2931302e292d2c333a4a3e333646372c2d405741464c4e525352323e5a615a50604a51524fffdb0043010e0e\
     0e131113261515264f352d354f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f\
     4f4f4f4f4f4f4f4f4f4f4f4f4f4fffc20011080018002803012200021101031101ffc400180001010101010000000000\
     0000000000000003040502ffc400160101010100000000000000000000000000030406ffda000c030100021003100000\
     01e2d75d681c75d752bf23a02b7c543c8d2a15f5056fffc400161000030000000000000000000000000000000102ffda\
     00080101000105025028140a05028140a05028140a05028141ffc4001911000301010100000000000000000000000002\
     03011121ffda0008010301013f019d89d85b784db49b68adbc3fffc40019110101000301000000000000000000000001\
     0002031213ffda0008010201013f0176cedbd6726726e9bfffc40014100100000000000000000000000000000030ffda\
     0008010100063f027fffc40014100100000000000000000000000000000030ffda0008010100013f21700000003fffda\
     000c0301000200030000001003cf80f3efffc40014110100000000000000000000000000000020ffda0008010301013f\
     1054364fffc4001811000203000000000000000000000000000110001121ffda0008010201013f105474e4364fffc400\
     1510010100000000000000000000000000000061ffda0008010100013f1082082082082082082082083fffd9";

/// A CMYK JPEG with 8 x 8 pixels, inverted as the Adobe segment announces: cyan 200, magenta 60, yellow 10,
/// black 40.
pub(crate) const ADOBE_CMYK_JPEG: &str = "\
     ffd8ffee000e41646f626500640000000000ffdb0043000d090a0b0a080d0b0a0b0e0e0d0f13201513121213271c1e17\
     202e2931302e292d2c333a4a3e333646372c2d405741464c4e525352323e5a615a50604a51524fffc000140800080008\
     044311004d11005911004b1100ffc4001500010100000000000000000000000000000607ffc400141001000000000000\
     00000000000000000000ffda000e0443004d0059004b00003f002452a41b3fffd9";

/// 10,000 frames, 16 kHz mono FLAC: frame `t` is `t - 5000` over 32768.
pub(crate) const RAMP_FLAC: &str = "\
     664c614380000022100010000000f200020e03e800f00000271056577eee20bc38d7deefe478e10512bbfff8c508006f\
     14ec78ec79003fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffe23bfff8c508016814fc\
     78fc79003fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffaa8cfff8750802070f67140c\
     780c79003fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
     ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffa50d";

/// 1,600 frames, 8 kHz mono MP3 with encoder delay and padding: a 440 Hz sine with amplitude 0.5.
pub(crate) const SINE_MP3: &str = "\
     ffe348c400000000000000000058696e670000000f000000050000043800747474747474747474747474747474747474\
     74a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2babababababababababababababababababababae8e8e8e8e8e8e8\
     e8e8e8e8e8e8e8e8e8e8e8e8e8ffffffffffffffffffffffffffffffffffffffff0000000a4c414d45332e3130300428\
     000000000000000015082402c02100019a000004380fe539420000000000000000000000000000000000000000000000\
     000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
     000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
     ffe358c40021f096b87f4f00010adb6edf8005ef7bdef7bde94a5294a5297bdef7befde2653e5bc7ac4dc7acb9b3d5a0\
     000778787fff000cf11ffe06fff8e01ffc033ffc3c01df8018fff0f0077e0063ffc7803b000030f0f0f0f00000000030\
     f0f0f0f00000000030f0f0f0f00000000461e1e1e1e00000000061e1e1e1e00000000061e1e1e3c000000011878787fb\
     00001ffe3d1b00a0034003020180e060224ff32a7d77ccb5fffefeb597d987777bc7fffd04cc04f11a32213ec1c710d0\
     3e267524af70920320511584508afff05d02881445606e06e18889ffff06d1908a1144222444910f87dffffe31112224\
     884508a211e8f4887c3effffff211e8f4887c4ca3d3444153bffffb550924c414d45017fffffc7c01a5983822f40c67d\
     1cf8cf0025a295079001000022078056170b809fffed957fb5c580370f4c6ce35b04debcffffbd9d3da642c0176a477d\
     50095b32c65073a631e443048801124dffcb05a27cbe7cd0ffe328c4d31e2a66d6f99a51002d182df44201c22b619fff\
     1401111c62e7278820cc1742c580dac12a106800804cc6f8586ffe6e5f48d0b8b373752029c541650bd2f8cc8cf180e2\
     1d3ffe68b4cdd481a2dd3531d20a438e11221a749d268c8ac4cfffe82dd35320b775332cc4aa5e322d974c4f178c8f9a\
     989a7fffe0d1a0500c1e0500c4824ab1b0cd9e4320a7c537ffe318c4d9052892bca19400001fe057c23b137cdf05c417\
     e53828ec457417e13f23b105e8afca4c414d45332e313030aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\
     ffe328c4ff2e9aead7199a9024aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\
     aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\
     aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\
     ffe318c4c708b002b661c00001aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\
     aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

/// Converts hex digits to bytes.
pub(crate) fn bytes_of_hex(hex: &str) -> Vec<u8> {
    let digit = |symbol: u8| (symbol as char).to_digit(16).unwrap() as u8;
    hex.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// A smooth image: red grows to the right, green to the bottom, blue is 128.
pub(crate) fn gradient(width: u32, height: u32) -> image::RgbImage {
    let grow = |at: u32, length: u32| (at * 255 / (length - 1).max(1)) as u8;
    image::RgbImage::from_fn(width, height, |x, y| image::Rgb([grow(x, width), grow(y, height), 128]))
}

/// Encodes an image.
pub(crate) fn encode(image: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut file = Cursor::new(Vec::new());
    image.into().write_to(&mut file, format).unwrap();
    file.into_inner()
}

/// Inserts a segment after the first two bytes of a JPEG.
pub(crate) fn with_segment(jpeg: &[u8], marker: u8, body: &[u8]) -> Vec<u8> {
    let length = (body.len() + 2) as u16;
    [&jpeg[..2], &[0xFF, marker], &length.to_be_bytes(), body, &jpeg[2..]].concat()
}

/// Creates an EXIF segment body with an orientation from 1 to 8.
pub(crate) fn exif_body(orientation: u8) -> Vec<u8> {
    let mut body = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".to_vec();
    body.extend([orientation, 0, 0, 0, 0, 0, 0]);
    body
}

/// Writes a WAV file.
pub(crate) fn wav(tag: u16, bits: u16, channels: u16, sample_rate_hz: u32, samples: &[u8]) -> Vec<u8> {
    let frame_bytes = channels.wrapping_mul(bits / 8);
    let mut file = b"RIFF".to_vec();
    file.extend((36 + samples.len() as u32).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0");
    file.extend(tag.to_le_bytes());
    file.extend(channels.to_le_bytes());
    file.extend(sample_rate_hz.to_le_bytes());
    file.extend((sample_rate_hz.wrapping_mul(u32::from(frame_bytes))).to_le_bytes());
    file.extend(frame_bytes.to_le_bytes());
    file.extend(bits.to_le_bytes());
    file.extend(b"data");
    file.extend((samples.len() as u32).to_le_bytes());
    file.extend(samples);
    file
}

/// Writes a TIFF file with a single strip, by default a single row; entry values are 16-bit numbers.
pub(crate) fn tiff(is_little: bool, entries: &[(u16, Vec<u16>)], strip: &[u8]) -> Vec<u8> {
    const HEADER_BYTES: usize = 8;
    let short = |value: u16| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
    let long =
        |value: usize| if is_little { (value as u32).to_le_bytes() } else { (value as u32).to_be_bytes() };
    let mut entries = entries.to_vec();
    for (tag, value) in [(257, 1), (259, 1), (277, 1), (278, 999), (273, 0), (279, strip.len() as u16)] {
        if !entries.iter().any(|(known, _)| *known == tag) {
            entries.push((tag, vec![value]));
        }
    }
    entries.sort();
    let values_at = HEADER_BYTES + 2 + 12 * entries.len() + 4;
    let values_bytes: usize =
        entries.iter().map(|(_, values)| if values.len() > 2 { 2 * values.len() } else { 0 }).sum();
    let strip_at = (values_at + values_bytes) as u16;
    entries.iter_mut().filter(|(tag, _)| *tag == 273).for_each(|(_, values)| *values = vec![strip_at]);
    let mut file = if is_little { b"II*\0".to_vec() } else { b"MM\0*".to_vec() };
    file.extend(long(HEADER_BYTES));
    file.extend(short(entries.len() as u16));
    let mut behind: Vec<u8> = Vec::new();
    for (tag, values) in &entries {
        file.extend([short(*tag), short(3)].concat());
        file.extend(long(values.len()));
        let bytes: Vec<u8> = values.iter().flat_map(|&value| short(value)).collect();
        if values.len() > 2 {
            file.extend(long(values_at + behind.len()));
            behind.extend(bytes);
        } else {
            file.extend([bytes, vec![0; 4 - 2 * values.len()]].concat());
        }
    }
    [&file[..], &[0; 4], &behind, strip].concat()
}
