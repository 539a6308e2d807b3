//! Bytes of shards, by URL.

pub(crate) mod local;
pub(crate) mod ranges;

use std::pin::Pin;
use std::process::Stdio;

use bytes::Bytes;
use tokio::io::{AsyncRead, BufReader};

use crate::error::{Error, Result};
use crate::shard::{Shard, ShardSource};

/// Buffer between a pipe and its reader.
const PIPE_BUFFER_BYTES: usize = 256 << 10;

/// Bytes that come once, in order.
pub(crate) type Input = BufReader<Pin<Box<dyn AsyncRead + Send>>>;

/// A shard that can be read.
pub(crate) enum Opened {
    /// All of its bytes, addressable.
    Mapped(Bytes),
    /// A stream; the command behind it, if any, which is asked how it ended.
    Stream(Input, Option<Box<tokio::process::Child>>),
}

/// Opens a shard.
///
/// # Errors
/// [`Error::Read`] if the file cannot be mapped or the command cannot be started.
pub(crate) fn open(shard: &Shard) -> Result<Opened> {
    match &shard.source {
        ShardSource::File(path) => {
            let mapped = local::map_file(path);
            Ok(Opened::Mapped(mapped.map_err(|source| read_error(shard, source))?))
        }
        ShardSource::StandardInput => {
            let input: Pin<Box<dyn AsyncRead + Send>> = Box::pin(tokio::io::stdin());
            Ok(Opened::Stream(BufReader::with_capacity(PIPE_BUFFER_BYTES, input), None))
        }
        ShardSource::Pipe(command) => {
            let mut child = tokio::process::Command::new("sh")
                .args(["-c", command])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .map_err(|source| read_error(shard, source))?;
            let output = child.stdout.take().expect("its output is piped");
            let output: Pin<Box<dyn AsyncRead + Send>> = Box::pin(output);
            Ok(Opened::Stream(BufReader::with_capacity(PIPE_BUFFER_BYTES, output), Some(Box::new(child))))
        }
    }
}

pub(crate) fn read_error(shard: &Shard, source: std::io::Error) -> Error {
    Error::Read { shard: shard.url.to_string(), source }
}
