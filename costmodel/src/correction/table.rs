//! Correction tables: a factor per module and shape bin, with version, step and digest.
//!
//! Measured microbatch times, from which tables are learned, and the constants besides the samples.

use crate::Module;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Factor that changes nothing; factors are fractions of this value.
pub const FACTOR_ONE: u32 = 1 << 16;
/// Maximum factor; the minimum is the reciprocal.
pub const FACTOR_MAX: u32 = 16;

/// Factors on predicted times, in force on all ranks from a given step on.
///
/// In JSON only factors other than 1 are listed, as `[bin, factor]`; reading checks the digest.
///
/// # Examples
/// ```
/// use dflop_costmodel::{CorrectionTable, FACTOR_ONE, Module};
///
/// # fn main() -> dflop_costmodel::Result<()> {
/// let table = CorrectionTable::new(1, 64, [(Module::Llm, 1000, 3 * FACTOR_ONE / 2)])?;
/// assert_eq!(table.apply(Module::Llm, 1001, 2_000), 3_000); // the same bin
/// assert_eq!(table.apply(Module::Vision, 1001, 2_000), 2_000);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "TableText", into = "TableText")]
pub struct CorrectionTable {
    version: u64,
    effective_step: u64,
    factors: Box<[[u32; BINS]; 3]>,
    /// Microbatch constants by module, if they were learned.
    constants: [Option<MicrobatchConstants>; 3],
    /// Constants for all modules together.
    whole: Option<MicrobatchConstants>,
}

/// Serialized form of a table.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableText {
    version: u64,
    effective_step: u64,
    bins_per_octave: u32,
    factor_one: u32,
    modules: BTreeMap<Module, Vec<(usize, u32)>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    constants: BTreeMap<Module, MicrobatchConstants>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    whole: Option<MicrobatchConstants>,
    digest: String,
}

impl CorrectionTable {
    /// Creates a table with factors for modules and sizes; sizes are tokens inside the module.
    ///
    /// # Errors
    /// [`Error::Correction`] for a factor above [`FACTOR_MAX`] or below the reciprocal.
    pub fn new(
        version: u64,
        effective_step: u64,
        factors: impl IntoIterator<Item = (Module, u64, u32)>,
    ) -> Result<Self> {
        let mut table = Self::blank(version, effective_step);
        for (module, size, factor) in factors {
            table.set(module, bin(size), factor)?;
        }
        Ok(table)
    }

    /// Returns the version; later tables have higher versions.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Returns the first step that is planned with the table.
    #[must_use]
    pub const fn effective_step(&self) -> u64 {
        self.effective_step
    }

    /// Returns the factor for a size, as a fraction of [`FACTOR_ONE`].
    #[must_use]
    pub fn factor(&self, module: Module, size: u64) -> u32 {
        self.factors[module as usize][bin(size)]
    }

    /// Returns the corrected time in nanoseconds, rounded to the nearest integer, saturating.
    #[must_use]
    pub fn apply(&self, module: Module, size: u64, ns: u64) -> u64 {
        // Half of the divisor is added to round to the nearest.
        let scaled = u128::from(ns) * u128::from(self.factor(module, size)) + u128::from(FACTOR_ONE / 2);
        u64::try_from(scaled / u128::from(FACTOR_ONE)).unwrap_or(u64::MAX)
    }

    /// Returns a module's learned microbatch constants, which replace the profile's.
    #[must_use]
    pub fn constants(&self, module: Module) -> Option<MicrobatchConstants> {
        self.constants[module as usize]
    }

    /// Returns the learned microbatch constants for all modules together.
    #[must_use]
    pub fn whole_constants(&self) -> Option<MicrobatchConstants> {
        self.whole
    }

