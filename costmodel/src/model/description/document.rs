//! Reads the document: typed, with every field checked.

use serde_json::Value;

use super::Reach;
use super::token_rule::TokenRule;
use crate::Module;
use crate::error::Result;
use crate::model::LayerSet;
use crate::model::config::{ConfigFields, excerpt};
use crate::model::counts::{Passes, Polynomial};
use crate::tokens::native::NativeResolution;

/// Value of `format`.
pub const FORMAT: &str = "dflop model";
/// Value of `version`.
pub const VERSION: u64 = 1;
/// File name in errors, and of a description in a checkpoint directory.
pub const DESCRIPTION_FILE: &str = "model.json";

/// Description of a checkpoint by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// Checkpoint name.
    pub name: String,
    /// Type in the checkpoint's `config.json`.
    pub model_type: String,
    /// SHA-256 of the `config.json`, in hexadecimal digits.
    pub config_sha256: String,
    /// Packages that the model was counted with, and their versions.
    pub made_with: Vec<(String, String)>,
    /// Number of parameters, shared ones once.
    pub parameters: u64,
    /// Number of parameters outside all modules.
    pub parameters_beside_modules: u64,
    /// Encoders, then the LLM.
    pub modules: Vec<DescribedModule>,
}

/// Described module.
#[derive(Debug, Clone, PartialEq)]
pub struct DescribedModule {
    /// Module.
    pub module: Module,
    /// Number of parameters, connectors included.
    pub parameters: u64,
    /// Path of the list of layers in the model.
    pub layers_path: String,
    /// Sizes that the configuration declares.
    pub sizes: DeclaredSizes,
    /// Length of every sequence, if it is fixed; FLOPs then count per item.
    pub item_tokens: Option<u32>,
    /// Runs of equal layers in order.
    pub runs: Vec<LayerRun>,
    /// FLOPs outside the layers, without connectors and LM head.
    pub outside: CountedPart,
    /// Role in the model.
    pub role: ModuleRole,
}

/// Fields of encoders and of the LLM.
#[derive(Debug, Clone, PartialEq)]
pub enum ModuleRole {
    /// Encoder.
    Encoder {
        /// Connectors into the LLM.
        connectors: Vec<CountedPart>,
        /// Width of a token for the LLM.
        output_width: u32,
        /// LLM tokens for media.
        token_rule: TokenRule,
        /// LLM tokens for videos with sampled frames; `None` if no rule counts them.
        video_rule: Option<NativeResolution>,
        /// Measured media: items, encoder tokens, LLM tokens.
        feature_tokens: Vec<[u64; 3]>,
    },
    /// Language model.
    Llm {
        /// Width of the embedding.
        hidden: u32,
        /// Number of embedding parameters.
        embedding: u64,
        /// LM head; `None` for a model without one.
        head: Option<DescribedHead>,
    },
}

/// Sizes in a configuration; `None` where it declares none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "as in `LlmSpec`")]
pub struct DeclaredSizes {
    pub hidden: Option<u32>,
    pub heads: Option<u32>,
    pub kv_heads: Option<u32>,
    pub head_dim: Option<u32>,
    pub ffn: Option<u32>,
}

/// Run of equal layers; counts are per layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerRun {
    /// Number of layers.
    pub count: u32,
    /// Number of parameters.
    pub parameters: u64,
    /// Width of the hidden states before the layer, if known.
    pub message_width: Option<u32>,
    /// FLOPs, with pairs as `per_pair` whatever the pattern.
    pub flops: Passes,
    /// Pairs that attention computes.
    pub reach: Reach,
    /// Experts, if there are any.
    pub experts: Option<DescribedExperts>,
}

/// Experts in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescribedExperts {
    /// Number of experts.
    pub count: u32,
    /// Number of parameters in an expert.
    pub parameters_each: u64,
    /// Number of experts that a token goes through.
    pub per_token: u32,
}

