//! Handshake of every connection: identity of the caller, and proof that both sides know the token.

use super::token::{JobToken, nonce};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Start of a handshake; the last byte is the version of the protocol.
const MAGIC: [u8; 4] = *b"DFL\x01";
const HELLO_BYTES: usize = 13;
/// Time limit for each message of the handshake.
const PATIENCE: Duration = Duration::from_secs(5);

/// Use of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum Purpose {
    RendezvousClient,
    Data,
    Control,
}

/// Identity of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) struct Hello {
    pub(in crate::comm) purpose: Purpose,
    pub(in crate::comm) rank: usize,
    pub(in crate::comm) size: usize,
}

/// Reason why the calling side gave up.
#[derive(Debug)]
pub(in crate::comm) enum Rejection {
    /// No answer, or an answer of another protocol; worth a retry.
    Io(io::Error),
    /// The tokens differ.
    WrongToken,
    /// The other side refused, with this reason.
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
        let purpose = [Purpose::RendezvousClient, Purpose::Data, Purpose::Control]
            .get(usize::from(purpose))
            .copied()?;
        let rank = u32::from_le_bytes([r0, r1, r2, r3]) as usize;
        let size = u32::from_le_bytes([s0, s1, s2, s3]) as usize;
        ([m0, m1, m2, m3] == MAGIC).then_some(Self { purpose, rank, size })
    }
}

/// Runs the calling side. Afterwards the stream has no time limits.
pub(super) fn start_handshake(
    stream: &mut TcpStream,
    hello: Hello,
    token: &JobToken,
) -> Result<(), Rejection> {
    set_patience(stream, Some(PATIENCE))?;
    let own = nonce().map_err(|error| Rejection::Io(io::Error::other(error)))?;
    let hello_bytes = hello.to_bytes();
    stream.write_all(&[hello_bytes.as_slice(), &own].concat())?;
    let theirs: [u8; 32] = read(stream)?;
    stream.write_all(&token.prove(&[b"call", &hello_bytes, &own, &theirs]))?;
    let [status] = read(stream)?;
    match status {
        0 => {
            let proof: [u8; 32] = read(stream)?;
            if !token.is_proof(&proof, &[b"took", &hello_bytes, &own, &theirs]) {
                return Err(Rejection::WrongToken);
            }
        }
        1 => return Err(Rejection::WrongToken),
        _ => {
            let [length] = read(stream)?;
            let mut reason = vec![0; usize::from(length)];
            stream.read_exact(&mut reason)?;
            return Err(Rejection::Refused(String::from_utf8_lossy(&reason).into_owned()));
        }
    }
    set_patience(stream, None)?;
    Ok(())
}

/// Runs the called side. A caller without the token learns only that it is refused, and is logged.
///
/// `admit` checks the identity after the token is proved.
pub(in crate::comm) fn accept_handshake(
    stream: &mut TcpStream,
    token: &JobToken,
    admit: impl FnOnce(&Hello) -> Result<(), String>,
) -> io::Result<Option<Hello>> {
    set_patience(stream, Some(PATIENCE))?;
    let hello_bytes: [u8; HELLO_BYTES] = read(stream)?;
    // without the version byte: a rank of another version gets a readable refusal below
    if hello_bytes[..3] != MAGIC[..3] {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not the protocol of this job"));
    }
    let theirs: [u8; 32] = read(stream)?;
    // a fresh nonce per connection, so that a recorded handshake cannot be replayed
    let own = nonce().map_err(io::Error::other)?;
    stream.write_all(&own)?;
    let proof: [u8; 32] = read(stream)?;
    let peer = stream.peer_addr()?;
    // the prefixes differ by direction, so that a proof cannot be reflected to its author
    if !token.is_proof(&proof, &[b"call", &hello_bytes, &theirs, &own]) {
        tracing::warn!(%peer, "refused a connection with a wrong job token");
        stream.write_all(&[1])?;
        return Ok(None);
    }
    let admitted = match Hello::from_bytes(hello_bytes) {
        Some(hello) => admit(&hello).map(|()| hello),
        None => Err("another version of the protocol".to_owned()),
    };
    match admitted {
        Ok(hello) => {
            let proof = token.prove(&[b"took", &hello_bytes, &theirs, &own]);
            stream.write_all(&[&[0], proof.as_slice()].concat())?;
            set_patience(stream, None)?;
            Ok(Some(hello))
        }
        Err(reason) => {
            tracing::warn!(%peer, reason, "refused a rank");
            let length = reason.len().min(255);
            stream.write_all(&[&[2, length as u8], &reason.as_bytes()[..length]].concat())?;
            Ok(None)
        }
    }
}

fn set_patience(stream: &TcpStream, patience: Option<Duration>) -> io::Result<()> {
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)
}

fn read<const N: usize>(stream: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
