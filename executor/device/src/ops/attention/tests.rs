use super::super::finite_difference::{check, numbers, project, to_f32};
use super::*;

fn shape(heads: usize, kv_heads: usize, is_causal: bool) -> AttentionShape {
    AttentionShape { heads, kv_heads, head_dim: 4, scale: 0.7, is_causal }
}

fn run<F: Real>(shape: &AttentionShape, segments: &[u32], qkv: &[F]) -> (Vec<F>, Vec<F>) {
    let tokens = qkv.len() / shape.row();
    let mut output = vec![F::from_f64(f64::NAN); tokens * shape.output()];
    let mut log_sums = vec![F::from_f64(f64::NAN); tokens * shape.heads];
    forward(shape, &HostSegments::new(segments), qkv, &mut output, &mut log_sums);
    (output, log_sums)
}

fn gradient<F: Real>(shape: &AttentionShape, segments: &[u32], qkv: &[F], d_output: &[F]) -> Vec<F> {
    let (output, log_sums) = run(shape, segments, qkv);
    let mut scratch = vec![F::from_f64(f64::NAN); qkv.len()];
    let mut d_qkv = scratch.clone();
    let saved = (qkv, &output[..], &log_sums[..]);
    backward(shape, &HostSegments::new(segments), saved, d_output, &mut scratch, &mut d_qkv);
    d_qkv
}

/// Attention by its definition, one token at a time.
fn by_definition(shape: &AttentionShape, segments: &[u32], qkv: &[f64]) -> Vec<f64> {
    let (row, dim) = (shape.row(), shape.head_dim);
    let mut output = vec![0.0; qkv.len() / row * shape.output()];
    for segment in segments.windows(2) {
        let (start, end) = (segment[0] as usize, segment[1] as usize);
        for token in start..end {
            for head in 0..shape.heads {
                let (query, key, value) = shape.columns(head);
                let last = if shape.is_causal { token + 1 } else { end };
                let at = |token: usize, column: usize| &qkv[token * row + column..][..dim];
                let score = |other| project(at(token, query), at(other, key)) * shape.scale;
                let sum: f64 = (start..last).map(|other| score(other).exp()).sum();
                for other in start..last {
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

#[test]
fn the_output_matches_the_definition() {
    for (heads, kv_heads, is_causal) in [(1, 1, true), (4, 2, true), (4, 1, false), (3, 3, false)] {
        let shape = shape(heads, kv_heads, is_causal);
        let qkv = numbers(205 * shape.row(), 1);
        let (output, _) = run(&shape, &SEGMENTS, &qkv);
        let truth = by_definition(&shape, &SEGMENTS, &qkv);
        assert!(output.iter().zip(&truth).all(|(a, b)| (a - b).abs() < 1e-12));
    }
}

#[test]
fn gradients_match_finite_differences() {
    for (heads, kv_heads, is_causal) in [(1, 1, true), (4, 2, true), (4, 1, false), (3, 3, false)] {
        let shape = shape(heads, kv_heads, is_causal);
        let (qkv, dy) = (numbers(205 * shape.row(), 1), numbers(205 * shape.output(), 2));
        let d_qkv = gradient(&shape, &SEGMENTS, &qkv, &dy);
        let loss = |qkv: &[f64]| project(&run(&shape, &SEGMENTS, qkv).0, &dy);
        check(&format!("{heads} {kv_heads} {is_causal}"), &qkv, &d_qkv, loss);
    }
}

#[test]
fn a_sample_of_a_pack_has_the_bits_it_has_alone() {
    let shape = shape(4, 2, true);
    let (qkv, dy) = (numbers(205 * shape.row(), 1), numbers(205 * shape.output(), 2));
    let (qkv, dy) = (to_f32(&qkv), to_f32(&dy));
    let packed = gradient(&shape, &SEGMENTS, &qkv, &dy);
    for segment in SEGMENTS.windows(2) {
        let (start, end) = (segment[0] as usize, segment[1] as usize);
        let mine = |values: &[f32], width: usize| values[start * width..end * width].to_vec();
        let (own, d_own) = (mine(&qkv, shape.row()), mine(&dy, shape.output()));
        let alone = gradient(&shape, &[0, segment[1] - segment[0]], &own, &d_own);
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
        pool.install(|| gradient(&shape, &SEGMENTS, &qkv, &dy))
    };
    assert_eq!(with(1), with(3));
}
