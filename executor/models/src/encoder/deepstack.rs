//! Projects earlier encoder layers in addition to the last layer, for the first LLM layers.
//!
//! A [`Snapshot`] after each such layer keeps the layer rows; [`StackedProjectors`] projects them next to the
//! rows of the last layer, so that a token has columns from all projectors, starting with the last layer. If
//! a pipeline cuts the encoder, kept rows go to the next stage as further columns: [`JoinKept`] and
//! [`SplitKept`].
//!
//! # Source
//! Meng et al.: "`DeepStack`", 2024, arXiv:2406.04334; Qwen Team: "Qwen3-VL Technical Report", 2025,
//! arXiv:2511.21631.

use super::projector::Projector;
use crate::block::{
    BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, expect_rows, join_columns, split_columns,
};
use crate::error::Result;
use dflop_device::{Device, Tensor};

/// Keeps the layer rows for a projector.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) hidden: usize,
}

impl<D: Device> Block<D> for Snapshot {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let x = expect_rows::<D>(input, pass.context.layers.rows, self.hidden)?;
        let kept = pass.device.copy(&x)?;
        pass.kept.push(kept);
        Ok(BlockOutput::Rows(x))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
        _is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let mut d = expect_rows::<D>(gradient, pass.context.layers.rows, self.hidden)?;
        let of_projector = pass.kept.pop()?;
        pass.device.add(&of_projector, &mut d)?;
        Ok(Some(d))
    }
}

/// Joins rows and kept rows at the end of a stage, side by side.
#[derive(Debug)]
pub(super) struct JoinKept {
    pub(super) hidden: usize,
    /// Number of kept tensors.
    pub(super) kept: usize,
}

/// Separates rows and kept rows at the start of a stage.
#[derive(Debug)]
pub(super) struct SplitKept {
    pub(super) hidden: usize,
    /// Number of kept tensors.
    pub(super) kept: usize,
}

impl<D: Device> Block<D> for JoinKept {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let rows = pass.context.layers.rows;
        let mut parts = vec![expect_rows::<D>(input, rows, self.hidden)?];
        parts.extend(pass.kept.take(self.kept)?);
        join_columns(pass.device, &parts, rows, self.hidden).map(BlockOutput::Rows)
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
        _is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let rows = pass.context.layers.rows;
        let d = expect_rows::<D>(gradient, rows, self.hidden * (1 + self.kept))?;
        let mut parts = split_columns(pass.device, &d, rows, 1 + self.kept)?.into_iter();
        let d = parts.next();
        parts.for_each(|part| pass.kept.push(part));
        Ok(d)
    }
}

impl<D: Device> Block<D> for SplitKept {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let rows = pass.context.layers.rows;
        let joined = expect_rows::<D>(input, rows, self.hidden * (1 + self.kept))?;
        let mut parts = split_columns(pass.device, &joined, rows, 1 + self.kept)?.into_iter();
        let x = expect_rows::<D>(parts.next(), rows, self.hidden)?;
        parts.for_each(|part| pass.kept.push(part));
        Ok(BlockOutput::Rows(x))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let rows = pass.context.layers.rows;
        let mut parts = vec![expect_rows::<D>(gradient, rows, self.hidden)?];
        parts.extend(pass.kept.take(self.kept)?);
        if !is_input_needed {
            return Ok(None);
        }
        join_columns(pass.device, &parts, rows, self.hidden).map(Some)
    }
}

/// Projectors for the last layer and for earlier layers, with outputs side by side.
#[derive(Debug)]
pub(super) struct StackedProjectors {
    /// Projector for the last layer, then projectors for earlier layers in order.
    pub(super) projectors: Vec<Projector>,
    /// LLM width.
    pub(super) outputs: usize,
}

impl<D: Device> Block<D> for StackedProjectors {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let tokens = pass.context.inputs.encoder()?.tokens;
        let kept = pass.kept.take(self.projectors.len() - 1)?;
        let inputs = std::iter::once(input).chain(kept.into_iter().map(Some));
        let mut parts = Vec::with_capacity(self.projectors.len());
        for (projector, rows) in self.projectors.iter().zip(inputs) {
            let BlockOutput::Rows(projected) = projector.forward(pass, rows, saved)? else { continue };
            parts.push(projected);
        }
        join_columns(pass.device, &parts, tokens, self.outputs).map(BlockOutput::Rows)
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let tokens = pass.context.inputs.encoder()?.tokens;
        let d = expect_rows::<D>(gradient, tokens, self.outputs * self.projectors.len())?;
        let parts = split_columns(pass.device, &d, tokens, self.projectors.len())?;
        let mut of_inputs = Vec::with_capacity(parts.len());
        for (projector, part) in self.projectors.iter().zip(parts).rev() {
            of_inputs.push(projector.backward(pass, Some(part), saved, is_input_needed)?);
        }
        let of_last = of_inputs.pop().flatten();
        if is_input_needed {
            // the last layer's snapshot pops its gradient first
            of_inputs.into_iter().rev().flatten().for_each(|rows| pass.kept.push(rows));
        }
        Ok(of_last)
    }
}