    /// Whether two tables correct equally, regardless of version and step.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        self.factors == other.factors && self.constants == other.constants && self.whole == other.whole
    }

    /// Iterates over module, bin and factor for all factors other than 1.
    pub fn changes(&self) -> impl Iterator<Item = (Module, usize, u32)> + '_ {
        Module::ALL.into_iter().flat_map(move |module| {
            let factors = self.factors[module as usize].iter().copied().enumerate();
            factors
                .filter(|(_, factor)| *factor != FACTOR_ONE)
                .map(move |(bin, factor)| (module, bin, factor))
        })
    }

    /// Returns the digest over version, step and all factors; ranks with equal digests correct equally.
    #[must_use]
    pub fn digest(&self) -> u64 {
        // Only changes are hashed, not all bins, so that the digest does not depend on the number of bins.
        let mut bytes = Vec::new();
        for number in [self.version, self.effective_step, u64::from(BINS_PER_OCTAVE), u64::from(FACTOR_ONE)] {
            bytes.extend(number.to_le_bytes());
        }
        for (module, bin, factor) in self.changes() {
            bytes.push(module as u8);
            bytes.extend((bin as u32).to_le_bytes());
            bytes.extend(factor.to_le_bytes());
        }
        let constants = Module::ALL.into_iter().map(|module| self.constants(module));
        for (number, constants) in constants.chain([self.whole]).enumerate() {
            let Some(MicrobatchConstants { floor_ns, base_ns }) = constants else { continue };
            bytes.push(number as u8);
            bytes.extend([floor_ns.to_le_bytes(), base_ns.to_le_bytes()].as_flattened());
        }
        xxh3_64(&bytes)
    }

    /// Returns a table that corrects nothing.
    pub(super) fn blank(version: u64, effective_step: u64) -> Self {
        let factors = Box::new([[FACTOR_ONE; BINS]; 3]);
        Self { version, effective_step, factors, constants: [None; 3], whole: None }
    }

    pub(super) fn factor_of_bin(&self, module: Module, bin: usize) -> u32 {
        self.factors[module as usize][bin]
    }

    /// Sets the constants for a module, or for all modules together.
    pub(super) fn put_constants(&mut self, module: Option<Module>, constants: MicrobatchConstants) {
        match module {
            Some(module) => self.constants[module as usize] = Some(constants),
            None => self.whole = Some(constants),
        }
    }

    /// Sets a factor that the caller has limited to the valid range.
    pub(super) fn put(&mut self, module: Module, bin: usize, factor: u32) {
        self.factors[module as usize][bin] = factor;
    }

    fn set(&mut self, module: Module, bin: usize, factor: u32) -> Result<()> {
        let range = FACTOR_ONE / FACTOR_MAX..=FACTOR_ONE * FACTOR_MAX;
        if bin >= BINS || !range.contains(&factor) {
            let reason = format!(
                "bin {bin} of {module} with factor {factor}; bins are below {BINS}, factors in {range:?}"
            );
            return Err(Error::Correction { reason });
        }
        self.factors[module as usize][bin] = factor;
        Ok(())
    }
}

impl From<CorrectionTable> for TableText {
    fn from(table: CorrectionTable) -> Self {
        let mut modules: BTreeMap<Module, Vec<(usize, u32)>> = BTreeMap::new();
        for (module, bin, factor) in table.changes() {
            modules.entry(module).or_default().push((bin, factor));
        }
        Self {
            version: table.version,
            effective_step: table.effective_step,
            bins_per_octave: BINS_PER_OCTAVE,
            factor_one: FACTOR_ONE,
            modules,
            constants: Module::ALL
                .into_iter()
                .filter_map(|module| Some((module, table.constants(module)?)))
                .collect(),
            whole: table.whole,
            digest: format!("{:016x}", table.digest()),
        }
    }
}

impl TryFrom<TableText> for CorrectionTable {
    type Error = Error;

    fn try_from(text: TableText) -> Result<Self> {
        if (text.bins_per_octave, text.factor_one) != (BINS_PER_OCTAVE, FACTOR_ONE) {
            let reason = format!(
                "expected {BINS_PER_OCTAVE} bins per octave and factors of {FACTOR_ONE}, found {} and {}",
                text.bins_per_octave, text.factor_one
            );
            return Err(Error::Correction { reason });
        }
        let mut table = Self::blank(text.version, text.effective_step);
        for (module, factors) in &text.modules {
            for &(bin, factor) in factors {
                table.set(*module, bin, factor)?;
            }
        }
        for (&module, &constants) in &text.constants {
            table.put_constants(Some(module), constants);
        }
        table.whole = text.whole;
        let digest = format!("{:016x}", table.digest());
        if digest != text.digest {
            let reason = format!(
                "the digest of table {} is {digest}, expected {}; it was changed or damaged",
                text.version, text.digest
            );
            return Err(Error::Correction { reason });
        }
        Ok(table)
    }
}

