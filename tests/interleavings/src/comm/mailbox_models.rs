//! The mailbox of a rank: messages are received once, in order, within bounds, and every wait ends.

use super::endpoint::{Interrupt, Mailbox, Wait};
use super::error::{Cause, Failure, StepContext};
use super::message::{Buffer, Header, Message, Op, PayloadShape};
use super::sync::thread;
use crate::model::Model;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const LONG: Duration = Duration::from_hours(24);
/// Number of bytes in a message.
const BYTES: usize = 16;

pub(super) fn models() -> Vec<Model> {
    vec![
        Model { name: "mailbox: each message once, in the order of its sender", run: each_once_in_order },
        Model { name: "mailbox: bounded while nobody waits, and room returns", run: bytes_are_bounded },
        Model { name: "mailbox: a receive makes room for what it waits for", run: a_receive_makes_room },
        Model { name: "mailbox: a wait elsewhere makes room", run: a_wait_elsewhere_makes_room },
        Model { name: "mailbox: a dropped receive frees its message", run: a_dropped_receive_frees },
        Model { name: "mailbox: a failure ends all waits", run: a_failure_ends_all_waits },
        Model { name: "mailbox: a peer that leaves ends waits for it", run: a_peer_that_leaves_ends_waits },
        Model { name: "mailbox: closing ends waits for room", run: closing_ends_waits_for_room },
    ]
}

fn header(tag: u64) -> Header {
    let shape = PayloadShape::f32(1, BYTES / 4);
    Header { comm: 0, op: Op::Point, tag, at: StepContext::step(0, "recv"), shape }
}

fn message(tag: u64, value: f32) -> Message {
    Message { header: header(tag), buffer: Buffer::F32(vec![value; BYTES / 4]) }
}

fn take(mailbox: &Mailbox, tag: u64, number: u64, peer: usize) -> Result<f32, Interrupt> {
    let key = header(tag).key(peer);
    mailbox.take(key, number, &mut wait(peer), LONG).map(|(message, _)| match message.buffer {
        Buffer::F32(elements) => elements[0],
        _ => f32::NAN,
    })
}

fn wait(peer: usize) -> Wait {
    Wait::new(peer, header(7).at, false)
}

fn post(mailbox: &Mailbox, tag: u64, peer: usize) -> u64 {
    mailbox.post(header(tag).key(peer), header(tag))
}

fn failure() -> Failure {
    let at = StepContext::step(3, "forward");
    Failure { cause: Cause::Caller, culprit: Some(0), by: 0, at, message: "enough".into() }
}

/// Connection reader: waits for room before every message.
fn deliver(mailbox: &Mailbox, peer: usize, tag: u64, values: impl Iterator<Item = f32>) {
    for value in values {
        mailbox.wait_for_room(peer, LONG).unwrap();
        mailbox.deliver(peer, message(tag, value));
    }
}

