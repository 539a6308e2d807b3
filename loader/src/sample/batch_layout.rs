//! TODO sample::batch_layout.

