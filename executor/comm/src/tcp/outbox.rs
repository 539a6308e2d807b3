//! Writes messages to one peer, in order, on a connection that is created for the first message.

use std::io::{self, IoSlice, Write};
use std::net::Shutdown;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::links::{Line, Links};
use super::socket::{Socket, send_now};
use super::wire::{encode, farewell};
use crate::endpoint::SendState;
use crate::error::Cause;
use crate::message::Message;
use crate::sync::{Mutex, MutexGuard, Receiver, Sender, channel, thread};

/// Maximum message size in bytes that the sending thread writes itself.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// Time limit for one connection attempt.
const DIAL: Duration = Duration::from_secs(5);
/// Time after which attempts to connect end.
const CONNECT: Duration = Duration::from_mins(5);

enum WriteTask {
    Message(Message),
    /// Message bytes, and the number of bytes already written.
    Remainder(Vec<u8>, usize),
    Farewell,
}

#[derive(Debug, Default)]
struct WriteQueue {
    /// Number of tasks ever queued for the thread.
    queued: u64,
    /// Thread tasks; `None` before the first task.
    tasks: Option<Sender<WriteTask>>,
    /// Disconnected once the thread has ended.
    ended: Option<Receiver<()>>,
}

/// Sending half of a connection, which is created for the first message.
#[derive(Debug)]
pub(super) struct Outbox {
    peer: usize,
    links: Arc<Links>,
    /// Connection, once the thread has created it.
    stream: Arc<OnceLock<Socket>>,
    state: Mutex<WriteQueue>,
}

impl Outbox {
    pub(super) fn new(peer: usize, links: Arc<Links>) -> Self {
        Self { peer, links, stream: Arc::default(), state: Mutex::default() }
    }

    /// Writes as much as the socket accepts without blocking, if the queue is empty, and queues the rest.
    pub(super) fn post(&self, message: Message) -> SendState {
        let mut state = self.lock();
        if state.tasks.is_none()
            && let Err(source) = self.start(&mut state)
        {
            let message = format!("rank {} could not start a thread: {source}", self.links.rank);
            self.links.fail(Cause::Caller, self.links.rank, message);
            return SendState::Closed;
        }
        // messages must stay in order: write directly only if nothing is queued
        let is_idle = self.links.mailbox.written(self.peer) == state.queued;
        let stream = self.stream.get().filter(|_| is_idle);
        let Some(stream) = stream.filter(|_| message.buffer.as_bytes().len() <= INLINE_BYTES_MAX) else {
            return state.queue(WriteTask::Message(message));
        };
        let bytes = [encode(&message.header).as_slice(), message.buffer.as_bytes()].concat();
        // an error is left to the thread, which encounters it again
        let written = send_now(stream, &bytes).unwrap_or(0);
        if written == bytes.len() {
            return SendState::Done;
        }
        state.queue(WriteTask::Remainder(bytes, written))
    }

    /// Starts the thread that connects and writes.
    fn start(&self, state: &mut WriteQueue) -> io::Result<()> {
        let (tasks, queue) = channel();
        let (end, ended) = channel::<()>();
        let (peer, links, cell) = (self.peer, self.links.clone(), self.stream.clone());
        thread::Builder::new().name(format!("comm-send-{peer}")).spawn(move || {
            if let Some(stream) = connect(&links, peer) {
                run_tasks(&links, peer, cell.get_or_init(|| stream), &queue);
            }
            drop(end);
        })?;
        (state.tasks, state.ended) = (Some(tasks), Some(ended));
        Ok(())
    }

    /// Returns whether a message was sent.
    pub(super) fn is_used(&self) -> bool {
        self.lock().tasks.is_some()
    }

    /// Queues a farewell, unless there is no connection.
    pub(super) fn farewell(&self) {
        let mut state = self.lock();
        if state.tasks.is_some() {
            state.queue(WriteTask::Farewell);
        }
    }

    /// Waits until the thread has ended, and closes the connection.
    pub(super) fn close(&self, timeout: Duration) {
        let ended = {
            let mut state = self.lock();
            state.tasks = None;
            state.ended.take()
        };
        if let Some(ended) = ended {
            // nothing is ever sent on the channel: it disconnects, or the time limit is reached
            let _ = ended.recv_timeout(timeout);
        }
        if let Some(stream) = self.stream.get() {
            // written bytes still arrive
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, WriteQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WriteQueue {
    fn queue(&mut self, task: WriteTask) -> SendState {
        if let Some(tasks) = &self.tasks {
            // the thread ended because of an error, which it has reported
            let _ = tasks.send(task);
        }
        self.queued += 1;
        SendState::Queued(self.queued)
    }
}

/// Connects to a peer; returns `None` if that is not possible, which ends the job unless the peer has left.
fn connect(links: &Links, peer: usize) -> Option<Socket> {
    let begin = Instant::now();
    loop {
        let error = match links.dial.dial(peer, Line::Data, DIAL) {
            Ok(stream) => return Some(stream),
            Err(error) => error,
        };
        let is_refused = error.kind() == io::ErrorKind::ConnectionRefused;
        // a stopped process is found by the waiting rank's status request
        let is_over = is_refused || begin.elapsed() >= CONNECT;
        if is_over || links.mailbox.failure().is_some() || links.mailbox.is_closed() {
            tracing::debug!(peer, %error, "a data connection could not be made");
            links.mailbox.set_broken(peer);
            links.data_ended(peer);
            return None;
        }
    }
}

/// Writes queued messages until the farewell, or until the connection fails.
fn run_tasks(links: &Links, peer: usize, mut stream: &Socket, queue: &Receiver<WriteTask>) {
    for task in queue {
        let written = match &task {
            WriteTask::Message(message) => write_message(stream, message),
            WriteTask::Remainder(bytes, begin) => stream.write_all(&bytes[*begin..]),
            WriteTask::Farewell => stream.write_all(&farewell()),
        };
        if let Err(error) = written {
            tracing::debug!(peer, %error, "a message could not be written");
            links.mailbox.set_broken(peer);
            links.data_ended(peer);
            return;
        }
        if let WriteTask::Message(message) = task {
            links.mailbox.receive_buffers.give(message.buffer);
        } else if matches!(task, WriteTask::Farewell) {
            return;
        }
        links.mailbox.note_written(peer);
    }
}

/// Writes header and elements without joining them in memory.
fn write_message(mut stream: &Socket, message: &Message) -> io::Result<()> {
    let (header, elements) = (encode(&message.header), message.buffer.as_bytes());
    let mut written = 0;
    while written < header.len() {
        let slices = [IoSlice::new(&header[written..]), IoSlice::new(elements)];
        written += match stream.write_vectored(&slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
    }
    stream.write_all(&elements[written - header.len()..])
}
