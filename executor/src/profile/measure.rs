//! Measures a model profile, module by module.
//!
//! Each module is measured twice. First the shapes are chosen ([`choose_points`]), with few runs each. Then
//! all shapes run in rounds, once per round, and only these runs go into the profile. So other load on the
//! machine affects all shapes alike, and a shape finds caches and memory as another shape left them, as in
//! training.
//!
//! The time limit applies across modules: a module gets a share of the remaining time, half by FLOPs, and
//! neither a shape nor a round begins that would end too late. The required minimum per module (weights, the
//! two smallest shapes and an optimizer step) may take longer; this is reported.

use std::time::Instant;

use dflop_costmodel::flops::{Attention, EncoderFlops, LlmFlops, Recomputation};
use dflop_costmodel::measure::{ChosenPoints, Grid, choose_points};
use dflop_costmodel::model::{EncoderSpec, LlmSpec};
use dflop_costmodel::profile::{Measurement, ModuleWidths, Part, ProfileFile};
use dflop_costmodel::tokens::EncoderWork;
use dflop_costmodel::{EncoderParameters, LlmParameters, Module};
use dflop_device::{Device, Dtype};

use super::clock::Clock;
use super::module_under_test::{ModuleUnderTest, Sequences};
use super::shape_source::{ShapeSource, TimeBudget};
use super::{MeasuredModel, gemm_peak_flops, module_kind};
use crate::error::{Error, Result};

/// Minimum number of rounds at which the runs from the choice are excluded from the profile.
const ROUNDS_MIN: usize = 3;
/// Module time fractions after which the first run over linear shapes, and the choice, ends; then the same
/// for attention.
const CHOOSING_SHARES: [[f64; 2]; 2] = [[0.5, 0.3], [0.8, 0.5]];
/// Bytes per parameter for weight, gradient and two optimizer moments.
const STATE_BYTES_PER_PARAMETER: u64 = 16;
/// Ratio between the peak bytes in a backward pass and the bytes saved by the forward pass.
const TRANSIENT: u64 = 2;
/// Number of products whose best rate is the peak.
const PEAK_RUNS: usize = 5;

/// Measurement options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasureOptions {
    /// Maximum sequence length and microbatch size inside a module, in tokens. Default: 4096.
    pub tokens_max: u32,
    /// Relative interpolation error below which no further shapes are measured. Default: 0.05.
    pub error_bound: f64,
    /// Wall time limit in seconds, shared by the modules; only weights, the two smallest shapes in each
    /// module and an optimizer step are measured regardless of duration. Default: 300.
    pub seconds_max: f64,
    /// Number of layers to run in each module, at most the number in the model. Default: all.
    pub layers: Option<usize>,
    /// Number of runs per shape that go into the profile. Default: 7.
    pub repeats: usize,
    /// Weight seed. Default: 0.
    pub seed: u64,
}

impl Default for MeasureOptions {
    fn default() -> Self {
        Self { tokens_max: 4096, error_bound: 0.05, seconds_max: 300.0, layers: None, repeats: 7, seed: 0 }
    }
}

/// Measurement report for a module.
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleReport {
    /// The module.
    pub module: Module,
    /// Number of layers that ran.
    pub layers: usize,
    /// Shapes for layers and for parts outside the layers, chosen by total time.
    pub whole: ChosenPoints,
    /// Attention lengths in one layer; `None` if all sequences have the same length.
    pub attention: Option<ChosenPoints>,
    /// Number of rounds over all shapes; with fewer than three, the profile also includes runs from the
    /// choice.
    pub rounds: usize,
    /// Number of tokens in the largest microbatch.
    pub tokens: u32,
    /// Bytes that the layers save per token from forward to backward.
    pub kept_bytes_per_token: u64,
    /// Executed FLOP/s, forward and backward, on the largest microbatch.
    pub flops: f64,
}

impl ModuleReport {
    /// Returns the maximum known error between measured shapes or lengths.
    #[must_use]
    pub fn error_max(&self) -> Option<f64> {
        let lengths = self.attention.as_ref().and_then(|lengths| lengths.error_max);
        self.whole.error_max.into_iter().chain(lengths).reduce(f64::max)
    }
}

/// Measured profile with a report per module.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredProfile {
    /// The profile that predictions are made from.
    pub file: ProfileFile,
    /// Reports by module, encoders first.
    pub modules: Vec<ModuleReport>,
    /// FLOP/s for a large matrix product, see [`gemm_peak_flops`].
    pub peak_flops: f64,
    /// Clock that measured.
    pub clock: Clock,
}

