//! Stop of a run, which ends waits for samples.

use futures::channel::oneshot;

/// Ends a wait for samples.
pub(super) struct Stop {
    stopped: oneshot::Receiver<()>,
    /// Sender for a stop that never comes.
    _kept: Option<oneshot::Sender<()>>,
}

impl Stop {
    /// Returns a stop that comes when the sender is dropped.
    pub(super) fn new(stopped: oneshot::Receiver<()>) -> Self {
        Self { stopped, _kept: None }
    }

    /// Returns a stop that never comes.
    pub(super) fn never() -> Self {
        let (sender, stopped) = oneshot::channel();
        Self { stopped, _kept: Some(sender) }
    }

    /// Waits for the stop.
    pub(super) async fn stopped(&mut self) {
        // The sender is dropped, never used.
        let _ = (&mut self.stopped).await;
    }
}