/// Tables in a run, by effective step.
///
/// A table is agreed on in advance: no rank has planned the table's first step yet, so all ranks change over
/// at the same step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Corrections {
    tables: Vec<Arc<CorrectionTable>>,
}

impl Corrections {
    /// Adds a table that is in force from the table's step on.
    ///
    /// - `planned_steps`: number of steps that some rank may have planned already
    ///
    /// # Errors
    /// [`Error::Correction`] if the table's step is planned already, or the version or step is not after the
    /// last table's.
    pub fn accept(&mut self, table: CorrectionTable, planned_steps: u64) -> Result<()> {
        let (version, step) = (table.version(), table.effective_step());
        if step < planned_steps {
            let reason = format!(
                "table {version} starts at step {step}, but {planned_steps} steps are planned already"
            );
            return Err(Error::Correction { reason });
        }
        if let Some(last) = self.tables.last()
            && (version <= last.version() || step <= last.effective_step())
        {
            let (last_version, last_step) = (last.version(), last.effective_step());
            let reason = format!(
                "table {version} of step {step} does not follow table {last_version} of step {last_step}"
            );
            return Err(Error::Correction { reason });
        }
        self.tables.push(Arc::new(table));
        Ok(())
    }

    /// Returns the table that a step is planned with, if there is one.
    #[must_use]
    pub fn at_step(&self, step: u64) -> Option<&Arc<CorrectionTable>> {
        let in_force = self.tables.partition_point(|table| table.effective_step() <= step);
        in_force.checked_sub(1).map(|last| &self.tables[last])
    }
}

/// Number of bins between a size and its double; a bin's width is at most 1/8 of the bin's first size.
pub const BINS_PER_OCTAVE: u32 = 8;
/// Number of bins; sizes from 2³² on share the last bin.
pub const BINS: usize = 240;

const MANTISSA_BITS: u32 = BINS_PER_OCTAVE.trailing_zeros();

/// Returns the bin for a size: sizes below 16 have a bin each, larger sizes share eight per octave.
#[must_use]
pub fn bin(size: u64) -> usize {
    let size = size.min(u64::from(u32::MAX));
    if size < u64::from(BINS_PER_OCTAVE) {
        return size as usize;
    }
    let exponent = size.ilog2();
    let mantissa = (size >> (exponent - MANTISSA_BITS)) & u64::from(BINS_PER_OCTAVE - 1);
    (BINS_PER_OCTAVE * (exponent - MANTISSA_BITS + 1)) as usize + mantissa as usize
}

/// Returns a bin's size range: the first size, and the first size after it.
///
/// # Panics
/// If `bin` is not below [`BINS`].
#[must_use]
pub fn bin_sizes(bin: usize) -> [u64; 2] {
    assert!(bin < BINS, "bin {bin} of {BINS}");
    let (octave, mantissa) = (bin as u32 / BINS_PER_OCTAVE, bin as u64 % u64::from(BINS_PER_OCTAVE));
    if octave == 0 {
        return [mantissa, mantissa + 1];
    }
    let first = u64::from(BINS_PER_OCTAVE) + mantissa;
    [first << (octave - 1), (first + 1) << (octave - 1)]
}

/// Measured time of one microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// Measured module; `None` for all modules of the microbatch together.
    pub module: Option<Module>,
    /// Data-parallel rank that ran it.
    pub rank: u32,
    /// Measured forward and backward in nanoseconds.
    pub measured_ns: u64,
    /// Time of the microbatch besides its samples, **without** correction.
    pub constants: MicrobatchConstants,
    /// Samples with work for the module.
    pub samples: Vec<SampleTime>,
}

/// What a sample adds to a microbatch in one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SampleTime {
    /// The module.
    pub module: Module,
    /// Tokens inside the module.
    pub size: u64,
    /// Nanoseconds **without** correction, as [`crate::CostModel::predict_uncorrected`] returns them.
    pub ns: u64,
}

/// Microbatch time in addition to what the samples add; both 0 if unknown.
///
/// # Examples
/// ```
/// use dflop_costmodel::MicrobatchConstants;
///
/// let constants = MicrobatchConstants { floor_ns: 300, base_ns: 40 };
/// assert_eq!([0, 10, 500].map(|added_ns| constants.microbatch_ns(added_ns)), [0, 300, 540]);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MicrobatchConstants {
    /// Minimum time, set by the host that launches kernels; nanoseconds.
    pub floor_ns: u64,
    /// Device time in addition to any samples; nanoseconds.
    pub base_ns: u64,
}

