//! Rejects flags that have no effect: dataset flags with `--shapes`, and shape flags without it.

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command};

use super::SimulateArgs;
use super::shapes::{OF_DATASET, OF_SHAPES, ShapesArgs};

/// Arguments that both simulations accept.
const SHARED: [&str; 9] =
    ["model", "device", "profile", "global_batch_size", "seed", "steps", "json", "report", "pairs"];

/// Checks that every flag on the command line has an effect.
///
/// # Errors
/// [`ErrorKind::ArgumentConflict`] that names the first flag without effect, and what the flag belongs to.
pub(super) fn check(matches: &ArgMatches) -> Result<(), clap::Error> {
    let has_shapes = matches.contains_id("shapes");
    let of_shapes = ShapesArgs::augment_args(Command::default());
    let of_shapes: Vec<&str> = of_shapes.get_arguments().map(|arg| arg.get_id().as_str()).collect();
    let has_effect = |id: &str| SHARED.contains(&id) || of_shapes.contains(&id) == has_shapes;
    let all = SimulateArgs::augment_args(Command::default());
    let is_given = |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let Some(arg) = all.get_arguments().filter(is_given).find(|arg| !has_effect(arg.get_id().as_str()))
    else {
        return Ok(());
    };
    let flag = arg.get_long().map_or_else(|| arg.get_id().to_string(), |long| format!("--{long}"));
    let reason = if has_shapes { OF_DATASET } else { OF_SHAPES };
    Err(clap::Error::raw(ErrorKind::ArgumentConflict, format!("`{flag}` {reason}")))
}
