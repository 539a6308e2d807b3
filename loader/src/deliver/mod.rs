//! Delivers samples: [`Loader`] streams shards in order, [`BalancedLoader`] delivers planned steps.

mod balanced;
mod settings;
mod stream;
mod watchdog;

pub use self::balanced::{
    BalancedLoader, BalancedLoaderBuilder, EventStream, Microbatch, MicrobatchContext, SliceGroup,
    SliceMedium, Step, StepEvent, StepStream,
};
pub use self::settings::LoaderSettings;
pub use self::stream::{BatchStream, HELD_BYTES_MAX, Loader, LoaderBuilder, RestoredInput, StreamState};
pub use self::watchdog::{LogStalls, Stall, StallListener};
