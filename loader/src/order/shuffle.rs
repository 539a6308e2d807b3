//! TODO order::shuffle.

