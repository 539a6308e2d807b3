//! Reads shards one after another on a thread of its own, ahead of the decoders.
//!
//! Local shards are walked in place; compressed shards, pipes and standard input are read as streams, and so are
//! remote shards, which are requested several at a time. Either way the bytes that wait are bounded, and their pages are resident when they leave.

use std::hint::black_box;
use std::io;

use bytes::Bytes;
use tokio::io::{AsyncBufRead, AsyncReadExt};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::compression::{Compression, decompress, sniff_compression};
use crate::error::{Error, Result};
use crate::prefetch::{ByteBudget, ByteLease};
use crate::read::{MappedSamples, ShardItem, StreamedSamples};
use crate::sample::RawSample;
use crate::shard::Shard;
use crate::skip::Skipped;
use crate::store::{Opened, RemoteShard, ShardBody, ShardsAhead, open, read_error};

/// Samples that may wait, however small they are.
const SAMPLES_WAITING: usize = 256;
/// Buffer between the chunks of a remote shard and its reader.
const BODY_BUFFER_BYTES: usize = 64 << 10;
/// Bytes that tell the compression of a stream.
const SNIFFED_BYTES: usize = 6;

/// What the reader hands on.
#[derive(Debug)]
pub(crate) struct SourceItem {
    pub(crate) item: ShardItem,
    /// Ends when the sample is received.
    _lease: Option<ByteLease>,
}

/// How shards are read.
#[derive(Debug, Clone)]
pub(crate) struct SourceConfig {
    pub(crate) shards: Vec<Shard>,
    pub(crate) epochs: u64,
    pub(crate) field_bytes_max: u64,
    /// Whether every payload byte is read, so that the consumer never waits for a disk.
    pub(crate) is_read_through: bool,
    pub(crate) budget: ByteBudget,
    /// Bytes of remote shards that are requested ahead.
    pub(crate) requested_bytes_max: u64,
}

impl SourceConfig {
    /// Begins to request the remote shards of all epochs.
    fn request_ahead(&self) -> Option<ShardsAhead> {
        let remote = self.shards.iter().filter_map(|shard| shard.remote().cloned());
        let remote: Vec<_> = remote.collect();
        let all = (0..self.epochs).flat_map(move |_| remote.clone());
        ShardsAhead::start(all, self.requested_bytes_max)
    }
}

/// Starts reading; the channel ends after the last sample of the last epoch, or after an error.
pub(crate) fn read_shards(config: SourceConfig) -> mpsc::Receiver<Result<SourceItem>> {
    let (sender, receiver) = mpsc::channel(SAMPLES_WAITING);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let reader = Reader { config, sender, runtime };
        // An error here is that nobody listens any more.
        let _ = reader.run();
    });
    receiver
}

struct Reader {
    config: SourceConfig,
    sender: mpsc::Sender<Result<SourceItem>>,
    runtime: Handle,
}

/// The consumer is gone.
struct Gone;

impl Reader {
    fn run(&self) -> Result<(), Gone> {
        let mut ahead = self.config.request_ahead();
        for epoch in 0..self.config.epochs {
            for shard in &self.config.shards {
                let read = match ahead.as_mut().filter(|_| shard.remote().is_some()) {
                    Some(ahead) => self.read_remote(shard, epoch, ahead)?,
                    None => self.read_shard(shard, epoch)?,
                };
                if let Err(error) = read {
                    return self.sender.blocking_send(Err(error)).map_err(|_| Gone);
                }
            }
        }
        Ok(())
    }

    fn read_shard(&self, shard: &Shard, epoch: u64) -> Result<Result<()>, Gone> {
        let opened = {
            let _runtime = self.runtime.enter();
            open(shard)
        };
        match opened {
            Ok(Opened::Mapped(archive)) => self.read_mapped(shard, epoch, archive),
            Ok(Opened::Stream(input, command)) => {
                self.runtime.block_on(self.read_input(shard, epoch, input, command))
            }
            Err(error) => Ok(Err(error)),
        }
    }

    fn read_mapped(&self, shard: &Shard, epoch: u64, archive: Bytes) -> Result<Result<()>, Gone> {
        match sniff_compression(&shard.url, &archive) {
            Ok(Compression::None) => {
                for item in MappedSamples::new(shard.url.clone(), archive, self.config.field_bytes_max) {
                    self.runtime.block_on(self.deliver(item, epoch))?;
                }
            }
            Ok(compression) => {
                let reader = decompress(compression, &archive[..]);
                self.runtime.block_on(self.read_stream(shard, epoch, reader))?;
            }
            Err(unsupported) => self.runtime.block_on(self.skip_shard(shard, unsupported.to_string()))?,
        }
        Ok(Ok(()))
    }

