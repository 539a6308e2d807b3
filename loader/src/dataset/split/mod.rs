//! Reads named dataset splits, such as `train` and `val`.
//!
//! They are defined in a JSON file, `splits.json` in the shard directory or a file that the user names. A
//! split selects the samples that meet all of the split's conditions:
//!
//! ```json
//! {"splits": {
//!   "train": {"fraction": [0, 0.98]},
//!   "val":   {"fraction": [0.98, 1]},
//!   "pages": {"shards": ["pages-{00..07}.tar"], "may_overlap": true},
//!   "gold":  {"keys": ["kite-7", "kite-9"], "may_overlap": true},
//!   "hard":  {"keys_file": "hard.txt", "may_overlap": true}
//! }}
//! ```
//!
//! `fraction` is a range over a hash of the sample key, end excluded: a sample stays in its split when shards
//! are added, whatever the seed, and samples that share a key share a split. Boundaries are integers, in
//! units of one billionth. A keys file has one key per line and is in the same directory as the splits file.
//!
//! Without a `splits.json`, the `split.yaml` of a dataset prepared with Energon is read: its splits are shard
//! lists, without the shards and the single samples that it excludes.

mod energon;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Selection;
use crate::error::{Error, Result, Skipped};
use crate::files::{lies_inside, parent_directory};
use crate::index::Index;
use crate::shard::{Expansion, Shard};
use crate::store::file;

/// Name of the splits file in the shard directory.
pub const SPLITS_FILE: &str = "splits.json";
/// Number of units in a whole, to which fraction boundaries are rounded.
const UNITS: u64 = 1_000_000_000;

/// Splits of a dataset.
#[derive(Debug, Clone)]
pub struct Splits {
    /// Source file, for messages.
    origin: String,
    by_name: BTreeMap<String, CheckedSplit>,
    /// Advice to the user about overlapping splits.
    overlap_hint: &'static str,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitsFile {
    splits: BTreeMap<String, SplitRule>,
}

/// Split as written in a splits file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct SplitRule {
    fraction: Option<[f64; 2]>,
    shards: Option<Vec<String>>,
    keys: Option<Vec<String>>,
    keys_file: Option<String>,
    may_overlap: bool,
}

/// Checked split; a sample belongs to it if it meets every condition.
#[derive(Debug, Clone, Default)]
struct CheckedSplit {
    units: Option<Range<u64>>,
    shards: Option<BTreeSet<String>>,
    /// Directory that shard paths are relative to; `None` if shards are referenced by base name.
    directory: Option<PathBuf>,
    keys: Option<BTreeSet<String>>,
    /// Excluded samples, by shard and key.
    excluded: BTreeSet<(String, String)>,
    may_overlap: bool,
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::Config { setting: "split", reason: reason.into() }
}

/// Maps a key to a number from zero to one billion: the 64-bit XXH3 of the key bytes, scaled.
fn key_unit(key: &str) -> u64 {
    ((u128::from(xxhash_rust::xxh3::xxh3_64(key.as_bytes())) * u128::from(UNITS)) >> 64) as u64
}

impl Splits {
    /// Reads a splits file.
    ///
    /// # Errors
    /// [`Error::Storage`] if the file, or a keys file that it names, cannot be read; the same errors as
    /// [`Self::parse`], with the file name.
    pub fn read(path: &Path) -> Result<Self> {
        Self::from_document(&read_text(path)?, &path.display().to_string(), Some(parent_directory(path)))
    }

    /// Reads `splits.json` in the first shard's directory. If there is none, reads Energon splits from
    /// `.nv-meta` in that directory or up to three directories above.
    ///
    /// # Errors
    /// [`Error::Config`] if the shards are not in a local directory; the same errors as [`Self::read`];
    /// [`Error::Storage`] if the Energon file is invalid.
    pub fn beside(index: &Index) -> Result<Self> {
        let directory = index.shards()[0].path().map(parent_directory);
        let directory =
            directory.ok_or_else(|| invalid("the shards are in no local directory; name the splits file"))?;
        let own = directory.join(SPLITS_FILE);
        if !own.exists()
            && let Some(splits) = Self::energon(directory)?
        {
            return Ok(splits);
        }
        Self::read(&own)
    }

    /// Reads Energon splits from `.nv-meta` in `directory` or in up to three parent directories; `None`
    /// without a file.
    ///
    /// # Errors
    /// [`Error::Storage`] if the file does not have Energon's format or cannot be read; [`Error::Config`] if
    /// two splits overlap.
    pub fn energon(directory: &Path) -> Result<Option<Self>> {
        energon::find(directory)
    }

