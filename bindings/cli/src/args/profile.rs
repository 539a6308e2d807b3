//! Arguments for a measured profile that replaces a device preset.

use std::path::{Path, PathBuf};

use clap::Args;
use dflop_costmodel::{CostModel, ModelSpec, Profile, ProfileCheck, ProfileOptions};
use dflop_loader::model::{model_profile, profile_options};

use crate::failure::Failure;

/// Measured profile that replaces a device preset.
#[derive(Debug, Args)]
pub(crate) struct MeasuredProfileArgs {
    /// Measured profile that replaces `--device`: a CSV file, a directory with CSV files, or `h200-torch`,
    /// which comes with dflop.
    #[arg(long, value_name = "DIR_OR_FILE", help_heading = "Profile")]
    profile: Option<PathBuf>,
    /// Tensor-parallel degrees to read from the profile, of encoders and LLM, such as `1,4`.
    #[arg(
        long,
        value_name = "N,N",
        value_delimiter = ',',
        num_args = 1..=2,
        requires = "profile",
        help_heading = "Profile"
    )]
    profile_tp: Option<Vec<u32>>,
    /// Take a profile that does not predict the microbatches held out when it was measured.
    #[arg(long, requires = "profile", help_heading = "Profile")]
    no_profile_check: bool,
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

    /// Builds a cost model from the profile; `None` without a profile. Warnings go to standard error.
    pub(crate) fn cost_model(&self, spec: &ModelSpec) -> Result<Option<CostModel>, Failure> {
        let Some(path) = &self.profile else { return Ok(None) };
        let profile = model_profile(path, spec)?;
        let model = CostModel::from_profile(spec.clone(), &profile, self.options()?)
            .map_err(|error| Failure::from(error).in_file(path))?;
        warn(model.profile_warnings());
        Ok(Some(model))
    }

    /// Reads and checks a model's profile; `None` without a profile.
    pub(crate) fn read(&self, spec: &ModelSpec) -> Result<Option<Profile>, Failure> {
        let read = |path: &Path| checked(model_profile(path, spec)?, path, !self.no_profile_check);
        self.profile.as_deref().map(read).transpose()
    }

    fn options(&self) -> Result<ProfileOptions, Failure> {
        let degrees = self.profile_tp.as_deref();
        if degrees.is_some_and(|degrees| degrees.contains(&0)) {
            return Err(Failure::Misuse("invalid `profile-tp`: must be at least 1".into()));
        }
        // One degree is for both; with two, the encoders come first.
        let degrees = degrees.map(|degrees| [degrees[0], degrees[degrees.len() - 1]]);
        Ok(profile_options(degrees, !self.no_profile_check)?)
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
