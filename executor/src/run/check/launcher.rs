//! Checks the launcher's environment and the address where ranks meet.

use super::Findings;
use crate::Result;
use crate::comm::launch::{FoundLauncher, identity_from_environment, launcher_from_environment};
use crate::comm::{RankIdentity, RendezvousConfig, tcp};
use crate::run::compute_device::TransportName;
use crate::run::setup::Setup;
use std::io::{Error, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

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

const SUBJECT: &str = "rendezvous";
/// Maximum wait for an answer from rank 0's machine.
const DIAL: Duration = Duration::from_secs(3);

pub(super) fn check(report: &mut Findings, launch: &Launch) {
    let Some(rendezvous) = &launch.identity.rendezvous else {
        report.skipped(SUBJECT, "dflop chooses port and token of ranks that it starts itself");
        return;
    };
    let ranks = launch.identity.size;
    match &rendezvous.token {
        Some(_) => report.ok("token", "`DFLOP_JOB_TOKEN` is set; it must be the same on all ranks"),
        None => report.wrong(
            "token",
            "`DFLOP_JOB_TOKEN` is not set",
            format!("set it to the same secret on all {ranks} ranks, such as of `openssl rand -hex 32`"),
        ),
    }
    let Some(addresses) = resolve(report, rendezvous) else { return };
    if launch.identity.rank == 0 && !rendezvous.is_hosted_by_launcher {
        check_port(report, rendezvous, &addresses);
    } else {
        check_reachable(report, rendezvous, &addresses);
    }
}

/// Resolves the address of rank 0; `None` if the address is invalid.
fn resolve(report: &mut Findings, rendezvous: &RendezvousConfig) -> Option<Vec<SocketAddr>> {
    const ADVICE: &str = "set `MASTER_ADDR` to the name or address of the machine of rank 0";
    let RendezvousConfig { host, port, .. } = rendezvous;
    let name = host.trim_start_matches('[').trim_end_matches(']');
    match (name, *port).to_socket_addrs().map(Iterator::collect::<Vec<_>>) {
        Ok(addresses) if addresses.iter().any(|address| address.ip().is_unspecified()) => {
            report.wrong(SUBJECT, format!("`{host}` is an unspecified address"), ADVICE);
            None
        }
        Ok(addresses) if !addresses.is_empty() => Some(addresses),
        found => {
            let reason = found.err().map_or_else(String::new, |error| format!(": {error}"));
            report.wrong(SUBJECT, format!("host `{host}` has no address{reason}"), ADVICE);
            None
        }
    }
}

/// Checks on rank 0 that the rendezvous port is free.
fn check_port(report: &mut Findings, rendezvous: &RendezvousConfig, addresses: &[SocketAddr]) {
    let port = rendezvous.port;
    let given = rendezvous.listen.map(|ip| vec![SocketAddr::new(ip, port)]);
    let addresses = given.as_deref().unwrap_or(addresses);
    let mut reason = Error::from(ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(_) => return report.ok(SUBJECT, format!("rank 0 can listen on {address}")),
            Err(error) => reason = error,
        }
    }
    let advice = match reason.kind() {
        ErrorKind::AddrInUse => {
            "end the program that listens there, or choose another port with `DFLOP_PORT`"
        }
        ErrorKind::AddrNotAvailable => {
            "it is no address of this machine: set `MASTER_ADDR` to one of rank 0, or `DFLOP_LISTEN` to this machine's"
        }
        _ => "choose another port with `DFLOP_PORT`",
    };
    report.wrong(SUBJECT, format!("rank 0 cannot listen on {}: {reason}", shown(addresses)), advice);
}

/// Checks that rank 0's machine answers. The machine may refuse the connection, because rank 0 does not wait
/// for other ranks during a check.
fn check_reachable(report: &mut Findings, rendezvous: &RendezvousConfig, addresses: &[SocketAddr]) {
    let mut reason = Error::from(ErrorKind::TimedOut);
    for address in addresses {
        match TcpStream::connect_timeout(address, DIAL) {
            Ok(_) => return report.ok(SUBJECT, format!("{address} accepts connections")),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                return report.ok(SUBJECT, format!("the machine of {address} answers; nobody listens yet"));
            }
            Err(error) => reason = error,
        }
    }
    let finding = format!("no answer of `{}` at {}: {reason}", rendezvous.host, shown(addresses));
    report.wrong(SUBJECT, finding, "open the port between the machines, or correct `MASTER_ADDR`");
}

fn shown(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
