//! Puts results into words and numbers for people.

use super::document::{Basis, StrategyResult, Study, Verdict};

/// Difference between two step times below which measured steps count as equal.
const EQUAL_FRACTION: f64 = 0.02;

/// Returns a verdict without a figure.
pub(crate) fn verdict(basis: Basis, text: impl Into<String>) -> Verdict {
    Verdict { basis, figure: String::new(), text: text.into() }
}

/// Compares the last strategy on each basis with the first; a basis with a single strategy is only named.
pub(crate) fn compare_steps(study: &Study) -> Vec<Verdict> {
    let of = |basis: Basis| study.strategies.iter().filter(move |result| result.basis == basis);
    let mut verdicts = Vec::new();
    for basis in [Basis::Simulated, Basis::Measured] {
        let (first, last) = (of(basis).next(), of(basis).next_back());
        match (first, last) {
            (Some(first), Some(last)) if first.name != last.name => {
                verdicts.push(compare(study, basis, first, last));
            }
            (Some(only), _) => verdicts.push(verdict(
                basis,
                format!(
                    "{}: a step of {} takes {}, {}.",
                    study.name,
                    only.name,
                    seconds(only.step_seconds),
                    word(basis)
                ),
            )),
            _ => {}
        }
    }
    verdicts
}

fn compare(study: &Study, basis: Basis, first: &StrategyResult, last: &StrategyResult) -> Verdict {
    let [before, after] = [first, last].map(|result| seconds(result.step_seconds));
    let difference = (first.step_seconds / last.step_seconds.max(f64::MIN_POSITIVE) - 1.0).abs();
    let result = if difference < EQUAL_FRACTION {
        format!("a step takes {after} with {} and {before} with {}: no difference", last.name, first.name)
    } else {
        format!("with {} a step takes {after} instead of {before} with {}", last.name, first.name)
    };
    let idle = match (first.bubble_fraction, last.bubble_fraction) {
        (Some(before), Some(after)) => {
            format!("; stages are idle {} of the time instead of {}", percent(after), percent(before))
        }
        _ => String::new(),
    };
    let steps =
        if last.steps == 1 { "one step".to_owned() } else { format!("the mean of {} steps", last.steps) };
    Verdict {
        basis,
        figure: ratio(first.step_seconds, last.step_seconds),
        text: format!("{}: {result}{idle} ({}, {steps}).", study.name, word(basis)),
    }
}

const fn word(basis: Basis) -> &'static str {
    match basis {
        Basis::Simulated => "simulated",
        Basis::Measured => "measured",
        Basis::Counted => "counted",
    }
}

/// Formats a time with the unit in which it has one to three digits before the point.
pub(crate) fn seconds(seconds: f64) -> String {
    let (factor, unit) = match seconds {
        s if s >= 1.0 || s <= 0.0 => (1.0, "s"),
        s if s >= 1e-3 => (1e3, "ms"),
        _ => (1e6, "µs"),
    };
    format!("{} {unit}", digits(seconds * factor))
}

/// Formats a value with three digits, without needless decimals.
fn digits(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Formats a fraction in percent.
pub(crate) fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}

/// Formats a time ratio; empty if a time is zero.
pub(crate) fn ratio(before_seconds: f64, after_seconds: f64) -> String {
    if before_seconds > 0.0 && after_seconds > 0.0 {
        format!("{:.2}×", before_seconds / after_seconds)
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn study(results: &[(&str, Basis, f64)]) -> Study {
        let strategies = results.iter().map(|&(name, basis, step_seconds)| StrategyResult {
            name: name.to_owned(),
            basis,
            step_seconds,
            step_seconds_p95: None,
            bubble_fraction: (basis == Basis::Simulated).then_some(0.5),
            bound_seconds: None,
            steps: 4,
            plan: String::new(),
        });
        Study {
            name: "Demo".to_owned(),
            about: String::new(),
            modules: Vec::new(),
            strategies: strategies.collect(),
            samples: Vec::new(),
            steps: Vec::new(),
        }
    }

    #[test]
    fn the_last_strategy_is_compared_with_the_first_of_its_basis() {
        let verdicts = compare_steps(&study(&[
            ("data-blind", Basis::Simulated, 3.0),
            ("balanced", Basis::Simulated, 2.0),
            ("data-blind, trained", Basis::Measured, 1.0),
            ("balanced, trained", Basis::Measured, 0.99),
        ]));
        assert_eq!(verdicts[0].figure, "1.50×");
        assert_eq!(
            verdicts[0].text,
            "Demo: with balanced a step takes 2.00 s instead of 3.00 s with data-blind; stages are idle 50.0 % of the \
             time instead of 50.0 % (simulated, the mean of 4 steps)."
        );
        assert!(verdicts[1].text.contains("no difference") && verdicts[1].text.contains("measured"));
    }

    #[test]
    fn one_strategy_is_named_and_zero_gives_no_figure() {
        let only = compare_steps(&study(&[("balanced", Basis::Measured, 0.5)]));
        assert_eq!(only.len(), 1);
        assert_eq!(only[0].text, "Demo: a step of balanced takes 500 ms, measured.");
        let zero = compare_steps(&study(&[("a", Basis::Simulated, 0.0), ("b", Basis::Simulated, 0.0)]));
        assert_eq!(zero[0].figure, "");
    }

    #[test]
    fn times_have_three_digits_and_the_unit_that_fits() {
        for (value, text) in
            [(0.0, "0 s"), (12.345, "12.3 s"), (1.0, "1.00 s"), (0.0456, "45.6 ms"), (123e-6, "123 µs")]
        {
            assert_eq!(seconds(value), text);
        }
        assert_eq!(percent(0.4137), "41.4 %");
        assert_eq!(ratio(3.0, 2.0), "1.50×");
        assert_eq!(ratio(3.0, 0.0), "");
    }
}
