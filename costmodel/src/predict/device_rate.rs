//! States the sustained device rate for each module, in FLOPs per microsecond.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::Module;
use crate::error::{Error, Result};

const NANOSECONDS_PER_MICROSECOND: u128 = 1000;

/// Sustained rate on a device for each module, in FLOPs per microsecond (10⁶ FLOP/s).
///
/// FLOPs are executed FLOPs: what a [`Recomputation`](crate::flops::Recomputation) repeats counts, at the
/// same rate as everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceRate {
    /// Rate on [`Module::Vision`].
    pub vision_flops_per_us: NonZeroU64,
    /// Rate on [`Module::Audio`].
    pub audio_flops_per_us: NonZeroU64,
    /// Rate on [`Module::Llm`].
    pub llm_flops_per_us: NonZeroU64,
}

/// Row in the device table.
struct Device {
    name: &'static str,
    /// Published dense peak.
    peak_flops_per_us: u64,
    /// Encoder rate, in thousandths of the peak.
    encoder_permille: u64,
    /// LLM rate, in thousandths of the peak.
    llm_permille: u64,
}

/// Known devices. GPUs: dense BF16 peak from NVIDIA's data sheets, SXM form. `cpu`: a 2.5 GHz core with two
/// 8-wide f32 fused multiply-adds per cycle, half of which is assumed.
const DEVICES: [Device; 5] = [
    gpu("a100", 312_000_000),
    gpu("h100", 989_400_000),
    gpu("h200", 989_400_000),
    gpu("b200", 2_250_000_000),
    Device { name: "cpu", peak_flops_per_us: 80_000, encoder_permille: 500, llm_permille: 500 },
];

/// Returns a GPU's row: the same shares of the peak on all GPUs.
///
/// # Source
/// Own measurement: Qwen2.5-VL-7B in eager `PyTorch` 2.11 (transformers 5.17, bf16, variable-length
/// `FlashAttention`, every layer recomputed) on one H200 SXM. 80 packed microbatches with 5,132 tokens and
/// 12,165 patches each took 28.1 us per patch in the tower and 125.5 us per token in the LLM, forward,
/// backward and recomputation, with a median error of 1.4 %. Executed FLOPs over these times are 190 TFLOP/s,
/// 19.2 % of the peak, and 450 TFLOP/s, 45.5 %. The forward pass took 26 % of the tower time and 25 % of the
/// LLM time, as for executed FLOPs, so training without recomputation runs at the same rate.
///
/// Other GPUs, the audio encoder and other models are not measured, but assumed to reach the same shares.
const fn gpu(name: &'static str, peak_flops_per_us: u64) -> Device {
    Device { name, peak_flops_per_us, encoder_permille: 192, llm_permille: 455 }
}

const DEVICE_NAMES: [&str; DEVICES.len()] = {
    let mut names = [""; DEVICES.len()];
    let mut device = 0;
    while device < DEVICES.len() {
        names[device] = DEVICES[device].name;
        device += 1;
    }
    names
};

impl DeviceRate {
    /// Returns the stated rate for a device by a name in [`DeviceRate::preset_names`].
    ///
    /// Published dense peak times a share that was measured on one H200 with Qwen2.5-VL-7B in eager
    /// `PyTorch`: 19.2 % on encoders and 45.5 % on the LLM, for executed FLOPs. Other GPUs are assumed to
    /// reach the same shares, `cpu`, which is a single core, 50 %. **A guess on any other device, model and
    /// framework.**
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] with the known names, if the name is unknown.
    pub fn preset(name: &str) -> Result<Self> {
        for device in &DEVICES {
            if device.name == name {
                let encoder = share(device.peak_flops_per_us, device.encoder_permille);
                return Ok(Self {
                    vision_flops_per_us: encoder,
                    audio_flops_per_us: encoder,
                    llm_flops_per_us: share(device.peak_flops_per_us, device.llm_permille),
                });
            }
        }
        Err(Error::UnknownDevice { name: name.to_owned(), known: DEVICE_NAMES.join(", ") })
    }

    /// Returns the names that [`DeviceRate::preset`] knows.
    #[must_use]
    pub const fn preset_names() -> &'static [&'static str] {
        &DEVICE_NAMES
    }

    /// Returns the rate for a module, in FLOPs per microsecond.
    #[must_use]
    pub const fn flops_per_us(&self, module: Module) -> NonZeroU64 {
        match module {
            Module::Vision => self.vision_flops_per_us,
            Module::Audio => self.audio_flops_per_us,
            Module::Llm => self.llm_flops_per_us,
        }
    }

    /// Converts FLOPs to nanoseconds, rounding up and saturating.
    pub(super) fn nanoseconds(&self, module: Module, flops: u128) -> u64 {
        let rate = self.flops_per_us(module).get();
        let scaled = flops.saturating_mul(NANOSECONDS_PER_MICROSECOND);
        // A division of 128 bits takes several times as long, and is rarely needed.
        match u64::try_from(scaled) {
            Ok(scaled) => scaled.div_ceil(rate),
            Err(_) => u64::try_from(scaled.div_ceil(u128::from(rate))).unwrap_or(u64::MAX),
        }
    }
}

const fn share(peak: u64, permille: u64) -> NonZeroU64 {
    match NonZeroU64::new(peak / 1000 * permille) {
        Some(rate) => rate,
        None => NonZeroU64::MIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_device_is_answered_with_the_known_ones() {
        let message = DeviceRate::preset("tpu").unwrap_err().to_string();
        assert_eq!(message, "unknown device `tpu`, known are a100, h100, h200, b200, cpu");
        for name in DeviceRate::preset_names() {
            assert!(DeviceRate::preset(name).is_ok());
        }
    }
}
