//! Encodes speech as FLAC and WAV files, 16 bits, mono.

use std::io::{self, Cursor};

use flacenc::bitsink::ByteSink;
use flacenc::component::BitRepr;
use flacenc::config::Encoder;
use flacenc::error::Verify;
use flacenc::source::MemSource;

use crate::speech::SAMPLE_RATE_HZ;

const BITS: u16 = 16;

/// Encodes samples as FLAC, with the fixed predictors only: integer arithmetic, the same on every machine.
///
/// # Errors
/// If the encoder rejects the samples.
pub(crate) fn encode_flac(samples: &[i16]) -> io::Result<Vec<u8>> {
    let mut settings = Encoder::default();
    settings.subframe_coding.use_lpc = false;
    let settings = settings.into_verified().map_err(|(_, error)| io::Error::other(error.to_string()))?;
    let samples: Vec<i32> = samples.iter().map(|sample| i32::from(*sample)).collect();
    let source = MemSource::from_samples(&samples, 1, usize::from(BITS), SAMPLE_RATE_HZ as usize);
    let mut stream = flacenc::encode_with_fixed_block_size(&settings, source, settings.block_size)
        .map_err(|error| io::Error::other(error.to_string()))?;
    // RFC 9639, section 8.2: the last block does not count. With two sizes, readers expect variable blocks.
    let block = settings.block_size;
    let sizes = stream.stream_info_mut().set_block_sizes(block, block);
    sizes.map_err(|error| io::Error::other(error.to_string()))?;
    let mut sink = ByteSink::new();
    stream.write(&mut sink).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(sink.into_inner())
}

/// Encodes samples as WAV.
///
/// # Errors
/// None in memory; the signature follows the encoder.
pub(crate) fn encode_wav(samples: &[i16]) -> io::Result<Vec<u8>> {
    let spec = hound::WavSpec {
        channels: 1,
        sample_rate: SAMPLE_RATE_HZ,
        bits_per_sample: BITS,
        sample_format: hound::SampleFormat::Int,
    };
    let mut file = Cursor::new(Vec::with_capacity(2 * samples.len() + 64));
    let mut writer = hound::WavWriter::new(&mut file, spec).map_err(io::Error::other)?;
    for sample in samples {
        writer.write_sample(*sample).map_err(io::Error::other)?;
    }
    writer.finalize().map_err(io::Error::other)?;
    Ok(file.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::speech::speak;
    use dflop_samples::media::{AudioLimits, decode_audio};

    #[test]
    fn both_formats_keep_every_sample() {
        let samples = speak(1.3, &mut Rng::new(5, 5));
        for file in [encode_flac(&samples).unwrap(), encode_wav(&samples).unwrap()] {
            let clip = decode_audio(&file, &AudioLimits::default()).unwrap();
            assert_eq!((clip.sample_rate_hz, clip.channels), (SAMPLE_RATE_HZ, 1));
            let decoded: Vec<i16> = clip.samples.iter().map(|sample| (sample * 32_768.0) as i16).collect();
            assert!(decoded == samples);
        }
    }
}
