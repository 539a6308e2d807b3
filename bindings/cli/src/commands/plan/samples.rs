//! Arguments for the samples that plans are simulated with: a dataset with an index, or a shape table.
//!
//! Reads link bandwidths and latencies from a JSON or CSV file.
//!
//! JSON: `{"nvlink": {"gigabytes_per_second": 300, "latency_microseconds": 3}, "infiniband": {...}}`; or CSV
//! with the columns `link,gigabytes_per_second,latency_microseconds`. A gigabyte is 10⁹ bytes; bandwidth is
//! per GPU and direction.

use super::{PlanAccepted, shapes};
use crate::args::dataset::SplitArgs;
use crate::args::model::TokenizerArgs;
use crate::args::set::SetArgs;
use crate::failure::Failure;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use csv::{ReaderBuilder, Trim};
use dflop_costmodel::{ModelSpec, SampleShape, SampleUnits};
use dflop_loader::Dataset;
use dflop_loader::store::file;
use dflop_planner::{ItemSize, Link, Links};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Maximum number of samples to read from a dataset; a larger dataset is sampled at even distances.
const SAMPLES_MAX: u64 = 1_000_000;

/// A dataset or a shape table.
#[derive(Debug)]
pub(super) struct SampleArgs(SampleFields);

#[derive(Debug, Args)]
struct SampleFields {
    /// Dataset for the simulated batches: a shard directory, files, patterns such as `shards/{000..019}.tar`,
    /// or URLs; shapes come from the index, through the model's token rules.
    #[arg(value_name = "DATASET", required_unless_present = "shapes", conflicts_with = "shapes")]
    shards: Vec<String>,
    /// Shapes that replace a dataset: CSV with columns `tiles,seq_len`, one sample per line; for models that
    /// see images in native resolution `patches,seq_len`, and optionally `patch_squares,window_squares`; for
    /// models with several encoders such as `vision_tiles,audio_tiles,seq_len`.
    #[arg(long, value_name = "FILE")]
    shapes: Option<PathBuf>,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    split: SplitArgs,
}

/// Sample sizes, and an account of the samples left out.
#[derive(Debug)]
pub(super) struct Samples {
    pub(super) sizes: Vec<ItemSize>,
    pub(super) account: SamplesJson,
}

/// Account of the samples that plans are simulated with.
#[derive(Debug, Serialize)]
pub(super) struct SamplesJson {
    /// Number of samples in the dataset, or lines in the table.
    pub(super) samples: u64,
    /// Samples that were read: all, or as many at even distances.
    pub(super) read: u64,
    /// Number of samples that the model does not support, which are left out.
    pub(super) refused: u64,
    /// The first refused sample.
    pub(super) first_refused: Option<RefusedJson>,
}

/// A sample that the model does not support.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RefusedJson {
    pub(super) key: String,
    pub(super) reason: String,
}

impl SampleArgs {
    /// Returns the shards of a dataset; none with a shape table.
    pub(super) fn shards(&self) -> &[String] {
        &self.0.shards
    }
}

