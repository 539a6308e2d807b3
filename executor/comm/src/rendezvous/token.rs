//! Shared job secret, rank identity, and the address where ranks meet.

use std::io;
use std::net::IpAddr;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::{Error, Result};

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
