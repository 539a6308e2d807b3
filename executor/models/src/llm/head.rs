//! Last decoder block: norm, LM head and loss, only for rows that predict a target.
//!
//! Logits are computed in row chunks and turned into logit gradients at once: the loss scale is known. If all
//! logits fit into [`LOGITS_KEPT`] elements, forward saves them. Otherwise forward accumulates the head
//! gradient chunk by chunk and saves the input gradient: nothing is computed twice. Each tensor-parallel rank
//! has the logits for a vocabulary shard.
//!
//! A forward pass in training may therefore change the head gradient. Dropping the saved activations does not
//! undo that: after a pass without its backward, a step must start with zero gradients, as each pipeline step
//! does. Passes that only read parameters change nothing, and the forward of the head is not recomputed for
//! its backward.

use super::embedding::Vocabulary;
use crate::block::{
    BackwardPass, Block, BlockOutput, ForwardPass, PassParameters, SavedActivations, expect_rows,
    tensor_parallel,
};
use crate::error::Result;
use crate::layers::{Norm, NormKind};
use crate::parameters::weights::ParameterId;
use crate::parameters::{Declaration, Parameters};
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Dtype, Tensor};

/// Maximum number of logits saved from forward to backward: 64 MiB.
const LOGITS_KEPT: usize = 1 << 24;
/// Number of logits, in multiples of [`LOGITS_KEPT`], that a device other than a CPU computes at a time: 512
/// MiB in bf16. Products with fewer rows leave device processors idle.
const LOGITS_AT_A_TIME: usize = 16;

/// Norm, LM head and loss.
#[derive(Debug)]
pub struct Head {
    norm: Norm,
    weight: ParameterId,
    words: Vocabulary,
    /// Size of the vocabulary shard on this rank.
    vocabulary: usize,
    hidden: usize,
    kept: usize,
}

impl Head {
    /// Declares the norm; the head weight is already declared.
    pub fn declare(
        declaration: &mut Declaration,
        norm: &str,
        weight: ParameterId,
        [vocabulary, hidden]: [usize; 2],
        (kind, epsilon): (NormKind, f64),
    ) -> Self {
        let norm = Norm::declare(declaration, norm, kind, hidden, epsilon);
        let words = Vocabulary::new(vocabulary, declaration.tp_rank());
        Self { norm, weight, vocabulary: words.own().len(), words, hidden, kept: LOGITS_KEPT }
    }

    /// Returns the number of rows in a chunk; all rows if the logits are saved.
    fn chunk<D: Device>(&self, device: &D, rows: usize) -> usize {
        if self.is_kept(rows) {
            return rows.max(1);
        }
        let logits = if device.host_threads().is_none() { LOGITS_AT_A_TIME * self.kept } else { self.kept };
        // by the largest vocabulary shard, so that all ranks have the same number of chunks and exchanges
        (logits / self.words.size_max()).max(1)
    }

    fn is_kept(&self, rows: usize) -> bool {
        rows * self.words.size_max() <= self.kept
    }

    /// Computes logits for some rows, for the vocabulary shard on this rank.
    fn project<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        normal: &Tensor<D>,
        first: usize,
        rows: usize,
    ) -> Result<Tensor<D>> {
        let mut logits = pass.device.alloc(rows * self.vocabulary)?;
        let shape = GemmShape { rows, columns: self.vocabulary, inner: self.hidden };
        let x = (normal, MatrixLayout::rows(self.hidden).at(first * self.hidden));
        let weight = (pass.parameters.value(self.weight), MatrixLayout::rows(self.hidden).transposed());
        let target = (&mut logits, MatrixLayout::rows(self.vocabulary));
        pass.device.gemm(shape, x, weight, false, target, Epilogue::None)?;
        Ok(logits)
    }

    /// Accumulates the gradients that the logits of some rows contribute.
    fn project_backward<D: Device>(
        &self,
        (device, parameters): (&D, &mut Parameters<D>),
        d_logits: &Tensor<D>,
        normal: &Tensor<D>,
        (first, rows): (usize, usize),
        d_normal: &mut Tensor<D>,
    ) -> Result<()> {
        let at = MatrixLayout::rows(self.hidden).at(first * self.hidden);
        let by_row = MatrixLayout::rows(self.vocabulary);
        let (weight, gradient) = parameters.both(self.weight);
        let shape = GemmShape { rows, columns: self.hidden, inner: self.vocabulary };
        let weight = (weight, MatrixLayout::rows(self.hidden));
        device.gemm(shape, (d_logits, by_row), weight, false, (d_normal, at), Epilogue::None)?;
        let Some(gradient) = gradient else { return Ok(()) };
        let shape = GemmShape { rows: self.vocabulary, columns: self.hidden, inner: rows };
        let target = (gradient, MatrixLayout::rows(self.hidden));
        let d_logits = (d_logits, by_row.transposed());
        Ok(device.gemm(shape, d_logits, (normal, at), true, target, Epilogue::None)?)
    }
}

