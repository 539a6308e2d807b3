//! Connection handshake: caller identity, and proof that both sides know the token.
//!
//! Shared job secret, rank identity, and the address where ranks meet.

use super::refusals::Refusal;
use crate::error::{Error, Result};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

/// Handshake start; the last byte is the protocol version.
const MAGIC: [u8; 4] = *b"DFL\x02";
const HELLO_BYTES: usize = 13;
/// Nonce length and proof length.
const WORD_BYTES: usize = 32;
/// First caller message: identity and nonce.
const INTRODUCTION_BYTES: usize = HELLO_BYTES + WORD_BYTES;
/// Time limit for a complete handshake on the called side.
pub(super) const GREETING: Duration = Duration::from_secs(2);
/// Time limit for a complete handshake on the calling side: a busy listener accepts late.
pub(super) const CALL: Duration = Duration::from_secs(5);

/// Connection purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    RendezvousClient,
    Data,
    Control,
    Inquiry,
}

/// Caller identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

/// Reason why the calling side gave up.
#[derive(Debug)]
pub(crate) enum Rejection {
    /// No answer, or an answer in a different protocol; worth a retry.
    Io(io::Error),
    /// The tokens differ.
    WrongToken,
    /// The called side rejected the caller, with this reason.
    Refused(String),
}

impl From<io::Error> for Rejection {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Hello {
    fn to_bytes(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.purpose as u8;
        bytes[5..9].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes[9..].copy_from_slice(&(self.size as u32).to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; HELLO_BYTES]) -> Option<Self> {
        let [m0, m1, m2, m3, purpose, r0, r1, r2, r3, s0, s1, s2, s3] = bytes;
        let purpose = [Purpose::RendezvousClient, Purpose::Data, Purpose::Control, Purpose::Inquiry]
            .get(usize::from(purpose))
            .copied()?;
        let rank = u32::from_le_bytes([r0, r1, r2, r3]) as usize;
        let size = u32::from_le_bytes([s0, s1, s2, s3]) as usize;
        ([m0, m1, m2, m3] == MAGIC).then_some(Self { purpose, rank, size })
    }
}

/// Runs the calling side until the handshake ends or the time limit is reached. Afterwards the stream has no
/// time limits.
pub(super) fn start_handshake(
    stream: &mut TcpStream,
    hello: Hello,
    token: &JobToken,
    patience: Duration,
) -> Result<(), Rejection> {
    let own = nonce().map_err(|error| Rejection::Io(io::Error::other(error)))?;
    let hello_bytes = hello.to_bytes();
    let mut timed = TimedStream { stream, end: Instant::now() + patience };
    timed.write_all(&[hello_bytes.as_slice(), &own].concat())?;
    let theirs: [u8; WORD_BYTES] = read(&mut timed)?;
    timed.write_all(&token.prove(&[b"call", &hello_bytes, &own, &theirs]))?;
    let [status] = read(&mut timed)?;
    match status {
        0 => {
            let proof: [u8; WORD_BYTES] = read(&mut timed)?;
            if !token.is_proof(&proof, &[b"took", &hello_bytes, &own, &theirs]) {
                return Err(Rejection::WrongToken);
            }
        }
        1 => return Err(Rejection::WrongToken),
        _ => {
            let [length] = read(&mut timed)?;
            let mut reason = vec![0; usize::from(length)];
            timed.read_exact(&mut reason)?;
            return Err(Rejection::Refused(String::from_utf8_lossy(&reason).into_owned()));
        }
    }
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(())
}

/// Stream with a common time limit for all reads and writes.
struct TimedStream<'a> {
    stream: &'a mut TcpStream,
    end: Instant,
}

impl TimedStream<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        // a zero timeout is a system call error
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for TimedStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for TimedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Called side in a handshake. Never blocks: [`advance`](Self::advance) processes the bytes that have
/// arrived.
#[derive(Debug)]
pub(super) struct Greeting<S = TcpStream> {
    pub(super) stream: S,
    /// Caller introduction, then caller proof.
    received: [u8; INTRODUCTION_BYTES + WORD_BYTES],
    received_bytes: usize,
    /// Local nonce, which answers a complete introduction.
    nonce: Option<[u8; WORD_BYTES]>,
}

