//! Generates audio with speech rhythm and speech spectrum, without meaning.
//!
//! A pulse train at a voice's pitch runs through three resonators, the vowel formants; noise replaces
//! consonants, silence pauses. The code uses sums and products only, so that every machine computes the same
//! samples.

use std::io;
use std::io::Cursor;

use flacenc::bitsink::ByteSink;
use flacenc::component::BitRepr;
use flacenc::config::Encoder;
use flacenc::error::Verify;
use flacenc::source::MemSource;

use crate::draws::Rng;

/// Sample rate.
const SAMPLE_RATE_HZ: u32 = 16_000;

const RATE: f64 = SAMPLE_RATE_HZ as f64;

/// First three formants in Hz, for five vowels.
///
/// # Source
/// Peterson and Barney, "Control methods used in a study of the vowels", 1952, table II, men.
const VOWELS: [[f64; 3]; 5] = [
    [730.0, 1090.0, 2440.0],
    [270.0, 2290.0, 3010.0],
    [300.0, 870.0, 2240.0],
    [530.0, 1840.0, 2480.0],
    [570.0, 840.0, 2410.0],
];
/// Formant bandwidths in Hz.
const BANDWIDTHS: [f64; 3] = [80.0, 100.0, 140.0];
/// Height of a pulse, chosen for vowels as loud as in a quiet recording.
const PULSE: f64 = 18_000.0;
/// Low-pass filter feedback for the source; the glottis smooths the pulses.
const ROUNDING: f64 = 0.86;
/// Background noise amplitude; full scale is 32,768.
const ROOM: f64 = 2.0;

/// Generates audio that lasts this many seconds.
pub(crate) fn speak(seconds: f64, rng: &mut Rng) -> Vec<i16> {
    let frames = (seconds * RATE) as usize;
    let pitch_hz = rng.range(90.0, 210.0);
    let mut samples = Vec::with_capacity(frames);
    while samples.len() < frames {
        if rng.chance(14) {
            hiss(&mut samples, rng.range(0.15, 0.5), 0.0, rng);
        }
        if rng.chance(60) {
            let loudness = rng.range(40.0, 250.0);
            hiss(&mut samples, rng.range(0.03, 0.09), loudness, rng);
        }
        vowel(&mut samples, pitch_hz * rng.range(0.85, 1.2), rng);
    }
    // The last sound may be longer than the remaining time.
    samples.truncate(frames);
    samples
}

/// Adds noise that swells and fades; with a loudness of 0, a pause with background noise.
fn hiss(samples: &mut Vec<i16>, seconds: f64, loudness: f64, rng: &mut Rng) {
    let frames = (seconds * RATE) as usize;
    for frame in 0..frames {
        let level = ROOM + loudness * swell(frame, frames);
        samples.push(to_sample(rng.range(-level, level)));
    }
}

/// Adds a vowel whose pitch falls by a tenth.
fn vowel(samples: &mut Vec<i16>, pitch_hz: f64, rng: &mut Rng) {
    let frames = (rng.range(0.08, 0.22) * RATE) as usize;
    let formants = VOWELS[rng.below(VOWELS.len())];
    let mut resonators = [0, 1, 2].map(|formant| Resonator::new(formants[formant], BANDWIDTHS[formant]));
    let (mut phase, mut source) = (0.0, 0.0);
    for frame in 0..frames {
        let age = frame as f64 / frames as f64;
        // Phase in pitch periods: a pulse when a period is complete.
        phase += pitch_hz * (1.0 - 0.1 * age) / RATE;
        let mut pulse = 0.0;
        if phase >= 1.0 {
            phase -= 1.0;
            pulse = PULSE * swell(frame, frames);
        }
        source = ROUNDING * source + (1.0 - ROUNDING) * pulse;
        let mut value = source;
        for resonator in &mut resonators {
            value = resonator.step(value);
        }
        samples.push(to_sample(value + rng.range(-ROOM, ROOM)));
    }
}

/// Returns a parabolic window: from 0 to 1 in the middle and back.
fn swell(frame: usize, frames: usize) -> f64 {
    let age = frame as f64 / frames as f64;
    4.0 * age * (1.0 - age)
}

fn to_sample(value: f64) -> i16 {
    value.clamp(-32_000.0, 32_000.0) as i16
}

/// A digital resonator with unit gain at 0 Hz.
///
/// # Source
/// Klatt, "Software for a cascade/parallel formant synthesizer", 1980, doi:10.1121/1.383940, equation 1.
#[derive(Debug, Clone, Copy)]
struct Resonator {
    gain: f64,
    last: f64,
    last_but_one: f64,
    outputs: [f64; 2],
}

impl Resonator {
    fn new(frequency_hz: f64, bandwidth_hz: f64) -> Self {
        let radius = 1.0 - std::f64::consts::PI * bandwidth_hz / RATE;
        let square =
            (std::f64::consts::TAU * frequency_hz / RATE) * (std::f64::consts::TAU * frequency_hz / RATE);
        // `cos` of the standard library differs between machines; this series does not.
        let cosine = 1.0 - square / 2.0 * (1.0 - square / 12.0 * (1.0 - square / 30.0));
        // Poles inside the unit circle, so that the filter is stable.
        let (last, last_but_one) = (2.0 * radius * cosine, -radius * radius);
        Self { gain: 1.0 - last - last_but_one, last, last_but_one, outputs: [0.0; 2] }
    }

    fn step(&mut self, input: f64) -> f64 {
        let [before, before_that] = self.outputs;
        let output = self.gain * input + self.last * before + self.last_but_one * before_that;
        self.outputs = [output, before];
        output
    }
}

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
    use dflop_samples::media::{AudioLimits, decode_audio};

    use super::{speak, *};
    use crate::draws::Rng;

    #[test]
    fn a_clip_has_its_length_and_is_neither_silent_nor_clipped() {
        let samples = speak(6.0, &mut Rng::new(9, 9));
        assert_eq!(samples.len(), 96_000);
        let peak = samples.iter().map(|sample| sample.unsigned_abs()).max().unwrap();
        assert!((1_000..20_000).contains(&peak), "{peak}");
    }

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
