//! Ranks whose launcher was killed.

use crate::comm::{Error, Result};

/// Has the system end this process when the process that started it dies, however it dies.
///
/// For ranks that [`Launcher`](super::Launcher) started: `DFLOP_STORE=launcher` says so, without it nothing
/// happens. Linux only; elsewhere the ranks of a killed launcher run on to their end.
///
/// # Errors
/// [`Error::Io`] if the system refuses, or the launcher is dead already.
pub fn end_with_launcher() -> Result<()> {
    #[cfg(target_os = "linux")]
    if std::env::var_os("DFLOP_STORE").is_some_and(|store| store == "launcher") {
        use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
        let failed = |source| Error::Io { action: "tie this rank to its launcher".into(), source };
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| failed(error.into()))?;
        if getppid() == Some(Pid::INIT) {
            return Err(failed(std::io::Error::other("the launcher died")));
        }
    }
    Ok(())
}
