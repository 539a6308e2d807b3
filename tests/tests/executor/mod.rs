//! Tests the executor fed by the balanced loader.

mod feed;
