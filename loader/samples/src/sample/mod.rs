//! Describes samples: decoded fields, shapes from headers, texts, and documents that order media and texts.

mod batch_layout;
mod decoded;
pub mod document;
mod measure;
pub mod text;

pub use self::batch_layout::{BatchLayout, PaddingSide};
pub use self::decoded::{Field, Sample};
pub use self::measure::{FieldFault, MeasuredSample, Unused, decoded_bytes, measure_sample, measure_within};
