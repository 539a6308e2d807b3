//! Draws progress bars on standard error, if it is a terminal.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress listener that draws the running task of a library as a bar.
#[derive(Debug, Default)]
pub(crate) struct Bars(Mutex<Option<ProgressBar>>);

/// Creates a bar; it is hidden if standard error is not a terminal.
pub(crate) fn bar(what: &str, total: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
    let template = match total {
        Some(_) => "{msg:>10} {wide_bar} {human_pos}/{human_len} {per_sec} {eta}",
        None => "{msg:>10} {spinner} {human_pos} {per_sec} {elapsed}",
    };
    bar.set_style(ProgressStyle::with_template(template).expect("the template is valid"));
    bar.set_message(what.to_owned());
    bar
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
