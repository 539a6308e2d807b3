//! Fuzz targets for bytes from a peer after the handshake.

use std::sync::Arc;

use super::inbox::read_messages;
use super::links::{ClosedPort, Links};
use super::wire::Control;
use crate::endpoint::Mailbox;

/// Limit for unreceived bytes; more than any input has.
const BUFFERED_BYTES_MAX: usize = 1 << 20;
/// Number of ranks in the job.
const RANKS: usize = 4;

/// Reads the bytes as messages from rank 1; then the peer hangs up.
pub fn messages(bytes: &[u8]) {
    let mailbox = Arc::new(Mailbox::new(RANKS, BUFFERED_BYTES_MAX));
    let links = Links::new(0, mailbox, (0..RANKS).map(|_| None).collect(), Box::new(ClosedPort));
    // the end of the connection is expected: there is no tree over which its reason could come
    links.close();
    read_messages(&links, 1, bytes);
}

/// Reads the bytes as control messages; a message that was written and read must be written the same again.
/// Texts may be cut when they are written first, as the replacement for invalid UTF-8 is longer.
///
/// # Panics
/// If it does not.
pub fn controls(mut bytes: &[u8]) {
    while let Ok(Some(control)) = Control::read(&mut bytes, RANKS) {
        let written = control.encode();
        let again = Control::read(&mut written.as_slice(), RANKS).ok().flatten();
        assert_eq!(again.map(|again| again.encode()), Some(written));
    }
}