/// Measures all modules in a model; `progress` is called with single text lines.
///
/// # Errors
/// [`crate::Error::InsufficientMemory`] if a module would not fit into memory; stage errors.
pub fn measure<D: Device>(
    model: &MeasuredModel,
    device: &D,
    options: &MeasureOptions,
    mut progress: impl FnMut(&str),
) -> Result<MeasuredProfile> {
    let start = Instant::now();
    let peak_flops = gemm_peak_flops(device, PEAK_RUNS)?;
    progress(&format!("matrix products reach {:.1} GFLOP/s", peak_flops / 1e9));
    let clock = Clock::of(device);
    let mut file = ProfileFile { metadata: metadata(device, clock, peak_flops), ..ProfileFile::default() };
    let (mut reports, modules) = (Vec::new(), model.modules());
    let needs = modules.iter().map(|&module| need(model, options, module)).collect::<Result<Vec<_>>>()?;
    for (index, &module) in modules.iter().enumerate() {
        let left = options.seconds_max - start.elapsed().as_secs_f64();
        // Time that a module leaves unspent goes to the modules after it.
        let budget = TimeBudget::new(left * share(&needs[index..]));
        let (rows, report) = measure_module(model, device, options, module, budget, &mut progress)?;
        file.widths.extend(ModuleWidths::from_spec(&model.spec, module).map(|widths| (module, widths)));
        file.measurements.extend(rows);
        reports.push(report);
    }
    let taken = start.elapsed().as_secs_f64();
    if taken > options.seconds_max {
        let over = "weights, the two smallest shapes and an optimizer step of every module took longer";
        progress(&format!("took {taken:.1} s, not {:.1} s: {over}", options.seconds_max));
    }
    Ok(MeasuredProfile { file, modules: reports, peak_flops, clock })
}

/// Returns the FLOPs for a module's largest microbatch.
fn need(model: &MeasuredModel, options: &MeasureOptions, module: Module) -> Result<f64> {
    let sequences = Sequences::of(&model.spec, module)?;
    let layers = measured_layers(model, options, module);
    Ok(flops(model, module, layers as u32, sequences, options.tokens_max))
}

/// Returns the first module's share in the total time: half by need, half evenly.
fn share(needs: &[f64]) -> f64 {
    let by_need = needs[0] / needs.iter().sum::<f64>().max(1.0);
    f64::midpoint(by_need, 1.0 / needs.len() as f64)
}

fn measured_layers(model: &MeasuredModel, options: &MeasureOptions, module: Module) -> usize {
    let all = model.config.layers(module_kind(module));
    options.layers.map_or(all, |layers| layers.clamp(1, all))
}

fn measure_module<D: Device>(
    model: &MeasuredModel,
    device: &D,
    options: &MeasureOptions,
    module: Module,
    budget: TimeBudget,
    progress: &mut impl FnMut(&str),
) -> Result<(Vec<Measurement>, ModuleReport)> {
    let layers = measured_layers(model, options, module);
    let (state_bytes, _) = with_layers(model, module, layers as u32);
    check(module, layers, state_bytes)?;
    let mut subject = ModuleUnderTest::new(model, device, module, layers, options.seed)?;
    let sequences = subject.sequences;
    // At least one octave, so that the grid has two points.
    let (low, high) = (sequences.tokens_min(), options.tokens_max.max(2 * sequences.tokens_min()));
    let kept_bytes_per_token = subject.kept_bytes(low)? / u64::from(low);
    let kept = kept_bytes_per_token * u64::from(high);
    // Half of the state (weights and gradients) has been allocated by now.
    check(module, layers, state_bytes / 2 + TRANSIENT * kept)?;
    let grid = Grid::new(low, high, options.error_bound);
    let built_seconds = budget.taken();
    let budget = budget.rest();
    let ends = CHOOSING_SHARES.map(|shares| shares.map(|share| budget.share_end(share)));
    let mut source = ShapeSource::new(&mut subject, Part::Linear, ends[0]);
    let whole = choose_points(&grid, &mut source)?;
    let (mut chosen_rows, mut round_seconds) = (source.rows, source.run_seconds);
    progress(&format!("{module}: built in {built_seconds:.1} s, {}", summary(&whole, high, "shapes")));
    let mut lengths = None;
    if sequences.has_free_lengths() {
        let mut source = ShapeSource::new(&mut subject, Part::Attention, ends[1]);
        let chosen = choose_points(&grid, &mut source)?;
        progress(&format!("{module}: {}", summary(&chosen, high, "lengths of attention")));
        chosen_rows.append(&mut source.rows);
        round_seconds += source.run_seconds;
        lengths = Some(chosen);
    }
    let shapes: Vec<u32> = whole.points.iter().map(|point| point.0).collect();
    let attention: Vec<u32> =
        lengths.iter().flat_map(|lengths| &lengths.points).map(|point| point.0).collect();
    let mut rows = Vec::new();
    let mut rounds = 0;
    while rounds < options.repeats.max(1) && budget.has_room(round_seconds) {
        let start = Instant::now();
        rows.extend(round(&mut subject, &shapes, &attention)?);
        rows.extend(subject.measure_optimizer()?);
        rounds += 1;
        round_seconds = start.elapsed().as_secs_f64();
    }
    // Too few rounds for a median: runs from the choice are better than none.
    if rounds < ROUNDS_MIN {
        rows.extend(chosen_rows);
    }
    if rounds == 0 {
        rows.extend(subject.measure_optimizer()?);
    }
    progress(&format!("{module}: {rounds} rounds of {} shapes", shapes.len() + attention.len()));
    let &(tokens, microseconds) = whole.points.last().expect("a grid has a point");
    let flops = flops(model, module, layers as u32, sequences, tokens) / (microseconds * 1e-6);
    Ok((
        rows,
        ModuleReport {
            module,
            layers,
            whole,
            attention: lengths,
            rounds,
            tokens,
            kept_bytes_per_token,
            flops,
        },
    ))
}

