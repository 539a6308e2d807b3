//! Reads and writes measured profiles: module times and memory on a device. Some are shipped with the crate.
//!
//! # Schema
//! A profile is one or several CSV files. The first line is `# dflop-profile: 1`. Further lines
//! `# key: value` before the header describe the measurement: `device`, `driver`, `torch` and so on;
//! `vision`, `audio` and `llm` give the measured modules' widths, such as
//! `# llm: hidden=3584 heads=28 kv_heads=4 ffn=18944 name=qwen2.5-7b`, and a profile with other widths is an
//! error. A header and rows follow, columns by name in any order:
//!
//! | column | meaning |
//! | --- | --- |
//! | `module` | `vision`, `audio` or `llm` |
//! | `part` | `linear`, `attention`, `whole`, `ends` or `head`, see [`Part`] |
//! | `phase` | `forward`, `backward` (without the forward pass), `optimizer` |
//! | `tp` | tensor-parallel degree; the time is of the whole group |
//! | `layers` | transformer layers that ran; 0 for `ends` and `head` |
//! | `batch` | sequences side by side; 0 for `optimizer` |
//! | `tokens` | tokens of each sequence inside the module; target tokens for `head`; 0 for `optimizer` |
//! | `microseconds` | time of one run, finite and above 0 |
//! | `bytes` | optional, may be empty: the rise of the allocator's peak; bytes of state for `optimizer` |
//!
//! A line `# held-out: microbatch,module,tokens,pairs,microseconds` is a module's time over a microbatch with
//! mixed lengths, forward and backward, which is not used for predictions but for checks
//! ([`ProfileCheck`](crate::ProfileCheck)): the total tokens over all sequences, and the sum of squared
//! sequence lengths. Lines for several modules with the same number are the same microbatch.
//!
//! Tile tokens are the tile's patches, not the LLM tokens that it becomes. Rows with the same setting are
//! repeats; their median counts. Rows of `linear` and `whole` exclude what rows of `ends` include; a profile
//! without `ends` is assumed to include it in the constant that two layer counts show. If there are rows of
//! `head`, `ends` excludes it. `attention` for an LLM is causal and in a single sequence, as for packed
//! samples: it is charged per **original sample**, linear work per **packed sequence**.
//!
//! The reference implementation's files are recognized by name and read as well: memory as [`StepMemory`],
//! and times as a pair of whole and `_skip_attn` runs, whose difference is attention.
//!
//! # Source
//! An et al., "DFLOP", PACMMOD 2026, arXiv:2603.25120, section 3.2.1: throughput for encoder batches, and for
//! LLM attention and linear work separately. The paper interpolates rates; here times are interpolated, see
//! `curve/mod.rs`.
//!
//! Each profile was measured for a few models. Models with equal widths are the same to a profile, whatever
//! the model name, so a checkpoint selects the files for the matching preset.

mod measurement;
mod reference;
mod rows;

use super::error::{Error, Result};
use super::model::ModelSpec;
use crate::Module;
use measurement::{points, pool_spreads};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub(crate) use measurement::REPEATS_MIN;
pub use measurement::{HeldOutRun, Measurement, Part, Phase, Point, Setting};
pub use reference::{StepMemory, reference_model};

/// Key in the first metadata line.
const SCHEMA_KEY: &str = "dflop-profile";
/// Supported schema version.
const SCHEMA_VERSION: &str = "1";
/// Metadata that must not differ between a profile's files.
const DEVICE_KEY: &str = "device";

/// Measured times and memory, from one or several files.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    files: Vec<ProfileFile>,
}

/// File in a profile.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProfileFile {
    /// Name, as given to [`Profile::parse`].
    pub name: String,
    /// Metadata in file order, without the module widths.
    pub metadata: Vec<(String, String)>,
    /// Widths of the measured modules.
    pub widths: BTreeMap<Module, ModuleWidths>,
    /// Rows, in file order.
    pub measurements: Vec<Measurement>,
    /// Microbatches for checking predictions, in file order.
    pub held_out: Vec<HeldOutRun>,
    /// Memory from a reference file.
    pub step_memory: Vec<StepMemory>,
}

