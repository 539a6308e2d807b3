//! Logit cross entropy with the vocabulary sharded over ranks: the parts before and after the exchange.
//!
//! [`forward`] replaces logits by exponentials relative to the *local* row maximum, and returns maxima and
//! sums; [`join`] computes losses from the results of all ranks; [`backward`] turns the exponentials into the
//! gradient.
//!
//! # Source
//! Shoeybi et al.: "Megatron-LM", 2019, arXiv:1909.08053, section 3.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::{chunk_rows, max, sum, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};
use std::ops::Range;

/// Number of values per [`PartialSoftmax`] in a message.
pub const PARTIAL: usize = 3;

/// Vocabulary range on a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyPart {
    /// Rank among the ranks that share the vocabulary.
    pub rank: usize,
    /// Words on this rank.
    pub words: Range<usize>,
}

values!(VocabularyPart);

operation! {
    /// Logit cross entropy with the vocabulary sharded over ranks.
    pub trait VocabParallelCrossEntropy: Runtime {
        /// Replaces the logits for the words on this rank by exponentials, and writes a partial softmax for
        /// every row.
        ///
        /// - `targets`: target word for every row in the complete vocabulary, a range in an index tensor
        /// - `part`: words on this rank
        /// - `parts`: `f32`, `[ranks, rows, 3]`: the numbers of this rank are written
        fn partial_softmax(
            &self,
            logits: &mut Tensor<Self>,
            targets: (&Tensor<Self>, Range<usize>),
            part: &VocabularyPart,
            parts: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Turns these exponentials into the gradient of `scale` times the loss sum, and adds the unscaled
        /// sum to a scalar.
        ///
        /// - `parts`: partial softmaxes from all ranks
        fn join_softmax(
            &self,
            exponentials: &mut Tensor<Self>,
            targets: (&Tensor<Self>, Range<usize>),
            part: &VocabularyPart,
            parts: &Tensor<Self>,
            scale: f64,
            loss: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

/// Returns targets as columns in a vocabulary part; `None` for targets in other parts.
fn own(targets: &[u32], words: &Range<usize>) -> Vec<Option<u32>> {
    let own = |&target: &u32| words.contains(&(target as usize)).then(|| target - words.start as u32);
    targets.iter().map(own).collect()
}

impl VocabParallelCrossEntropy for Cpu {
    fn partial_softmax(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &mut Tensor<Self>,
    ) -> Result<()> {
        let own = own(&targets.u32()[range], &part.words);
        let rows = self.update(logits, |logits| self.on_pool(|| forward(logits, &own)))?;
        let len = PARTIAL * rows.len();
        let places = parts.f32_mut()[part.rank * len..][..len].chunks_mut(PARTIAL);
        for (place, row) in places.zip(&rows) {
            place.copy_from_slice(&[row.max, row.sum, row.target]);
        }
        Ok(())
    }

    fn join_softmax(
        &self,
        exponentials: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &Tensor<Self>,
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        let own = own(&targets.u32()[range], &part.words);
        let row = |&[max, sum, target]: &[f32; PARTIAL]| PartialSoftmax { max, sum, target };
        let all: Vec<PartialSoftmax<f32>> = parts.f32().as_chunks().0.iter().map(row).collect();
        let mut total = 0.0;
        let mut factors = Vec::with_capacity(own.len());
        for row in 0..own.len() {
            let of_row: Vec<_> = all.iter().skip(row).step_by(own.len()).copied().collect();
            let (of_row, factor) = join(&of_row, part.rank, scale);
            total += of_row;
            factors.push(factor);
        }
        loss.f64_mut()[0] += total;
        self.update(exponentials, |exponentials| {
            self.on_pool(|| backward(exponentials, &own, &factors, scale));
        })
    }
}

/// Row softmax over a vocabulary part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PartialSoftmax<F> {
    /// Maximum logit.
    pub max: F,
    /// Sum of exponentials relative to the maximum logit.
    pub sum: F,
    /// Target logit; 0 if the target is in another part.
    pub target: F,
}

/// Replaces logits, `[targets, columns]`, by exponentials and returns the partial softmax for every row.
///
/// Targets are columns in this part, or `None` if in another part. NaN and infinite logits produce sums that
/// are not finite.
///
/// # Panics
/// If a target is not among the columns.
pub fn forward<F: Real>(logits: &mut [F], targets: &[Option<u32>]) -> Vec<PartialSoftmax<F>> {
    let columns = columns(logits, targets);
    let rows = chunk_rows(columns);
    let chunks = logits.par_chunks_mut((rows * columns).max(1)).zip(targets.par_chunks(rows));
    let parts: Vec<Vec<PartialSoftmax<F>>> = chunks
        .map(|(logits, targets)| {
            vectorized(
                #[inline(always)]
                || {
                    let mut parts = Vec::with_capacity(targets.len());
                    for (logits, &target) in logits.chunks_mut(columns).zip(targets) {
                        parts.push(row(logits, target));
                    }
                    parts
                },
            )
        })
        .collect();
    parts.concat()
}

fn columns<F>(logits: &[F], targets: &[Option<u32>]) -> usize {
    let columns = logits.len() / targets.len().max(1);
    assert_eq!(columns * targets.len(), logits.len(), "every target has a row");
    columns
}

#[inline(always)]
fn row<F: Real>(logits: &mut [F], target: Option<u32>) -> PartialSoftmax<F> {
    let most = max(logits);
    let target = target.map_or(F::ZERO, |target| logits[target as usize]);
    // a row with only minus infinities: the difference from the maximum would be NaN
    let base = if most.to_f64() == f64::NEG_INFINITY { F::ZERO } else { most };
    for logit in logits.iter_mut() {
        *logit = (*logit - base).exp();
    }
    PartialSoftmax { max: most, sum: sum(logits), target }
}

/// Joins the partial softmaxes of a row: returns the loss, and the factor that turns the exponentials in part
/// `own` into `scale` times probabilities.
///
/// Sums run over the parts in order.
#[must_use]
pub fn join<F: Real>(parts: &[PartialSoftmax<F>], own: usize, scale: f64) -> (f64, F) {
    let most = parts.iter().fold(f64::NEG_INFINITY, |most, part| most.max(part.max.to_f64()));
    // rescales a part's sums from the part maximum to the common maximum
    let above = |part: &PartialSoftmax<F>| libm::exp(part.max.to_f64() - most);
    let total: f64 = parts.iter().map(|part| part.sum.to_f64() * above(part)).sum();
    let target: f64 = parts.iter().map(|part| part.target.to_f64()).sum();
    (libm::log(total) - (target - most), F::from_f64(above(&parts[own]) * scale / total))
}

/// Replaces exponentials by the gradient of `scale` times the loss sum.
///
/// # Panics
/// If a target is not among the columns.
pub fn backward<F: Real>(exponentials: &mut [F], targets: &[Option<u32>], factors: &[F], scale: f64) {
    let columns = columns(exponentials, targets);
    let scale = F::from_f64(scale);
    let rows = exponentials.par_chunks_mut(columns.max(1)).zip(targets.par_iter().zip(factors));
    rows.with_min_len(chunk_rows(columns)).for_each(|(row, (&target, &factor))| {
        for value in row.iter_mut() {
            *value *= factor;
        }
        if let Some(target) = target {
            row[target as usize] -= scale;
        }
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::cross_entropy::forward_backward;
    use super::super::every_operation::{COLUMNS, LEN, ROWS, Results, changed, scalars};
    use super::super::finite_difference::numbers;
    use super::*;
    use crate::ops::Device;
    use crate::runtime::Dtype;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let mut parts = d.alloc_as(Dtype::F32, 2 * ROWS * PARTIAL)?;
        let targets = d.upload_indices(&[0, 7, 3, 1, 5, 6])?;
        let part = |rank| VocabularyPart { rank, words: rank * COLUMNS..(rank + 1) * COLUMNS };
        let mut all = Results::new();
        for rank in 0..2 {
            let run = |logits: &mut Tensor<D>| {
                d.partial_softmax(logits, (&targets, 0..ROWS), &part(rank), &mut parts)
            };
            all.push(("exponentials", changed(d, LEN, 4 + rank as u64, run)?));
        }
        let mut loss = d.zeros_as(Dtype::F64, 1)?;
        let run = |exponentials: &mut Tensor<D>| {
            d.join_softmax(exponentials, (&targets, 0..ROWS), &part(0), &parts, 0.125, &mut loss)
        };
        all.push(("join softmax", changed(d, LEN, 4, run)?));
        all.push(("joined loss", scalars(d, &loss)?));
        Ok(all)
    }

    const TOKENS: usize = 300;
    const VOCABULARY: usize = 50;
    const SCALE: f64 = 0.3;

    /// Loss sum and gradient, from parts with these widths.
    fn in_parts(x: &[f64], targets: &[u32], widths: &[usize]) -> (f64, Vec<f64>) {
        let mut first = 0;
        let mut parts = Vec::new();
        for &width in widths {
            let mut part: Vec<f64> = Vec::new();
            x.chunks(VOCABULARY).for_each(|row| part.extend(&row[first..first + width]));
            let local = |&target: &u32| target.checked_sub(first as u32).filter(|&t| t < width as u32);
            let local: Vec<Option<u32>> = targets.iter().map(local).collect();
            let sums = forward(&mut part, &local);
            parts.push((first, width, part, local, sums));
            first += width;
        }
        let (mut loss, mut gradient) = (0.0, vec![0.0; x.len()]);
        let sums: Vec<Vec<PartialSoftmax<f64>>> = parts.iter().map(|part| part.4.clone()).collect();
        for (own, (first, width, mut part, local, _)) in parts.into_iter().enumerate() {
            let of_row = |row: usize| sums.iter().map(|sums| sums[row]).collect::<Vec<_>>();
            let (losses, factors): (Vec<f64>, Vec<f64>) =
                (0..targets.len()).map(|row| join(&of_row(row), own, SCALE)).unzip();
            loss = losses.iter().sum();
            backward(&mut part, &local, &factors, SCALE);
            for (row, part) in gradient.chunks_mut(VOCABULARY).zip(part.chunks(width)) {
                row[first..first + width].copy_from_slice(part);
            }
        }
        (loss, gradient)
    }

    #[test]
    fn parts_of_any_width_match_the_whole() {
        let x: Vec<f64> = numbers(TOKENS * VOCABULARY, 1).iter().map(|x| 50.0 * x).collect();
        let targets: Vec<u32> = (0..TOKENS as u32).map(|row| row * 7 % VOCABULARY as u32).collect();
        let mut truth = x.clone();
        let loss = forward_backward(&mut truth, &targets, SCALE);
        for widths in [&[50][..], &[25, 25], &[17, 17, 16], &[49, 1]] {
            let (found, gradient) = in_parts(&x, &targets, widths);
            assert!((found - loss).abs() < 1e-12 * loss, "{found} {loss}");
            let worst = gradient.iter().zip(&truth).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-14, "{widths:?}: {worst}");
        }
    }

    #[test]
    fn nan_and_infinity_reach_the_loss_and_minus_infinity_does_not() {
        let targets = [1, 30];
        for bad in [f64::NAN, f64::INFINITY] {
            let mut x = vec![0.0; 2 * VOCABULARY];
            x[70] = bad;
            assert!(!in_parts(&x, &targets, &[25, 25]).0.is_finite());
        }
        let mut x = vec![f64::NEG_INFINITY; VOCABULARY];
        x[1] = 3.0;
        x[2] = 3.0;
        let (loss, gradient) = in_parts(&x, &targets[..1], &[25, 25]);
        assert!((loss - 2.0_f64.ln()).abs() < 1e-15 && gradient[40] == 0.0, "{loss}");
        assert!(forward::<f32>(&mut [], &[]).is_empty());
    }
}
