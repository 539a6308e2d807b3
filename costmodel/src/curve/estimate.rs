//! Converts the expected error at a curve point to the half width of a 90 % interval.

/// Smallest expected error, as a fraction of the time: no measurement is more exactly repeatable.
const RELATIVE_ERROR_MIN: f64 = 0.001;

/// Curve value with uncertainty.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Estimate {
    /// Time in nanoseconds.
    pub(crate) ns: f64,
    /// Half width of the 90 % interval around the time, in nanoseconds.
    pub(crate) uncertainty_ns: f64,
    /// Whether the work is outside the measured points.
    pub(crate) is_extrapolated: bool,
}

/// Curve value with the expected error there, before calibration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct LocalError {
    /// Time in nanoseconds.
    pub(crate) ns: f64,
    /// Standard deviation of a single run at the surrounding points, in nanoseconds.
    pub(crate) spread_ns: f64,
    /// Distance to an alternative interpolation between the same points, in nanoseconds.
    pub(crate) distance_ns: f64,
    /// Whether the work is outside the measured points.
    pub(crate) is_extrapolated: bool,
}

/// Rule that converts expected errors to half widths of 90 % intervals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct IntervalRule {
    /// Half width divided by the expected error, between the measured points.
    pub(crate) inside: f64,
    /// Half width divided by the expected error, outside the measured points.
    pub(crate) outside: f64,
    /// Difference between measurement sessions, as a share of the time.
    pub(crate) session: f64,
    /// Whether spreads were measured, so that no interval is narrower; otherwise they are assumed.
    pub(crate) has_spread: bool,
}

impl Estimate {
    /// Scales the estimate.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { ns: self.ns * factor, uncertainty_ns: self.uncertainty_ns * factor, ..self }
    }

    /// Adds two estimates; uncertainties add up in full, because a profile's errors share the same machine
    /// and day.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            ns: self.ns + other.ns,
            uncertainty_ns: self.uncertainty_ns + other.uncertainty_ns,
            is_extrapolated: self.is_extrapolated || other.is_extrapolated,
        }
    }
}

impl LocalError {
    /// Mixes two values, with `share` for the second.
    pub(crate) fn mixed(self, other: Self, share: f64) -> Self {
        let mix = |own: f64, other: f64| own * (1.0 - share) + other * share;
        Self {
            ns: mix(self.ns, other.ns),
            spread_ns: mix(self.spread_ns, other.spread_ns),
            distance_ns: mix(self.distance_ns, other.distance_ns),
            is_extrapolated: self.is_extrapolated || other.is_extrapolated,
        }
    }

    /// Returns the expected error in nanoseconds: spread and distance together.
    pub(crate) fn expected_ns(&self) -> f64 {
        (self.spread_ns + self.distance_ns).max(self.ns * RELATIVE_ERROR_MIN)
    }
}

impl IntervalRule {
    /// Rule that keeps the expected error unchanged.
    pub(crate) const EXPECTED: Self = Self { inside: 1.0, outside: 1.0, session: 0.0, has_spread: true };

    /// Returns the larger factors among two rules.
    pub(crate) fn wider(self, other: Self) -> Self {
        Self {
            inside: self.inside.max(other.inside),
            outside: self.outside.max(other.outside),
            session: self.session.max(other.session),
            has_spread: self.has_spread || other.has_spread,
        }
    }

    /// Returns the rule for measurements from the profile's own session.
    pub(crate) fn same_session(self) -> Self {
        Self { session: 0.0, ..self }
    }

    /// Returns the time with uncertainty, which is never below a measured spread.
    pub(crate) fn estimate(self, local: LocalError) -> Estimate {
        let factor = if local.is_extrapolated { self.outside } else { self.inside };
        let least_ns = if self.has_spread { local.spread_ns } else { 0.0 };
        let own_ns = (factor * local.expected_ns()).max(least_ns);
        Estimate {
            ns: local.ns,
            // Added in full: all points in a session are off together, in addition to their individual
            // errors.
            uncertainty_ns: own_ns + self.session * local.ns,
            is_extrapolated: local.is_extrapolated,
        }
    }
}
