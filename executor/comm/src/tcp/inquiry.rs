//! Status requests, each on a separate connection.
//!
//! The requesting rank connects directly to the requested rank, so a rank that does not answer is the rank to
//! blame.

use super::control::Control;
use super::dial::Line;
use super::links::Links;
use super::socket::{Socket, send_all, set_read_limit};
use crate::endpoint::Status;
use std::io;
use std::time::{Duration, Instant};

/// Time limit for the single message from the caller.
const MESSAGE: Duration = Duration::from_secs(5);

impl Links {
    /// Requests the status of a rank; returns `None` if the rank does not answer in time, or if the job has
    /// failed.
    pub(super) fn ask(&self, peer: usize, timeout: Duration) -> Option<Status> {
        match self.ask_once(peer, Instant::now() + timeout) {
            Ok(Some(Control::StatusReply(status))) => return Some(status),
            Ok(Some(control @ Control::Abort(_))) => self.take_control(peer, control),
            Ok(_) => {}
            Err(error) => tracing::debug!(peer, %error, "a status request failed"),
        }
        None
    }

    fn ask_once(&self, peer: usize, deadline: Instant) -> io::Result<Option<Control>> {
        let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = self.dial.dial(peer, Line::Inquiry, left())?;
        set_read_limit(&stream, left())?;
        send_all(&stream, &Control::StatusRequest.encode())?;
        Control::read(&mut &stream, self.size())
    }

    /// Serves a connection from a rank that requests the status, or that passes news on directly.
    pub(super) fn answer(&self, peer: usize, stream: &Socket) {
        let read = set_read_limit(stream, MESSAGE).and_then(|()| Control::read(&mut &*stream, self.size()));
        let answered = match read {
            Ok(Some(Control::StatusRequest)) => {
                let failure = self.mailbox.failure();
                let status = || Control::StatusReply(self.mailbox.status());
                send_all(stream, &failure.map_or_else(status, Control::Abort).encode())
            }
            Ok(Some(control @ (Control::Abort(_) | Control::Leave { .. }))) => {
                self.take_control(peer, control);
                Ok(())
            }
            // the caller gave up, or is not a rank with this version: its own wait ends
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = answered {
            tracing::debug!(peer, %error, "a call could not be answered");
        }
    }
}