/// Measures every shape once.
fn round<D: Device>(
    subject: &mut ModuleUnderTest<'_, D>,
    shapes: &[u32],
    lengths: &[u32],
) -> Result<Vec<Measurement>> {
    let mut rows = Vec::new();
    for &tokens in shapes {
        rows.extend(subject.measure(tokens)?.0);
    }
    for &tokens in lengths {
        rows.extend(subject.measure_attention(tokens)?.0);
    }
    Ok(rows)
}

/// Returns the complete state size, in bytes, for a module with `layers` layers, and the module spec if it is
/// an encoder.
fn with_layers(model: &MeasuredModel, module: Module, layers: u32) -> (u64, Option<EncoderSpec>) {
    let encoder = model.spec.encoders().find(|(of, ..)| *of == module);
    let encoder = encoder.map(|(_, encoder, _)| EncoderSpec { layers, ..encoder });
    let parameters = match &encoder {
        Some(encoder) => EncoderParameters::new(encoder, model.spec.llm.hidden).total(),
        None => LlmParameters::new(&LlmSpec { layers, ..model.spec.llm }).total(),
    };
    (STATE_BYTES_PER_PARAMETER * parameters, encoder)
}

/// Returns the FLOPs that forward and backward execute.
fn flops(model: &MeasuredModel, module: Module, layers: u32, sequences: Sequences, tokens: u32) -> f64 {
    let (batch, length) = sequences.packed(tokens);
    let flops = if let Some(encoder) = with_layers(model, module, layers).1 {
        let (items, tokens) = (u64::from(batch), u64::from(length));
        let pairs = items * tokens * tokens;
        let work = EncoderWork {
            items,
            encoder_tokens: items * tokens,
            tokens: 0,
            attention_pairs: pairs,
            window_pairs: pairs,
            padded_tokens: 0,
        };
        EncoderFlops::new(&encoder, model.spec.llm.hidden).training(&work, Recomputation::None)
    } else {
        let samples = vec![length; batch as usize];
        let llm = LlmFlops::new(&LlmSpec { layers, ..model.spec.llm });
        llm.training(&samples, Attention::Causal, Recomputation::None)
    };
    flops.total() as f64
}

fn summary(chosen: &ChosenPoints, high: u32, what: &str) -> String {
    let error =
        chosen.error_max.map_or_else(|| "not known".to_owned(), |error| format!("{:.1} %", 100.0 * error));
    let largest = chosen.points.last().map_or(0, |point| point.0);
    // The largest shape may be rounded down to complete sequences.
    let end = if largest.saturating_mul(2) > high {
        String::new()
    } else {
        format!(", none above {largest} tokens, as the time is over")
    };
    let count = chosen.points.len();
    format!("{count} {what}, largest error between them {error}, {} left open{end}", chosen.open)
}

fn metadata<D: Device>(device: &D, clock: Clock, peak_flops: f64) -> Vec<(String, String)> {
    [
        ("device", device.name()),
        ("executor", format!("dflop {}", env!("CARGO_PKG_VERSION"))),
        ("dtype", if device.storage() == Dtype::Bf16 { "bfloat16" } else { "float32" }.to_owned()),
        ("recompute", "none".to_owned()),
        ("clock", clock.name().to_owned()),
        ("gemm_peak_gflops", format!("{:.1}", peak_flops / 1e9)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .to_vec()
}

/// Maximum fraction of free memory for a measurement.
const SHARE: f64 = 0.9;

/// Returns the number of free bytes, if the system reports it.
fn free_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Fails if fewer than `needed_bytes` are free.
pub(super) fn check(module: Module, layers: usize, needed_bytes: u64) -> Result<()> {
    check_against(free_bytes(), module, layers, needed_bytes)
}

fn check_against(free_bytes: Option<u64>, module: Module, layers: usize, needed_bytes: u64) -> Result<()> {
    match free_bytes {
        Some(free_bytes) if needed_bytes as f64 > SHARE * free_bytes as f64 => {
            Err(Error::InsufficientMemory { module, layers, needed_bytes, free_bytes })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_before_it_is_tried() {
        assert!(
            check_against(None, Module::Llm, 28, u64::MAX).is_ok(),
            "a system that does not report free memory"
        );
        assert!(check_against(Some(1000), Module::Llm, 28, 900).is_ok());
        let error = check_against(Some(1000), Module::Llm, 28, 901).unwrap_err().to_string();
        assert!(
            error.starts_with("measuring 28 layers of llm takes about 901 bytes of memory, 1000 are free")
        );
        assert!(check(Module::Vision, 1, 0).is_ok());
    }
}
