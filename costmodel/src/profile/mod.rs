//! Reads and writes measured profiles: module times and memory on a device.
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

mod measurement;
mod reference;
mod reference_models;
mod rows;
mod shipped;
mod table;
mod widths;

use std::collections::BTreeMap;

use measurement::{points, pool_spreads};

use crate::error::{Error, Result};
use crate::module::Module;

pub(crate) use measurement::REPEATS_MIN;
pub use measurement::{HeldOutRun, Measurement, Part, Phase, Point, Setting};
pub use reference::StepMemory;
pub use reference_models::reference_model;
pub use widths::ModuleWidths;

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
