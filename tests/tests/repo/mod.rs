//! Holds the invariants of the repository: architecture, words, documents.

mod architecture;
mod floors;
mod source;
mod words;
