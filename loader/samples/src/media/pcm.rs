//! Decodes samples that are stored individually, or as differences: WAV, AIFF, AU.
//!
//! # Source
//! ITU-T G.711 (1988) for A-law and mu-law; "Multimedia Data Standards Update", Microsoft, 1994, for ADPCM.

use super::probe::{AdpcmBlock, PcmCoding, PcmHeader};

/// Full scale for 16 bits.
const SCALE: f32 = 32_768.0;

/// Decodes the samples in a file, `[frames, channels]`, full scale at -1 to 1.
pub(super) fn decode_pcm(bytes: &[u8], header: &PcmHeader) -> Vec<f32> {
    let channels = usize::from(header.channels);
    let count = header.length.frames as usize * channels;
    let bytes = bytes.get(header.range()).unwrap_or_default();
    let is_little = header.is_little_endian;
    match &header.coding {
        PcmCoding::Unsigned => samples(bytes, count, |[byte]| (f32::from(byte) - 128.0) / 128.0),
        PcmCoding::ALaw => samples(bytes, count, |[byte]| f32::from(linear_of_a_law(byte)) / SCALE),
        PcmCoding::MuLaw => samples(bytes, count, |[byte]| f32::from(linear_of_mu_law(byte)) / SCALE),
        PcmCoding::Signed { bytes: 1 } => {
            samples(bytes, count, |[byte]| f32::from(byte.cast_signed()) / 128.0)
        }
        PcmCoding::Signed { bytes: 2 } if is_little => {
            samples(bytes, count, |sample| f32::from(i16::from_le_bytes(sample)) / SCALE)
        }
        PcmCoding::Signed { bytes: 2 } => {
            samples(bytes, count, |sample| f32::from(i16::from_be_bytes(sample)) / SCALE)
        }
        PcmCoding::Signed { bytes: 3 } if is_little => samples(bytes, count, |[a, b, c]| wide([0, a, b, c])),
        PcmCoding::Signed { bytes: 3 } => samples(bytes, count, |[c, b, a]| wide([0, a, b, c])),
        PcmCoding::Signed { .. } if is_little => samples(bytes, count, wide),
        PcmCoding::Signed { .. } => samples(bytes, count, |[d, c, b, a]| wide([a, b, c, d])),
        PcmCoding::Float { bytes: 4 } if is_little => samples(bytes, count, f32::from_le_bytes),
        PcmCoding::Float { bytes: 4 } => samples(bytes, count, f32::from_be_bytes),
        PcmCoding::Float { .. } if is_little => {
            samples(bytes, count, |sample| f64::from_le_bytes(sample) as f32)
        }
        PcmCoding::Float { .. } => samples(bytes, count, |sample| f64::from_be_bytes(sample) as f32),
        PcmCoding::ImaAdpcm(block) => {
            blocks(bytes, *block, channels, count, |bytes, samples| ima_block(bytes, channels, samples))
        }
        PcmCoding::MsAdpcm(block, factors) => blocks(bytes, *block, channels, count, |bytes, samples| {
            ms_block(bytes, channels, factors, samples);
        }),
    }
}

fn samples<const BYTES: usize>(bytes: &[u8], count: usize, convert: impl Fn([u8; BYTES]) -> f32) -> Vec<f32> {
    bytes.as_chunks::<BYTES>().0.iter().take(count).map(|&sample| convert(sample)).collect()
}

/// Returns a sample stored in the highest bits of a 32-bit number, lowest byte first.
fn wide(bytes: [u8; 4]) -> f32 {
    (f64::from(i32::from_le_bytes(bytes)) / 2_147_483_648.0) as f32
}

/// Returns a 13-bit sample in the highest bits of 16.
fn linear_of_a_law(byte: u8) -> i16 {
    let byte = byte ^ 0x55;
    let (exponent, mantissa) = (byte >> 4 & 7, i16::from(byte & 0xF));
    let magnitude = match exponent {
        0 => (mantissa << 4) + 8,
        _ => ((mantissa << 4) + 0x108) << (exponent - 1),
    };
    if byte & 0x80 == 0 { -magnitude } else { magnitude }
}