/// Part of a module outside its layers.
#[derive(Debug, Clone, PartialEq)]
pub struct CountedPart {
    /// Path in the model; empty for everything outside the layers.
    pub path: String,
    /// Number of parameters; 0 for everything outside the layers.
    pub parameters: u64,
    /// FLOPs.
    pub flops: Passes,
    /// Positions per chunk; 0 if nothing counts per chunk.
    pub chunk_tokens: u32,
}

/// LM head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescribedHead {
    /// Number of parameters; 0 if it shares the embedding's weights.
    pub parameters: u64,
    /// Whether it shares the embedding's weights.
    pub is_tied: bool,
    /// Number of words.
    pub vocabulary: u32,
    /// FLOPs.
    pub flops: Passes,
}

impl Description {
    /// Returns whether a document has the format, in any version.
    #[must_use]
    pub fn is_format(document: &Value) -> bool {
        document.get("format").and_then(Value::as_str).is_some_and(|format| format.starts_with("dflop"))
    }

    /// Reads a document.
    ///
    /// # Errors
    /// [`crate::Error::Configuration`] that names the field, for an unknown version, and for missing, unknown
    /// and invalid fields.
    pub fn read(document: &Value) -> Result<Self> {
        let fields = ConfigFields::new(DESCRIPTION_FILE, document)?;
        let format = fields.required_text("format")?;
        if format != FORMAT {
            return Err(fields.invalid("format", format!("= \"{format}\" is unknown, known is \"{FORMAT}\"")));
        }
        let version = fields.required_number("version")?;
        if version != VERSION {
            let problem = format!("= {version} is unknown, known is {VERSION}: describe the model again");
            return Err(fields.invalid("version", problem));
        }
        fields.refuse_others(&[
            "format",
            "version",
            "name",
            "model_type",
            "config_sha256",
            "made_with",
            "parameters",
            "parameters_beside_modules",
            "modules",
        ])?;
        let made_with = fields.required_child("made_with")?;
        let package = |name: &str| Ok((name.to_owned(), made_with.required_text(name)?.to_owned()));
        let modules: Vec<_> = fields.objects("modules")?.iter().map(read_module).collect::<Result<_>>()?;
        let description = Self {
            name: fields.required_text("name")?.to_owned(),
            model_type: fields.required_text("model_type")?.to_owned(),
            config_sha256: fields.required_text("config_sha256")?.to_owned(),
            made_with: made_with.keys().map(package).collect::<Result<_>>()?,
            parameters: fields.required_number("parameters")?,
            parameters_beside_modules: fields.required_number("parameters_beside_modules")?,
            modules,
        };
        description.check(&fields)?;
        Ok(description)
    }

    /// Returns a module.
    #[must_use]
    pub fn module(&self, module: Module) -> Option<&DescribedModule> {
        self.modules.iter().find(|described| described.module == module)
    }

    /// Checks that modules are in order and that their parameters add up.
    fn check(&self, fields: &ConfigFields<'_>) -> Result<()> {
        let in_order = self.modules.windows(2).all(|pair| pair[0].module < pair[1].module);
        if !in_order || self.modules.last().is_none_or(|last| last.module != Module::Llm) {
            return Err(fields.invalid("modules", "must be at most one of vision and audio each, then llm"));
        }
        let parts = self.modules.iter().map(|module| module.parameters);
        let sum = checked_sum(parts.chain([self.parameters_beside_modules]));
        if sum != Some(self.parameters) {
            let sum = sum.map_or_else(|| "more than 64 bits".to_owned(), |sum| sum.to_string());
            let problem = format!("= {} is not the sum over modules, {sum}", self.parameters);
            return Err(fields.invalid("parameters", problem));
        }
        Ok(())
    }
}

/// Fields of every module.
const COMMON: [&str; 7] =
    ["module", "parameters", "layers_path", "sizes", "unit", "layer_runs", "outside_layers"];

