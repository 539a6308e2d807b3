//! Claims, which are tests as values, and the harness that runs them.

use std::fmt::Arguments;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use libtest_mimic::Trial;

/// A test.
pub struct Claim {
    /// Path within this crate: `parity::omni::the_thinker_is_found_in_a_whole_checkpoint`.
    pub name: String,
    /// Panics if the claim does not hold.
    pub run: Box<dyn FnOnce() + Send>,
}

impl Claim {
    /// Creates a claim from a function in a module of this crate.
    pub(crate) fn new(module: &str, name: &str, run: impl FnOnce() + Send + 'static) -> Self {
        let (_, module) = module.split_once("::").expect("a module below the root");
        Self { name: format!("{module}::{name}"), run: Box::new(run) }
    }
}

/// Defines `claims`, which lists the claims in a file by function name.
///
/// These functions are private, so that the compiler reports a function that is not listed.
macro_rules! claims {
    (cpu: $($name:ident),+ $(,)?) => {
        /// Lists the claims in this file, which cover the CPU device.
        pub fn claims() -> Vec<$crate::claim::Claim> {
            vec![$($crate::claim::Claim::new(module_path!(), stringify!($name), $name)),+]
        }
    };
    ($($name:ident),+ $(,)?) => {
        /// Lists the claims in this file.
        pub fn claims<B: $crate::device::TestBackend>() -> Vec<$crate::claim::Claim> {
            vec![$($crate::claim::Claim::new(module_path!(), stringify!($name), $name::<B>)),+]
        }
    };
}
pub(crate) use claims;

/// Whether measured values are printed.
static IS_SHOWN: AtomicBool = AtomicBool::new(false);

/// Prints a measured value like `println`, if the harness is started with `--nocapture`.
macro_rules! report {
    ($($part:tt)+) => { $crate::claim::show(format_args!($($part)+)) };
}
pub(crate) use report;

#[expect(clippy::print_stdout, reason = "differences are worth reading")]
pub(crate) fn show(value: Arguments<'_>) {
    if IS_SHOWN.load(Ordering::Relaxed) {
        println!("{value}");
    }
}

/// Runs the claims that the process arguments select, for each device by name.
pub(crate) fn run(devices: Vec<(&str, Vec<Claim>)>) -> ExitCode {
    let arguments = libtest_mimic::Arguments::from_args();
    IS_SHOWN.store(arguments.nocapture, Ordering::Relaxed);
    let mut trials = Vec::new();
    for (device, claims) in devices {
        trials.extend(claims.into_iter().map(|claim| {
            let run = claim.run;
            Trial::test(format!("{device}::{}", claim.name), move || {
                run();
                Ok(())
            })
        }));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
