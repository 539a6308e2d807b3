//! Compares every operation with the one of [`Cpu`], on bf16 numbers.

use super::*;
use crate::device::Buffer;
use crate::ops::finite_difference::{numbers, to_f32};
use crate::ops::gemm::{GemmShape, MatrixLayout};
use crate::ops::sparse_rows::SparseRows;

const ROWS: usize = 6;
const COLUMNS: usize = 4;
const LEN: usize = ROWS * COLUMNS;

/// Calls an operation that changes a buffer of known contents, and returns the new contents.
fn changed<D: Device>(
    device: &D,
    len: usize,
    seed: u64,
    run: impl FnOnce(&mut D::Floats) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut buffer = input(device, len, seed)?;
    run(&mut buffer)?;
    device.download(&buffer)
}

/// Random bf16 numbers.
fn input<D: Device>(device: &D, len: usize, seed: u64) -> Result<D::Floats> {
    let values = to_f32(&numbers(len, seed));
    device.upload(&values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect::<Vec<_>>())
}

fn element_wise<D: Device>(d: &D) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let x = input(d, LEN, 1)?;
    let gate = input(d, 2 * LEN, 2)?;
    let by_column = input(d, COLUMNS, 3)?;
    let columns = Columns { first: 1, stride: COLUMNS + 2 };
    let mut all = vec![
        ("add", changed(d, LEN, 4, |y| d.add(&x, y))?),
        ("scale", changed(d, LEN, 4, |y| d.scale(0.3, y))?),
        ("zero", changed(d, LEN, 4, |y| d.zero(y))?),
        ("bias", changed(d, ROWS * columns.stride, 4, |y| d.bias(&by_column, y, columns))?),
        ("bias backward", changed(d, COLUMNS, 4, |y| d.bias_backward(&x, Columns::all(COLUMNS), y))?),
        ("column scale", changed(d, LEN, 4, |y| d.layer_scale(&x, &by_column, y))?),
        ("transpose", changed(d, LEN, 4, |y| d.transpose(&x, ROWS, COLUMNS, true, y))?),
        ("silu", changed(d, LEN, 4, |y| d.silu_gate(&gate, COLUMNS, y))?),
        ("silu backward", changed(d, 2 * LEN, 4, |y| d.silu_gate_backward(&x, &gate, COLUMNS, y))?),
    ];
    let mut d_scale = input(d, COLUMNS, 5)?;
    let run = |dx: &mut D::Floats| {
        d.layer_scale_backward(&input(d, LEN, 6)?, &x, &by_column, dx, Some(&mut d_scale))
    };
    all.push(("column scale dx", changed(d, LEN, 4, run)?));
    all.push(("column scale d_scale", d.download(&d_scale)?));
    let activation = Activation::GeluTanh;
    all.push(("activate", changed(d, LEN, 4, |y| d.activate(activation, &x, y))?));
    all.push(("activate backward", changed(d, LEN, 4, |y| d.activate_backward(activation, &x, y))?));
    let matrix =
        SparseRows::weighted([vec![(3, 0.5), (0, 0.25)], vec![], vec![(5, 2.0), (3, 1.0)]]).upload(d)?;
    all.push((
        "mix rows",
        changed(d, 3 * COLUMNS, 4, |y| d.gather_scatter(&matrix.forward, COLUMNS, &x, y))?,
    ));
    let squares = d.sum_of_squares(&x)? as f32;
    all.push(("sum of squares", vec![bf16::from_f32(squares).to_f32()]));
    Ok(all)
}

