//! Accepts connections: greets all callers on a listener with one thread, within time and count limits.
//!
//! Callers may be strangers. A handshake has one time limit, and open handshakes are bounded per source
//! address and in total; when there is no room the slowest handshake ends. No caller can block this thread,
//! start threads, or keep other callers from being greeted: a rank that was rejected for lack of room calls
//! again.

use super::crowd::{Caller, machine_address, to_end};
use super::handshake::{GREETING, Greeting, Hello};
use super::refusals::{Refusal, Refusals};
use super::token::JobToken;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

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
pub(crate) fn greet_callers(
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
