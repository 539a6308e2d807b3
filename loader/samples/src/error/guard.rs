//! Turns panics in third-party parsers into errors: parser input comes from data and models.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Number of [`guarded`] calls in progress on this thread.
    static GUARDS: Cell<usize> = const { Cell::new(0) };
}

/// Runs a third-party parser and catches panics.
///
/// The first call wraps the process panic hook, so that a panic that becomes an error is not also printed;
/// all other panics are printed as before. Threads that the parser starts are not covered.
///
/// # Errors
/// Returns the panic message.
pub fn guarded<T>(parse: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let printing = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // A terminating thread has no count any more, and no parser.
            if GUARDS.try_with(Cell::get).unwrap_or_default() == 0 {
                printing(panic);
            }
        }));
    });
    GUARDS.set(GUARDS.get() + 1);
    let parsed = catch_unwind(AssertUnwindSafe(parse));
    GUARDS.set(GUARDS.get() - 1);
    parsed.map_err(|panic| format!("its parser failed: {}", message(&*panic)))
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        assert_eq!(guarded(|| 3), Ok(3));
        let number = 7;
        assert_eq!(guarded(|| panic!("slice {number} > 1")).unwrap_err(), "its parser failed: slice 7 > 1");
    }

    /// Runs this test again in a separate process and checks the standard error output.
    #[test]
    fn only_a_panic_that_becomes_an_error_is_silent() {
        const CHILD: &str = "DFLOP_TEST_GUARDED_PANICS";
        if std::env::var_os(CHILD).is_some() {
            let nested = guarded(|| {
                guarded(|| panic!("inner panic")).unwrap_err() + &guarded(|| 1).unwrap().to_string()
            });
            assert!(nested.is_ok() && guarded(|| panic!("caught panic")).is_err());
            let thread = std::thread::spawn(|| panic!("panic of a thread"));
            assert!(thread.join().is_err());
            return;
        }
        let run = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["only_a_panic_that_becomes_an_error_is_silent", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{text}");
        assert!(text.contains("panic of a thread"), "{text}");
        assert!(!text.contains("inner panic") && !text.contains("caught panic"), "{text}");
    }
}
