//! Reads a described token rule: a known rule, one count for all media, or a table of counted sizes.

use serde_json::Value;

use crate::error::Result;
use crate::model::config::{ConfigFields, excerpt};
use crate::model::families::described;
use crate::tokens::VisionRule;
use crate::tokens::audio::AudioRule;
use crate::tokens::native::NativeResolution;
use crate::tokens::table::{CountedRow, CountedWork, TokenTable};

use super::Reach;

/// Maximum number of rows in a table.
const ROWS_MAX: usize = 1 << 20;
/// Columns for what a medium is counted as, after the columns for its size.
const COUNTS: [&str; 5] = ["tokens", "items", "encoder_tokens", "pairs", "window_pairs"];

/// Described token rule.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRule {
    /// Medium: `image` or `audio`.
    pub medium: String,
    /// What counted the tokens: a function of the processor, or what the model makes of media.
    pub source: String,
    /// Marker tokens that the chat template puts around a medium; `None` if no template shows them.
    pub marker_tokens: Option<u8>,
    /// Sample rate of clips in Hz; 0 for images.
    pub sample_rate_hz: u32,
    /// Number of media that a rule was checked on; 0 for a table.
    pub checked: u64,
    /// Rule.
    pub kind: TokenRuleKind,
}

/// How tokens follow from a medium's size.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenRuleKind {
    /// As many tokens for every medium.
    Fixed(u64),
    /// A known rule for images, and the number of patches along a side that become one token.
    Vision(VisionRule, u32),
    /// A known rule for clips.
    Audio(AudioRule),
    /// Counted sizes: no rule is known between rows.
    Measured(Vec<CountedRow>),
}

impl TokenRule {
    /// Reads the rule for a medium.
    ///
    /// # Errors
    /// [`crate::Error::Configuration`] that names the field.
    pub(super) fn read(fields: &ConfigFields<'_>, medium: &str) -> Result<Self> {
        let kind = fields.required_text("kind")?;
        let own: &[&str] = match kind {
            "fixed" => &["tokens", "checked"],
            "rule" => &["rule", "checked"],
            "measured" => &["table"],
            unknown => {
                let problem = format!("= \"{unknown}\" is unknown, known are fixed, measured, rule");
                return Err(fields.invalid("kind", problem));
            }
        };
        let is_image = medium == "image";
        let rate: &[&str] = if is_image { &[] } else { &["sample_rate_hz"] };
        fields.refuse_others(&[&["medium", "source", "marker_tokens", "kind"][..], own, rate].concat())?;
        if fields.required_text("medium")? != medium {
            return Err(fields.invalid("medium", format!("must be \"{medium}\"")));
        }
        let rate = if is_image { None } else { fields.optional_count("sample_rate_hz")? };
        let sample_rate_hz = match rate {
            None if !is_image => return Err(fields.invalid("sample_rate_hz", "is missing")),
            rate => rate.unwrap_or(0),
        };
        let kind = match kind {
            "fixed" => TokenRuleKind::Fixed(fields.required_number("tokens")?),
            "measured" => TokenRuleKind::Measured(read_table(fields, is_image)?),
            _ if is_image => {
                let (rule, merge, _) = described::vision_rule(&fields.required_child("rule")?)?;
                TokenRuleKind::Vision(rule, merge)
            }
            _ => TokenRuleKind::Audio(described::audio_rule(&fields.required_child("rule")?)?),
        };
        Ok(Self {
            medium: medium.to_owned(),
            source: fields.required_text("source")?.to_owned(),
            marker_tokens: described::optional_small(fields, "marker_tokens")?,
            sample_rate_hz,
            checked: if own.contains(&"checked") { fields.required_number("checked")? } else { 0 },
            kind,
        })
    }

