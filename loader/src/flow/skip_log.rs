//! Accounts for every sample that was not delivered, under an error budget, and for samples that preparation
//! changed.
//!
//! The account counts all skipped samples exactly and lists the first 1,000; memory use does not grow with
//! the number.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{BudgetError, Error, Result, Skipped};

/// Tolerated number and fraction of bad samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ErrorBudget {
    /// Tolerated fraction of the samples seen, 0 to 1.
    pub fraction: f64,
    /// Minimum number of samples before the fraction is checked, if the total is unknown.
    pub samples_min: u64,
    /// Tolerated number of bad samples, in addition to the fraction; `None` is unlimited.
    pub samples_max: Option<u64>,
}

impl Default for ErrorBudget {
    /// Tolerates 5 % bad samples per epoch; without an index, checked after the first 1,000.
    fn default() -> Self {
        Self { fraction: 0.05, samples_min: 1_000, samples_max: None }
    }
}

impl ErrorBudget {
    /// Tolerates a fraction of bad samples: 0 for none, from the first sample on, 1 for any.
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

    /// Tolerates at most `samples` bad samples, and no larger fraction than before.
    #[must_use]
    pub fn at_most(self, samples: u64) -> Self {
        Self { samples_max: Some(samples), ..self }
    }
}

/// Maximum number of samples that an account lists.
const LISTED_MAX: usize = 1_000;
/// Maximum number of distinct (shard, reason) pairs counted separately.
const COUNTED_MAX: usize = 4_096;
/// Reason for samples that are not counted separately.
const OTHER_REASONS: &str = "other reasons";

/// Listener that receives every skipped sample, also samples that the account does not list.
pub trait SkipListener: Debug + Send + Sync {
    /// Receives a sample that is not delivered, once for each epoch in which it is skipped.
    fn skipped(&self, skipped: &Skipped);
}

/// Number of samples in a shard that were skipped for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SkipCount {
    /// Shard name.
    pub shard: String,
    /// Reason, or `other reasons` beyond the first 4,096 (shard, reason) pairs.
    pub reason: String,
    /// Number of samples, summed over epochs.
    pub samples: u64,
}

/// Account of skipped samples; shared by all loader stages.
#[derive(Debug)]
pub struct SkipLog {
    budget: ErrorBudget,
    samples_known: Option<u64>,
    listener: Option<Arc<dyn SkipListener>>,
    hasher: RandomState,
    state: Mutex<Account>,
}

#[derive(Debug, Default)]
struct Account {
    /// The first skipped samples, each once.
    listed: Vec<Skipped>,
    /// Hashes of shard, offset and field for the listed samples.
    listed_hashes: HashSet<u64>,
    last: Option<Skipped>,
    /// Samples by shard and reason.
    counts: BTreeMap<String, BTreeMap<String, u64>>,
    /// Number of pairs in `counts`.
    counted: usize,
    /// Number of skipped samples, including samples that a setting excludes.
    skipped: u64,
    /// Number of skipped samples that a setting excludes.
    dropped: u64,
    first_bad: Option<Skipped>,
    /// Whether any sample was found, delivered or not.
    has_samples: bool,
    delivered: u64,
    /// Number of samples skipped before this account started; `first_earlier` is the first.
    earlier: u64,
    first_earlier: Option<Skipped>,
}

impl Account {
    fn first(&self) -> Option<Skipped> {
        self.first_earlier.as_ref().or(self.first_bad.as_ref()).cloned()
    }

    fn push(&mut self, skipped: Skipped, hash: u64) {
        self.skipped += 1;
        self.has_samples |= skipped.key.is_some();
        self.count(&skipped);
        if self.listed.len() < LISTED_MAX && self.listed_hashes.insert(hash) {
            self.listed.push(skipped.clone());
        }
        self.last = Some(skipped);
    }

    fn count(&mut self, skipped: &Skipped) {
        let is_full = self.counted >= COUNTED_MAX;
        if !self.counts.contains_key(&skipped.shard) {
            self.counts.insert(skipped.shard.clone(), BTreeMap::new());
        }
        let Some(reasons) = self.counts.get_mut(&skipped.shard) else { return };
        let reason =
            if is_full && !reasons.contains_key(&skipped.reason) { OTHER_REASONS } else { &skipped.reason };
        if let Some(samples) = reasons.get_mut(reason) {
            *samples += 1;
        } else {
            reasons.insert(reason.to_owned(), 1);
            self.counted += 1;
        }
    }
}

impl SkipLog {
    /// Starts an empty account; `samples_known` is the epoch size if an index is available.
    #[must_use]
    pub fn new(budget: ErrorBudget, samples_known: Option<u64>) -> Self {
        Self { budget, samples_known, listener: None, hasher: RandomState::new(), state: Mutex::default() }
    }

