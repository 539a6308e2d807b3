//! Ranks with connections: writers, readers and control connections from the real transport.

use super::inbox::read_messages;
use super::links::{Dial, Line, Links};
use super::socket::{Socket, connection};
use super::tcp_transport::TcpTransport;
use super::wire::{Control, encode, farewell};
use crate::api::{Comm, Settings};
use crate::communicator::Communicator;
use crate::endpoint::{Endpoint, Interrupt, Mailbox, Wait};
use crate::error::{Cause, Failure};
use crate::message::{Header, Op, PayloadShape};
use crate::model::Model;
use crate::ranks_models::{at, patient, recv, row};
use crate::sync::thread;
use std::io::{self, Write};
use std::net::Shutdown;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) fn models() -> Vec<Model> {
    vec![
        Model { name: "tcp: messages cut anywhere arrive once, in order", run: messages_arrive },
        Model { name: "tcp: both send more than connection and bound hold", run: both_send_much },
        Model { name: "tcp: a reader stops at the bound", run: a_reader_stops_at_the_bound },
        Model { name: "tcp: a rank that leaves ends all its threads", run: leaving_ends_threads },
        Model { name: "tcp: a rank that dies is named", run: a_death_is_named },
        Model { name: "tcp: two failures end both ranks, each with one of them", run: two_failures },
        Model { name: "tcp: no call returns before the peers know the failure", run: peers_know_first },
        Model { name: "tcp: a rank that waits answers who it waits for", run: ranks_that_wait_answer },
        Model { name: "tcp: barriers meet over the control connection", run: barriers_meet },
    ]
}

/// Calls ranks that accept in memory.
#[derive(Debug)]
struct Callers {
    rank: usize,
    /// Links of every rank, once it accepts.
    ranks: Arc<Vec<OnceLock<Arc<Links>>>>,
}

impl Dial for Callers {
    fn dial(&self, peer: usize, line: Line, _: Duration) -> io::Result<Socket> {
        let (own, theirs) = connection();
        let (links, caller) = (self.ranks[peer].get().expect("all ranks accept").clone(), self.rank);
        thread::spawn(move || match line {
            Line::Data => links.read_data(caller, theirs),
            Line::Inquiry => links.answer(caller, &theirs),
        });
        Ok(own)
    }

    fn close(&self) {}
}

/// A fake peer: the test determines what it reads and writes.
#[derive(Debug)]
struct ClosedPort;

impl Dial for ClosedPort {
    fn dial(&self, _: usize, _: Line, _: Duration) -> io::Result<Socket> {
        Err(io::ErrorKind::ConnectionRefused.into())
    }

    fn close(&self) {}
}

/// Creates both ranks of a job, connected.
fn ranks(settings: Settings) -> [Arc<Endpoint>; 2] {
    let control = connection();
    let ranks = Arc::new((0..2).map(|_| OnceLock::new()).collect::<Vec<_>>());
    let mut rank = 0;
    [vec![None, Some(control.0)], vec![Some(control.1), None]].map(|controls| {
        let mailbox = Arc::new(Mailbox::new(2, settings.buffered_bytes_max));
        let dial = Box::new(Callers { rank, ranks: ranks.clone() });
        let transport = Box::new(TcpTransport::start(rank, mailbox.clone(), controls, dial).unwrap());
        ranks[rank].set(transport.links().clone()).unwrap();
        rank += 1;
        Arc::new(Endpoint::new(rank - 1, 2, mailbox, transport, settings))
    })
}

