use super::super::every_operation::{ROWS, Results, changed, input};
use super::super::finite_difference::{check, numbers, project, to_f32};
use super::*;
use crate::ops::Device;
use crate::runtime::Dtype;
use crate::segments::KeyRanges;

pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 2, scale: 0.7, is_causal: true };
    let segments = Segments::new(d, &[0, 4, ROWS as u32])?;
    let qkv = input(d, ROWS * shape.row(), 1)?;
    let mut log_sums = d.alloc_as(Dtype::F32, ROWS * shape.heads)?;
    let run = |output: &mut Tensor<D>| d.attention(&shape, &segments, &qkv, output, &mut log_sums);
    let mut all = vec![("attention", changed(d, ROWS * shape.output(), 2, run)?)];
    let (output, d_output) = (input(d, ROWS * shape.output(), 3)?, input(d, ROWS * shape.output(), 4)?);
    let d_qkv = d.attention_backward(&shape, &segments, &qkv, (&output, &log_sums), &d_output)?;
    all.push(("attention backward", d.download(&d_qkv)?));
    Ok(all)
}

fn shape(heads: usize, kv_heads: usize, is_causal: bool) -> AttentionShape {
    AttentionShape { heads, kv_heads, head_dim: 4, scale: 0.7, is_causal }
}

fn run<F: Real>(shape: &AttentionShape, segments: &HostSegments, qkv: &[F]) -> (Vec<F>, Vec<F>) {
    let tokens = qkv.len() / shape.row();
    let mut output = vec![F::from_f64(f64::NAN); tokens * shape.output()];
    let mut log_sums = vec![F::from_f64(f64::NAN); tokens * shape.heads];
    forward(shape, segments, qkv, &mut output, &mut log_sums);
    (output, log_sums)
}

fn gradient<F: Real>(shape: &AttentionShape, segments: &HostSegments, qkv: &[F], d_output: &[F]) -> Vec<F> {
    let (output, log_sums) = run(shape, segments, qkv);
    let mut scratch = vec![F::from_f64(f64::NAN); qkv.len()];
    let mut d_qkv = scratch.clone();
    let saved = (qkv, &output[..], &log_sums[..]);
    backward(shape, segments, saved, d_output, &mut scratch, &mut d_qkv);
    d_qkv
}

