//! Command failures: messages, causes and the exit status.
//!
//! Options of earlier versions, which are refused with what replaces them.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use dflop_loader::store::{redact, redact_name};
use std::borrow::Cow;
use std::ffi::OsString;
use std::io::Write;

/// Prints the message of the argument parser, which may be requested help, and returns the exit status.
///
/// - `args`: the parsed arguments
pub(crate) fn show_usage(error: &clap::Error, args: &[OsString]) -> u8 {
    // A closed pipe is not an error here: the exit status carries the outcome.
    let text = without_credentials(&error.to_string(), args) + &moved_option(error);
    let _ = if text == error.to_string() {
        // With colors, where there is a terminal.
        error.print()
    } else if error.use_stderr() {
        write!(std::io::stderr(), "{text}")
    } else {
        write!(std::io::stdout(), "{text}")
    }
    .and_then(|()| std::io::stdout().flush());
    error.exit_code().try_into().unwrap_or(2)
}

/// Returns a line that names what replaces an option of an earlier version; empty for other errors.
pub(crate) fn moved_option(error: &clap::Error) -> String {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return String::new() };
    let replacement = (error.kind() == ErrorKind::UnknownArgument).then(|| replacement(option)).flatten();
    replacement.map_or_else(String::new, |new| format!("\nnote: `{option}` is now: {new}\n"))
}

/// Returns a message without credentials; the message may quote arguments and argument parts. Text that only
/// an argument identifies as the rest of a URL, such as `USER:PASSWORD@HOST`, is removed, too.
pub(crate) fn without_credentials(message: &str, args: &[OsString]) -> String {
    let mut text = message.to_owned();
    for argument in args {
        let argument = argument.to_string_lossy();
        // The `=` in an option or a weight, not in a query.
        let is_option = |name: &str| argument.starts_with('-') || !name.contains(['?', ':', '/']);
        let split = argument.split_once('=').filter(|(name, _)| is_option(name));
        let (name, value) = split.unwrap_or((&argument, ""));
        for part in [&*argument, value, argument.trim_start_matches('-'), name.trim_start_matches('-')] {
            if let Cow::Owned(redacted) = redact_name(part) {
                text = text.replace(part, &redacted);
            }
        }
    }
    redact(&text).into_owned()
}

/// Outcome of a command that did not complete, by exit status.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments are invalid: exit status 2.
    Misuse(String),
    /// The command started and failed: exit status 1.
    Failed(String),
    /// The run ended because another rank failed, which reports the cause itself: exit status 75.
    Secondary(String),
    /// A signal stopped the run in order, which has been reported: exit status 128 plus its number.
    Stopped { signal: i32 },
    /// Standard output was closed, as `head` does at the end of a pipe: exit status 0, without a message.
    Closed,
}

/// Error from a command that was run for its output, see [`crate::answer_from`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The error and its causes, each on a separate line.
    pub message: String,
    /// Whether the arguments are invalid; otherwise the command started and failed.
    pub is_misuse: bool,
}

impl Failure {
    /// Names the file that the failure is about.
    pub(crate) fn in_file(self, path: &std::path::Path) -> Self {
        self.named(&format!("`{}`", path.display()))
    }

    fn named(self, what: &str) -> Self {
        let name = |message| format!("{what}: {message}");
        match self {
            Self::Misuse(message) => Self::Misuse(name(message)),
            Self::Failed(message) => Self::Failed(name(message)),
            Self::Secondary(message) => Self::Secondary(name(message)),
            Self::Stopped { .. } | Self::Closed => self,
        }
    }

    /// Returns the message, without credentials.
    pub(crate) fn message(&self) -> Cow<'_, str> {
        match self {
            Self::Misuse(message) | Self::Failed(message) | Self::Secondary(message) => redact(message),
            Self::Stopped { signal } => Cow::Owned(format!("stopped by signal {signal}")),
            Self::Closed => Cow::Borrowed("standard output was closed"),
        }
    }

    /// Converts to the printed message and whether the arguments are at fault.
    pub(crate) fn into_refusal(self) -> Refusal {
        Refusal { message: self.message().into_owned(), is_misuse: matches!(self, Self::Misuse(_)) }
    }

    /// Prints the error, which the command with these arguments returned, and returns the exit status.
    #[expect(clippy::print_stderr, reason = "errors go to standard error")]
    pub(crate) fn report(&self, args: &[OsString]) -> u8 {
        let (message, code) = match self {
            Self::Misuse(message) => (message, 2),
            Self::Failed(message) => (message, 1),
            Self::Secondary(message) => (message, 75),
            Self::Stopped { signal } => return u8::try_from(128 + signal).unwrap_or(1),
            Self::Closed => return 0,
        };
        let lines: Vec<_> = message.lines().map(escape_controls).collect();
        eprintln!("dflop: {}", without_credentials(&lines.join("\n"), args));
        code
    }
}

