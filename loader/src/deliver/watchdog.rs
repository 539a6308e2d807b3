//! Reports a loader that makes no progress, with the stage and the shard.
//!
//! A *stall* is a consumer that waits while no loader stage makes progress. The watch is part of the stream
//! that the consumer polls: an idle consumer is no stall, and neither is a slow loader that moves. Reports go
//! to a [`StallListener`], by default to `tracing`, which the trainer's logging picks up and which costs
//! nothing without a subscriber.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::flow::{LoaderStage, Metrics, MetricsSnapshot};
use crate::shard::Shard;

/// Maximum interval between two checks of a waiting consumer.
const TICK_MAX: Duration = Duration::from_secs(1);
/// Minimum interval between two checks of a waiting consumer.
const TICK_MIN: Duration = Duration::from_millis(5);

/// Description of a stalled loader.
#[derive(Debug, Clone, PartialEq)]
pub struct Stall {
    /// Stage that is busy without progress.
    pub stage: LoaderStage,
    /// URL of the shard that is being read; `None` if a different stage is stuck.
    pub shard: Option<Arc<str>>,
    /// Time in which nothing happened.
    pub seconds: f64,
    /// All counters.
    pub metrics: MetricsSnapshot,
}

/// Listens for stalls.
pub trait StallListener: Send + Sync + std::fmt::Debug {
    /// Nothing has happened for the time that was set; called again each time it has passed.
    fn stalled(&self, stall: &Stall);
}

/// Writes a warning with the `tracing` crate.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogStalls;

impl StallListener for LogStalls {
    fn stalled(&self, stall: &Stall) {
        let counters = stall.metrics.stage(stall.stage);
        tracing::warn!(
            stage = stall.stage.name(),
            shard = stall.shard.as_deref(),
            seconds = stall.seconds,
            items = counters.items,
            errors = counters.errors,
            depth = counters.depth,
            "the loader is stuck"
        );
    }
}

/// When a stall is reported, and when it ends the stream.
#[derive(Debug, Clone)]
pub(crate) struct StallSettings {
    pub(crate) warn_seconds: f64,
    pub(crate) error_seconds: f64,
    pub(crate) listener: Arc<dyn StallListener>,
}

impl Default for StallSettings {
    fn default() -> Self {
        Self { warn_seconds: 60.0, error_seconds: f64::INFINITY, listener: Arc::new(LogStalls) }
    }
}

impl StallSettings {
    pub(crate) fn check(&self) -> Result<()> {
        for (setting, seconds) in
            [("stall_seconds_max", self.warn_seconds), ("stall_seconds_error", self.error_seconds)]
        {
            if seconds.is_nan() || seconds <= 0.0 {
                let reason = format!("{seconds} is not above 0; infinity switches it off");
                return Err(Error::Config { setting, reason });
            }
        }
        Ok(())
    }

    fn tick(&self) -> Option<Duration> {
        let first = self.warn_seconds.min(self.error_seconds);
        let tick = Duration::try_from_secs_f64(first / 4.0).ok()?;
        Some(tick.clamp(TICK_MIN, TICK_MAX))
    }
}

/// Watches the items that a consumer waits for.
#[derive(Debug)]
pub(crate) struct Watchdog {
    settings: StallSettings,
    metrics: Arc<Metrics>,
    shards: Vec<Shard>,
}

impl Watchdog {
    pub(crate) fn new(settings: StallSettings, metrics: Arc<Metrics>, shards: Vec<Shard>) -> Self {
        Self { settings, metrics, shards }
    }

    /// Waits for `future` and counts the time as the consumer's.
    ///
    /// # Errors
    /// [`Error::Stalled`] if that is asked for.
    pub(crate) async fn watch<T>(&self, future: impl Future<Output = T>) -> Result<T> {
        let started = Instant::now();
        let outcome = match self.settings.tick() {
            None => Ok(future.await),
            Some(tick) => self.look_every(tick, future).await,
        };
        self.metrics.consumer_waited(started.elapsed());
        outcome
    }

