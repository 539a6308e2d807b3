//! Measured profiles: what modules really take on a device, and times of other shapes in between.
//!
//! # Schema
//! A profile is one CSV file or several. The first line is `# dflop-profile: 1`. Further lines `# key: value` in
//! front of the header say where it was measured: `device`, `driver`, `torch` and so on; `vision`, `audio` and `llm`
//! give the widths of what was measured, such as `# llm: hidden=3584 heads=28 kv_heads=4 ffn=18944 name=qwen2.5-7b`,
//! and a profile of other widths is refused. Then come a header and rows, columns by name in any order:
//!
//! | column | meaning |
//! | --- | --- |
//! | `module` | `vision`, `audio` or `llm` |
//! | `part` | `linear`: the layers without attention; `attention`: scaled dot-product attention of these layers alone; `ends`: what is outside the layers; `head`: of that, last norm, LM head and loss of an LLM, where they run for learned tokens alone; `whole`: linear and attention in one |
//! | `phase` | `forward`, `backward` (without the forward pass), `optimizer` |
//! | `tp` | tensor-parallel degree; the time is that of the whole group |
//! | `layers` | transformer layers that ran; 0 for `ends` and `head` |
//! | `batch` | sequences side by side; 0 for `optimizer` |
//! | `tokens` | tokens of each sequence inside the module: patches of a tile, not what the LLM sees of it; for `head` those that are learned; 0 for `optimizer` |
//! | `microseconds` | time of one run, finite and above 0 |
//! | `bytes` | optional, may be empty: the rise of the allocator's peak; after `optimizer`, what state takes |
//!
//! Rows of the same setting are repeats; their median counts. Rows of `linear` and `whole` leave out what rows of
//! `ends` hold; a profile without `ends` is taken to have it in the constant that two layer counts show. Where there are rows of `head`, `ends` leaves that out. `attention`
//! of an LLM is causal and of one sequence, as packed samples are: it is taken per **original sample**, linear work
//! per **packed sequence**.
//!
//! Files of the reference implementation are known by their names and read as well: [`StepMemory`], and its pair of
//! whole and `_skip_attn` times, whose difference is attention.
//!
//! # Source
//! An et al., "DFLOP", PACMMOD 2026, arXiv:2603.25120, section 3.2.1: throughput of encoder batches, and of attention
//! and linear work of the LLM apart. There rates are interpolated; here times are, see `curve.rs`.

mod measurement;
mod reference;
mod reference_models;
mod rows;
mod table;
mod widths;
mod write;

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::module::Module;

pub use measurement::{Measurement, Part, Phase, Point, Setting};
pub use reference::StepMemory;
pub use reference_models::reference_model;
pub use widths::ModuleWidths;

pub(crate) use measurement::REPEATS_MIN;

/// Key of the first metadata line.
const SCHEMA_KEY: &str = "dflop-profile";
/// Version of the schema that is read.
const SCHEMA_VERSION: &str = "1";
/// Metadata that must not differ between the files of one profile.
const DEVICE_KEY: &str = "device";

/// Measured times, from one file or several.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    files: Vec<ProfileFile>,
}

/// One file of a profile.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProfileFile {
    /// Its name, as it was given.
    pub name: String,
    /// Metadata in the order of the file, without the widths of modules.
    pub metadata: Vec<(String, String)>,
    /// Widths of the modules that were measured.
    pub widths: BTreeMap<Module, ModuleWidths>,
    /// Its rows.
    pub measurements: Vec<Measurement>,
    /// Memory, of a file of the reference.
    pub step_memory: Vec<StepMemory>,
}

impl Profile {
    /// Reads a profile from the names and texts of its files.
    ///
    /// # Errors
    /// [`Error::ProfileFormat`] with file, line and column if a file is not a profile; [`Error::ProfileMixed`] if
    /// files come from different devices, or there is none.
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
        let parse = |(name, text)| reference::parse(name, text).unwrap_or_else(|| rows::parse(name, text));
        let files = files.into_iter().map(parse).collect::<Result<Vec<_>>>()?;
        let profile = Self { files };
        profile.check_devices()?;
        Ok(profile)
    }

    /// Returns the files.
    #[must_use]
    pub fn files(&self) -> &[ProfileFile] {
        &self.files
    }

    /// Returns the device that was measured, if a file says it.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        self.files.iter().find_map(|file| file.metadata(DEVICE_KEY))
    }

    /// Returns all points: repeats taken together, sorted by setting, file by file.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        self.files.iter().flat_map(|file| measurement::points(&file.measurements)).collect()
    }

    /// Returns all points with the widths that their files state, widths unknown where they do not.
    pub(crate) fn points_with_widths(&self) -> Vec<(Point, ModuleWidths)> {
        let of_file = |file: &ProfileFile| {
            let points = measurement::points(&file.measurements).into_iter();
            let widths = file.widths.clone();
            points.map(move |point| (point, widths.get(&point.setting.module).cloned().unwrap_or_default()))
        };
        self.files.iter().flat_map(of_file).collect()
    }

    /// Whether any row is of this module.
    pub(crate) fn has_module(&self, module: Module) -> bool {
        self.files.iter().flat_map(|file| &file.measurements).any(|row| row.setting.module == module)
    }

    /// Returns the measurements of a module of these widths, and the files that do not say theirs.
    ///
    /// # Errors
    /// [`Error::ProfileLacks`] if there are none of this module or all have other widths.
    pub(crate) fn select(&self, module: Module, wanted: &ModuleWidths) -> Result<(Vec<Point>, Vec<String>)> {
        let (mut chosen, mut others, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
        for file in &self.files {
            let of_module = || file.measurements.iter().filter(|row| row.setting.module == module);
            if of_module().next().is_none() {
                continue;
            }
            match file.widths.get(&module).filter(|widths| widths.is_known()) {
                Some(widths) if !widths.fits(wanted) => {
                    others.push(format!("`{}` has {widths}", file.name));
                    continue;
                }
                Some(_) => {}
                None => unknown.push(file.name.clone()),
            }
            chosen.extend(of_module().copied());
        }
        if chosen.is_empty() {
            let found = if others.is_empty() { "nothing of it".to_owned() } else { others.join(", ") };
            let needed = format!("module {module} of {wanted}; found: {found}");
            return Err(Error::ProfileLacks { needed });
        }
        Ok((measurement::points(&chosen), unknown))
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
            return Err(Error::ProfileMixed { reason: "there is no file".into() });
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