fn read_module(fields: &ConfigFields<'_>) -> Result<DescribedModule> {
    let name = fields.required_text("module")?;
    let Some(module) = Module::ALL.into_iter().find(|module| module.name() == name) else {
        return Err(
            fields.invalid("module", format!("= \"{name}\" is unknown, known are vision, audio, llm"))
        );
    };
    let (known, role): (&[&str], _) = match module {
        Module::Llm => (&["path", "embedding", "head"], read_llm(fields)?),
        _ => (
            &[
                "media",
                "connectors",
                "tokens_per_item",
                "output_width",
                "token_rule",
                "video_token_rule",
                "feature_tokens",
            ],
            read_encoder(fields, module)?,
        ),
    };
    fields.refuse_others(&[&COMMON[..], known].concat())?;
    let item_tokens = match fields.required_text("unit")? {
        "items" if module != Module::Llm => {
            let tokens = fields.optional_count("tokens_per_item")?;
            Some(tokens.ok_or_else(|| fields.invalid("tokens_per_item", "is missing"))?)
        }
        "tokens" => None,
        unit => return Err(fields.invalid("unit", format!("= \"{unit}\" is unknown for {module}"))),
    };
    let described = DescribedModule {
        module,
        parameters: fields.required_number("parameters")?,
        layers_path: fields.required_text("layers_path")?.to_owned(),
        sizes: read_sizes(&fields.required_child("sizes")?)?,
        item_tokens,
        runs: read_runs(fields)?,
        outside: read_part(&fields.required_child("outside_layers")?, false)?,
        role,
    };
    check_units(fields, &described)?;
    Ok(described)
}

fn read_encoder(fields: &ConfigFields<'_>, module: Module) -> Result<ModuleRole> {
    let connectors = fields.objects("connectors")?;
    let output_width = fields.optional_count("output_width")?;
    let medium = if module == Module::Vision { "image" } else { "audio" };
    let media = fields.value("media").and_then(Value::as_array);
    let media: Vec<_> = media.into_iter().flatten().map(Value::as_str).collect();
    let video_rule = match fields.child("video_token_rule")? {
        None if media == [Some(medium)] => None,
        Some(rule) if medium == "image" && media == [Some("image"), Some("video")] => {
            TokenRule::read_video(&rule)?
        }
        None => return Err(fields.invalid("media", format!("must be [\"{medium}\"]"))),
        Some(_) => {
            return Err(fields.invalid("media", "must be [\"image\", \"video\"] with a `video_token_rule`"));
        }
    };
    Ok(ModuleRole::Encoder {
        connectors: connectors.iter().map(|part| read_part(part, true)).collect::<Result<_>>()?,
        output_width: output_width.ok_or_else(|| fields.invalid("output_width", "is missing"))?,
        token_rule: TokenRule::read(&fields.required_child("token_rule")?, medium)?,
        video_rule,
        feature_tokens: read_rows(fields, "feature_tokens")?,
    })
}

/// Reads rows with three whole numbers.
fn read_rows(fields: &ConfigFields<'_>, key: &str) -> Result<Vec<[u64; 3]>> {
    let invalid = |found: &Value| {
        fields.invalid(key, format!("must be rows with 3 whole numbers, found {}", excerpt(found)))
    };
    let Some(value) = fields.value(key) else { return Err(fields.invalid(key, "is missing")) };
    let read = |row: &Value| {
        let numbers: Option<Vec<u64>> = row.as_array()?.iter().map(Value::as_u64).collect();
        <[u64; 3]>::try_from(numbers?).ok()
    };
    let rows = value.as_array().ok_or_else(|| invalid(value))?;
    rows.iter().map(|row| read(row).ok_or_else(|| invalid(row))).collect()
}

fn read_llm(fields: &ConfigFields<'_>) -> Result<ModuleRole> {
    let embedding = fields.required_child("embedding")?;
    fields.required_text("path")?;
    embedding.refuse_others(&["width", "parameters"])?;
    let hidden = embedding.optional_count("width")?;
    let head = match fields.child("head")? {
        None if fields.is_null("head") => None,
        None => return Err(fields.invalid("head", "is missing")),
        Some(head) => {
            head.refuse_others(&["parameters", "is_tied", "vocabulary", "flops_forward", "flops_backward"])?;
            let vocabulary = head.optional_count("vocabulary")?;
            if !head.has("is_tied") {
                return Err(head.invalid("is_tied", "is missing"));
            }
            Some(DescribedHead {
                parameters: head.required_number("parameters")?,
                is_tied: head.flag("is_tied", false)?,
                vocabulary: vocabulary.ok_or_else(|| head.invalid("vocabulary", "is missing"))?,
                flops: read_passes(&head)?,
            })
        }
    };
    Ok(ModuleRole::Llm {
        hidden: hidden.ok_or_else(|| embedding.invalid("width", "is missing"))?,
        embedding: embedding.required_number("parameters")?,
        head,
    })
}