fn products<D: Device>(d: &D) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let (a, b) = (input(d, ROWS * 5, 1)?, input(d, COLUMNS * 5, 2)?);
    let shape = GemmShape { rows: ROWS, columns: COLUMNS, inner: 5 };
    let (a_layout, b_layout) = (MatrixLayout::rows(5), MatrixLayout::rows(5).transposed());
    let product = |is_added| {
        // into some columns of wider rows: the others stay
        changed(d, ROWS * 7, 4, |c| {
            d.gemm(shape, (&a, a_layout), (&b, b_layout), is_added, (c, MatrixLayout::rows(7).at(2)))
        })
    };
    let mut all = vec![("gemm", product(false)?), ("gemm added", product(true)?)];
    let targets: Vec<u32> = (0..ROWS as u32).map(|row| row % COLUMNS as u32).collect();
    let mut loss = 0.0;
    let run = |logits: &mut D::Floats| {
        loss = d.cross_entropy(logits, &targets, 0.125)?;
        Ok(())
    };
    all.push(("cross entropy", changed(d, LEN, 4, run)?));
    let targets = [Some(0), None, Some(3), Some(1), None, None];
    let mut parts = Vec::new();
    let run = |logits: &mut D::Floats| {
        parts = d.vocab_parallel_cross_entropy(logits, &targets)?;
        Ok(())
    };
    all.push(("cross entropy part", changed(d, LEN, 4, run)?));
    all.push(("sums of parts", parts.iter().map(|part| bf16::from_f32(part.sum).to_f32()).collect()));
    let factors = [0.5, 0.25, 1.0, 2.0, 0.125, 3.0];
    let run = |exponentials: &mut D::Floats| {
        d.vocab_parallel_cross_entropy_backward(exponentials, &targets, &factors, 0.125)
    };
    all.push(("cross entropy part backward", changed(d, LEN, 4, run)?));
    let host = |y: &mut D::Floats| d.on_host(y, |values| values.iter_mut().for_each(|value| *value *= 1.3));
    all.push(("on host", changed(d, LEN, 4, host)?));
    all.push(("loss", vec![bf16::from_f32(loss as f32).to_f32()]));
    Ok(all)
}

fn norms<D: Device>(d: &D) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let (x, dy) = (input(d, LEN, 1)?, input(d, LEN, 2)?);
    let (weight, bias) = (input(d, COLUMNS, 3)?, input(d, COLUMNS, 4)?);
    let (mut inverse, mut statistics) = (d.alloc(ROWS)?, d.alloc(2 * ROWS)?);
    let mut all = vec![
        ("rms norm", changed(d, LEN, 5, |y| d.rms_norm(&x, &weight, 1e-5, y, &mut inverse))?),
        ("layer norm", changed(d, LEN, 5, |y| d.layer_norm(&x, (&weight, &bias), 1e-5, y, &mut statistics))?),
    ];
    let mut d_weight = input(d, COLUMNS, 6)?;
    let run =
        |dx: &mut D::Floats| d.rms_norm_backward(&dy, &x, &weight, &inverse, Some(dx), Some(&mut d_weight));
    all.push(("rms norm dx", changed(d, LEN, 5, run)?));
    all.push(("rms norm d_weight", d.download(&d_weight)?));
    let (mut d_weight, mut d_bias) = (input(d, COLUMNS, 6)?, input(d, COLUMNS, 7)?);
    let run = |dx: &mut D::Floats| {
        let parameters = Some((&mut d_weight, &mut d_bias));
        d.layer_norm_backward(&dy, &x, &weight, &statistics, Some(dx), parameters)
    };
    all.push(("layer norm dx", changed(d, LEN, 5, run)?));
    all.push(("layer norm d_weight", d.download(&d_weight)?));
    all.push(("layer norm d_bias", d.download(&d_bias)?));
    Ok(all)
}

/// Attention and rotation. The backward gets an output that is a bf16 number on both devices.
fn attention<D: Device>(d: &D) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 2, scale: 0.7, is_causal: true };
    let segments = [0, 4, ROWS as u32];
    let qkv = input(d, ROWS * shape.row(), 1)?;
    let mut log_sums = d.alloc(ROWS * shape.heads)?;
    let run = |output: &mut D::Floats| d.attention(&shape, &segments, &qkv, output, &mut log_sums);
    let mut all = vec![("attention", changed(d, ROWS * shape.output(), 2, run)?)];
    let (output, d_output) = (input(d, ROWS * shape.output(), 3)?, input(d, ROWS * shape.output(), 4)?);
    let d_qkv = d.attention_backward(&shape, &segments, &qkv, (&output, &log_sums), &d_output)?;
    all.push(("attention backward", d.download(&d_qkv)?));
    let angles = (input(d, ROWS, 5)?, input(d, ROWS, 6)?);
    let rope = RopeShape { heads: 3, head_dim: 2, stride: shape.row() };
    let rotate = |x: &mut D::Floats| d.rope(Rotation::Backward, rope, (&angles.0, &angles.1), x);
    all.push(("rope", changed(d, ROWS * shape.row(), 7, rotate)?));
    Ok(all)
}

