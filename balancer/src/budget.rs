//! Limits search effort by work units instead of time.
//!
//! An *elementary step* is a single candidate: a group compared with a moved or exchanged item, a subset sum
//! listed or compared, an action on a pipeline stage simulated, or an eighth of an integer program's cell at
//! a node. A **work unit is 16 elementary steps**, some tens of nanoseconds. Steps are counted at fixed
//! points in the algorithms, so equal budgets end at the same candidate on every machine. Strategies without
//! a search spend nothing, and neither does a search's initial assignment.

/// Elementary steps per work unit.
const STEPS_PER_UNIT: u64 = 16;
/// Steps between two queries of the deadline.
const STEPS_PER_LOOK: u64 = 4096;

/// Remaining search effort: work units and, optionally, a deadline.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
///
/// let quick = dflop_balancer::Budget::work(20_000);
/// let end = Instant::now() + Duration::from_millis(100);
/// let timed = dflop_balancer::Budget::work(u64::MAX).deadline(move || Instant::now() >= end);
/// ```
pub struct Budget {
    steps_max: u64,
    steps: u64,
    deadline: Option<Box<dyn FnMut() -> bool + Send>>,
    next_look: u64,
    is_cut: bool,
}

impl Budget {
    /// Allows this many work units. A search ends between candidates, so it overshoots by about a thousand.
    #[must_use]
    pub fn work(units: u64) -> Self {
        let steps_max = units.saturating_mul(STEPS_PER_UNIT);
        Self { steps_max, steps: 0, deadline: None, next_look: STEPS_PER_LOOK, is_cut: false }
    }

    /// Ends the search early once `has_passed` returns true; it is polled every few microseconds.
    ///
    /// A result cut short by a deadline is marked as not reproducible: two machines may cut at different
    /// candidates.
    #[must_use]
    pub fn deadline(mut self, has_passed: impl FnMut() -> bool + Send + 'static) -> Self {
        self.deadline = Some(Box::new(has_passed));
        self
    }

    /// Returns the work units spent so far, rounded up.
    #[must_use]
    pub fn work_spent(&self) -> u64 {
        self.steps.div_ceil(STEPS_PER_UNIT)
    }

    /// Whether every machine gets this result: no machine-dependent deadline cut a search short.
    #[must_use]
    pub fn is_reproducible(&self) -> bool {
        !self.is_cut
    }

    /// Returns the elementary steps spent so far.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// Counts elementary steps, 16 to a work unit.
    pub fn spend(&mut self, steps: u64) {
        self.steps = self.steps.saturating_add(steps);
    }

    /// Returns the elementary steps left by work units; nearly unlimited if only a deadline is set.
    #[must_use]
    pub fn steps_left(&self) -> u64 {
        self.steps_max.saturating_sub(self.steps)
    }

    /// Runs part of a search, limited to `steps` elementary steps.
    pub(crate) fn within<R>(&mut self, steps: u64, run: impl FnOnce(&mut Self) -> R) -> R {
        let steps_max = self.steps_max;
        // A part never gets more than the whole search has left.
        self.steps_max = steps_max.min(self.steps.saturating_add(steps));
        let answer = run(self);
        self.steps_max = steps_max;
        answer
    }

    /// Whether nothing is left, by work or by deadline: a search then ends with the best result found.
    pub fn is_spent(&mut self) -> bool {
        if self.steps >= self.steps_max || self.is_cut {
            return true;
        }
        // A clock costs far more than a step, so the deadline is polled only every few thousand steps.
        if self.steps >= self.next_look {
            self.next_look = self.steps + STEPS_PER_LOOK;
            self.is_cut = self.deadline.as_mut().is_some_and(|has_passed| has_passed());
        }
        self.is_cut
    }
}

impl std::fmt::Debug for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Budget")
            .field("work_spent", &self.work_spent())
            .field("is_cut", &self.is_cut)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_steps_are_a_unit() {
        let mut budget = Budget::work(2);
        budget.spend(31);
        assert_eq!((budget.is_spent(), budget.work_spent()), (false, 2));
        budget.spend(1);
        assert_eq!((budget.is_spent(), budget.work_spent()), (true, 2));
        assert!(budget.is_reproducible());
    }

    #[test]
    fn a_passed_deadline_marks_the_budget() {
        let mut budget = Budget::work(u64::MAX).deadline(|| true);
        assert!(!budget.is_spent());
        budget.spend(STEPS_PER_LOOK);
        assert!(budget.is_spent());
        assert!(!budget.is_reproducible());
    }
}