impl MicrobatchConstants {
    /// Returns the time for a microbatch whose samples add this much, nanoseconds; 0 without work.
    #[must_use]
    pub fn microbatch_ns(&self, added_ns: u64) -> u64 {
        if added_ns == 0 { 0 } else { self.base_ns.saturating_add(added_ns).max(self.floor_ns) }
    }

    /// Adds the constants for work that runs afterwards on the same device; saturates.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            floor_ns: self.floor_ns.saturating_add(other.floor_ns),
            base_ns: self.base_ns.saturating_add(other.base_ns),
        }
    }

    /// Returns the share for some of the layers, rounded up.
    ///
    /// - `part`, `all`: a fraction; `all` of 0 counts as 1
    #[must_use]
    pub fn share(&self, [part, all]: [u64; 2]) -> Self {
        // Nanoseconds times layers may exceed 64 bits.
        let share = |ns: u64| (u128::from(ns) * u128::from(part)).div_ceil(u128::from(all.max(1))) as u64;
        Self { floor_ns: share(self.floor_ns), base_ns: share(self.base_ns) }
    }
}

/// Microbatch constants for a model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelConstants {
    /// Constants per module, in [`crate::CostModel::modules`] order; empty if unknown.
    pub modules: Vec<MicrobatchConstants>,
    /// Constants for all modules together, if they were learned from whole-microbatch times; `modules` does
    /// not count then.
    pub whole: Option<MicrobatchConstants>,
}

impl ModelConstants {
    /// Returns the microbatch time in each module, forward and backward. Constants for all modules together
    /// are part of the last module's time.
    ///
    /// - `added_ns`: time that the samples add, in module order, LLM last
    #[must_use]
    pub fn microbatch_ns(&self, mut added_ns: Vec<u64>) -> Vec<u64> {
        if let Some(whole) = &self.whole {
            let added = added_ns.iter().copied().fold(0, u64::saturating_add);
            if let Some(llm) = added_ns.last_mut() {
                *llm = llm.saturating_add(whole.microbatch_ns(added) - added);
            }
            return added_ns;
        }
        for (ns, constants) in added_ns.iter_mut().zip(&self.modules) {
            *ns = constants.microbatch_ns(*ns);
        }
        added_ns
    }