impl Greeting {
    /// Starts the handshake with a caller.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream))
    }

    /// Accepts a caller that has proved the token, and returns the stream, in blocking mode.
    pub(super) fn accept(mut self, token: &JobToken) -> Result<TcpStream, Refusal> {
        let (hello, theirs) = self.received[..INTRODUCTION_BYTES].split_at(HELLO_BYTES);
        let own = self.nonce.unwrap_or_default();
        let proof = token.prove(&[b"took", hello, theirs, &own]);
        self.send(&[&[0], proof.as_slice()].concat())?;
        self.stream.set_nonblocking(false).map_err(Refusal::Resources)?;
        Ok(self.stream)
    }
}

impl<S: Read + Write> Greeting<S> {
    /// Starts the handshake over a stream that does not block.
    pub(super) fn over(stream: S) -> Self {
        let received = [0; INTRODUCTION_BYTES + WORD_BYTES];
        Self { stream, received, received_bytes: 0, nonce: None }
    }

    /// Returns whether the introduction has arrived completely.
    pub(super) fn has_introduction(&self) -> bool {
        self.nonce.is_some()
    }

    /// Continues as far as bytes have arrived. Returns the identity of a caller that has proved the token;
    /// `None` while more bytes are needed.
    ///
    /// A caller without the token learns only that it is rejected.
    pub(super) fn advance(&mut self, token: &JobToken) -> Result<Option<Hello>, Refusal> {
        loop {
            let end = if self.nonce.is_none() { INTRODUCTION_BYTES } else { self.received.len() };
            if !self.receive(end)? {
                return Ok(None);
            }
            let Some(own) = self.nonce else {
                // a fresh nonce per connection, so that a recorded handshake cannot be replayed
                let own = nonce().map_err(|error| Refusal::Resources(io::Error::other(error)))?;
                self.send(&own)?;
                self.nonce = Some(own);
                continue;
            };
            let (introduction, proof) = self.received.split_at(INTRODUCTION_BYTES);
            let (hello, theirs) = introduction.split_at(HELLO_BYTES);
            let proof: [u8; WORD_BYTES] = proof.try_into().unwrap_or_default();
            // the prefixes differ by direction, so that a proof cannot be reflected to its sender
            if !token.is_proof(&proof, &[b"call", hello, theirs, &own]) {
                self.send(&[1])?;
                return Err(Refusal::Token);
            }
            let hello = hello.try_into().ok().and_then(Hello::from_bytes);
            return match hello {
                Some(hello) => Ok(Some(hello)),
                None => Err(self.refuse("another version of the protocol".to_owned())),
            };
        }
    }

    /// Receives up to a total number of bytes; returns whether they have arrived.
    fn receive(&mut self, end: usize) -> Result<bool, Refusal> {
        while self.received_bytes < end {
            match self.stream.read(&mut self.received[self.received_bytes..end]) {
                Ok(0) => return Err(Refusal::Closed),
                Ok(bytes) => self.received_bytes += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Refusal::Closed),
            }
            // without the version byte: a rank with another version gets a readable rejection
            let known = self.received_bytes.min(MAGIC.len() - 1);
            if self.received[..known] != MAGIC[..known] {
                return Err(Refusal::Foreign);
            }
        }
        Ok(true)
    }

    /// Rejects a caller that has proved the token, with a reason for the user.
    pub(super) fn refuse(&mut self, reason: String) -> Refusal {
        let length = reason.len().min(255);
        let answer = [&[2, length as u8], &reason.as_bytes()[..length]].concat();
        // a caller that hung up does not need the reason
        let _ = self.send(&answer);
        Refusal::Identity(reason)
    }

    /// Sends bytes; the buffer of a new connection always has room for them.
    fn send(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        match self.stream.write(bytes) {
            Ok(written) if written == bytes.len() => Ok(()),
            _ => Err(Refusal::Closed),
        }
    }
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Secret that all job ranks know; it is never sent.
#[derive(Clone, PartialEq, Eq)]
pub struct JobToken(Vec<u8>);

