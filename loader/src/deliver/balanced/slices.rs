//! Cuts packed microbatches into this rank's slices of the samples that several ranks share.
//!
//! A split sample is padded to `2 k` equal chunks for `k` ranks, and rank `r` in the group holds the chunks
//! `r` and `2 k - 1 - r` (*zigzag*). The padding is at the end, has no targets, and under a causal mask no
//! other token attends to it. Token tensors are computed for the whole sample and then cut, so that positions
//! and labels are those of the whole; media tensors have the media that this rank encodes.

use std::ops::Range;

use dflop_costmodel::flops::ZigzagSlices;
use dflop_samples::inputs::{
    AudioFeatures, Filler, IGNORED, ModelInputs, NamedTensor, PixelValues, PreparedSample, SampleProcessor,
    TensorValues, VideoValues,
};
use dflop_samples::media::{Modality, PixelBuffer};

use crate::plan::{MediumPart, SamplePlace};

/// Samples of a microbatch that this rank shares with other ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MicrobatchContext {
    /// Groups of ranks, the largest first: the order in which all ranks exchange keys and values in a layer.
    pub groups: Vec<SliceGroup>,
}

/// Slices of the samples that the ranks in a group share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceGroup {
    /// DP ranks in the group.
    pub ranks: Range<usize>,
    /// Indices of the samples in the microbatch.
    pub samples: Range<usize>,
    /// Rows of the slices in the token tensors of this rank.
    pub rows: Range<usize>,
    /// First token of every whole sample, with padding, then the number of tokens: `[samples + 1]`.
    pub cu_seqlens: Vec<i32>,
    /// Tokens in every whole sample without padding.
    pub lengths: Vec<i32>,
    /// Position among the tokens of the whole samples for each of `rows`.
    pub positions: Vec<i64>,
    /// Row of each token of the whole samples, if the rows of all ranks follow each other, as after an
    /// all-gather.
    pub order: Vec<i64>,
    /// Media in token order, with the rank that encodes each, or each part: images, then videos, then clips
    /// of a sample.
    pub media: Vec<SliceMedium>,
    /// Feature that each of `rows` takes from the encoders, counted over the features in `media`; -1 for
    /// tokens that are no media.
    pub features: Vec<i64>,
}

/// Medium, or part of a medium, in a sample that several ranks share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceMedium {
    /// Sample index in the microbatch.
    pub sample: usize,
    /// Parts, and the rank that encodes them.
    pub part: MediumPart,
    /// Number of LLM positions that the features take. For families that arrange the features of all tiles
    /// together, the first part has all positions.
    pub tokens: usize,
}

/// Microbatch as tensors, with the groups whose samples this rank shares.
pub(super) struct SlicedInputs {
    pub(super) inputs: ModelInputs,
    pub(super) context: MicrobatchContext,
    /// Tokens of this rank without padding.
    pub(super) tokens: u64,
}

/// Packs a microbatch and cuts the samples that several ranks share.
///
/// - `places`: place of each sample; those in larger groups come first
/// - `rank`: this DP rank
///
/// # Errors
/// The sample index and the reason, if a medium does not have the planned parts.
pub(super) fn pack_slices(
    preparer: &dyn SampleProcessor,
    mut samples: Vec<PreparedSample>,
    places: &[SamplePlace],
    rank: usize,
    filler: &Filler,
) -> Result<SlicedInputs, (usize, String)> {
    let lengths: Vec<usize> = samples.iter().map(PreparedSample::tokens).collect();
    let mut media = Vec::with_capacity(samples.len());
    let mut planned = Vec::with_capacity(samples.len());
    for (at, (sample, place)) in samples.iter_mut().zip(places).enumerate() {
        let parts = if place.is_split() { planned_media(sample, place) } else { Vec::new() };
        media.push(take_media(sample, place, &parts, rank).map_err(|reason| (at, reason))?);
        planned.push(parts);
        if place.is_split() {
            let padded = sample.tokens().next_multiple_of(2 * place.ranks.len());
            sample.input_ids.resize(padded, filler.pad_id().unwrap_or_default());
            sample.labels.resize(padded, IGNORED);
        }
    }
    // Fillers follow from the media that this rank encodes, whose samples have no tokens.
    let probes: Vec<PreparedSample> = media.iter().map(|(_, probe)| probe.clone()).collect();
    let fillers: Vec<PreparedSample> = filler.of(&probes).cloned().collect();
    let cuts = Cuts::new(&samples, places, rank, &lengths, &fillers);
    let groups = groups(&samples, places, &planned, rank, &lengths, &cuts);
    let none = Filler::new(None, Vec::new());
    samples.extend(fillers.iter().cloned());
    let whole = preparer.pack(samples, &none);
    let encoded = media.into_iter().map(|(own, _)| own).chain(fillers).collect();
    let encoded = preparer.pack(encoded, &none);
    let inputs = cuts.cut(&whole, encoded);
    Ok(SlicedInputs { inputs, context: MicrobatchContext { groups }, tokens: cuts.tokens })
}

