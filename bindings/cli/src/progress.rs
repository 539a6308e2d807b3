//! Draws progress bars on standard error, if it is a terminal.

use std::fmt::Write;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Progress listener that draws a library's running task as a bar.
#[derive(Debug, Default)]
pub(crate) struct Bars(Mutex<Option<ProgressBar>>);

/// Creates a bar; it is hidden if standard error is not a terminal.
pub(crate) fn bar(what: &str, total: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
    let template = match total {
        Some(_) => "{msg:>10} {wide_bar} {human_pos}/{human_len} {rate} {eta}",
        None => "{msg:>10} {spinner} {human_pos} {rate} {elapsed}",
    };
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    bar.set_style(style.with_key("rate", |state: &ProgressState, text: &mut dyn Write| {
        // A failure to write a bar is no reason to end.
        let _ = text.write_str(&rate(state.per_sec()));
    }));
    bar.set_message(what.to_owned());
    bar
}

/// Formats a rate with three significant digits.
fn rate(per_second: f64) -> String {
    let decimals = match per_second {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{per_second:.decimals$}/s")
}

impl dflop_loader::flow::Progress for Bars {
    fn begin(&self, what: &str, total: u64) {
        *self.lock() = Some(bar(what, (total > 0).then_some(total)));
    }

    fn advance(&self, units: u64) {
        if let Some(bar) = &*self.lock() {
            bar.inc(units);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.lock().take() {
            bar.finish_and_clear();
        }
    }
}

impl Bars {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<ProgressBar>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_significant_digits() {
        let rates = [0.0, 1.3055, 18.26, 181.9826, 20_481.7].map(rate);
        assert_eq!(rates, ["0.00/s", "1.31/s", "18.3/s", "182/s", "20482/s"]);
    }
}
