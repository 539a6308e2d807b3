//! Writes the messages to one peer, in order.

use super::frame::{encode, farewell};
use super::links::Links;
use super::socket::{Socket, send_now};
use crate::message::Message;
use crate::sync::{Mutex, Receiver, Sender, channel, thread};
use crate::transport::SendState;
use std::io::{self, IoSlice, Write};
use std::net::Shutdown;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Largest message in bytes that the sending thread writes itself.
const INLINE_BYTES_MAX: usize = 64 << 10;

enum WriteTask {
    Message(Message),
    /// Bytes of a message, and how many of them are already written.
    Remainder(Vec<u8>, usize),
    Farewell,
}

#[derive(Debug)]
struct WriteQueue {
    /// Number of tasks ever given to the thread.
    queued: u64,
    tasks: Sender<WriteTask>,
}

/// Sending half of a connection.
#[derive(Debug)]
pub(super) struct Outbox {
    peer: usize,
    links: Arc<Links>,
    stream: Socket,
    state: Mutex<WriteQueue>,
    /// Disconnected once the thread has ended.
    ended: Mutex<Receiver<()>>,
}

impl Outbox {
    /// Starts the thread of the connection.
    pub(super) fn start(peer: usize, links: Arc<Links>, stream: Socket) -> io::Result<Self> {
        let (tasks, queue) = channel();
        let (end, ended) = channel::<()>();
        let (writer, of_writer) = (stream.try_clone()?, links.clone());
        thread::Builder::new().name(format!("comm-send-{peer}")).spawn(move || {
            run_tasks(&of_writer, peer, &writer, &queue);
            drop(end);
        })?;
        let state = Mutex::new(WriteQueue { queued: 0, tasks });
        Ok(Self { peer, links, stream, state, ended: Mutex::new(ended) })
    }

    /// Writes as much as the socket takes without blocking, if the queue is empty, and queues the rest.
    pub(super) fn post(&self, message: Message) -> SendState {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // messages must stay in order: write directly only if nothing is queued
        let is_idle = self.links.mailbox.written(self.peer) == state.queued;
        if !is_idle || message.buffer.as_bytes().len() > INLINE_BYTES_MAX {
            return state.queue(WriteTask::Message(message));
        }
        let bytes = [encode(&message.header).as_slice(), message.buffer.as_bytes()].concat();
        // an error is left to the thread, which meets it again
        let written = send_now(&self.stream, &bytes).unwrap_or(0);
        if written == bytes.len() {
            return SendState::Done;
        }
        state.queue(WriteTask::Remainder(bytes, written))
    }

    /// Queues a farewell.
    pub(super) fn farewell(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).queue(WriteTask::Farewell);
    }

    /// Waits until the thread has ended, and closes the connection.
    pub(super) fn close(&self, timeout: Duration) {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // nothing is ever sent on the channel: it disconnects, or the time is over
        let _ = ended.recv_timeout(timeout);
        // written bytes still arrive
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl WriteQueue {
    fn queue(&mut self, task: WriteTask) -> SendState {
        // the thread ended because of an error, which the reader of this peer reports
        let _ = self.tasks.send(task);
        self.queued += 1;
        SendState::Queued(self.queued)
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