fn each_once_in_order() {
    let mailbox = Arc::new(Mailbox::new(3, BYTES));
    let mut threads = Vec::new();
    for peer in [1, 2] {
        let incoming = mailbox.clone();
        threads.push(thread::spawn(move || deliver(&incoming, peer, 7, (0..3).map(|value| value as f32))));
        let receiving = mailbox.clone();
        threads.push(thread::spawn(move || {
            // the second is posted before the first has been received, the third after
            let numbers = [post(&receiving, 7, peer), post(&receiving, 7, peer)];
            for (value, number) in numbers.into_iter().enumerate() {
                assert_eq!(take(&receiving, 7, number, peer).unwrap(), value as f32);
            }
            let last = post(&receiving, 7, peer);
            assert_eq!(take(&receiving, 7, last, peer).unwrap(), 2.0);
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!((1..3).all(|peer| mailbox.expected(header(7).key(peer)).is_none()));
}

fn bytes_are_bounded() {
    const MESSAGES: usize = 5;
    let mailbox = Arc::new(Mailbox::new(2, 2 * BYTES));
    let buffered = Arc::new(AtomicUsize::new(0));
    let (incoming, counted) = (mailbox.clone(), buffered.clone());
    let sender = thread::spawn(move || {
        for value in 0..MESSAGES {
            incoming.wait_for_room(1, LONG).unwrap();
            let held = counted.fetch_add(BYTES, Ordering::SeqCst) + BYTES;
            assert!(held <= 3 * BYTES, "{held} bytes: the bound plus one message");
            incoming.deliver(1, message(7, value as f32));
        }
    });
    for value in 0..MESSAGES {
        let number = post(&mailbox, 7, 1);
        // nobody waits for the peer: that would make room
        while !mailbox.is_ready(header(7).key(1), number) {
            thread::yield_now();
        }
        buffered.fetch_sub(BYTES, Ordering::SeqCst);
        assert_eq!(take(&mailbox, 7, number, 1).unwrap(), value as f32);
    }
    sender.join().unwrap();
    assert!(mailbox.has_room(1));
}

fn a_receive_makes_room() {
    let mailbox = Arc::new(Mailbox::new(2, 0));
    let incoming = mailbox.clone();
    // the message that is received first arrives last
    let reader = thread::spawn(move || {
        deliver(&incoming, 1, 7, [1.0].into_iter());
        deliver(&incoming, 1, 8, [2.0].into_iter());
    });
    for (tag, value) in [(8, 2.0), (7, 1.0)] {
        let number = post(&mailbox, tag, 1);
        assert_eq!(take(&mailbox, tag, number, 1).unwrap(), value);
    }
    reader.join().unwrap();
}

fn a_wait_elsewhere_makes_room() {
    let mailbox = Arc::new(Mailbox::new(2, 0));
    mailbox.deliver(1, message(7, 0.0));
    let incoming = mailbox.clone();
    let reader = thread::spawn(move || incoming.wait_for_room(1, LONG).unwrap());
    // this rank sends to the peer, which receives nothing before it has sent
    let mut wait = wait(1);
    mailbox.begin_wait(&mut wait);
    reader.join().unwrap();
    mailbox.end_wait(&mut wait);
}

fn a_dropped_receive_frees() {
    let mailbox = Arc::new(Mailbox::new(2, BYTES - 1));
    let numbers = [0; 3].map(|_| post(&mailbox, 7, 1));
    let incoming = mailbox.clone();
    let reader = thread::spawn(move || deliver(&incoming, 1, 7, (0..3).map(|value| value as f32)));
    let dropping = mailbox.clone();
    let dropped = thread::spawn(move || {
        dropping.discard(header(7).key(1), numbers[0], 1);
        dropping.discard(header(7).key(1), numbers[1], 1);
    });
    // not a wait: room must come from the dropped receives
    while !mailbox.is_ready(header(7).key(1), numbers[2]) {
        thread::yield_now();
    }
    assert_eq!(take(&mailbox, 7, numbers[2], 1).unwrap(), 2.0);
    reader.join().unwrap();
    dropped.join().unwrap();
    assert!(mailbox.has_room(1), "no message keeps its share");
    // the next receive has the next message
    let next = post(&mailbox, 7, 1);
    mailbox.deliver(1, message(7, 3.0));
    assert_eq!(take(&mailbox, 7, next, 1).unwrap(), 3.0);
}

fn a_failure_ends_all_waits() {
    let mailbox = Arc::new(Mailbox::new(3, 0));
    // without room, once nobody waits for this peer
    mailbox.deliver(2, message(9, 0.0));
    let is_failure =
        |interrupt: Interrupt| matches!(interrupt, Interrupt::Failed(found) if found == failure());
    let (first, second, third) = (mailbox.clone(), mailbox.clone(), mailbox.clone());
    let threads = [
        thread::spawn(move || {
            let number = post(&first, 7, 1);
            assert!(is_failure(take(&first, 7, number, 1).unwrap_err()));
        }),
        thread::spawn(move || {
            assert!(is_failure(second.wait_written(1, &mut wait(1), LONG).unwrap_err()));
        }),
        thread::spawn(move || assert!(is_failure(third.wait_for_room(2, LONG).unwrap_err()))),
    ];
    mailbox.set_failure(failure());
    let second = Failure { message: "too late".into(), ..failure() };
    mailbox.set_failure(second);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(mailbox.status().wait.is_none(), "no wait is left on record");
}

fn a_peer_that_leaves_ends_waits() {
    let mailbox = Arc::new(Mailbox::new(2, 1 << 20));
    let waiting = mailbox.clone();
    let receiver = thread::spawn(move || {
        let numbers = [post(&waiting, 7, 1), post(&waiting, 7, 1)];
        assert_eq!(take(&waiting, 7, numbers[0], 1).unwrap(), 1.0, "it came before the farewell");
        assert!(matches!(take(&waiting, 7, numbers[1], 1), Err(Interrupt::Left)));
    });
    let writing = mailbox.clone();
    let sender = thread::spawn(move || {
        assert!(writing.wait_written(1, &mut wait(1), LONG).is_ok());
        assert!(matches!(writing.wait_written(2, &mut wait(1), LONG), Err(Interrupt::Left)));
    });
    mailbox.deliver(1, message(7, 1.0));
    mailbox.set_left(1);
    mailbox.note_written(1);
    mailbox.set_broken(1);
    receiver.join().unwrap();
    sender.join().unwrap();
}

fn closing_ends_waits_for_room() {
    let mailbox = Arc::new(Mailbox::new(2, 0));
    mailbox.deliver(1, message(7, 0.0));
    let incoming = mailbox.clone();
    let reader = thread::spawn(move || assert!(incoming.wait_for_room(1, LONG).is_err()));
    mailbox.close();
    reader.join().unwrap();
}
