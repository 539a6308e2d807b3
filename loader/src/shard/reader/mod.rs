//! Reads shards sequentially on a separate thread, ahead of the decoders.
//!
//! Delivers items to the consumer, bounding waiting samples and bytes.
//!
//! Reads shards as streams: compressed shards, pipes, standard input, and remote shard bodies.
//!
//! Local shards are walked in place; compressed shards, pipes and standard input are read as streams, and so
//! are remote shards, several of which are requested in parallel. In every case the waiting bytes are
//! bounded, and their pages are resident when they are delivered.

mod table;

use super::LocalArchive;
use super::compression::{Compression, decompress, sniff_compression};
use super::field_selection::FieldSelection;
use super::list::Shard;
use super::order::{HEADER_BYTES, ItemPosition, KnownShards, ShardIdentity, ShardPass, ShardPasses};
use super::samples::{FIELD_BYTES_MAX, MappedSamples, RangedSamples, ShardItem, StreamedSamples};
use super::table::{OpenTable, is_table_name};
use crate::error::{Error, Result, Skipped};
use crate::flow::{ByteBudget, ByteLease, LoaderStage, Metrics};
use crate::store::{LocalShard, Opened, RemoteShard, ShardBody, ShardsAhead};
use futures::StreamExt;
use futures::stream::BoxStream;
use std::cell::Cell;
use std::hint::black_box;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufRead, AsyncReadExt};
use tokio::process::Child;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// Maximum number of waiting samples, regardless of size.
const SAMPLES_WAITING: usize = 256;

/// Item delivered by the reader.
#[derive(Debug)]
pub(crate) struct ReaderItem {
    pub(crate) item: ShardItem,
    pub(crate) place: ItemPosition,
    /// Reader budget share that the sample holds.
    pub(crate) lease: Option<ByteLease>,
}

/// Reader settings.
#[derive(Debug, Clone)]
pub(crate) struct ReaderSettings {
    pub(crate) shards: Vec<Shard>,
    pub(crate) passes: ShardPasses,
    pub(crate) known: KnownShards,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) field_bytes_max: u64,
    /// Fields to read.
    pub(crate) fields: FieldSelection,
    /// Whether every byte of mapped payloads is read, so that the consumer never waits for a disk.
    pub(crate) is_read_through: bool,
    pub(crate) budget: ByteBudget,
    /// Maximum number of remote shard bytes requested ahead.
    pub(crate) requested_bytes_max: u64,
}

impl ReaderSettings {
    /// Starts to request the remote shards for all passes.
    fn request_ahead(&self) -> Option<ShardsAhead> {
        if !self.shards.iter().any(is_requested) {
            return None;
        }
        let counted = |shard: &Shard| Some(shard.remote()?.clone().counted_by(self.metrics.retries()));
        let remote = self.shards.iter().map(|shard| counted(shard).filter(|_| is_requested(shard)));
        let remote: Vec<_> = remote.collect();
        let passes = self.passes.clone().into_shards(&self.shards);
        ShardsAhead::start(passes.filter_map(move |shard| remote[shard].clone()), self.requested_bytes_max)
    }
}

/// Returns whether a shard is requested as a whole, ahead of time: remote, and not a table.
fn is_requested(shard: &Shard) -> bool {
    shard.remote().is_some() && !is_table_name(&shard.url)
}

/// Starts reading; the channel ends after the last sample of the last epoch, or after an error.
pub(crate) fn read_shards(config: ReaderSettings) -> mpsc::Receiver<Result<ReaderItem>> {
    let (sender, receiver) = mpsc::channel(SAMPLES_WAITING);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let to_end = sender.clone();
        let reader = Reader { config, sender, runtime, since: Cell::new(None) };
        // `run` only fails if the receiver was dropped. A panic must not look like the end of the shards.
        if catch_unwind(AssertUnwindSafe(move || reader.run())).is_err() {
            let _ = to_end.blocking_send(Err(Error::StageEnded { stage: "read" }));
        }
    });
    receiver
}

