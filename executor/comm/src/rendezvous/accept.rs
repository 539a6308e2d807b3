//! Accepts connections: greets all callers on a listener with one thread, within time and count limits.
//!
//! Callers may be strangers. A handshake has one time limit, and open handshakes are bounded per source
//! address and in total; when there is no room the slowest handshake ends. No caller can block this thread,
//! start threads, or keep other callers from being greeted: a rank that was rejected for lack of room calls
//! again.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::handshake::{GREETING, Greeting, Hello, JobToken};
use super::refusals::{Refusal, Refusals};

/// Maximum time until the end of the listener is noticed.
const POLL: Duration = Duration::from_millis(10);
/// Pause after a listener error that would occur again immediately.
const PAUSE: Duration = Duration::from_millis(2);
/// Maximum number of connections accepted before open handshakes continue.
const ACCEPTED_MAX: usize = 64;

/// Receiver for accepted connections.
pub(crate) trait Host {
    /// Reserved slot for an admitted caller.
    type Seat;

    /// Returns whether no more callers are expected.
    fn is_done(&self) -> bool;

    /// Maximum time between [`is_done`](Self::is_done) checks while nobody calls.
    fn idle(&self) -> Duration {
        POLL
    }

    /// Checks a caller that has proved the token, and reserves a slot.
    fn admit(&mut self, hello: &Hello) -> Result<Self::Seat, Refusal>;

    /// Accepts the connection of an admitted caller.
    fn seat(&mut self, seat: Self::Seat, hello: Hello, stream: TcpStream);

    /// Frees the slot of an admitted caller that is gone; the caller may call again.
    fn free(&mut self, seat: Self::Seat, hello: &Hello);
}

struct OpenGreeting {
    greeting: Greeting,
    caller: SocketAddr,
    source: IpAddr,
    begin: Instant,
}

/// Greets callers on a listener until the host is done.
///
/// # Errors
/// Errors from the listener, before it accepts any caller.
pub(crate) fn accept_callers(
    listener: &TcpListener,
    token: &JobToken,
    refusals: &Refusals,
    host: &mut impl Host,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // oldest first
    let mut open: Vec<OpenGreeting> = Vec::new();
    while !host.is_done() {
        wait_for_bytes(listener, &open, if open.is_empty() { host.idle() } else { POLL });
        open = advance_all(open, token, refusals, host);
        accept_some(listener, &mut open, refusals);
    }
    Ok(())
}

/// Waits until something may have arrived.
fn wait_for_bytes(listener: &TcpListener, open: &[OpenGreeting], limit: Duration) {
    let mut sockets = vec![PollFd::new(listener, PollFlags::IN)];
    sockets.extend(open.iter().map(|open| PollFd::new(&open.greeting.stream, PollFlags::IN)));
    let timeout = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
    // a signal ends the wait early, which is harmless; other errors must not cause a busy loop
    if poll(&mut sockets, Some(&timeout)).is_err() {
        std::thread::sleep(PAUSE);
    }
}

/// Continues all handshakes, and returns the handshakes that remain open.
fn advance_all(
    open: Vec<OpenGreeting>,
    token: &JobToken,
    refusals: &Refusals,
    host: &mut impl Host,
) -> Vec<OpenGreeting> {
    let mut remaining = Vec::with_capacity(open.len());
    for mut one in open {
        let caller = one.caller;
        let done = match one.greeting.advance(token) {
            Ok(None) if one.begin.elapsed() < GREETING => {
                remaining.push(one);
                continue;
            }
            Ok(None) => Err(Refusal::Slow),
            Ok(Some(hello)) => welcome(one.greeting, hello, token, host),
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = done {
            refusals.note(caller, &refusal);
        }
    }
    remaining
}

/// Admits a caller that has proved the token.
fn welcome(
    mut greeting: Greeting,
    hello: Hello,
    token: &JobToken,
    host: &mut impl Host,
) -> Result<(), Refusal> {
    // reserved before the caller is accepted: without a thread, the caller has to call again
    let seat = host.admit(&hello).map_err(|refusal| match refusal {
        Refusal::Identity(reason) => greeting.refuse(reason),
        refusal => refusal,
    })?;
    match greeting.accept(token) {
        Ok(stream) => host.seat(seat, hello, stream),
        Err(refusal) => {
            host.free(seat, &hello);
            return Err(refusal);
        }
    }
    Ok(())
}

/// Accepts a bounded number of waiting connections; without room the slowest handshakes end.
fn accept_some(listener: &TcpListener, open: &mut Vec<OpenGreeting>, refusals: &Refusals) {
    for _ in 0..ACCEPTED_MAX {
        let (stream, caller) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if is_exhausted(&error) && !open.is_empty() => {
                let oldest = open.remove(0);
                refusals.note(oldest.caller, &Refusal::Resources(error));
                continue;
            }
            // for example, the caller hung up before: not a listener failure
            Err(error) => {
                tracing::debug!(%error, "a connection could not be accepted");
                std::thread::sleep(PAUSE);
                return;
            }
        };
        let source = machine_address(caller.ip());
        let callers: Vec<Caller> = open.iter().map(OpenGreeting::as_caller).collect();
        if let Some(slowest) = to_end(&callers, source) {
            refusals.note(open.remove(slowest).caller, &Refusal::Crowded);
        }
        match Greeting::new(stream) {
            Ok(greeting) => open.push(OpenGreeting { greeting, caller, source, begin: Instant::now() }),
            Err(_) => refusals.note(caller, &Refusal::Closed),
        }
    }
}

