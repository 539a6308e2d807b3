//! Compares every operation on the CUDA device with the CPU device: the cases in the `dflop-cuda` suite.

use dflop_cuda::Cuda;
use dflop_device::prelude::*;
use dflop_device::{Cpu, Dtype};
use serde_json::json;

use crate::Result;
use crate::arguments::Arguments;
use crate::cases::{Cases, Results, relative_error};
use crate::device;
use crate::report::{self, Outcome};

const PART: &str = "operations";
/// Sizes in elements of the NaN blocks that are freed before operations run.
const POISON_ELEMENTS: [usize; 5] = [1 << 8, 1 << 11, 1 << 14, 1 << 17, 1 << 20];
/// Number of blocks per size.
const POISON_BLOCKS: usize = 8;

/// Operations that are called together, and the largest errors in `f32` and in bf16.
struct Group {
    name: &'static str,
    on_cpu: fn(&Cpu, u64) -> dflop_device::Result<Results>,
    on_cuda: fn(&Cuda, u64) -> dflop_device::Result<Results>,
    bounds: [f64; 2],
}

/// Creates a group from a [`Cases`] method.
macro_rules! group {
    ($method:ident, $exact:expr, $half:expr) => {{
        fn run<D: Device>(device: &D, seed: u64) -> dflop_device::Result<Results> {
            let mut cases = Cases::new(device, seed);
            cases.$method()?;
            Ok(cases.results)
        }
        Group { name: stringify!($method), on_cpu: run::<Cpu>, on_cuda: run::<Cuda>, bounds: [$exact, $half] }
    }};
}

/// Runs all groups in both storage types on fresh random numbers.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let groups = [
        group!(element_wise, 1e-5, 6e-3),
        group!(columns, 1e-5, 6e-3),
        group!(selections, 1e-5, 6e-3),
        group!(norms, 2e-5, 6e-3),
        group!(head_norms, 2e-5, 6e-3),
        group!(sinks, 2e-5, 6e-3),
        group!(rotations, 1e-5, 6e-3),
        group!(products, 1e-5, 6e-3),
        group!(losses, 1e-5, 6e-3),
        group!(experts, 1e-5, 6e-3),
        group!(latent_heads, 1e-5, 6e-3),
        group!(optimizer, 1e-5, 6e-3),
        group!(attention, 1e-5, 1e-2),
    ];
    let (mut results, mut wrong) = (0, Vec::new());
    for (number, dtype) in [Dtype::F32, Dtype::Bf16].into_iter().enumerate() {
        let (cpu, cuda) = (device::cpu(dtype)?, device::cuda(dtype)?);
        for group in &groups {
            let seed = arguments.seed();
            let bound = group.bounds[number];
            let found = compare(group, (&cpu, &cuda), seed, bound, arguments.is_small);
            let (count, worst, problem) = match found {
                Ok(found) => found,
                Err(error) => (0, f64::INFINITY, Some(error.to_string())),
            };
            results += count;
            let name = format!("{} {dtype:?}", group.name);
            let line = json!({
                "name": name, "seed": seed.to_string(), "results": count, "error": worst, "asked": bound,
                "problem": problem,
            });
            report::result(PART, line);
            let verdict = problem.as_deref().unwrap_or("right");
            eprintln!("{name:>22}, seed {seed}: {count} results, largest error {worst:.1e}: {verdict}");
            wrong.extend(problem.map(|problem| format!("{name}: {problem}")));
        }
    }
    let (outcome, figure) = match wrong.first() {
        None => (Outcome::Passed, format!("{results} results as on the CPU")),
        Some(first) => (Outcome::Failed, format!("{} of {} wrong, {first}", wrong.len(), 2 * groups.len())),
    };
    Ok(report::summary(PART, outcome, &figure, "all results within the bounds, the same bits twice"))
}

/// Compares the results in a group; returns the number of results, the maximum error, and the faults.
fn compare(
    group: &Group,
    (cpu, cuda): (&Cpu, &Cuda),
    seed: u64,
    bound: f64,
    is_once: bool,
) -> Result<(usize, f64, Option<String>)> {
    let expected = (group.on_cpu)(cpu, seed)?;
    poison(cuda)?;
    let found = (group.on_cuda)(cuda, seed)?;
    if found.len() != expected.len() {
        let problem = format!("expected {} results, found {}", expected.len(), found.len());
        return Ok((found.len(), f64::INFINITY, Some(problem)));
    }
    let errors = found.iter().zip(&expected).map(|((name, found), (_, truth))| (name, error(found, truth)));
    let (name, worst) =
        errors.fold(
            (None, 0.0),
            |(worst_name, worst), (name, error)| {
                if error > worst { (Some(name), error) } else { (worst_name, worst) }
            },
        );
    if worst >= bound {
        let name = name.map_or("", String::as_str);
        return Ok((found.len(), worst, Some(format!("{name} is off by {worst:.1e}"))));
    }
    if is_once {
        return Ok((found.len(), worst, None));
    }
    poison(cuda)?;
    let again = (group.on_cuda)(cuda, seed)?;
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let other = found.iter().zip(&again).find(|((_, first), (_, second))| bits(first) != bits(second));
    Ok((found.len(), worst, other.map(|((name, _), _)| format!("{name} has other bits in a second run"))))
}

/// Fills memory with NaN and frees it, so that elements that an operation does not write are visible.
fn poison(device: &Cuda) -> Result<()> {
    let mut blocks = Vec::new();
    for elements in POISON_ELEMENTS {
        let values = vec![f32::NAN; elements];
        for _ in 0..POISON_BLOCKS {
            blocks.push(device.upload_as(Dtype::F32, &values)?);
        }
    }
    Ok(())
}

/// Relative error; infinite for a number that was not written, and for another number of them.
pub(crate) fn error(found: &[f32], truth: &[f32]) -> f64 {
    if found.len() == truth.len() { relative_error(found, truth) } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_not_finite_is_an_error_above_all_bounds() {
        assert!(error(&[1.0, f32::NAN], &[1.0, 2.0]).is_infinite());
        assert!(error(&[1.0], &[1.0, 2.0]).is_infinite());
        assert!((error(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-9);
    }
}
