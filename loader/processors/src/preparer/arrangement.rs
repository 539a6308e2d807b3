//! Writes image tokens whose features are not in a single run.

use dflop_samples::{Error, Result};

use crate::chat::Tokenizer;
use crate::family::Arrangement;

/// Maximum number of rows and columns of named tiles.
const GRID_SIDE_MAX: usize = 6;

/// Arrangement with vocabulary ids.
#[derive(Debug, Clone)]
pub(super) enum ArrangementIds {
    Rows {
        row_end: u32,
        image_end: u32,
    },
    NamedTiles {
        tile_tokens: usize,
        edge: u32,
        whole: u32,
        /// Tile name ids, `[rows, columns]`.
        names: Vec<Vec<u32>>,
        /// Line break after a row, and blank line after the last row.
        breaks: [Vec<u32>; 2],
    },
}

impl ArrangementIds {
    /// Looks up the tokens; `None` for features in a single run.
    ///
    /// # Errors
    /// [`Error::Config`] naming the token that the vocabulary lacks.
    pub(super) fn new(arrangement: Arrangement, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let id = |token: &str| known_id(token, tokenizer);
        Ok(match arrangement {
            Arrangement::Run => None,
            Arrangement::Rows { row_end, image_end } => {
                Some(Self::Rows { row_end: id(row_end)?, image_end: id(image_end)? })
            }
            Arrangement::NamedTiles { tile_tokens, edge, whole } => {
                let name = |row: usize, column: usize| id(&format!("<row_{row}_col_{column}>"));
                let of_row = |row| -> Result<Vec<u32>> {
                    (1..=GRID_SIDE_MAX).map(|column| name(row, column)).collect()
                };
                let names = (1..=GRID_SIDE_MAX).map(of_row).collect::<Result<Vec<Vec<u32>>>>()?;
                let encoded = |text: &str| -> Result<Vec<u32>> {
                    let refused = |reason| Error::Config { setting: "tokenizer", reason };
                    Ok(tokenizer.encode(text, false).map_err(refused)?.ids)
                };
                let breaks = [encoded("\n")?, encoded("\n\n")?];
                let (edge, whole) = (id(edge)?, id(whole)?);
                Some(Self::NamedTiles { tile_tokens: tile_tokens as usize, edge, whole, names, breaks })
            }
        })
    }

    /// Returns the tokens for an image, with `feature` for each image feature.
    ///
    /// - `grid`: layers, rows and columns, counted in features or in named tiles without the whole-image tile
    pub(super) fn image_tokens(&self, feature: u32, [_, rows, columns]: [u32; 3]) -> Vec<u32> {
        let [rows, columns] = [rows, columns].map(|count| count as usize);
        let mut ids = Vec::new();
        match self {
            Self::Rows { row_end, image_end } => {
                for row in 1..=rows {
                    ids.extend(std::iter::repeat_n(feature, columns));
                    ids.push(if row == rows { *image_end } else { *row_end });
                }
            }
            Self::NamedTiles { tile_tokens, edge, whole, names, breaks } => {
                for (row, names) in names.iter().enumerate().take(rows) {
                    for name in names.iter().take(columns) {
                        ids.extend([*edge, *name]);
                        ids.extend(std::iter::repeat_n(feature, *tile_tokens));
                    }
                    ids.extend(&breaks[usize::from(row + 1 == rows)]);
                }
                ids.extend([*edge, *whole]);
                ids.extend(std::iter::repeat_n(feature, *tile_tokens));
                ids.push(*edge);
            }
        }
        ids
    }
}

/// Returns the id of a token that the model's media need.
pub(super) fn known_id(token: &str, tokenizer: &Tokenizer) -> Result<u32> {
    let reason = || format!("the vocabulary has no `{token}`, the placeholder of this model's media");
    tokenizer.id(token).ok_or_else(|| Error::Config { setting: "tokenizer", reason: reason() })
}
