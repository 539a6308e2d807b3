//! Converts a described encoder with connectors: sizes that give the counted numbers, or counts.

use std::num::NonZeroU16;

use super::document::{CountedPart, DescribedModule, LayerRun, ModuleRole};
use super::token_rule::{EncoderUnits, TokenRule, TokenRuleKind};
use super::{Reach, invalid, product, whole};
use crate::error::{Error, Result};
use crate::interned::Interned;
use crate::model::counts::{EncoderCounts, Passes, Polynomial};
use crate::model::{EncoderDetails, EncoderParameters, EncoderSpec, Mlp, Projector};
use crate::tokens::VisionRule;
use crate::tokens::audio::AudioRule;
use crate::tokens::native::NativeResolution;
use crate::tokens::table::TokenTable;

/// Maximum number of MLP-wide vectors that a layer is searched for.
const FFN_VECTORS_MAX: u64 = 4;

/// Returns the encoder for images, and its token rule.
///
/// - `llm_hidden`: LLM width
/// - `beside`: parameters that belong to no module
pub(super) fn vision(
    module: &DescribedModule,
    llm_hidden: u32,
    beside: u64,
) -> Result<(EncoderSpec, VisionRule)> {
    let described = DescribedEncoder::new(module, llm_hidden, beside)?;
    let rule = match (described.table()?, &described.token_rule.kind) {
        (Some(table), _) => VisionRule::Table(described.interned(table)?),
        (None, TokenRuleKind::Vision(rule, _)) => described.image_rule(*rule)?,
        (None, _) => return Err(described.invalid("token_rule.kind", "is no rule for images")),
    };
    // A tile's tokens without class tokens.
    let tile_tokens = match rule {
        VisionRule::AnyRes(rule) => u32::from(rule.patches_per_side) * u32::from(rule.patches_per_side),
        VisionRule::ListedGrids(rule) => u32::from(rule.patches_per_side) * u32::from(rule.patches_per_side),
        VisionRule::ScaledTiles(rule) => rule.tile_patches,
        VisionRule::FittedTiles(rule) => rule.tile_patches,
        VisionRule::DynamicTiles(rule) => u32::from(rule.tile_patches),
        VisionRule::Fixed(rule) => rule.tile_patches,
        _ => described.module.item_tokens.unwrap_or(1),
    };
    Ok((described.spec(tile_tokens)?, rule))
}

/// Returns the encoder for audio, and its token rule.
///
/// - `llm_hidden`: LLM width
/// - `beside`: parameters that belong to no module
pub(super) fn audio(
    module: &DescribedModule,
    llm_hidden: u32,
    beside: u64,
) -> Result<(EncoderSpec, AudioRule)> {
    let described = DescribedEncoder::new(module, llm_hidden, beside)?;
    let (rule, tile_tokens) = match (described.table()?, &described.token_rule.kind) {
        (Some(table), _) => {
            (AudioRule::Table(described.interned(table)?), described.module.item_tokens.unwrap_or(1))
        }
        (None, &TokenRuleKind::Audio(AudioRule::Windows(mut rule))) => {
            described.require_items(true)?;
            rule.marker_tokens = rule.marker_tokens.saturating_add(described.token_rule.markers());
            (AudioRule::Windows(rule), rule.window_tokens)
        }
        (None, _) => return Err(described.invalid("token_rule.kind", "is no rule for audio")),
    };
    Ok((described.spec(tile_tokens)?, rule))
}

struct DescribedEncoder<'a> {
    module: &'a DescribedModule,
    connectors: &'a [CountedPart],
    token_rule: &'a TokenRule,
    video_rule: Option<NativeResolution>,
    features: &'a [[u64; 3]],
    llm_hidden: u32,
    beside: u64,
    hidden: u32,
    /// Windows in some layers, if there are any.
    windows: Option<Reach>,
    /// Positions per chunk, to which the stem pads; 0 for none.
    chunk_tokens: u32,
}

