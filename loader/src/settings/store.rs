//! Settings of stores: access to local and remote shards.

use std::ffi::OsString;
use std::path::PathBuf;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::set_text;
use super::spelling::{Names, choices};
use crate::error::{Error, Result};
use crate::shard::ShardAccess;
use crate::store::{ReadMode, ShardCache, Stores};

/// Default size of a cache.
const CACHE_BYTES: u64 = 64 << 30;
/// Settings of stores that belong to a machine, and the environment variables that hold them.
const VARIABLES: [(&str, &str); 5] = [
    ("cache", "DFLOP_CACHE"),
    ("cache_bytes", "DFLOP_CACHE_BYTES"),
    ("requests_max", "DFLOP_REQUESTS_MAX"),
    ("retry_seconds", "DFLOP_RETRY_SECONDS"),
    ("read", "DFLOP_READ"),
];

/// Default device preset.
const DEVICE: &str = "h100";

/// Returns the device that costs are predicted for by default: that of the environment variable
/// `DFLOP_DEVICE`, else the preset `h100`.
#[must_use]
pub fn machine_device() -> String {
    let device = std::env::var("DFLOP_DEVICE").unwrap_or_default();
    if device.is_empty() { DEVICE.to_owned() } else { device }
}

/// Reads the default number of decoder threads from the environment variable `DFLOP_WORKERS`; `None` if it is
/// empty or not set.
///
/// # Errors
/// [`Error::Config`] with the variable for an invalid number.
pub(super) fn machine_workers() -> Result<Option<usize>> {
    workers_from(std::env::var_os("DFLOP_WORKERS"))
}

fn workers_from(value: Option<OsString>) -> Result<Option<usize>> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    match value.to_str().and_then(|text| text.parse::<usize>().ok()) {
        Some(workers) if workers > 0 => Ok(Some(workers)),
        _ => {
            let reason = format!("expected a number of threads, found `{}`", value.display());
            Err(Error::Config { setting: "DFLOP_WORKERS", reason })
        }
    }
}

/// Access to local and remote shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// Directory that keeps whole remote shards for all processes of this machine. Default: shards are not
    /// kept.
    pub cache: Option<PathBuf>,
    /// Maximum size of `cache` in bytes.
    pub cache_bytes: u64,
    /// Maximum number of requests in flight, over all shards.
    pub requests_max: usize,
    /// Seconds for which a store that fails or does not answer is asked again, for each 16 MiB of a read; 0
    /// for never.
    pub retry_seconds: u64,
    /// Read method for local and cached shards: `auto`, system calls unless nobody can write the file system;
    /// `mmap`, memory maps, where a shard that is shortened meanwhile ends the process; `pread`, system
    /// calls.
    pub read: ReadModeName,
    /// Reach of shard names: `pipe` lets names `pipe:COMMAND` run shell commands that print the shard;
    /// `outside` lets shard lists name remote shards and shards outside the directory of the list. Default:
    /// neither.
    #[cfg_attr(feature = "schema", schemars(with = "Names"))]
    pub allow: Allowed,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            cache: None,
            cache_bytes: CACHE_BYTES,
            requests_max: 256,
            retry_seconds: 300,
            read: ReadModeName::default(),
            allow: Allowed::default(),
        }
    }
}

/// Reach of shard names beyond files and stores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Shell commands.
    pub pipe: bool,
    /// Remote shards, and shards outside the directory of a list, as entries of shard lists.
    pub outside: bool,
}

impl<'de> Deserialize<'de> for Allowed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut allowed = Self::default();
        for name in Names::deserialize(deserializer)?.0 {
            match name.as_str() {
                "pipe" => allowed.pipe = true,
                "outside" => allowed.outside = true,
                _ => return Err(D::Error::custom(format!("expected pipe or outside, found `{name}`"))),
            }
        }
        Ok(allowed)
    }
}

impl Serialize for Allowed {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let names = [("pipe", self.pipe), ("outside", self.outside)];
        serializer.collect_seq(names.iter().filter(|(_, is_allowed)| *is_allowed).map(|(name, _)| name))
    }
}

choices! {
    /// Names of [`ReadMode`].
    ReadModeName for ReadMode {
        #[default]
        Auto, "auto" => ReadMode::Auto;
        Mmap, "mmap" => ReadMode::Mmap;
        Pread, "pread" => ReadMode::Pread;
    }
}

