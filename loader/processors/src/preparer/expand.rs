//! Expands each medium placeholder to as many tokens as the encoder produces.
//!
//! Writes image tokens whose features are not in a single run.

use crate::chat::Tokenizer;
use crate::family::{Arrangement, Family, Placeholder, VideoText};
use dflop_samples::inputs::{MediaRun, PixelValues, PrepareError};
use dflop_samples::media::Modality;
use dflop_samples::{Error, Result};

/// Ids with media expanded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Expanded {
    pub(super) ids: Vec<u32>,
    pub(super) is_target: Vec<bool>,
    pub(super) runs: Vec<MediaRun>,
}

/// Ids of a placeholder and the markers.
#[derive(Debug, Clone)]
struct PlaceholderIds {
    modality: Modality,
    token: String,
    id: u32,
    markers: Option<[u32; 2]>,
    has_markers_in_text: bool,
}

/// A family's placeholder ids in a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Expander {
    placeholders: Vec<PlaceholderIds>,
    arrangement: Option<ArrangementIds>,
}

impl Expander {
    /// Looks up the placeholders; a vocabulary without a video placeholder belongs to a model that supports
    /// only images.
    ///
    /// # Errors
    /// [`Error::Config`] naming the token that the vocabulary lacks.
    pub(super) fn new(family: &Family, tokenizer: &Tokenizer) -> Result<Self> {
        let mut placeholders = Vec::new();
        for (modality, placeholder) in [(Modality::Image, family.image()), (Modality::Audio, family.audio())]
        {
            if let Some(placeholder) = placeholder {
                placeholders.push(PlaceholderIds::new(modality, placeholder, tokenizer)?);
            }
        }
        if let Some(placeholder) = family.video().and_then(VideoText::placeholder)
            && tokenizer.id(placeholder.token).is_some()
        {
            placeholders.push(PlaceholderIds::new(Modality::Video, placeholder, tokenizer)?);
        }
        let arrangement = ArrangementIds::new(family.arrangement(), tokenizer)?;
        Ok(Self { placeholders, arrangement })
    }

    /// Returns whether the vocabulary has a placeholder for a modality.
    pub(super) fn has_placeholder(&self, modality: Modality) -> bool {
        self.placeholders.iter().any(|known| known.modality == modality)
    }

    /// Returns the ids for a medium with this number of tokens, including markers, the position of the first
    /// medium token, and whether there are markers.
    pub(super) fn lone(&self, modality: Modality, tokens: usize) -> Option<(Vec<u32>, usize, bool)> {
        let known = self.placeholders.iter().find(|known| known.modality == modality)?;
        let mut ids: Vec<u32> = known.markers.map(|[open, _]| open).into_iter().collect();
        let start = ids.len();
        ids.extend(std::iter::repeat_n(known.id, tokens));
        ids.extend(known.markers.map(|[_, close]| close));
        Some((ids, start, start > 0))
    }

    /// Expands media in ids: the n-th placeholder for a modality becomes as many copies as the n-th medium
    /// has tokens. If features are in rows, the n-th entry in `images` has the grid; without a grid the
    /// medium is a single run.
    ///
    /// # Errors
    /// [`PrepareError::MediaTokens`] if the number of placeholders differs from the number of media, for
    /// example because the text contains a placeholder token literally.
    pub(super) fn expand(
        &self,
        ids: &[u32],
        is_target: &[bool],
        tokens_of: impl Fn(Modality) -> Vec<u32>,
        images: &[PixelValues],
    ) -> Result<Expanded, PrepareError> {
        let tokens: Vec<Vec<u32>> =
            self.placeholders.iter().map(|placeholder| tokens_of(placeholder.modality)).collect();
        for (placeholder, media) in self.placeholders.iter().zip(&tokens) {
            let found = ids.iter().filter(|&&id| id == placeholder.id).count();
            if found != media.len() {
                let (token, modality) = (placeholder.token.clone(), placeholder.modality);
                let media = media.len();
                return Err(PrepareError::MediaTokens { token, modality, found, media });
            }
        }
        let mut expanded = Expanded::default();
        let mut next = vec![0; self.placeholders.len()];
        for (&id, &is_target) in ids.iter().zip(is_target) {
            let Some(at) = self.placeholders.iter().position(|placeholder| placeholder.id == id) else {
                expanded.ids.push(id);
                expanded.is_target.push(is_target);
                continue;
            };
            let media_tokens = tokens[at][next[at]] as usize;
            let is_image = self.placeholders[at].modality == Modality::Image;
            let grid = images.get(next[at]).filter(|_| is_image).and_then(|image| image.grid_thw);
            next[at] += 1;
            match self.arrangement.as_ref().zip(grid) {
                Some((arrangement, grid)) => {
                    let ids = arrangement.image_tokens(self.placeholders[at].id, grid);
                    expanded.push_image(ids);
                }
                None => self.placeholders[at].push(&mut expanded, media_tokens),
            }
        }
        expanded.mask_markers_in_text(&self.placeholders);
        Ok(expanded)
    }
}

impl Expanded {
    /// Appends an image whose tokens are not all placeholder copies.
    fn push_image(&mut self, ids: Vec<u32>) {
        let (start, tokens) = (self.ids.len(), ids.len());
        self.ids.extend(ids);
        self.is_target.resize(self.ids.len(), false);
        self.runs.push(MediaRun { modality: Modality::Image, start, tokens, has_markers: false });
    }

    /// Counts markers that the chat template wrote around a medium as part of the medium, so that they are
    /// not targets.
    fn mask_markers_in_text(&mut self, placeholders: &[PlaceholderIds]) {
        for run in &mut self.runs {
            let ids = placeholders.iter().find(|ids| ids.modality == run.modality && ids.has_markers_in_text);
            let Some([open, close]) = ids.and_then(|ids| ids.markers) else { continue };
            let end = run.start + run.tokens;
            let before = run.start.checked_sub(1).map(|before| self.ids[before]);
            if before == Some(open) && self.ids.get(end) == Some(&close) {
                run.has_markers = true;
                self.is_target[run.start - 1] = false;
                self.is_target[end] = false;
            }
        }
    }
}

impl PlaceholderIds {
    fn new(modality: Modality, placeholder: &Placeholder, tokenizer: &Tokenizer) -> Result<Self> {
        let id = |token: &str| known_id(token, tokenizer);
        let token_id = id(placeholder.token)?;
        let markers = match placeholder.markers {
            Some([open, close]) => Some([id(open)?, id(close)?]),
            None => None,
        };
        let token = placeholder.token.to_owned();
        let has_markers_in_text = placeholder.has_markers_in_text;
        Ok(Self { modality, id: token_id, token, markers, has_markers_in_text })
    }

    fn push(&self, expanded: &mut Expanded, tokens: usize) {
        let markers = self.markers.filter(|_| !self.has_markers_in_text);
        expanded.ids.extend(markers.map(|[open, _]| open));
        let start = expanded.ids.len();
        expanded.ids.extend(std::iter::repeat_n(self.id, tokens));
        expanded.ids.extend(markers.map(|[_, close]| close));
        expanded.is_target.resize(expanded.ids.len(), false);
        let has_markers = markers.is_some();
        expanded.runs.push(MediaRun { modality: self.modality, start, tokens, has_markers });
    }
}

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