/// Rows of a rank among the tokens of all whole sequences.
struct Cuts {
    /// Number of tokens in all whole sequences.
    whole_tokens: usize,
    /// Token of each row.
    rows: Vec<usize>,
    /// Last token of the sequence of each row.
    last: Vec<usize>,
    /// First row of each sequence, then the number of rows.
    starts: Vec<usize>,
    tokens: u64,
}

impl Cuts {
    fn new(
        samples: &[PreparedSample],
        places: &[SamplePlace],
        rank: usize,
        lengths: &[usize],
        fillers: &[PreparedSample],
    ) -> Self {
        let mut cuts =
            Self { whole_tokens: 0, rows: Vec::new(), last: Vec::new(), starts: vec![0], tokens: 0 };
        for ((sample, place), &length) in samples.iter().zip(places).zip(lengths) {
            let own = own_tokens(sample.tokens(), place, rank);
            cuts.tokens += own.iter().filter(|token| **token < length).count() as u64;
            cuts.add(sample.tokens(), own);
        }
        for filler in fillers {
            cuts.add(filler.tokens(), (0..filler.tokens()).collect());
        }
        cuts
    }

    /// Adds a sequence, and the tokens in it that this rank holds.
    fn add(&mut self, tokens: usize, own: Vec<usize>) {
        let end = self.whole_tokens + tokens;
        self.last.extend(std::iter::repeat_n(end.saturating_sub(1), own.len()));
        self.rows.extend(own.into_iter().map(|token| self.whole_tokens + token));
        self.starts.push(self.rows.len());
        self.whole_tokens = end;
    }

    /// Cuts the token tensors of whole sequences, and adds the tensors of encoded media.
    fn cut(&self, whole: &ModelInputs, encoded: ModelInputs) -> ModelInputs {
        let is_token = |tensor: &NamedTensor| TOKEN_TENSORS.contains(&tensor.name);
        let mut tensors = Vec::new();
        for tensor in whole.tensors.iter().filter(|tensor| is_token(tensor)) {
            let TensorValues::I64(values) = &tensor.values else { continue };
            let axes = values.chunks(self.whole_tokens.max(1));
            let own = axes.flat_map(|axis| self.rows.iter().map(|row| axis[*row])).collect();
            let mut shape = tensor.shape.clone();
            if let Some(tokens) = shape.last_mut() {
                *tokens = self.rows.len();
            }
            tensors.push(NamedTensor::ints(tensor.name, shape, own));
            if tensor.name == "labels" {
                // The label of the next token in the whole sequence, on whichever rank that token is.
                let next = |(row, last): (&usize, &usize)| {
                    if row < last { values[row + 1] } else { i64::from(IGNORED) }
                };
                let shifted = self.rows.iter().zip(&self.last).map(next).collect();
                tensors.push(NamedTensor::ints("shift_labels", vec![1, self.rows.len()], shifted));
            }
        }
        let is_target = |label: &&i64| **label != i64::from(IGNORED);
        let shifted = tensors.iter().find(|tensor| tensor.name == "shift_labels");
        let target_tokens = match shifted.map(|tensor| &tensor.values) {
            Some(TensorValues::I64(labels)) => labels.iter().filter(is_target).count() as u64,
            _ => 0,
        };
        tensors.extend(encoded.tensors.into_iter().filter(|tensor| !is_token(tensor)));
        let lengths = self.starts.windows(2).map(|ends| ends[1] - ends[0]);
        ModelInputs {
            tensors,
            cu_seqlens: self.starts.iter().map(|start| *start as i32).collect(),
            max_seqlen: lengths.max().unwrap_or(0) as u32,
            tokens: self.tokens,
            target_tokens,
        }
    }
}

/// Tensors with a value per token.
const TOKEN_TENSORS: [&str; 5] =
    ["input_ids", "labels", "position_ids", "mm_token_type_ids", "token_type_ids"];

/// Returns the tokens of a sample that a rank holds.
fn own_tokens(tokens: usize, place: &SamplePlace, rank: usize) -> Vec<usize> {
    let slices = ZigzagSlices::new(tokens as u32, place.ranks.len() as u32);
    let chunks = slices.chunks((rank - place.ranks.start) as u32);
    chunks.into_iter().flatten().map(|token| token as usize).collect()
}

