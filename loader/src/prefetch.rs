//! Read-ahead: a bound in bytes, and a stage that runs before it is asked.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::error::{Error, Result};

/// Bytes that may wait between two stages.
///
/// Something larger than the whole budget takes all of it, so the bound is exceeded by one item at the most.
#[derive(Debug, Clone)]
pub(crate) struct ByteBudget {
    free: Arc<Semaphore>,
    bytes: u32,
}

/// Bytes taken from a budget until this is dropped.
pub(crate) type ByteLease = OwnedSemaphorePermit;

impl ByteBudget {
    /// A budget of `bytes`, at least one and at most 4 GiB.
    pub(crate) fn new(bytes: u64) -> Self {
        let bytes = bytes.clamp(1, u64::from(u32::MAX)) as u32;
        Self { free: Arc::new(Semaphore::new(bytes as usize)), bytes }
    }

    /// Waits until `bytes` are free and takes them.
    pub(crate) async fn lease(&self, bytes: u64) -> Result<ByteLease> {
        let bytes = bytes.min(u64::from(self.bytes)) as u32;
        let lease = self.free.clone().acquire_many_owned(bytes).await;
        lease.map_err(|_| Error::StageEnded { stage: "read-ahead" })
    }
}

/// Runs a stream in a task of its own, up to `ahead` items before they are asked for.
///
/// The stream is polled from the first moment; dropping the receiver ends it at its next item.
pub(crate) fn run_ahead<S>(stream: S, ahead: usize) -> mpsc::Receiver<S::Item>
where
    S: Stream + Send + 'static,
    S::Item: Send,
{
    let (sender, receiver) = mpsc::channel(ahead.max(1));
    tokio::spawn(async move {
        let mut stream = std::pin::pin!(stream);
        while let Some(item) = stream.next().await {
            if sender.send(item).await.is_err() {
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
        let budget = ByteBudget::new(10);
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
}