/// Attention by definition, token by token.
fn by_definition(shape: &AttentionShape, segments: &HostSegments, qkv: &[f64]) -> Vec<f64> {
    let (row, dim) = (shape.row(), shape.head_dim);
    let mut output = vec![0.0; qkv.len() / row * shape.output()];
    for segment in segments.starts().windows(2) {
        let (start, end) = (segment[0] as usize, segment[1] as usize);
        for token in start..end {
            let keys = match segments.ranges().map(|ranges| ranges.keys()[token]) {
                Some([first, last]) => first as usize..last as usize,
                None => start..if shape.is_causal { token + 1 } else { end },
            };
            for head in 0..shape.heads {
                let (query, key, value) = shape.columns(head);
                let at = |token: usize, column: usize| &qkv[token * row + column..][..dim];
                let score = |other| project(at(token, query), at(other, key)) * shape.scale;
                let sum: f64 = keys.clone().map(|other| score(other).exp()).sum();
                for other in keys.clone() {
                    let weight = score(other).exp() / sum;
                    let target = &mut output[token * shape.output() + head * dim..][..dim];
                    target.iter_mut().zip(at(other, value)).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
    }
    output
}

const SEGMENTS: [u32; 6] = [0, 3, 3, 4, 71, 205];

fn segments() -> HostSegments {
    HostSegments::new(&SEGMENTS)
}

/// Segments with a window, and row runs that see each other completely.
fn ranged(window: u32, blocks: &[std::ops::Range<u32>]) -> HostSegments {
    let keys = (0..205).map(|query: u32| {
        let segment = SEGMENTS[SEGMENTS.partition_point(|&start| start <= query) - 1];
        let block = blocks.iter().find(|block| block.contains(&query));
        [(query + 1).saturating_sub(window).max(segment), block.map_or(query + 1, |block| block.end)]
    });
    segments().ranged(KeyRanges::new(&keys.collect::<Vec<_>>()))
}

/// Masks: none, causal, windows shorter and longer than a tile, images with and without a window.
fn masks() -> Vec<(&'static str, AttentionShape, HostSegments)> {
    vec![
        ("one head", shape(1, 1, true), segments()),
        ("causal", shape(4, 2, true), segments()),
        ("full", shape(4, 1, false), segments()),
        ("full without groups", shape(3, 3, false), segments()),
        ("window", shape(2, 1, true), ranged(7, &[])),
        ("long window", shape(2, 1, true), ranged(90, &[])),
        ("images", shape(2, 2, true), ranged(205, &[1..3, 10..60, 80..100, 130..205])),
        ("images and a window", shape(4, 2, true), ranged(20, &[1..3, 10..60, 80..100, 130..205])),
        ("itself", shape(2, 1, false), ranged(1, &[])),
    ]
}

#[test]
fn the_output_matches_the_definition() {
    for (name, shape, segments) in masks() {
        let qkv = numbers(205 * shape.row(), 1);
        let (output, _) = run(&shape, &segments, &qkv);
        let truth = by_definition(&shape, &segments, &qkv);
        assert!(output.iter().zip(&truth).all(|(a, b)| (a - b).abs() < 1e-12), "{name}");
    }
}

#[test]
fn gradients_match_finite_differences() {
    for (name, shape, segments) in masks() {
        let (qkv, dy) = (numbers(205 * shape.row(), 1), numbers(205 * shape.output(), 2));
        let d_qkv = gradient(&shape, &segments, &qkv, &dy);
        let loss = |qkv: &[f64]| project(&run(&shape, &segments, qkv).0, &dy);
        check(name, &qkv, &d_qkv, loss);
    }
}

#[test]
fn ranges_of_a_causal_mask_have_its_bits() {
    let (shape, ranges) = (shape(4, 2, true), ranged(205, &[]));
    let (qkv, dy) = (numbers(205 * shape.row(), 1), numbers(205 * shape.output(), 2));
    let (qkv, dy) = (to_f32(&qkv), to_f32(&dy));
    assert_eq!(run(&shape, &ranges, &qkv), run(&shape, &segments(), &qkv));
    assert_eq!(gradient(&shape, &ranges, &qkv, &dy), gradient(&shape, &segments(), &qkv, &dy));
}

#[test]
fn a_sample_of_a_pack_has_the_bits_it_has_alone() {
    let shape = shape(4, 2, true);
    let (qkv, dy) = (numbers(205 * shape.row(), 1), numbers(205 * shape.output(), 2));
    let (qkv, dy) = (to_f32(&qkv), to_f32(&dy));
    let packed = gradient(&shape, &segments(), &qkv, &dy);
    for segment in SEGMENTS.windows(2) {
        let (start, end) = (segment[0] as usize, segment[1] as usize);
        let mine = |values: &[f32], width: usize| values[start * width..end * width].to_vec();
        let (own, d_own) = (mine(&qkv, shape.row()), mine(&dy, shape.output()));
        let alone = gradient(&shape, &HostSegments::new(&[0, segment[1] - segment[0]]), &own, &d_own);
        assert_eq!(alone, mine(&packed, shape.row()));
    }
}

#[test]
fn threads_change_no_bit() {
    let shape = shape(4, 2, false);
    let qkv = to_f32(&numbers(205 * shape.row(), 1));
    let dy = to_f32(&numbers(205 * shape.output(), 2));
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| gradient(&shape, &segments(), &qkv, &dy))
    };
    assert_eq!(with(1), with(3));
}