impl StoreSettings {
    /// Reads the settings that belong to this machine from the environment variables `DFLOP_CACHE`,
    /// `DFLOP_CACHE_BYTES`, `DFLOP_REQUESTS_MAX`, `DFLOP_RETRY_SECONDS` and `DFLOP_READ`. Variables that are
    /// empty or not set leave the defaults.
    ///
    /// # Errors
    /// [`Error::Config`] with the variable for an invalid value.
    pub fn from_environment() -> Result<Self> {
        Self::from_variables(std::env::var_os)
    }

    fn from_variables(read: impl Fn(&'static str) -> Option<OsString>) -> Result<Self> {
        let mut settings = Self::default();
        for (key, variable) in VARIABLES {
            let Some(value) = read(variable).filter(|value| !value.is_empty()) else { continue };
            let invalid = |reason| Error::Config { setting: variable, reason };
            let text = value.to_str().ok_or_else(|| invalid("expected UTF-8".into()))?;
            set_text(&mut settings, key, text).map_err(|error| match error {
                Error::Config { reason, .. } => invalid(reason),
                other => other,
            })?;
        }
        Ok(settings)
    }

    /// Restores the default of `cache_bytes` if there is no cache, for a size that a variable sets for all
    /// caches of this machine.
    pub fn ignore_size_without_cache(&mut self) {
        if self.cache.is_none() {
            self.cache_bytes = CACHE_BYTES;
        }
    }

    /// Builds the stores that remote shards are read from.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of range, and for the size of a cache that there is not.
    pub fn stores(&self) -> Result<Stores> {
        let mut builder = Stores::builder()
            .requests_max(self.requests_max)
            .retry_seconds(self.retry_seconds)
            .read(self.read.into());
        if let Some(directory) = &self.cache {
            builder = builder.cache(ShardCache { directory: directory.clone(), bytes_max: self.cache_bytes });
        } else if self.cache_bytes != CACHE_BYTES {
            return Err(Error::Config { setting: "cache_bytes", reason: "needs `cache`".into() });
        }
        builder.build()
    }

    /// Returns the locations that shard names may reach through `stores`.
    #[must_use]
    pub fn access(&self, stores: &Stores) -> ShardAccess {
        ShardAccess::new(stores).allow_outside(self.allow.outside).allow_pipe(self.allow.pipe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_set_what_belongs_to_a_machine() {
        let read = |set: &'static [(&str, &str)]| {
            StoreSettings::from_variables(move |variable| {
                set.iter().find(|(name, _)| *name == variable).map(|(_, value)| (*value).into())
            })
        };
        assert_eq!(read(&[("DFLOP_READ", "")]).unwrap(), StoreSettings::default());
        let settings =
            read(&[("DFLOP_CACHE", "/scratch"), ("DFLOP_CACHE_BYTES", "7"), ("DFLOP_READ", "pread")]);
        let settings = settings.unwrap();
        assert_eq!((settings.cache, settings.cache_bytes), (Some("/scratch".into()), 7));
        assert_eq!(settings.read, ReadModeName::Pread);
        let refused = read(&[("DFLOP_RETRY_SECONDS", "soon")]).unwrap_err().to_string();
        assert!(refused.starts_with("invalid `DFLOP_RETRY_SECONDS`: "), "{refused}");
        let mut size = read(&[("DFLOP_CACHE_BYTES", "7")]).unwrap();
        size.ignore_size_without_cache();
        assert!(size.stores().is_ok());
    }

    #[test]
    fn a_variable_sets_the_number_of_threads() {
        assert_eq!(workers_from(None).unwrap(), None);
        assert_eq!(workers_from(Some("".into())).unwrap(), None);
        assert_eq!(workers_from(Some("3".into())).unwrap(), Some(3));
        for invalid in ["0", "-1", "two"] {
            let refused = workers_from(Some(invalid.into())).unwrap_err().to_string();
            assert!(
                refused.starts_with("invalid `DFLOP_WORKERS`: expected a number of threads"),
                "{refused}"
            );
        }
    }

    #[test]
    fn the_size_of_a_cache_needs_a_cache() {
        let size = StoreSettings { cache_bytes: 1, ..StoreSettings::default() };
        assert!(size.stores().unwrap_err().to_string().contains("`cache`"));
    }
}