    /// Reads the rule for videos, with its marker tokens; `None` for a table of counted sizes, as videos are
    /// counted by a rule alone.
    ///
    /// # Errors
    /// [`crate::Error::Configuration`] that names the field.
    pub(super) fn read_video(fields: &ConfigFields<'_>) -> Result<Option<NativeResolution>> {
        let kind = fields.required_text("kind")?;
        let own: &[&str] = match kind {
            "rule" => &["rule", "checked"],
            "measured" => &["table"],
            unknown => {
                let problem = format!("= \"{unknown}\" is unknown for videos, known are measured, rule");
                return Err(fields.invalid("kind", problem));
            }
        };
        fields.refuse_others(&[&["medium", "source", "marker_tokens", "kind"][..], own].concat())?;
        if fields.required_text("medium")? != "video" {
            return Err(fields.invalid("medium", "must be \"video\""));
        }
        if kind == "measured" {
            return Ok(None);
        }
        let (VisionRule::Native(mut native), ..) = described::vision_rule(&fields.required_child("rule")?)?
        else {
            return Err(fields.invalid("rule", "must be native for videos"));
        };
        let markers = described::optional_small(fields, "marker_tokens")?.unwrap_or(0);
        native.marker_tokens = native.marker_tokens.saturating_add(markers);
        Ok(Some(native))
    }

    /// Returns the marker tokens around a medium; 0 if no chat template shows them.
    #[must_use]
    pub fn markers(&self) -> u8 {
        self.marker_tokens.unwrap_or(0)
    }

    /// Returns the table that replaces a rule; `None` if the rule is known.
    ///
    /// # Errors
    /// What is inconsistent: the field of the module, and the problem.
    pub(super) fn table(&self, encoder: &EncoderUnits<'_>) -> Checked<Option<TokenTable>> {
        let (every, rows) = match &self.kind {
            TokenRuleKind::Vision(..) | TokenRuleKind::Audio(_) => return Ok(None),
            TokenRuleKind::Fixed(tokens) => (Some(encoder.every(*tokens)?), Vec::new()),
            TokenRuleKind::Measured(rows) => (None, encoder.rows(rows)?),
        };
        Ok(Some(TokenTable {
            every,
            rows,
            item_tokens: encoder.item_tokens,
            sample_rate_hz: self.sample_rate_hz,
            marker_tokens: self.markers(),
        }))
    }
}

/// Result whose error is a field of a module, and what is wrong with it.
pub(super) type Checked<T> = std::result::Result<T, (&'static str, String)>;

/// What a table needs to know about the encoder.
#[derive(Debug, Clone, Copy)]
pub(super) struct EncoderUnits<'a> {
    /// Encoder tokens per item; `None` if sequences differ in length.
    pub(super) item_tokens: Option<u32>,
    /// Measured media: items, encoder tokens, LLM tokens.
    pub(super) features: &'a [[u64; 3]],
    /// Windows in some layers, if there are any.
    pub(super) windows: Option<Reach>,
    /// Positions per chunk, to which the stem pads; 0 for none.
    pub(super) chunk_tokens: u32,
}

