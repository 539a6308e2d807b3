//! Pipeline schedules as pure data: what each stage does, in order.
//!
//! A *schedule* is a list of [`Action`]s per pipeline stage. The simulator sums predicted times over the
//! very lists that an executor runs. Lists are safe whether a send returns at once or waits for its
//! receive: between neighbours, the gradient always travels before the next activation does.

mod gpipe;
mod one_forward_one_backward;

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// One thing that a stage does, with the index of the microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Receives the activations of a microbatch from the stage before.
    Recv(u32),
    /// Computes the stage's layers, and keeps what the backward pass needs.
    Forward(u32),
    /// Sends the activations to the stage after.
    Send(u32),
    /// Receives the gradient of the activations from the stage after.
    RecvGrad(u32),
    /// Computes the gradients, and frees what the forward pass kept.
    Backward(u32),
    /// Sends the gradient of the received activations to the stage before.
    SendGrad(u32),
}

/// Which schedule; written and read as `gpipe` and `1f1b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScheduleKind {
    /// All forward passes, then all backward passes. Keeps every microbatch in memory.
    GPipe,
    /// One forward, one backward. Keeps at most `stages - stage` microbatches in memory.
    OneForwardOneBackward,
}

impl ScheduleKind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::GPipe, Self::OneForwardOneBackward];

    /// Returns the name that [`FromStr`] reads.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| Error::Config {
            setting: "schedule",
            reason: format!("`{name}` is not in {}", names()),
        })
    }
}

/// Lists what one stage does in a step of `microbatches` microbatches.
///
/// Each microbatch is computed once forward and once backward; the first stage receives no activations
/// and the last no gradients.
///
/// # Panics
/// If `stage` is not below `stages`.
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::{Action::*, ScheduleKind, schedule};
///
/// let last = schedule(ScheduleKind::OneForwardOneBackward, 1, 2, 2);
/// assert_eq!(
///     last,
///     [Recv(0), Forward(0), Backward(0), SendGrad(0), Recv(1), Forward(1), Backward(1), SendGrad(1)]
/// );
/// ```
#[must_use]
pub fn schedule(kind: ScheduleKind, stage: usize, stages: usize, microbatches: usize) -> Vec<Action> {
    assert!(stage < stages, "stage {stage} of {stages}");
    match kind {
        ScheduleKind::GPipe => gpipe::actions(stage, stages, microbatches as u32),
        ScheduleKind::OneForwardOneBackward => {
            one_forward_one_backward::actions(stage, stages, microbatches as u32)
        }
    }
}

/// A list under construction; knows which neighbours the stage has.
struct Actions {
    list: Vec<Action>,
    is_first: bool,
    is_last: bool,
}

impl Actions {
    fn new(stage: usize, stages: usize) -> Self {
        Self { list: Vec::new(), is_first: stage == 0, is_last: stage + 1 == stages }
    }

    /// Receives and computes.
    fn forward(&mut self, microbatch: u32) {
        if !self.is_first {
            self.list.push(Action::Recv(microbatch));
        }
        self.list.push(Action::Forward(microbatch));
    }

    fn send(&mut self, microbatch: u32) {
        if !self.is_last {
            self.list.push(Action::Send(microbatch));
        }
    }

    fn recv_grad(&mut self, microbatch: u32) {
        if !self.is_last {
            self.list.push(Action::RecvGrad(microbatch));
        }
    }

