//! Ends a rank whose launcher was killed.

use crate::error::{Error, Result};

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
