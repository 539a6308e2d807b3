//! Makespan of an assignment of items to ranks and microbatches.

use super::config::PipelineConfig;
use super::search::ScheduleState;
use crate::caps::Caps;
use crate::error::{Error, Result};
use crate::instance::Instance;
use crate::partition::{Partition, Problem};

impl PipelineConfig {
    /// Returns the makespan of an assignment of items to ranks and microbatches, nanoseconds: that of the
    /// whole job, without messages.
    ///
    /// - `ranks`: as in [`PipelineConfig::ranks_times`]
    ///
    /// # Errors
    /// The errors of [`PipelineConfig::ranks_times`]; [`Error::Config`] if an item is missing or twice.
    pub fn makespan_ns(&self, instance: &Instance, ranks: &[Vec<Vec<u32>>]) -> Result<u64> {
        self.check_ranks(instance, ranks)?;
        let mut items: Vec<u32> = ranks.iter().flatten().flatten().copied().collect();
        items.sort_unstable();
        if !items.into_iter().eq(0..instance.items() as u32) {
            let reason = format!("expected each of {} items once", instance.items());
            return Err(Error::Config { setting: "ranks", reason });
        }
        let caps = Caps::default();
        let problem = Problem::new(instance, &caps)?;
        let slots = Partition::from_groups(&problem, ranks.concat());
        Ok(ScheduleState::new(&problem, slots, self).makespan_ns())
    }
}
