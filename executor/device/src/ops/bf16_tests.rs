//! Storage as bf16.

use half::bf16;

use super::every_operation;
use crate::cpu::Cpu;
use crate::runtime::{Dtype, Runtime};

fn half(threads: usize) -> Cpu {
    Cpu::new(threads).unwrap().store(Dtype::Bf16).unwrap()
}

#[test]
fn operations_give_the_rounded_results_of_f32() {
    let (full, half) = (Cpu::new(2).unwrap(), half(2));
    let results = every_operation::all(&full).unwrap();
    for ((name, exact), (_, rounded)) in results.into_iter().zip(every_operation::all(&half).unwrap()) {
        let expected: Vec<f32> = exact.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
        // the activation is computed from the rounded product
        if name != "gemm with activation" {
            assert_eq!(rounded, expected, "{name}");
        }
        assert!(expected.iter().all(|value| value.is_finite()), "{name}");
    }
    assert_eq!((full.memory_used_bytes(), half.memory_used_bytes()), (0, 0));
}

#[test]
fn numbers_are_rounded_to_nearest_with_ties_to_even() {
    let device = half(1);
    // around 1, bf16 numbers are 2^-7 apart
    let step = 0.007_812_5_f32;
    let values = [1.0, 1.0 + step, 1.0 + 0.5 * step, 1.0 + 1.5 * step, 1.0 + 0.51 * step, f32::INFINITY];
    let stored = device.upload(&values).unwrap();
    assert_eq!(device.memory_used_bytes(), 12);
    let expected = [1.0, 1.0 + step, 1.0, 1.0 + 2.0 * step, 1.0 + step, f32::INFINITY];
    assert_eq!(device.download(&stored).unwrap(), expected);
    assert!(device.download(&device.upload(&[f32::NAN]).unwrap()).unwrap()[0].is_nan());
    let exact = device.upload_as(Dtype::F32, &values).unwrap();
    assert_eq!(device.download(&exact).unwrap(), values);
    assert_eq!(device.memory_used_bytes(), 12 + 24);
    assert!(matches!(device.alloc(usize::MAX / 8), Err(crate::Error::OutOfMemory { .. })));
    assert_eq!((stored.len(), exact.len()), (6, 6));
}

#[test]
fn a_limit_of_memory_holds_for_both_types_together() {
    let device = half(1).memory_limit(100);
    let halves = device.alloc(30).unwrap();
    assert!(device.upload_as(Dtype::F32, &[0.0; 10]).is_ok());
    assert!(matches!(device.upload_as(Dtype::F32, &[0.0; 11]), Err(crate::Error::OutOfMemory { .. })));
    assert!(matches!(device.alloc(21), Err(crate::Error::OutOfMemory { .. })));
    assert_eq!(device.memory_used_bytes(), 60);
    drop(halves);
    assert!(device.upload_as(Dtype::F32, &[0.0; 25]).is_ok());
}
