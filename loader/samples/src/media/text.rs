//! Decodes UTF-8 text.

use super::error::DecodeError;
use super::limits::check_limit;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Decodes a text with at most `bytes_max` bytes; a leading byte order mark is dropped, NUL is kept.
///
/// # Errors
/// [`DecodeError::Malformed`] with the offset of the first byte that is not UTF-8, [`DecodeError::TooLarge`].
///
/// # Examples
/// ```
/// let error = dflop_samples::media::decode_text(b"caf\xE9", 1024).unwrap_err();
/// assert_eq!(error.to_string(), "malformed text at byte 3: not UTF-8");
/// ```
pub fn decode_text(bytes: &[u8], bytes_max: u64) -> Result<String, DecodeError> {
    Ok(decode_str("text", bytes, bytes_max)?.to_owned())
}

/// Checks a text and returns the text without byte order mark.
pub(super) fn decode_str<'a>(
    format: &'static str,
    bytes: &'a [u8],
    bytes_max: u64,
) -> Result<&'a str, DecodeError> {
    check_limit(format, bytes.len() as u64, "bytes", "text_bytes_max", bytes_max)?;
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let is_utf16 = bytes.starts_with(b"\xFF\xFE") || bytes.starts_with(b"\xFE\xFF");
        let reason = if is_utf16 { "not UTF-8; it looks like UTF-16" } else { "not UTF-8" };
        DecodeError::malformed(format, error.valid_up_to(), reason)
    })?;
    Ok(if bytes.starts_with(BYTE_ORDER_MARK) { &text[BYTE_ORDER_MARK.len()..] } else { text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_order_mark_is_dropped_and_nul_is_kept() {
        assert_eq!(decode_text(b"\xEF\xBB\xBFa\0b", 100).unwrap(), "a\0b");
    }

    #[test]
    fn utf16_is_named() {
        let error = decode_text(b"\xFF\xFEa\0", 100).unwrap_err();
        assert_eq!(error.to_string(), "malformed text at byte 0: not UTF-8; it looks like UTF-16");
    }

    #[test]
    fn long_text_is_refused() {
        assert!(matches!(decode_text(&[b'a'; 11], 10), Err(DecodeError::TooLarge { actual: 11, .. })));
    }
}
