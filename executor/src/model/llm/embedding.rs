//! The first block of a decoder: token ids to rows, and the encoders' tokens to their places among them.

use super::super::parameters::{Declaration, Init, ParameterId};
use super::super::{BackwardPass, Block, Output, Pass, Saved, rows_of};
use crate::device::Device;
use crate::error::Result;

/// The embedding. Its input is the encoders' tokens, `[media tokens, hidden]`, none if the microbatch has none.
#[derive(Debug)]
pub struct Embedding {
    table: ParameterId,
    hidden: usize,
}

impl Embedding {
    /// Declares the table.
    pub fn declare(
        declaration: &mut Declaration,
        name: &str,
        [vocabulary, hidden]: [usize; 2],
        init: Init,
    ) -> Self {
        Self { table: declaration.add(name, &[vocabulary, hidden], init), hidden }
    }
}

impl<D: Device> Block<D> for Embedding {
    fn forward(&self, pass: &Pass<'_, D>, input: Option<D::Floats>, _: &mut Saved<D>) -> Result<Output<D>> {
        let text = pass.context.inputs.text()?;
        let mut y = pass.device.zeros(pass.context.layers.rows * self.hidden)?;
        let table = pass.parameters.value(self.table);
        pass.device.mix_rows(&text.embedding.forward, self.hidden, table, &mut y)?;
        if let Some((media, rows)) = &text.media {
            let tokens = rows_of::<D>(input, *rows, self.hidden)?;
            pass.device.mix_rows(&media.forward, self.hidden, &tokens, &mut y)?;
        }
        Ok(Output::Rows(y))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<D::Floats>,
        _: &mut Saved<D>,
        is_input_needed: bool,
    ) -> Result<Option<D::Floats>> {
        let text = pass.context.inputs.text()?;
        let dy = rows_of::<D>(gradient, pass.context.layers.rows, self.hidden)?;
        if let Some(gradient) = pass.parameters.gradient_mut(self.table) {
            pass.device.mix_rows(&text.embedding.backward, self.hidden, &dy, gradient)?;
        }
        match &text.media {
            Some((media, rows)) if is_input_needed => {
                let mut dx = pass.device.zeros(rows * self.hidden)?;
                pass.device.mix_rows(&media.backward, self.hidden, &dy, &mut dx)?;
                Ok(Some(dx))
            }
            _ => Ok(None),
        }
    }
}
