//! Rank thread that makes all MPI calls: it starts operations, and lets MPI work on them.
//!
//! A message consists of two MPI messages: a header, and the elements, which MPI writes directly to the
//! destination. Headers from the same sender arrive in send order, and element receives are started in that
//! order, so each receive gets the matching elements. Tags travel in headers: MPI guarantees only 32,767
//! tags.
//!
//! A [`Job`] starts the thread, which ends with the last communicator.

use crate::channels::Channels;
use crate::header::{Control, Header, Key};
use crate::raw::{Channel, Library, Pending};
use crate::shared::{Command, Shared};
use dflop_comm::{Buffer, Dtype, Error, Limits, Result, Settings};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

const HEADERS: i32 = 1;
const ELEMENTS: i32 = 2;
const CONTROL: i32 = 3;

/// Number of turns without work before the thread sleeps, and the sleep time: a compromise between latency
/// and the computing time that the thread takes from the rank.
const IDLE_TURNS: usize = 200;
const SLEEP: Duration = Duration::from_micros(100);

/// Time within which all ranks leave a failed job, before MPI ends the processes.
const GRACE: Duration = Duration::from_secs(20);

/// Exit status for processes that MPI ends.
const ABORTED: i32 = 1;

struct Engine {
    shared: Arc<Shared>,
    /// Sends and receives.
    points: Channel,
    control: Channel,
    channels: Channels,
    /// Next header, and next control message.
    header: Pending,
    question: Pending,
    /// Headers whose elements have no room yet, by sender.
    deferred: BTreeMap<usize, VecDeque<Header>>,
    incoming: Vec<Incoming>,
    outgoing: Vec<Outgoing>,
    questions: Vec<Pending>,
    /// Number of messages sent to every rank.
    sent: Vec<u64>,
}

struct Incoming {
    elements: Pending,
    key: Key,
    number: u64,
    header: Header,
}

struct Outgoing {
    /// Header and elements that have not left.
    parts: Vec<Pending>,
    number: u64,
}

/// Runs the thread; the rank state goes to the caller. `None` if MPI cannot be initialized.
pub(crate) fn run(limits: Limits, started: &mpsc::Sender<Option<Arc<Shared>>>) {
    let Some(library) = Library::start() else {
        // The caller waits for it, as for the state.
        let _ = started.send(None);
        return;
    };
    let (points, control) = (library.world(), library.world());
    let shared = Arc::new(Shared::new([points.rank(), points.size()], limits));
    let engine = Engine {
        channels: Channels::new(library.world()),
        header: next_header(&points),
        question: next_question(&control),
        deferred: BTreeMap::new(),
        incoming: Vec::new(),
        outgoing: Vec::new(),
        questions: Vec::new(),
        sent: vec![0; points.size()],
        shared: Arc::clone(&shared),
        points,
        control,
    };
    let _ = started.send(Some(shared));
    engine.work(library);
}

fn next_header(points: &Channel) -> Pending {
    points.receive(Buffer::zeros(Dtype::U64, Header::WORDS), None, HEADERS)
}

fn next_question(control: &Channel) -> Pending {
    control.receive(Buffer::zeros(Dtype::U64, Control::WORDS), None, CONTROL)
}

impl Engine {
    fn work(mut self, library: Library) {
        let (mut idle, mut farewell, mut end) = (0, None, None);
        loop {
            let is_busy = self.turn();
            idle = if is_busy { 0 } else { idle + 1 };
            let (is_closing, has_failed) = {
                let state = self.shared.lock();
                (state.is_closing, state.failure.is_some())
            };
            if is_closing && farewell.is_none() && (has_failed || self.is_idle()) {
                self.take_leave();
                farewell = Some(self.control.barrier());
            }
            // All ranks have left once the barrier is done: no message is in flight.
            if farewell.as_mut().is_some_and(|farewell| farewell.test().is_some()) {
                break;
            }
            if is_closing && has_failed && *end.get_or_insert_with(|| Instant::now() + GRACE) < Instant::now()
            {
                self.abort(&library);
                return;
            }
            if idle > IDLE_TURNS {
                self.sleep();
            } else if idle > 0 {
                std::thread::yield_now();
            }
        }
        while !self.questions.is_empty() {
            self.questions.retain_mut(|question| question.test().is_none());
        }
        self.header.cancel();
        self.question.cancel();
        library.finish();
    }

    /// Checks everything once; returns whether anything has happened.
    fn turn(&mut self) -> bool {
        let mut is_busy = self.take_commands();
        is_busy |= self.take_questions();
        is_busy |= self.take_headers();
        is_busy |= self.take_elements();
        is_busy |= self.take_sent();
        self.channels.advance(&self.shared) || is_busy
    }

    fn is_idle(&self) -> bool {
        self.outgoing.is_empty() && self.channels.is_idle() && self.shared.lock().commands.is_empty()
    }

    fn sleep(&self) {
        let state = self.shared.lock();
        if state.commands.is_empty() && !state.is_closing {
            // Commands end the sleep; what MPI receives does not.
            let _ = self.shared.commanded.wait_timeout(state, SLEEP).unwrap_or_else(PoisonError::into_inner);
        } else {
            drop(state);
            std::thread::sleep(SLEEP);
        }
    }

