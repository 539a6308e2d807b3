//! Synthetic multimodal samples: real file formats, drawn content, and sizes from published datasets.
//!
//! Each sample is drawn from a separate [`Rng`], so samples can be generated in any order and on any number
//! of threads, and the same seed gives the same bytes on every machine.
//!
//! # Examples
//! ```
//! use dflop_synthetic::{Rng, make_sample};
//! let fields = make_sample("000007", &mut Rng::new(0, 7))?;
//! assert!(fields.iter().all(|field| !field.extension.is_empty() && !field.payload.is_empty()));
//! # Ok::<(), std::io::Error>(())
//! ```

mod draws;
mod images;
mod sample;
mod speech;

pub use self::draws::Rng;
pub use self::images::tiles_jpeg;
pub use self::sample::{Field, make_sample};
