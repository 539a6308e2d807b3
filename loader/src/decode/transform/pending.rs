//! Fields of a sample whose transforms run.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::decode::outcome::{Decoded, FieldError};
use crate::error::{Error, Result};

/// Fields of one sample that are being transformed.
#[derive(Debug)]
pub(crate) struct PendingTransforms {
    pub(super) answer: oneshot::Receiver<Result<Result<Decoded, FieldError>>>,
    pub(super) _task: Arc<AbortOnDrop>,
}

/// Aborts a task when its last waiter is dropped.
#[derive(Debug)]
pub(super) struct AbortOnDrop(pub(super) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl PendingTransforms {
    /// Waits for the last transform and for the preparer.
    pub(crate) async fn finish(self) -> Result<Result<Decoded, FieldError>> {
        self.answer.await.unwrap_or(Err(Error::StageEnded { stage: "transform" }))
    }
}