fn optimizer<D: Device>(d: &D) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let adamw = AdamW { step: 3, ..AdamW::default() };
    let (mut mean, mut square) = (d.zeros_f32(LEN)?, d.zeros_f32(LEN)?);
    let gradients = input(d, LEN, 1)?;
    let run = |weights: &mut D::Floats| d.adamw(&adamw, weights, &gradients, (&mut mean, &mut square));
    Ok(vec![("adamw", changed(d, LEN, 2, run)?)])
}

#[test]
fn operations_give_the_rounded_results_of_f32() {
    let all = |(of_f32, of_bf16): (Vec<_>, Vec<_>)| {
        for ((name, exact), (_, rounded)) in of_f32.into_iter().zip::<Vec<(&str, Vec<f32>)>>(of_bf16) {
            let exact: Vec<f32> = exact;
            let expected: Vec<f32> = exact.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
            assert_eq!(rounded, expected, "{name}");
            assert!(expected.iter().all(|value| value.is_finite()), "{name}");
        }
    };
    let (cpu, half) = (Cpu::new(2).unwrap(), CpuBf16::new(2).unwrap());
    all((element_wise(&cpu).unwrap(), element_wise(&half).unwrap()));
    all((products(&cpu).unwrap(), products(&half).unwrap()));
    all((norms(&cpu).unwrap(), norms(&half).unwrap()));
    all((attention(&cpu).unwrap(), attention(&half).unwrap()));
    all((optimizer(&cpu).unwrap(), optimizer(&half).unwrap()));
    assert_eq!(half.memory_used_bytes(), 0);
}

#[test]
fn numbers_are_rounded_to_nearest_with_ties_to_even() {
    let device = CpuBf16::new(1).unwrap();
    // around 1, bf16 numbers are 2^-7 apart
    let step = 0.007_812_5_f32;
    let values = [1.0, 1.0 + step, 1.0 + 0.5 * step, 1.0 + 1.5 * step, 1.0 + 0.51 * step, f32::INFINITY];
    let stored = device.upload(&values).unwrap();
    assert_eq!(device.memory_used_bytes(), 12);
    let expected = [1.0, 1.0 + step, 1.0, 1.0 + 2.0 * step, 1.0 + step, f32::INFINITY];
    assert_eq!(device.download(&stored).unwrap(), expected);
    assert!(device.download(&device.upload(&[f32::NAN]).unwrap()).unwrap()[0].is_nan());
    let exact = device.upload_f32(&values).unwrap();
    assert_eq!(device.download(&exact).unwrap(), values);
    assert_eq!(device.memory_used_bytes(), 12 + 24);
    assert!(matches!(device.alloc(usize::MAX / 8), Err(crate::Error::OutOfMemory { .. })));
    assert_eq!((stored.len(), exact.len()), (6, 6));
}

#[test]
fn a_limit_of_memory_holds_for_both_types_together() {
    let device = CpuBf16::on(Cpu::new(1).unwrap().memory_limit(100));
    let halves = device.alloc(30).unwrap();
    assert!(device.upload_f32(&[0.0; 10]).is_ok());
    assert!(matches!(device.upload_f32(&[0.0; 11]), Err(crate::Error::OutOfMemory { .. })));
    assert!(matches!(device.alloc(21), Err(crate::Error::OutOfMemory { .. })));
    assert_eq!(device.memory_used_bytes(), 60);
    drop(halves);
    assert!(device.upload_f32(&[0.0; 25]).is_ok());
}