fn read_sizes(fields: &ConfigFields<'_>) -> Result<DeclaredSizes> {
    fields.refuse_others(&["hidden", "heads", "kv_heads", "head_dim", "ffn"])?;
    Ok(DeclaredSizes {
        hidden: fields.optional_count("hidden")?,
        heads: fields.optional_count("heads")?,
        kv_heads: fields.optional_count("kv_heads")?,
        head_dim: fields.optional_count("head_dim")?,
        ffn: fields.optional_count("ffn")?,
    })
}

fn read_runs(fields: &ConfigFields<'_>) -> Result<Vec<LayerRun>> {
    let mut runs = Vec::new();
    let mut next = 0_u32;
    for run in fields.objects("layer_runs")? {
        let first = run.required_number("first")?;
        if first != u64::from(next) {
            return Err(run.invalid("first", format!("= {first} must follow the run before, at {next}")));
        }
        let read = read_run(&run)?;
        next = next.saturating_add(read.count);
        if next > LayerSet::LAYERS_MAX {
            let problem = format!("makes more than {} layers", LayerSet::LAYERS_MAX);
            return Err(run.invalid("count", problem));
        }
        runs.push(read);
    }
    if runs.is_empty() {
        return Err(fields.invalid("layer_runs", "must have a layer"));
    }
    Ok(runs)
}

fn read_run(run: &ConfigFields<'_>) -> Result<LayerRun> {
    run.refuse_others(&[
        "first",
        "count",
        "parameters",
        "message_width",
        "flops_forward",
        "flops_backward",
        "attention",
        "experts",
    ])?;
    let experts = run.child("experts")?.map(|experts| read_experts(&experts)).transpose()?;
    let read = LayerRun {
        count: run.optional_count("count")?.ok_or_else(|| run.invalid("count", "is missing"))?,
        parameters: run.required_number("parameters")?,
        message_width: run.optional_count("message_width")?,
        flops: read_passes(run)?,
        reach: read_reach(&run.required_child("attention")?)?,
        experts,
    };
    let held = experts.map_or(Some(0), |experts| experts.parameters_each.checked_mul(experts.count.into()));
    if held.is_none_or(|held| held > read.parameters) {
        return Err(
            run.invalid("experts", format!("have more than the layer's {} parameters", read.parameters))
        );
    }
    Ok(read)
}

fn read_experts(experts: &ConfigFields<'_>) -> Result<DescribedExperts> {
    experts.refuse_others(&["count", "parameters_each", "per_token"])?;
    let required = |key: &str| experts.optional_count(key)?.ok_or_else(|| experts.invalid(key, "is missing"));
    let read = DescribedExperts {
        count: required("count")?,
        parameters_each: experts.required_number("parameters_each")?,
        per_token: required("per_token")?,
    };
    if read.per_token > read.count {
        let problem = format!("= {} is more than the {} experts", read.per_token, read.count);
        return Err(experts.invalid("per_token", problem));
    }
    Ok(read)
}

fn read_reach(attention: &ConfigFields<'_>) -> Result<Reach> {
    attention.refuse_others(&["pattern", "window", "pairs", "tokens"])?;
    let pattern = attention.required_text("pattern")?;
    let window =
        || attention.optional_count("window")?.ok_or_else(|| attention.invalid("window", "is missing"));
    Ok(match pattern {
        "none" | "linear" => Reach::None,
        "full" => Reach::Full,
        "causal" => Reach::Causal,
        "sliding" => Reach::Sliding(window()?),
        "window" => Reach::Window(window()?),
        "chunk" => Reach::Chunk(window()?),
        "other" => {
            let problem = "= \"other\": the pairs that its mask leaves follow no pattern that dflop knows";
            return Err(attention.invalid("pattern", problem));
        }
        unknown => return Err(attention.invalid("pattern", format!("= \"{unknown}\" is unknown"))),
    })
}