impl std::fmt::Debug for JobToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl JobToken {
    /// Minimum secret length in bytes. An observed handshake allows to try secrets offline.
    pub const BYTES_MIN: usize = 16;

    /// Accepts a user secret, at least [`BYTES_MIN`](Self::BYTES_MIN) long.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if it is shorter.
    pub fn new(secret: &str) -> Result<Self> {
        if secret.len() < Self::BYTES_MIN {
            let reason = format!(
                "expected at least {} bytes, found {}; draw one with `openssl rand -hex 32`",
                Self::BYTES_MIN,
                secret.len()
            );
            return Err(Error::InvalidSetting { setting: "job token", reason });
        }
        Ok(Self(secret.as_bytes().to_vec()))
    }

    /// Draws 256 random bits, as hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot provide random numbers.
    pub fn random() -> Result<Self> {
        let mut digits = String::new();
        for byte in nonce()? {
            for digit in [byte >> 4, byte & 15] {
                digits.extend(char::from_digit(digit.into(), 16));
            }
        }
        Self::new(&digits)
    }

    /// Returns the secret, for a child process environment.
    pub(crate) fn secret(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).unwrap_or_else(|_| unreachable!("any length does"));
        for part in parts {
            mac.update(part);
        }
        mac
    }

    /// Proves knowledge of the token over message parts with fixed lengths.
    pub(super) fn prove(&self, parts: &[&[u8]]) -> [u8; 32] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Checks a proof in constant time.
    pub(super) fn is_proof(&self, proof: &[u8; 32], parts: &[&[u8]]) -> bool {
        self.mac(parts).verify_slice(proof).is_ok()
    }
}

/// Draws 256 random bits.
pub(super) fn nonce() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|source| Error::Io {
        action: "draw random numbers".into(),
        source: io::Error::other(source),
    })?;
    Ok(bytes)
}

/// Rank identity of this process in a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankIdentity {
    /// This rank, below `size`.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Rank among the processes on this machine; selects a device.
    pub local_rank: usize,
    /// Rendezvous for the ranks; `None` in a single-rank job.
    pub rendezvous: Option<RendezvousConfig>,
}

/// Address and secret with which job ranks find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousConfig {
    /// Host name or address of the rank 0 machine.
    pub host: String,
    /// Rendezvous server port on that machine.
    pub port: u16,
    /// Shared job secret.
    pub token: Option<JobToken>,
    /// Whether the launcher hosts the rendezvous server instead of rank 0.
    pub is_hosted_by_launcher: bool,
    /// Address to listen on; by default the address by which this machine reaches the rendezvous server.
    pub listen: Option<IpAddr>,
}

impl RankIdentity {
    /// Returns the identity in a single-process job.
    #[must_use]
    pub fn single() -> Self {
        Self { rank: 0, size: 1, local_rank: 0, rendezvous: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_need_the_same_token_and_parts() {
        let token = JobToken::new("secret of a test").unwrap();
        let proof = token.prove(&[b"a", b"b"]);
        assert!(token.is_proof(&proof, &[b"a", b"b"]));
        assert!(!token.is_proof(&proof, &[b"a", b"c"]));
        assert!(!JobToken::new("Secret of a test").unwrap().is_proof(&proof, &[b"a", b"b"]));
        assert!(!format!("{token:?}").contains("secret"));
        assert_ne!(JobToken::random().unwrap(), JobToken::random().unwrap());
        assert_eq!(JobToken::random().unwrap().secret().len(), 64);
    }

    #[test]
    fn short_secrets_are_refused() {
        for secret in ["", "secret", "fifteen letters"] {
            let error = JobToken::new(secret).unwrap_err().to_string();
            assert!(error.contains(&format!("at least 16 bytes, found {}", secret.len())), "{error}");
        }
    }
}
