//! Collectives in progress: ranks first compare descriptions, then MPI runs the collective.

use dflop_comm::{Buffer, Dtype, PayloadShape, StepContext};

use crate::header::{CONTEXT_WORDS, code, context_from_words, context_words, dtype};
use crate::raw::{Channel, Combination, Pending};

/// Number of words by which ranks name a collective.
const WORDS: usize = CONTEXT_WORDS + 4;

/// Collective kind, with arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce,
    ReduceScatter(Vec<usize>),
    AllGather(Vec<usize>),
    Broadcast(usize),
    Barrier,
    /// Creates communicators; the elements are color and key of every rank.
    Split,
}

/// Collective that a caller has started.
#[derive(Debug)]
pub(crate) struct Collective {
    /// Channel index.
    pub(crate) channel: usize,
    pub(crate) kind: Kind,
    pub(crate) at: StepContext,
    pub(crate) buffer: Buffer,
    /// Operation number.
    pub(crate) number: u64,
}

/// Collective that runs.
pub(crate) struct Running {
    collective: Collective,
    stage: Stage,
}

enum Stage {
    /// Compares digests of the collectives on all ranks.
    Compare(Pending),
    /// Gathers the collectives, as they differ.
    Explain(Pending),
    Run(Pending),
}

/// Progress of a collective.
pub(crate) enum Progress {
    Running(Running),
    Done(Collective, Buffer),
    Differs(Difference),
}

/// Collective that differs from the majority.
pub(crate) struct Difference {
    /// World rank that differs.
    pub(crate) rank: usize,
    pub(crate) at: StepContext,
    pub(crate) message: String,
}

impl Kind {
    fn code(&self) -> u64 {
        match self {
            Self::AllReduce => 0,
            Self::ReduceScatter(_) => 1,
            Self::AllGather(_) => 2,
            Self::Broadcast(_) => 3,
            Self::Barrier => 4,
            Self::Split => 5,
        }
    }

    fn arguments(&self) -> &[usize] {
        match self {
            Self::ReduceScatter(parts) | Self::AllGather(parts) => parts,
            Self::Broadcast(root) => std::slice::from_ref(root),
            Self::AllReduce | Self::Barrier | Self::Split => &[],
        }
    }
}

fn name(code: u64) -> &'static str {
    let names = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "barrier", "split"];
    names.get(code as usize).copied().unwrap_or("unknown collective")
}

impl Collective {
    /// Returns the words that the ranks compare: kind, step, microbatch, element type and count, arguments.
    fn words(&self) -> Vec<u64> {
        let mut words = context_words(self.at);
        let digest = self.kind.arguments().iter().fold(0, |digest, &word| mix(digest, word as u64));
        words.extend([self.kind.code(), code(self.buffer.dtype()), self.buffer.elements() as u64, digest]);
        words
    }

    /// Starts to compare.
    pub(crate) fn start(self, channel: &Channel) -> Running {
        // Action names may differ, as in messages.
        let words = self.words();
        let digest =
            words[..2].iter().chain(&words[CONTEXT_WORDS..]).fold(1, |digest, &word| mix(digest, word));
        // The maximum digest and the maximum inverted digest belong together if all digests are the same.
        let stage = Stage::Compare(channel.all_reduce(Buffer::U64(vec![digest, !digest]), Combination::Max));
        Running { collective: self, stage }
    }

    fn run(&mut self, channel: &Channel) -> Pending {
        let buffer = std::mem::replace(&mut self.buffer, Buffer::U8(Vec::new()));
        match &self.kind {
            Kind::AllReduce => channel.all_reduce(buffer, Combination::Sum),
            Kind::ReduceScatter(parts) => channel.reduce_scatter(buffer, parts),
            Kind::AllGather(parts) => channel.all_gather(buffer, parts),
            Kind::Broadcast(root) => channel.broadcast(buffer, *root),
            Kind::Barrier => channel.barrier(),
            Kind::Split => {
                let part = buffer.elements() / channel.size();
                channel.all_gather(buffer, &vec![part; channel.size()])
            }
        }
    }
}

impl Running {
    /// Lets MPI work on the collective.
    ///
    /// - `members`: world rank for every rank in the channel
    pub(crate) fn advance(mut self, channel: &Channel, members: &[usize]) -> Progress {
        let pending = match &mut self.stage {
            Stage::Compare(pending) | Stage::Explain(pending) | Stage::Run(pending) => pending,
        };
        let Some((result, _)) = pending.test() else { return Progress::Running(self) };
        let words = if let Buffer::U64(words) = &result { words.as_slice() } else { &[] };
        self.stage = match self.stage {
            Stage::Compare(_) if words[0] == !words[1] => Stage::Run(self.collective.run(channel)),
            Stage::Compare(_) => {
                let mut all = vec![0; WORDS * channel.size()];
                all[WORDS * channel.rank()..][..WORDS].copy_from_slice(&self.collective.words());
                Stage::Explain(channel.all_gather(Buffer::U64(all), &vec![WORDS; channel.size()]))
            }
            Stage::Explain(_) => {
                return Progress::Differs(difference(words, members, self.collective.at));
            }
            Stage::Run(_) => return Progress::Done(self.collective, result),
        };
        Progress::Running(self)
    }
}

/// Describes the first rank that differs from the majority.
fn difference(words: &[u64], members: &[usize], at: StepContext) -> Difference {
    let all: Vec<&[u64]> = words.chunks(WORDS).collect();
    let compared = |words: &[u64]| [&words[..2], &words[CONTEXT_WORDS..]].concat();
    let count = |words: &[u64]| all.iter().filter(|other| compared(other) == compared(words)).count();
    let most = all.iter().map(|words| count(words)).max().unwrap_or(0);
    let usual = all.iter().position(|words| count(words) == most).unwrap_or(0);
    let odd = all.iter().position(|words| compared(words) != compared(all[usual])).unwrap_or(0);
    let describe = |words: &[u64]| {
        let rest = &words[CONTEXT_WORDS..];
        let dtype: Dtype = dtype(rest[1]);
        let shape = PayloadShape::flat(dtype, rest[2] as usize);
        format!("{} of {shape} at {}", name(rest[0]), context_from_words(words))
    };
    let message = format!(
        "rank {} starts {}, but rank {} {}: their plans differ",
        members[odd],
        describe(all[odd]),
        members[usual],
        describe(all[usual])
    );
    Difference { rank: members[odd], at, message }
}

/// Mixes a word into a digest (the finalizer of splitmix64).
pub(crate) fn mix(digest: u64, word: u64) -> u64 {
    let mut mixed = (digest ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
