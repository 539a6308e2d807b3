//! Wire format for rendezvous server requests and replies.

use std::io::{self, Read, Write};

/// Maximum key length in bytes.
const KEY_BYTES_MAX: usize = 256;
/// Maximum value length in bytes.
pub(super) const VALUE_BYTES_MAX: usize = 64 << 10;

/// Operation that a client requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Sets a key that has no value.
    Set,
    /// Waits for the value of a key.
    Wait,
    /// Adds one to a counter.
    Count,
    /// Announces that the connection ends in order.
    Leave,
    /// Requests the number of rejected connections, and the reasons.
    Refusals,
    /// Publishes the rank address, and waits for the addresses of all ranks.
    Addresses,
}

/// Request outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyKind {
    /// Success, with the value.
    Value,
    /// The value was not set in time.
    TimedOut,
    /// The key already has a value.
    Taken,
    /// A rank connection ended; the value is the rank number.
    Lost,
}

/// Request with the key, value and time limit that the operation needs.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) ask: RequestKind,
    pub(super) key: String,
    pub(super) value: Vec<u8>,
    pub(super) timeout_ms: u64,
}

impl Request {
    /// Encodes the request.
    ///
    /// # Errors
    /// `InvalidInput` if key or value is too long.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        if self.key.len() > KEY_BYTES_MAX || self.value.len() > VALUE_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "key or value is too long"));
        }
        let mut bytes = vec![self.ask as u8];
        bytes.extend((self.key.len() as u32).to_le_bytes());
        bytes.extend((self.value.len() as u32).to_le_bytes());
        bytes.extend(self.timeout_ms.to_le_bytes());
        bytes.extend(self.key.as_bytes());
        bytes.extend(&self.value);
        Ok(bytes)
    }

    pub(super) fn read(stream: &mut impl Read) -> io::Result<Self> {
        let [ask] = read(stream)?;
        let asks = [
            RequestKind::Set,
            RequestKind::Wait,
            RequestKind::Count,
            RequestKind::Leave,
            RequestKind::Refusals,
            RequestKind::Addresses,
        ];
        let ask = *asks.get(usize::from(ask)).ok_or_else(invalid)?;
        let key_bytes = u32::from_le_bytes(read(stream)?) as usize;
        let value_bytes = u32::from_le_bytes(read(stream)?) as usize;
        let timeout_ms = u64::from_le_bytes(read(stream)?);
        if key_bytes > KEY_BYTES_MAX {
            return Err(invalid());
        }
        let key = String::from_utf8(read_value(stream, key_bytes)?).map_err(|_| invalid())?;
        Ok(Self { ask, key, value: read_value(stream, value_bytes)?, timeout_ms })
    }
}

pub(super) fn write_answer(stream: &mut impl Write, answer: ReplyKind, value: &[u8]) -> io::Result<()> {
    let mut bytes = vec![answer as u8];
    bytes.extend((value.len() as u32).to_le_bytes());
    bytes.extend(value);
    stream.write_all(&bytes)
}

pub(super) fn read_answer(stream: &mut impl Read) -> io::Result<(ReplyKind, Vec<u8>)> {
    let [answer] = read(stream)?;
    let answers = [ReplyKind::Value, ReplyKind::TimedOut, ReplyKind::Taken, ReplyKind::Lost];
    let answer = *answers.get(usize::from(answer)).ok_or_else(invalid)?;
    let value_bytes = u32::from_le_bytes(read(stream)?) as usize;
    Ok((answer, read_value(stream, value_bytes)?))
}

fn read_value(stream: &mut impl Read, bytes: usize) -> io::Result<Vec<u8>> {
    // lengths come from the network: check before allocating
    if bytes > VALUE_BYTES_MAX {
        return Err(invalid());
    }
    let mut value = vec![0; bytes];
    stream.read_exact(&mut value)?;
    Ok(value)
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "invalid request or reply of the rendezvous server")
}
