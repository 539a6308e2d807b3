//! Errors for settings and media, skipped samples, parser panics, and shortened quotations.

use std::any::Any;
use std::borrow::Cow;
use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use serde_json::Value;

/// Cause of an error in user code or in a dependency.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Result type for fallible functions in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a sample processor or an augmentation cannot be created, or rejects a medium.
///
/// New variants are a breaking change, so that every conversion has to handle them.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A setting is invalid; returned by constructors and builders.
    #[error("invalid `{setting}`: {reason}")]
    Config { setting: &'static str, reason: String },
    /// A file cannot be read.
    #[error("could not access `{path}`")]
    File { path: String, source: std::io::Error },
    /// A model rejects a medium; the sample is bad for this model, the next sample may be good.
    #[error("the model cannot take the {medium}")]
    Medium { medium: &'static str, source: BoxError },
}

/// Maximum number of characters in a quoted value.
pub const EXCERPT_CHARACTERS: usize = 200;

/// Returns the text, cut to at most `characters`; a cut text ends with an ellipsis.
///
/// # Examples
/// ```
/// assert_eq!(dflop_samples::excerpt("grüße", 4), "grü…");
/// ```
#[must_use]
pub fn excerpt(text: &str, characters: usize) -> Cow<'_, str> {
    if text.char_indices().nth(characters).is_none() {
        return Cow::Borrowed(text);
    }
    let end = text.char_indices().nth(characters.saturating_sub(1)).map_or(0, |(end, _)| end);
    Cow::Owned(format!("{}…", &text[..end]))
}

/// Formats a value as JSON, cut to [`EXCERPT_CHARACTERS`]; serialization stops at the limit.
#[must_use]
pub fn json_excerpt(value: &Value) -> String {
    let mut head = Head(Vec::with_capacity(64));
    // Serialization fails once the excerpt is full.
    let _ = serde_json::to_writer(&mut head, value);
    excerpt(&String::from_utf8_lossy(&head.0), EXCERPT_CHARACTERS).into_owned()
}

/// Writer that keeps only the first bytes.
struct Head(Vec<u8>);

impl Write for Head {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // Enough bytes for the maximum number of characters and the start of the next character.
        if self.0.len() > 4 * (EXCERPT_CHARACTERS + 1) {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        let taken = bytes.len().min(4 * (EXCERPT_CHARACTERS + 2));
        self.0.extend_from_slice(&bytes[..taken]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

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

/// A sample, or the rest of a shard, that was not delivered, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Skipped {
    /// URL of the shard.
    pub shard: String,
    /// Offset of the sample or the fault in the shard, after decompression.
    pub offset: u64,
    /// Sample key; `None` if the fault hides it.
    pub key: Option<String>,
    /// Extension of the field at fault; `None` if the sample or the shard is at fault.
    pub field: Option<String>,
    /// Reason for skipping the sample.
    pub reason: String,
}

/// Formats an error and its causes as a single line; causes already contained in the line are omitted.
#[must_use]
pub fn error_reason(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.map(ToString::to_string).fold(error.to_string(), |line, cause| {
        if line.contains(&cause) { line } else { format!("{line}: {cause}") }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_is_cut_to_its_limit_and_no_shorter() {
        assert_eq!(excerpt("grüße", 5), "grüße");
        assert_eq!(excerpt("grüße", 4), "grü…");
        assert_eq!(excerpt("", 0), "");
    }

    #[test]
    fn a_long_value_is_cut_wherever_it_is_long() {
        assert_eq!(json_excerpt(&json!({"a": [1, "x"]})), r#"{"a":[1,"x"]}"#);
        for value in [json!("ä".repeat(100_000)), json!(vec!["word"; 10_000]), json!({"a".repeat(1000): 1})]
        {
            assert_eq!(json_excerpt(&value).chars().count(), EXCERPT_CHARACTERS);
        }
    }

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
