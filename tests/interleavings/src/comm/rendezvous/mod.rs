//! Values for job keys.

#[path = "../../../../../executor/comm/src/rendezvous/protocol.rs"]
mod protocol;
#[path = "../../../../../executor/comm/src/rendezvous/values.rs"]
mod values;

use crate::model::Model;
use crate::sync::thread;
use protocol::ReplyKind;
use std::sync::Arc;
use std::time::Duration;
use values::Values;

const LONG: Duration = Duration::from_hours(24);

pub(super) fn models() -> Vec<Model> {
    vec![
        Model { name: "rendezvous: a value reaches every rank that waits", run: values_reach_all },
        Model { name: "rendezvous: a lost rank ends all waits by its number", run: a_lost_rank_ends_waits },
        Model { name: "rendezvous: a server that goes ends all waits", run: the_end_ends_waits },
        Model { name: "rendezvous: a barrier opens once for all", run: a_barrier_opens },
    ]
}

fn values_reach_all() {
    let values = Arc::new(Values::default());
    let ranks: Vec<_> = (0..3_usize)
        .map(|rank| {
            let values = values.clone();
            thread::spawn(move || {
                assert!(values.admit(rank));
                values.join(rank);
                let (set, _) = values.set(format!("key/{rank}"), vec![rank as u8]);
                assert_eq!(set, ReplyKind::Value);
                let found = values.exchange_address(rank, vec![rank as u8], 3, LONG);
                assert_eq!(found, (ReplyKind::Value, vec![0, b'\n', 1, b'\n', 2]));
                for peer in 0..3 {
                    let found = values.wait(&format!("key/{peer}"), LONG);
                    assert_eq!(found, (ReplyKind::Value, vec![peer as u8]));
                }
            })
        })
        .collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
    assert_eq!(values.joined(), 3);
}

fn a_lost_rank_ends_waits() {
    let values = Arc::new(Values::default());
    let waiting: Vec<_> = (0..2)
        .map(|rank| {
            let values = values.clone();
            thread::spawn(move || {
                assert_eq!(values.exchange_address(rank, Vec::new(), 3, LONG).0, ReplyKind::Lost);
                assert_eq!(values.wait("never", LONG).0, ReplyKind::Lost);
            })
        })
        .collect();
    values.admit(2);
    values.join(2);
    values.lose(2);
    waiting.into_iter().for_each(|rank| rank.join().unwrap());
    assert_eq!(values.wait("never", LONG), (ReplyKind::Lost, 2_u32.to_le_bytes().to_vec()));
    // a peer that never knew about the admission may come again, and ends nothing
    let values = Values::default();
    assert!(values.admit(1));
    values.lose(1);
    assert!(values.admit(1));
}

fn the_end_ends_waits() {
    let values = Arc::new(Values::default());
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let values = values.clone();
            thread::spawn(move || assert_eq!(values.wait("never", LONG).0, ReplyKind::TimedOut))
        })
        .collect();
    values.close();
    waiting.into_iter().for_each(|rank| rank.join().unwrap());
}

fn a_barrier_opens() {
    let values = Arc::new(Values::default());
    let ranks: Vec<_> = (0..3)
        .map(|_| {
            let values = values.clone();
            thread::spawn(move || {
                if values.count("barrier".into()).1 == 3_u64.to_le_bytes() {
                    assert_eq!(values.set("open".into(), Vec::new()).0, ReplyKind::Value);
                }
                assert_eq!(values.wait("open", LONG).0, ReplyKind::Value);
            })
        })
        .collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}
