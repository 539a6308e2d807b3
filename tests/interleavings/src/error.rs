//! Errors that the files of the loader name.

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the {stage} stage ended early")]
    StageEnded { stage: &'static str },
}