impl EncoderUnits<'_> {
    /// Returns the work for every medium, from the measured media.
    fn every(&self, tokens: u64) -> Checked<CountedWork> {
        let problem = |text: &str| ("feature_tokens", text.to_owned());
        let Some([items, encoder_tokens, _]) = self.features.first().copied() else {
            return Err(problem("has no medium"));
        };
        if self.features.iter().any(|medium| medium[..2] != [items, encoder_tokens]) {
            return Err(problem("must have the same encoder tokens for all media, as `token_rule` is fixed"));
        }
        if items == 0 || !encoder_tokens.is_multiple_of(items) {
            return Err(problem("must have encoder tokens that its items divide"));
        }
        let length = encoder_tokens / items;
        let pairs = squares(length, length).saturating_mul(items);
        let window_pairs = match self.windows {
            None => pairs,
            Some(Reach::Chunk(window)) => squares(length, window.into()).saturating_mul(items),
            Some(_) => return Err(problem("do not show patches in windows: expected a rule or a table")),
        };
        self.checked(CountedWork { tokens, items, encoder_tokens, pairs, window_pairs, padded_tokens: 0 })
    }

    /// Returns rows in order of size, with the padding.
    fn rows(&self, rows: &[CountedRow]) -> Checked<Vec<CountedRow>> {
        let row = |row: &CountedRow| {
            let work = row.work.map(|work| self.checked(work)).transpose()?;
            Ok(CountedRow { size: row.size, work })
        };
        let mut made = rows.iter().map(row).collect::<Checked<Vec<_>>>()?;
        made.sort_by_key(|row| row.size);
        match made.windows(2).find(|pair| pair[0].size == pair[1].size) {
            Some(pair) => Err(("token_rule.table", format!("has two rows for size {:?}", pair[0].size))),
            None => Ok(made),
        }
    }

    /// Checks a medium's items, and adds the padding.
    fn checked(&self, work: CountedWork) -> Checked<CountedWork> {
        let CountedWork { items, encoder_tokens, .. } = work;
        if let Some(length) = self.item_tokens
            && items.checked_mul(length.into()) != Some(encoder_tokens)
        {
            let problem =
                format!("has {items} items with {encoder_tokens} tokens, but {length} tokens per item");
            return Err(("token_rule", problem));
        }
        let chunk = u64::from(self.chunk_tokens);
        let padded = if chunk == 0 || items == 0 {
            0
        } else {
            // All sequences of a medium have the same length.
            let length = encoder_tokens.div_ceil(items);
            length.div_ceil(chunk).saturating_mul(chunk).saturating_sub(length).saturating_mul(items)
        };
        Ok(CountedWork { padded_tokens: padded, ..work })
    }
}

/// Returns the sum of squared lengths of a sequence's chunks, saturating.
fn squares(length: u64, chunk: u64) -> u64 {
    let chunk = chunk.max(1);
    let (full, rest) = (length / chunk, length % chunk);
    full.saturating_mul(chunk.saturating_mul(chunk)).saturating_add(rest.saturating_mul(rest))
}

/// Reads a table: sizes, and what media with these sizes are counted as, all `null` if they are rejected.
fn read_table(fields: &ConfigFields<'_>, is_image: bool) -> Result<Vec<CountedRow>> {
    let table = fields.required_child("table")?;
    table.refuse_others(&["columns", "rows"])?;
    let sizes: &[&str] = if is_image { &["width_pixels", "height_pixels"] } else { &["samples"] };
    let expected = [sizes, &COUNTS].concat();
    let columns: Option<Vec<&str>> = table
        .value("columns")
        .and_then(Value::as_array)
        .and_then(|columns| columns.iter().map(Value::as_str).collect());
    if columns.as_ref() != Some(&expected) {
        let problem = format!("must be {}: describe the model again", expected.join(", "));
        return Err(table.invalid("columns", problem));
    }
    let Some(rows) = table.value("rows").and_then(Value::as_array).filter(|rows| rows.len() <= ROWS_MAX)
    else {
        return Err(table.invalid("rows", format!("must be a list with at most {ROWS_MAX} rows")));
    };
    let read = |(at, row): (usize, &Value)| {
        let problem = || {
            let problem = format!("must be {} whole numbers, found {}", expected.len(), excerpt(row));
            table.invalid(&format!("rows[{at}]"), problem)
        };
        let cells = row.as_array().filter(|cells| cells.len() == expected.len()).ok_or_else(problem)?;
        let (size, counts) = cells.split_at(sizes.len());
        let number = |cell: &Value| cell.as_u64().ok_or_else(problem);
        let size = match size {
            [width, height] => [number(width)?, number(height)?],
            [samples] => [number(samples)?, 0],
            _ => return Err(problem()),
        };
        if counts.iter().all(Value::is_null) {
            return Ok(CountedRow { size, work: None });
        }
        let [tokens, items, encoder_tokens, pairs, window_pairs] = counts else { return Err(problem()) };
        let work = CountedWork {
            tokens: number(tokens)?,
            items: number(items)?,
            encoder_tokens: number(encoder_tokens)?,
            pairs: number(pairs)?,
            window_pairs: number(window_pairs)?,
            padded_tokens: 0,
        };
        Ok(CountedRow { size, work: Some(work) })
    };
    rows.iter().enumerate().map(read).collect()
}
