//! Lanes for communication through the host, each with a thread and a stream.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dflop_device::Result;

use super::context::Gate;
use super::{Context, Event, Stream};

/// Lane work, which returns a stream event at the end.
type Work = Box<dyn FnOnce(&Stream) -> Result<Event> + Send>;

/// Lane queue: work, and the gate that opens once the work is issued.
type Queue = Sender<(Work, Arc<Gate>)>;

/// Maximum wait for lane work when a device is dropped: failed ranks leave unfinished work.
const END_WAIT: Duration = Duration::from_secs(10);

/// Lane threads by lane number. Threads end when the device is dropped, once all work is done.
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

    /// Queues work at the end of the lane; the gate opens once the work is issued.
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

    /// Returns a sender that a thread keeps until the thread ends.
    fn alive(&self) -> Option<Sender<()>> {
        self.ended.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Starts a lane thread.
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
