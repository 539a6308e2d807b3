//! Runs user code on separate threads, fed through a bounded queue.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::flow::{JobQueue, Jobs, LoaderStage, Metrics};

/// Number of queued calls per thread, in addition to the running call.
const CALLS_WAITING: usize = 2;

/// User code result, or the panic message.
pub(super) type CallAnswer<T> = Result<T, String>;

type Call = Box<dyn FnOnce() + Send>;

/// Fixed number of threads that call transforms; they end after the pool and the last call are dropped.
#[derive(Debug)]
pub(super) struct TransformPool {
    calls: JobQueue<Call>,
    metrics: Arc<Metrics>,
}

impl TransformPool {
    pub(super) fn new(threads: usize, metrics: Arc<Metrics>) -> Result<Self> {
        let (calls, queue) = JobQueue::<Call>::new(threads * CALLS_WAITING);
        metrics.transforms_on(threads);
        for number in 0..threads {
            let (queue, metrics) = (queue.clone(), metrics.clone());
            let run = move || work(queue, &metrics);
            let thread = std::thread::Builder::new().name(format!("dflop-transform-{number}")).spawn(run);
            thread.map_err(|error| Error::Config {
                setting: "transforms.threads",
                reason: format!("thread {number} of {threads} could not be started: {error}"),
            })?;
        }
        Ok(Self { calls, metrics })
    }

    /// Submits a call as soon as there is room; it is skipped if the result was dropped before it starts.
    ///
    /// - `items`: number of fields or samples in the call
    pub(super) async fn submit<T: Send + 'static>(
        &self,
        items: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<CallAnswer<T>>> {
        let since = Instant::now();
        let room = self.calls.room().await;
        self.metrics.stage(LoaderStage::Transform).waited_for_room(since.elapsed());
        let (answer, pending) = oneshot::channel();
        let metrics = self.metrics.clone();
        let call = move || {
            if answer.is_closed() {
                return;
            }
            let meter = metrics.stage(LoaderStage::Transform);
            meter.depth.add(1);
            let called = meter.timed(|| catch_unwind(AssertUnwindSafe(work)));
            meter.depth.remove(1);
            meter.count(items as u64, 0);
            drop(answer.send(called.map_err(|panic| panic_message(&*panic))));
        };
        let is_queued = self.calls.push(room, Box::new(call));
        if is_queued { Ok(pending) } else { Err(Error::StageEnded { stage: "transform" }) }
    }
}

fn work(queue: Jobs<Call>, metrics: &Metrics) {
    let mut idle_since = Instant::now();
    for call in queue {
        metrics.stage(LoaderStage::Transform).waited_for_input(idle_since.elapsed());
        call();
        idle_since = Instant::now();
    }
}

/// Returns a panic message.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().copied();
    let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    words.map_or_else(|| "the transform panicked".into(), |words| format!("the transform panicked: {words}"))
}
