//! Fits a module's memory to measured points, by two linear models.
//!
//! A model with a few layers is run at every TP degree that will be used, and the memory is read. The
//! measured quantities are linear: `state(l, tp) = c(tp) + v(tp) * l` in the layers `l`, and
//! `act(l, tp, batch, seq) = (a(tp) + b(tp) * l) * batch * seq`; both are least-squares fits over the points
//! at one TP degree. A degree that was not measured is an error, never a guess.
//!
//! # Source
//! DFLOP, section 3.2.1: memory profile at two small layer counts.

/// Memory in a measured run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryPoint {
    /// Transformer layers.
    pub layers: u32,
    /// TP degree.
    pub tp: u32,
    /// Number of tiles or sequences.
    pub batch: u32,
    /// Tokens per tile or sequence.
    pub sequence: u32,
    /// Bytes for parameters, gradients and optimizer state.
    pub state_bytes: f64,
    /// Activation bytes saved by the forward pass.
    pub activation_bytes: f64,
}

/// Reason why points cannot be fitted, or a fit has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum FitError {
    /// A point's value is not a measurement.
    #[error("point {point}: `{field}` = {found} must be a finite number above 0")]
    Point { point: usize, field: &'static str, found: f64 },
    /// A run occurs twice; a repeated profile was appended to an older profile.
    #[error("point {point} repeats {layers} layers at TP {tp}, batch {batch}, sequence {sequence}")]
    Repeated { point: usize, layers: u32, tp: u32, batch: u32, sequence: u32 },
    /// A line needs two layer counts.
    #[error("TP {tp} was measured with {layers} layers only; measure another number of layers")]
    OneLayerCount { tp: u32, layers: u32 },
    /// Nothing was measured at this degree.
    #[error("TP {tp} was not measured, only {known}")]
    UnknownDegree { tp: u32, known: String },
}

/// Fitted lines for every TP degree, ascending.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredMemory {
    degrees: Vec<Degree>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Degree {
    tp: u32,
    state: Line,
    activations: Line,
}

/// `constant + slope * layers`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Line {
    constant: f64,
    slope: f64,
}

impl MeasuredMemory {
    /// Fits the lines for all TP degrees that occur; the point order does not matter.
    ///
    /// # Errors
    /// [`FitError::Point`] for a value that is not above 0, [`FitError::Repeated`] for a run that occurs
    /// twice, [`FitError::OneLayerCount`] for a degree measured only with a single number of layers.
    pub fn fit(points: &[MemoryPoint]) -> Result<Self, FitError> {
        check(points)?;
        let mut sorted = points.to_vec();
        sorted.sort_by_key(|point| (point.tp, point.layers, point.batch, point.sequence));
        let by_degree = sorted.chunk_by(|one, other| one.tp == other.tp);
        let degrees = by_degree.map(Degree::fit).collect::<Result<_, _>>()?;
        Ok(Self { degrees })
    }

    /// Returns the bytes for parameters, gradients and optimizer state in `layers` layers, rounded up.
    ///
    /// # Errors
    /// [`FitError::UnknownDegree`] if nothing was measured at this degree.
    pub fn state_bytes(&self, layers: u32, tp: u32) -> Result<u64, FitError> {
        Ok(whole(self.degree(tp)?.state.at(layers)))
    }

    /// Returns the activation bytes that a forward pass through `layers` layers saves, rounded up.
    ///
    /// # Errors
    /// [`FitError::UnknownDegree`] if nothing was measured at this degree.
    pub fn activation_bytes(&self, layers: u32, tp: u32, batch: u64, sequence: u64) -> Result<u64, FitError> {
        let tokens = batch as f64 * sequence as f64;
        Ok(whole(self.degree(tp)?.activations.at(layers) * tokens))
    }

    fn degree(&self, tp: u32) -> Result<&Degree, FitError> {
        self.degrees.iter().find(|degree| degree.tp == tp).ok_or_else(|| {
            let known: Vec<String> = self.degrees.iter().map(|degree| degree.tp.to_string()).collect();
            FitError::UnknownDegree { tp, known: known.join(", ") }
        })
    }
}

fn check(points: &[MemoryPoint]) -> Result<(), FitError> {
    let run = |point: &MemoryPoint| (point.layers, point.tp, point.batch, point.sequence);
    for (at, point) in points.iter().enumerate() {
        for (field, found) in [
            ("layers", f64::from(point.layers)),
            ("tp", f64::from(point.tp)),
            ("batch", f64::from(point.batch)),
            ("sequence", f64::from(point.sequence)),
            ("state_bytes", point.state_bytes),
            ("activation_bytes", point.activation_bytes),
        ] {
            if !(found.is_finite() && found > 0.0) {
                return Err(FitError::Point { point: at, field, found });
            }
        }
        if points[..at].iter().any(|earlier| run(earlier) == run(point)) {
            let (layers, tp, batch, sequence) = run(point);
            return Err(FitError::Repeated { point: at, layers, tp, batch, sequence });
        }
    }
    Ok(())
}