/// Standard error for log lines, which are shown without credentials.
#[derive(Debug, Default)]
pub(crate) struct RedactedLog;

impl Write for RedactedLog {
    /// Writes an event, which the log formats as a whole.
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        std::io::stderr().write_all(redact(&String::from_utf8_lossy(event)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Escapes control characters: names in archives may contain them, and a terminal obeys them.
pub(crate) fn escape_controls(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            escaped.extend(character.escape_default());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

/// Joins an error and the error causes, one per line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}\n  because: {cause}"))
}

impl From<dflop_loader::Error> for Failure {
    fn from(error: dflop_loader::Error) -> Self {
        use dflop_loader::Error::{Config, Model, Selection};
        use dflop_loader::error::SelectionError::{RunEnded, ShardList};
        match error {
            Model(error) => error.into(),
            Config { .. } | Selection(RunEnded { .. } | ShardList { .. }) => {
                Self::Misuse(with_causes(&error))
            }
            _ => Self::Failed(with_causes(&error)),
        }
    }
}

impl From<dflop_costmodel::Error> for Failure {
    fn from(error: dflop_costmodel::Error) -> Self {
        use dflop_costmodel::Error::{ProfileFormat, ProfileLacks, ProfileMixed, UnknownDevice};
        match error {
            // The arguments are right, the file that they name is not.
            ProfileFormat { .. } | ProfileLacks { .. } | ProfileMixed { .. } => {
                Self::Failed(with_causes(&error))
            }
            UnknownDevice { ref name, ref known } => {
                Self::Misuse(with_causes(&error) + &did_you_mean(name, known.split(", ")))
            }
            _ => Self::Misuse(with_causes(&error)),
        }
    }
}

/// Returns a line with the names that are similar to a name; empty if no name is.
pub(crate) fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    // A typo, or a part of a name.
    let difference =
        |known: &str| edits(name, known).min(if known.starts_with(name) { 1 } else { usize::MAX });
    let near = known.into_iter().map(|known| (difference(known), known));
    let mut near: Vec<_> = near.filter(|(edits, known)| *edits * 3 <= known.len().min(name.len())).collect();
    near.sort_unstable();
    let near: Vec<String> = near.into_iter().take(3).map(|(_, known)| format!("`{known}`")).collect();
    if near.is_empty() { String::new() } else { format!("\ndid you mean {}?", near.join(" or ")) }
}

/// Counts the insertions, deletions and replacements of bytes that turn one text into another.
fn edits(from: &str, into: &str) -> usize {
    let mut row: Vec<usize> = (0..=into.len()).collect();
    for (at, byte) in from.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in into.bytes().enumerate() {
            let replaced = diagonal + usize::from(byte != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[into.len()]
}

impl From<dflop_balancer::Error> for Failure {
    fn from(error: dflop_balancer::Error) -> Self {
        match error {
            dflop_balancer::Error::Config { .. } => Self::Misuse(with_causes(&error)),
            _ => Self::Failed(with_causes(&error)),
        }
    }
}

impl From<dflop_loader::error::ProcessorError> for Failure {
    fn from(error: dflop_loader::error::ProcessorError) -> Self {
        dflop_loader::Error::from(error).into()
    }
}

impl From<dflop_executor::Error> for Failure {
    fn from(error: dflop_executor::Error) -> Self {
        use dflop_executor::Error::{
            Config, CostModel, Device, InvalidSetting, Io, Loader, Model, Named, RankEnded,
        };
        use dflop_executor::{device, models};
        match error {
            CostModel(error) => error.into(),
            Loader(error) => error.into(),
            Io(error) => error.into(),
            Named(dflop_executor::Named { place, error }) => Self::from(*error).named(&place),
            Config(message) => Self::Misuse(message),
            // Some arguments are only checked on the ranks; their misuse counts as misuse by this command.
            RankEnded { code: Some(2), .. } => Self::Misuse(error.to_string()),
            error if error.is_secondary() => Self::Secondary(with_causes(&error)),
            InvalidSetting { .. }
            | Device(device::Error::InvalidSetting { .. })
            | Model(models::Error::ModelConfig { .. }) => Self::Misuse(with_causes(&error)),
            _ => Self::Failed(with_causes(&error)),
        }
    }
}

impl From<dflop_executor::device::Error> for Failure {
    fn from(error: dflop_executor::device::Error) -> Self {
        dflop_executor::Error::from(error).into()
    }
}

impl From<dflop_executor::models::Error> for Failure {
    fn from(error: dflop_executor::models::Error) -> Self {
        dflop_executor::Error::from(error).into()
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            Self::Closed
        } else {
            Self::Failed(with_causes(&error))
        }
    }
}

/// Returns the setting that replaces an option of an earlier version.
pub(crate) fn replacement(option: &str) -> Option<&'static str> {
    let found = REPLACED.iter().find(|(old, _)| option.strip_prefix("--") == Some(*old));
    found.map(|(_, new)| *new)
}

/// Options of earlier versions, and what replaces them.
const REPLACED: [(&str, &str); 60] = [
    ("accept-changed-data", "--set order.accept_changed_data=true"),
    ("allow-outside", "--set store.allow=outside"),
    ("allow-pipe", "--set store.allow=pipe"),
    ("allow-recompute", "--set space.recompute=true"),
    ("block-samples", "--set order.shuffle=blocks:SAMPLES:RUNS"),
    ("buffered-bytes-max", "--set read.buffered_bytes=N"),
    ("bytes-max", "--set plan.bytes_max=N"),
    ("cache", "--set store.cache=DIR"),
    ("cache-bytes", "--set store.cache_bytes=N"),
    ("chat-template", "--set processor.chat_template=@FILE"),
    ("color-jitter", "--set augment.color_jitter=B,C,S,H"),
    ("counted-media", "--set processor.dtype=none"),
    ("encoder-ahead", "--set space.encoder_ahead=true"),
    ("encoder-share", "--set space.encoder_share=medium|sample|tile"),
    ("ep", "--set space.expert_parallel=N"),
    ("epoch", "--set order.first_epoch=E"),
    ("error-budget", "--set read.error_budget=FRACTION"),
    ("error-count", "--set read.error_budget=FRACTION:N"),
    ("expert-imbalance", "--set space.expert_imbalance=FACTOR"),
    ("field-bytes-max", "--set read.field_bytes=N"),
    ("fields", "--set read.fields=NAMES"),
    ("flip", "--set augment.flip=0.5"),
    ("freeze", "--set cost.freeze=PARTS"),
    ("global-batch", "--global-batch-size"),
    ("index", "--set index.directory=DIR"),
    ("layout", "--set processor.layout=packed|packed:N|padded|padded_left"),
    ("long-sample", "--set processor.long_sample=error:N|truncate:N|drop:N"),
    ("memory-margin", "--set space.memory_margin=FACTOR"),
    ("no-profile-check", "--set cost.profile_check=false"),
    ("open-blocks", "--set order.shuffle=blocks:SAMPLES:RUNS"),
    ("pad-to-tokens", "--set processor.length_buckets=fixed:N"),
    ("pipeline-stages", "--stages"),
    ("placement", "--set space.placement=NAME"),
    ("profile-tp", "--set cost.profile_tp=N,N"),
    ("question", "--set processor.caption_prompt=TEXT"),
    ("random-crop", "--set augment.crop=0.08,1"),
    ("read", "--set store.read=auto|mmap|pread"),
    ("recompute", "--set cost.recompute=none|scores|layers"),
    ("repeat-samples", "--set order.tail=repeat"),
    ("report-previews", "a report shows the 24 most expensive samples"),
    ("requests-max", "--set store.requests_max=N"),
    ("retry-seconds", "--set store.retry_seconds=N"),
    ("scaled-decode", "--set read.scaled_decode=true"),
    ("schedule", "--set plan.schedule=NAME"),
    ("sequence-parallel", "--set space.sequence_parallel=true"),
    ("shuffle", "--set order.shuffle=global|blocks|none"),
    ("space", "--set space.kinds=basic|full"),
    ("splits", "--set index.splits=FILE"),
    ("stages", "--set plan.stages=N,N"),
    ("stall-error-seconds", "--set read.stall_seconds=N"),
    ("stall-seconds", "--set read.stall_log_seconds=N"),
    ("strategy", "--set plan.strategy=NAME"),
    ("strict", "--set read.decode=strict"),
    ("tail", "--set order.tail=carry|repeat|drop|short"),
    ("tokens-max", "--set plan.tokens_max=N"),
    ("uneven-layers", "--set space.uneven_layers=true"),
    ("validation", "--set order.shuffle=none --set order.tail=short --epochs 1"),
    ("video-sampling", "--set index.videos=fps:RATE:MAX|uniform:N|keyframes:MAX"),
    ("work", "--set plan.strategy=search:N"),
    ("workers", "--set read.workers=N"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_proposed_and_others_are_not() {
        let names = ["h100", "h200", "b200", "search", "omni-7b", "qwen2.5-vl-7b"];
        for (name, meant) in [
            ("searchx", "\ndid you mean `search`?"),
            ("omni7b", "\ndid you mean `omni-7b`?"),
            ("h1000", "\ndid you mean `h100`?"),
            ("qwen2.5-vl", "\ndid you mean `qwen2.5-vl-7b`?"),
            ("tpu", ""),
        ] {
            assert_eq!(did_you_mean(name, names), meant, "{name}");
        }
        assert_eq!((edits("kitten", "sitting"), edits("", "ab"), edits("a", "")), (3, 2, 1));
    }
}