/// Returns whether a process or the system has no room for another connection.
fn is_exhausted(error: &io::Error) -> bool {
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|error| exhausted.contains(&error))
}

impl OpenGreeting {
    fn as_caller(&self) -> Caller {
        Caller { source: self.source, has_introduction: self.greeting.has_introduction() }
    }
}

/// Maximum number of open handshakes per listener.
pub(super) const GREETINGS_MAX: usize = 256;
/// Maximum number of open handshakes per listener and source.
pub(super) const SOURCE_GREETINGS_MAX: usize = 128;

/// Open handshake properties that determine the precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Caller {
    /// [`machine_address`] for the caller address.
    pub(super) source: IpAddr,
    /// Whether the first message has arrived completely.
    pub(super) has_introduction: bool,
}

/// Returns the address under which callers from the same machine are counted: an IPv6 address without the
/// last 64 bits, which a machine may choose freely.
pub(super) fn machine_address(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// Returns the position of the handshake to end before the handshake with a new caller begins; `None` if
/// there is room.
///
/// - `callers`: open handshakes, oldest first
///
/// A source at its limit loses one of its own handshakes; at the listener limit, the source with the most
/// handshakes loses one. The slowest caller from that source is the oldest caller that waits for the same
/// message as the majority: neither a crowd that sends nothing nor a crowd that stops halfway displaces a
/// caller that proceeds.
pub(super) fn to_end(callers: &[Caller], newcomer: IpAddr) -> Option<usize> {
    let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for caller in callers {
        *counts.entry(caller.source).or_default() += 1;
    }
    let source = if counts.get(&newcomer).is_some_and(|&count| count >= SOURCE_GREETINGS_MAX) {
        newcomer
    } else if callers.len() >= GREETINGS_MAX {
        counts.into_iter().max_by_key(|&(_, count)| count)?.0
    } else {
        return None;
    };
    let of_source = || callers.iter().filter(|caller| caller.source == source);
    let introduced = of_source().filter(|caller| caller.has_introduction).count();
    let slowest = Caller { source, has_introduction: 2 * introduced > of_source().count() };
    callers.iter().position(|caller| *caller == slowest)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const SILENT: bool = false;
    const INTRODUCED: bool = true;

    fn caller(machine: u8, has_introduction: bool) -> Caller {
        Caller { source: address(machine), has_introduction }
    }

    fn address(machine: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, machine).into()
    }

    #[test]
    fn a_source_at_its_bound_gives_way_to_itself() {
        let mut callers = vec![caller(2, SILENT)];
        callers.extend([caller(1, SILENT); SOURCE_GREETINGS_MAX - 1]);
        assert_eq!(to_end(&callers, address(1)), None);
        callers.push(caller(1, SILENT));
        assert_eq!(to_end(&callers, address(1)), Some(1), "the oldest of the source");
        assert_eq!(to_end(&callers, address(2)), None);
    }

    #[test]
    fn at_the_bound_of_the_listener_the_largest_source_gives_way() {
        let mut callers = vec![caller(9, SILENT)];
        callers.extend([caller(1, SILENT); 100]);
        callers.extend([caller(2, SILENT); 101]);
        callers.extend((0..54).map(|machine| caller(100 + machine, SILENT)));
        assert_eq!(callers.len(), GREETINGS_MAX);
        assert_eq!(to_end(&callers, address(9)), Some(101), "the oldest caller of machine 2");
    }

    #[test]
    fn callers_that_proceed_stay() {
        let mut silent = vec![caller(1, INTRODUCED)];
        silent.extend([caller(1, SILENT); SOURCE_GREETINGS_MAX]);
        assert_eq!(to_end(&silent, address(1)), Some(1));
        let mut halfway = vec![caller(1, SILENT)];
        halfway.extend([caller(1, INTRODUCED); SOURCE_GREETINGS_MAX]);
        assert_eq!(to_end(&halfway, address(1)), Some(1));
    }

    #[test]
    fn a_network_of_ipv6_is_one_source() {
        let source = |text: &str| machine_address(text.parse().unwrap());
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), address(1));
        assert_ne!(source("10.0.0.2"), address(1));
    }
}