impl<'a> DescribedEncoder<'a> {
    fn new(module: &'a DescribedModule, llm_hidden: u32, beside: u64) -> Result<Self> {
        let wrong = |field: &str, problem: String| Err(invalid(module.module, field, problem));
        let ModuleRole::Encoder { connectors, output_width, token_rule, video_rule, feature_tokens } =
            &module.role
        else {
            return wrong("module", "must be an encoder".to_owned());
        };
        if *output_width != llm_hidden {
            return wrong("output_width", format!("= {output_width} is not the LLM width {llm_hidden}"));
        }
        let hidden = module.runs.iter().find_map(|run| run.message_width).or(module.sizes.hidden);
        let Some(hidden) = hidden else {
            return wrong("sizes.hidden", "is missing, and so is the layers' `message_width`".to_owned());
        };
        let mut windows = None;
        for run in &module.runs {
            let reach = match run.reach {
                Reach::None | Reach::Full => continue,
                Reach::Causal | Reach::Sliding(_) => {
                    let problem = format!("= \"{}\" is not that of an encoder", run.reach.name());
                    return wrong("layer_runs.attention.pattern", problem);
                }
                reach => reach,
            };
            if *windows.get_or_insert(reach) != reach {
                let problem = "differ between layers: dflop predicts windows of one kind and length";
                return wrong("layer_runs.attention", problem.to_owned());
            }
        }
        let parts = connectors.iter().chain([&module.outside]);
        let mut chunks: Vec<u32> = parts.map(|part| part.chunk_tokens).filter(|chunk| *chunk > 0).collect();
        chunks.dedup();
        if chunks.len() > 1 {
            return wrong("connectors.chunk_tokens", "must be that of `outside_layers`".to_owned());
        }
        let chunk_tokens = chunks.first().copied().unwrap_or(0);
        let features = feature_tokens;
        Ok(Self {
            module,
            connectors,
            token_rule,
            video_rule: *video_rule,
            features,
            llm_hidden,
            beside,
            hidden,
            windows,
            chunk_tokens,
        })
    }

    fn invalid(&self, field: &str, problem: impl Into<String>) -> Error {
        invalid(self.module.module, field, problem.into())
    }

    fn table(&self) -> Result<Option<TokenTable>> {
        let units = EncoderUnits {
            item_tokens: self.module.item_tokens,
            features: self.features,
            windows: self.windows,
            chunk_tokens: self.chunk_tokens,
        };
        self.token_rule.table(&units).map_err(|(field, problem)| self.invalid(field, problem))
    }

    fn interned(&self, table: TokenTable) -> Result<Interned<TokenTable>> {
        Interned::new(table)
            .ok_or_else(|| self.invalid("token_rule.table", "is one of too many different tables"))
    }

    /// Checks that a rule's items are the encoder's: tiles of one length, or media of their own size.
    fn require_items(&self, has_items: bool) -> Result<()> {
        if has_items == self.module.item_tokens.is_some() && self.chunk_tokens == 0 {
            return Ok(());
        }
        let found = if self.module.item_tokens.is_some() { "items" } else { "tokens" };
        let problem = format!("= \"{found}\" does not go with the token rule: expected a measured table");
        Err(self.invalid("unit", problem))
    }

    /// Returns a known rule with the outer markers, for images and for videos with frames cut like them.
    fn image_rule(&self, rule: VisionRule) -> Result<VisionRule> {
        let markers = self.token_rule.markers();
        let add = |own: u8| own.saturating_add(markers);
        let made = match rule {
            VisionRule::Native(mut native) => {
                self.require_items(false)?;
                native.marker_tokens = add(native.marker_tokens);
                native.frames_max = 0;
                let cut = |rule: NativeResolution| (rule.patch_pixels, rule.merge, rule.marker_tokens);
                if let Some(video) = self.video_rule.filter(|video| cut(*video) == cut(native)) {
                    native.frames_max = video.frames_max;
                    (native.frames_per_patch, native.frame) = (video.frames_per_patch, video.frame);
                }
                native.window_patches = match self.windows {
                    Some(Reach::Window(side)) => u16::try_from(side).ok().and_then(NonZeroU16::new),
                    _ => None,
                };
                VisionRule::Native(native)
            }
            VisionRule::DynamicTiles(mut tiles) => {
                tiles.frames_max = 0;
                tiles.marker_tokens = add(tiles.marker_tokens);
                VisionRule::DynamicTiles(tiles)
            }
            VisionRule::Fixed(mut tile) => {
                tile.frames_max = 0;
                tile.marker_tokens = add(tile.marker_tokens);
                VisionRule::Fixed(tile)
            }
            VisionRule::AnyRes(mut tiles) if markers == 0 => {
                tiles.frames_max = 0;
                VisionRule::AnyRes(tiles)
            }
            VisionRule::LongestEdge(_) if markers == 0 => {
                self.require_items(false)?;
                rule
            }
            VisionRule::ListedGrids(_) | VisionRule::ScaledTiles(_) | VisionRule::FittedTiles(_)
                if markers == 0 =>
            {
                rule
            }
            _ => {
                let problem = format!("= {markers} is not supported together with this rule");
                return Err(self.invalid("token_rule.marker_tokens", problem));
            }
        };
        if !made.is_native() {
            self.require_items(true)?;
        }
        let is_windowed = matches!(made, VisionRule::Native(native) if native.window_patches.is_some());
        if self.windows.is_some() && !is_windowed {
            let problem = "has windows that the token rule does not count: expected a measured table";
            return Err(self.invalid("layer_runs.attention", problem));
        }
        Ok(made)
    }