    fn read_remote(&self, shard: &Shard, epoch: u64, ahead: &mut ShardsAhead) -> Result<Result<()>, Gone> {
        match self.runtime.block_on(self.next_remote(ahead))? {
            Some(Ok(RemoteShard::Mapped(archive))) => self.read_mapped(shard, epoch, archive),
            Some(Ok(RemoteShard::Body(body))) => self.runtime.block_on(self.read_body(shard, epoch, body)),
            Some(Err(source)) => Ok(Err(read_error(shard, source))),
            None => Ok(Err(Error::StageEnded { stage: "store" })),
        }
    }

    /// Waits for the next shard, but not longer than anybody wants it.
    async fn next_remote(&self, ahead: &mut ShardsAhead) -> Result<Option<io::Result<RemoteShard>>, Gone> {
        tokio::select! {
            next = ahead.next() => Ok(next),
            () = self.sender.closed() => Err(Gone),
        }
    }

    /// A body that ends too early ends the stream, behind the samples that came whole.
    async fn read_body(&self, shard: &Shard, epoch: u64, body: ShardBody) -> Result<Result<()>, Gone> {
        let failure = body.failure();
        let input = tokio::io::BufReader::with_capacity(BODY_BUFFER_BYTES, body);
        let read = tokio::select! {
            read = self.read_input(shard, epoch, input, None) => read?,
            () = self.sender.closed() => return Err(Gone),
        };
        let failed = failure.lock().expect("no holder panics").take();
        Ok(failed.map_or(read, |source| Err(read_error(shard, source))))
    }

    async fn read_input(
        &self,
        shard: &Shard,
        epoch: u64,
        mut input: impl AsyncBufRead + Send + Unpin,
        command: Option<Box<tokio::process::Child>>,
    ) -> Result<Result<()>, Gone> {
        let mut first = Vec::with_capacity(SNIFFED_BYTES);
        let sniffed = (&mut input).take(SNIFFED_BYTES as u64).read_to_end(&mut first).await;
        if let Err(source) = sniffed {
            return Ok(Err(read_error(shard, source)));
        }
        match sniff_compression(&shard.url, &first) {
            Ok(compression) => {
                let whole = tokio::io::BufReader::new(std::io::Cursor::new(first).chain(input));
                self.read_stream(shard, epoch, decompress(compression, whole)).await?;
            }
            Err(unsupported) => self.skip_shard(shard, unsupported.to_string()).await?,
        }
        match command {
            Some(command) => self.check_command(shard, command).await,
            None => Ok(Ok(())),
        }
    }

    async fn read_stream<R>(&self, shard: &Shard, epoch: u64, reader: R) -> Result<(), Gone>
    where
        R: tokio::io::AsyncRead + Unpin,
    {
        let mut samples = StreamedSamples::new(shard.url.clone(), reader, self.config.field_bytes_max);
        while let Some(item) = samples.next().await {
            self.deliver(item, epoch).await?;
        }
        Ok(())
    }

    /// A command that fails may have written less than the whole shard.
    async fn check_command(
        &self,
        shard: &Shard,
        mut command: Box<tokio::process::Child>,
    ) -> Result<Result<()>, Gone> {
        match command.wait().await {
            Ok(status) if status.success() => Ok(Ok(())),
            Ok(status) => {
                Ok(Err(read_error(shard, std::io::Error::other(format!("the command ended with {status}")))))
            }
            Err(source) => Ok(Err(read_error(shard, source))),
        }
    }

    async fn skip_shard(&self, shard: &Shard, reason: String) -> Result<(), Gone> {
        let shard = shard.url.to_string();
        let skipped = Skipped { shard, offset: 0, key: None, field: None, reason };
        self.deliver(ShardItem::Skipped(skipped), 0).await
    }

    async fn deliver(&self, mut item: ShardItem, epoch: u64) -> Result<(), Gone> {
        let mut lease = None;
        if let ShardItem::Sample(sample) = &mut item {
            sample.epoch = epoch;
            lease = Some(self.config.budget.lease(sample.bytes()).await.map_err(|_| Gone)?);
            if self.config.is_read_through {
                read_through(sample);
            }
        }
        self.sender.send(Ok(SourceItem { item, _lease: lease })).await.map_err(|_| Gone)
    }
}

/// Reads every payload byte, which brings mapped pages into memory.
fn read_through(sample: &RawSample) {
    for payload in sample.fields.iter().filter_map(|field| field.payload.as_ref()) {
        let (words, rest) = payload.as_chunks::<8>();
        let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
        black_box(rest.iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
    }
}
