//! TODO error::skipped.

