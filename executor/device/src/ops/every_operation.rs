//! Calls every device operation on small bf16 numbers, to compare devices.

use half::bf16;

use super::activation::Activation;
use super::adamw::{AdamW, AdamWState, DecayRange};
use super::attention::AttentionShape;
use super::bias::Columns;
use super::clamped_gate::GateBounds;
use super::elementwise::CopyRange;
use super::experts::{ExpertScores, ExpertWeightShape};
use super::finite_difference::{numbers, to_f32};
use super::gemm::{Epilogue, GemmShape, MatrixLayout};
use super::head_norm::HeadColumns;
use super::latent_heads::LatentShape;
use super::rope::{RopeShape, RopeTable, Rotation};
use super::sparse_rows::SparseRows;
use super::vocab_parallel_cross_entropy::{PARTIAL, VocabularyPart};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::runtime::Tensor;
use crate::segments::Segments;

/// Operation names and results.
pub(crate) type Results = Vec<(&'static str, Vec<f32>)>;

const ROWS: usize = 6;
const COLUMNS: usize = 4;
const LEN: usize = ROWS * COLUMNS;

/// Calls an operation that changes a buffer with known contents, and returns the new contents.
fn changed<D: Device>(
    device: &D,
    len: usize,
    seed: u64,
    run: impl FnOnce(&mut Tensor<D>) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut buffer = input(device, len, seed)?;
    run(&mut buffer)?;
    device.download(&buffer)
}

/// Random bf16 numbers.
fn input<D: Device>(device: &D, len: usize, seed: u64) -> Result<Tensor<D>> {
    let values = to_f32(&numbers(len, seed));
    device.upload(&values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect::<Vec<_>>())
}

fn element_wise<D: Device>(d: &D) -> Result<Results> {
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
        ("silu gate", changed(d, LEN, 4, |y| d.gate(Activation::Silu, &gate, COLUMNS, y))?),
        ("gelu gate", changed(d, LEN, 4, |y| d.gate(Activation::GeluTanh, &gate, COLUMNS, y))?),
        (
            "silu gate backward",
            changed(d, 2 * LEN, 4, |y| d.gate_backward(Activation::Silu, &x, &gate, COLUMNS, y))?,
        ),
    ];
    let mut d_scale = input(d, COLUMNS, 5)?;
    let run = |dx: &mut Tensor<D>| {
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
    let ranges = [CopyRange { from: 3, to: 0, len: 2 }, CopyRange { from: 0, to: 9, len: 1 }];
    all.push(("copy ranges", changed(d, LEN, 4, |y| d.copy_ranges(&ranges, &x, y))?));
    all.push(("copy", d.download(&d.copy(&x)?)?));
    let copied = changed(d, LEN, 4, |y| {
        d.copy_columns(&x, Columns { first: 1, stride: COLUMNS }, 2, y, Columns { first: 0, stride: COLUMNS })
    });
    all.push(("copy columns", copied?));
    Ok(all)
}

fn products<D: Device>(d: &D) -> Result<Results> {
    let (a, b) = (input(d, ROWS * 5, 1)?, input(d, COLUMNS * 5, 2)?);
    let shape = GemmShape { rows: ROWS, columns: COLUMNS, inner: 5 };
    let (a_layout, b_layout) = (MatrixLayout::rows(5), MatrixLayout::rows(5).transposed());
    let product = |is_added| {
        // into some columns in wider rows: remaining columns are unchanged
        changed(d, ROWS * 7, 4, |c| {
            let c = (c, MatrixLayout::rows(7).at(2));
            d.gemm(shape, (&a, a_layout), (&b, b_layout), is_added, c, Epilogue::None)
        })
    };
    let mut all = vec![("gemm", product(false)?), ("gemm added", product(true)?)];
    let bias = input(d, COLUMNS, 6)?;
    let epilogue = |epilogue: Epilogue<'_, D>| {
        changed(d, LEN, 4, |c| {
            d.gemm(shape, (&a, a_layout), (&b, b_layout), false, (c, MatrixLayout::rows(COLUMNS)), epilogue)
        })
    };
    all.push(("gemm with bias", epilogue(Epilogue::Bias(&bias))?));
    let mut y = d.alloc(LEN)?;
    let product = epilogue(Epilogue::Activation(Some(&bias), Activation::Silu, &mut y))?;
    all.extend([("gemm before activation", product), ("gemm with activation", d.download(&y)?)]);
    let mut d_bias = input(d, 5, 7)?;
    let columns = GemmShape { rows: 5, columns: 5, inner: ROWS };
    let product = changed(d, 25, 4, |c| {
        let (a, b) = ((&a, MatrixLayout::rows(5).transposed()), (&a, MatrixLayout::rows(5)));
        d.gemm(columns, a, b, true, (c, MatrixLayout::rows(5)), Epilogue::BiasGradient(&mut d_bias))
    });
    all.extend([("gemm with bias gradient", product?), ("bias gradient", d.download(&d_bias)?)]);
    let targets: Vec<u32> = (0..ROWS as u32).map(|row| row % COLUMNS as u32).collect();
    let targets = d.upload_indices(&targets)?;
    let mut loss = d.zeros_as(Dtype::F64, 1)?;
    let run = |logits: &mut Tensor<D>| d.cross_entropy(logits, (&targets, 0..ROWS), 0.125, &mut loss);
    all.push(("cross entropy", changed(d, LEN, 4, run)?));
    let mut parts = d.alloc_as(Dtype::F32, 2 * ROWS * PARTIAL)?;
    let wider = d.upload_indices(&[0, 7, 3, 1, 5, 6])?;
    let words = |rank: usize| rank * COLUMNS..(rank + 1) * COLUMNS;
    for rank in 0..2 {
        let part = VocabularyPart { rank, words: words(rank) };
        let run = |logits: &mut Tensor<D>| d.partial_softmax(logits, (&wider, 0..ROWS), &part, &mut parts);
        all.push(("exponentials", changed(d, LEN, 4 + rank as u64, run)?));
    }
    let part = VocabularyPart { rank: 0, words: words(0) };
    let run = |exponentials: &mut Tensor<D>| {
        d.join_softmax(exponentials, (&wider, 0..ROWS), &part, &parts, 0.125, &mut loss)
    };
    all.push(("join softmax", changed(d, LEN, 4, run)?));
    all.push(("loss", d.read(&loss)?.iter().map(|&loss| bf16::from_f64(loss).to_f32()).collect()));
    Ok(all)
}

