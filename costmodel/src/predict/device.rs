//! Describes known devices: rates, rate dependence on matrix width and TP degree, memory and links.
//!
//! A [`DeviceRate`] is a constant per module. A matrix shard is narrower than the matrix, and a GPU is slower
//! on narrow matrices: each product writes its outputs once, however few terms are summed for each, so a
//! product over `w` terms takes a time in proportion to `w + w0`, and the rate is in proportion to
//! `w / (w + w0)`. Norms and residual additions run on whole rows on every rank in a TP group, so they do not
//! become faster with the group size. Softmax attention is divided by heads, whose width does not change.
//!
//! # Source
//! The form and `w0` on Hopper: products with 8,192 x 8,192 outputs over 256 to 16,384 terms on an H800 SXM,
//! 386 to 766 TFLOP/s, in `benchmark/matmul/README.md` of `tile-ai/tilelang`, met within 1.5 %; the H100
//! product table in `xla/service/gpu/model/matmul_interpolator_data.h` of `openxla/xla` is met within 11 %
//! from 256 to 4,096 terms. Other devices have `w0` in proportion to FLOPs per byte of memory bandwidth, with
//! 785 TFLOP/s on Hopper, 271 TFLOP/s on an A100 (cuBLAS on 8,192-wide matrices) and 1,785 TFLOP/s on a B200,
//! which is assumed to reach the same share of its peak as Hopper. Product tiles and waves: NVIDIA, "Matrix
//! Multiplication Background User's Guide", 2023.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::Module;
use crate::error::{Error, Result};

const NANOSECONDS_PER_MICROSECOND: u128 = 1000;
/// Width at which the stated encoder rate holds: the measured tower's hidden size.
const ENCODER_WIDTH: f64 = 1280.0;
/// Width at which the stated LLM rate holds: the measured LLM's hidden size.
const LLM_WIDTH: f64 = 3584.0;
/// Elements that a layer's norms, residual additions and dropout read and write per token and unit of hidden
/// size, forward and backward.
///
/// # Source
/// Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
/// arXiv:2205.05198, table 4: dividing them over 8 ranks saves 0.6 ms in a layer with hidden size 6,144 on
/// 8,192 tokens, on A100; that is 27 bytes at memory bandwidth.
const REPLICATED_ELEMENTS: f64 = 13.5;

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

/// Known device, with what a planner needs in addition to the rates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DevicePreset {
    rate: DeviceRate,
    memory: Memory,
    /// Width at which a matrix runs at half the rate for very wide matrices.
    half_rate_width: f64,
    links: Option<DeviceLinks>,
}

/// Device links within a node and between nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceLinks {
    /// Link inside a node.
    pub nvlink: DeviceLink,
    /// Link between nodes.
    pub infiniband: DeviceLink,
}

/// Link with the speed that collectives achieve, not the nominal rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceLink {
    /// Bandwidth per device and direction.
    pub bytes_per_second: f64,
    /// Time before the first byte arrives.
    pub latency_seconds: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Memory {
    /// Capacity in GiB; `None` for a device whose memory is not fixed.
    gib: Option<u32>,
    bytes_per_second: f64,
    /// Bytes per activation element.
    element_bytes: f64,
}

/// Row in the device table.
#[derive(Clone, Copy)]
struct Device {
    name: &'static str,
    /// Published dense peak.
    peak_flops_per_us: u64,
    /// Encoder rate, in thousandths of the peak.
    encoder_permille: u64,
    /// LLM rate, in thousandths of the peak.
    llm_permille: u64,
    memory: Memory,
    half_rate_width: f64,
    links: Option<DeviceLinks>,
}

