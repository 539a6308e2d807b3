//! Options for one start of a run, in addition to the configuration, and the run's end.
//!
//! A plan that `dflop plan --json` printed replaces the run's layout.

use super::config::{ModuleTable, PlacementName, RunConfig};
use crate::comm::launch::{StopSignals, has_launcher};
use crate::inputs::Settings;
use crate::train::StopReason;
use crate::{Error, Result};
use dflop_loader::store::file;
use serde::Deserialize;
use std::convert::Infallible;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// Options for one start of a run: start, end and records.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Step to end before, if not the configuration's last step.
    pub until: Option<u64>,
    /// Resume from the last complete state in the checkpoint directory; start from step 0 if there is none.
    pub resume: bool,
    /// Corrections that plans use. Default: none.
    pub corrections: Option<CorrectionSource>,
    /// File that rank 0 records steps in. Default: `steps.jsonl` in the checkpoint directory.
    pub record: Option<PathBuf>,
    /// File for the timeline with every action, measured and predicted, in the `chrome://tracing` format.
    pub trace: Option<PathBuf>,
    /// Number of ranks that the caller expects on this machine; a run with a different number is rejected.
    pub local_ranks: Option<usize>,
    /// Program for rank processes. Default: ranks are threads in this process.
    ///
    /// Under a launcher (`torchrun`, Slurm, Open MPI) this process is one rank in either case.
    pub processes: Option<RankProgram>,
    /// Requests to end the run after the current step.
    pub stop: StopRequests,
}

/// Outcome of a run.
#[derive(Debug, Clone, Default)]
pub struct RunEnd {
    /// Reason for an end before the last step, if there was one.
    pub stopped: Option<StopReason>,
    /// Number of steps taken, including steps before a restored state; 0 if the ranks were processes that
    /// this one started.
    pub steps: u64,
    /// Directory with the last saved state.
    pub checkpoint: Option<PathBuf>,
    /// Whether rank 0 ran in this process, so that steps were reported here.
    pub has_first_rank: bool,
}

/// Source for the cost model corrections that plans use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CorrectionSource {
    /// Corrections that the run learns from measured times.
    Measured,
    /// Corrections that a previous run recorded in this file.
    Record(PathBuf),
}

impl FromStr for CorrectionSource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(if text == "measured" { Self::Measured } else { Self::Record(text.into()) })
    }
}

/// Program that starts a run with the same configuration and options in another process.
#[derive(Debug, Clone)]
pub struct RankProgram {
    /// Executable file.
    pub path: PathBuf,
    /// Arguments.
    pub args: Vec<OsString>,
}

/// Requests to end a run early. The run ends after the current step and saves the state.
#[derive(Clone, Default)]
pub enum StopRequests {
    /// The run ends after the last step.
    #[default]
    None,
    /// `SIGINT` and `SIGTERM` stop the run; a second signal ends the process at once.
    Signals,
    /// The function is called after every step on each rank in this process.
    Check(StopRequest),
}

/// Returns why a run should stop, if it should.
pub type StopRequest = Arc<dyn Fn() -> Option<StopReason> + Send + Sync>;

impl std::fmt::Debug for StopRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Signals => "Signals",
            Self::Check(_) => "Check",
        })
    }
}

impl StopRequests {
    /// Returns the check of a rank; registers for signals, which are received until it is dropped.
    pub(super) fn listen(&self) -> Result<StopRequest> {
        match self {
            Self::None => Ok(Arc::new(|| None)),
            Self::Check(check) => Ok(Arc::clone(check)),
            Self::Signals => {
                let signals = StopSignals::register()?;
                // A launcher kills a rank that does not end; without one, a second signal has to.
                let signals =
                    if has_launcher() { signals } else { StopSignals::second_ends_process(signals)? };
                Ok(Arc::new(move || StopReason::from_signal(signals.received()?.as_raw())))
            }
        }
    }
}

