//! TODO decode::batch.