    /// Notifies a listener of every skipped sample.
    #[must_use]
    pub fn listener(self, listener: Option<Arc<dyn SkipListener>>) -> Self {
        Self { listener, ..self }
    }

    /// Continues an earlier account: earlier samples count, but are not listed again.
    #[must_use]
    pub fn after(self, delivered: u64, skipped: u64, first: Option<Skipped>) -> Self {
        let has_samples = delivered > 0 || first.as_ref().is_some_and(|first| first.key.is_some());
        *self.lock() =
            Account { delivered, earlier: skipped, first_earlier: first, has_samples, ..Account::default() };
        self
    }

    /// Records something that is not delivered.
    pub fn push(&self, skipped: Skipped) {
        self.announce(&skipped);
        let hash = self.hash(&skipped);
        let mut state = self.lock();
        if state.first_bad.is_none() {
            state.first_bad = Some(skipped.clone());
        }
        state.push(skipped, hash);
    }

    /// Records an intact sample that a setting excludes; it does not count against the budget.
    pub fn push_dropped(&self, dropped: Skipped) {
        self.announce(&dropped);
        let hash = self.hash(&dropped);
        let mut state = self.lock();
        state.push(dropped, hash);
        state.dropped += 1;
    }

    fn announce(&self, skipped: &Skipped) {
        if let Some(listener) = &self.listener {
            listener.skipped(skipped);
        }
    }

    fn hash(&self, skipped: &Skipped) -> u64 {
        self.hasher.hash_one((&skipped.shard, skipped.offset, &skipped.key, &skipped.field))
    }

    /// Returns the number of intact samples that a setting excluded.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    /// Counts delivered samples.
    pub fn delivered(&self, samples: u64) {
        let mut state = self.lock();
        state.delivered += samples;
        state.has_samples |= samples > 0;
    }

    /// Returns the first 1,000 skipped samples in the order found, each once, however many epochs it is
    /// skipped in.
    #[must_use]
    pub fn skipped(&self) -> Vec<Skipped> {
        self.lock().listed.clone()
    }

    /// Returns the number of skipped samples, summed over epochs.
    #[must_use]
    pub fn skipped_samples(&self) -> u64 {
        self.lock().skipped
    }

    /// Returns the number of samples so far, delivered or skipped.
    pub(crate) fn samples(&self) -> u64 {
        let state = self.lock();
        state.delivered + state.earlier + state.skipped
    }

    /// Returns the number of skipped samples per shard and reason.
    #[must_use]
    pub fn counts(&self) -> Vec<SkipCount> {
        let state = self.lock();
        let counts = state.counts.iter().flat_map(|(shard, reasons)| {
            let count = |(reason, samples): (&String, &u64)| SkipCount {
                shard: shard.clone(),
                reason: reason.clone(),
                samples: *samples,
            };
            reasons.iter().map(count)
        });
        counts.collect()
    }

    /// Returns the first bad sample, including samples from an earlier account.
    #[must_use]
    pub fn first(&self) -> Option<Skipped> {
        self.lock().first()
    }

    /// Returns the sample that was skipped last.
    #[must_use]
    pub fn last(&self) -> Option<Skipped> {
        self.lock().last.clone()
    }

