//! MPI communicators for collectives, each of which runs one collective at a time.

use std::collections::VecDeque;

use dflop_comm::{Buffer, Cause};

use crate::collective::{Collective, Difference, Kind, Progress, Running, mix};
use crate::raw::Channel;
use crate::shared::Shared;

/// Communicator number for all ranks.
pub(crate) const WORLD: u64 = 0;
/// Number of words that a rank passes to a split: whether it has a color, the color, the key.
pub(crate) const SPLIT_WORDS: usize = 3;
const NO_CHANNEL: u64 = u64::MAX;

/// Communicators of a rank, in creation order.
pub(crate) struct Channels(Vec<Member>);

/// Communicator that this rank is a member of.
struct Member {
    channel: Channel,
    /// Distinguishes messages in different communicators.
    id: u64,
    /// World rank for every rank.
    ranks: Vec<usize>,
    queue: VecDeque<Collective>,
    running: Option<Running>,
    splits: u64,
}

/// Part of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitPart {
    pub(crate) id: u64,
    pub(crate) channel: usize,
    /// World rank for every rank.
    pub(crate) members: Vec<usize>,
}

impl Member {
    fn new(channel: Channel, id: u64, ranks: Vec<usize>) -> Self {
        Self { channel, id, ranks, queue: VecDeque::new(), running: None, splits: 0 }
    }
}

impl Channels {
    pub(crate) fn new(world: Channel) -> Self {
        let ranks = (0..world.size()).collect();
        Self(vec![Member::new(world, WORLD, ranks)])
    }

    /// Queues a collective after the queued collectives in the same communicator.
    pub(crate) fn queue(&mut self, collective: Collective) {
        self.0[collective.channel].queue.push_back(collective);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.0.iter().all(|member| member.queue.is_empty() && member.running.is_none())
    }

    /// Lets MPI work on the collectives; returns whether any has ended or begun.
    pub(crate) fn advance(&mut self, shared: &Shared) -> bool {
        let mut is_busy = false;
        for index in 0..self.0.len() {
            let member = &mut self.0[index];
            let Some(running) = member.running.take().or_else(|| {
                let next = member.queue.pop_front()?;
                is_busy = true;
                Some(next.start(&member.channel))
            }) else {
                continue;
            };
            match running.advance(&member.channel, &member.ranks) {
                Progress::Running(running) => member.running = Some(running),
                Progress::Done(collective, result) => {
                    is_busy = true;
                    let result =
                        if collective.kind == Kind::Split { self.split(index, &result) } else { result };
                    shared.lock().complete(collective.number, Some(result));
                    shared.changed.notify_all();
                }
                Progress::Differs(Difference { rank, at, message }) => {
                    is_busy = true;
                    // The caller learns about it like any failure.
                    drop(shared.fail(shared.failure(Cause::Mismatch, Some(rank), at, message)));
                }
            }
        }
        is_busy
    }

    /// Creates the part on this rank; all ranks in the communicator have entered the split.
    fn split(&mut self, index: usize, words: &Buffer) -> Buffer {
        let Buffer::U64(words) = words else { return Buffer::U64(vec![NO_CHANNEL]) };
        let member = &mut self.0[index];
        let row = |rank: usize| &words[SPLIT_WORDS * rank..][..SPLIT_WORDS];
        let own = row(member.channel.rank());
        // MPI colors and keys are small numbers: the first rank with a color, and the position in it.
        let mut ranks: Vec<usize> =
            (0..member.channel.size()).filter(|&rank| row(rank)[..2] == own[..2]).collect();
        let color = (own[0] == 1).then(|| ranks[0]);
        ranks.sort_by_key(|&rank| (row(rank)[2], rank));
        let key = ranks.iter().position(|&rank| rank == member.channel.rank()).unwrap_or(0);
        let id = [member.splits, own[1]].into_iter().fold(mix(1, member.id), mix) | 1;
        member.splits += 1;
        let Some(channel) = member.channel.split(color, key) else { return Buffer::U64(vec![NO_CHANNEL]) };
        let ranks: Vec<usize> = ranks.into_iter().map(|rank| member.ranks[rank]).collect();
        let mut result = vec![self.0.len() as u64, id];
        result.extend(ranks.iter().map(|&rank| rank as u64));
        self.0.push(Member::new(channel, id, ranks));
        Buffer::U64(result)
    }
}

impl SplitPart {
    /// Reads a split result; `None` for a rank without a color.
    pub(crate) fn read(result: &Buffer) -> Option<Self> {
        let Buffer::U64(words) = result else { return None };
        let [channel, id, members @ ..] = words.as_slice() else { return None };
        let members = members.iter().map(|&rank| rank as usize).collect();
        (*channel != NO_CHANNEL).then_some(Self { id: *id, channel: *channel as usize, members })
    }
}