impl<D: Device> Block<D> for Head {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let text = pass.context.inputs.text()?;
        let x = expect_rows::<D>(input, pass.context.layers.rows, self.hidden)?;
        let rows = text.targets.len();
        let mut taken = pass.device.zeros(rows * self.hidden)?;
        pass.device.gather_scatter(&text.predictions.forward, self.hidden, &x, &mut taken)?;
        drop(x);
        let (normal, statistics) = self.norm.forward(pass, &taken)?;
        let (device, tensor, scale) = (pass.device, pass.tensor, text.loss_scale);
        let mut loss = device.zeros_as(Dtype::F64, 1)?;
        let (mut kept, is_kept) = (None, self.is_kept(rows));
        let is_trained = matches!(pass.parameters, PassParameters::Train(_));
        let mut d_normal = (is_trained && !is_kept).then(|| device.alloc(rows * self.hidden)).transpose()?;
        let chunk_rows = self.chunk(device, rows);
        for first in (0..rows).step_by(chunk_rows) {
            let chunk = first..rows.min(first + chunk_rows);
            let mut logits = self.project(pass, &normal, first, chunk.len())?;
            let targets = (&text.targets, chunk.clone());
            self.words.cross_entropy(device, tensor, &mut logits, targets, (scale, &mut loss))?;
            match (&mut pass.parameters, &mut d_normal) {
                (PassParameters::Train(parameters), Some(d_normal)) => {
                    let part = (first, chunk.len());
                    self.project_backward((device, parameters), &logits, &normal, part, d_normal)?;
                }
                _ => kept = Some(logits),
            }
        }
        saved.keep(taken);
        saved.keep(statistics);
        match (d_normal, kept) {
            (Some(d_normal), _) => saved.keep(d_normal),
            (None, Some(logits)) if is_kept => {
                saved.keep(normal);
                saved.keep(logits);
            }
            (None, _) => saved.keep(normal),
        }
        Ok(BlockOutput::Loss(loss))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        _: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let (device, text) = (pass.device, pass.context.inputs.text()?);
        let rows = text.targets.len();
        // without rows, forward had no chunk and saved no logits
        let d_logits = (self.is_kept(rows) && rows > 0).then(|| saved.take());
        let mut d_normal = saved.take();
        if let Some(d_logits) = d_logits {
            let normal = std::mem::replace(&mut d_normal, device.alloc(rows * self.hidden)?);
            let parameters = (device, &mut *pass.parameters);
            self.project_backward(parameters, &d_logits, &normal, (0, rows), &mut d_normal)?;
        }
        let (statistics, taken) = (saved.take(), saved.take());
        tensor_parallel::all_reduce(pass.tensor, &mut d_normal)?;
        let mut d_taken = device.zeros(rows * self.hidden)?;
        let d_input = is_input_needed.then_some(&mut d_taken);
        self.norm.backward(pass, &d_normal, &taken, &statistics, d_input)?;
        if !is_input_needed {
            return Ok(None);
        }
        let mut dx = device.zeros(pass.context.layers.rows * self.hidden)?;
        device.gather_scatter(&text.predictions.backward, self.hidden, &d_taken, &mut dx)?;
        Ok(Some(dx))
    }

    fn logits(&self, pass: &ForwardPass<'_, D>, input: &Tensor<D>) -> Result<Option<Tensor<D>>> {
        let (normal, _) = self.norm.forward(pass, input)?;
        let rows = pass.context.layers.rows;
        let own = self.project(pass, &normal, 0, rows)?;
        self.words.gather(pass.device, pass.tensor, own, rows).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::block::{KeptRows, TensorParallel};
    use crate::llm::{LlmConfig, TextBatch};
    use crate::parameters::weights::{Init, Seed, TpRank};
    use crate::parameters::{BUCKET_ELEMENTS, Parameters, WeightGradients};
    use dflop_comm::{Settings, threads};
    use dflop_device::{Cpu, Runtime};

    const VOCABULARY: usize = 40;
    const HIDDEN: usize = 16;

    /// Returns the loss, input gradient and parameter gradients, with this number of saved logits.
    fn run(kept: usize) -> (f64, Vec<f32>, Vec<Vec<f32>>) {
        run_part(kept, None)
    }

    /// Returns the same results from one rank of several.
    fn run_part(kept: usize, group: Option<&TensorParallel<Cpu>>) -> (f64, Vec<f32>, Vec<Vec<f32>>) {
        let tensor = group.map(|group| group.pass(Some(0), "head"));
        let tp_rank = group.map_or(TpRank::ALONE, TensorParallel::tp_rank);
        let device = Cpu::new(2).unwrap();
        let config = LlmConfig::from_config(
            &json!({"model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
            "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}),
        );
        let input_ids: Vec<i64> = (0..30).collect();
        let mut labels = input_ids.clone();
        labels[3] = super::super::IGNORED;
        let batch = TextBatch {
            input_ids: &input_ids,
            labels: &labels,
            positions: &input_ids,
            cu_seqlens: &[0, 11, 30],
            media_places: &[],
            loss_scale: 0.1,
        };
        let context = config.unwrap().context(&device, &batch).unwrap();
        let mut declaration = Declaration::for_rank(tp_rank);
        let cut = (0, &Vocabulary::parts(VOCABULARY, tp_rank));
        let weight = declaration.add_cut("head", &[VOCABULARY, HIDDEN], Init::Normal(0.3), cut);
        let mut head =
            Head::declare(&mut declaration, "norm", weight, [VOCABULARY, HIDDEN], (NormKind::Rms, 1e-5));
        head.kept = kept;
        let mut parameters =
            Parameters::new(&device, declaration.into_specs(), &Seed(1), BUCKET_ELEMENTS).unwrap();
        let x: Vec<f32> = (0..30 * HIDDEN).map(|i| ((i * 7) % 13) as f32 / 6.0 - 1.0).collect();
        let mut saved = SavedActivations::default();
        let trained = PassParameters::Train(&mut parameters);
        let rows = KeptRows::default();
        let mut pass =
            ForwardPass { device: &device, parameters: trained, context: &context, tensor, kept: rows };
        let output = head.forward(&mut pass, Some(device.upload(&x).unwrap()), &mut saved).unwrap();
        let BlockOutput::Loss(loss) = output else { panic!("a head has a loss") };
        let loss = device.read(&loss).unwrap()[0];
        let parameters_mut = &mut parameters;
        let mut pass = BackwardPass {
            device: &device,
            parameters: parameters_mut,
            context: &context,
            tensor,
            weights: WeightGradients::Now,
            kept: KeptRows::default(),
        };
        let dx = head.backward(&mut pass, None, &mut saved, true).unwrap().unwrap();
        let dx = device.download(&dx).unwrap();
        assert_eq!(saved.elements(), 0);
        (loss, dx, parameters.gradients(&device).unwrap().into_values().collect())
    }

    #[test]
    fn recomputed_chunks_of_logits_give_the_result_of_saved_ones() {
        let (loss, dx, gradients) = run(LOGITS_KEPT);
        for rows in [1, 4, 27] {
            let (chunked_loss, chunked_dx, chunked) = run(rows * VOCABULARY);
            assert!((chunked_loss - loss).abs() < 1e-6 * loss);
            let (chunked, kept) = (chunked.iter().flatten(), gradients.iter().flatten());
            for (chunked, kept) in chunked.zip(kept).chain(chunked_dx.iter().zip(&dx)) {
                assert!((chunked - kept).abs() < 1e-6, "{rows}: {chunked} {kept}");
            }
        }
    }

    /// 40 words on 3 ranks: the first rank has one more word, and all ranks must cut rows into the same
    /// chunks.
    #[test]
    fn ranks_that_share_the_vocabulary_use_the_same_chunks() {
        let (loss, dx, gradients) = run(LOGITS_KEPT);
        for kept in [LOGITS_KEPT, 27 * 14, 27 * 13, 5 * 14, 1] {
            let ranks = threads::world(3, Settings::default()).unwrap();
            let parts: Vec<_> = std::thread::scope(|scope| {
                let start = |comm| {
                    scope.spawn(move || {
                        let device = Cpu::new(1).unwrap();
                        run_part(kept, Some(&TensorParallel::new(device, Arc::new(comm))))
                    })
                };
                let threads: Vec<_> = ranks.into_iter().map(start).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let head: Vec<f32> = parts.iter().flat_map(|part| part.2[0].clone()).collect();
            for (part_loss, part_dx, part) in &parts {
                assert!((part_loss - loss).abs() < 1e-6 * loss, "{part_loss} {loss}");
                assert_eq!((part_dx, &part[1]), (&parts[0].1, &parts[0].2[1]));
                let found = head.iter().chain(part_dx).chain(&part[1]);
                for (found, truth) in found.zip(gradients[0].iter().chain(&dx).chain(&gradients[1])) {
                    assert!((found - truth).abs() < 1e-6, "{kept}: {found} {truth}");
                }
            }
        }
    }
}
