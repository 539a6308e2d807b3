//! Checks the address, the port and the token by which the job's ranks find each other.

use std::io::{Error, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::findings::Findings;
use super::launcher::Launch;
use crate::comm::RendezvousConfig;

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
