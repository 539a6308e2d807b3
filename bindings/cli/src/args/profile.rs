//! Arguments for a measured profile that replaces a device preset.

use std::path::{Path, PathBuf};

use clap::Args;
use dflop_costmodel::{ModelSpec, Profile, ProfileCheck};
use dflop_loader::model::model_profile;
use dflop_loader::settings::Settings;

use crate::failure::Failure;

/// Measured profile that replaces a device preset.
#[derive(Debug, Args)]
pub(crate) struct MeasuredProfileArgs {
    /// Measured profile that replaces `--device`: a CSV file, a directory with CSV files, or `h200-torch`,
    /// which comes with dflop.
    #[arg(long, value_name = "DIR_OR_FILE")]
    profile: Option<PathBuf>,
}

impl MeasuredProfileArgs {
    pub(crate) const fn is_given(&self) -> bool {
        self.profile.is_some()
    }

    /// Profile path.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.profile.as_deref()
    }

    /// Profile path as text for people.
    pub(crate) fn name(&self) -> Option<String> {
        self.profile.as_ref().map(|path| path.display().to_string())
    }

    /// Reads and checks a model's profile; `None` without a profile.
    pub(crate) fn read(&self, spec: &ModelSpec, settings: &Settings) -> Result<Option<Profile>, Failure> {
        let is_checked = settings.cost.profile_check;
        self.path().map(|path| checked(model_profile(path, spec)?, path, is_checked)).transpose()
    }
}

/// Rejects a profile that does not predict the held-out microbatches, if the profile is to be checked.
pub(crate) fn checked(profile: Profile, path: &Path, is_checked: bool) -> Result<Profile, Failure> {
    let check = ProfileCheck::new(&profile).filter(|_| is_checked);
    check
        .map_or(Ok(()), |check| check.require_within())
        .map_err(|error| Failure::from(error).in_file(path))?;
    Ok(profile)
}

/// Prints profile warnings on standard error.
#[expect(clippy::print_stderr, reason = "warnings go to standard error")]
pub(crate) fn warn(warnings: &[dflop_costmodel::ProfileWarning]) {
    for warning in warnings {
        eprintln!("dflop: warning: {warning}");
    }
}
