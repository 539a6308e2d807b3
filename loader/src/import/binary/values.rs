//! Decodes values that MDS and litdata store in the same way, or in almost the same.

use bytes::Bytes;
use image::codecs::png::PngEncoder;
use image::{ExtendedColorType, ImageEncoder};

use super::items::Cut;
use crate::import::row::Cell;

/// Element type of an array: its NumPy code and the bytes of an element.
pub(super) type ElementType = (&'static str, usize);

/// Returns the element type of a NumPy name.
pub(super) fn element_type(name: &str) -> Option<ElementType> {
    Some(match name {
        "bool" => ("|b1", 1),
        "int8" => ("|i1", 1),
        "uint8" => ("|u1", 1),
        "int16" => ("<i2", 2),
        "uint16" => ("<u2", 2),
        "float16" => ("<f2", 2),
        "int32" => ("<i4", 4),
        "uint32" => ("<u4", 4),
        "float32" => ("<f4", 4),
        "int64" => ("<i8", 8),
        "uint64" => ("<u8", 8),
        "float64" => ("<f8", 8),
        "complex64" => ("<c8", 8),
        "complex128" => ("<c16", 16),
        _ => return None,
    })
}

/// Returns a number of a NumPy type.
pub(super) fn scalar(name: &str, bytes: &[u8]) -> Result<Cell, String> {
    fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N], String> {
        bytes.try_into().map_err(|_| format!("expected {N} bytes, found {}", bytes.len()))
    }
    Ok(match name {
        "bool" => Cell::Bool(fixed::<1>(bytes)?[0] != 0),
        "int8" => Cell::Int(i8::from_le_bytes(fixed(bytes)?).into()),
        "uint8" => Cell::Int(u8::from_le_bytes(fixed(bytes)?).into()),
        "int16" => Cell::Int(i16::from_le_bytes(fixed(bytes)?).into()),
        "uint16" => Cell::Int(u16::from_le_bytes(fixed(bytes)?).into()),
        "int32" => Cell::Int(i32::from_le_bytes(fixed(bytes)?).into()),
        "uint32" => Cell::Int(u32::from_le_bytes(fixed(bytes)?).into()),
        "int64" => Cell::Int(i64::from_le_bytes(fixed(bytes)?)),
        "uint64" => Cell::Unsigned(u64::from_le_bytes(fixed(bytes)?)),
        "float16" => Cell::Single(half::f16::from_le_bytes(fixed(bytes)?).to_f32()),
        "float32" => Cell::Single(f32::from_le_bytes(fixed(bytes)?)),
        "float64" => Cell::Float(f64::from_le_bytes(fixed(bytes)?)),
        _ => return Err(format!("expected a number, found the type `{name}`")),
    })
}

/// Returns UTF-8 text.
pub(super) fn text(bytes: &[u8]) -> Result<Cell, String> {
    let text = str::from_utf8(bytes).map_err(|error| format!("its text is not UTF-8: {error}"))?;
    Ok(Cell::Text(text.to_owned()))
}

/// Returns a JSON value.
pub(super) fn json(bytes: &[u8]) -> Result<Cell, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("expected JSON: {error}"))
}

/// Returns bytes as they are.
pub(super) fn bytes(bytes: &[u8]) -> Cell {
    Cell::Bytes(Bytes::copy_from_slice(bytes))
}

/// Returns an array as the bytes of an `.npy` file.
pub(super) fn npy((code, element_bytes): ElementType, shape: &[u64], data: &[u8]) -> Result<Cell, String> {
    let elements = shape.iter().try_fold(element_bytes as u64, |product, size| product.checked_mul(*size));
    if elements != Some(data.len() as u64) {
        return Err(format!("an array of {} bytes does not have the shape {shape:?}", data.len()));
    }
    let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let tuple = if sizes.len() == 1 { format!("({},)", sizes[0]) } else { format!("({})", sizes.join(", ")) };
    let mut header = format!("{{'descr': '{code}', 'fortran_order': False, 'shape': {tuple}, }}");
    // Magic, version, length and header are a multiple of 64 bytes; a line feed ends them.
    let padded = (header.len() + 11).next_multiple_of(64) - 11;
    header.push_str(&" ".repeat(padded - header.len()));
    header.push('\n');
    let length = u16::try_from(header.len()).map_err(|_| "an array of too many dimensions".to_owned())?;
    let file = [b"\x93NUMPY\x01\x00", &length.to_le_bytes()[..], header.as_bytes(), data].concat();
    Ok(Cell::Bytes(file.into()))
}