    /// Parses the text of a splits file that names no keys file.
    ///
    /// # Errors
    /// [`Error::Config`] if the document is not JSON with the structure above, if a split has no condition,
    /// or if two splits overlap without `may_overlap` in either split.
    pub fn parse(document: &str) -> Result<Self> {
        Self::from_document(document, "splits", None)
    }

    fn from_document(document: &str, origin: &str, directory: Option<&Path>) -> Result<Self> {
        let file: SplitsFile =
            serde_json::from_str(document).map_err(|error| invalid(format!("`{origin}`: {error}")))?;
        let checked = file.splits.into_iter().map(|(name, rule)| {
            let named = |error| match error {
                Error::Config { reason, .. } => invalid(format!("`{origin}`: split `{name}`: {reason}")),
                other => other,
            };
            let split = CheckedSplit::new(rule, directory).map_err(named)?;
            Ok((name, split))
        });
        let overlap_hint = "set `\"may_overlap\": true` in one of them if that is intended";
        let splits =
            Self { origin: origin.to_owned(), by_name: checked.collect::<Result<_>>()?, overlap_hint };
        splits.check_overlaps()?;
        Ok(splits)
    }

    fn check_overlaps(&self) -> Result<()> {
        for (place, (name, split)) in self.by_name.iter().enumerate() {
            for (other_name, other) in self.by_name.iter().skip(place + 1) {
                let overlap = split.overlap(other).filter(|_| !split.may_overlap && !other.may_overlap);
                if let Some(overlap) = overlap {
                    let both = format!("`{}`: splits `{name}` and `{other_name}`", self.origin);
                    return Err(invalid(format!("{both} overlap: {overlap}; {}", self.overlap_hint)));
                }
            }
        }
        Ok(())
    }

    /// Returns the split names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Selects the index samples that belong to a split, and the skipped samples among them.
    pub(crate) fn select(&self, name: &str, index: &Index) -> Result<(Selection, Vec<Skipped>)> {
        let Some(split) = self.by_name.get(name) else {
            let known: Vec<_> = self.names().collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(invalid(format!("`{}` has no split `{name}`; it has: {known}", self.origin)));
        };
        let in_split = |reason: String| invalid(format!("split `{name}` of `{}` {reason}", self.origin));
        let shards = split.selected_shards(index).map_err(in_split)?;
        let selection = split.selected_samples(&shards, index).map_err(in_split)?;
        if selection.len() == 0 {
            return Err(in_split("holds no good sample".into()));
        }
        let by_url: BTreeMap<&str, &Shard> =
            shards.iter().map(|&shard| (&*index.shards()[shard].url, &index.shards()[shard])).collect();
        let is_here = |bad: &&Skipped| {
            by_url
                .get(bad.shard.as_str())
                .is_some_and(|shard| bad.key.as_ref().is_none_or(|key| split.has_sample(shard, key)))
        };
        Ok((selection, index.skipped().iter().filter(is_here).cloned().collect()))
    }
}

impl CheckedSplit {
    fn new(rule: SplitRule, directory: Option<&Path>) -> Result<Self> {
        let SplitRule { fraction, shards, keys, keys_file, may_overlap } = rule;
        let mut all_keys: Option<BTreeSet<String>> = keys.map(|keys| keys.into_iter().collect());
        if let Some(file) = keys_file {
            let directory = directory.ok_or_else(|| invalid("a keys file needs a splits file beside it"))?;
            let path = directory.join(&file);
            if !lies_inside(directory, &path) {
                return Err(invalid(format!(
                    "the keys file `{file}` lies outside the directory of the splits file"
                )));
            }
            let text = read_text(&path)?;
            all_keys.get_or_insert_default().extend(text.lines().map(str::to_owned));
        }
        if fraction.is_none() && shards.is_none() && all_keys.is_none() {
            return Err(invalid("give a `fraction`, `shards`, `keys` or a `keys_file`"));
        }
        let shards = shards.map(|patterns| {
            let mut expansion = Expansion::default();
            patterns.iter().try_for_each(|pattern| expansion.add(pattern))?;
            Ok::<_, Error>(expansion.into_names().into_iter().collect())
        });
        let units = fraction.map(fraction_units).transpose()?;
        Ok(Self { units, shards: shards.transpose()?, keys: all_keys, may_overlap, ..Self::default() })
    }

