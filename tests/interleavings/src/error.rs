//! Errors that the loader files name.

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the {stage} stage ended early")]
    StageEnded { stage: &'static str },
}
