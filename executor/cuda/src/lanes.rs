//! Lanes of communication through the host: a thread and a stream each.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dflop_device::Result;

use crate::driver::{Context, Event, Stream};
use crate::event::Gate;

/// Work of a lane, which ends with an event of the stream.
type Work = Box<dyn FnOnce(&Stream) -> Result<Event> + Send>;

/// Queue of a lane: work, and the gate that opens once it is issued.
type Queue = Sender<(Work, Arc<Gate>)>;

/// Longest wait for the work of lanes when a device is dropped: ranks that have failed leave work behind.
const END_WAIT: Duration = Duration::from_secs(10);

/// Threads of the lanes, by their numbers. They end with their device, once their work is done.
pub(crate) struct Lanes {
    context: Context,
    senders: Mutex<HashMap<u64, Queue>>,
    /// Each thread keeps a clone of the sender until it ends.
    ended: (Mutex<Option<Sender<()>>>, Mutex<Receiver<()>>),
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // a thread that used the driver while the process ends could fail
        self.senders.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        self.ended.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let ended = self.ended.1.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(END_WAIT);
    }
}

impl Lanes {
    pub(crate) fn new(context: Context) -> Self {
        let (sender, receiver) = channel();
        Self { context, senders: Mutex::default(), ended: (Mutex::new(Some(sender)), Mutex::new(receiver)) }
    }

    /// Queues work behind that of the lane so far; the gate opens once it is issued.
    pub(crate) fn queue(
        &self,
        lane: u64,
        work: impl FnOnce(&Stream) -> Result<Event> + Send + 'static,
    ) -> Result<Arc<Gate>> {
        let mut senders = self.senders.lock().unwrap_or_else(PoisonError::into_inner);
        let gate = Arc::<Gate>::default();
        let sender = match senders.entry(lane) {
            std::collections::hash_map::Entry::Occupied(sender) => sender.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(start(&self.context, self.alive())?)
            }
        };
        if sender.send((Box::new(work), Arc::clone(&gate))).is_err() {
            let reason = "the thread of a communication lane has ended".to_owned();
            return Err(dflop_device::Error::Failed { reason });
        }
        Ok(gate)
    }

    /// Sender that a thread keeps until it ends.
    fn alive(&self) -> Option<Sender<()>> {
        self.ended.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Starts the thread of a lane.
fn start(context: &Context, alive: Option<Sender<()>>) -> Result<Queue> {
    let stream = Stream::new(context)?;
    let (sender, receiver) = channel::<(Work, Arc<Gate>)>();
    let run = move || {
        for (work, gate) in receiver {
            gate.open(work(&stream));
        }
        drop(stream);
        drop(alive);
    };
    let thread = std::thread::Builder::new().name("dflop-lane".to_owned()).spawn(run);
    thread
        .map_err(|error| dflop_device::Error::Failed { reason: format!("no thread for a lane: {error}") })?;
    Ok(sender)
}
