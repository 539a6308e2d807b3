//! Turns panics of parsers of other crates into errors: their input comes with data and models.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a parser of another crate.
///
/// # Errors
/// The message of its panic. The panic hook of the process has printed it too.
pub fn guarded<T>(parse: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(parse)).map_err(|panic| format!("its parser failed: {}", message(&*panic)))
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
}
