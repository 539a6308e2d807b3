//! Counts items, bytes, errors and times for every loader stage.
//!
//! Both loaders count items, bytes, errors, queue depths, busy and waiting time per [`LoaderStage`] in
//! relaxed atomics; nothing is locked, and no sample costs more than two clock readings. A reader of
//! [`MetricsSnapshot`] sees counters from slightly different moments, which add up once the stream has ended.
//! [`crate::deliver`] uses the same counters to find a stuck stage.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::source_meter::{SourceMeter, SourceSnapshot};

/// Waiting time fraction below which the consumer is the bottleneck.
const WAIT_SHARE_NOTICED: f64 = 0.05;

/// Loader stage, in the order in which samples pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoaderStage {
    /// Step planning; the balanced loader only. Items are steps.
    Plan,
    /// Shard reads. Items are samples and skipped entries; depth counts samples read ahead.
    Read,
    /// Jobs that wait for a decode thread. An item is a sample, or an image if images go into a tensor.
    DecodeQueue,
    /// Decode threads; depth counts the busy threads.
    Decode,
    /// Threads that run user code ([`crate::decode`]). Items are fields; depth counts the running calls.
    Transform,
    /// Batch or step assembly; depth counts batches or steps in progress.
    Collate,
    /// Delivery. Items are delivered samples; busy is the consumer time between two calls.
    Deliver,
}

/// All stages, in order.
const STAGES: [LoaderStage; 7] = [
    LoaderStage::Plan,
    LoaderStage::Read,
    LoaderStage::DecodeQueue,
    LoaderStage::Decode,
    LoaderStage::Transform,
    LoaderStage::Collate,
    LoaderStage::Deliver,
];

impl LoaderStage {
    /// Returns the name used in errors and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Read => "read",
            Self::DecodeQueue => "decode queue",
            Self::Decode => "decode",
            Self::Transform => "transform",
            Self::Collate => "collate",
            Self::Deliver => "deliver",
        }
    }
}

/// Current value and maximum of a quantity so far.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    now: AtomicU64,
    high: AtomicU64,
}

impl Gauge {
    pub(crate) fn add(&self, amount: u64) {
        let now = self.now.fetch_add(amount, Relaxed) + amount;
        if now > self.high.load(Relaxed) {
            self.high.fetch_max(now, Relaxed);
        }
    }

    pub(crate) fn remove(&self, amount: u64) {
        self.now.fetch_sub(amount, Relaxed);
    }

    pub(crate) fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    fn high(&self) -> u64 {
        self.high.load(Relaxed)
    }
}

/// Counters for a stage.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct StageMeter {
    items: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    pub(crate) depth: Gauge,
    busy_ns: AtomicU64,
    input_wait_ns: AtomicU64,
    output_wait_ns: AtomicU64,
    /// Workers that are busy now.
    active: AtomicUsize,
}

