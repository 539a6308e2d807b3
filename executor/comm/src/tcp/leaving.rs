//! Ranks that leave in order: announcement over the tree, and a farewell on each data connection.

use super::control::Control;
use super::links::Links;
use crate::endpoint::tree;
use crate::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

/// Leave progress of a rank.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Leaving {
    /// Whether the rank has announced that it leaves, after the last control message.
    pub(super) is_announced: bool,
    /// Whether the data connection has ended with a farewell, after the last message.
    pub(super) has_said_farewell: bool,
    /// Whether the control connection has ended.
    pub(super) is_disconnected: bool,
}

impl Links {
    /// Announces that this rank leaves.
    ///
    /// - `to`: ranks to which it has a data connection
    pub(super) fn leave(&self, to: Vec<usize>) {
        self.pass_on(None, &Control::Leave { rank: self.rank, to }, None);
    }

    /// Records and passes on that a rank leaves.
    pub(super) fn set_leaving(&self, from: usize, rank: usize, to: Vec<usize>) {
        let mut leaving = self.leaving();
        let is_known = std::mem::replace(&mut leaving[rank].is_announced, true);
        let has_said_farewell = leaving[rank].has_said_farewell;
        drop(leaving);
        if is_known {
            return;
        }
        self.left.notify_all();
        // the last message comes before the farewell on the data connection
        if has_said_farewell || !to.contains(&self.rank) {
            self.mailbox.set_left(rank);
        }
        self.pass_on(Some(from), &Control::Leave { rank, to }, None);
    }

    pub(super) fn leaving(&self) -> MutexGuard<'_, Vec<Leaving>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes threads that wait for ranks to leave.
    pub(super) fn notify_left(&self) {
        // a wait that has just checked would miss the notification
        drop(self.leaving());
        self.left.notify_all();
    }

    pub(super) fn is_leaving(&self, rank: usize) -> bool {
        self.leaving()[rank].is_announced
    }

    /// Waits until all children leave as well: they may need this rank to reach other ranks.
    pub(super) fn wait_for_children(&self, timeout: Duration) {
        let stays = |leaving: &mut Vec<Leaving>| {
            let mut children = tree::children(self.rank, self.size());
            self.mailbox.failure().is_none() && children.any(|child| !leaving[child].is_announced)
        };
        drop(self.left.wait_timeout_while(self.leaving(), timeout, stays));
    }

    /// Records the farewell of a peer: all messages have arrived on the data connection. The peer has left
    /// once the announcement also arrives, or cannot arrive over a tree that falls apart.
    pub(super) fn farewell(&self, peer: usize) {
        let mut leaving = self.leaving();
        leaving[peer].has_said_farewell = true;
        let is_open = |leaving: &mut Vec<Leaving>| {
            !leaving[peer].is_announced && !self.is_closing() && self.mailbox.failure().is_none()
        };
        drop(self.left.wait_timeout_while(leaving, Self::NEWS, is_open));
        self.mailbox.set_left(peer);
    }
}
