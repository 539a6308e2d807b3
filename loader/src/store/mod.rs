//! Reads shard bytes by URL.
//!
//! Local files are read by range or mapped; pipes are streams; everything else is read through [`Stores`],
//! whose settings determine how requests are retried, how many are in flight, and whether whole shards are
//! cached on a local disk.

mod answer;
mod body;
mod cache;
mod connect;
mod fetch;
#[cfg(feature = "remote")]
mod http;
mod hub;
pub(crate) mod local;
mod object;
mod redact;
mod retry;
mod settings;
mod stores;
mod upload;
mod url;
mod url_parts;

use std::io;
use std::pin::Pin;
use std::process::Stdio;

use tokio::io::{AsyncRead, BufReader};

pub(crate) use self::answer::{Identity, comparable_tag};
pub(crate) use self::body::{RemoteShard, ShardBody, ShardsAhead};
pub(crate) use self::cache::{CacheKey, PartWriter, Room, blocking};
pub(crate) use self::fetch::{download, fetch_ranges};
pub use self::local::ReadMode;
pub(crate) use self::local::{FileBody, LocalShard};
pub use self::object::{Location, RemoteObject};
pub use self::redact::{redact, redact_name};
pub use self::retry::{Backoff, RetryConfig};
pub use self::settings::{ShardCache, ShardStore, StoresBuilder, serve_other_schemes};
pub use self::stores::Stores;
pub use self::url::is_remote;
pub(crate) use self::url_parts::percent_decoded;
pub(crate) use connect::{Task, spawn};
/// Opens local files without waiting for a pipe.
pub use dflop_samples::file;
pub(crate) use fetch::{exists, list_directory};
pub(crate) use hub::{is_hub_name, pinned_revision};
pub(crate) use local::{Patience, lock_patiently};
/// Crate that defines the stores opened by [`ShardStore`].
pub use object_store;

/// Size of the buffer between a pipe and its reader, in bytes.
const PIPE_BUFFER_BYTES: usize = 256 << 10;

/// Bytes that arrive once, in order.
pub(crate) type Input = BufReader<Pin<Box<dyn AsyncRead + Send>>>;

/// Open local shard.
pub(crate) enum Opened {
    /// File, read by range.
    Local(LocalShard),
    /// Stream, with the command that writes it, if any, whose exit status is checked.
    Stream(Input, Option<Box<tokio::process::Child>>),
}

/// Opens the bytes of a shard.
///
/// # Errors
/// If the file cannot be opened, the command cannot be started, or the location is remote: remote shards are
/// read through [`ShardsAhead`] or by range.
pub(crate) fn open(location: &Location, mode: ReadMode) -> io::Result<Opened> {
    match location {
        Location::File(path) => LocalShard::open(path, mode).map(Opened::Local),
        Location::Remote(_) => Err(io::Error::other("a remote shard cannot be opened as a local file")),
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
                .spawn()?;
            let output = child.stdout.take().expect("the output of the command is piped");
            let output: Pin<Box<dyn AsyncRead + Send>> = Box::pin(output);
            Ok(Opened::Stream(BufReader::with_capacity(PIPE_BUFFER_BYTES, output), Some(Box::new(child))))
        }
    }
}
