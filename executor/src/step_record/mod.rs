//! The record of a run, a file of JSON lines: what the run is, then a line for each step, and how it ended.
//!
//! `dflop train` and the Python package write it, `dflop top` and `dflop report` read it. A resumed run
//! appends another heading; a line that a killed process cut is the last one, and is left out.

mod follow;
mod line;
mod writer;

pub use follow::Follower;
pub use line::{EndLine, Heading, Line, Outcome, StepLine, unix_seconds};
pub use writer::StepRecorder;

use std::io::{self, BufRead, ErrorKind, Read};

/// Name of the record in the directory of a run.
pub const FILE_NAME: &str = "steps.jsonl";
/// Longest line that is read; one of a step has a few hundred bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Reads the next line of a file into `line`, with its end if it is complete; returns its length.
///
/// # Errors
/// [`ErrorKind::InvalidData`] for a line that is too long to be one of a step; of the file.
pub fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<usize> {
    line.clear();
    let bytes = reader.take(LINE_BYTES_MAX).read_until(b'\n', line)?;
    if bytes as u64 == LINE_BYTES_MAX && line.last() != Some(&b'\n') {
        let reason = format!("expected lines of steps, found one of more than {LINE_BYTES_MAX} bytes");
        return Err(io::Error::new(ErrorKind::InvalidData, reason));
    }
    Ok(bytes)
}