impl RunOptions {
    /// Adds the options that all ranks must share, under the command line's names.
    pub(super) fn add_agreed(&self, settings: &mut Settings) {
        if let Some(until) = self.until {
            settings.insert("--steps".to_owned(), until.to_string());
        }
        if self.corrections == Some(CorrectionSource::Measured) {
            settings.insert("--corrections".to_owned(), "measured".to_owned());
        }
        settings.insert("--resume".to_owned(), self.resume.to_string());
    }
}

/// Plan fields that describe a run; all other fields are left out.
#[derive(Debug, Clone, Deserialize)]
pub struct PlanFile {
    /// Model that the plan was made for; missing in a plan from elsewhere.
    #[serde(default)]
    pub model: Option<String>,
    /// Modules, the LLM last.
    pub modules: Vec<PlannedModule>,
    /// Number of microbatches per LLM DP rank.
    pub microbatches: usize,
    /// Encoder placement relative to the LLM.
    pub placement: PlacementName,
    /// Schedule name, rounds ahead included.
    pub schedule: String,
    /// Number of rounds that the encoders run ahead of 1F1B.
    #[serde(default)]
    pub rounds_ahead: u16,
    /// Whether the executor runs the plan.
    pub is_run: bool,
}

/// Module in a plan file.
#[derive(Debug, Clone, Deserialize)]
pub struct PlannedModule {
    /// `vision`, `audio` or `llm`; `encoder` for a model's only encoder.
    pub name: String,
    /// TP degree.
    pub tp: usize,
    /// DP degree.
    pub dp: usize,
    /// DP ranks that divide the experts among themselves; missing for 1.
    #[serde(default)]
    pub ep: Option<usize>,
    /// Number of layers in each stage.
    pub layers: Vec<usize>,
    /// Whether the backward pass recomputes the layers.
    pub recompute: bool,
}

impl RunConfig {
    /// Replaces layout, schedule and number of microbatches by values from a plan that `dflop plan --json`
    /// printed.
    ///
    /// # Errors
    /// [`Error::Named`] if the file cannot be read or is no plan; [`Error::Config`] if the executor does not
    /// run the plan.
    pub fn read_plan(&mut self, path: &Path) -> Result<()> {
        PlanFile::read(path)?.apply(self)
    }
}

impl PlanFile {
    /// Reads a plan.
    ///
    /// # Errors
    /// [`Error::Named`] if the file cannot be read or is no plan.
    pub fn read(path: &Path) -> Result<Self> {
        let text = file::read_named_text(path).map_err(|error| Error::from(error).in_file(path))?;
        serde_json::from_str(&text).map_err(|error| {
            Error::Config(format!("is no plan of `dflop plan --json`: {error}")).in_file(path)
        })
    }

    /// Replaces the configuration's layout, schedule and number of microbatches by the plan's.
    ///
    /// # Errors
    /// [`Error::Config`] if the executor does not run the plan.
    fn apply(self, config: &mut RunConfig) -> Result<()> {
        let refuse = |reason: &str| Err(Error::Config(format!("`--plan`: {reason}")));
        if let Some(ep) = self.modules.iter().find_map(|module| module.ep).filter(|ep| *ep > 1) {
            return refuse(&format!(
                "the plan divides experts over {ep} ranks, which is planned and simulated only; plan with `--ep 1`"
            ));
        }
        if !self.is_run {
            return refuse(
                "the plan recomputes some layers of a module, which is planned and simulated only",
            );
        }
        let parallel = &mut config.parallel;
        for module in self.modules {
            let table = ModuleTable {
                stages: module.layers.len(),
                layers: Some(module.layers),
                dp: module.dp,
                tp: module.tp,
                recompute: Some(u32::from(module.recompute)),
            };
            match module.name.as_str() {
                "llm" => parallel.llm = table,
                "vision" => parallel.vision = table,
                "audio" => parallel.audio = table,
                // The model has one of them.
                "encoder" => (parallel.vision, parallel.audio) = (table.clone(), table),
                other => return refuse(&format!("the executor has no module `{other}`")),
            }
        }
        (parallel.placement, parallel.schedule) = (self.placement, self.schedule);
        parallel.microbatches = self.microbatches;
        Ok(())
    }
}
