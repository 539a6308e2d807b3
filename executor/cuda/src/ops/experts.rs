//! Weights for the experts that tokens go through.

use dflop_device::ops::experts::{ExpertScores, ExpertWeightShape, Experts};
use dflop_device::{Dtype, Result, Tensor};

use super::{THREADS, same_type};
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

/// Returns the number of a function in the kernels.
const fn number(scores: ExpertScores) -> u32 {
    match scores {
        ExpertScores::Softmax => 0,
        ExpertScores::SoftmaxOfChosen => 1,
        ExpertScores::Sigmoid => 2,
        ExpertScores::SigmoidOfChosen => 3,
    }
}

/// Returns the number of tokens.
fn tokens(shape: &ExpertWeightShape, logits: &Tensor<Cuda>, slots: [usize; 2]) -> usize {
    let ExpertWeightShape { experts, chosen, .. } = *shape;
    let tokens = logits.len() / experts;
    assert!(logits.dtype() == Dtype::F32 && logits.len() == tokens * experts, "a row has a logit per expert");
    assert!(slots == [tokens * chosen; 2], "every slot has a weight");
    tokens
}

impl Experts for Cuda {
    fn expert_weights(
        &self,
        shape: &ExpertWeightShape,
        logits: &Tensor<Self>,
        chosen: &Tensor<Self>,
        weights: &mut Tensor<Self>,
    ) -> Result<()> {
        let tokens = tokens(shape, logits, [chosen.len(), weights.len()]);
        assert_eq!(weights.dtype(), Dtype::F32, "weights are f32");
        let macros = Macros::types(&[Dtype::F32, Dtype::F32]).number("SCORES", number(shape.scores));
        let arguments = Arguments::default().read(logits).read(chosen).write(weights);
        let arguments = arguments.long(tokens).int(shape.experts).int(shape.chosen).float(shape.scale as f32);
        self.launch(Source::Experts, "expert_weights", macros, Grid::elements(tokens, 1), arguments)
    }

    fn expert_weights_backward(
        &self,
        shape: &ExpertWeightShape,
        logits: &Tensor<Self>,
        chosen: &Tensor<Self>,
        d_weights: &Tensor<Self>,
        d_logits: &mut Tensor<Self>,
    ) -> Result<()> {
        let tokens = tokens(shape, logits, [chosen.len(), d_weights.len()]);
        assert!(d_weights.dtype() == Dtype::F32 && d_logits.len() == logits.len(), "shapes agree");
        let macros = Macros::types(&[Dtype::F32, d_logits.dtype()]).number("SCORES", number(shape.scores));
        let arguments = Arguments::default().read(logits).read(chosen).read(d_weights).write(d_logits);
        let arguments = arguments.long(tokens).int(shape.experts).int(shape.chosen).float(shape.scale as f32);
        self.launch(Source::Experts, "expert_weights_backward", macros, Grid::elements(tokens, 1), arguments)
    }

    fn row_products(
        &self,
        columns: usize,
        tokens: &Tensor<Self>,
        rows: &Tensor<Self>,
        places: &Tensor<Self>,
        products: &mut Tensor<Self>,
    ) -> Result<()> {
        let (slots, count) = (places.len(), tokens.len() / columns.max(1));
        let fits = rows.len() == slots * columns && slots == products.len() && products.dtype() == Dtype::F32;
        assert!(fits && slots.is_multiple_of(count.max(1)), "every slot has a row");
        let dtype = same_type(&[tokens, rows]);
        // the logit functions do not matter here
        let macros = Macros::types(&[dtype, Dtype::F32]).number("SCORES", number(ExpertScores::Sigmoid));
        let arguments = Arguments::default().read(tokens).read(rows).read(places).write(products);
        let arguments = arguments.long(slots).int(slots / count.max(1)).int(columns);
        let grid = Grid::blocks((32 * slots).div_ceil(THREADS as usize), THREADS);
        self.launch(Source::Experts, "row_products", macros, grid, arguments)
    }
}
