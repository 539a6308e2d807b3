//! Holds the repository invariants: architecture, words, documents.

mod architecture;
mod circles;
mod documents;
mod floors;
mod settings;
mod source;
mod waits;
mod words;
