//! Microbatches measured to check a profile, not to predict from.

use crate::module::Module;

/// Key of the lines `# held-out: microbatch,module,tokens,pairs,microseconds`.
pub(super) const HELD_OUT_KEY: &str = "held-out";

/// Module time over a mixed microbatch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOutRun {
    /// Microbatch number; modules with equal numbers ran the same microbatch.
    pub microbatch: u32,
    /// Module that ran.
    pub module: Module,
    /// Total tokens over all sequences inside the module.
    pub tokens: f64,
    /// Sum of squared sequence lengths.
    pub pairs: f64,
    /// Forward and backward microseconds, the median over the runs.
    pub microseconds: f64,
}

impl HeldOutRun {
    /// Parses a line's value.
    ///
    /// # Errors
    /// Expected and found fields.
    pub(super) fn parse(value: &str) -> Result<Self, String> {
        let fields: Vec<&str> = value.split(',').map(str::trim).collect();
        let expected = || format!("expected `microbatch,module,tokens,pairs,microseconds`, found `{value}`");
        let [microbatch, module, tokens, pairs, microseconds] = fields[..] else { return Err(expected()) };
        let number = |text: &str| text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
        let module = Module::ALL.into_iter().find(|known| known.name() == module);
        let run = || {
            Some(Self {
                microbatch: microbatch.parse().ok()?,
                module: module?,
                tokens: number(tokens)?,
                pairs: number(pairs)?,
                microseconds: number(microseconds)?,
            })
        };
        run().ok_or_else(expected)
    }
}

impl std::fmt::Display for HeldOutRun {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { microbatch, module, tokens, pairs, microseconds } = self;
        write!(formatter, "{microbatch},{module},{tokens},{pairs},{microseconds}")
    }
}