fn norms<D: Device>(d: &D) -> Result<Results> {
    let (x, dy) = (input(d, LEN, 1)?, input(d, LEN, 2)?);
    let (weight, bias) = (input(d, COLUMNS, 3)?, input(d, COLUMNS, 4)?);
    let (mut inverse, mut statistics) = (d.alloc_as(Dtype::F32, ROWS)?, d.alloc_as(Dtype::F32, 2 * ROWS)?);
    let mut all = vec![
        ("rms norm", changed(d, LEN, 5, |y| d.rms_norm(&x, (&weight, 1.0), 1e-5, y, &mut inverse))?),
        ("layer norm", changed(d, LEN, 5, |y| d.layer_norm(&x, (&weight, &bias), 1e-5, y, &mut statistics))?),
    ];
    let mut d_weight = input(d, COLUMNS, 6)?;
    let run = |dx: &mut Tensor<D>| {
        d.rms_norm_backward(&dy, &x, (&weight, 1.0), &inverse, Some(dx), Some(&mut d_weight))
    };
    all.push(("rms norm dx", changed(d, LEN, 5, run)?));
    all.push(("rms norm d_weight", d.download(&d_weight)?));
    let (mut d_weight, mut d_bias) = (input(d, COLUMNS, 6)?, input(d, COLUMNS, 7)?);
    let run = |dx: &mut Tensor<D>| {
        let parameters = Some((&mut d_weight, &mut d_bias));
        d.layer_norm_backward(&dy, &x, &weight, &statistics, Some(dx), parameters)
    };
    all.push(("layer norm dx", changed(d, LEN, 5, run)?));
    all.push(("layer norm d_weight", d.download(&d_weight)?));
    all.push(("layer norm d_bias", d.download(&d_bias)?));
    let heads = HeadColumns { first: 1, heads: 2, head_dim: 2, stride: 6 };
    let (weight, mut d_weight) = (input(d, 2, 8)?, input(d, 2, 9)?);
    let mut inverse = d.alloc_as(Dtype::F32, 8)?;
    let normalize = |y: &mut Tensor<D>| d.head_norm(heads, (Some(&weight), 1.0), 1e-5, y, &mut inverse);
    all.push(("head norm", changed(d, LEN, 5, normalize)?));
    all.push((
        "head norm without weight",
        changed(d, LEN, 5, |y| d.head_norm(heads, (None, 1.0), 1e-5, y, &mut inverse))?,
    ));
    let run = |dx: &mut Tensor<D>| {
        d.head_norm_backward(heads, (Some(&weight), 1.0), (&x, &inverse), dx, Some(&mut d_weight))
    };
    all.push(("head norm dx", changed(d, LEN, 5, run)?));
    all.push(("head norm d_weight", d.download(&d_weight)?));
    Ok(all)
}

