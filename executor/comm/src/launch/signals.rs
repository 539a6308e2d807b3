//! Turns `SIGINT` and `SIGTERM` into stop requests, of which a second ends the process, and ends a rank whose
//! launcher was killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

use crate::error::{Error, Result};

/// Time after a first signal within which further signals are the same request: `timeout` and terminals
/// signal both a process and the process group.
pub(super) const SAME_REQUEST: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(50);

/// `SIGINT` and `SIGTERM` handlers, while they exist. Dropping them restores the default effect.
#[derive(Debug)]
pub struct StopSignals {
    received: Arc<AtomicUsize>,
    ids: Vec<signal_hook::SigId>,
    /// Restores the default effect of signals once set.
    is_default: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
}

impl StopSignals {
    /// Registers handlers that record a signal and do nothing else.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn register() -> Result<Self> {
        let (received, is_default, is_over) = (Arc::default(), Arc::<AtomicBool>::default(), Arc::default());
        let mut signals = Self { received, ids: Vec::new(), is_default, is_over };
        let failed = |source| Error::Io { action: "register signal handlers".into(), source };
        for signal in [SIGINT, SIGTERM] {
            // first, so that the signal which sets the flag is not affected by it
            flag::register_conditional_default(signal, signals.is_default.clone()).map_err(failed)?;
            let id = flag::register_usize(signal, signals.received.clone(), signal as usize);
            signals.ids.push(id.map_err(failed)?);
        }
        Ok(signals)
    }

    /// Lets a signal that arrives a second or more after the first signal end this process at once.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started.
    pub fn second_ends_process(self) -> Result<Self> {
        let (received, is_default) = (self.received.clone(), self.is_default.clone());
        let is_over = self.is_over.clone();
        let watch = move || {
            while received.load(Ordering::Relaxed) == 0 && !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(POLL);
            }
            std::thread::sleep(SAME_REQUEST);
            is_default.store(true, Ordering::Relaxed);
        };
        let thread = std::thread::Builder::new().name("stop-signals".into()).spawn(watch);
        thread.map_err(|source| Error::Io { action: "watch for signals".into(), source })?;
        Ok(self)
    }

    /// Returns the last signal that was received, if any.
    #[must_use]
    pub fn received(&self) -> Option<Signal> {
        named(self.received.load(Ordering::Relaxed))
    }

    /// Returns the last signal and forgets it.
    pub(super) fn take(&self) -> Option<Signal> {
        named(self.received.swap(0, Ordering::Relaxed))
    }
}

fn named(signal: usize) -> Option<Signal> {
    [Signal::INT, Signal::TERM].into_iter().find(|own| own.as_raw() as usize == signal)
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
        self.is_over.store(true, Ordering::Relaxed);
        self.is_default.store(true, Ordering::Relaxed);
    }
}

/// Returns whether a [`Launcher`](super::Launcher) started this process: it passes signals on, and kills a
/// rank that does not end.
#[must_use]
pub fn has_launcher() -> bool {
    std::env::var_os("DFLOP_STORE").is_some_and(|store| store == "launcher")
}

/// Requests that the system ends this process when the parent dies for any reason.
///
/// Only takes effect in ranks that [`Launcher`](super::Launcher) started, which have `DFLOP_STORE=launcher`
/// set. Linux only; on other systems ranks continue to the end after the launcher is killed.
///
/// # Errors
/// [`Error::Io`] if the system refuses, or the launcher is already dead.
pub fn end_with_launcher() -> Result<()> {
    #[cfg(target_os = "linux")]
    if has_launcher() {
        use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
        let failed = |source| Error::Io { action: "tie this rank to its launcher".into(), source };
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| failed(error.into()))?;
        // the launcher may have died before the request above took effect
        if getppid() == Some(Pid::INIT) {
            return Err(failed(std::io::Error::other("the launcher died")));
        }
    }
    Ok(())
}