impl Profile {
    /// Parses a profile from file names and texts.
    ///
    /// # Errors
    /// [`Error::ProfileFormat`] with file, line and column if a file is not a profile;
    /// [`Error::ProfileMixed`] if files come from different devices, or there are no files.
    ///
    /// # Examples
    /// ```
    /// use dflop_costmodel::Profile;
    ///
    /// # fn main() -> dflop_costmodel::Result<()> {
    /// let text = "# dflop-profile: 1\n# device: abacus\n\
    ///     module,part,phase,tp,layers,batch,tokens,microseconds\n\
    ///     llm,whole,forward,1,4,1,512,910.5\n";
    /// let profile = Profile::parse([("abacus.csv", text)])?;
    /// assert_eq!(profile.device(), Some("abacus"));
    /// assert_eq!(profile.points().len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn parse<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        // Reference files have no schema line; their names identify them.
        let parse = |(name, text)| reference::parse(name, text).unwrap_or_else(|| rows::parse(name, text));
        let files = files.into_iter().map(parse).collect::<Result<Vec<_>>>()?;
        let profile = Self { files };
        profile.check_devices()?;
        Ok(profile)
    }

    /// Creates a profile from a single file.
    pub(crate) fn from_file(file: ProfileFile) -> Self {
        Self { files: vec![file] }
    }

    /// Returns the files.
    #[must_use]
    pub fn files(&self) -> &[ProfileFile] {
        &self.files
    }

    /// Returns the measured device, if a file names it.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        self.files.iter().find_map(|file| file.metadata(DEVICE_KEY))
    }

    /// Whether the backward times of a file include recomputed forward passes of all layers.
    #[must_use]
    pub fn recomputes_layers(&self) -> bool {
        self.files.iter().any(|file| file.metadata("recompute") == Some("layers"))
    }

    /// Returns all points, with repeats joined; sorted by setting, file by file.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        self.files.iter().flat_map(|file| measurement::points(&file.measurements)).collect()
    }

    /// Returns the profile with the times in all other rows set to 0, so that predictions from it are the
    /// share of the kept rows; shares over all rows add up to the whole profile's prediction. Held-out
    /// microbatches are left out.
    ///
    /// # Examples
    /// ```
    /// use dflop_costmodel::Profile;
    /// use dflop_costmodel::profile::Phase;
    ///
    /// # fn main() -> dflop_costmodel::Result<()> {
    /// let text = "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n\
    ///     llm,whole,forward,1,4,1,512,910.5\nllm,whole,backward,1,4,1,512,1820.5\n";
    /// let profile = Profile::parse([("abacus.csv", text)])?;
    /// let forward = profile.only(|setting| setting.phase == Phase::Forward);
    /// let times: Vec<f64> = forward.points().iter().map(|point| point.microseconds).collect();
    /// assert_eq!(times, [910.5, 0.0]);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn only(&self, is_kept: impl Fn(&Setting) -> bool) -> Self {
        let mut kept = self.clone();
        kept.files.iter_mut().for_each(|file| file.held_out.clear());
        for row in kept.files.iter_mut().flat_map(|file| &mut file.measurements) {
            if !is_kept(&row.setting) {
                row.microseconds = 0.0;
            }
        }
        kept
    }

    /// Returns the profile with only the fastest repeat for every setting in each file.
    pub(crate) fn fastest_runs(&self) -> Self {
        let mut fastest = self.clone();
        for rows in fastest.files.iter_mut().map(|file| &mut file.measurements) {
            let order = |a: &Measurement, b: &Measurement| {
                a.setting.cmp(&b.setting).then(a.microseconds.total_cmp(&b.microseconds))
            };
            rows.sort_by(order);
            rows.dedup_by_key(|row| row.setting);
        }
        fastest
    }

    /// Returns all points with the widths stated in the files; unknown widths if a file states none.
    pub(crate) fn points_with_widths(&self) -> Vec<(Point, ModuleWidths)> {
        let of_file = |file: &ProfileFile| {
            let points = measurement::points(&file.measurements).into_iter();
            let widths = file.widths.clone();
            points.map(move |point| (point, widths.get(&point.setting.module).cloned().unwrap_or_default()))
        };
        self.files.iter().flat_map(of_file).collect()
    }

    /// Returns whether any row belongs to this module.
    pub(crate) fn has_module(&self, module: Module) -> bool {
        self.files.iter().flat_map(|file| &file.measurements).any(|row| row.setting.module == module)
    }

    fn check_devices(&self) -> Result<()> {
        let mut first: Option<(&str, &str)> = None;
        for file in &self.files {
            let Some(device) = file.metadata(DEVICE_KEY) else { continue };
            match first {
                Some((name, other)) if other != device => {
                    let reason = format!("`{name}` was measured on {other}, `{}` on {device}", file.name);
                    return Err(Error::ProfileMixed { reason });
                }
                Some(_) => {}
                None => first = Some((&file.name, device)),
            }
        }
        if self.files.is_empty() {
            return Err(Error::ProfileMixed { reason: "expected at least one file, found none".into() });
        }
        Ok(())
    }
}