    async fn look_every<T>(&self, tick: Duration, future: impl Future<Output = T>) -> Result<T> {
        let mut future = std::pin::pin!(future);
        // Usually there is no need for a timer.
        if let Some(output) = futures::future::FutureExt::now_or_never(future.as_mut()) {
            return Ok(output);
        }
        let (mut moved, mut progress, mut warned) = (Instant::now(), self.metrics.progress(), 0.0);
        loop {
            if let Ok(output) = tokio::time::timeout(tick, future.as_mut()).await {
                return Ok(output);
            }
            let now = self.metrics.progress();
            if now != progress {
                (moved, progress, warned) = (Instant::now(), now, 0.0);
            }
            let seconds = moved.elapsed().as_secs_f64();
            if seconds >= self.settings.error_seconds {
                return Err(self.stall(seconds).into_error());
            }
            if seconds - warned >= self.settings.warn_seconds {
                warned = seconds;
                self.metrics.stalled();
                self.settings.listener.stalled(&self.stall(seconds));
            }
        }
    }

    fn stall(&self, seconds: f64) -> Stall {
        let stage = self.stuck_stage();
        let shard = self.metrics.shard().filter(|_| stage == LoaderStage::Read);
        let shard = shard.and_then(|number| self.shards.get(number)).map(|shard| shard.url.clone());
        Stall { stage, shard, seconds, metrics: self.metrics.snapshot() }
    }

    /// Returns the last stage that is working: stages before it wait for room, stages after it for input.
    fn stuck_stage(&self) -> LoaderStage {
        let at_work = [LoaderStage::Transform, LoaderStage::Decode, LoaderStage::Read, LoaderStage::Plan];
        let stuck = at_work.into_iter().find(|&stage| self.metrics.stage(stage).is_active());
        stuck.unwrap_or(LoaderStage::Collate)
    }
}

impl Stall {
    fn into_error(self) -> Error {
        let shard = self.shard.map(|shard| shard.to_string());
        Error::Stalled { stage: self.stage.name(), shard, seconds: self.seconds }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Debug, Default)]
    struct Heard(Mutex<Vec<Stall>>);

    impl StallListener for Heard {
        fn stalled(&self, stall: &Stall) {
            self.0.lock().unwrap().push(stall.clone());
        }
    }

    fn watchdog(warn_seconds: f64, error_seconds: f64) -> (Watchdog, Arc<Heard>) {
        let heard = Arc::new(Heard::default());
        let settings = StallSettings { warn_seconds, error_seconds, listener: heard.clone() };
        settings.check().unwrap();
        (Watchdog::new(settings, Arc::new(Metrics::new(1)), Vec::new()), heard)
    }

    #[tokio::test]
    async fn a_stage_that_never_ends_is_reported_again_and_again_then_an_error() {
        let (watchdog, heard) = watchdog(0.05, 0.3);
        watchdog.metrics.stage(LoaderStage::Plan).begin();
        let error = watchdog.watch(std::future::pending::<()>()).await.unwrap_err();
        assert!(matches!(error, Error::Stalled { stage: "plan", shard: None, .. }), "{error}");
        let heard = heard.0.lock().unwrap();
        assert!(heard.len() >= 2 && heard[0].stage == LoaderStage::Plan, "{heard:?}");
        assert_eq!(watchdog.metrics.snapshot().stalls, heard.len() as u64);
    }

    #[tokio::test]
    async fn slow_progress_is_no_stall() {
        let (watchdog, heard) = watchdog(0.2, 0.4);
        let metrics = watchdog.metrics.clone();
        let work = async {
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_millis(30)).await;
                metrics.stage(LoaderStage::Read).count(1, 1);
            }
        };
        watchdog.watch(work).await.unwrap();
        assert_eq!(heard.0.lock().unwrap().len(), 0);
        assert!(metrics.snapshot().consumer_wait_seconds >= 0.6);
    }

    #[test]
    fn times_that_make_no_sense_are_refused() {
        for seconds in [0.0, -1.0, f64::NAN] {
            let settings = StallSettings { warn_seconds: seconds, ..StallSettings::default() };
            assert!(settings.check().is_err(), "{seconds}");
        }
        assert!(StallSettings { warn_seconds: f64::INFINITY, ..StallSettings::default() }.tick().is_none());
    }
}