    /// Returns the name by which the split refers to a shard.
    fn shard_name<'a>(&self, shard: &'a Shard) -> Cow<'a, str> {
        let below = |directory: &PathBuf| {
            let path = std::path::absolute(shard.path()?).ok()?;
            Some(path.strip_prefix(directory).ok()?.to_str()?.to_owned())
        };
        self.directory.as_ref().and_then(below).map_or(Cow::Borrowed(shard.base_name()), Cow::Owned)
    }

    fn has_sample(&self, shard: &Shard, key: &str) -> bool {
        self.has_key(key)
            && (self.excluded.is_empty()
                || !self.excluded.contains(&(self.shard_name(shard).into_owned(), key.to_owned())))
    }

    fn has_key(&self, key: &str) -> bool {
        self.units.as_ref().is_none_or(|units| units.contains(&key_unit(key)))
            && self.keys.as_ref().is_none_or(|keys| keys.contains(key))
    }

    /// Describes what two splits share, as far as their rules show; `None` if they cannot share a sample.
    fn overlap(&self, other: &Self) -> Option<String> {
        let mut shared = "nothing keeps them apart".to_owned();
        if let (Some(ours), Some(theirs)) = (&self.shards, &other.shards) {
            shared = format!("both take shard `{}`", ours.intersection(theirs).next()?);
        }
        if let (Some(ours), Some(theirs)) = (&self.units, &other.units) {
            let (from, to) = (ours.start.max(theirs.start), ours.end.min(theirs.end));
            if from >= to {
                return None;
            }
            let shown = |units: u64| units as f64 / UNITS as f64;
            shared = format!("both take the fraction from {} to {}", shown(from), shown(to));
        }
        for (listing, ruling) in [(self, other), (other, self)] {
            if let Some(keys) = &listing.keys {
                shared = format!("both take key `{}`", keys.iter().find(|key| ruling.has_key(key))?);
            }
        }
        Some(shared)
    }

    /// Returns the numbers of the shards that contain split samples.
    fn selected_shards(&self, index: &Index) -> Result<Vec<usize>, String> {
        let all = 0..index.shards().len();
        let Some(names) = &self.shards else { return Ok(all.collect()) };
        let name_of = |shard: usize| self.shard_name(&index.shards()[shard]);
        let chosen: Vec<usize> = all.filter(|&shard| names.contains(&*name_of(shard))).collect();
        let found: BTreeSet<Cow<'_, str>> = chosen.iter().map(|&shard| name_of(shard)).collect();
        match names.iter().find(|name| !found.contains(name.as_str())) {
            Some(missing) => Err(format!("names shard `{missing}`, which the dataset does not have")),
            None => Ok(chosen),
        }
    }

    fn selected_samples(&self, shards: &[usize], index: &Index) -> Result<Selection, String> {
        if self.units.is_none() && self.keys.is_none() && self.excluded.is_empty() {
            return Ok(Selection::ranges(shards.iter().map(|&shard| index.shard_samples(shard))));
        }
        if index.len() > u64::from(u32::MAX) {
            return Err(format!("lists samples of an index of more than {}; split it by shards", u32::MAX));
        }
        let of_shard = |&number: &usize| {
            let shard = &index.shards()[number];
            let is_in = |&sample: &u64| self.has_sample(shard, index.sample(sample).key());
            index.shard_samples(number).filter(is_in).map(|sample| sample as u32).collect::<Vec<_>>()
        };
        let list: Vec<u32> = shards.iter().flat_map(of_shard).collect();
        self.check_excluded(shards, index)?;
        if let Some(keys) = &self.keys {
            let found: BTreeSet<&str> =
                list.iter().map(|&sample| index.sample(sample.into()).key()).collect();
            let is_wanted = |key: &&String| self.has_key(key) && !found.contains(key.as_str());
            if let Some(missing) = keys.iter().find(is_wanted) {
                let bad = index.skipped().iter().find(|bad| bad.key.as_ref() == Some(missing));
                let why = bad.map_or("which no shard of it holds".to_owned(), |bad| {
                    format!("which is bad: {}", bad.reason)
                });
                return Err(format!("names key `{missing}`, {why}"));
            }
        }
        Ok(Selection::List(list))
    }

    /// Checks that excluded samples exist: a misspelled sample would be trained on.
    fn check_excluded(&self, shards: &[usize], index: &Index) -> Result<(), String> {
        for &number in shards.iter().take_while(|_| !self.excluded.is_empty()) {
            let shard = &index.shards()[number];
            let name = self.shard_name(shard);
            let of_shard = self.excluded.iter().filter(|(excluding, _)| *excluding == *name);
            let mut missing: BTreeSet<&str> = of_shard.map(|(_, key)| key.as_str()).collect();
            if missing.is_empty() {
                continue;
            }
            index.shard_samples(number).for_each(|sample| _ = missing.remove(index.sample(sample).key()));
            let bad = index.skipped().iter().filter(|bad| *bad.shard == *shard.url);
            bad.for_each(|bad| _ = missing.remove(bad.key.as_deref().unwrap_or_default()));
            if let Some(key) = missing.first() {
                return Err(format!("excludes sample `{key}` of shard `{name}`, which has no such key"));
            }
        }
        Ok(())
    }
}

