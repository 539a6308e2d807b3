//! Expert weights on random logits, and latent attention heads.

use dflop_device::ops::bias::Columns;
use dflop_device::ops::clamped_gate::GateBounds;
use dflop_device::ops::experts::{ExpertScores, ExpertWeightShape};
use dflop_device::ops::latent_heads::LatentShape;
use dflop_device::{Device, Dtype, Result};

use crate::cases::Cases;

impl<D: Device> Cases<'_, D> {
    pub(crate) fn experts(&mut self) -> Result<()> {
        for scores in [
            ExpertScores::Softmax,
            ExpertScores::SoftmaxOfChosen,
            ExpertScores::Sigmoid,
            ExpertScores::SigmoidOfChosen,
        ] {
            let (tokens, experts) = (self.random.below(1, 300), self.random.below(3, 140));
            // The weight of one expert alone is 1 whatever its logit, so that gradients are rounding errors.
            let is_normalized =
                matches!(scores, ExpertScores::SoftmaxOfChosen | ExpertScores::SigmoidOfChosen);
            let chosen = self.random.below(if is_normalized { 2 } else { 1 }, experts.min(9));
            let shape = ExpertWeightShape { experts, chosen, scores, scale: 1.75 };
            let logits = self.gradient(tokens * experts)?;
            let first = self.random.below(0, experts);
            // a token goes through different experts
            let of_slot =
                |slot: usize| (first + slot / chosen + slot % chosen * (experts / chosen)) % experts;
            let slots: Vec<u32> = (0..tokens * chosen).map(|slot| of_slot(slot) as u32).collect();
            let slots = self.d.upload_indices(&slots)?;
            let weights = self.d.alloc_as(Dtype::F32, tokens * chosen)?;
            let name = format!("{scores:?} of experts");
            self.changed(&name, weights, |d, y| d.expert_weights(&shape, &logits, &slots, y))?;
            let (d_weights, d_logits) = (self.gradient(tokens * chosen)?, self.d.alloc(tokens * experts)?);
            self.changed(&format!("{name}, backward"), d_logits, |d, y| {
                d.expert_weights_backward(&shape, &logits, &slots, &d_weights, y)
            })?;
            let bounds = GateBounds { limit: 0.7, alpha: 1.702 };
            let (gate_up, dy) = (self.input(2 * tokens * experts)?, self.input(tokens * experts)?);
            let y = self.d.alloc(tokens * experts)?;
            self.changed("clamped gate", y, |d, y| d.clamped_gate(bounds, &gate_up, y))?;
            let y = self.d.alloc(2 * tokens * experts)?;
            self.changed("clamped gate backward", y, |d, y| {
                d.clamped_gate_backward(bounds, &dy, &gate_up, y)
            })?;
            let columns = self.random.below(1, 200);
            let (x, rows) = (self.input(tokens * columns)?, self.input(tokens * chosen * columns)?);
            let places: Vec<u32> = (0..(tokens * chosen) as u32).rev().collect();
            let places = self.d.upload_indices(&places)?;
            let products = self.d.alloc_as(Dtype::F32, tokens * chosen)?;
            self.changed("row products", products, |d, y| d.row_products(columns, &x, &rows, &places, y))?;
        }
        Ok(())
    }

    pub(crate) fn latent_heads(&mut self) -> Result<()> {
        for is_interleaved in [false, true] {
            let (tokens, heads) = (self.random.below(1, 30), self.random.below(2, 9));
            let (plain, rotated) = (self.random.below(1, 130), 2 * self.random.below(1, 40));
            let value = self.random.below(1, plain + rotated + 1);
            let shape = LatentShape { heads, plain, rotated, value, is_interleaved };
            let columns = Columns { first: self.random.below(0, 9), stride: rotated + 9 };
            let (cos, sin) = (self.gradient(tokens * rotated / 2)?, self.gradient(tokens * rotated / 2)?);
            let queries = self.input(tokens * heads * shape.head_dim())?;
            let keys_values = self.input(tokens * shape.keys_values())?;
            let shared = self.input(tokens * columns.stride)?;
            let qkv = self.d.alloc(tokens * shape.row())?;
            self.changed("latent heads", qkv, |d, qkv| {
                d.latent_heads(&shape, [&queries, &keys_values], (&shared, columns), (&cos, &sin), qkv)
            })?;
            let d_qkv = self.input(tokens * shape.row())?;
            let (mut dq, mut dkv) = (self.d.alloc(queries.len())?, self.d.alloc(keys_values.len())?);
            let d_shared = self.input(shared.len())?;
            self.changed("latent heads d_rotated", d_shared, |d, dr| {
                let d_inputs = [&mut dq, &mut dkv];
                d.latent_heads_backward(&shape, &d_qkv, (&cos, &sin), d_inputs, (dr, columns))
            })?;
            self.keep("latent heads dq", &dq)?;
            self.keep("latent heads dkv", &dkv)?;
        }
        Ok(())
    }
}
