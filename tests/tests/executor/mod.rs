//! Tests of the executor fed by the balanced loader.

mod feed;
