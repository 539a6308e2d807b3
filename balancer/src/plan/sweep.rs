//! From the whole space to the plans that are worth simulating, by branch and bound.
//!
//! Every family's numbers of microbatches are halved as long as the range may hold a plan that enters the list: the
//! estimate of a range is at most that of its plans, and whole families fall by one look.

use super::space::{Candidate, Family, Space};
use std::collections::BinaryHeap;

/// Plans of the sweep, and how many there were.
#[derive(Debug, Clone, Default)]
pub(super) struct Swept {
    /// By estimate, the best first.
    pub(super) candidates: Vec<Candidate>,
    /// Plans that a bound of theirs, or of a range around them, was computed for.
    pub(super) plans: u64,
    /// Whether the candidates are all plans that may fit.
    pub(super) is_all: bool,
}

/// Plans by estimate, the worst on top.
struct Shortlist {
    heap: BinaryHeap<(u64, Candidate)>,
    length_max: usize,
}

impl Shortlist {
    fn new(length_max: usize) -> Self {
        Self { heap: BinaryHeap::with_capacity(length_max + 1), length_max }
    }

    /// What an estimate has to be below to enter.
    fn limit_ns(&self) -> f64 {
        if self.heap.len() < self.length_max {
            return f64::INFINITY;
        }
        self.heap.peek().map_or(f64::INFINITY, |(ns, _)| *ns as f64)
    }

    fn push(&mut self, estimate_ns: f64, candidate: Candidate) {
        self.heap.push((estimate_ns as u64, candidate));
        if self.heap.len() > self.length_max {
            self.heap.pop();
        }
    }
}

impl Space<'_> {
    /// Most microbatches of an LLM rank.
    pub(super) fn microbatches_max(&self, family: &Family) -> u32 {
        self.load.global_batch() / family.llm_dp
    }

    /// Lists the best plans by estimate, one of a family, or all plans if these are at most `all_max`.
    pub(super) fn sweep(&self, length_max: usize, all_max: usize) -> Swept {
        let mut swept = Swept::default();
        let mut families = 0_usize;
        self.visit(|family| {
            swept.plans += u64::from(self.microbatches_max(family));
            families += 1;
        });
        if swept.plans <= all_max as u64 {
            swept.candidates = self.all_that_may_fit();
            swept.is_all = true;
            return swept;
        }
        let mut shortlist = Shortlist::new(length_max);
        self.visit(|family| {
            let many = self.microbatches_max(family);
            let mut best = (shortlist.limit_ns(), None);
            self.least(family, 1, many, &mut best);
            if let (estimate_ns, Some(microbatches)) = best {
                shortlist.push(estimate_ns, Candidate { family: *family, microbatches });
            }
        });
        let sorted = shortlist.heap.into_sorted_vec();
        swept.candidates = sorted.into_iter().map(|(_, candidate)| candidate).collect();
        swept
    }

    /// The number of microbatches in `few..=many` with the least estimate below `best`.
    fn least(&self, family: &Family, few: u32, many: u32, best: &mut (f64, Option<u32>)) {
        let estimate_ns = self.figures(family, few, many).estimate_ns;
        if estimate_ns >= best.0 || !self.may_fit(family, few, many) {
            return;
        }
        if few == many {
            *best = (estimate_ns, Some(few));
            return;
        }
        let middle = few + (many - few) / 2;
        // The half that looks better first, so that the other may fall at once.
        let halves = [(few, middle), (middle + 1, many)];
        let estimates = halves.map(|(few, many)| self.figures(family, few, many).estimate_ns);
        let order = if estimates[1] < estimates[0] { [1, 0] } else { [0, 1] };
        for half in order {
            self.least(family, halves[half].0, halves[half].1, best);
        }
    }

    /// The least bound of all plans that may fit: no plan of the space takes less.
    pub(super) fn least_bound_ns(&self, start_ns: f64) -> f64 {
        let mut least_ns = start_ns;
        self.visit(|family| {
            let mut ranges = vec![(1, self.microbatches_max(family))];
            while let Some((few, many)) = ranges.pop() {
                let bound_ns = self.figures(family, few, many).bound_ns;
                if bound_ns >= least_ns || !self.may_fit(family, few, many) {
                    continue;
                }
                if few == many {
                    least_ns = bound_ns;
                } else {
                    let middle = few + (many - few) / 2;
                    ranges.extend([(middle + 1, many), (few, middle)]);
                }
            }
        });
        least_ns
    }

    fn all_that_may_fit(&self) -> Vec<Candidate> {
        let mut all = Vec::new();
        self.visit(|family| {
            for microbatches in 1..=self.microbatches_max(family) {
                if self.may_fit(family, microbatches, microbatches) {
                    all.push(Candidate { family: *family, microbatches });
                }
            }
        });
        all
    }
}
