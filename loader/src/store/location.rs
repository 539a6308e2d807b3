//! TODO store::location.

