//! Messages that arrived at a rank, until they are received.

use std::collections::{BTreeMap, BTreeSet};

use dflop_comm::Buffer;

use crate::header::{Header, Key};

/// Messages from all ranks by key. Messages with the same key are numbered as they arrive, and receives as
/// they are posted; a receive gets the message with its number.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    queues: BTreeMap<Key, Queue>,
    /// Senders by rank.
    senders: BTreeMap<usize, Sender>,
}

#[derive(Debug, Default)]
struct Queue {
    posted: u64,
    announced: u64,
    /// Number of messages that were received or dropped.
    finished: u64,
    arrived: BTreeMap<u64, (Header, Buffer)>,
    /// Receives that were abandoned before the message arrived.
    given_up: BTreeSet<u64>,
    /// Bytes in messages that no receive was posted for.
    unawaited: BTreeMap<u64, usize>,
}

#[derive(Debug, Default)]
struct Sender {
    /// Number of posted receives whose message was not announced.
    awaited: usize,
    /// Bytes in messages that no receive was posted for.
    unawaited_bytes: usize,
    /// Number of messages that have arrived.
    arrived: u64,
}

impl Mailbox {
    /// Reserves the next message with a key, and returns the message number.
    pub(crate) fn post(&mut self, key: Key) -> u64 {
        let (queue, sender) = (self.queues.entry(key).or_default(), self.senders.entry(key.1).or_default());
        let number = queue.posted;
        queue.posted += 1;
        match queue.unawaited.remove(&number) {
            Some(bytes) => sender.unawaited_bytes -= bytes,
            None => sender.awaited += 1,
        }
        number
    }

    /// Returns whether a message from a sender may come in: if a message is awaited, or few bytes wait.
    pub(crate) fn has_room(&self, from: usize, bytes_max: usize) -> bool {
        let sender = self.senders.get(&from);
        sender.is_none_or(|sender| sender.awaited > 0 || sender.unawaited_bytes <= bytes_max)
    }

    /// Numbers a message whose elements follow.
    pub(crate) fn announce(&mut self, key: Key, bytes: usize) -> u64 {
        let (queue, sender) = (self.queues.entry(key).or_default(), self.senders.entry(key.1).or_default());
        let number = queue.announced;
        queue.announced += 1;
        if number < queue.posted {
            sender.awaited -= 1;
        } else {
            queue.unawaited.insert(number, bytes);
            sender.unawaited_bytes += bytes;
        }
        number
    }

    /// Keeps an announced message, unless the receive was abandoned.
    pub(crate) fn arrive(&mut self, key: Key, number: u64, header: Header, buffer: Buffer) {
        let queue = self.queues.entry(key).or_default();
        if queue.given_up.remove(&number) {
            queue.finished += 1;
        } else {
            queue.arrived.insert(number, (header, buffer));
        }
        self.senders.entry(key.1).or_default().arrived += 1;
        self.forget(key);
    }

    pub(crate) fn is_ready(&self, key: Key, number: u64) -> bool {
        self.queues.get(&key).is_some_and(|queue| queue.arrived.contains_key(&number))
    }

    /// Returns the message for a receive, if it has arrived.
    pub(crate) fn take(&mut self, key: Key, number: u64) -> Option<(Header, Buffer)> {
        let queue = self.queues.get_mut(&key)?;
        let message = queue.arrived.remove(&number)?;
        queue.finished += 1;
        self.forget(key);
        Some(message)
    }

    /// Abandons a receive; the message is dropped.
    pub(crate) fn give_up(&mut self, key: Key, number: u64) {
        if let Some(queue) = self.queues.get_mut(&key) {
            match queue.arrived.remove(&number) {
                Some(_) => queue.finished += 1,
                None => drop(queue.given_up.insert(number)),
            }
        }
        self.forget(key);
    }

    /// Returns the number of messages from a sender that have arrived.
    pub(crate) fn arrived(&self, from: usize) -> u64 {
        self.senders.get(&from).map_or(0, |sender| sender.arrived)
    }

    /// Removes a queue that nothing refers to; it is then counted from 0 again.
    fn forget(&mut self, key: Key) {
        let is_idle = |queue: &Queue| queue.posted == queue.announced && queue.posted == queue.finished;
        if self.queues.get(&key).is_some_and(is_idle) {
            self.queues.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use dflop_comm::{PayloadShape, StepContext};

    use super::*;

    const KEY: Key = (0, 3, 7);

    fn arrive(mailbox: &mut Mailbox, value: u8) -> u64 {
        let header = Header {
            comm: 0,
            tag: 7,
            at: StepContext::step(0, "send"),
            shape: PayloadShape::flat(dflop_comm::Dtype::U8, 1),
        };
        let number = mailbox.announce(KEY, 1);
        mailbox.arrive(KEY, number, header, Buffer::U8(vec![value]));
        number
    }

    #[test]
    fn receives_take_messages_in_order_and_given_up_ones_are_dropped() {
        let mut mailbox = Mailbox::default();
        let early = mailbox.post(KEY);
        arrive(&mut mailbox, 10);
        arrive(&mut mailbox, 11);
        let late = mailbox.post(KEY);
        let given_up = mailbox.post(KEY);
        mailbox.give_up(KEY, given_up);
        let last = mailbox.post(KEY);
        arrive(&mut mailbox, 12);
        assert!(!mailbox.is_ready(KEY, last));
        arrive(&mut mailbox, 13);
        let mut take = |number| mailbox.take(KEY, number).map(|(_, buffer)| buffer);
        assert_eq!(take(last), Some(Buffer::U8(vec![13])));
        assert_eq!(take(early), Some(Buffer::U8(vec![10])));
        assert_eq!(take(late), Some(Buffer::U8(vec![11])));
        assert_eq!(mailbox.arrived(3), 4);
        assert!(mailbox.queues.is_empty(), "nothing is left behind");
    }

    #[test]
    fn a_sender_has_room_while_it_is_awaited_or_few_bytes_wait() {
        let mut mailbox = Mailbox::default();
        assert!(mailbox.has_room(3, 0));
        mailbox.announce(KEY, 100);
        assert!(!mailbox.has_room(3, 99) && mailbox.has_room(3, 100) && mailbox.has_room(4, 0));
        // Another message from the sender is awaited, after this message.
        mailbox.post((0, 3, 8));
        assert!(mailbox.has_room(3, 99));
        mailbox.announce((0, 3, 8), 1);
        assert!(!mailbox.has_room(3, 99));
        mailbox.post(KEY);
        assert!(mailbox.has_room(3, 0));
    }
}
