//! Gradient clipping and weight updates.

use std::ops::Range;

use dflop_device::ops::adamw::{AdamW, AdamWState, Update, UpdateRange};
use dflop_device::{Dtype, Result, Runtime, Tensor};

use super::{THREADS, same_type};
use crate::compiler::{Macros, Source};
use crate::device::{Address, Cuda};
use crate::driver::{Arguments, Grid};

/// Number of elements whose squares a block sums.
const SQUARES_PER_BLOCK: usize = 1 << 14;

impl Update for Cuda {
    fn sums_of_squares(&self, tensors: &[(&Tensor<Self>, usize)], into: &mut Tensor<Self>) -> Result<()> {
        for &(tensor, index) in tensors {
            assert!(into.dtype() == Dtype::F64 && index < into.len(), "every tensor has a sum");
            let blocks = tensor.len().div_ceil(SQUARES_PER_BLOCK);
            let mut sums = self.allocate(Dtype::F64, blocks)?;
            let arguments = Arguments::default().read(tensor).write(&mut sums);
            let arguments = arguments.long(tensor.len()).int(SQUARES_PER_BLOCK);
            let (macros, grid) = (Macros::types(&[tensor.dtype()]), Grid::blocks(blocks, THREADS));
            self.launch(Source::Clip, "squares", macros, grid, arguments)?;
            let place = into.address() + (index * Dtype::F64.bytes()) as u64;
            let arguments = Arguments::default().read(&sums).int(blocks).address(place);
            let macros = Macros::types(&[Dtype::F32]);
            self.launch(Source::Clip, "sum_of_sums", macros, Grid::blocks(1, 32), arguments)?;
        }
        Ok(())
    }

    fn clip_factor(
        &self,
        figures: &Tensor<Self>,
        squares: Range<usize>,
        norm_max: Option<f64>,
        into: &mut Tensor<Self>,
    ) -> Result<()> {
        assert_eq!(same_type(&[figures, into]), Dtype::F64, "figures are `f64`");
        assert!(squares.end <= figures.len() && into.len() == 2, "norm and factor are two numbers");
        let arguments = Arguments::default().read(figures).int(figures.len());
        let arguments = arguments.int(squares.start).int(squares.end).double(norm_max.unwrap_or(-1.0));
        let macros = Macros::types(&[Dtype::F32]);
        self.launch(Source::Clip, "clip_factor", macros, Grid::blocks(1, 1), arguments.write(into))
    }

    fn adamw(
        &self,
        adamw: &AdamW,
        ranges: &[UpdateRange],
        clip: &Tensor<Self>,
        weights: &mut Tensor<Self>,
        gradients: &Tensor<Self>,
        state: AdamWState<'_, Self>,
    ) -> Result<()> {
        let len = weights.len();
        let AdamWState { master, mean, square } = state;
        assert_eq!(gradients.len(), len, "every weight has a gradient");
        assert!(mean.len() == len && square.len() == len, "every weight has its means");
        assert_eq!(same_type(&[mean, square]), Dtype::F32, "means are `f32`");
        assert!(master.as_ref().is_none_or(|master| master.len() == len && master.dtype() == Dtype::F32));
        assert_eq!(ranges.last().map_or(0, |range| range.elements.end), len, "ranges cover the weights");
        let AdamW { beta1, beta2, epsilon, step, .. } = *adamw;
        // bias corrections: both moments start at 0
        let (mean_left, square_left) = (1.0 - beta1.powf(step as f64), 1.0 - beta2.powf(step as f64));
        let ends: Vec<u64> = ranges.iter().map(|range| range.elements.end as u64).collect();
        // decoupled: the decay applies to the weight, not to the gradient
        let decay = |range: &UpdateRange| (1.0 - range.learning_rate * range.weight_decay) as f32;
        let rate = |range: &UpdateRange| (range.learning_rate / mean_left) as f32;
        let factors: Vec<f32> = ranges.iter().flat_map(|range| [decay(range), rate(range)]).collect();
        let (ends, factors) = (self.upload_longs(&ends)?, self.upload_as(Dtype::F32, &factors)?);
        let macros = Macros::types(&[weights.dtype(), gradients.dtype()]);
        let arguments = Arguments::default().write(weights).write_if(master).read(gradients);
        let arguments = arguments.write(mean).write(square).read(clip).read(&ends).read(&factors);
        let arguments = arguments.int(ranges.len()).long(len).float((1.0 / square_left.sqrt()) as f32);
        let arguments = arguments.float(beta1 as f32).float((1.0 - beta1) as f32);
        let arguments = arguments.float(beta2 as f32).float((1.0 - beta2) as f32).float(epsilon as f32);
        self.launch(Source::AdamW, "adamw", macros, Grid::elements(len, 1), arguments)
    }
}
