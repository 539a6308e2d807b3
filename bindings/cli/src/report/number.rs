//! Formats numbers for people: three digits and a unit.

/// A unit of time, and the number of units per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TimeUnit {
    pub(super) name: &'static str,
    pub(super) per_second: f64,
}

/// Picks the unit in which a time has one to three digits before the point.
pub(super) fn time_unit(seconds: f64) -> TimeUnit {
    match seconds {
        s if s >= 1.0 || s <= 0.0 => TimeUnit { name: "s", per_second: 1.0 },
        s if s >= 1e-3 => TimeUnit { name: "ms", per_second: 1e3 },
        _ => TimeUnit { name: "µs", per_second: 1e6 },
    }
}

/// Formats a time with its unit.
pub(super) fn seconds(seconds: f64) -> String {
    let unit = time_unit(seconds);
    format!("{} {}", digits(seconds * unit.per_second), unit.name)
}

/// Formats a value with three digits, without needless decimals.
pub(super) fn digits(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Formats a fraction in percent.
pub(super) fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}

/// Formats the ratio of two times; a dash if one is zero.
pub(super) fn speedup(before_seconds: f64, after_seconds: f64) -> String {
    if before_seconds > 0.0 && after_seconds > 0.0 {
        format!("{:.2}×", before_seconds / after_seconds)
    } else {
        "–".to_owned()
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
        assert_eq!(speedup(3.0, 2.0), "1.50×");
        assert_eq!(speedup(3.0, 0.0), "–");
    }
}
