//! Calls user-supplied cost functions that replace the cost model.
//!
//! Plans then depend only on these nanoseconds; tokens and rejections remain the model's, unless the function
//! counts tokens as well. Every rank calls the function separately: it must be pure, so that all ranks
//! compute the same numbers. If it is not, [`StepPlan::digest`](super::StepPlan::digest) differs between
//! ranks.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

use dflop_costmodel::{Module, ModuleTimes, SampleCost, SampleShape};

use crate::error::{BoxError, Error, Result, UserCodeError};

/// Sample in a global batch, as the argument of a cost function.
#[derive(Debug, Clone, PartialEq)]
pub struct CostInput<'a> {
    /// Sample key.
    pub key: &'a str,
    /// Dataset number, from 0.
    pub dataset: usize,
    /// Sample number in the dataset index.
    pub sample: u64,
    /// Shape of the sample fields, from the index.
    pub shape: &'a SampleShape,
    /// Cost model prediction, tokens and nanoseconds.
    pub predicted: SampleCost,
}

/// User code that predicts sample costs.
pub trait CostFunction: Debug + Send + Sync {
    /// Returns forward and backward nanoseconds of every **whole** module on one device: a row per
    /// sample, in the order of `samples`, which are all samples in a global batch that the model accepts.
    ///
    /// A pure function of the arguments, the same on all ranks. Called once per step, on the thread that
    /// plans ahead.
    ///
    /// - `modules`: model modules; rows contain times in this order
    ///
    /// # Errors
    /// Ends the stream, as [`Error::UserCode`].
    fn module_ns(&self, modules: &[Module], samples: &[CostInput<'_>]) -> Result<Vec<ModuleTimes>, BoxError>;

    /// Returns whether [`Self::costs`] counts tokens itself, for a model that the cost model does not know:
    /// no sample is then rejected by shape.
    fn counts_tokens(&self) -> bool {
        false
    }

    /// Returns tokens and times for every sample. Default: the times from [`Self::module_ns`], and the tokens
    /// from the cost model.
    ///
    /// # Errors
    /// Ends the stream, as [`Error::UserCode`].
    fn costs(&self, modules: &[Module], samples: &[CostInput<'_>]) -> Result<Vec<SampleCost>, BoxError> {
        let times = self.module_ns(modules, samples)?;
        if times.len() != samples.len() {
            return Err(CostFault::Rows { expected: samples.len(), given: times.len() }.into());
        }
        let cost = |(module_ns, sample): (_, &CostInput<'_>)| SampleCost { module_ns, ..sample.predicted };
        Ok(times.into_iter().zip(samples).map(cost).collect())
    }
}

/// Fault in the result of a cost function.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum CostFault {
    /// The number of rows is wrong, so rows cannot be matched with samples.
    #[error("returned {given} costs for {expected} samples")]
    Rows { expected: usize, given: usize },
    /// A row has a time too many or too few.
    #[error("its times of sample `{key}` are of {given} modules, not of {expected}")]
    Modules { key: String, expected: usize, given: usize },
    /// The sum of all times in the global batch does not fit in 63 bits.
    #[error("the sum of its times overflows at sample `{key}`")]
    Overflow { key: String },
    /// It panicked.
    #[error("it panicked")]
    Panicked,
}

/// Calls the function and checks the result.
pub(super) fn ask(
    function: &dyn CostFunction,
    step: u64,
    modules: &[Module],
    samples: &[CostInput<'_>],
) -> Result<Vec<SampleCost>> {
    let fail = |source| Error::UserCode(UserCodeError::CostFunction { step, source });
    let answer = catch_unwind(AssertUnwindSafe(|| function.costs(modules, samples)));
    let costs = answer.unwrap_or_else(|_| Err(CostFault::Panicked.into())).map_err(fail)?;
    check(&costs, modules.len(), samples).map_err(|fault| fail(fault.into()))?;
    Ok(costs)
}

fn check(costs: &[SampleCost], modules: usize, samples: &[CostInput<'_>]) -> Result<(), CostFault> {
    if costs.len() != samples.len() {
        return Err(CostFault::Rows { expected: samples.len(), given: costs.len() });
    }
    let mut sum_ns = 0u64;
    for (cost, sample) in costs.iter().zip(samples) {
        let (row, key) = (cost.module_ns.as_slice(), || sample.key.to_owned());
        if row.len() != modules {
            return Err(CostFault::Modules { key: key(), expected: modules, given: row.len() });
        }
        for &ns in row {
            let added = sum_ns.checked_add(ns).filter(|&sum| i64::try_from(sum).is_ok());
            sum_ns = added.ok_or_else(|| CostFault::Overflow { key: key() })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Says(Vec<ModuleTimes>);

    impl CostFunction for Says {
        fn module_ns(&self, _: &[Module], _: &[CostInput<'_>]) -> Result<Vec<ModuleTimes>, BoxError> {
            Ok(self.0.clone())
        }
    }

    #[test]
    fn times_that_fit_63_bits_together_are_taken_and_no_more() {
        let shape = SampleShape::default();
        let row = |ns: [u64; 2]| ModuleTimes::new(&ns).unwrap();
        let predicted = SampleCost {
            tokens: 1,
            target_tokens: 1,
            encoder_items: 0,
            encoder_tokens: 0,
            module_ns: row([1, 1]),
        };
        let input = |key| CostInput { key, dataset: 0, sample: 0, shape: &shape, predicted };
        let most = i64::MAX as u64;
        let answer = |last| {
            let says = Says(vec![row([most - 1, 0]), row([0, last])]);
            ask(&says, 7, &[Module::Vision, Module::Llm], &[input("a"), input("b")])
        };
        assert_eq!(answer(1).unwrap().len(), 2);
        let error = answer(2).unwrap_err();
        let Error::UserCode(UserCodeError::CostFunction { step: 7, source }) = error else {
            panic!("{error}")
        };
        assert_eq!(source.to_string(), "the sum of its times overflows at sample `b`");
    }
}