impl Args for SampleArgs {
    /// Declares dataset options as conflicts of the shape table, where they would have no effect.
    fn augment_args(command: Command) -> Command {
        let options = TokenizerArgs::augment_args(SplitArgs::augment_args(Command::default()));
        let ids: Vec<String> = options.get_arguments().map(|arg| arg.get_id().to_string()).collect();
        ids.into_iter().fold(SampleFields::augment_args(command), |command, id| {
            command.mut_arg(id, |arg| arg.conflicts_with("shapes"))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SampleArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        SampleFields::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl SampleArgs {
    /// Reads the shape table, or the dataset shapes from the index, which is built if it is missing.
    pub(super) fn read(&self, spec: &ModelSpec, set: &SetArgs<PlanAccepted>) -> Result<Samples, Failure> {
        let SampleFields { shards, shapes, split, tokenizer } = &self.0;
        if let Some(path) = shapes {
            set.refuse(&["index", "store", "processor"], "has no effect with `--shapes`; leave it out")?;
            let sizes = shapes::read(path, spec)?;
            let samples = sizes.len() as u64;
            let account = SamplesJson { samples, read: samples, refused: 0, first_refused: None };
            return Ok(Samples { sizes, account });
        }
        let settings = set.settings()?;
        let token_counts = tokenizer.token_counts(Some(spec), &settings)?;
        let dataset = split.open(shards, (&settings.store.stores()?, &settings), token_counts)?;
        read_dataset(&dataset, spec)
    }
}

fn read_dataset(dataset: &Dataset, spec: &ModelSpec) -> Result<Samples, Failure> {
    let read = dataset.len().min(SAMPLES_MAX);
    let mut account = SamplesJson { samples: dataset.len(), read, refused: 0, first_refused: None };
    let (mut sizes, mut shape) = (Vec::new(), SampleShape::default());
    for place in places(dataset.len(), read) {
        let row = dataset.index().sample(dataset.sample_number(place));
        row.read_shape(&mut shape);
        let reason = match SampleUnits::new(spec, &shape) {
            Ok(units) if units.tokens > 0 => {
                sizes.push(ItemSize::try_from(units)?);
                continue;
            }
            Ok(_) => "has no tokens".to_owned(),
            Err(error) => error.to_string(),
        };
        account.refused += 1;
        account.first_refused.get_or_insert_with(|| RefusedJson { key: row.key().to_owned(), reason });
    }
    match &account.first_refused {
        Some(RefusedJson { key, reason }) if sizes.is_empty() => Err(Failure::Failed(format!(
            "`{}` takes no sample of the dataset; the first one, `{key}`: {reason}",
            spec.name
        ))),
        None if sizes.is_empty() => Err(Failure::Failed("the dataset has no samples".into())),
        _ => Ok(Samples { sizes, account }),
    }
}

/// Yields `read` places at even distances.
fn places(samples: u64, read: u64) -> impl Iterator<Item = u64> {
    (0..read).map(move |at| (u128::from(at) * u128::from(samples) / u128::from(read)) as u64)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksFile {
    nvlink: LinkFields,
    infiniband: LinkFields,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFields {
    gigabytes_per_second: f64,
    latency_microseconds: f64,
}

/// A line in the CSV form.
#[derive(Debug, Deserialize)]
struct Row {
    link: String,
    gigabytes_per_second: f64,
    latency_microseconds: f64,
}

/// Reads both links; the planner checks the values.
pub(crate) fn read(path: &Path) -> Result<Links, Failure> {
    let text = file::read_named_text(path).map_err(|error| Failure::from(error).in_file(path))?;
    let parsed = if text.trim_start().starts_with('{') { parse_json(&text) } else { parse_csv(&text) };
    parsed.map_err(|message| Failure::Failed(message).in_file(path))
}

fn parse_json(text: &str) -> Result<Links, String> {
    let file: LinksFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(Links { nvlink: file.nvlink.link(), infiniband: file.infiniband.link() })
}

fn parse_csv(text: &str) -> Result<Links, String> {
    const COLUMNS: &str = "link,gigabytes_per_second,latency_microseconds";
    let mut reader = ReaderBuilder::new().trim(Trim::All).from_reader(text.as_bytes());
    if reader.headers().is_ok_and(|header| !header.iter().eq(COLUMNS.split(','))) {
        return Err(format!("expected JSON, or CSV with the header `{COLUMNS}`"));
    }
    let (mut nvlink, mut infiniband) = (None, None);
    for row in reader.deserialize::<Row>() {
        let Row { link, gigabytes_per_second, latency_microseconds } =
            row.map_err(|error| error.to_string())?;
        let place = match link.as_str() {
            "nvlink" => &mut nvlink,
            "infiniband" => &mut infiniband,
            other => return Err(format!("`{other}` is neither `nvlink` nor `infiniband`")),
        };
        if place.replace(LinkFields { gigabytes_per_second, latency_microseconds }.link()).is_some() {
            return Err(format!("`{link}` has two lines"));
        }
    }
    let missing = |name: &str| format!("`{name}` has no line");
    Ok(Links {
        nvlink: nvlink.ok_or_else(|| missing("nvlink"))?,
        infiniband: infiniband.ok_or_else(|| missing("infiniband"))?,
    })
}

impl LinkFields {
    fn link(self) -> Link {
        Link {
            bytes_per_second: self.gigabytes_per_second * 1e9,
            latency_seconds: self.latency_microseconds / 1e6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_all_or_at_even_distances() {
        assert_eq!(places(4, 4).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(places(10, 4).collect::<Vec<_>>(), [0, 2, 5, 7]);
        assert_eq!(places(0, 0).count(), 0);
        assert_eq!(places(u64::MAX, SAMPLES_MAX).last(), Some(18_446_725_626_965_477_905));
    }

    #[test]
    fn json_and_csv_say_the_same() {
        let json = r#"{"nvlink": {"gigabytes_per_second": 300, "latency_microseconds": 3},
            "infiniband": {"gigabytes_per_second": 25, "latency_microseconds": 10}}"#;
        let csv = "link,gigabytes_per_second,latency_microseconds\ninfiniband,25,10\nnvlink, 300,3\n";
        let found = parse_json(json).unwrap();
        assert_eq!(found, parse_csv(csv).unwrap());
        assert!((found.nvlink.bytes_per_second - 3e11).abs() < 1.0);
        assert!((found.infiniband.latency_seconds - 1e-5).abs() < 1e-12);
    }

    #[test]
    fn bad_files_are_named() {
        assert!(parse_json(r#"{"nvlink": 3}"#).is_err());
        let header = "link,gigabytes_per_second,latency_microseconds\n";
        let message = |rows: &str| parse_csv(&format!("{header}{rows}")).unwrap_err();
        assert_eq!(message("nvlink,1,2\n"), "`infiniband` has no line");
        assert_eq!(message("nvlink,1,2\nnvlink,1,2\n"), "`nvlink` has two lines");
        assert!(message("nvlink,1,2\ninfiniband,x,1\n").contains("line: 3"));
        assert_eq!(message("ethernet,1,2\n"), "`ethernet` is neither `nvlink` nor `infiniband`");
        assert!(parse_csv("a,b\n").unwrap_err().starts_with("expected JSON, or CSV"));
    }
}