    /// Returns the part of the microbatch time in which launches limit a module, and the total microbatch
    /// time, in nanoseconds.
    ///
    /// - `microbatch_ns`: as returned by [`Self::microbatch_ns`]
    #[must_use]
    pub fn launch_limited_ns(&self, microbatch_ns: &[u64]) -> [u64; 2] {
        let all = microbatch_ns.iter().copied().fold(0, u64::saturating_add);
        let is_limited = |(ns, constants): &(&u64, &MicrobatchConstants)| **ns == constants.floor_ns;
        let limited = self.whole.map_or_else(
            || microbatch_ns.iter().zip(&self.modules).filter(is_limited).map(|(ns, _)| *ns).sum(),
            |whole| if all == whole.floor_ns { all } else { 0 },
        );
        [limited, all]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table() -> CorrectionTable {
        let factors = [(Module::Llm, 4000, 2 * FACTOR_ONE), (Module::Vision, 729, FACTOR_ONE / 2)];
        CorrectionTable::new(3, 128, factors).unwrap()
    }

    #[test]
    fn a_table_survives_json() {
        let json = serde_json::to_string(&table()).unwrap();
        assert!(
            json.contains("\"version\":3,\"effective_step\":128") && json.contains("\"llm\":[["),
            "{json}"
        );
        assert_eq!(serde_json::from_str::<CorrectionTable>(&json).unwrap(), table());
    }

    #[test]
    fn constants_survive_json_and_are_part_of_the_digest() {
        let (plain, mut learned) = (table(), table());
        let constants = MicrobatchConstants { floor_ns: 350_000_000, base_ns: 12_000_000 };
        learned.put_constants(Some(Module::Llm), constants);
        learned.put_constants(None, constants);
        assert!(learned.digest() != plain.digest() && !learned.is_like(&plain));
        let json = serde_json::to_string(&learned).unwrap();
        let read: CorrectionTable = serde_json::from_str(&json).unwrap();
        assert_eq!((&read, read.constants(Module::Llm)), (&learned, Some(constants)));
        assert_eq!((read.whole_constants(), read.constants(Module::Vision)), (Some(constants), None));
        let changed = json.replace("350000000", "350000001");
        assert!(
            serde_json::from_str::<CorrectionTable>(&changed).unwrap_err().to_string().contains("digest")
        );
        assert!(!serde_json::to_string(&plain).unwrap().contains("constants"), "as older versions wrote it");
    }

    #[test]
    fn a_changed_factor_is_found_by_the_digest() {
        let json = serde_json::to_string(&table()).unwrap();
        let changed = json.replace("131072", "131073");
        let error = serde_json::from_str::<CorrectionTable>(&changed).unwrap_err().to_string();
        assert!(error.contains("the digest of table 3 is"), "{error}");
        for (from, to) in [("\"bins_per_octave\":8", "\"bins_per_octave\":4"), ("131072", "0")] {
            assert!(serde_json::from_str::<CorrectionTable>(&json.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn times_are_scaled_and_rounded() {
        let table = table();
        assert_eq!(table.apply(Module::Llm, 4000, 1_000_001), 2_000_002);
        assert_eq!(table.apply(Module::Vision, 729, 3), 2);
        assert_eq!(table.apply(Module::Audio, 729, 3), 3);
        assert_eq!(table.apply(Module::Llm, 4000, u64::MAX), u64::MAX);
    }

    #[test]
    fn a_table_is_in_force_from_its_step_on_and_never_begins_in_the_past() {
        let mut corrections = Corrections::default();
        assert_eq!(corrections.at_step(5), None);
        let at = |version, step| CorrectionTable::new(version, step, []).unwrap();
        corrections.accept(at(1, 10), 8).unwrap();
        corrections.accept(at(2, 20), 20).unwrap();
        let versions = [9, 10, 19, 20, 99].map(|step| corrections.at_step(step).map(|table| table.version()));
        assert_eq!(versions, [None, Some(1), Some(1), Some(2), Some(2)]);
        for (table, planned) in [(at(3, 30), 31), (at(2, 40), 0), (at(4, 20), 0)] {
            assert!(matches!(corrections.accept(table, planned), Err(Error::Correction { .. })));
        }
    }

    #[test]
    fn bins_follow_each_other_without_gaps() {
        let mut end = 0;
        for number in 0..BINS {
            let [first, beyond] = bin_sizes(number);
            assert_eq!(first, end, "{number}");
            assert_eq!((bin(first), bin(beyond - 1)), (number, number));
            end = beyond;
        }
        assert_eq!(end, 1 << 32);
        assert_eq!(bin(u64::MAX), BINS - 1);
    }

    proptest! {
        #[test]
        fn every_size_lies_in_its_bin(size in any::<u32>()) {
            let [first, beyond] = bin_sizes(bin(size.into()));
            prop_assert!((first..beyond).contains(&u64::from(size)));
            prop_assert!(first < 8 || (beyond - first) * 8 <= first);
        }
    }

    #[test]
    fn constants_count_once_in_a_microbatch() {
        let constants = |floor_ns, base_ns| MicrobatchConstants { floor_ns, base_ns };
        let modules = vec![constants(100, 10), constants(0, 20)];
        let apart = ModelConstants { modules: modules.clone(), whole: None };
        assert_eq!(apart.microbatch_ns(vec![50, 300]), [100, 320]);
        assert_eq!(apart.microbatch_ns(vec![0, 300]), [0, 320], "no work in the encoder");
        assert_eq!(apart.launch_limited_ns(&[100, 320]), [100, 420]);
        let whole = ModelConstants { modules, whole: Some(constants(400, 30)) };
        assert_eq!(whole.microbatch_ns(vec![50, 300]), [50, 350]);
        assert_eq!(whole.microbatch_ns(vec![500, 300]), [500, 330]);
        assert_eq!(whole.launch_limited_ns(&[50, 350]), [400, 400]);
        assert_eq!(ModelConstants::default().microbatch_ns(vec![5, 0]), [5, 0]);
    }
}