impl StageMeter {
    pub(crate) fn count(&self, items: u64, bytes: u64) {
        self.items.fetch_add(items, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn fail(&self, errors: u64) {
        self.errors.fetch_add(errors, Relaxed);
    }

    pub(crate) fn busy(&self, time: Duration) {
        self.busy_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn waited_for_input(&self, time: Duration) {
        self.input_wait_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn waited_for_room(&self, time: Duration) {
        self.output_wait_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn begin(&self) {
        self.active.fetch_add(1, Relaxed);
    }

    pub(crate) fn end(&self) {
        self.active.fetch_sub(1, Relaxed);
    }

    /// Runs blocking work and counts the time as busy.
    pub(crate) fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        self.begin();
        let done = work();
        self.end();
        self.busy(started.elapsed());
        done
    }

    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Relaxed) > 0
    }

    fn snapshot(&self, stage: LoaderStage, workers: usize) -> StageSnapshot {
        let seconds = |nanoseconds: &AtomicU64| nanoseconds.load(Relaxed) as f64 / 1e9;
        StageSnapshot {
            stage,
            workers,
            items: self.items.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            errors: self.errors.load(Relaxed),
            depth: self.depth.now(),
            depth_max: self.depth.high(),
            busy_seconds: seconds(&self.busy_ns),
            input_wait_seconds: seconds(&self.input_wait_ns),
            output_wait_seconds: seconds(&self.output_wait_ns),
        }
    }
}

/// Loader counters, shared by all stages.
#[derive(Debug)]
pub struct Metrics {
    stages: [StageMeter; STAGES.len()],
    decode_workers: usize,
    transform_workers: AtomicUsize,
    first_poll: std::sync::OnceLock<Instant>,
    consumer_wait_ns: AtomicU64,
    retries: Arc<AtomicU64>,
    stalls: AtomicU64,
    /// Items that a restored stream does not deliver again.
    passed_over: AtomicU64,
    /// Position, in the shard list, of the shard that is being read.
    shard: AtomicUsize,
    /// Counters per dataset number in a mixture; empty in the plain loader.
    sources: std::sync::OnceLock<Vec<SourceMeter>>,
    pub(crate) undecoded: Arc<Gauge>,
    pub(crate) decoded: Arc<Gauge>,
}

impl Metrics {
    pub(crate) fn new(decode_workers: usize) -> Self {
        Self {
            stages: Default::default(),
            decode_workers,
            transform_workers: AtomicUsize::new(1),
            first_poll: std::sync::OnceLock::new(),
            consumer_wait_ns: AtomicU64::new(0),
            retries: Arc::default(),
            stalls: AtomicU64::new(0),
            passed_over: AtomicU64::new(0),
            shard: AtomicUsize::new(usize::MAX),
            sources: std::sync::OnceLock::new(),
            undecoded: Arc::default(),
            decoded: Arc::default(),
        }
    }

    pub(crate) fn stage(&self, stage: LoaderStage) -> &StageMeter {
        &self.stages[stage as usize]
    }

    /// Sets the number of threads that run user code.
    pub(crate) fn transforms_on(&self, threads: usize) {
        self.transform_workers.store(threads, Relaxed);
    }

    /// Returns the counter for retried requests to remote shards.
    #[must_use]
    pub fn retries(&self) -> Arc<AtomicU64> {
        self.retries.clone()
    }

    pub(crate) fn reads_shard(&self, number: usize) {
        self.shard.store(number, Relaxed);
    }

    pub(crate) fn shard(&self) -> Option<usize> {
        Some(self.shard.load(Relaxed)).filter(|&number| number != usize::MAX)
    }

    /// Creates a counter per dataset in a mixture; later calls have no effect.
    pub(crate) fn name_sources(&self, names: impl Iterator<Item = Arc<str>>) {
        self.sources.get_or_init(|| names.map(SourceMeter::new).collect());
    }

    /// Returns the counters for a dataset number.
    pub(crate) fn source(&self, dataset: usize) -> Option<&SourceMeter> {
        self.sources.get()?.get(dataset)
    }

    pub(crate) fn begin_stream(&self) {
        self.first_poll.get_or_init(Instant::now);
    }

    pub(crate) fn consumer_waited(&self, time: Duration) {
        self.consumer_wait_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn stalled(&self) {
        self.stalls.fetch_add(1, Relaxed);
    }

    /// Counts an item that was read but is not delivered again.
    pub(crate) fn passed_over(&self) {
        self.passed_over.fetch_add(1, Relaxed);
    }

    /// Returns a number that changes with the progress of any stage.
    pub(crate) fn progress(&self) -> u64 {
        let done = |stage: &StageMeter| stage.items.load(Relaxed) + stage.errors.load(Relaxed);
        self.passed_over.load(Relaxed) + self.stages.iter().map(done).sum::<u64>()
    }

    /// Returns the current counter values.
    #[must_use]
    pub fn snapshot(&self) -> MetricsSnapshot {
        let workers = |stage| match stage {
            LoaderStage::Decode => self.decode_workers,
            LoaderStage::Transform => self.transform_workers.load(Relaxed),
            _ => 1,
        };
        let stages: Vec<_> =
            STAGES.iter().map(|&stage| self.stage(stage).snapshot(stage, workers(stage))).collect();
        let seconds = self.first_poll.get().map_or(0.0, |first| first.elapsed().as_secs_f64());
        let consumer_wait_seconds = self.consumer_wait_ns.load(Relaxed) as f64 / 1e9;
        MetricsSnapshot {
            seconds,
            consumer_wait_seconds,
            bottleneck: bottleneck(seconds, consumer_wait_seconds, &stages),
            stages,
            sources: self.sources.get().into_iter().flatten().map(SourceMeter::snapshot).collect(),
            retries: self.retries.load(Relaxed),
            stalls: self.stalls.load(Relaxed),
            undecoded_bytes: self.undecoded.now(),
            undecoded_bytes_max: self.undecoded.high(),
            decoded_bytes: self.decoded.now(),
            decoded_bytes_max: self.decoded.high(),
        }
    }
}

/// Stage counters so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageSnapshot {
    /// Stage that was counted.
    pub stage: LoaderStage,
    /// Number of threads or tasks that share the stage.
    pub workers: usize,
    /// Number of items that passed; [`LoaderStage`] defines the item of each stage.
    pub items: u64,
    /// Payload bytes in the items.
    pub bytes: u64,
    /// Items that were bad.
    pub errors: u64,
    /// Number of items queued or in progress now.
    pub depth: u64,
    /// Largest depth so far.
    pub depth_max: u64,
    /// Time spent working, over all workers.
    pub busy_seconds: f64,
    /// Time spent waiting for input, over all workers.
    pub input_wait_seconds: f64,
    /// Time spent with a result that the next stage had no room for.
    pub output_wait_seconds: f64,
}

/// Loader counters so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricsSnapshot {
    /// Time since the stream was first polled.
    pub seconds: f64,
    /// Time that the consumer waited for batches or steps.
    pub consumer_wait_seconds: f64,
    /// Stage that limits the throughput: [`LoaderStage::Deliver`], the consumer, if it hardly ever waits,
    /// else the stage whose workers have the largest busy share.
    pub bottleneck: Option<LoaderStage>,
    /// The stages, in order.
    pub stages: Vec<StageSnapshot>,
    /// Counters per dataset number in a mixture; the balanced loader only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceSnapshot>,
    /// Number of retried requests to remote shards by this loader, without indexing.
    pub retries: u64,
    /// Stalls that were reported.
    pub stalls: u64,
    /// Payload bytes that wait for decoding, or for delivery as stored, without the shuffle buffer.
    pub undecoded_bytes: u64,
    /// Maximum number of undecoded bytes so far.
    pub undecoded_bytes_max: u64,
    /// Bytes of decoded media and reserved room before delivery; estimated from headers.
    pub decoded_bytes: u64,
    /// Maximum number of decoded bytes so far.
    pub decoded_bytes_max: u64,
}

impl MetricsSnapshot {
    /// Returns the counters for a stage.
    ///
    /// # Panics
    /// If the snapshot was deserialized and lacks the stage.
    #[must_use]
    pub fn stage(&self, stage: LoaderStage) -> &StageSnapshot {
        self.stages.iter().find(|snapshot| snapshot.stage == stage).expect("a snapshot has every stage")
    }
}

fn bottleneck(seconds: f64, consumer_wait_seconds: f64, stages: &[StageSnapshot]) -> Option<LoaderStage> {
    let delivered = stages.last().map_or(0, |deliver| deliver.items);
    if delivered > 0 && consumer_wait_seconds < WAIT_SHARE_NOTICED * seconds {
        return Some(LoaderStage::Deliver);
    }
    let inner = stages.iter().filter(|stage| stage.stage != LoaderStage::Deliver && stage.busy_seconds > 0.0);
    let share = |stage: &StageSnapshot| stage.busy_seconds / stage.workers as f64;
    inner.max_by(|one, other| share(one).total_cmp(&share(other))).map(|stage| stage.stage)
}

/// Runs a future; the time inside polls counts as busy, the time between them as waiting for input.
pub(crate) async fn metered<F: Future>(meter: &StageMeter, future: F) -> F::Output {
    let mut future = pin!(future);
    let mut since: Option<Instant> = None;
    std::future::poll_fn(move |context| {
        let started = Instant::now();
        if let Some(left) = since {
            meter.waited_for_input(started - left);
        }
        meter.begin();
        let polled = future.as_mut().poll(context);
        meter.end();
        let ended = Instant::now();
        meter.busy(ended - started);
        since = Some(ended);
        match polled {
            Poll::Ready(output) => Poll::Ready(output),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_keeps_its_highest_value() {
        let gauge = Gauge::default();
        gauge.add(3);
        gauge.add(4);
        gauge.remove(5);
        gauge.add(1);
        assert_eq!((gauge.now(), gauge.high()), (3, 7));
    }

    #[test]
    fn stages_lie_where_their_names_say() {
        let metrics = Metrics::new(3);
        for (number, &stage) in STAGES.iter().enumerate() {
            metrics.stage(stage).count(number as u64 + 1, 0);
        }
        let snapshot = metrics.snapshot();
        for (number, &stage) in STAGES.iter().enumerate() {
            assert_eq!(snapshot.stage(stage).items, number as u64 + 1, "{stage:?}");
        }
        assert_eq!(snapshot.stage(LoaderStage::Decode).workers, 3);
    }

    fn with_busy(seconds: &[(LoaderStage, f64)]) -> Vec<StageSnapshot> {
        let metrics = Metrics::new(4);
        for &(stage, seconds) in seconds {
            metrics.stage(stage).busy(Duration::from_secs_f64(seconds));
        }
        metrics.stage(LoaderStage::Deliver).count(1, 1);
        metrics.snapshot().stages
    }

    #[test]
    fn the_bottleneck_is_the_stage_that_is_busy_for_the_largest_share() {
        let stages =
            with_busy(&[(LoaderStage::Read, 6.0), (LoaderStage::Decode, 20.0), (LoaderStage::Collate, 1.0)]);
        assert_eq!(
            bottleneck(10.0, 8.0, &stages),
            Some(LoaderStage::Read),
            "four decoders share twenty seconds"
        );
        let stages = with_busy(&[(LoaderStage::Read, 4.0), (LoaderStage::Decode, 20.0)]);
        assert_eq!(bottleneck(10.0, 8.0, &stages), Some(LoaderStage::Decode));
        assert_eq!(bottleneck(10.0, 0.1, &stages), Some(LoaderStage::Deliver), "the consumer never waits");
    }

    #[tokio::test]
    async fn sleep_is_waiting_and_work_is_busy() {
        let meter = StageMeter::default();
        let work = async {
            std::thread::sleep(Duration::from_millis(20));
            tokio::time::sleep(Duration::from_millis(60)).await;
        };
        metered(&meter, work).await;
        let snapshot = meter.snapshot(LoaderStage::Collate, 1);
        assert!(snapshot.busy_seconds >= 0.02 && snapshot.input_wait_seconds >= 0.04, "{snapshot:?}");
    }

    #[test]
    fn sources_are_counted_by_their_numbers() {
        let metrics = Metrics::new(1);
        assert!(metrics.source(0).is_none());
        metrics.name_sources(["photos", "clips"].map(Arc::from).into_iter());
        metrics.source(1).unwrap().deliver(2, 30);
        metrics.source(1).unwrap().skip(1);
        assert!(metrics.source(2).is_none());
        let counts = |source: &SourceSnapshot| (source.samples, source.tokens, source.skipped_samples);
        let sources = metrics.snapshot().sources;
        assert_eq!(sources.iter().map(counts).collect::<Vec<_>>(), [(0, 0, 0), (2, 30, 1)]);
        assert_eq!(sources[1].source, "clips");
    }

    #[test]
    fn a_snapshot_survives_json() {
        let metrics = Metrics::new(2);
        metrics.name_sources([Arc::from("photos")].into_iter());
        let snapshot = metrics.snapshot();
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<MetricsSnapshot>(&text).unwrap(), snapshot);
    }
}
