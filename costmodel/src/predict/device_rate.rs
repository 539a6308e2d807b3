//! States what a device sustains on each module, in FLOPs per microsecond.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::module::Module;

const NANOSECONDS_PER_MICROSECOND: u128 = 1000;

/// Rate that one device sustains on each module, in FLOPs per microsecond (10⁶ FLOP/s).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceRate {
    /// Rate on [`Module::Vision`].
    pub vision_flops_per_us: NonZeroU64,
    /// Rate on [`Module::Audio`].
    pub audio_flops_per_us: NonZeroU64,
    /// Rate on [`Module::Llm`].
    pub llm_flops_per_us: NonZeroU64,
}

/// Row of the device table.
struct Device {
    name: &'static str,
    /// Published dense peak.
    peak_flops_per_us: u64,
    /// Share of the peak that encoders are assumed to sustain.
    encoder_percent: u64,
    /// Share of the peak that the LLM is assumed to sustain.
    llm_percent: u64,
}

/// Known devices. GPUs: dense BF16 peak of NVIDIA's data sheets, SXM form. `cpu`: one core of 2.5 GHz with
/// two 8-wide f32 fused multiply-adds per cycle.
const DEVICES: [Device; 4] = [
    Device { name: "a100", peak_flops_per_us: 312_000_000, encoder_percent: 40, llm_percent: 50 },
    Device { name: "h100", peak_flops_per_us: 989_000_000, encoder_percent: 30, llm_percent: 40 },
    Device { name: "h200", peak_flops_per_us: 989_000_000, encoder_percent: 30, llm_percent: 40 },
    Device { name: "cpu", peak_flops_per_us: 80_000, encoder_percent: 50, llm_percent: 50 },
];

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
    /// Returns the assumed rate of a device, one of [`DeviceRate::preset_names`].
    ///
    /// Published peak times an assumed utilization: 40 % on encoders and 50 % on the LLM for `a100`, 30 % and
    /// 40 % for `h100` and `h200`, 50 % for `cpu`, which is a single core. **A guess until measured.**
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] with the known names, if there is none.
    pub fn preset(name: &str) -> Result<Self> {
        for device in &DEVICES {
            if device.name == name {
                let encoder = share(device.peak_flops_per_us, device.encoder_percent);
                return Ok(Self {
                    vision_flops_per_us: encoder,
                    audio_flops_per_us: encoder,
                    llm_flops_per_us: share(device.peak_flops_per_us, device.llm_percent),
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

    /// Returns the rate on one module, in FLOPs per microsecond.
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

const fn share(peak: u64, percent: u64) -> NonZeroU64 {
    match NonZeroU64::new(peak / 100 * percent) {
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
        assert_eq!(message, "unknown device `tpu`, known are a100, h100, h200, cpu");
        for name in DeviceRate::preset_names() {
            assert!(DeviceRate::preset(name).is_ok());
        }
    }
}