fn read_part(part: &ConfigFields<'_>, is_connector: bool) -> Result<CountedPart> {
    let own: &[&str] = if is_connector { &["path", "parameters"] } else { &[] };
    part.refuse_others(&[&["flops_forward", "flops_backward", "chunk_tokens"][..], own].concat())?;
    let flops = read_passes(part)?;
    let chunk_tokens = part.optional_count("chunk_tokens")?.unwrap_or(0);
    if chunk_tokens == 0 && flops.forward.per_chunk.max(flops.backward.per_chunk) > 0 {
        return Err(part.invalid("chunk_tokens", "is missing, and FLOPs count per chunk"));
    }
    Ok(CountedPart {
        path: if is_connector { part.required_text("path")?.to_owned() } else { String::new() },
        parameters: if is_connector { part.required_number("parameters")? } else { 0 },
        flops,
        chunk_tokens,
    })
}

fn read_passes(fields: &ConfigFields<'_>) -> Result<Passes> {
    let read = |key: &str| {
        let terms = fields.required_child(key)?;
        terms.refuse_others(&["per_item", "per_token", "per_pair", "per_chunk"])?;
        let term = |key: &str| if terms.has(key) { terms.required_number(key) } else { Ok(0) };
        Ok(Polynomial {
            per_item: term("per_item")?,
            per_token: term("per_token")?,
            per_pair: term("per_pair")?,
            per_chunk: term("per_chunk")?,
            ..Polynomial::default()
        })
    };
    Ok(Passes { forward: read("flops_forward")?, backward: read("flops_backward")? })
}

/// Checks that FLOPs count in the module's unit, and that parts have no more parameters than the module.
fn check_units(fields: &ConfigFields<'_>, module: &DescribedModule) -> Result<()> {
    let mut parts = vec![("outside_layers".to_owned(), &module.outside.flops)];
    let mut held = Vec::new();
    for (at, run) in module.runs.iter().enumerate() {
        parts.push((format!("layer_runs[{at}]"), &run.flops));
        held.push(run.parameters.checked_mul(run.count.into()));
    }
    match &module.role {
        ModuleRole::Encoder { connectors, .. } => {
            for (at, connector) in connectors.iter().enumerate() {
                parts.push((format!("connectors[{at}]"), &connector.flops));
                held.push(Some(connector.parameters));
            }
        }
        ModuleRole::Llm { embedding, head, .. } => {
            held.extend([Some(*embedding), Some(head.map_or(0, |head| head.parameters))]);
            if let Some(head) = head {
                parts.push(("head".to_owned(), &head.flops));
            }
        }
    }
    for (name, flops) in parts {
        for (pass, terms) in [("flops_forward", &flops.forward), ("flops_backward", &flops.backward)] {
            let foreign = match module.item_tokens {
                Some(_) => terms.per_token | terms.per_pair | terms.per_chunk,
                None if module.module == Module::Llm => terms.per_item | terms.per_chunk,
                None => terms.per_item,
            };
            if foreign > 0 {
                let unit = if module.item_tokens.is_some() { "items only" } else { "tokens and pairs only" };
                let problem = format!("must count per {unit}, which is what dflop predicts for this module");
                return Err(fields.invalid(&format!("{name}.{pass}"), problem));
            }
        }
    }
    let sum = held.into_iter().collect::<Option<Vec<u64>>>().and_then(checked_sum);
    if sum.is_none_or(|sum| sum > module.parameters) {
        let problem = format!("= {} is less than its parts have together", module.parameters);
        return Err(fields.invalid("parameters", problem));
    }
    Ok(())
}

fn checked_sum(terms: impl IntoIterator<Item = u64>) -> Option<u64> {
    terms.into_iter().try_fold(0_u64, u64::checked_add)
}
