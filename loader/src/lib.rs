//! dflop-loader
