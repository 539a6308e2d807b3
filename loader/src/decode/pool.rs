//! Decode pool: threads for CPU work, fed through a bounded channel.
//!
//! The I/O runtime never decodes. Every thread keeps one [`Worker`], whose scratch buffers are shared by all
//! jobs on that thread.

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use dflop_samples::media::augment::ImageAugment;
use dflop_samples::media::{
    Codec, DecodeError, DecodeLimits, ImageLimits, ImageTensorDecoder, Media, PixelFormat, PixelStatistics,
    Strictness,
};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

use crate::error;
use crate::error::Error;
use crate::flow::{JobQueue, LoaderStage, Metrics, Room};

/// Number of waiting jobs per thread, in addition to the running job.
const JOBS_WAITING: usize = 2;

/// State that a worker thread keeps between jobs.
#[derive(Debug)]
pub(crate) struct Worker {
    rgb: ImageTensorDecoder,
    kernel: KernelSettings,
}

/// Settings for decoding images to tensors with a fixed size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelSettings {
    side: NonZeroU32,
    is_scaled: bool,
    statistics: PixelStatistics,
    strictness: Strictness,
}

impl From<NonZeroU32> for KernelSettings {
    fn from(side: NonZeroU32) -> Self {
        Self {
            side,
            is_scaled: false,
            statistics: PixelStatistics::default(),
            strictness: Strictness::default(),
        }
    }
}

impl KernelSettings {
    /// Rejects scaling without a decoder that scales.
    pub(crate) fn new(side: NonZeroU32, is_scaled: bool) -> error::Result<Self> {
        if is_scaled && !cfg!(feature = "turbojpeg") {
            let reason = "this build has no libjpeg-turbo; build with the feature `turbojpeg`".into();
            return Err(Error::Config { setting: "scaled_decode", reason });
        }
        Ok(Self { is_scaled, ..side.into() })
    }

    /// Sets which image damage is an error.
    pub(crate) fn strictness(self, strictness: Strictness) -> Self {
        Self { strictness, ..self }
    }

    /// Normalizes by these statistics.
    pub(crate) fn statistics(self, statistics: PixelStatistics) -> Self {
        Self { statistics, ..self }
    }

    fn rgb224(self) -> ImageTensorDecoder {
        let limits = ImageLimits { strictness: self.strictness, ..ImageLimits::default() };
        let rgb = ImageTensorDecoder::with_side(self.side, limits).statistics(self.statistics);
        #[cfg(feature = "turbojpeg")]
        let rgb = rgb.scaled_decode(self.is_scaled);
        debug_assert!(cfg!(feature = "turbojpeg") || !self.is_scaled, "`new` refuses it");
        rgb
    }
}

/// Maximum number of threads in a pool.
pub(crate) const WORKERS_MAX: u64 = 1_024;

/// Tensor side for workers that never decode pixels: as small as possible.
pub(crate) const SIDE_WITHOUT_PIXELS: NonZeroU32 = NonZeroU32::MIN;

impl Worker {
    fn new(kernel: KernelSettings) -> Self {
        Self { rgb: kernel.rgb224(), kernel }
    }

    /// Decodes an image into the bytes of a square, by a registered codec or the built-in decoder; a panic in
    /// a codec is an error like any other.
    pub(crate) fn decode_pixels(
        &mut self,
        codec: Option<&'static dyn Codec>,
        payload: Bytes,
        augment: Option<&ImageAugment>,
        format: PixelFormat,
        out: &mut [u8],
    ) -> Result<bool, DecodeError> {
        let decode = || {
            let Some(codec) = codec else {
                return self.rgb.decode_formatted_into(&payload, augment, format, out);
            };
            match codec.decode(payload, &DecodeLimits::default())? {
                Media::Image(image) => self.rgb.convert_formatted_into(image, augment, format, out),
                _ => Err(DecodeError::codec(codec.name(), "the codec of an image returned no image")),
            }
        };
        let decoded = catch_unwind(AssertUnwindSafe(decode));
        decoded.unwrap_or_else(|_| {
            *self = Self::new(self.kernel);
            Err(DecodeError::codec("image", "the decoder panicked"))
        })
    }
}

/// Decode job: receives the time at which the thread took the job, returns the time at which it was done.
type Job = Box<dyn FnOnce(&mut Worker, Instant) -> Instant + Send>;