struct Reader {
    config: ReaderSettings,
    sender: mpsc::Sender<Result<ReaderItem>>,
    runtime: Handle,
    /// Time at which the reader last resumed work; `None` while it waits for room.
    since: Cell<Option<Instant>>,
}

/// The receiver was dropped.
struct ReceiverDropped;

impl Reader {
    fn run(&self) -> Result<(), ReceiverDropped> {
        let meter = self.config.metrics.stage(LoaderStage::Read);
        let mut ahead = self.config.request_ahead();
        for pass in self.config.passes.over(&self.config.shards) {
            let shard = &self.config.shards[pass.shard];
            let read = match (shard.remote(), ahead.as_mut().filter(|_| is_requested(shard))) {
                (Some(_), Some(ahead)) => self.read_remote(&pass, ahead)?,
                (Some(object), None) => self.read_remote_table(&pass, object)?,
                (None, _) => self.read_shard(&pass)?,
            };
            if let Err(error) = read {
                self.pause_work();
                meter.fail(1);
                return self.sender.blocking_send(Err(error)).map_err(|_| ReceiverDropped);
            }
        }
        self.pause_work();
        Ok(())
    }

    fn resume_work(&self) -> Instant {
        let now = Instant::now();
        self.since.set(Some(now));
        self.config.metrics.stage(LoaderStage::Read).begin();
        now
    }

    fn pause_work(&self) -> Instant {
        let (meter, now) = (self.config.metrics.stage(LoaderStage::Read), Instant::now());
        if let Some(since) = self.since.take() {
            meter.busy(now - since);
            meter.end();
        }
        now
    }

    fn read_shard(&self, pass: &ShardPass) -> Result<Result<()>, ReceiverDropped> {
        let shard = &self.config.shards[pass.shard];
        self.config.metrics.reads_shard(pass.shard);
        // Records the work time per shard, even if nothing makes the reader wait.
        self.pause_work();
        self.resume_work();
        let opened = {
            let _runtime = self.runtime.enter();
            shard.open()
        };
        match opened {
            Ok(Opened::Local(archive)) => self.read_local(shard, pass, &archive),
            Ok(Opened::Stream(input, command)) => self.runtime.block_on(async {
                tokio::select! {
                    read = self.read_input(shard, pass, input, command) => read,
                    // A stream may block forever, so a dropped receiver must be noticed here.
                    () = self.sender.closed() => self.give_up(),
                }
            }),
            Err(error) => Ok(Err(error)),
        }
    }

    fn give_up(&self) -> Result<Result<()>, ReceiverDropped> {
        self.pause_work();
        Err(ReceiverDropped)
    }

    fn read_local(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        archive: &LocalShard,
    ) -> Result<Result<()>, ReceiverDropped> {
        let first = match archive.first(HEADER_BYTES) {
            Ok(first) => first,
            Err(source) => return Ok(Err(shard.read_error(source))),
        };
        let identity = ShardIdentity::from_header(archive.bytes(), &first);
        if let Err(changed) = self.config.known.check_identity(pass.shard, shard, identity) {
            return Ok(Err(changed));
        }
        match sniff_compression(&shard.url, &first) {
            Ok(Compression::None) => self.read_plain(shard, pass, archive),
            Ok(Compression::Table) => self.read_table(shard, pass, OpenTable::local(shard, archive.clone())),
            Ok(compression) => {
                let body = archive.body();
                let failure = body.failure();
                let reader = decompress(compression, body);
                self.runtime.block_on(self.read_stream(shard, pass, reader))?;
                let failed = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
                Ok(failed.map_or(Ok(()), |source| Err(shard.read_error(source))))
            }
            Err(unsupported) => {
                self.runtime.block_on(self.skip_shard(shard, pass, unsupported.to_string()))?;
                Ok(Ok(()))
            }
        }
    }

