//! Bytes of shards, by URL.
//!
//! Local files are mapped; pipes are streams; everything with a URL is reached through [`Stores`], whose settings say
//! how requests are tried again, how many are in flight, and whether whole shards are kept on a local disk.

mod location;
mod body;
mod cache;
mod coalesce;
mod connect;
mod fault;
mod fetch;
#[cfg(feature = "remote")]
mod http;
mod list;
pub(crate) mod local;
mod object;
mod observed;
mod retry;
mod settings;
mod stores;
mod tasks;
mod upload;
mod url;

use std::pin::Pin;
use std::process::Stdio;

use bytes::Bytes;
use tokio::io::{AsyncRead, BufReader};

pub(crate) use self::body::{RemoteShard, ShardBody, ShardsAhead};
pub(crate) use self::list::{exists, list_directory};
pub(crate) use self::object::Identity;
pub use self::object::RemoteObject;
pub use self::retry::{Backoff, RetryConfig};
pub use self::settings::{ShardCache, StoresBuilder};
pub use self::stores::Stores;
pub(crate) use self::tasks::{Task, spawn};
pub(crate) use self::url::{is_remote, without_query};

use crate::error::{Error, Result};
use crate::shard::Shard;
use self::location::Location;
/// Buffer between a pipe and its reader.
const PIPE_BUFFER_BYTES: usize = 256 << 10;

/// Bytes that come once, in order.
pub(crate) type Input = BufReader<Pin<Box<dyn AsyncRead + Send>>>;

/// A shard of this machine that can be read.
pub(crate) enum Opened {
    /// All of its bytes, addressable.
    Mapped(Bytes),
    /// A stream; the command behind it, if any, which is asked how it ended.
    Stream(Input, Option<Box<tokio::process::Child>>),
}

/// Opens a shard.
///
/// # Errors
/// [`Error::Read`] if the file cannot be mapped or the command cannot be started, or if the shard is remote: those are
/// read through [`ShardsAhead`] or [`ranges`].
pub(crate) fn open(shard: &Shard) -> Result<Opened> {
    match &shard.source {
        Location::File(path) => {
            let mapped = local::map_file(path);
            Ok(Opened::Mapped(mapped.map_err(|source| read_error(shard, source))?))
        }
        Location::Remote(_) => {
            Err(read_error(shard, std::io::Error::other("a remote shard is no file of this machine")))
        }
        Location::StandardInput => {
            let input: Pin<Box<dyn AsyncRead + Send>> = Box::pin(tokio::io::stdin());
            Ok(Opened::Stream(BufReader::with_capacity(PIPE_BUFFER_BYTES, input), None))
        }
        Location::Pipe(command) => {
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
pub(crate) use self::cache::{CacheKey, blocking};
pub(crate) use self::cache::Room;
pub(crate) use self::fetch::fetch_ranges;
pub use self::location::Location;
