//! Tests the executor fed by the balanced loader, and whole runs.

mod feed;
mod run;