impl ProfileFile {
    /// Returns a metadata value.
    #[must_use]
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }
}

/// Points for a module, and what the remaining profile shows about point errors.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SelectedPoints {
    /// Module points, sorted by setting; measurements with the same setting in several files are repeats.
    pub(crate) points: Vec<Point>,
    /// Module points, file by file.
    pub(crate) sessions: Vec<Vec<Point>>,
    /// Points for all modules, file by file.
    pub(crate) profile: Vec<Point>,
    /// Names of files that do not state the module widths.
    pub(crate) unknown_files: Vec<String>,
}

impl Profile {
    /// Returns the points for a module with these widths.
    ///
    /// # Errors
    /// [`Error::ProfileLacks`] if there are no points for this module, or all have other widths.
    pub(crate) fn select(&self, module: Module, wanted: &ModuleWidths) -> Result<SelectedPoints> {
        let (mut chosen, mut others, mut unknown_files): (Vec<Measurement>, _, _) =
            (Vec::new(), Vec::new(), Vec::new());
        let mut sessions = Vec::new();
        for file in &self.files {
            let rows = file.measurements.iter().filter(|row| row.setting.module == module);
            let rows: Vec<Measurement> = rows.copied().collect();
            if rows.is_empty() {
                continue;
            }
            match file.widths.get(&module).filter(|widths| widths.is_known()) {
                Some(widths) if !widths.fits(wanted) => {
                    others.push(format!("`{}` has {widths}", file.name));
                    continue;
                }
                Some(_) => {}
                None => unknown_files.push(file.name.clone()),
            }
            sessions.push(points(&rows));
            chosen.extend(rows);
        }
        if chosen.is_empty() {
            let found = if others.is_empty() { "no rows of it".to_owned() } else { others.join(", ") };
            let needed = format!("module {module} of {wanted}; found: {found}");
            return Err(Error::ProfileLacks { needed });
        }
        let mut points = points(&chosen);
        pool_spreads(&mut points);
        let mut profile = self.points();
        // Points in a file are sorted by module, so points for the same module and file are adjacent.
        let modules = profile.chunk_by_mut(|a, b| a.setting.module == b.setting.module);
        modules.for_each(pool_spreads);
        Ok(SelectedPoints { points, sessions, profile, unknown_files })
    }
}

/// Names of all profiles shipped with the crate.
const NAMES: [&str; 1] = ["h200-torch"];

/// Files for a model in a profile.
struct ShippedModel {
    profile: &'static str,
    model: &'static str,
    /// Names and texts.
    files: [(&'static str, &'static str); 2],
}

/// Embeds a file with its name.
macro_rules! file {
    ($name:literal) => {
        ($name, include_str!(concat!("../../profiles/", $name)))
    };
}

/// All models in all profiles.
const MODELS: [ShippedModel; 2] = [
    ShippedModel {
        profile: "h200-torch",
        model: "qwen2.5-vl-3b",
        files: [file!("h200-torch/qwen2.5-vl-3b/vision.csv"), file!("h200-torch/qwen2.5-vl-3b/llm.csv")],
    },
    ShippedModel {
        profile: "h200-torch",
        model: "qwen2.5-vl-7b",
        files: [file!("h200-torch/qwen2.5-vl-7b/vision.csv"), file!("h200-torch/qwen2.5-vl-7b/llm.csv")],
    },
];