impl Degree {
    fn fit(points: &[MemoryPoint]) -> Result<Self, FitError> {
        let MemoryPoint { tp, layers, .. } = points[0];
        if points.iter().all(|point| point.layers == layers) {
            return Err(FitError::OneLayerCount { tp, layers });
        }
        let states = points.iter().map(|point| (1.0, f64::from(point.layers), point.state_bytes));
        let activations = points.iter().map(|point| {
            let tokens = f64::from(point.batch) * f64::from(point.sequence);
            (tokens, tokens * f64::from(point.layers), point.activation_bytes)
        });
        Ok(Self { tp, state: Line::fit(states), activations: Line::fit(activations) })
    }
}

impl Line {
    fn at(self, layers: u32) -> f64 {
        self.constant + self.slope * f64::from(layers)
    }

    /// Fits `y = constant * u + slope * v` by least squares; `v / u` must not be the same in all rows.
    fn fit(rows: impl Iterator<Item = (f64, f64, f64)>) -> Self {
        let [mut uu, mut uv, mut vv, mut uy, mut vy] = [0.0; 5];
        for (u, v, y) in rows {
            uu += u * u;
            uv += u * v;
            vv += v * v;
            uy += u * y;
            vy += v * y;
        }
        // Above 0, because `Degree::fit` requires two layer counts.
        let determinant = uu * vv - uv * uv;
        Self { constant: (uy * vv - vy * uv) / determinant, slope: (vy * uu - uy * uv) / determinant }
    }
}

/// Rounds bytes up; a line that falls below 0 counts as 0.
fn whole(bytes: f64) -> u64 {
    bytes.max(0.0).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(layers: u32, tp: u32, batch: u32, sequence: u32) -> MemoryPoint {
        let tokens = f64::from(batch * sequence);
        let (l, t) = (f64::from(layers), f64::from(tp));
        let state_bytes = 5e8 / t + 3e8 / t * l;
        let activation_bytes = (2000.0 + 90_000.0 / t * l) * tokens;
        MemoryPoint { layers, tp, batch, sequence, state_bytes, activation_bytes }
    }

    #[test]
    fn a_line_through_two_points_is_found_and_followed() {
        let points = [point(3, 1, 1, 1024), point(4, 1, 1, 1024), point(4, 2, 1, 512), point(8, 2, 2, 1024)];
        let fitted = MeasuredMemory::fit(&points).unwrap();
        for (layers, tp, batch, sequence) in [(28, 1, 1, 4096), (28, 2, 1, 4096), (1, 2, 7, 729)] {
            let expected = point(layers, tp, batch, sequence);
            let state = fitted.state_bytes(layers, tp).unwrap() as f64;
            let kept =
                fitted.activation_bytes(layers, tp, u64::from(batch), u64::from(sequence)).unwrap() as f64;
            assert!((state / expected.state_bytes - 1.0).abs() < 1e-6, "{state}");
            assert!((kept / expected.activation_bytes - 1.0).abs() < 1e-6, "{kept}");
        }
        let reversed: Vec<MemoryPoint> = points.iter().rev().copied().collect();
        assert_eq!(MeasuredMemory::fit(&reversed).unwrap(), fitted);
    }

    /// Three points off a line: state 10, 22, 31 at 1, 2, 3 layers has the line 0 + 10.5 l (computed by
    /// hand).
    #[test]
    fn noise_is_averaged_out() {
        let at = |layers, state_bytes| MemoryPoint { state_bytes, ..point(layers, 1, 1, 100) };
        let fitted = MeasuredMemory::fit(&[at(1, 10.0), at(2, 22.0), at(3, 31.0)]).unwrap();
        assert_eq!(fitted.state_bytes(4, 1).unwrap(), 42);
    }

    #[test]
    fn points_that_cannot_be_fitted_are_errors() {
        let good = [point(3, 1, 1, 1024), point(4, 1, 1, 1024)];
        let error_of = |points: &[MemoryPoint]| MeasuredMemory::fit(points).unwrap_err().to_string();
        assert_eq!(
            error_of(&[good[0], good[1], good[0]]),
            "point 2 repeats 3 layers at TP 1, batch 1, sequence 1024"
        );
        assert_eq!(
            error_of(&[good[0], point(3, 1, 2, 1024)]),
            "TP 1 was measured with 3 layers only; measure another number of layers"
        );
        for broken in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            let error = error_of(&[good[0], MemoryPoint { activation_bytes: broken, ..good[1] }]);
            assert!(error.starts_with("point 1: `activation_bytes` = "), "{error}");
        }
        assert!(error_of(&[MemoryPoint { batch: 0, ..good[0] }]).starts_with("point 0: `batch` = 0"));
        let fitted = MeasuredMemory::fit(&good).unwrap();
        assert_eq!(fitted.state_bytes(3, 8).unwrap_err().to_string(), "TP 8 was not measured, only 1");
        let empty = MeasuredMemory::fit(&[]).unwrap();
        assert!(empty.state_bytes(1, 1).is_err());
    }
}