/// Returns fraction boundaries in units of one billionth.
fn fraction_units([from, to]: [f64; 2]) -> Result<Range<u64>> {
    let in_units = |boundary: f64| {
        let units = boundary * UNITS as f64;
        let is_exact = (0.0..=1.0).contains(&boundary) && (units - units.round()).abs() < 1e-3;
        is_exact.then_some(units.round() as u64)
    };
    match (in_units(from), in_units(to)) {
        (Some(from), Some(to)) if from < to => Ok(from..to),
        _ => {
            let rule = "two ascending numbers from 0 to 1 with at most nine decimals";
            Err(invalid(format!("`fraction` is [{from}, {to}] and must be {rule}")))
        }
    }
}

fn read_text(path: &Path) -> Result<String> {
    file::read_text(path).map_err(|source| Error::file(path, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(document: &str) -> String {
        Splits::parse(document).unwrap_err().to_string()
    }

    proptest! {
        #[test]
        fn fractions_that_touch_share_no_key_and_leave_none_out(key in ".{0,20}", cut in 1u32..1000) {
            let cut = f64::from(cut) / 1000.0;
            let splits = format!(r#"{{"splits":{{"a":{{"fraction":[0,{cut}]}},"b":{{"fraction":[{cut},1]}}}}}}"#);
            let splits = Splits::parse(&splits).unwrap();
            let is_in = |name: &str| splits.by_name[name].has_key(&key);
            prop_assert!(is_in("a") != is_in("b"));
        }
    }

    /// Guards the recorded value: a sample never changes its split.
    #[test]
    fn the_place_of_a_key_never_changes() {
        assert_eq!(["kite", "", "sample-00007"].map(key_unit), [411_023_531, 175_880_433, 18_930_558]);
    }

    #[test]
    fn a_fraction_holds_about_its_share() {
        let share = (0..10_000).filter(|key| key_unit(&format!("key-{key}")) < UNITS / 10).count();
        assert!((900..1100).contains(&share), "{share}");
    }

    #[test]
    fn overlaps_are_named_unless_they_are_meant() {
        let overlapping = [
            (r#""a":{"fraction":[0,0.5]},"b":{"fraction":[0.4,1]}"#, "from 0.4 to 0.5"),
            (r#""a":{"shards":["{1..3}.tar"]},"b":{"shards":["3.tar"]}"#, "shard `3.tar`"),
            (r#""a":{"keys":["x","y"]},"b":{"keys":["y"]}"#, "key `y`"),
            (r#""a":{"fraction":[0,1]},"b":{"keys":["y"]}"#, "key `y`"),
            (r#""a":{"fraction":[0,1]},"b":{"shards":["y.tar"]}"#, "nothing keeps them apart"),
        ];
        for (splits, reason) in overlapping {
            let text = message(&format!(r#"{{"splits":{{{splits}}}}}"#));
            assert!(text.contains(reason) && text.contains("`a` and `b`"), "{text}");
            let meant = splits.replace(r#""b":{"#, r#""b":{"may_overlap":true,"#);
            assert!(Splits::parse(&format!(r#"{{"splits":{{{meant}}}}}"#)).is_ok(), "{meant}");
        }
        let apart = r#"{"splits":{"a":{"fraction":[0,1],"shards":["1.tar"]},"b":{"fraction":[0,1],"shards":["2.tar"]}}}"#;
        assert!(Splits::parse(apart).is_ok());
    }

    #[test]
    fn unusable_splits_say_why() {
        for (split, reason) in [
            ("{}", "give a `fraction`"),
            (r#"{"fraction":[0.5,0.5]}"#, "ascending"),
            (r#"{"fraction":[0,1.5]}"#, "from 0 to 1"),
            (r#"{"fraction":[0,0.12345678949]}"#, "nine decimals"),
            (r#"{"share":1}"#, "unknown field"),
            (r#"{"keys_file":"k.txt"}"#, "keys file"),
        ] {
            let text = message(&format!(r#"{{"splits":{{"odd":{split}}}}}"#));
            assert!(text.contains(reason), "{text}");
        }
    }
}