    /// Reads an uncompressed shard, in place if it is mapped.
    fn read_plain(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        archive: &LocalShard,
    ) -> Result<Result<()>, ReceiverDropped> {
        let (url, fields) = (shard.url.clone(), self.config.fields.clone());
        match archive {
            LocalShard::Mapped(bytes) => {
                let samples = MappedSamples::new(url, bytes.clone(), self.config.field_bytes_max);
                let loaded = (0..).zip(samples.fields(fields)).map(|(number, item)| {
                    if self.config.is_read_through && pass.wants(number) {
                        read_through(&item);
                    }
                    Ok(item)
                });
                self.deliver_all(shard, pass, loaded)
            }
            LocalShard::File(file) => {
                let window = LocalArchive::new(archive.clone());
                let samples = RangedSamples::whole(url, window, self.config.field_bytes_max, fields);
                match self.deliver_all(shard, pass, samples)? {
                    // Nothing may have been read after the change.
                    Ok(()) => Ok(file.check_unchanged().map_err(|source| shard.read_error(source))),
                    failed => Ok(failed),
                }
            }
        }
    }

    fn deliver_all(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        items: impl Iterator<Item = io::Result<ShardItem>>,
    ) -> Result<Result<()>, ReceiverDropped> {
        for (number, item) in (0..).zip(items).take_while(|(number, _)| !pass.is_over(*number)) {
            let item = match item {
                Ok(item) => item,
                Err(source) => return Ok(Err(shard.read_error(source))),
            };
            if !pass.wants(number) {
                self.config.metrics.passed_over();
                continue;
            }
            // Entering the runtime costs more than most samples, so it is only done without room.
            if let Err(item) = self.deliver_now(item, pass, number) {
                self.runtime.block_on(self.deliver_later(item, pass, number))?;
            }
        }
        Ok(Ok(()))
    }

    fn read_remote(&self, pass: &ShardPass, ahead: &mut ShardsAhead) -> Result<Result<()>, ReceiverDropped> {
        let shard = &self.config.shards[pass.shard];
        self.config.metrics.reads_shard(pass.shard);
        self.pause_work();
        self.resume_work();
        match self.runtime.block_on(self.next_remote(ahead))? {
            Some(Ok(RemoteShard::Local(archive))) => self.read_local(shard, pass, &archive),
            Some(Ok(RemoteShard::Body(body))) => self.runtime.block_on(self.read_body(shard, pass, body)),
            Some(Err(source)) => Ok(Err(shard.read_error(source))),
            None => Ok(Err(Error::StageEnded { stage: "store" })),
        }
    }

    /// Waits for the next shard, or until the receiver is dropped.
    async fn next_remote(
        &self,
        ahead: &mut ShardsAhead,
    ) -> Result<Option<io::Result<RemoteShard>>, ReceiverDropped> {
        tokio::select! {
            next = ahead.next() => Ok(next),
            () = self.sender.closed() => {
                self.pause_work();
                Err(ReceiverDropped)
            }
        }
    }
}

/// Reads every payload byte, which loads mapped pages into memory.
pub(crate) fn read_through(item: &ShardItem) {
    let ShardItem::Sample(sample) = item else { return };
    for payload in sample.fields.iter().filter_map(|field| field.payload.as_ref()) {
        let (words, rest) = payload.as_chunks::<8>();
        let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
        black_box(rest.iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
    }
}

/// Maximum size of waiting payloads, in bytes.
const BUFFERED_BYTES_MAX: u64 = 64 << 20;

/// Reads shards from start to end, without an index and without an error budget.
///
/// Lazy: nothing is read until the first poll. A bad sample is an item and the stream continues; a shard that
/// cannot be opened is the last item, an error. Dropping the stream stops reading.
///
/// # Panics
/// If it is polled outside a Tokio runtime.
#[must_use]
pub fn scan_shards(shards: Vec<Shard>) -> BoxStream<'static, Result<ShardItem>> {
    let items = async_stream::stream! {
        let mut source = read_shards(ReaderSettings {
            shards,
            passes: ShardPasses { end_epoch: 1, ..ShardPasses::default() },
            known: KnownShards::default(),
            metrics: Arc::new(Metrics::new(0)),
            field_bytes_max: FIELD_BYTES_MAX,
            fields: FieldSelection::ALL,
            is_read_through: false,
            budget: ByteBudget::new(BUFFERED_BYTES_MAX, Arc::default()),
            requested_bytes_max: BUFFERED_BYTES_MAX,
        });
        while let Some(item) = source.recv().await {
            yield item.map(|item| item.item);
        }
    };
    items.boxed()
}

