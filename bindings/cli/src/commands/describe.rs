//! `dflop describe`: counts a checkpoint's model with transformers, in Python, and writes the description.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Args;

use super::Invocation;
use crate::failure::Failure;
use crate::output::Output;

/// Interpreter that the command line looks for if it does not run in Python itself.
const PYTHON: &str = "python3";
/// Packages that a description needs, as `pip` installs them.
const PACKAGES: &str = "dflop torch transformers";

/// Count a checkpoint's model with transformers, and write a description for `--model`.
///
/// For models that no family of dflop reads: parameters, FLOPs and tokens are counted on the model that
/// transformers builds from `config.json`, without weights and without a network. Runs `python3 -m dflop`,
/// which needs the packages dflop, torch and transformers.
#[derive(Debug, Args)]
pub(crate) struct DescribeArgs {
    /// Checkpoint directory: `config.json`, and the processor files if the model has encoders.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// File to write.
    #[arg(short, long, value_name = "FILE", default_value = "model.json")]
    out: PathBuf,
    /// Run Python code that the checkpoint contains.
    #[arg(long)]
    trust_remote_code: bool,
}

pub(crate) fn run(args: &DescribeArgs, invocation: &Invocation, out: &mut Output) -> Result<(), Failure> {
    let mut python = invocation.python().unwrap_or_else(|| {
        let mut python = Command::new(PYTHON);
        python.args(["-m", "dflop"]);
        python
    });
    check_packages(&python)?;
    python.arg("describe").args(["--out".as_ref(), args.out.as_os_str()]);
    if args.trust_remote_code {
        python.arg("--trust-remote-code");
    }
    // A checkpoint whose name begins with a dash is no option.
    python.arg("--").arg(&args.checkpoint).stdin(Stdio::null()).stderr(Stdio::inherit());
    let done = python.output().map_err(|error| missing(&error.to_string()))?;
    out.write_all(&done.stdout)?;
    if done.status.success() {
        return Ok(());
    }
    Err(Failure::Failed(format!("the description was not written: {} ended with {}", PYTHON, done.status)))
}

/// Checks that the interpreter has the packages, so that a missing one is told from a failed description.
fn check_packages(python: &Command) -> Result<(), Failure> {
    let script = "import dflop._description.checkpoint as c; c.check_packages()";
    let mut check = Command::new(python.get_program());
    let found = check.args(["-c", script]).stdin(Stdio::null()).output();
    let found = found.map_err(|error| missing(&error.to_string()))?;
    if found.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&found.stderr);
    Err(missing(stderr.lines().last().unwrap_or("it fails").trim()))
}

fn missing(problem: &str) -> Failure {
    Failure::Failed(format!(
        "`dflop describe` needs {PYTHON} with the packages {PACKAGES}: pip install {PACKAGES} ({problem})"
    ))
}