/// Runs both ranks; Shuttle then runs the connection threads to the end.
fn run(settings: Settings, rank: fn(Communicator)) {
    let ranks = ranks(settings).map(Communicator::world);
    let ranks = ranks.map(|comm| thread::spawn(move || rank(comm)));
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

/// Creates rank 0's links with a control connection to rank 1.
fn links(control: Option<Socket>, bytes: usize) -> Arc<Links> {
    let mailbox = Arc::new(Mailbox::new(2, bytes));
    Arc::new(Links::new(0, mailbox, vec![None, control.map(Arc::new)], Box::new(ClosedPort)))
}

/// Message sizes, in elements: less than a header, more than the connection holds.
const SIZES: [usize; 3] = [0, 2, 50];

fn values(elements: usize, of: usize) -> Vec<f32> {
    (0..elements).map(|value| (value + 100 * of) as f32).collect()
}

fn messages_arrive() {
    run(patient(1 << 20), |comm| {
        if comm.rank() == 0 {
            let sent = SIZES.map(|size| comm.start_send(1, 7, at(0), row(&values(size, 0))).unwrap());
            sent.into_iter().for_each(|sent| sent.wait().unwrap());
            assert_eq!(recv(&comm, 1, 8, 1).unwrap(), values(1, 1));
        } else {
            for size in SIZES {
                assert_eq!(recv(&comm, 0, 7, size).unwrap(), values(size, 0));
            }
            comm.send(0, 8, at(0), row(&values(1, 1))).unwrap();
        }
    });
}

fn both_send_much() {
    run(patient(4), |comm| {
        let other = 1 - comm.rank();
        let sent = [50, 51].map(|size| comm.start_send(other, 7, at(0), row(&values(size, 0))).unwrap());
        // a message that is dropped, before or after it has arrived
        drop(comm.start_recv(other, 7, at(0), PayloadShape::f32(1, 50)).unwrap());
        assert_eq!(recv(&comm, other, 7, 51).unwrap(), values(51, 0));
        sent.into_iter().for_each(|sent| sent.wait().unwrap());
        comm.barrier(at(1)).unwrap();
    });
}

fn a_reader_stops_at_the_bound() {
    const MESSAGES: usize = 4;
    let shape = PayloadShape::f32(1, 2);
    let header = Header { comm: 0, op: Op::Point, tag: 7, at: at(0), shape };
    let (own, theirs) = connection();
    let links = links(None, 0);
    let mailbox = links.mailbox.clone();
    links.close();
    let reader = thread::spawn(move || read_messages(&links, 1, &own));
    let sender = thread::spawn(move || {
        for _ in 0..MESSAGES {
            (&theirs).write_all(&[encode(&header).as_slice(), &[0; 8]].concat()).unwrap();
        }
        (&theirs).write_all(&farewell()).unwrap();
    });
    let numbers = [(); MESSAGES].map(|()| mailbox.post(header.key(1), header));
    for (taken, number) in numbers.into_iter().enumerate() {
        // nobody waits for the peer: that would make room
        while !mailbox.is_ready(header.key(1), number) {
            thread::yield_now();
        }
        let ready = numbers[taken..].iter().filter(|&&number| mailbox.is_ready(header.key(1), number));
        assert_eq!(ready.count(), 1, "one message is over the bound");
        mailbox.take(header.key(1), number, &mut Wait::new(1, at(0), false), Duration::ZERO).unwrap();
    }
    reader.join().unwrap();
    sender.join().unwrap();
    assert!(mailbox.has_left(1));
}

fn leaving_ends_threads() {
    run(patient(4), |comm| {
        if comm.rank() == 0 {
            // nobody receives these: the peer's reader waits for room until the peer leaves
            let sent = [50, 51, 52].map(|size| comm.start_send(1, 7, at(0), row(&values(size, 0))));
            for sent in sent.into_iter().flatten() {
                let _ = sent.wait();
            }
        }
    });
}

fn a_death_is_named() {
    let (own, dead) = connection();
    let mailbox = Arc::new(Mailbox::new(2, 1 << 20));
    let controls = vec![None, Some(own)];
    let transport = TcpTransport::start(0, mailbox.clone(), controls, Box::new(ClosedPort)).unwrap();
    let links = transport.links().clone();
    let endpoint = Endpoint::new(0, 2, mailbox, Box::new(transport), patient(1 << 20));
    let survivor = Communicator::world(Arc::new(endpoint));
    let (data, last) = connection();
    let reader = thread::spawn(move || links.read_data(1, data));
    let dying = thread::spawn(move || {
        // the sent bytes of the last message arrive
        (&last).write_all(&[0; 10]).unwrap();
        last.shutdown(Shutdown::Both).unwrap();
        dead.shutdown(Shutdown::Both).unwrap();
    });
    let error = recv(&survivor, 1, 7, 1).unwrap_err();
    let failure = error.failure().unwrap();
    assert_eq!((failure.cause, failure.culprit), (Cause::Died, Some(1)), "{failure}");
    dying.join().unwrap();
    reader.join().unwrap();
}

fn two_failures() {
    run(patient(1 << 20), |comm| {
        let receiving = comm.start_recv(1 - comm.rank(), 7, at(0), PayloadShape::f32(1, 1)).unwrap();
        let failure = comm.abort(at(0), "enough").failure().unwrap().clone();
        assert_eq!((failure.cause, failure.message.ends_with("enough")), (Cause::Caller, true), "{failure}");
        assert_eq!(receiving.wait().unwrap_err().failure().unwrap(), &failure);
        assert_eq!(comm.abort(at(0), "too late").failure().unwrap(), &failure);
    });
}

/// Creates a failure whose text is longer than the connection buffer.
fn failure(by: usize) -> Failure {
    Failure { cause: Cause::Caller, culprit: Some(by), by, at: at(0), message: "enough ".repeat(40) }
}

fn peers_know_first() {
    let (own, theirs) = connection();
    let own = Arc::new(own);
    let reading = own.clone();
    let mailbox = Arc::new(Mailbox::new(2, 1 << 20));
    let links = Arc::new(Links::new(0, mailbox, vec![None, Some(own)], Box::new(ClosedPort)));
    let shape = PayloadShape::f32(1, 1);
    let header = Header { comm: 0, op: Op::Point, tag: 7, at: at(0), shape };
    let number = links.mailbox.post(header.key(1), header);
    let (control, ending, waiting) = (links.clone(), links.clone(), links.clone());
    let peer = thread::spawn(move || (Control::read(&mut &theirs, 2), Control::read(&mut &theirs, 2)));
    let reader = thread::spawn(move || control.read_controls(1, &reading));
    // any of these may end the process, which closes all connections
    let calls = [
        thread::spawn(move || {
            let kept = ending.end_job(failure(0));
            ending.shut_down();
            kept
        }),
        thread::spawn(move || {
            let taken = waiting.mailbox.take(
                header.key(1),
                number,
                &mut Wait::new(1, at(0), false),
                Duration::from_hours(24),
            );
            let Err(Interrupt::Failed(kept)) = taken else { panic!("the job has failed") };
            waiting.shut_down();
            kept
        }),
    ];
    let kept = links.end_job(failure(1));
    links.shut_down();
    for call in calls {
        assert_eq!(call.join().unwrap(), kept);
    }
    let (first, second) = peer.join().unwrap();
    assert_eq!(first.unwrap(), Some(Control::Abort(kept)), "whole, whoever ends the process");
    assert_eq!(second.unwrap(), None, "once");
    reader.join().unwrap();
}

fn ranks_that_wait_answer() {
    let [first, second] = ranks(patient(1 << 20));
    let (second, asking) = (Communicator::world(second), first.clone());
    let first = Communicator::world(first);
    let asked = second.start_recv(0, 7, at(5), PayloadShape::f32(1, 1)).unwrap();
    let waiting = thread::spawn(move || {
        asked.wait().unwrap();
        drop(second);
    });
    // the wait in rank 1 is on record at some time
    while asking.transport.ask(1, Duration::from_secs(1)).unwrap().wait.is_none() {
        thread::yield_now();
    }
    let answers: Vec<_> = (0..2)
        .map(|_| {
            let endpoint = asking.clone();
            thread::spawn(move || endpoint.transport.ask(1, Duration::from_secs(1)).unwrap())
        })
        .collect();
    for answer in answers {
        let wait = answer.join().unwrap().wait.unwrap();
        assert_eq!((wait.peer, wait.at), (0, at(5)));
    }
    drop(asking);
    first.send(1, 7, at(5), row(&[1.0])).unwrap();
    drop(first);
    waiting.join().unwrap();
}

/// Both ranks meet in a barrier, over the control connection, before either leaves.
fn barriers_meet() {
    run(patient(4), |comm| {
        for round in 0..2 {
            comm.barrier(at(round)).unwrap();
            comm.check_digest(round, 77).unwrap();
        }
        // the first message opens the connection, after the peer may have left
        let sent = comm.start_send(1 - comm.rank(), 7, at(2), row(&[1.0]));
        drop(sent);
    });
}