/// Describes the groups, whose samples follow each other.
fn groups(
    samples: &[PreparedSample],
    places: &[SamplePlace],
    planned: &[Vec<PlacedMedium>],
    rank: usize,
    lengths: &[usize],
    cuts: &Cuts,
) -> Vec<SliceGroup> {
    let mut groups: Vec<SliceGroup> = Vec::new();
    for (at, place) in places.iter().enumerate().filter(|(_, place)| place.is_split()) {
        if groups.last().is_none_or(|group| group.ranks != place.ranks) {
            groups.push(SliceGroup {
                ranks: place.ranks.clone(),
                samples: at..at,
                rows: cuts.starts[at]..cuts.starts[at],
                cu_seqlens: vec![0],
                lengths: Vec::new(),
                positions: Vec::new(),
                order: Vec::new(),
                media: Vec::new(),
                features: Vec::new(),
            });
        }
        if let Some(group) = groups.last_mut() {
            group.add(at, &samples[at], place, &planned[at], rank);
            group.rows.end = cuts.starts[at + 1];
            group.lengths.push(lengths[at] as i32);
        }
    }
    for group in &mut groups {
        group.order = gathered_order(&group.cu_seqlens, group.ranks.len());
    }
    groups
}

impl SliceGroup {
    fn add(
        &mut self,
        at: usize,
        sample: &PreparedSample,
        place: &SamplePlace,
        planned: &[PlacedMedium],
        rank: usize,
    ) {
        let first = self.cu_seqlens.last().copied().unwrap_or(0);
        let own = own_tokens(sample.tokens(), place, rank);
        self.positions.extend(own.iter().map(|token| i64::from(first) + *token as i64));
        let known: usize = self.media.iter().map(|medium| medium.tokens).sum();
        let features = features(sample, known);
        self.features.extend(own.iter().map(|token| features[*token]));
        for medium in planned {
            self.media.extend(medium.parts.iter().map(|part| SliceMedium {
                sample: at,
                part: part.clone(),
                tokens: medium.part_tokens(part),
            }));
        }
        self.cu_seqlens.push(first + sample.tokens() as i32);
        self.samples.end = at + 1;
    }
}

/// Returns the row of each token, if the slices of all ranks follow each other.
fn gathered_order(cu_seqlens: &[i32], ranks: usize) -> Vec<i64> {
    let tokens = cu_seqlens.last().map_or(0, |tokens| *tokens as usize);
    let mut order = vec![0; tokens];
    let mut row = 0;
    for rank in 0..ranks {
        for ends in cu_seqlens.windows(2) {
            let slices = ZigzagSlices::new((ends[1] - ends[0]) as u32, ranks as u32);
            for token in slices.chunks(rank as u32).into_iter().flatten() {
                order[ends[0] as usize + token as usize] = row;
                row += 1;
            }
        }
    }
    order
}

/// Returns the feature that each token takes: images first, then videos, then clips, each in token order.
fn features(sample: &PreparedSample, known: usize) -> Vec<i64> {
    let mut features = vec![-1; sample.tokens()];
    let mut next = known as i64;
    for modality in KINDS {
        for run in sample.runs.iter().filter(|run| run.modality == modality) {
            let placeholder = sample.input_ids.get(run.start);
            // Runs may have markers between rows of features.
            let tokens = sample.input_ids.iter().zip(&mut features).skip(run.start).take(run.tokens);
            for (_, feature) in tokens.filter(|(id, _)| Some(*id) == placeholder) {
                *feature = next;
                next += 1;
            }
        }
    }
    features
}

/// Order of media in a sample.
const KINDS: [Modality; 3] = [Modality::Image, Modality::Video, Modality::Audio];

/// Prepared medium with the ranks that encode the parts.
struct PlacedMedium {
    parts: Vec<MediumPart>,
    tokens: usize,
}

impl PlacedMedium {
    fn part_tokens(&self, part: &MediumPart) -> usize {
        let in_medium = part.parts_in_medium.max(1) as usize;
        if !self.tokens.is_multiple_of(in_medium) {
            return if part.parts.start == 0 { self.tokens } else { 0 };
        }
        self.tokens / in_medium * (part.parts.end - part.parts.start) as usize
    }
}

/// Returns the ranks that encode each prepared medium, as planned. Media that are prepared in other numbers,
/// as frames that become images, are dealt to the ranks in order.
fn planned_media(sample: &PreparedSample, place: &SamplePlace) -> Vec<PlacedMedium> {
    let mut placed = Vec::new();
    for modality in KINDS {
        let tokens: Vec<u32> = match modality {
            Modality::Image => sample.images.iter().map(|image| image.tokens).collect(),
            Modality::Video => sample.videos.iter().map(|video| video.pixels.tokens).collect(),
            Modality::Audio => sample.clips.iter().map(|clip| clip.tokens).collect(),
        };
        let order = &sample.media_order[modality as usize];
        for (at, &own) in tokens.iter().enumerate() {
            let whole = |index: u32, rank: usize| MediumPart {
                modality,
                index,
                parts: 0..1,
                parts_in_medium: 1,
                rank,
            };
            let parts = match order.get(at).filter(|_| order.len() == tokens.len()) {
                Some(&index) => {
                    let own =
                        place.media.iter().filter(|part| (part.modality, part.index) == (modality, index));
                    let own: Vec<MediumPart> = own.cloned().collect();
                    if own.is_empty() { vec![whole(index, place.ranks.start)] } else { own }
                }
                None => {
                    vec![whole(at as u32, place.ranks.start + at * place.ranks.len() / tokens.len())]
                }
            };
            placed.push(PlacedMedium { parts, tokens: own as usize });
        }
    }
    placed
}

