//! Uploads microbatch media to the device.

use super::audio_rows::{arrange_chunks, arrange_windows};
use super::config::{Arrangement, EncoderConfig, Stem};
use super::convolution::AudioPositions;
use super::input::{EncoderInput, refuse};
use crate::block::{EncoderInputs, LayerContext, MicrobatchContext, ModuleInputs};
use crate::error::Result;
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::{Device, DeviceSparseRows, Segments};

impl EncoderConfig {
    /// Checks microbatch media and uploads the encoder stage inputs.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) that names the mismatched input.
    pub fn context<D: Device>(&self, device: &D, medium: &EncoderInput<'_>) -> Result<MicrobatchContext<D>> {
        let plan = match (&self.arrangement, *medium) {
            (Arrangement::Tiles(tiles), EncoderInput::Tiles { pixels, shown }) => {
                tiles.plan(pixels, shown)?
            }
            (Arrangement::Native(native), EncoderInput::Patches { values, grids }) => {
                native.plan(values, grids)?
            }
            (Arrangement::Windows, EncoderInput::Windows { features, frames }) => {
                let (mels, positions) = self.audio_stem()?;
                arrange_windows(mels, positions.rows(), features, frames)?
            }
            (Arrangement::Chunks { frames: chunk }, EncoderInput::Clips { features, frames }) => {
                let (mels, _) = self.audio_stem()?;
                arrange_chunks(mels, self.hidden, *chunk, features, frames)?
            }
            _ => return refuse("medium", "is of another kind than the encoder takes".to_owned()),
        };
        let rotation = match (&self.arrangement, &plan.rotation) {
            (Arrangement::Native(native), Some([rows, columns])) => {
                Some(native.rope().angles(device, &[rows.as_slice(), columns].concat(), rows.len())?)
            }
            _ => None,
        };
        let upload = |mix: &SparseRows| mix.upload(device);
        let stem: Vec<DeviceSparseRows<D>> = plan.stem.iter().map(upload).collect::<Result<_, _>>()?;
        let optional = |mix: &Option<SparseRows>| mix.as_ref().map(upload).transpose();
        let has_table = !plan.position_table.is_empty();
        let has_windows = !plan.windows.is_empty();
        let windows = has_windows.then(|| Segments::new(device, &plan.windows)).transpose()?;
        Ok(MicrobatchContext {
            layers: LayerContext {
                rows: plan.segments.last().map_or(0, |&rows| rows as usize),
                segments: Segments::new(device, &plan.segments)?,
                windows,
                rotation,
                window_rotation: None,
                query_scales: None,
            },
            inputs: ModuleInputs::Encoder(EncoderInputs {
                medium: device.upload(&plan.medium)?,
                medium_rows: plan.medium_rows,
                stem,
                positions: optional(&plan.positions)?,
                position_table: has_table.then(|| device.upload(&plan.position_table)).transpose()?,
                class: optional(&plan.class)?,
                taken: optional(&plan.taken)?,
                projected_rows: plan.projected_rows,
                // without an arrangement, projected rows are the tokens
                tokens: plan.arranged.as_ref().map_or(plan.projected_rows, SparseRows::rows),
                arranged: optional(&plan.arranged)?,
                newlines: optional(&plan.newlines)?,
            }),
        })
    }

    /// Returns mel bins and positions for an audio encoder.
    fn audio_stem(&self) -> Result<(usize, AudioPositions)> {
        match self.stem {
            Stem::Audio { mels, positions, .. } => Ok((mels, positions)),
            Stem::Patches(_) => refuse("medium", "is of another kind than the encoder takes".to_owned()),
        }
    }
}