    /// Returns the specification: by sizes if these give all counted numbers, else with counts.
    fn spec(&self, tile_tokens: u32) -> Result<EncoderSpec> {
        let base = self.by_sizes(tile_tokens);
        match self.exact(&base, tile_tokens) {
            Some(exact) => Ok(exact),
            None => Ok(EncoderSpec { counts: Some(self.counts()?), ..base }),
        }
    }

    /// Returns the declared and derived sizes.
    fn by_sizes(&self, tile_tokens: u32) -> EncoderSpec {
        let module = self.module;
        let layers = module.runs.iter().map(|run| run.count);
        let windowed = module.runs.iter().filter(|run| !matches!(run.reach, Reach::None | Reach::Full));
        let (mlp, ffn) = self.mlp(tile_tokens);
        // Layers at the end without a backward pass run although their output is unused.
        let unused = module.runs.iter().rev().take_while(|run| run.flops.backward.is_zero());
        EncoderSpec {
            layers: layers.sum(),
            windowed_layers: windowed.map(|run| run.count).sum(),
            hidden: self.hidden,
            heads: module.sizes.heads.unwrap_or(1),
            ffn,
            mlp,
            stem_inputs: 0,
            projector: self.bare_projector(),
            details: EncoderDetails {
                class_tokens: module.item_tokens.unwrap_or(tile_tokens).saturating_sub(tile_tokens),
                unused_layers: unused.map(|run| run.count).sum(),
                outside_parameters: self.outside_parameters(),
                ..EncoderDetails::default()
            },
            counts: None,
        }
    }

    /// Returns the number of parameters outside layers and connectors, those beside all modules included.
    fn outside_parameters(&self) -> u64 {
        let connectors = self.connectors.iter().map(|part| part.parameters);
        let held = connectors.fold(self.layer_parameters(), u64::saturating_add);
        self.module.parameters.saturating_sub(held).saturating_add(self.beside)
    }

    fn layer_parameters(&self) -> u64 {
        let runs = self.module.runs.iter();
        let parameters = runs.map(|run| run.parameters.saturating_mul(run.count.into()));
        parameters.fold(0, u64::saturating_add)
    }

    /// Returns the MLP kind and width that the first layer's FLOPs leave after attention: as declared if that
    /// fits, else any width that fits, else the declared width.
    fn mlp(&self, tile_tokens: u32) -> (Mlp, u32) {
        let declared = self.module.sizes.ffn;
        let forward = &self.module.runs[0].flops.forward;
        let tokens = u64::from(self.module.item_tokens.unwrap_or(tile_tokens));
        let weights = if self.module.item_tokens.is_none() {
            forward.per_token / 2
        } else {
            let pairs = product([4, self.hidden]).saturating_mul(tokens.saturating_mul(tokens));
            forward.per_item.saturating_sub(pairs) / tokens.saturating_mul(2).max(1)
        };
        let left = weights.saturating_sub(product([4, self.hidden, self.hidden]));
        let width = |mlp: Mlp| whole(left, product([mlp.matrices(), self.hidden])).filter(|width| *width > 0);
        let fits = |mlp: &Mlp| declared.is_some() && width(*mlp) == declared;
        let kinds = [Mlp::Plain, Mlp::Gated];
        let found =
            kinds.into_iter().find(fits).or_else(|| kinds.into_iter().find(|mlp| width(*mlp).is_some()));
        found.and_then(|mlp| width(mlp).map(|width| (mlp, width))).unwrap_or_else(|| {
            let widest = left.div_ceil(product([2, self.hidden])).max(1);
            (Mlp::Plain, declared.unwrap_or_else(|| u32::try_from(widest).unwrap_or(u32::MAX)))
        })
    }

