//! The makespan of a schedule and nothing else, fast.
//!
//! A search asks for millions of makespans of one schedule on other times. A [`CompiledSchedule`] lists
//! all passes once in an order in which every pass comes after what it waits for; a makespan is then one
//! walk over that list, two look-ups and a maximum for each pass.

use crate::error::{Error, Result};
use crate::schedule::{Action, ScheduleKind, schedule};
use crate::simulate::{StageTimes, simulate};

/// A schedule whose passes are sorted by what waits for what.
///
/// Stages that share their times (those of one module) share a *row* of times, so that a time is written
/// once for all of them.
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::ScheduleKind;
/// use dflop_balancer::{CompiledSchedule, StageTimes};
///
/// // an encoder stage and two LLM stages, two microbatches
/// let mut compiled = CompiledSchedule::new(ScheduleKind::OneForwardOneBackward, &[0, 1, 1], 2)?;
/// let times = StageTimes::split(2, 2, &[3, 3, 6, 6])?;
/// assert_eq!(compiled.makespan_ns(&times), 21);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CompiledSchedule {
    rows: usize,
    microbatches: usize,
    passes: Vec<Pass>,
    /// When the pass ends; the last cell, always 0, is what the first passes wait for.
    end_ns: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Pass {
    /// Index in the rows of times.
    time: u32,
    is_backward: bool,
    /// The pass before on the same stage, and the one that sends the input.
    waits_for: [u32; 2],
}

impl CompiledSchedule {
    /// Sorts the passes of a schedule.
    ///
    /// - `rows`: `[stages]`, which row of [`StageTimes`] each stage takes
    ///
    /// # Errors
    /// [`Error::Config`] if `rows` is empty.
    pub fn new(kind: ScheduleKind, rows: &[usize], microbatches: usize) -> Result<Self> {
        let Some(last_row) = rows.iter().max() else {
            return Err(Error::Config { setting: "rows", reason: "there is no stage".to_owned() });
        };
        let stages = rows.len();
        let lists: Vec<Vec<Action>> =
            (0..stages).map(|stage| schedule(kind, stage, stages, microbatches)).collect();
        // With a time of 1 for every pass, what waits starts later than what it waits for.
        let ones = vec![1; stages * microbatches];
        let mut events =
            simulate(&lists, &StageTimes::new(stages, microbatches, ones.clone(), ones)?)?.events;
        events.sort_by_key(|event| (event.start_ns, event.stage));

        let nothing = events.len() as u32;
        let cell = |stage: usize, microbatch: u32, is_backward: bool| {
            (stage * microbatches + microbatch as usize) * 2 + usize::from(is_backward)
        };
        let mut place = vec![nothing; 2 * stages * microbatches];
        let mut before = vec![nothing; stages];
        let mut passes = Vec::with_capacity(events.len());
        for (at, event) in events.iter().enumerate() {
            let (stage, microbatch) = (event.stage, event.microbatch);
            let sender = if event.is_backward { stage.checked_add(1) } else { stage.checked_sub(1) };
            let sender = sender.filter(|sender| *sender < stages);
            let input = sender.map_or(nothing, |sender| place[cell(sender, microbatch, event.is_backward)]);
            let time = (rows[stage] * microbatches + microbatch as usize) as u32;
            passes.push(Pass { time, is_backward: event.is_backward, waits_for: [before[stage], input] });
            place[cell(stage, microbatch, event.is_backward)] = at as u32;
            before[stage] = at as u32;
        }
        Ok(Self { rows: last_row + 1, microbatches, end_ns: vec![0; passes.len() + 1], passes })
    }

    /// Returns when the last pass ends, nanoseconds; the same as [`simulate`] says.
    ///
    /// # Panics
    /// If `times` has fewer rows or another number of microbatches than the schedule.
    pub fn makespan_ns(&mut self, times: &StageTimes) -> u64 {
        let fits = times.stages() >= self.rows && times.microbatches() == self.microbatches;
        assert!(fits, "times of {} rows, {} microbatches", times.stages(), times.microbatches());
        self.makespan_of(times.forward_ns(), times.backward_ns())
    }

    /// The same on bare times, `[rows * microbatches]` each.
    pub(crate) fn makespan_of(&mut self, forward_ns: &[u64], backward_ns: &[u64]) -> u64 {
        let mut makespan_ns = 0;
        for (at, pass) in self.passes.iter().enumerate() {
            let [before, input] = pass.waits_for;
            let start = self.end_ns[before as usize].max(self.end_ns[input as usize]);
            let times = if pass.is_backward { backward_ns } else { forward_ns };
            let end = start + times[pass.time as usize];
            self.end_ns[at] = end;
            makespan_ns = makespan_ns.max(end);
        }
        makespan_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn makespan_is_that_of_the_simulation(
            stages in 1..6_usize,
            microbatches in 1..9_usize,
            times_ns in prop::collection::vec(0..1000_u64, 48),
        ) {
            let times = StageTimes::split(stages, microbatches, &times_ns[..stages * microbatches]).unwrap();
            for kind in ScheduleKind::ALL {
                let lists: Vec<_> =
                    (0..stages).map(|stage| schedule(kind, stage, stages, microbatches)).collect();
                let rows: Vec<usize> = (0..stages).collect();
                let mut compiled = CompiledSchedule::new(kind, &rows, microbatches).unwrap();
                prop_assert_eq!(compiled.makespan_ns(&times), simulate(&lists, &times).unwrap().makespan_ns);
            }
        }
    }

    #[test]
    fn no_stage_is_an_error() {
        assert!(CompiledSchedule::new(ScheduleKind::GPipe, &[], 1).is_err());
    }
}