impl Profile {
    /// Returns the names that [`Profile::shipped`] accepts.
    #[must_use]
    pub const fn shipped_names() -> &'static [&'static str] {
        &NAMES
    }

    /// Returns a shipped profile's data for a model; `None` if there is no such profile.
    ///
    /// # Errors
    /// [`Error::ProfileLacks`] with the measured models if the model has a module with other widths.
    ///
    /// # Examples
    /// ```
    /// use dflop_costmodel::{ModelSpec, Profile};
    ///
    /// # fn main() -> dflop_costmodel::Result<()> {
    /// let profile = Profile::shipped("h200-torch", &ModelSpec::preset("qwen2.5-vl-7b")?)?;
    /// assert_eq!(profile.expect("it comes with the crate").device(), Some("NVIDIA H200"));
    /// assert!(Profile::shipped("h200-torch", &ModelSpec::preset("omni-7b")?).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn shipped(name: &str, spec: &ModelSpec) -> Result<Option<Self>> {
        let mut measured = Vec::new();
        for shipped in MODELS.iter().filter(|shipped| shipped.profile == name) {
            let profile = Self::parse(shipped.files)?;
            if profile.has_modules(spec) {
                return Ok(Some(profile));
            }
            measured.push(shipped.model);
        }
        if measured.is_empty() {
            return Ok(None);
        }
        let needed = format!("model `{}`: `{name}` was measured for {}", spec.name, measured.join(", "));
        Err(Error::ProfileLacks { needed })
    }

    /// Returns whether every module in a model was measured with the model's widths.
    fn has_modules(&self, spec: &ModelSpec) -> bool {
        Module::ALL.into_iter().all(|module| {
            let Some(wanted) = ModuleWidths::from_spec(spec, module) else { return true };
            self.files.iter().any(|file| file.widths.get(&module).is_some_and(|widths| widths.fits(&wanted)))
        })
    }
}

/// Module widths; an unknown width is `None` and fits every width.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct ModuleWidths {
    /// Name, for messages only.
    pub name: Option<String>,
    /// Token width (hidden size).
    pub hidden: Option<u32>,
    /// Number of query heads.
    pub heads: Option<u32>,
    /// Number of key and value heads.
    pub kv_heads: Option<u32>,
    /// Width between the MLP matrices.
    pub ffn: Option<u32>,
    /// Number of experts per layer; `None` for a module without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<u32>,
    /// Number of experts that a token goes through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts_per_token: Option<u32>,
    /// Width between an expert's matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_ffn: Option<u32>,
}

impl ModuleWidths {
    /// Returns a module's widths in a model; `None` if the model has no such module.
    #[must_use]
    pub fn from_spec(spec: &ModelSpec, module: Module) -> Option<Self> {
        let encoder = match module {
            Module::Vision => spec.vision.as_ref().map(|vision| vision.encoder),
            Module::Audio => spec.audio.as_ref().map(|audio| audio.encoder),
            Module::Llm => {
                let llm = &spec.llm;
                return Some(Self {
                    name: Some(spec.name.clone()),
                    hidden: Some(llm.hidden),
                    heads: Some(llm.heads),
                    kv_heads: Some(llm.kv_heads),
                    ffn: Some(llm.ffn),
                    experts: llm.experts.map(|experts| experts.experts),
                    experts_per_token: llm.experts.map(|experts| experts.experts_per_token),
                    expert_ffn: llm.experts.map(|experts| experts.ffn),
                });
            }
        };
        encoder.map(|encoder| Self {
            name: Some(spec.name.clone()),
            hidden: Some(encoder.hidden),
            heads: Some(encoder.heads),
            kv_heads: None,
            ffn: Some(encoder.ffn),
            ..Self::default()
        })
    }