    fn take_commands(&mut self) -> bool {
        let commands = std::mem::take(&mut self.shared.lock().commands);
        let is_busy = !commands.is_empty();
        for command in commands {
            match command {
                Command::Send { to, header, buffer, number } => {
                    let mut parts = vec![self.points.send(header.to_words(), to, HEADERS)];
                    if buffer.elements() > 0 {
                        parts.push(self.points.send(buffer, to, ELEMENTS));
                    }
                    self.sent[to] += 1;
                    self.outgoing.push(Outgoing { parts, number });
                }
                Command::Collective(collective) => self.channels.queue(collective),
                Command::Control(to, message) => self.send_control(to, &message),
            }
        }
        is_busy
    }

    fn send_control(&mut self, to: usize, message: &Control) {
        self.questions.push(self.control.send(message.to_words(), to, CONTROL));
    }

    fn take_questions(&mut self) -> bool {
        self.questions.retain_mut(|question| question.test().is_none());
        let mut is_busy = false;
        while let Some((Buffer::U64(words), from)) = self.question.test() {
            is_busy = true;
            self.question = next_question(&self.control);
            let mut state = self.shared.lock();
            match Control::from_words(&words) {
                Control::Failed(failure) => drop(state.failure.get_or_insert(failure)),
                Control::Left(messages) => drop(state.left.insert(from, (messages, Instant::now()))),
                Control::Answer(status) => drop(state.answers.insert(from, status)),
                Control::Ask => {
                    let status = state.status();
                    drop(state);
                    self.send_control(from, &Control::Answer(status));
                }
            }
            self.shared.changed.notify_all();
        }
        is_busy
    }

    fn take_headers(&mut self) -> bool {
        let mut is_busy = false;
        while let Some((Buffer::U64(words), from)) = self.header.test() {
            is_busy = true;
            self.header = next_header(&self.points);
            self.deferred.entry(from).or_default().push_back(Header::from_words(&words));
        }
        for (&from, headers) in &mut self.deferred {
            while let Some(&header) = headers.front() {
                let mut state = self.shared.lock();
                // After its farewell, a rank drops incoming messages, so that sends complete.
                let bytes_max = self.shared.limits.buffered_bytes_max;
                if !state.is_closing && !state.mailbox.has_room(from, bytes_max) {
                    break;
                }
                headers.pop_front();
                is_busy = true;
                let (dtype, elements) = (header.shape.dtype, header.shape.elements().unwrap_or(0));
                let number = state.mailbox.announce(header.key(from), elements * dtype.bytes());
                let (key, buffer) = (header.key(from), Buffer::zeros(dtype, elements));
                if elements == 0 {
                    state.mailbox.arrive(key, number, header, buffer);
                    self.shared.changed.notify_all();
                } else {
                    let elements = self.points.receive(buffer, Some(from), ELEMENTS);
                    self.incoming.push(Incoming { elements, key, number, header });
                }
            }
        }
        is_busy
    }

    fn take_elements(&mut self) -> bool {
        let before = self.incoming.len();
        let shared = &self.shared;
        self.incoming.retain_mut(|incoming| {
            let Some((buffer, _)) = incoming.elements.test() else { return true };
            shared.lock().mailbox.arrive(incoming.key, incoming.number, incoming.header, buffer);
            shared.changed.notify_all();
            false
        });
        self.incoming.len() < before
    }

    fn take_sent(&mut self) -> bool {
        let before = self.outgoing.len();
        let shared = &self.shared;
        self.outgoing.retain_mut(|outgoing| {
            outgoing.parts.retain_mut(|part| part.test().is_none());
            let is_sent = outgoing.parts.is_empty();
            if is_sent {
                shared.lock().complete(outgoing.number, None);
                shared.changed.notify_all();
            }
            !is_sent
        });
        self.outgoing.len() < before
    }

    fn take_leave(&mut self) {
        // A job failure, which may have occurred since the last turn, goes before the farewell.
        self.take_commands();
        let rank = self.shared.rank;
        for to in (0..self.shared.size).filter(|&to| to != rank) {
            self.send_control(to, &Control::Left(self.sent[to]));
        }
    }

    #[expect(clippy::print_stderr, reason = "the last words of a process that MPI ends")]
    fn abort(&self, library: &Library) {
        if let Some(failure) = &self.shared.lock().failure {
            eprintln!("dflop: rank {} ends all ranks, as not all have left: {failure}", self.shared.rank);
        }
        library.abort(ABORTED);
    }
}

/// Whether this process has used MPI, which is possible only once per process.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Job rank, shared by communicators and operations.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Job {
    /// Joins the ranks that `mpirun` has started.
    pub(crate) fn join(settings: Settings) -> Result<Self> {
        settings.check()?;
        if IS_USED.swap(true, Ordering::Relaxed) {
            return Err(refused("a process joins its job once"));
        }
        let (started, state) = mpsc::channel();
        let limits = settings.limits();
        let thread = Builder::new().name("mpi".into()).spawn(move || run(limits, &started));
        let thread =
            thread.map_err(|source| Error::Io { action: "start a thread for MPI".into(), source })?;
        match state.recv() {
            Ok(Some(shared)) => Ok(Self { shared, thread: Some(thread) }),
            _ => Err(refused("MPI was initialized by another part of the program, or allows no threads")),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.commanded.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has already been reported.
            let _ = thread.join();
        }
    }
}

fn refused(reason: &str) -> Error {
    Error::InvalidSetting { setting: "MPI", reason: reason.into() }
}