/// Returns an image that Pillow stored without compression as a PNG with the same pixels: width, height and
/// length of the mode, each of 32 bits, then mode and pixels.
pub(super) fn pillow(item: &[u8]) -> Result<Cell, String> {
    let mut item = Cut(item);
    let [width, height, length] = [item.number()?, item.number()?, item.number()?];
    let mode = item.bytes(length as usize)?;
    let (color, pixel_bytes) = match mode {
        b"L" => (ExtendedColorType::L8, 1),
        b"LA" => (ExtendedColorType::La8, 2),
        b"RGB" => (ExtendedColorType::Rgb8, 3),
        b"RGBA" => (ExtendedColorType::Rgba8, 4),
        _ => {
            let mode = String::from_utf8_lossy(&mode[..mode.len().min(16)]);
            return Err(format!("an image of Pillow's mode `{mode}`; expected L, LA, RGB or RGBA"));
        }
    };
    let expected =
        u64::from(width).checked_mul(height.into()).and_then(|pixels| pixels.checked_mul(pixel_bytes));
    if expected != Some(item.0.len() as u64) {
        return Err(format!("an image of {} bytes is not {width} x {height} pixels", item.0.len()));
    }
    let mut png = Vec::new();
    let encoded = PngEncoder::new(&mut png).write_image(item.0, width, height, color);
    encoded.map_err(|error| format!("an image cannot be written as PNG: {error}"))?;
    Ok(Cell::Bytes(png.into()))
}

/// Returns a list of media: their number, their lengths, then their bytes.
pub(super) fn list(item: &[u8], one: impl Fn(&[u8]) -> Result<Cell, String>) -> Result<Cell, String> {
    let mut item = Cut(item);
    let count = item.number()?;
    let mut lengths = Cut(item.bytes(4 * count as usize)?);
    let value = |_| one(item.bytes(lengths.number()? as usize)?);
    (0..count).map(value).collect::<Result<_, String>>().map(Cell::List)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_becomes_a_file_of_numpy() {
        let Cell::Bytes(file) = npy(("<i2", 2), &[2, 3], &[7; 12]).unwrap() else { panic!("bytes") };
        let array = dflop_samples::media::decode_npy(&file).unwrap();
        assert_eq!(((file.len() - 12) % 64, array.shape.as_slice(), &*array.dtype), (0, &[2, 3][..], "<i2"));
        assert!(npy(("<i2", 2), &[2, 4], &[7; 12]).is_err());
    }

    #[test]
    fn raw_pixels_become_a_png_of_the_same_pixels() {
        let mut item: Vec<u8> = [2u32, 1, 3].iter().flat_map(|number| number.to_le_bytes()).collect();
        item.extend_from_slice(b"RGBabcdef");
        let Cell::Bytes(png) = pillow(&item).unwrap() else { panic!("bytes") };
        let decoded = image::load_from_memory(&png).unwrap().into_rgb8();
        assert_eq!((decoded.dimensions(), decoded.into_raw()), ((2, 1), b"abcdef".to_vec()));
        item.pop();
        assert!(pillow(&item).unwrap_err().contains("2 x 1 pixels"));
    }

    #[test]
    fn lists_end_where_their_bytes_end() {
        let item: Vec<u8> = [2u32, 1, 2].iter().flat_map(|n| n.to_le_bytes()).chain(*b"abc").collect();
        let cells = list(&item, |value| Ok(bytes(value))).unwrap();
        assert_eq!(cells, Cell::List(vec![bytes(b"a"), bytes(b"bc")]));
        assert!(list(&item[..14], |value| Ok(bytes(value))).is_err());
        assert!(list(&[255; 4], |value| Ok(bytes(value))).is_err());
    }
}
