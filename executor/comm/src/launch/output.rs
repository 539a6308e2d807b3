//! Passes rank output on line by line, with the rank prefix.

use std::io::{BufRead, BufReader, Read, Write};
use std::thread::JoinHandle;

/// Maximum line length in bytes that is kept together; longer lines are split.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Returns the prefix for every line from a rank.
pub(super) fn prefix(rank: usize) -> String {
    format!("[{rank}] ")
}

/// Handling of rank output when the output of this process is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WhenClosed {
    /// Read and discard it: the rank must not stop because nobody reads the output any more.
    Discard,
    /// Close it as well.
    Close,
}

/// Copies lines from a rank to this process until the rank closes the pipe.
///
/// # Errors
/// If the system has no thread for it.
pub(super) fn pass_on(
    prefix: String,
    from: impl Read + Send + 'static,
    when_closed: WhenClosed,
    to: impl Fn() -> Box<dyn Write> + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("rank-output".into()).spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = prefix.into_bytes();
        let prefix_bytes = line.len();
        loop {
            line.truncate(prefix_bytes);
            // bounded: a rank that prints no newline must not fill the launcher's memory
            let read = (&mut from).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
            if !read.is_ok_and(|bytes| bytes > 0) {
                return;
            }
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            let mut to = to();
            let written = to.write_all(&line).and_then(|()| to.flush());
            if written.is_err() && when_closed == WhenClosed::Close {
                return;
            }
        }
    })
}