impl Reader {
    async fn deliver(&self, item: ShardItem, pass: &ShardPass, number: u64) -> Result<(), ReceiverDropped> {
        match self.deliver_now(item, pass, number) {
            Ok(()) => Ok(()),
            Err(item) => self.deliver_later(item, pass, number).await,
        }
    }

    /// Delivers an item if there is room, without reading the clock; else returns it.
    fn deliver_now(&self, mut item: ShardItem, pass: &ShardPass, number: u64) -> Result<(), ShardItem> {
        if let ShardItem::Sample(sample) = &mut item {
            sample.epoch = pass.epoch;
        }
        let Ok(room) = self.sender.try_reserve() else { return Err(item) };
        let lease = match &item {
            ShardItem::Skipped(_) => None,
            ShardItem::Sample(sample) => match self.config.budget.try_lease(sample.bytes()) {
                Some(lease) => Some(lease),
                None => return Err(item),
            },
        };
        room.send(Ok(self.counted(item, pass, number, lease)));
        Ok(())
    }

    /// Waits for room and delivers an item.
    async fn deliver_later(
        &self,
        item: ShardItem,
        pass: &ShardPass,
        number: u64,
    ) -> Result<(), ReceiverDropped> {
        let paused = self.pause_work();
        let lease = match &item {
            ShardItem::Skipped(_) => None,
            ShardItem::Sample(sample) => {
                Some(self.config.budget.lease(sample.bytes()).await.map_err(|_| ReceiverDropped)?)
            }
        };
        let room = self.sender.reserve().await.map_err(|_| ReceiverDropped)?;
        room.send(Ok(self.counted(item, pass, number, lease)));
        self.config.metrics.stage(LoaderStage::Read).waited_for_room(self.resume_work() - paused);
        Ok(())
    }

    fn counted(
        &self,
        item: ShardItem,
        pass: &ShardPass,
        number: u64,
        lease: Option<ByteLease>,
    ) -> ReaderItem {
        let meter = self.config.metrics.stage(LoaderStage::Read);
        let (bytes, errors) = match &item {
            ShardItem::Sample(sample) => (sample.bytes(), 0),
            ShardItem::Skipped(_) => (0, 1),
        };
        meter.count(1, bytes);
        if errors > 0 {
            meter.fail(errors);
        }
        meter.depth.add(1);
        ReaderItem { item, place: pass.item_position(number), lease }
    }
}

/// Number of bytes needed to detect the stream format.
const SNIFFED_BYTES: usize = 8;
/// Reason for skipping a table that arrives as a stream.
const STREAMED_TABLE: &str = "a table is read by row group and cannot be streamed; write it to a file, or name the \
                              remote file with the extension of the format";
/// Maximum time for a command to exit after the end of its output.
const COMMAND_END: Duration = Duration::from_mins(1);

impl Reader {
    /// Reads a body; a body that ends too early ends the stream after the complete samples.
    async fn read_body(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        mut body: ShardBody,
    ) -> Result<Result<()>, ReceiverDropped> {
        let (failure, bytes) = (body.failure(), body.bytes());
        let reading = async {
            let mut header = Vec::with_capacity(HEADER_BYTES);
            if let Err(source) = (&mut body).take(HEADER_BYTES as u64).read_to_end(&mut header).await {
                return Ok(Err(shard.read_error(source)));
            }
            let identity = ShardIdentity::from_header(bytes, &header);
            if let Err(changed) = self.config.known.check_identity(pass.shard, shard, identity) {
                return Ok(Err(changed));
            }
            // The first block was read to identify the shard; it is still the start of the archive.
            let whole = std::io::Cursor::new(header).chain(body);
            self.read_input(shard, pass, whole, None).await
        };
        let read = tokio::select! {
            read = reading => read?,
            () = self.sender.closed() => return self.give_up(),
        };
        // The readers above only see that the bytes end early; the body has recorded the cause.
        let failed = failure.lock().expect("no holder panics").take();
        Ok(failed.map_or(read, |source| Err(shard.read_error(source))))
    }

