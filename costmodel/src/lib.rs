//! dflop-costmodel
