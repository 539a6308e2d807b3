//! Processes that share a cache, with all step interleavings: one writer per shard, whole shards, bounded
//! bytes.
//!
//! A process is a separate [`Directory`]: file locks hold between two open file handles, wherever they are. A
//! killed process closes its files and removes none.

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::CacheKey;
use super::directory::{Directory, PartialShard, Reserved, Room};
use crate::store::local::{LocalShard, ReadMode};
use crate::store::settings::ShardCache;

const BYTES_MAX: u64 = 100;
const KEYS: [u64; 4] = [30, 40, 70, 101];
const PROCESSES: usize = 3;

#[derive(Debug, Clone)]
enum Action {
    Reserve(usize),
    Write,
    Keep,
    GiveUp,
    Kill,
    Open(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (0..KEYS.len()).prop_map(Action::Reserve),
        3 => Just(Action::Write),
        2 => Just(Action::Keep),
        1 => Just(Action::GiveUp),
        1 => Just(Action::Kill),
        1 => (0..KEYS.len()).prop_map(Action::Open),
    ]
}

fn key(number: usize) -> CacheKey {
    CacheKey { stem: format!("{number}-{}", KEYS[number]), bytes: KEYS[number] }
}

fn process(path: &Path) -> Directory {
    let settings = ShardCache { directory: path.to_owned(), bytes_max: BYTES_MAX };
    Directory::open(settings, ReadMode::Pread).unwrap()
}

fn check(shard: &LocalShard, number: usize) {
    let bytes = shard.read(0, KEYS[number]).unwrap();
    assert!(bytes.iter().all(|&byte| byte == number as u8 + 1), "shard {number} is not whole: {bytes:?}");
}

/// Returns the total size of all shards and parts, in bytes.
fn bytes_held(path: &Path) -> u64 {
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    let counted = entries.filter(|entry| entry.file_name() != "lock");
    // A different process may remove a file meanwhile.
    counted.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
}

/// Shard that a process writes.
struct Writing {
    number: usize,
    part: PartialShard,
    written: u64,
}

impl Writing {
    fn write(&mut self) {
        let half = KEYS[self.number].div_ceil(2);
        let length = half.min(KEYS[self.number] - self.written);
        let bytes = vec![self.number as u8 + 1; length as usize];
        self.part.writer().write_at(&bytes, self.written).unwrap();
        self.written += length;
    }

    fn is_whole(&self) -> bool {
        self.written == KEYS[self.number]
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn processes_in_any_order_keep_the_promises_of_the_cache(
        actions in prop::collection::vec((0..PROCESSES, action()), 1..60),
    ) {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cache");
        let processes: Vec<Directory> = (0..PROCESSES).map(|_| process(&path)).collect();
        let mut writing: [Option<Writing>; PROCESSES] = [const { None }; PROCESSES];
        let mut opened = Vec::new();
        for (at, action) in actions {
            match action {
                Action::Reserve(number) if writing[at].is_none() => {
                    let is_kept = path.join(format!("{}.shard", key(number).stem)).exists();
                    let is_written = writing.iter().flatten().any(|other| other.number == number);
                    let parts: u64 = writing.iter().flatten().map(|other| KEYS[other.number]).sum();
                    match processes[at].reserve(&key(number), Room::Any).unwrap() {
                        Reserved::Kept(shard) => {
                            prop_assert!(is_kept);
                            opened.push((number, shard));
                        }
                        Reserved::ByOther(_) => prop_assert!(!is_kept && is_written),
                        Reserved::NoRoom => prop_assert!(!is_kept && !is_written && parts + KEYS[number] > BYTES_MAX),
                        Reserved::PartialShard(part) => {
                            prop_assert!(!is_kept && !is_written && parts + KEYS[number] <= BYTES_MAX);
                            writing[at] = Some(Writing { number, part, written: 0 });
                        }
                    }
                }
                Action::Write => {
                    if let Some(writing) = &mut writing[at] {
                        writing.write();
                    }
                }
                Action::Keep => {
                    if let Some(whole) = writing[at].take_if(|writing| writing.is_whole()) {
                        opened.push((whole.number, processes[at].keep(whole.part).unwrap()));
                    }
                }
                Action::GiveUp => {
                    if let Some(given_up) = writing[at].take() {
                        let part = path.join(format!("{}.part", key(given_up.number).stem));
                        prop_assert!(part.exists());
                        drop(given_up);
                        prop_assert!(!part.exists());
                    }
                }
                Action::Kill => {
                    if let Some(killed) = writing[at].take() {
                        killed.part.abandon();
                    }
                }
                Action::Open(number) => {
                    let kept = processes[at].open_kept(&key(number)).unwrap();
                    opened.extend(kept.map(|shard| (number, shard)));
                }
                Action::Reserve(_) => {}
            }
            prop_assert!(bytes_held(&path) <= BYTES_MAX);
            // Also shards that were removed since.
            for (number, shard) in &opened {
                check(shard, *number);
            }
        }
    }
}

#[test]
fn processes_at_the_same_time_keep_the_promises_of_the_cache() {
    const ROUNDS: usize = 40;
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("cache");
    let writers: [AtomicUsize; KEYS.len()] = Default::default();
    let kept = Mutex::new(0);
    std::thread::scope(|scope| {
        for thread in 0..PROCESSES {
            let (path, writers, kept) = (&path, &writers, &kept);
            scope.spawn(move || {
                let directory = process(path);
                let mut random = thread as u64 + 1;
                for _ in 0..ROUNDS {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let (number, choice) = ((random >> 33) as usize % KEYS.len(), (random >> 50) % 4);
                    match directory.reserve(&key(number), Room::Any).unwrap() {
                        Reserved::Kept(shard) => check(&shard, number),
                        Reserved::ByOther(_) | Reserved::NoRoom => std::thread::yield_now(),
                        Reserved::PartialShard(part) => {
                            assert_eq!(writers[number].fetch_add(1, Ordering::SeqCst), 0, "one writer");
                            let mut writing = Writing { number, part, written: 0 };
                            while !writing.is_whole() {
                                writing.write();
                                assert!(
                                    bytes_held(path) <= 2 * BYTES_MAX,
                                    "files may move while they are counted"
                                );
                            }
                            writers[number].fetch_sub(1, Ordering::SeqCst);
                            match choice {
                                0 => drop(writing),
                                1 => writing.part.abandon(),
                                _ => {
                                    check(&directory.keep(writing.part).unwrap(), number);
                                    *kept.lock().unwrap() += 1;
                                }
                            }
                        }
                    }
                }
            });
        }
    });
    assert!(*kept.lock().unwrap() > 0);
    assert!(bytes_held(&path) <= BYTES_MAX);
}
