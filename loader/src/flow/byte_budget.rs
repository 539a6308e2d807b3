//! Bounds the bytes queued between stages, and runs a stage ahead of the consumer.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::{FutureExt, Stream, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::metrics::Gauge;
use super::sync::spawn;
use crate::error::{Error, Result};

/// Byte budget between two stages.
///
/// An item larger than the budget uses all of it, so the bytes held never exceed the larger of the budget and
/// one item.
#[derive(Debug, Clone)]
pub(crate) struct ByteBudget {
    free: Arc<Semaphore>,
    /// Number of semaphore permits.
    units: u32,
    /// Bytes per permit.
    unit_bytes: u64,
    gauge: Arc<Gauge>,
}

/// Bytes leased from a budget until this is dropped.
#[derive(Debug)]
pub(crate) struct ByteLease {
    budget: ByteBudget,
    permit: Option<OwnedSemaphorePermit>,
    bytes: u64,
}

impl ByteBudget {
    /// Creates a budget of `bytes`, at least 1; `gauge` reports the bytes held.
    pub(crate) fn new(bytes: u64, gauge: Arc<Gauge>) -> Self {
        // A semaphore accepts at most `u32::MAX` permits at once, so for a budget of 4 GiB or more a permit
        // is more than one byte: 32 bytes for 64 GiB.
        let bytes = bytes.max(1);
        let unit_bytes = bytes.div_ceil(u64::from(u32::MAX)).next_power_of_two();
        let units = (bytes / unit_bytes) as u32;
        Self { free: Arc::new(Semaphore::new(units as usize)), units, unit_bytes, gauge }
    }

    /// Returns the permits for `bytes`, rounded up, at most all permits.
    fn byte_units(&self, bytes: u64) -> u32 {
        bytes.div_ceil(self.unit_bytes).min(u64::from(self.units)) as u32
    }

    /// Creates an empty lease, which can grow.
    pub(crate) fn empty_lease(&self) -> ByteLease {
        ByteLease { budget: self.clone(), permit: None, bytes: 0 }
    }

    /// Leases `bytes` if they are free.
    pub(crate) fn try_lease(&self, bytes: u64) -> Option<ByteLease> {
        let wanted = self.byte_units(bytes);
        let permit = Some(self.free.clone().try_acquire_many_owned(wanted).ok()?);
        self.gauge.add(bytes);
        Some(ByteLease { budget: self.clone(), permit, bytes })
    }

    /// Waits until `bytes` are free and leases them.
    pub(crate) async fn lease(&self, bytes: u64) -> Result<ByteLease> {
        let mut lease = self.empty_lease();
        lease.grow(bytes).await?;
        Ok(lease)
    }
}

impl ByteLease {
    /// Waits until `bytes` more are free and adds them to the lease.
    ///
    /// A lease that holds the entire budget grows without waiting: an item may be larger than the budget, and
    /// no other item is in memory then.
    pub(crate) async fn grow(&mut self, bytes: u64) -> Result<()> {
        let held = self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits) as u32;
        // Rounded for the entire lease, so that many small steps use no more permits than a single large
        // step.
        let wanted = self.budget.byte_units(self.bytes.saturating_add(bytes)).saturating_sub(held);
        if wanted > 0 {
            let more = self.budget.free.clone().acquire_many_owned(wanted).await;
            let more = more.map_err(|_| Error::StageEnded { stage: "read-ahead" })?;
            match &mut self.permit {
                Some(permit) => permit.merge(more),
                None => self.permit = Some(more),
            }
        }
        self.bytes += bytes;
        self.budget.gauge.add(bytes);
        Ok(())
    }

    /// Splits off a lease of at most `bytes`.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        let units = self.budget.byte_units(bytes) as usize;
        let permit = self.permit.as_mut().and_then(|held| held.split(units.min(held.num_permits())));
        self.bytes -= bytes;
        Self { budget: self.budget.clone(), permit, bytes }
    }
}

impl Drop for ByteLease {
    fn drop(&mut self) {
        self.budget.gauge.remove(self.bytes);
    }
}

