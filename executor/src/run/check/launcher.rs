//! Compares the ranks that the job needs with the ranks that the launcher started.

use super::findings::Findings;
use crate::Result;
use crate::comm::launch::{FoundLauncher, identity_from_environment, launcher_from_environment};
use crate::comm::{RankIdentity, tcp};
use crate::run::compute_device::TransportName;
use crate::run::setup::Setup;

/// Maximum number of ranks on several machines for data connections over TCP.
const TCP_RANKS: usize = 64;

/// How this process was started.
pub(super) struct Launch {
    pub(super) identity: RankIdentity,
    pub(super) launcher: Option<FoundLauncher>,
}

impl Launch {
    /// Reads the launcher environment.
    pub(super) fn from_environment() -> Result<Self> {
        let identity = identity_from_environment()?;
        Ok(Self { identity, launcher: launcher_from_environment() })
    }

    /// A process without a launcher.
    pub(super) fn alone() -> Self {
        Self { identity: RankIdentity::single(), launcher: None }
    }

    /// Returns whether this rank is the first on its machine; the first rank checks the machine for all.
    pub(super) fn is_first_of_machine(&self) -> bool {
        self.identity.local_rank == 0
    }

    /// Returns whether `dflop train` starts the ranks itself, on this machine.
    pub(super) fn starts_ranks(&self) -> bool {
        self.identity.rendezvous.is_none()
    }

    /// Returns the ranks on this machine, in a job with this size.
    pub(super) fn ranks_of_machine(&self, world_size: usize) -> std::ops::Range<usize> {
        if self.starts_ranks() {
            return 0..world_size;
        }
        let first = self.identity.rank.saturating_sub(self.identity.local_rank);
        let ranks = self.launcher.and_then(|launcher| launcher.local_size).unwrap_or(1);
        first..(first + ranks).min(world_size)
    }
}

/// Returns the rank of this process, 0 if the environment is wrong.
pub(super) fn rank() -> usize {
    identity_from_environment().map_or(0, |identity| identity.rank)
}

/// Checks that the launcher started as many ranks as the layout has.
pub(super) fn check_ranks(report: &mut Findings, launch: &Launch, setup: &Setup) {
    const SUBJECT: &str = "ranks";
    let (needed, started) = (setup.job.world_size(), launch.identity.size);
    let advice = "change stages, dp and tp in `parallel`";
    if launch.starts_ranks() {
        if let Some(ranks) = setup.options.local_ranks.filter(|ranks| *ranks != needed) {
            let finding = format!("the job has {needed} ranks, `--local-ranks` is {ranks}");
            return report.wrong(SUBJECT, finding, advice);
        }
        let started = launch.launcher.map_or_else(
            || "no launcher".to_owned(),
            |launcher| format!("{} started one process", launcher.name),
        );
        report.ok(SUBJECT, format!("{needed}, which dflop starts on this machine; {started}"));
        return;
    }
    let is_tcp = setup.config.parallel.transport == TransportName::Tcp;
    let name = launch.launcher.map_or("the launcher", |launcher| launcher.name);
    if needed != started {
        let finding = format!("the job has {needed} ranks, {name} started {started}");
        report.wrong(SUBJECT, finding, format!("start {needed} ranks, or {advice}"));
    } else if is_tcp && started > tcp::RANKS_MAX {
        let finding = format!("{started} ranks, the TCP transport serves at most {}", tcp::RANKS_MAX);
        report.wrong(SUBJECT, finding, "start fewer ranks with more threads each (`parallel.threads`), or use NCCL (`parallel.transport`)");
    } else {
        let machine = launch.ranks_of_machine(started);
        report.ok(SUBJECT, format!("{started}, started by {name}; {} on this machine", machine.len()));
        if is_tcp && started > TCP_RANKS {
            let finding = format!("more than {TCP_RANKS}: data over TCP is made for fewer");
            report.note(SUBJECT, finding);
        }
    }
}