    /// Returns a projector that has only the connectors' parameters.
    fn bare_projector(&self) -> Projector {
        let parameters = self.connectors.iter().fold(0_u64, |sum, part| sum.saturating_add(part.parameters));
        Projector::new(self.merged_tokens().unwrap_or(1), 0, None).vectors(parameters)
    }

    /// Returns the number of encoder tokens that become one projected token; `None` if it is not constant.
    fn merged_tokens(&self) -> Option<u32> {
        if let TokenRuleKind::Vision(_, merge) = self.token_rule.kind {
            return merge.checked_mul(merge);
        }
        // Every connector projects as many tokens, and the LLM gets those of all.
        let sets = self.connectors.len().max(1) as u64;
        let ratio = |&[_, encoder, tokens]: &[u64; 3]| whole(encoder.checked_mul(sets)?, tokens);
        let first = self.features.first().and_then(ratio)?;
        self.features.iter().all(|medium| ratio(medium) == Some(first)).then_some(first)
    }

    /// Returns sizes whose formulas give all counted numbers, if there are any.
    fn exact(&self, base: &EncoderSpec, tile_tokens: u32) -> Option<EncoderSpec> {
        let unit_tokens = u64::from(if self.module.item_tokens.is_some() { tile_tokens } else { 1 });
        let (first, runs) = (&self.module.runs[0], &self.module.runs);
        let used = runs.len() - runs.iter().rev().take_while(|run| run.flops.backward.is_zero()).count();
        let has_flops = |(at, run): (usize, &LayerRun)| {
            let is_trained = at < used;
            run.parameters == first.parameters
                && !matches!(run.reach, Reach::None)
                && run.flops.forward == self.layer_flops(base)
                && (run.flops.is_doubled() || !is_trained)
        };
        if !runs.iter().enumerate().all(has_flops) {
            return None;
        }
        let mut exact = *base;
        let matrices = product([4, base.hidden, base.hidden]).saturating_add(product([
            base.mlp.matrices(),
            base.hidden,
            base.ffn,
        ]));
        let vectors = first.parameters.checked_sub(matrices)?;
        let of_ffn = (0..=FFN_VECTORS_MAX).find(|count| {
            vectors
                .checked_sub(count * u64::from(base.ffn))
                .is_some_and(|rest| rest.is_multiple_of(base.hidden.into()))
        })?;
        exact.details.layer_ffn_vectors = u32::try_from(of_ffn).ok()?;
        exact.details.layer_vectors = whole(vectors - of_ffn * u64::from(base.ffn), base.hidden.into())?;
        exact.projector = self.exact_projector(unit_tokens)?;
        [false, true]
            .into_iter()
            .find_map(|has_pooling_head| self.with_stem(exact, unit_tokens, has_pooling_head))
    }

    /// Returns a layer's forward FLOPs by sizes, in the module's unit.
    fn layer_flops(&self, spec: &EncoderSpec) -> Polynomial {
        let weights = product([4, spec.hidden, spec.hidden]).saturating_add(product([
            spec.mlp.matrices(),
            spec.hidden,
            spec.ffn,
        ]));
        let (per_token, per_pair) = (weights.saturating_mul(2), product([4, spec.hidden]));
        match self.module.item_tokens {
            None => Polynomial { per_token, per_pair, ..Polynomial::default() },
            Some(tokens) => {
                let tokens = u64::from(tokens);
                let pairs = per_pair.saturating_mul(tokens.saturating_mul(tokens));
                let per_item = per_token.saturating_mul(tokens).saturating_add(pairs);
                Polynomial { per_item, ..Polynomial::default() }
            }
        }
    }

    /// Returns the projector whose formula gives the connectors' FLOPs and parameters.
    fn exact_projector(&self, unit_tokens: u64) -> Option<Projector> {
        let merged = self.merged_tokens()?;
        let first = self.connectors.first()?;
        let flops = |part: &CountedPart| self.only_term(&part.flops.forward);
        let is_equal = |part: &CountedPart| part.flops == first.flops && part.chunk_tokens == 0;
        if !self.connectors.iter().all(is_equal) || !first.flops.is_doubled() {
            return None;
        }
        // FLOPs are two per weight and projected token.
        let weights = flops(first)?.checked_mul(merged.into())?;
        let per_weight = unit_tokens.checked_mul(2)?;
        let weights = weights.is_multiple_of(per_weight).then_some(weights / per_weight)?;
        let input = self.hidden.checked_mul(merged)?;
        let width = u64::from(self.llm_hidden);
        let middle = if weights == u64::from(input).checked_mul(width)? {
            None
        } else {
            Some(whole(weights, u64::from(input).checked_add(width)?)?)
        };
        let further = u32::try_from(self.connectors.len() - 1).ok()?;
        let vectors = |part: &CountedPart| part.parameters.checked_sub(weights);
        let all: u64 = self.connectors.iter().map(vectors).sum::<Option<u64>>()?;
        Some(Projector::new(merged, input, middle).deepstacked(further, 0).vectors(all))
    }

