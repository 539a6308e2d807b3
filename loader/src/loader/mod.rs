//! Delivers samples: [`Loader`] streams shards in order, [`BalancedLoader`] delivers planned steps.

mod balanced;
mod field_check;
mod settings;
mod stream;
mod watchdog;

pub use self::balanced::BalancedLoaderBuilder;
pub use self::balanced::{BalancedLoader, Microbatch, PartStream, Step, StepPart, StepStream};
pub use self::settings::LoaderSettings;
pub use self::stream::{BatchStream, Loader};
pub use self::stream::{HELD_BYTES_MAX, StreamState};
pub use self::stream::{LoaderBuilder, RestoredInput};
pub use self::watchdog::{LogStalls, Stall, StallListener};