    /// Returns whether all widths that both know are equal; widths without experts belong to a module without
    /// experts.
    #[must_use]
    pub fn fits(&self, other: &Self) -> bool {
        let agree = |a: Option<u32>, b: Option<u32>| a.is_none() || b.is_none() || a == b;
        agree(self.hidden, other.hidden)
            && agree(self.heads, other.heads)
            && agree(self.kv_heads, other.kv_heads)
            && agree(self.ffn, other.ffn)
            && (!self.is_known() || !other.is_known() || self.expert_widths() == other.expert_widths())
    }

    const fn expert_widths(&self) -> [Option<u32>; 3] {
        [self.experts, self.experts_per_token, self.expert_ffn]
    }

    /// Returns whether the widths can be compared at all.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        self.hidden.is_some()
    }

    /// Parses `hidden=3584 heads=28 kv_heads=4 ffn=18944 name=qwen2.5-7b`, in any order.
    pub(super) fn parse(text: &str) -> std::result::Result<Self, String> {
        let mut widths = Self::default();
        for pair in text.split_whitespace() {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(format!("`{pair}` is not of the form key=value"));
            };
            let width = || value.parse().map(Some).map_err(|_| format!("`{pair}` is not a whole number"));
            match key {
                "name" => widths.name = Some(value.to_owned()),
                "hidden" => widths.hidden = width()?,
                "heads" => widths.heads = width()?,
                "kv_heads" => widths.kv_heads = width()?,
                "ffn" => widths.ffn = width()?,
                "experts" => widths.experts = width()?,
                "experts_per_token" => widths.experts_per_token = width()?,
                "expert_ffn" => widths.expert_ffn = width()?,
                // The measuring program also writes layers, steps and similar keys, which fit every model.
                _ => {}
            }
        }
        Ok(widths)
    }
}

impl std::fmt::Display for ModuleWidths {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let widths = [
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("ffn", self.ffn),
            ("experts", self.experts),
            ("experts_per_token", self.experts_per_token),
            ("expert_ffn", self.expert_ffn),
        ];
        let known = widths.into_iter().filter_map(|(key, width)| width.map(|width| format!("{key}={width}")));
        let name = self.name.iter().map(|name| format!("name={name}"));
        formatter.write_str(&known.chain(name).collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped(model: &str) -> Result<Profile> {
        let profile = Profile::shipped("h200-torch", &ModelSpec::preset(model).unwrap())?;
        Ok(profile.expect("it comes with the crate"))
    }

    #[test]
    fn a_model_gets_the_files_that_were_measured_for_it() {
        for model in ["qwen2.5-vl-3b", "qwen2.5-vl-7b"] {
            let profile = shipped(model).unwrap();
            let names: Vec<_> = profile.files().iter().map(|file| file.name.as_str()).collect();
            assert_eq!(names, ["vision", "llm"].map(|module| format!("h200-torch/{model}/{module}.csv")));
            for key in ["driver", "torch", "transformers", "date", "attention", "ran", "recompute"] {
                assert!(profile.files().iter().all(|file| file.metadata(key).is_some()), "{key}");
            }
        }
        // A checkpoint with the same sizes has a different name.
        let mut spec = ModelSpec::preset("qwen2.5-vl-3b").unwrap();
        spec.name = "my-fine-tuned-model".to_owned();
        let own = Profile::shipped("h200-torch", &spec).unwrap();
        assert_eq!(own, Some(shipped("qwen2.5-vl-3b").unwrap()));
        // The LLM without the encoder was measured, too.
        spec.vision = None;
        assert_eq!(Profile::shipped("h200-torch", &spec).unwrap(), own);
    }

    #[test]
    fn another_model_is_refused_with_the_measured_ones() {
        let other = shipped("llava-ov-qwen2.5-7b").unwrap_err().to_string();
        let expected = "the profile lacks model `llava-ov-qwen2.5-7b`: `h200-torch` was measured for \
                        qwen2.5-vl-3b, qwen2.5-vl-7b";
        assert_eq!(other, expected);
        let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
        assert_eq!(Profile::shipped("tpu", &spec).unwrap(), None);
        assert!(Profile::shipped_names().iter().all(|name| Profile::shipped(name, &spec).is_ok()));
    }
}