    async fn read_input(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        mut input: impl AsyncBufRead + Send + Unpin,
        command: Option<Box<Child>>,
    ) -> Result<Result<()>, ReceiverDropped> {
        let mut first = Vec::with_capacity(SNIFFED_BYTES);
        let sniffed = (&mut input).take(SNIFFED_BYTES as u64).read_to_end(&mut first).await;
        if let Err(source) = sniffed {
            return Ok(Err(shard.read_error(source)));
        }
        match sniff_compression(&shard.url, &first) {
            Ok(Compression::Table) => self.skip_shard(shard, pass, STREAMED_TABLE.to_owned()).await?,
            Ok(compression) => {
                let whole = std::io::Cursor::new(first).chain(input);
                self.read_stream(shard, pass, decompress(compression, whole)).await?;
            }
            Err(unsupported) => self.skip_shard(shard, pass, unsupported.to_string()).await?,
        }
        match command {
            Some(command) => self.check_command(shard, command).await,
            None => Ok(Ok(())),
        }
    }

    async fn read_stream<R>(&self, shard: &Shard, pass: &ShardPass, reader: R) -> Result<(), ReceiverDropped>
    where
        R: tokio::io::AsyncRead + Unpin,
    {
        let mut samples = StreamedSamples::new(shard.url.clone(), reader, self.config.field_bytes_max)
            .fields(self.config.fields.clone());
        let mut number = pass.first;
        while !pass.is_over(number)
            && let Some(item) = samples.next().await
        {
            if pass.wants(number) {
                self.deliver(item, pass, number).await?;
            } else {
                self.config.metrics.passed_over();
            }
            number += 1;
        }
        Ok(())
    }

    /// Checks the exit status: a failed command may have written only part of the shard.
    async fn check_command(
        &self,
        shard: &Shard,
        mut command: Box<Child>,
    ) -> Result<Result<()>, ReceiverDropped> {
        Ok(wait_for_exit(&mut command, COMMAND_END).await.map_err(|source| shard.read_error(source)))
    }

    async fn skip_shard(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        reason: String,
    ) -> Result<(), ReceiverDropped> {
        if !pass.wants(0) {
            return Ok(());
        }
        let shard = shard.url.to_string();
        let skipped = Skipped { shard, offset: 0, key: None, field: None, reason };
        self.deliver(ShardItem::Skipped(skipped), pass, 0).await
    }
}

/// Waits until a command exits after the output has ended; a command that stays is killed when it is dropped.
///
/// # Errors
/// If the command does not succeed: the exit status, or the process that is still running.
async fn wait_for_exit(command: &mut Child, patience: Duration) -> io::Result<()> {
    let process = command.id().unwrap_or_default();
    let status = tokio::time::timeout(patience, command.wait()).await.map_err(|_| {
        let waited = patience.as_secs_f64();
        let reason = format!(
            "the command, process {process}, has closed its output and is still running after {waited} s"
        );
        io::Error::new(io::ErrorKind::TimedOut, reason)
    })??;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("the command ended with {status}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_command_that_stays_after_its_output_is_named() {
        let run = |script: &str| {
            let mut command = tokio::process::Command::new("sh");
            command.args(["-c", script]).kill_on_drop(true).spawn().unwrap()
        };
        let mut stays = run("exec sleep 60");
        let process = stays.id().unwrap();
        let error = wait_for_exit(&mut stays, Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains(&format!("process {process}")), "{error}");
        let failed = wait_for_exit(&mut run("exit 3"), COMMAND_END).await.unwrap_err();
        assert!(failed.to_string().contains("exit status: 3"), "{failed}");
        assert!(wait_for_exit(&mut run("exit 0"), COMMAND_END).await.is_ok());
    }
}
