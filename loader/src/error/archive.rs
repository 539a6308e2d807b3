//! TODO error::archive.