/// Attention and rotation. Backward receives an output that is a bf16 number on both devices.
fn attention<D: Device>(d: &D) -> Result<Results> {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 2, scale: 0.7, is_causal: true };
    let segments = Segments::new(d, &[0, 4, ROWS as u32])?;
    let qkv = input(d, ROWS * shape.row(), 1)?;
    let mut log_sums = d.alloc_as(Dtype::F32, ROWS * shape.heads)?;
    let run = |output: &mut Tensor<D>| d.attention(&shape, &segments, &qkv, output, &mut log_sums);
    let mut all = vec![("attention", changed(d, ROWS * shape.output(), 2, run)?)];
    let (output, d_output) = (input(d, ROWS * shape.output(), 3)?, input(d, ROWS * shape.output(), 4)?);
    let d_qkv = d.attention_backward(&shape, &segments, &qkv, (&output, &log_sums), &d_output)?;
    all.push(("attention backward", d.download(&d_qkv)?));
    let (sinks, mut d_sinks) = (input(d, shape.heads, 5)?, input(d, shape.heads, 6)?);
    d.attention_sinks_backward(&shape, &sinks, (&output, &log_sums), &d_output, &mut d_sinks)?;
    all.push(("attention sinks backward", d.download(&d_sinks)?));
    let run = |output: &mut Tensor<D>| d.attention_sinks(&shape, &sinks, output, &mut log_sums);
    all.push(("attention sinks", changed(d, ROWS * shape.output(), 3, run)?));
    let table = RopeTable::new(vec![0.7], vec![1]);
    let positions = d.upload_indices(&[9, 9, 9, 9, 9, 9, 0, 1, 2, 3, 0, 5000])?;
    let angles = d.rope_angles(&table, &positions, ROWS)?;
    for (name, head_dim, is_interleaved) in [("rope", 2, false), ("rope, neighbors", 3, true)] {
        let rope = RopeShape { heads: 2, head_dim, rotated: 2, is_interleaved, stride: shape.row() };
        let rotate = |x: &mut Tensor<D>| d.rope(Rotation::Backward, rope, (&angles.0, &angles.1), x);
        all.push((name, changed(d, ROWS * shape.row(), 7, rotate)?));
    }
    Ok(all)
}

/// Latent attention heads, with both pair orders.
fn latent_heads<D: Device>(d: &D) -> Result<Results> {
    let angles = (d.upload_as(Dtype::F32, &[0.5, 0.25, -1.0])?, d.upload_as(Dtype::F32, &[1.0, -0.5, 0.75])?);
    let columns = Columns { first: 1, stride: 4 };
    let mut all = Results::new();
    for (name, is_interleaved) in [("latent heads", false), ("latent heads, interleaved", true)] {
        let shape = LatentShape { heads: 2, plain: 1, rotated: 2, value: 2, is_interleaved };
        let (queries, keys_values) = (input(d, 3 * 6, 1)?, input(d, 3 * shape.keys_values(), 2)?);
        let rotated = input(d, 3 * columns.stride, 3)?;
        let (cos, sin) = (&angles.0, &angles.1);
        let run = |qkv: &mut Tensor<D>| {
            d.latent_heads(&shape, [&queries, &keys_values], (&rotated, columns), (cos, sin), qkv)
        };
        all.push((name, changed(d, 3 * shape.row(), 4, run)?));
        let d_qkv = input(d, 3 * shape.row(), 5)?;
        let (mut dq, mut dkv) = (input(d, 18, 6)?, input(d, 3 * shape.keys_values(), 7)?);
        let run = |dr: &mut Tensor<D>| {
            d.latent_heads_backward(&shape, &d_qkv, (cos, sin), [&mut dq, &mut dkv], (dr, columns))
        };
        all.push(("latent heads d_rotated", changed(d, 3 * columns.stride, 8, run)?));
        all.extend([("latent heads dq", d.download(&dq)?), ("latent heads dkv", d.download(&dkv)?)]);
    }
    Ok(all)
}