/// Takes the media of a sample that a rank encodes into a sample without tokens, and leaves sizes and counts.
/// The second sample has the runs that show which encoders run.
fn take_media(
    sample: &mut PreparedSample,
    place: &SamplePlace,
    planned: &[PlacedMedium],
    rank: usize,
) -> Result<(PreparedSample, PreparedSample), String> {
    let mut own = PreparedSample::default();
    let mut probe = PreparedSample::default();
    if !place.is_split() {
        probe.runs.clone_from(&sample.runs);
        own.images = sample.images.iter_mut().map(take_pixels).collect();
        own.videos = sample.videos.iter_mut().map(take_video).collect();
        own.clips = sample.clips.iter_mut().map(take_clip).collect();
        return Ok((own, probe));
    }
    let mut placed = planned.iter();
    let of_rank = |medium: Option<&PlacedMedium>| -> Vec<MediumPart> {
        let parts = medium.map_or(&[][..], |medium| &medium.parts);
        parts.iter().filter(|part| part.rank == rank).cloned().collect()
    };
    for image in &mut sample.images {
        let taken = take_pixels(image);
        for part in of_rank(placed.next()) {
            own.images.push(cut_pixels(&taken, &part)?);
        }
    }
    for video in &mut sample.videos {
        let taken = take_video(video);
        for part in of_rank(placed.next()) {
            own.videos.push(VideoValues { pixels: cut_pixels(&taken.pixels, &part)?, ..video.clone() });
        }
    }
    for clip in &mut sample.clips {
        let taken = take_clip(clip);
        if !of_rank(placed.next()).is_empty() {
            own.clips.push(taken);
        }
    }
    let is_encoded = |modality| match modality {
        Modality::Image => !own.images.is_empty(),
        Modality::Video => !own.videos.is_empty(),
        Modality::Audio => !own.clips.is_empty(),
    };
    probe.runs = sample.runs.iter().filter(|run| is_encoded(run.modality)).cloned().collect();
    Ok((own, probe))
}

/// Takes the pixels, and leaves a medium that is only counted.
fn take_pixels(pixels: &mut PixelValues) -> PixelValues {
    let (values, shape) = (std::mem::take(&mut pixels.values), std::mem::take(&mut pixels.shape));
    PixelValues { values, shape, ..pixels.clone() }
}

fn take_video(video: &mut VideoValues) -> VideoValues {
    let pixels = take_pixels(&mut video.pixels);
    VideoValues { pixels, ..video.clone() }
}

fn take_clip(clip: &mut AudioFeatures) -> AudioFeatures {
    let counted = AudioFeatures { tokens: clip.tokens, ..AudioFeatures::default() };
    std::mem::replace(clip, counted)
}

/// Returns the rows of some parts of a medium.
fn cut_pixels(medium: &PixelValues, part: &MediumPart) -> Result<PixelValues, String> {
    if part.parts == (0..part.parts_in_medium) {
        return Ok(medium.clone());
    }
    let (in_medium, rows) = (part.parts_in_medium as usize, medium.shape.first().copied().unwrap_or(0));
    let layers = medium.grid_thw.filter(|_| part.modality == Modality::Video).map(|[layers, ..]| layers);
    if rows == 0 || !rows.is_multiple_of(in_medium) || layers.is_some_and(|own| own as usize != in_medium) {
        let name = part.modality.name();
        return Err(format!(
            "{name} {} has {rows} rows of pixels, which are not the {in_medium} equal parts that were planned",
            part.index
        ));
    }
    let row_values: usize = medium.shape[1..].iter().product();
    let per_part = rows / in_medium;
    let [start, end] = [part.parts.start, part.parts.end].map(|at| at as usize * per_part);
    let mut own = PixelValues { values: PixelBuffer::default(), ..medium.clone() };
    own.values = medium.values.range(start * row_values..end * row_values);
    own.shape[0] = end - start;
    let count = (part.parts.end - part.parts.start) as u32;
    if let (Some(grid), Some(_)) = (&mut own.grid_thw, layers) {
        grid[0] = count;
    }
    own.tokens = medium.tokens / part.parts_in_medium as u32 * count;
    Ok(own)
}
