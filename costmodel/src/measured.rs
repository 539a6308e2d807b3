//! Where times of a [`CostModel`] come from: a stated rate or a measured profile, and a correction on top.

use std::sync::Arc;

use crate::correction::{CorrectionTable, FACTOR_ONE};
use crate::error::Result;
use crate::flops::Attention;
use crate::model::ModelSpec;
use crate::module::{MODULES_MAX, Module, ModuleTimes};
use crate::predict::{CostModel, DeviceRate, Encoder};
use crate::profile::{Load, PredictedTime, Profile, ProfileOptions, ProfileTiming, ProfileWarning, whole_ns};
use crate::shape::SampleShape;
use crate::tokens::EncoderWork;

/// What turns work into time.
#[derive(Debug, Clone)]
pub(crate) enum Timing {
    /// FLOPs over a stated rate.
    Rate(DeviceRate),
    /// Curves through measured times.
    Profile(Arc<ProfileTiming>),
}

/// The cost of a sample with what is known of its error.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// One time per module, in the order of [`CostModel::modules`]; times are those of [`CostModel::annotate`].
    pub modules: Vec<PredictedTime>,
    /// Where the sample lies outside what was measured.
    pub warnings: Vec<ProfileWarning>,
}

/// Work of all modules of one sample.
struct SampleWork {
    encoders: [Option<(Module, EncoderWork)>; MODULES_MAX],
    tokens: u64,
    /// Tokens that are learned.
    targets: u64,
}

/// Sums over the samples of a pack, of one module.
#[derive(Default)]
struct Pack {
    work: EncoderWork,
    tokens: f64,
    targets: u64,
    /// Tokens, and attention, each sample's times its correction.
    corrected_tokens: f64,
    corrected_attention: f64,
}

impl CostModel {
    /// Builds a cost model whose times come from a measured profile; tokens are those of [`CostModel::new`].
    ///
    /// # Errors
    /// [`crate::Error::ProfileLacks`] if a module of the model was not measured at its tensor-parallel degree, or with
    /// other widths; says which points to measure.
    ///
    /// # Source
    /// An et al., PACMMOD 2026, arXiv:2603.25120, section 3.2.1: attention per original sample, linear work per packed
    /// sequence; interpolated as times, not as rates.
    pub fn from_profile(spec: ModelSpec, profile: &Profile, options: ProfileOptions) -> Result<Self> {
        let timing = ProfileTiming::new(&spec, profile, options)?;
        Ok(Self::with_timing(spec, Timing::Profile(Arc::new(timing))))
    }

    /// Returns what the whole profile leaves open; empty for a stated rate, which leaves everything open.
    #[must_use]
    pub fn profile_warnings(&self) -> &[ProfileWarning] {
        match &self.timing {
            Timing::Rate(_) => &[],
            Timing::Profile(timing) => timing.warnings(),
        }
    }

    /// Returns the time of a module's optimizer step, if the profile has it.
    #[must_use]
    pub fn optimizer_time(&self, module: Module) -> Option<PredictedTime> {
        match &self.timing {
            Timing::Rate(_) => None,
            Timing::Profile(timing) => timing.optimizer(module),
        }
    }

    /// Applies a correction from now on, or none.
    #[must_use]
    pub fn correction(mut self, table: Option<Arc<CorrectionTable>>) -> Self {
        self.correction = table;
        self
    }

    /// Returns the correction that is applied.
    #[must_use]
    pub fn correction_table(&self) -> Option<&CorrectionTable> {
        self.correction.as_deref()
    }

    /// Predicts a sample with the uncertainty of each module; `None` for a stated rate, whose error is unknown.
    ///
    /// # Errors
    /// As [`CostModel::annotate`].
    pub fn predict(&self, shape: &SampleShape) -> Result<Option<Prediction>> {
        let work = self.work(shape)?;
        let Timing::Profile(timing) = &self.timing else { return Ok(None) };
        let mut prediction = Prediction { modules: Vec::new(), warnings: Vec::new() };
        for &module in self.modules() {
            let load = work.load(module);
            let time = timing.predict(module, &load);
            let size = work.size(module);
            prediction.modules.push(PredictedTime {
                ns: self.corrected_ns(module, size, timing.ns(module, &load)),
                uncertainty_ns: self.corrected_ns(module, size, time.uncertainty_ns),
                is_beyond: time.is_beyond,
            });
            prediction.warnings.extend(timing.beyond(module, &load));
        }
        Ok(Some(prediction))
    }

