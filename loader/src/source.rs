//! Reads shards one after another on a thread of its own, ahead of the decoders.
//!
//! Local shards are walked in place; compressed shards, pipes and standard input are read as streams. Either
//! way the bytes that wait are bounded, and their pages are resident when they leave.

use std::hint::black_box;

use bytes::Bytes;
use tokio::io::AsyncReadExt;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::compression::{Compression, decompress, sniff_compression};
use crate::error::Result;
use crate::field_selection::FieldSelection;
use crate::prefetch::{ByteBudget, ByteLease};
use crate::read::{MappedSamples, ShardItem, StreamedSamples};
use crate::sample::RawSample;
use crate::shard::Shard;
use crate::skip::Skipped;
use crate::store::{Opened, open, read_error};

/// Samples that may wait, however small they are.
const SAMPLES_WAITING: usize = 256;
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
    /// The fields that are read.
    pub(crate) fields: FieldSelection,
    /// Whether every payload byte is read, so that the consumer never waits for a disk.
    pub(crate) is_read_through: bool,
    pub(crate) budget: ByteBudget,
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
        for epoch in 0..self.config.epochs {
            for shard in &self.config.shards {
                if let Err(error) = self.read_shard(shard, epoch)? {
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
                let samples = MappedSamples::new(shard.url.clone(), archive, self.config.field_bytes_max);
                for item in samples.fields(self.config.fields.clone()) {
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

    async fn read_input(
        &self,
        shard: &Shard,
        epoch: u64,
        mut input: crate::store::Input,
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
        let samples = StreamedSamples::new(shard.url.clone(), reader, self.config.field_bytes_max);
        let mut samples = samples.fields(self.config.fields.clone());
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
