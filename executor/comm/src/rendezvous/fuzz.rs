//! Fuzz targets for bytes from strangers, and for requests from ranks.

use std::io::{Read, Result, Write};

use super::handshake::{Greeting, JobToken};
use super::protocol::{Request, read_answer, write_answer};

/// Stream with given bytes, which end at some point; discards written bytes.
struct Given<'a>(&'a [u8]);

impl Read for Given<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        // one in three reads returns a single byte, as on a slow line
        let most = if self.0.len().is_multiple_of(3) { 1 } else { bytes.len() };
        self.0.read(&mut bytes[..most])
    }
}

impl Write for Given<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Greets a stranger, who cannot know the token.
///
/// # Panics
/// If the stranger is admitted.
pub fn greeting(bytes: &[u8]) {
    let Ok(token) = JobToken::new("a token that no input has") else { return };
    let mut greeting = Greeting::over(Given(bytes));
    assert!(greeting.advance(&token).is_err(), "a stranger is admitted, or waited for");
}

/// Reads the bytes as requests, and as replies; both must read back the same after they are written.
///
/// # Panics
/// If they do not.
pub fn requests(bytes: &[u8]) {
    let mut asked = bytes;
    while let Ok(request) = Request::read(&mut asked) {
        let written = request.encode().expect("it was read");
        let again = Request::read(&mut written.as_slice()).expect("it was written");
        assert_eq!((again.ask, &again.key, &again.value), (request.ask, &request.key, &request.value));
    }
    let mut answered = bytes;
    while let Ok((answer, value)) = read_answer(&mut answered) {
        let mut written = Vec::new();
        write_answer(&mut written, answer, &value).expect("a vector takes everything");
        assert_eq!(read_answer(&mut written.as_slice()).expect("it was written"), (answer, value));
    }
}