    /// Predicts a microbatch: samples that each module runs together.
    ///
    /// From a profile, linear work is that of the packed sequence, the LLM's attention is summed over the samples, an
    /// encoder runs all media as one batch. From a stated rate it is the sum over the samples.
    ///
    /// Returns forward and backward of each whole module in nanoseconds, in the order of [`CostModel::modules`].
    ///
    /// # Errors
    /// As [`CostModel::annotate`], for the first sample that the model cannot take.
    pub fn predict_packed<'a>(
        &self,
        shapes: impl IntoIterator<Item = &'a SampleShape>,
    ) -> Result<ModuleTimes> {
        let mut sums = [0_u64; 3];
        let mut packs = [Pack::default(), Pack::default(), Pack::default()];
        for shape in shapes {
            let Timing::Profile(timing) = &self.timing else {
                let cost = self.annotate(shape)?;
                sums.iter_mut()
                    .zip(cost.module_ns.as_slice())
                    .for_each(|(sum, ns)| *sum = sum.saturating_add(*ns));
                continue;
            };
            let work = self.work(shape)?;
            for (pack, &module) in packs.iter_mut().zip(self.modules()) {
                let factor = self.factor(module, work.size(module));
                pack.add(&work, module, factor, timing);
            }
        }
        let mut times = ModuleTimes::EMPTY;
        for ((pack, &module), sum) in packs.iter().zip(self.modules()).zip(sums) {
            times.push(match &self.timing {
                Timing::Rate(_) => sum,
                Timing::Profile(timing) => pack.ns(module, timing),
            });
        }
        Ok(times)
    }

    /// Returns the size of a sample inside a module, in tokens, and its predicted time without correction, in
    /// nanoseconds: what an [`Observation`](crate::correction::Observation) holds; `None` if the sample has no work for
    /// the module.
    ///
    /// # Errors
    /// As [`CostModel::annotate`].
    pub fn uncorrected(&self, module: Module, shape: &SampleShape) -> Result<Option<(u64, u64)>> {
        let Some(at) = self.modules().iter().position(|known| *known == module) else { return Ok(None) };
        let size = self.work(shape)?.size(module);
        let plain = self.clone().correction(None);
        let ns = plain.annotate(shape)?.module_ns.as_slice()[at];
        Ok((ns > 0).then_some((size, ns)))
    }

    /// Forward and backward of an encoder, corrected.
    pub(crate) fn encoder_ns(&self, encoder: &Encoder, work: &EncoderWork) -> u64 {
        let module = encoder.module;
        let ns = match &self.timing {
            Timing::Rate(rate) => {
                rate.nanoseconds(module, encoder.flops.training(work, self.recomputation).total())
            }
            Timing::Profile(timing) => timing.ns(module, &Load::of_encoder(work)),
        };
        self.corrected_ns(module, work.encoder_tokens, ns)
    }

    /// Forward and backward of the LLM over one sample, corrected.
    pub(crate) fn llm_ns(&self, tokens: u32, targets: u32) -> u64 {
        let ns = match &self.timing {
            Timing::Rate(rate) => {
                let flops = self.llm.training(&[tokens], Attention::Causal, self.recomputation);
                rate.nanoseconds(Module::Llm, flops.total())
            }
            Timing::Profile(timing) => timing.ns(Module::Llm, &Load::of_llm(tokens.into(), targets.into())),
        };
        self.corrected_ns(Module::Llm, tokens.into(), ns)
    }

    fn corrected_ns(&self, module: Module, size: u64, ns: u64) -> u64 {
        self.correction.as_ref().map_or(ns, |table| table.apply(module, size, ns))
    }

    fn factor(&self, module: Module, size: u64) -> f64 {
        let factor = self.correction.as_ref().map_or(FACTOR_ONE, |table| table.factor(module, size));
        f64::from(factor) / f64::from(FACTOR_ONE)
    }

    fn work(&self, shape: &SampleShape) -> Result<SampleWork> {
        let mut sample = SampleWork {
            encoders: [None; MODULES_MAX],
            tokens: u64::from(shape.text_tokens),
            targets: u64::from(shape.target_tokens),
        };
        for (encoder, known) in self.encoders.iter().zip(&mut sample.encoders) {
            let work = encoder.rule.work(shape)?;
            sample.tokens = sample.tokens.saturating_add(work.tokens);
            *known = Some((encoder.module, work));
        }
        Ok(sample)
    }
}

impl SampleWork {
    fn encoder(&self, module: Module) -> Option<&EncoderWork> {
        self.encoders.iter().flatten().find(|(of, _)| *of == module).map(|(_, work)| work)
    }

    fn load(&self, module: Module) -> Load {
        self.encoder(module).map_or_else(|| Load::of_llm(self.tokens, self.targets), Load::of_encoder)
    }

    /// What the correction of a module goes by.
    fn size(&self, module: Module) -> u64 {
        self.encoder(module).map_or(self.tokens, |work| work.encoder_tokens)
    }
}

impl Pack {
    fn add(&mut self, work: &SampleWork, module: Module, factor: f64, timing: &ProfileTiming) {
        let attention = match work.encoder(module) {
            Some(work) => {
                self.work += *work;
                work.attention_pairs as f64
            }
            None => timing.apart_ns(module, &work.load(module))[1],
        };
        let size = work.size(module) as f64;
        self.tokens += size;
        self.targets = self.targets.saturating_add(work.targets);
        self.corrected_tokens += size * factor;
        self.corrected_attention += attention * factor;
    }

    fn ns(&self, module: Module, timing: &ProfileTiming) -> u64 {
        if self.tokens <= 0.0 {
            return 0;
        }
        let linear_share = self.corrected_tokens / self.tokens;
        if module == Module::Llm {
            let [linear_ns, _] = timing.apart_ns(module, &Load::of_llm(self.tokens as u64, self.targets));
            return whole_ns(linear_ns * linear_share + self.corrected_attention);
        }
        let [linear_ns, attention_ns] = timing.apart_ns(module, &Load::of_encoder(&self.work));
        let attention_share = self.corrected_attention / (self.work.attention_pairs as f64).max(1.0);
        whole_ns(linear_ns * linear_share + attention_ns * attention_share)
    }
}