/// Returns a 14-bit sample in the highest bits of 16.
fn linear_of_mu_law(byte: u8) -> i16 {
    const BIAS: i16 = 0x84;
    let byte = !byte;
    let (exponent, mantissa) = (byte >> 4 & 7, i16::from(byte & 0xF));
    let magnitude = (((mantissa << 3) + BIAS) << exponent) - BIAS;
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Decodes ADPCM blocks; each block appends frames, as 16-bit samples.
fn blocks(
    bytes: &[u8],
    block: AdpcmBlock,
    channels: usize,
    count: usize,
    mut decode: impl FnMut(&[u8], &mut Vec<i16>),
) -> Vec<f32> {
    let mut samples = Vec::with_capacity(count);
    let mut decoded = Vec::new();
    for bytes in bytes.chunks(block.bytes.into()) {
        decoded.clear();
        decode(bytes, &mut decoded);
        let frames = block.frames(bytes.len() as u64, channels as u16) as usize;
        samples.extend(decoded.iter().take(frames * channels).map(|&sample| f32::from(sample) / SCALE));
    }
    samples.truncate(count);
    samples
}

/// Decodes an IMA block: per channel a sample, the index in the step table, and an unused byte; then four
/// bytes for each channel in turn, low nibble first.
fn ima_block(bytes: &[u8], channels: usize, samples: &mut Vec<i16>) {
    const HEADER_BYTES: usize = 4;
    const GROUP_BYTES: usize = 4;
    const GROUP_FRAMES: usize = 2 * GROUP_BYTES;
    let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES * channels) else { return };
    let mut states: Vec<(i32, i32)> = Vec::with_capacity(channels);
    for head in header.chunks_exact(HEADER_BYTES) {
        let sample = i16::from_le_bytes([head[0], head[1]]);
        states.push((sample.into(), i32::from(head[2]).min(88)));
        samples.push(sample);
    }
    for group in rest.chunks(GROUP_BYTES * channels) {
        let start = samples.len();
        samples.resize(start + GROUP_FRAMES * channels, 0);
        for (channel, bytes) in group.chunks(GROUP_BYTES).enumerate() {
            let codes = bytes.iter().flat_map(|&byte| [byte & 0xF, byte >> 4]);
            for (frame, code) in codes.enumerate() {
                samples[start + frame * channels + channel] = ima_sample(&mut states[channel], code);
            }
        }
    }
}

#[rustfmt::skip]
const IMA_STEPS: [i32; 89] = [
    7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 19, 21, 23, 25, 28, 31, 34, 37, 41, 45, 50, 55, 60, 66, 73, 80, 88,
    97, 107, 118, 130, 143, 157, 173, 190, 209, 230, 253, 279, 307, 337, 371, 408, 449, 494, 544, 598, 658,
    724, 796, 876, 963, 1060, 1166, 1282, 1411, 1552, 1707, 1878, 2066, 2272, 2499, 2749, 3024, 3327, 3660,
    4026, 4428, 4871, 5358, 5894, 6484, 7132, 7845, 8630, 9493, 10442, 11487, 12635, 13899, 15289, 16818,
    18500, 20350, 22385, 24623, 27086, 29794, 32767,
];

fn ima_sample((sample, place): &mut (i32, i32), code: u8) -> i16 {
    const MOVES: [i32; 8] = [-1, -1, -1, -1, 2, 4, 6, 8];
    let step = IMA_STEPS[*place as usize];
    let bit = |number: u8, part: i32| if code >> number & 1 == 1 { part } else { 0 };
    let difference = (step >> 3) + bit(2, step) + bit(1, step >> 1) + bit(0, step >> 2);
    let moved = if code & 8 == 0 { *sample + difference } else { *sample - difference };
    *sample = moved.clamp(i16::MIN.into(), i16::MAX.into());
    *place = (*place + MOVES[usize::from(code & 7)]).clamp(0, 88);
    *sample as i16
}

/// Prediction state for a channel in Microsoft ADPCM.
#[derive(Clone, Copy, Default)]
struct Prediction {
    factors: [i32; 2],
    step: i32,
    /// The last sample, and the sample before.
    last: [i32; 2],
}