    /// Computes and sends the gradient.
    fn backward(&mut self, microbatch: u32) {
        self.list.push(Action::Backward(microbatch));
        if !self.is_first {
            self.list.push(Action::SendGrad(microbatch));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kind and size worth trying: the lists of all stages.
    fn lists() -> impl Iterator<Item = (ScheduleKind, usize, Vec<Vec<Action>>)> {
        ScheduleKind::ALL.into_iter().flat_map(|kind| {
            (1..=7).flat_map(move |stages| {
                (0..=12).map(move |microbatches| {
                    let lists = (0..stages).map(|stage| schedule(kind, stage, stages, microbatches));
                    (kind, microbatches, lists.collect())
                })
            })
        })
    }

    fn microbatches_of(list: &[Action], wanted: fn(u32) -> Action) -> Vec<u32> {
        let microbatch = |action: &Action| match *action {
            Action::Recv(microbatch)
            | Action::Forward(microbatch)
            | Action::Send(microbatch)
            | Action::RecvGrad(microbatch)
            | Action::Backward(microbatch)
            | Action::SendGrad(microbatch) => microbatch,
        };
        list.iter().filter(|action| **action == wanted(microbatch(action))).map(microbatch).collect()
    }

    #[test]
    fn each_microbatch_is_once_forward_and_then_once_backward() {
        for (_, microbatches, lists) in lists() {
            let all: Vec<u32> = (0..microbatches as u32).collect();
            for list in &lists {
                assert_eq!(microbatches_of(list, Action::Forward), all);
                assert_eq!(microbatches_of(list, Action::Backward), all);
                let at = |wanted| list.iter().position(|action| *action == wanted);
                assert!(all.iter().all(|&mb| at(Action::Forward(mb)) < at(Action::Backward(mb))));
            }
        }
    }

    #[test]
    fn every_send_has_its_receive_in_the_same_order() {
        for (_, _, lists) in lists() {
            assert!(microbatches_of(&lists[0], Action::Recv).is_empty());
            assert!(microbatches_of(lists.last().unwrap(), Action::RecvGrad).is_empty());
            for pair in lists.windows(2) {
                assert_eq!(microbatches_of(&pair[0], Action::Send), microbatches_of(&pair[1], Action::Recv));
                assert_eq!(
                    microbatches_of(&pair[1], Action::SendGrad),
                    microbatches_of(&pair[0], Action::RecvGrad)
                );
            }
        }
    }

    #[test]
    fn microbatches_in_flight_stay_within_their_bound() {
        for (kind, microbatches, lists) in lists() {
            for (stage, list) in lists.iter().enumerate() {
                let (mut in_flight, mut most) = (0, 0);
                for action in list {
                    match action {
                        Action::Forward(_) => in_flight += 1,
                        Action::Backward(_) => in_flight -= 1,
                        _ => {}
                    }
                    most = most.max(in_flight);
                }
                let bound = match kind {
                    ScheduleKind::GPipe => microbatches,
                    ScheduleKind::OneForwardOneBackward => microbatches.min(lists.len() - stage),
                };
                assert_eq!(most, bound);
            }
        }
    }

    /// Runs lists in which a send waits for its receive; returns whether all end.
    fn ends_with_waiting_sends(lists: &[Vec<Action>]) -> bool {
        let mut next = vec![0; lists.len()];
        loop {
            let action = |stage: usize, next: &[usize]| lists[stage].get(next[stage]).copied();
            let before = next.clone();
            for stage in 0..lists.len() {
                match action(stage, &next) {
                    Some(Action::Forward(_) | Action::Backward(_)) => next[stage] += 1,
                    Some(Action::Send(mb)) if action(stage + 1, &next) == Some(Action::Recv(mb)) => {
                        next[stage] += 1;
                        next[stage + 1] += 1;
                    }
                    Some(Action::SendGrad(mb)) if action(stage - 1, &next) == Some(Action::RecvGrad(mb)) => {
                        next[stage] += 1;
                        next[stage - 1] += 1;
                    }
                    _ => {}
                }
            }
            if before == next {
                return lists.iter().zip(&next).all(|(list, next)| list.len() == *next);
            }
        }
    }

    #[test]
    fn no_stage_waits_for_ever_even_if_sends_wait_for_receives() {
        for (kind, microbatches, lists) in lists() {
            assert!(ends_with_waiting_sends(&lists), "{kind} {} x {microbatches}", lists.len());
        }
    }

    #[test]
    fn every_name_is_read_back() {
        for kind in ScheduleKind::ALL {
            assert_eq!(kind.name().parse::<ScheduleKind>().unwrap(), kind);
        }
        assert!("zero".parse::<ScheduleKind>().is_err());
    }
}