/// Known devices. GPUs: dense BF16 peak, memory capacity and bandwidth from NVIDIA's data sheets, SXM form,
/// with 80 GB for `a100`. `cpu`: a 2.5 GHz core with two 8-wide f32 fused multiply-adds per cycle, half of
/// which is assumed, a single DDR4-3200 channel, and no links.
const DEVICES: [Device; 5] = [
    gpu("a100", 312_000_000, (80, 2.039e12), 150.0, links(300e9, 25e9)),
    gpu("h100", 989_400_000, (80, 3.35e12), 262.0, links(450e9, 50e9)),
    gpu("h200", 989_400_000, (141, 4.8e12), 183.0, links(450e9, 50e9)),
    gpu("b200", 2_250_000_000, (180, 8e12), 250.0, links(900e9, 50e9)),
    Device {
        name: "cpu",
        peak_flops_per_us: 80_000,
        encoder_permille: 500,
        llm_permille: 500,
        memory: Memory { gib: None, bytes_per_second: 25.6e9, element_bytes: 4.0 },
        half_rate_width: 6.0,
        links: None,
    },
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
const fn gpu(
    name: &'static str,
    peak_flops_per_us: u64,
    (gib, bytes_per_second): (u32, f64),
    half_rate_width: f64,
    links: DeviceLinks,
) -> Device {
    Device {
        name,
        peak_flops_per_us,
        encoder_permille: 192,
        llm_permille: 455,
        memory: Memory { gib: Some(gib), bytes_per_second, element_bytes: 2.0 },
        half_rate_width,
        links: Some(links),
    }
}

/// Returns 80 % of the nominal bandwidths, per device and direction.
///
/// # Source
/// Nominal: NVLink 3, 4 and 5; one InfiniBand adapter with 200 Gb/s (A100) and 400 Gb/s (others) per GPU,
/// NVIDIA DGX A100, DGX H100 and DGX B200 user guides. All-reduce on 8 A100 reaches 235 of 300 GB/s, on 8
/// H200 without reduction in the switch 368 of 450: S. Bekman, "Machine Learning Engineering Open Book",
/// network. Four adapters with 200 Gb/s reach 85 of 100 GB/s: `NVIDIA/nccl-tests`, 119. Ring step latencies,
/// protocol Simple: `NVIDIA/nccl`, `src/graph/tuning.cc`.
const fn links(nvlink: f64, infiniband: f64) -> DeviceLinks {
    const ACHIEVED: f64 = 0.8;
    DeviceLinks {
        nvlink: DeviceLink { bytes_per_second: ACHIEVED * nvlink, latency_seconds: 3.4e-6 },
        infiniband: DeviceLink { bytes_per_second: ACHIEVED * infiniband, latency_seconds: 14e-6 },
    }
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

impl Device {
    fn named(name: &str) -> Result<Self> {
        let device = DEVICES.into_iter().find(|device| device.name == name);
        device.ok_or_else(|| Error::UnknownDevice { name: name.to_owned(), known: DEVICE_NAMES.join(", ") })
    }

    fn rate(self) -> DeviceRate {
        let encoder = share(self.peak_flops_per_us, self.encoder_permille);
        DeviceRate {
            vision_flops_per_us: encoder,
            audio_flops_per_us: encoder,
            llm_flops_per_us: share(self.peak_flops_per_us, self.llm_permille),
        }
    }
}

const fn share(peak: u64, permille: u64) -> NonZeroU64 {
    match NonZeroU64::new(peak / 1000 * permille) {
        Some(rate) => rate,
        None => NonZeroU64::MIN,
    }
}

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
        Device::named(name).map(Device::rate)
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

impl DevicePreset {
    /// Returns a known device by a name in [`DeviceRate::preset_names`]. **A guess until measured**: see
    /// [`DeviceRate::preset`].
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] with the known names, if the name is unknown.
    ///
    /// # Examples
    /// ```
    /// use dflop_costmodel::{DevicePreset, Module};
    ///
    /// # fn main() -> dflop_costmodel::Result<()> {
    /// let a100 = DevicePreset::named("a100")?;
    /// assert!(a100.efficiency(Module::Vision, 320.0) < 0.8 * a100.efficiency(Module::Vision, 1280.0));
    /// # Ok(())
    /// # }
    /// ```
    pub fn named(name: &str) -> Result<Self> {
        let device = Device::named(name)?;
        let Device { memory, half_rate_width, links, .. } = device;
        Ok(Self { rate: device.rate(), memory, half_rate_width, links })
    }

    /// Returns the stated rate for each module.
    #[must_use]
    pub const fn rate(&self) -> &DeviceRate {
        &self.rate
    }

    /// Returns the device links in an NVIDIA DGX; `None` if the device has no links.
    #[must_use]
    pub const fn links(&self) -> Option<DeviceLinks> {
        self.links
    }

    /// Returns the nominal memory capacity in GiB; `None` for `cpu`.
    #[must_use]
    pub fn memory_gib(&self) -> Option<f64> {
        self.memory.gib.map(f64::from)
    }

    /// Returns the rate on matrices with a local width, divided by the module's stated rate.
    ///
    /// 1 for hidden sizes of 1,280 in encoders and 3,584 in an LLM; rises with the width to a limit.
    ///
    /// - `width`: the smaller matrix dimension on one rank in a TP group, above 0
    #[must_use]
    pub fn efficiency(&self, module: Module, width: f64) -> f64 {
        let reference = match module {
            Module::Vision | Module::Audio => ENCODER_WIDTH,
            Module::Llm => LLM_WIDTH,
        };
        let rate = |width: f64| width / (width + self.half_rate_width);
        rate(width) / rate(reference)
    }

    /// Returns the extra nanoseconds per token that a layer's norms and residual additions take in a TP group
    /// compared with dividing them over the ranks, forward and backward; 0 at TP degree 1.
    pub(super) fn replicated_ns(&self, hidden: u32, tp: u32) -> f64 {
        let bytes = REPLICATED_ELEMENTS * self.memory.element_bytes * f64::from(hidden);
        bytes / self.memory.bytes_per_second * 1e9 * (1.0 - 1.0 / f64::from(tp.max(1)))
    }

    /// Returns the nanoseconds to read the weights for all experts in a layer and write the gradients, once
    /// for each product; few tokens share them, unlike other weight matrices.
    ///
    /// # Source
    /// Williams et al., "Roofline", 2009, CACM 52(4): a product takes at least the time for its bytes. The
    /// time is added to the FLOP time, as the output time is.
    pub(super) fn expert_read_ns(&self, weights: f64) -> f64 {
        const PRODUCTS: f64 = 3.0;
        PRODUCTS * weights * self.memory.element_bytes / self.memory.bytes_per_second * 1e9
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

    fn presets() -> impl Iterator<Item = DevicePreset> {
        DeviceRate::preset_names().iter().map(|name| DevicePreset::named(name).unwrap())
    }

    #[test]
    fn every_device_rate_has_a_preset_with_the_same_rate() {
        for name in DeviceRate::preset_names() {
            let preset = DevicePreset::named(name).unwrap();
            assert_eq!(*preset.rate(), DeviceRate::preset(name).unwrap());
            assert_eq!(preset.links().is_some(), *name != "cpu");
            assert_eq!(preset.memory_gib().is_some(), *name != "cpu");
        }
        assert!(matches!(DevicePreset::named("tpu"), Err(Error::UnknownDevice { .. })));
    }

    #[test]
    fn efficiency_rises_with_the_width_and_is_one_where_the_stated_rate_holds() {
        for preset in presets() {
            for module in Module::ALL {
                let of = |width: u32| preset.efficiency(module, width.into());
                assert!((1..20_000).all(|width| of(width) < of(width + 1)));
                let reference = if module == Module::Llm { 3584 } else { 1280 };
                assert!((of(reference) - 1.0).abs() < 1e-12);
                // No width is faster than the limit: half the limit is reached at `half_rate_width`.
                let limit = 2.0 * preset.efficiency(module, preset.half_rate_width);
                assert!(of(1_000_000_000) < limit && limit < 1.3);
            }
        }
    }

    /// TFLOP/s by the number of terms: `benchmark/matmul/README.md` of `tile-ai/tilelang`, H800 SXM.
    #[test]
    fn the_curve_of_hopper_meets_its_measurements() {
        let measured = [
            (256.0, 386.0),
            (512.0, 520.0),
            (1024.0, 628.0),
            (2048.0, 705.0),
            (4096.0, 736.0),
            (8192.0, 758.0),
            (16384.0, 766.0),
        ];
        let h100 = DevicePreset::named("h100").unwrap();
        for (terms, teraflops) in measured {
            let [own, widest] = [terms, 1e12].map(|width| h100.efficiency(Module::Llm, width));
            let error = 785.0 * own / widest / teraflops - 1.0;
            assert!(error.abs() < 0.015, "{terms}: {error}");
        }
    }

    #[test]
    fn whole_rows_cost_nothing_extra_on_one_rank_and_most_on_many() {
        for preset in presets() {
            let [one, two, eight] = [1, 2, 8].map(|tp| preset.replicated_ns(1152, tp));
            assert!(one.abs() < 1e-12 && 0.0 < two && two < eight);
        }
        // Table 4 of the source: 0.6 ms on 8,192 tokens.
        let saved_ns = DevicePreset::named("a100").unwrap().replicated_ns(6144, 8) * 8192.0;
        assert!((saved_ns / 0.6e6 - 1.0).abs() < 0.05, "{saved_ns}");
    }
}