    /// Checks the budget against the samples so far.
    ///
    /// # Errors
    /// [`Error::ErrorBudget`] with the first bad sample, once more than the tolerated share is bad;
    /// [`Error::ErrorBudget`] once more than the tolerated number is.
    pub fn check(&self, is_end: bool) -> Result<()> {
        let state = self.lock();
        let bad = state.earlier + state.skipped - state.dropped;
        let Some(first) = state.first().filter(|_| bad > 0) else { return Ok(()) };
        // Fractions and numbers mean nothing where no sample was seen.
        let over = |error| {
            if state.has_samples {
                error
            } else {
                BudgetError::NoSample { bad, first: Box::new(first.clone()) }
            }
        };
        if let Some(most) = self.budget.samples_max.filter(|&most| bad > most) {
            let first = Box::new(first.clone());
            return Err(Error::ErrorBudget(over(BudgetError::Count { skipped: bad, most, first })));
        }
        let seen = state.delivered + bad + state.dropped;
        let of = match self.samples_known {
            Some(samples) => samples.max(seen),
            // No later sample can make up for a bad sample at a zero tolerance.
            None if is_end || seen >= self.budget.samples_min || self.budget.fraction == 0.0 => seen,
            None => return Ok(()),
        };
        if bad as f64 <= self.budget.fraction * of as f64 {
            return Ok(());
        }
        let (first_bad, fraction) = (Box::new(first.clone()), self.budget.fraction);
        Err(Error::ErrorBudget(over(BudgetError::Share {
            skipped: bad,
            samples: of,
            fraction,
            first: first_bad,
        })))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Account> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Samples that a report lists; further ones are only counted.
const NAMED_MAX: usize = 1_000;

/// Sample whose text was cut to fit the token limit.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TruncatedSample {
    /// Shard URL.
    pub shard: String,
    /// Sample key.
    pub key: String,
    /// Tokens before the cut.
    pub tokens: u64,
    /// Tokens that were cut.
    pub cut_tokens: u64,
}

/// Preparation totals so far, over all delivered samples.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct PrepareReport {
    /// Samples prepared.
    pub samples: u64,
    /// Number of tokens in these samples.
    pub tokens: u64,
    /// Number of planned tokens in these samples, from text estimates.
    pub planned_tokens: u64,
    /// Tokens that the loss is computed on.
    pub target_tokens: u64,
    /// Planned tokens that the loss is computed on.
    pub planned_target_tokens: u64,
    /// Number of samples whose text was cut.
    pub truncated_samples: u64,
    /// The first 1,000 samples whose text was cut.
    pub truncated: Vec<TruncatedSample>,
    /// Number of samples dropped for excessive length; each is also listed among the skipped samples.
    pub dropped_samples: u64,
    /// Number of microbatches with more tokens than the planned cap.
    pub microbatches_over_cap: u64,
    /// Number of tokens in the longest microbatch.
    pub microbatch_tokens_max: u64,
}

/// Collects a [`PrepareReport`].
#[derive(Debug, Default)]
pub(crate) struct PrepareLog(Mutex<PrepareReport>);

impl PrepareLog {
    pub(crate) fn report(&self) -> PrepareReport {
        self.change(|report| report.clone())
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut PrepareReport) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn truncated(&self, truncated: TruncatedSample) {
        self.change(|report| {
            report.truncated_samples += 1;
            if report.truncated.len() < NAMED_MAX {
                report.truncated.push(truncated);
            }
        });
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
    fn without_any_sample_the_shard_is_what_is_reported() {
        let page = || Skipped { key: None, reason: "this is an HTML page".into(), ..bad("") };
        for budget in
            [ErrorBudget::default(), ErrorBudget::new(0.0).unwrap(), ErrorBudget::default().at_most(0)]
        {
            let log = SkipLog::new(budget, None);
            log.push(page());
            let error = log.check(true).unwrap_err().to_string();
            assert!(error.starts_with("no sample was found") && error.contains("HTML page"), "{error}");
            let log = SkipLog::new(budget, None);
            log.delivered(1);
            log.push(page());
            assert!(log.check(true).unwrap_err().to_string().contains("over the error budget"));
        }
    }

    #[test]
    fn a_share_of_zero_tolerates_no_bad_sample() {
        for samples_known in [None, Some(1_000)] {
            let log = SkipLog::new(ErrorBudget::new(0.0).unwrap(), samples_known);
            log.delivered(3);
            assert!(log.check(false).is_ok());
            log.push(bad("a"));
            assert!(log.check(false).is_err());
        }
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
    fn memory_does_not_grow_with_the_number_of_skipped_samples() {
        #[derive(Debug, Default)]
        struct Heard(Mutex<u64>);
        impl SkipListener for Heard {
            fn skipped(&self, _skipped: &Skipped) {
                *self.0.lock().unwrap() += 1;
            }
        }
        let heard = Arc::new(Heard::default());
        let log = SkipLog::new(ErrorBudget::new(1.0).unwrap(), None).listener(Some(heard.clone()));
        for _epoch in 0..2 {
            for number in 0..6_000_u64 {
                log.push(Skipped { offset: number, reason: format!("reason {number}"), ..bad("a") });
            }
        }
        let (listed, counts) = (log.skipped(), log.counts());
        assert_eq!((listed.len(), log.skipped_samples(), *heard.0.lock().unwrap()), (1_000, 12_000, 12_000));
        assert!(listed.iter().zip(0..).all(|(skipped, number)| skipped.offset == number), "each once");
        assert_eq!(counts.len(), COUNTED_MAX + 1);
        assert_eq!(counts.iter().map(|count| count.samples).sum::<u64>(), 12_000);
        assert!(counts.iter().any(|count| count.reason == OTHER_REASONS));
        assert_eq!(log.last().unwrap().offset, 5_999);
    }

    #[test]
    fn a_share_outside_zero_to_one_is_refused() {
        assert!(ErrorBudget::new(1.5).is_err());
        assert!(ErrorBudget::new(f64::NAN).is_err());
    }
}