/// Fixed number of decode threads.
#[derive(Debug)]
pub(crate) struct DecodePool {
    jobs: JobQueue<Job>,
    cpu_ns: Arc<AtomicU64>,
    metrics: Arc<Metrics>,
}

/// Result of a job that runs on the pool.
pub(crate) type Pending<T> = oneshot::Receiver<std::thread::Result<T>>;

impl DecodePool {
    /// Starts `threads` threads; they end when the pool and the last job are gone.
    pub(crate) fn new(threads: usize, kernel: impl Into<KernelSettings>) -> error::Result<Self> {
        let kernel = kernel.into();
        let (jobs, queue) = JobQueue::<Job>::new(threads * JOBS_WAITING);
        let metrics = Arc::new(Metrics::new(threads));
        for number in 0..threads {
            let (queue, metrics) = (queue.clone(), metrics.clone());
            let run = move || {
                let mut worker = Worker::new(kernel);
                let mut idle_since = Instant::now();
                for job in queue {
                    let started = Instant::now();
                    metrics.stage(LoaderStage::Decode).waited_for_input(started - idle_since);
                    idle_since = job(&mut worker, started);
                }
            };
            let thread = std::thread::Builder::new().name(format!("dflop-decode-{number}")).spawn(run);
            thread.map_err(|error| Error::Config {
                setting: "workers",
                reason: format!("thread {number} of {threads} could not be started: {error}"),
            })?;
        }
        Ok(Self { jobs, cpu_ns: Arc::default(), metrics })
    }

    /// Submits a job as soon as there is room; a job that panics returns the panic.
    pub(crate) async fn submit<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> T + Send + 'static,
    ) -> error::Result<Pending<T>> {
        let room = self.room().await;
        self.metrics.stage(LoaderStage::DecodeQueue).depth.add(1);
        let (answer, pending) = oneshot::channel();
        let (cpu_ns, metrics) = (self.cpu_ns.clone(), self.metrics.clone());
        let job = Box::new(move |worker: &mut Worker, started: Instant| {
            let (queue, decode) =
                (metrics.stage(LoaderStage::DecodeQueue), metrics.stage(LoaderStage::Decode));
            queue.depth.remove(1);
            queue.count(1, 0);
            decode.begin();
            decode.depth.add(1);
            let started_cpu = thread_cpu_ns();
            let result = catch_unwind(AssertUnwindSafe(|| work(worker)));
            cpu_ns.fetch_add(thread_cpu_ns() - started_cpu, Ordering::Relaxed);
            let ended = Instant::now();
            decode.busy(ended - started);
            decode.count(1, 0);
            decode.depth.remove(1);
            decode.end();
            drop(answer.send(result));
            ended
        });
        if self.jobs.push(room, job) { Ok(pending) } else { Err(Error::StageEnded { stage: "decode" }) }
    }

    /// Waits for room in the queue; looks at the clock only if there is none.
    async fn room(&self) -> Room {
        if let Some(room) = self.jobs.try_room() {
            return room;
        }
        let since = Instant::now();
        let room = self.jobs.room().await;
        self.metrics.stage(LoaderStage::DecodeQueue).waited_for_room(since.elapsed());
        room
    }

    /// Returns the counters of the loader that owns the pool.
    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Returns the counter of CPU nanoseconds spent in jobs.
    pub(crate) fn cpu_ns(&self) -> Arc<AtomicU64> {
        self.cpu_ns.clone()
    }
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIDE: NonZeroU32 = NonZeroU32::new(8).unwrap();

    #[tokio::test]
    async fn more_jobs_than_room_all_answer() {
        let pool = DecodePool::new(2, SIDE).unwrap();
        let mut answers = Vec::new();
        for number in 0..100 {
            answers.push(pool.submit(move |_| number * 2).await.unwrap());
        }
        for (number, answer) in answers.into_iter().enumerate() {
            assert_eq!(answer.await.unwrap().unwrap(), number * 2);
        }
    }

    #[tokio::test]
    async fn a_panic_is_an_answer_and_the_thread_lives_on() {
        let pool = DecodePool::new(1, SIDE).unwrap();
        let broken = pool.submit(|_| panic!("broken decoder")).await.unwrap();
        assert!(broken.await.unwrap().is_err());
        assert_eq!(pool.submit(|_| 1).await.unwrap().await.unwrap().unwrap(), 1);
    }
}
