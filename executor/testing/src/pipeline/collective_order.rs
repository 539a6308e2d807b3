//! All ranks in a group start the same collectives in the same order, and all communication has times.

use std::sync::{Arc, Mutex};

use dflop_comm::Comm;
use dflop_executor::pipeline::{CommunicationKind, TimedCommunication};

use super::divided_gradients::{MICROBATCHES, TestRank, setting};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::hooked::{Call, CallKind, Collective, Hooked};
use crate::support::{Transport, run};

claims! {
    all_ranks_of_a_group_start_the_same_collectives_gathers_before_the_sums_of_the_next_step,
}

/// A collective that a rank started.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    /// Communicator, by its ranks in the job.
    group: Vec<usize>,
    kind: Collective,
    step: u64,
    elements: usize,
}

/// Collectives that a rank has started, over all of its communicators, in their order.
type Log = Arc<Mutex<Vec<Entry>>>;

fn record(log: &Mutex<Vec<Entry>>, call: &Call<'_>) {
    if let CallKind::Started(kind, elements) = call.kind {
        let group = (0..call.comm.size()).map(|rank| call.comm.world_rank(rank)).collect();
        log.lock().unwrap().push(Entry { group, kind, step: call.at.step, elements });
    }
}

/// All communication of a rank has times: sums in every step, gathers behind the first update.
fn assert_has_times(all: &[TimedCommunication], is_updated: bool) {
    let of = |kind| all.iter().filter(move |timed| timed.kind == kind).count();
    let (sums, gathers) = (of(CommunicationKind::ReduceScatter), of(CommunicationKind::AllGather));
    // The tied embedding is gathered like all parameters, and summed completely.
    assert_eq!((sums > 0, gathers), (true, if is_updated { sums + 1 } else { 0 }));
    assert_eq!(of(CommunicationKind::AllReduce), 2, "over both stages, then over replicas");
    assert_eq!(of(CommunicationKind::Activations), MICROBATCHES / 2);
    assert_eq!(of(CommunicationKind::Gradients), MICROBATCHES / 2);
    assert!(all.iter().all(|timed| timed.bytes > 0 && timed.start_ns <= timed.end_ns), "{all:?}");
    for pair in all.windows(2).filter(|pair| pair[0].lane == pair[1].lane) {
        assert!(pair[0].end_ns <= pair[1].start_ns, "{pair:?}");
    }
}

fn all_ranks_of_a_group_start_the_same_collectives_gathers_before_the_sums_of_the_next_step<
    B: TestBackend,
>() {
    let setting = setting(true);
    let logs = run(Transport::Threads, 4, setting.comm, |comm| {
        let (rank, log) = (comm.rank(), Log::default());
        let recorded = Arc::clone(&log);
        let comm = Hooked::new(comm, move |call| record(&recorded, call));
        let mut own = TestRank::new::<B>(&setting, comm);
        for step in 0..3 {
            assert_has_times(&own.step(step).unwrap().communication, step > 0);
        }
        drop(own);
        (rank, Arc::into_inner(log).unwrap().into_inner().unwrap())
    });
    let of_group = |rank: usize, group: &[usize]| -> Vec<&Entry> {
        logs[rank].1.iter().filter(|entry| entry.group == group).collect()
    };
    for (rank, log) in &logs {
        let replicas = log.iter().find(|entry| entry.kind == Collective::AllGather).unwrap().group.clone();
        for entry in log {
            for &other in &entry.group {
                assert_eq!(of_group(*rank, &entry.group), of_group(other, &entry.group), "{rank}, {other}");
            }
        }
        let own = of_group(*rank, &replicas);
        let (count, mut before) = (|kind| own.iter().filter(|entry| entry.kind == kind).count(), (0, false));
        // The tied embedding is summed as a whole, and gathered like all others.
        assert_eq!(count(Collective::AllReduce), 3);
        assert_eq!(count(Collective::ReduceScatter) + 3, count(Collective::AllGather));
        for entry in own {
            let place = (entry.step, entry.kind == Collective::AllGather);
            assert!(place >= before, "{entry:?} comes after {before:?}");
            before = place;
        }
    }
}
