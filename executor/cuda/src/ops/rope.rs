//! Rotary positions.

use dflop_device::ops::rope::{RopeShape, RopeTable, Rotate, Rotation};
use dflop_device::{Dtype, Result, Runtime, Tensor};

use super::same_type;
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

impl Rotate for Cuda {
    fn rope_angles(
        &self,
        table: &RopeTable,
        positions: &Tensor<Self>,
        tokens: usize,
    ) -> Result<(Tensor<Self>, Tensor<Self>)> {
        let pairs = table.frequencies.len();
        let axes: Vec<u32> = table.axes.iter().map(|&axis| u32::from(axis)).collect();
        let axes_max = axes.iter().max().map_or(0, |&axis| axis as usize + 1);
        assert!(axes_max * tokens <= positions.len(), "every axis has the positions of all tokens");
        let mut cos = self.allocate(Dtype::F32, tokens * pairs)?;
        let mut sin = self.allocate(Dtype::F32, tokens * pairs)?;
        let frequencies = self.upload_as(Dtype::F32, &table.frequencies)?;
        let axes = self.upload_indices(&axes)?;
        let arguments = Arguments::default().read(&frequencies).read(&axes).read(positions);
        let arguments = arguments.write(&mut cos).write(&mut sin).int(tokens).int(pairs);
        let grid = Grid::elements(tokens * pairs, 1);
        self.launch(Source::Rope, "rope_angles", Macros::default(), grid, arguments)?;
        Ok((cos, sin))
    }

    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        x: &mut Tensor<Self>,
    ) -> Result<()> {
        let RopeShape { heads, head_dim, rotated, is_interleaved, stride } = shape;
        let half = rotated / 2;
        assert_eq!(cos.len(), sin.len(), "a cosine for every sine");
        assert_eq!(same_type(&[cos, sin]), Dtype::F32, "angles are `f32`");
        let tokens = shape.tokens(cos.len(), x.len());
        if half == 0 {
            return Ok(());
        }
        // column distance from one pair to the next, and within a pair
        let (step, gap) = if is_interleaved { (2, 1) } else { (1, half) };
        let sign = if rotation == Rotation::Forward { 1.0 } else { -1.0 };
        let arguments = Arguments::default().read(cos).read(sin).write(x);
        let arguments = arguments.int(tokens).int(heads).int(head_dim).int(half).int(step).int(gap);
        let arguments = arguments.int(stride).float(sign);
        let grid = Grid::elements(tokens * heads * half, 1);
        self.launch(Source::Rope, "rope", Macros::types(&[x.dtype()]), grid, arguments)
    }
}