/// Runs a stream in a separate task, up to `ahead` items before they are requested.
///
/// The stream is polled immediately; dropping the receiver ends it. A panic in the stream is reported as an
/// error, not as the end.
pub(crate) fn run_ahead<T: Send + 'static>(
    stream: impl Stream<Item = Result<T>> + Send + 'static,
    ahead: usize,
) -> mpsc::Receiver<Result<T>> {
    let (sender, receiver) = mpsc::channel(ahead.max(1));
    spawn(async move {
        let mut stream = std::pin::pin!(stream);
        loop {
            let item = tokio::select! {
                item = AssertUnwindSafe(stream.next()).catch_unwind() => item,
                () = sender.closed() => return,
            };
            let (item, is_last) = match item {
                Ok(Some(item)) => (item, false),
                Ok(None) => return,
                Err(_) => (Err(Error::StageEnded { stage: "read" }), true),
            };
            if sender.send(item).await.is_err() || is_last {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lease_over_the_budget_waits_for_all_of_it() {
        let budget = ByteBudget::new(10, Arc::default());
        let first = budget.lease(4).await.unwrap();
        let large = tokio::spawn({
            let budget = budget.clone();
            async move { budget.lease(1_000).await }
        });
        tokio::task::yield_now().await;
        assert!(!large.is_finished());
        drop(first);
        assert!(large.await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn parts_of_a_lease_are_given_back_one_by_one() {
        let budget = ByteBudget::new(10, Arc::default());
        let mut whole = budget.lease(9).await.unwrap();
        let first = whole.split(4);
        assert!(budget.try_lease(5).is_none());
        drop(first);
        assert!(budget.try_lease(5).is_some());
        drop(whole);
        assert!(budget.try_lease(10).is_some());
        assert_eq!(budget.gauge.now(), 0);
    }

    #[test]
    fn a_lease_that_has_no_room_is_not_taken() {
        let gauge = Arc::new(Gauge::default());
        let budget = ByteBudget::new(10, gauge.clone());
        let first = budget.try_lease(1_000).unwrap();
        assert!(budget.try_lease(1).is_none());
        assert_eq!(gauge.now(), 1_000);
        drop(first);
        assert!(budget.try_lease(1).is_some());
    }

    #[test]
    fn a_budget_over_4_gib_is_kept_whole() {
        const GIB: u64 = 1 << 30;
        let budget = ByteBudget::new(64 * GIB, Arc::default());
        let mut leases: Vec<_> = (0..64).map(|_| budget.try_lease(GIB).expect("64 GiB are free")).collect();
        assert!(budget.try_lease(1).is_none(), "65 GiB would be held");
        leases.pop();
        assert!(budget.try_lease(GIB + 1).is_none());
        assert!(budget.try_lease(GIB).is_some());
        drop(leases);
        assert!(ByteBudget::new(u64::MAX, Arc::default()).try_lease(1 << 60).is_some());
    }

    #[tokio::test]
    async fn a_lease_of_a_large_budget_rounds_once_however_it_grows() {
        let budget = ByteBudget::new(64 << 30, Arc::default());
        let mut lease = budget.empty_lease();
        for _ in 0..64 {
            lease.grow(1).await.unwrap();
        }
        assert_eq!(lease.permit.as_ref().map(OwnedSemaphorePermit::num_permits), Some(2));
    }

    #[tokio::test]
    async fn a_growing_lease_is_alone_once_it_has_the_whole_budget() {
        let gauge = Arc::new(Gauge::default());
        let budget = ByteBudget::new(10, gauge.clone());
        let mut batch = budget.lease(6).await.unwrap();
        let other = budget.lease(4).await.unwrap();
        let growing = tokio::spawn(async move {
            batch.grow(3).await.unwrap();
            batch.grow(1_000).await.unwrap();
            batch
        });
        tokio::task::yield_now().await;
        assert!(!growing.is_finished(), "the other lease is in the way");
        drop(other);
        let batch = growing.await.unwrap();
        assert_eq!(gauge.now(), 1_009);
        drop(batch);
        assert_eq!(gauge.now(), 0);
        assert!(budget.lease(10).await.is_ok());
    }

    #[tokio::test]
    async fn a_stage_whose_receiver_is_gone_ends_while_it_waits() {
        let held = Arc::new(());
        let its = held.clone();
        let stream = futures::stream::pending::<Arc<()>>().map(move |_| Ok(its.clone()));
        let receiver = run_ahead(stream, 1);
        tokio::task::yield_now().await;
        drop(receiver);
        while Arc::strong_count(&held) > 1 {
            tokio::task::yield_now().await;
        }
    }

    /// Guards a fixed bug: a panic in the task once looked like the end of the data.
    #[tokio::test]
    async fn a_panic_is_an_error_and_not_the_end() {
        let stream = futures::stream::iter([1, 0]).map(|divisor| Ok(10 / divisor));
        let mut receiver = run_ahead(stream, 1);
        assert!(matches!(receiver.recv().await, Some(Ok(10))));
        assert!(matches!(receiver.recv().await, Some(Err(Error::StageEnded { stage: "read" }))));
        assert!(receiver.recv().await.is_none());
    }
}