/// Decodes a Microsoft ADPCM block: the factor index, the step, the second and the first sample for every
/// channel; then nibbles for each channel in turn, high nibble first.
fn ms_block(bytes: &[u8], channels: usize, factors: &[[i16; 2]], samples: &mut Vec<i16>) {
    const HEADER_BYTES: usize = 7;
    let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES * channels) else { return };
    let (numbers, shorts) = header.split_at(channels);
    let short = |place: usize| i32::from(i16::from_le_bytes([shorts[2 * place], shorts[2 * place + 1]]));
    let mut predictions = vec![Prediction::default(); channels];
    for (channel, prediction) in predictions.iter_mut().enumerate() {
        let pair = factors.get(usize::from(numbers[channel])).copied().unwrap_or_default();
        prediction.factors = pair.map(i32::from);
        prediction.step = short(channel);
        prediction.last = [short(channels + channel), short(2 * channels + channel)];
    }
    samples.extend(predictions.iter().map(|prediction| prediction.last[1] as i16));
    samples.extend(predictions.iter().map(|prediction| prediction.last[0] as i16));
    let codes = rest.iter().flat_map(|&byte| [byte >> 4, byte & 0xF]);
    for (place, code) in codes.enumerate() {
        samples.push(predictions[place % channels].next(code));
    }
}

impl Prediction {
    fn next(&mut self, code: u8) -> i16 {
        const GROWTH: [i32; 16] =
            [230, 230, 230, 230, 307, 409, 512, 614, 768, 614, 512, 409, 307, 230, 230, 230];
        const STEP_MIN: i32 = 16;
        let signed = i32::from(code) - if code & 8 == 0 { 0 } else { 16 };
        let expected = (self.last[0] * self.factors[0] + self.last[1] * self.factors[1]) >> 8;
        let sample = expected.saturating_add(signed.saturating_mul(self.step));
        let sample = sample.clamp(i16::MIN.into(), i16::MAX.into());
        self.last = [sample, self.last[0]];
        self.step = (GROWTH[usize::from(code)].saturating_mul(self.step) >> 8).max(STEP_MIN);
        sample as i16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithmic_bytes_have_the_values_of_their_standard() {
        let a_law = [(0xD5, 8), (0x55, -8), (0x2A, -32_256), (0xAA, 32_256), (0xC5, 264)];
        assert!(a_law.into_iter().all(|(byte, value)| linear_of_a_law(byte) == value));
        let mu_law = [(0xFF, 0), (0x7F, 0), (0x00, -32_124), (0x80, 32_124), (0xEF, 132)];
        assert!(mu_law.into_iter().all(|(byte, value)| linear_of_mu_law(byte) == value));
    }

    #[test]
    fn a_block_of_ima_has_the_samples_of_libsndfile() {
        let block = [
            100, 0, 20, 0, 12, 254, 40, 0, 121, 131, 193, 243, 8, 36, 210, 242, 63, 79, 222, 108, 69, 211,
            65, 104,
        ];
        let expected = [
            100, -500, 82, -542, 165, -504, 249, -191, 238, 19, 268, 210, 186, -172, 263, 83, 113, -611,
            -210, 483, 113, 1794, -518, 3027, 296, 1265, -1127, 1968, -3261, 3888, -5817, 3630, -1351, 6681,
        ];
        let mut samples = Vec::new();
        ima_block(&block, 2, &mut samples);
        assert_eq!(samples, expected);
    }

    #[test]
    fn a_block_of_microsoft_is_predicted_from_its_header() {
        let block = [0, 16, 0, 100, 0, 50, 0, 0x1F, 0x80];
        let mut samples = Vec::new();
        ms_block(&block, 1, &[[256, 0]], &mut samples);
        assert_eq!(samples, [50, 100, 116, 100, -28, -28]);
        samples.clear();
        ms_block(&block[..5], 1, &[[256, 0]], &mut samples);
        assert!(samples.is_empty(), "a cut header has no samples");
    }

    #[test]
    fn integers_stand_in_the_highest_bits_of_their_container() {
        for (bytes, value) in
            [([0, 0, 0, 64], 0.5), ([0, 0, 0, 0x80], -1.0), ([0, 0, 0xF0, 0x7F], 0.999_511_7)]
        {
            assert!((wide(bytes) - value).abs() < 1e-6, "{value}");
        }
    }
}
