//! Formats numbers for people: three digits and a unit.

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
