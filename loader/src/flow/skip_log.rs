//! Accounts for every sample that was not delivered, under an error budget.

use std::sync::Mutex;

use crate::error::{Error, Result, Skipped};

/// Tolerated number and share of bad samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ErrorBudget {
    /// Tolerated share of the samples seen, 0 to 1.
    pub fraction: f64,
    /// Least number of samples before the share is checked, if the number of all samples is unknown.
    pub samples_min: u64,
    /// Tolerated number of bad samples, in addition to their share; `None` is unlimited.
    pub samples_max: Option<u64>,
}

impl Default for ErrorBudget {
    /// Tolerates 5 % of the epoch's samples; without an index, checked after the first 1,000.
    fn default() -> Self {
        Self { fraction: 0.05, samples_min: 1_000, samples_max: None }
    }
}

impl ErrorBudget {
    /// Tolerates a share of bad samples: 0 for none, 1 for any.
    ///
    /// # Errors
    /// [`Error::Config`] if `fraction` is not between 0 and 1.
    pub fn new(fraction: f64) -> Result<Self> {
        if (0.0..=1.0).contains(&fraction) {
            return Ok(Self { fraction, ..Self::default() });
        }
        let reason = format!("{fraction} is not between 0 and 1");
        Err(Error::Config { setting: "error_budget", reason })
    }

    /// Tolerates at most this many bad samples, and no larger share than before.
    #[must_use]
    pub fn at_most(self, samples: u64) -> Self {
        Self { samples_max: Some(samples), ..self }
    }
}

/// Account of skipped samples; shared by all stages of a loader.
#[derive(Debug)]
pub struct SkipLog {
    budget: ErrorBudget,
    samples_known: Option<u64>,
    state: Mutex<Account>,
}

#[derive(Debug, Default)]
struct Account {
    skipped: Vec<Skipped>,
    /// Number of skipped samples that a setting excludes.
    dropped: u64,
    /// Index of the first bad sample among the skipped.
    first_bad: Option<usize>,
    delivered: u64,
    /// Number of samples skipped before this account started, and the first of them.
    earlier: u64,
    first_earlier: Option<Skipped>,
}

impl Account {
    fn first(&self) -> Option<Skipped> {
        let here = self.first_bad.map(|at| &self.skipped[at]);
        self.first_earlier.as_ref().or(here).cloned()
    }
}

impl SkipLog {
    /// Starts an empty account; `samples_known` is the size of the epoch if an index gives it.
    #[must_use]
    pub fn new(budget: ErrorBudget, samples_known: Option<u64>) -> Self {
        Self { budget, samples_known, state: Mutex::default() }
    }

    /// Continues an earlier account: its samples count, but are not listed again.
    #[must_use]
    pub fn after(self, delivered: u64, skipped: u64, first: Option<Skipped>) -> Self {
        *self.lock() = Account { delivered, earlier: skipped, first_earlier: first, ..Account::default() };
        self
    }

    /// Records something that is not delivered.
    pub fn push(&self, skipped: Skipped) {
        let mut state = self.lock();
        let at = state.skipped.len();
        state.first_bad.get_or_insert(at);
        state.skipped.push(skipped);
    }

    /// Records an intact sample that a setting excludes; it does not count against the budget.
    pub fn push_dropped(&self, dropped: Skipped) {
        let mut state = self.lock();
        state.skipped.push(dropped);
        state.dropped += 1;
    }

    /// Returns the number of intact samples that a setting excluded.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    /// Counts delivered samples.
    pub fn delivered(&self, samples: u64) {
        self.lock().delivered += samples;
    }

    /// Returns everything skipped so far, in the order found.
    #[must_use]
    pub fn skipped(&self) -> Vec<Skipped> {
        self.lock().skipped.clone()
    }

    /// Returns the first skipped sample, including those of an earlier account.
    #[must_use]
    pub fn first(&self) -> Option<Skipped> {
        self.lock().first()
    }

    /// Checks the budget against the samples so far.
    ///
    /// # Errors
    /// [`Error::ErrorBudget`] with the first bad sample, once more than the tolerated share is bad;
    /// [`Error::ErrorCount`] once more than the tolerated number is.
    pub fn check(&self, is_end: bool) -> Result<()> {
        let state = self.lock();
        let bad = state.earlier + state.skipped.len() as u64 - state.dropped;
        let Some(first) = state.first().filter(|_| bad > 0) else { return Ok(()) };
        if let Some(most) = self.budget.samples_max.filter(|&most| bad > most) {
            return Err(Error::ErrorCount { skipped: bad, most, first: Box::new(first) });
        }
        let seen = state.delivered + bad + state.dropped;
        let of = match self.samples_known {
            Some(samples) => samples.max(seen),
            None if is_end || seen >= self.budget.samples_min => seen,
            None => return Ok(()),
        };
        if bad as f64 <= self.budget.fraction * of as f64 {
            return Ok(());
        }
        let first = Box::new(first);
        Err(Error::ErrorBudget { skipped: bad, samples: of, fraction: self.budget.fraction, first })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Account> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad(key: &str) -> Skipped {
        let (shard, reason) = ("s.tar".to_owned(), "bad".to_owned());
        Skipped { shard, offset: 0, key: Some(key.to_owned()), field: None, reason }
    }

    #[test]
    fn a_known_epoch_tolerates_its_share_from_the_start() {
        let log = SkipLog::new(ErrorBudget::default(), Some(40));
        log.push(bad("a"));
        log.push(bad("b"));
        assert!(log.check(false).is_ok());
        log.push(bad("c"));
        let error = log.check(false).unwrap_err().to_string();
        assert!(error.contains("3 of 40"), "{error}");
    }

    #[test]
    fn an_unknown_epoch_is_judged_after_a_thousand_samples_or_at_its_end() {
        let log = SkipLog::new(ErrorBudget::default(), None);
        log.push(bad("a"));
        log.delivered(3);
        assert!(log.check(false).is_ok());
        assert!(log.check(true).is_err());
    }

    #[test]
    fn a_number_is_tolerated_whatever_its_share() {
        let budget = ErrorBudget::new(1.0).unwrap().at_most(1);
        for samples_known in [None, Some(1_000)] {
            let log = SkipLog::new(budget, samples_known);
            log.push(bad("a"));
            assert!(log.check(true).is_ok());
            log.push(bad("b"));
            let error = log.check(false).unwrap_err().to_string();
            assert!(error.contains("2 samples are bad") && error.contains("`a`"), "{error}");
        }
    }

    #[test]
    fn an_earlier_account_counts_and_is_not_listed() {
        let log = SkipLog::new(ErrorBudget::default(), None).after(949, 50, Some(bad("a")));
        log.push(bad("b"));
        assert_eq!(log.skipped(), [bad("b")]);
        let error = log.check(false).unwrap_err().to_string();
        assert!(error.contains("51 of 1000") && error.contains("`a`"), "{error}");
    }

    #[test]
    fn what_a_setting_drops_is_listed_and_costs_no_budget() {
        let log = SkipLog::new(ErrorBudget::new(0.0).unwrap(), Some(40));
        log.push_dropped(bad("a"));
        assert!(log.check(true).is_ok());
        assert_eq!((log.skipped().len(), log.dropped()), (1, 1));
    }

    #[test]
    fn a_share_outside_zero_to_one_is_refused() {
        assert!(ErrorBudget::new(1.5).is_err());
        assert!(ErrorBudget::new(f64::NAN).is_err());
    }
}
