//! The byte budget, stages that run ahead, and the queue of the decode pool.
//!
//! Tokio semaphores and channels are a single step each here: the models explore the steps between them.

use super::byte_budget::{ByteBudget, run_ahead};
use super::job_queue::JobQueue;
use super::metrics::Gauge;
use crate::error::Error;
use crate::model::Model;
use futures::{StreamExt, stream};
use shuttle::future::{block_on, spawn, yield_now};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{mpsc, oneshot};

pub(crate) fn models() -> Vec<Model> {
    vec![
        Model { name: "byte budget: never over its bound, and all of it returns", run: a_budget_holds },
        Model { name: "byte budget: batches that grow are all delivered", run: growing_batches_arrive },
        Model { name: "run ahead: every item once, in order, then the end", run: items_arrive_in_order },
        Model { name: "run ahead: a consumer that goes ends the stage", run: a_gone_consumer_ends_it },
        Model {
            name: "decode pool: every job answers, none waits in a thread's way",
            run: every_job_answers,
        },
        Model {
            name: "decode pool: tasks that end while they wait keep no room",
            run: ended_tasks_keep_no_room,
        },
    ]
}

const BUDGET_BYTES: u64 = 10;

fn a_budget_holds() {
    let gauge = Arc::new(Gauge::default());
    let budget = ByteBudget::new(BUDGET_BYTES, gauge.clone());
    let tasks: Vec<_> = [4, 7, 25, 3]
        .into_iter()
        .map(|bytes| {
            let (budget, gauge) = (budget.clone(), gauge.clone());
            spawn(async move {
                // every second task gives up at some point
                let lease = if bytes % 2 == 1 {
                    Some(budget.lease(bytes).await.unwrap())
                } else {
                    give_up(&budget, bytes).await
                };
                for _ in 0..3 {
                    let held = gauge.now();
                    assert!(held <= BUDGET_BYTES.max(25) && (held <= BUDGET_BYTES || held == 25), "{held}");
                    yield_now().await;
                }
                drop(lease);
            })
        })
        .collect();
    block_on(async move {
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(gauge.now(), 0);
        assert!(budget.try_lease(BUDGET_BYTES).is_some(), "all of it is free");
    });
}

/// Waits for bytes for a moment only.
async fn give_up(budget: &ByteBudget, bytes: u64) -> Option<super::byte_budget::ByteLease> {
    let mut waiting = std::pin::pin!(budget.lease(bytes));
    for _ in 0..2 {
        if let std::task::Poll::Ready(lease) = futures::poll!(waiting.as_mut()) {
            return Some(lease.unwrap());
        }
        yield_now().await;
    }
    None
}

fn growing_batches_arrive() {
    const BATCHES: usize = 4;
    let gauge = Arc::new(Gauge::default());
    let budget = ByteBudget::new(BUDGET_BYTES, gauge.clone());
    let (sender, mut receiver) = mpsc::channel(1);
    let batcher = spawn(async move {
        for batch in 0..BATCHES {
            let mut lease = budget.empty_lease();
            for bytes in [1, 3, 8 * (batch as u64 % 2)] {
                lease.grow(bytes).await.unwrap();
                yield_now().await;
            }
            assert!(sender.send((batch, lease)).await.is_ok());
        }
    });
    block_on(async move {
        for expected in 0..BATCHES {
            let (batch, lease) = receiver.recv().await.unwrap();
            assert_eq!(batch, expected);
            yield_now().await;
            drop(lease);
        }
        assert!(receiver.recv().await.is_none());
        batcher.await.unwrap();
        assert_eq!(gauge.now(), 0);
    });
}

fn items_arrive_in_order() {
    let items = stream::iter(0..5).then(|item| async move {
        yield_now().await;
        if item == 3 { Err(Error::StageEnded { stage: "model" }) } else { Ok(item) }
    });
    let mut receiver = run_ahead(items, 2);
    block_on(async move {
        for expected in 0..5 {
            let item = receiver.recv().await.unwrap();
            assert!(if expected == 3 { item.is_err() } else { item.unwrap() == expected });
            yield_now().await;
        }
        assert!(receiver.recv().await.is_none());
    });
}

fn a_gone_consumer_ends_it() {
    let held = Arc::new(());
    let its = held.clone();
    let items = stream::iter(0..2).map(Ok).chain(stream::pending()).inspect(move |_: &Result<i32, Error>| {
        let _ = &its;
    });
    let mut receiver = run_ahead(items, 1);
    block_on(async move {
        for expected in 0..thread_rng().gen_range(0..3) {
            assert_eq!(receiver.recv().await.unwrap().unwrap(), expected);
        }
        drop(receiver);
        // a stage that never ends would leave this loop running until the model fails
        while Arc::strong_count(&held) > 1 {
            yield_now().await;
        }
    });
}

const JOBS: usize = 5;

type Job = Box<dyn FnOnce() + Send>;

/// Starts threads that run the jobs in a queue.
fn pool(threads: usize, jobs_max: usize) -> (Arc<JobQueue<Job>>, Vec<thread::JoinHandle<usize>>) {
    let (queue, jobs) = JobQueue::<Job>::new(jobs_max);
    let threads = (0..threads).map(|_| jobs.clone()).map(|jobs| {
        thread::spawn(move || {
            jobs.map(|job| {
                thread::yield_now();
                job();
            })
            .count()
        })
    });
    (Arc::new(queue), threads.collect())
}

async fn submit(queue: &JobQueue<Job>, value: usize) -> oneshot::Receiver<usize> {
    let room = match queue.try_room() {
        Some(room) => room,
        None => queue.room().await,
    };
    let (answer, pending) = oneshot::channel();
    let job = Box::new(move || {
        let _ = answer.send(value);
    });
    assert!(queue.push(room, job), "there are threads");
    pending
}

fn every_job_answers() {
    let (queue, threads) = pool(2, 2);
    let tasks: Vec<_> = (0..2)
        .map(|task| {
            let queue = queue.clone();
            spawn(async move {
                let mut pending = Vec::new();
                for job in 0..JOBS {
                    pending.push((10 * task + job, submit(&queue, 10 * task + job).await));
                    yield_now().await;
                }
                for (expected, answer) in pending {
                    assert_eq!(answer.await.unwrap(), expected);
                }
            })
        })
        .collect();
    // the last job is taken even if the pool is gone by then
    drop(queue);
    block_on(async move {
        for task in tasks {
            task.await.unwrap();
        }
    });
    let done: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(done, 2 * JOBS);
}

fn ended_tasks_keep_no_room() {
    let (queue, threads) = pool(1, 1);
    let begun = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..3)
        .map(|task| {
            let (queue, begun) = (queue.clone(), begun.clone());
            spawn(async move {
                begun.fetch_add(1, Ordering::SeqCst);
                // nobody waits for this answer
                drop(submit(&queue, task).await);
            })
        })
        .collect();
    tasks[1].abort();
    drop(tasks);
    block_on(async move {
        assert_eq!(submit(&queue, 7).await.await.unwrap(), 7);
        assert_eq!(submit(&queue, 8).await.await.unwrap(), 8);
    });
    threads.into_iter().for_each(|thread| assert!(thread.join().unwrap() >= 2));
}