/// Expert weights.
fn experts<D: Device>(d: &D) -> Result<Results> {
    let logits = input(d, LEN, 1)?;
    let chosen = d.upload_indices(&[3, 1, 0, 2, 1, 2, 3, 0, 0, 1, 2, 3])?;
    let d_weights = input(d, 2 * ROWS, 2)?;
    let mut all = Results::new();
    for (name, gradient, scores) in [
        ("expert softmax", "expert softmax backward", ExpertScores::Softmax),
        ("chosen softmax", "chosen softmax backward", ExpertScores::SoftmaxOfChosen),
        ("expert sigmoid", "expert sigmoid backward", ExpertScores::Sigmoid),
        ("chosen sigmoid", "chosen sigmoid backward", ExpertScores::SigmoidOfChosen),
    ] {
        let shape = ExpertWeightShape { experts: COLUMNS, chosen: 2, scores, scale: 1.5 };
        all.push((name, changed(d, 2 * ROWS, 3, |w| d.expert_weights(&shape, &logits, &chosen, w))?));
        let run = |dx: &mut Tensor<D>| d.expert_weights_backward(&shape, &logits, &chosen, &d_weights, dx);
        all.push((gradient, changed(d, LEN, 4, run)?));
    }
    let (bounds, gate_up) = (GateBounds { limit: 0.5, alpha: 1.702 }, input(d, 2 * LEN, 7)?);
    all.push(("clamped gate", changed(d, LEN, 8, |y| d.clamped_gate(bounds, &gate_up, y))?));
    let run = |dx: &mut Tensor<D>| d.clamped_gate_backward(bounds, &logits, &gate_up, dx);
    all.push(("clamped gate backward", changed(d, 2 * LEN, 9, run)?));
    let (rows, places) = (input(d, 2 * LEN, 5)?, d.upload_indices(&[3, 1, 0, 2, 11, 4, 5, 6, 7, 10, 9, 8])?);
    let run = |products: &mut Tensor<D>| d.row_products(COLUMNS, &logits, &rows, &places, products);
    all.push(("row products", changed(d, 2 * ROWS, 6, run)?));
    Ok(all)
}

fn optimizer<D: Device>(d: &D) -> Result<Results> {
    let adamw = AdamW { step: 3, ..AdamW::default() };
    let zeros = || d.zeros_as(Dtype::F32, LEN);
    let (mut mean, mut square, mut master) = (zeros()?, zeros()?, zeros()?);
    let gradients = input(d, LEN, 1)?;
    let mut figures = d.zeros_as(Dtype::F64, 3)?;
    d.sums_of_squares(&[(&gradients, 2), (&input(d, 5, 2)?, 1)], &mut figures)?;
    let mut clip = d.zeros_as(Dtype::F64, 2)?;
    d.clip_factor(&figures, 1..3, Some(0.5), &mut clip)?;
    let decays = [(0..7, 0.01), (7..LEN, 0.0)];
    let decays = decays.map(|(elements, weight_decay)| DecayRange { elements, weight_decay });
    let run = |weights: &mut Tensor<D>| {
        let state = AdamWState { master: None, mean: &mut mean, square: &mut square };
        d.adamw(&adamw, &decays, &clip, weights, &gradients, state)
    };
    let mut all = vec![("adamw", changed(d, LEN, 2, run)?)];
    d.add(&input(d, LEN, 2)?, &mut master)?;
    let run = |weights: &mut Tensor<D>| {
        let state = AdamWState { master: Some(&mut master), mean: &mut mean, square: &mut square };
        d.adamw(&adamw, &decays, &clip, weights, &gradients, state)
    };
    all.push(("adamw with masters", changed(d, LEN, 3, run)?));
    let rounded = |values: Vec<f64>| values.iter().map(|&value| bf16::from_f64(value).to_f32()).collect();
    all.push(("norm and factor", rounded(d.read(&clip)?)));
    all.push(("sums of squares", rounded(d.read(&figures)?)));
    Ok(all)
}

/// Calls every operation.
pub(crate) fn all<D: Device>(device: &D) -> Result<Results> {
    let groups = [
        element_wise(device)?,
        products(device)?,
        norms(device)?,
        attention(device)?,
        experts(device)?,
        latent_heads(device)?,
        optimizer(device)?,
    ];
    Ok(groups.into_iter().flatten().collect())
}
