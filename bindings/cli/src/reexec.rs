//! Starts this command line again in a new process, as required by the `dflop train` ranks.

use std::ffi::OsString;
use std::path::PathBuf;

/// Executable that runs this command line: a file and its leading arguments, such as an interpreter and a
/// module name.
#[derive(Debug, Clone)]
pub struct Program {
    /// `None` is the file that this process runs.
    path: Option<PathBuf>,
    leading: Vec<OsString>,
}

impl Program {
    /// Returns this process's executable, which is the command line itself.
    #[must_use]
    pub fn this() -> Self {
        Self { path: None, leading: Vec::new() }
    }

    /// Returns an executable that becomes the command line when `leading` precede all other arguments.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, leading: impl IntoIterator<Item = OsString>) -> Self {
        Self { path: Some(path.into()), leading: leading.into_iter().collect() }
    }
}

/// Command line of this process.
#[derive(Debug)]
pub(crate) struct Invocation {
    pub(crate) program: Program,
    /// User arguments, without the program name.
    pub(crate) args: Vec<OsString>,
}

impl Invocation {
    /// Returns the file to start for the same command in a new process.
    pub(crate) fn path(&self) -> std::io::Result<PathBuf> {
        // Resolved late: only `train` starts processes, and `current_exe` can fail.
        self.program.path.clone().map_or_else(std::env::current_exe, Ok)
    }

    /// Returns the arguments to start it with.
    pub(crate) fn args(&self) -> impl Iterator<Item = &OsString> {
        self.program.leading.iter().chain(&self.args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_arguments_come_before_those_of_the_user() {
        let program = Program::new("python", ["-m", "dflop"].map(OsString::from));
        let invocation = Invocation { program, args: vec!["train".into()] };
        assert_eq!(invocation.path().unwrap(), PathBuf::from("python"));
        assert_eq!(invocation.args().collect::<Vec<_>>(), ["-m", "dflop", "train"]);
    }

    #[test]
    fn the_program_of_this_process_needs_no_name() {
        let invocation = Invocation { program: Program::this(), args: Vec::new() };
        assert_eq!(invocation.path().unwrap(), std::env::current_exe().unwrap());
        assert_eq!(invocation.args().count(), 0);
    }
}