    /// Adds the stem, and the pooling head, whose formulas give the FLOPs outside the layers.
    fn with_stem(&self, spec: EncoderSpec, unit_tokens: u64, has_pooling_head: bool) -> Option<EncoderSpec> {
        let outside = &self.module.outside;
        let forward = self.only_term(&outside.flops.forward)?;
        let backward = self.only_term(&outside.flops.backward)?;
        let mut exact = spec;
        exact.details.has_pooling_head = has_pooling_head;
        exact.details.outside_parameters = 0;
        let pooling_parameters = EncoderParameters::new(&exact, self.llm_hidden).outside;
        exact.details.outside_parameters = self.outside_parameters().checked_sub(pooling_parameters)?;
        let pooling = if has_pooling_head { pooling_flops(&spec, unit_tokens) } else { 0 };
        if has_pooling_head && self.module.item_tokens.is_none() {
            return None; // the head runs once per item, and items are patches
        }
        let stem = forward.checked_sub(pooling)?;
        // Stem inputs that are the medium itself have no gradient.
        let medium = stem.checked_mul(2)?.checked_sub(backward)?;
        let per_input = product([2, spec.hidden]).checked_mul(unit_tokens)?;
        exact.stem_inputs = whole(stem, per_input)?;
        exact.details.stem_medium_inputs = whole(medium, per_input)?;
        (outside.chunk_tokens == 0 && exact.details.stem_medium_inputs <= exact.stem_inputs).then_some(exact)
    }

    /// Returns the factor of a polynomial that has no terms but the module's unit.
    fn only_term(&self, flops: &Polynomial) -> Option<u64> {
        let (factor, expected) = match self.module.item_tokens {
            Some(_) => (flops.per_item, Polynomial { per_item: flops.per_item, ..Polynomial::default() }),
            None => (flops.per_token, Polynomial { per_token: flops.per_token, ..Polynomial::default() }),
        };
        (*flops == expected).then_some(factor)
    }

    fn counts(&self) -> Result<Interned<EncoderCounts>> {
        let (mut layers, mut trained) = (Passes::default(), Polynomial::default());
        for run in &self.module.runs {
            let flops = match run.reach {
                Reach::None | Reach::Full => run.flops,
                _ => {
                    Passes { forward: windowed(&run.flops.forward), backward: windowed(&run.flops.backward) }
                }
            };
            layers.add(run.count.into(), &flops);
            if !flops.backward.is_zero() {
                trained.add(run.count.into(), &flops.forward);
            }
        }
        let mut connectors = Passes::default();
        self.connectors.iter().for_each(|part| connectors.add(1, &part.flops));
        let counts = EncoderCounts {
            layers,
            trained_layers_forward: trained,
            outside: self.module.outside.flops,
            connectors,
            chunk_tokens: self.chunk_tokens,
            layer_parameters: self.layer_parameters(),
        };
        Interned::new(counts)
            .ok_or_else(|| self.invalid("layer_runs", "is one of too many different models in this process"))
    }
}

/// Counts pairs within windows.
fn windowed(flops: &Polynomial) -> Polynomial {
    Polynomial { per_pair: 0, per_window_pair: flops.per_pair, ..*flops }
}

/// Returns the FLOPs for an attention pooling head over an item.
///
/// # Source
/// [`EncoderFlops`](crate::flops::EncoderFlops).
fn pooling_flops(spec: &EncoderSpec, tokens: u64) -> u64 {
    let square = product([2, spec.hidden, spec.hidden]);
    let per_token = square.saturating_add(product([2, spec.hidden])).saturating_mul(2);
    let per_item = square.saturating_add(product([2, spec.hidden, spec.ffn])).saturating_mul(2);
    per_token.saturating_mul(tokens).saturating_add(per_item)
}
