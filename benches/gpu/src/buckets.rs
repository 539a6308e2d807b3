//! Attention buckets: heads, mask and segment lengths from the mixes that training sees.

use serde_json::{Value, json};

use crate::arguments::Arguments;
use crate::gemm::Linear;
use crate::report::{self, Outcome};
use dflop_device::ops::attention::AttentionShape;

/// Attention over a pack.
pub(crate) struct Bucket {
    pub(crate) name: String,
    pub(crate) shape: AttentionShape,
    pub(crate) lengths: Vec<usize>,
}

/// Module heads: name, query heads, key heads, head width, causal mask.
type Heads = (&'static str, usize, usize, usize, bool);

const TEXT: [Heads; 2] = [("qwen2.5-1.5b", 12, 2, 128, true), ("llama3-8b", 32, 8, 128, true)];
const IMAGES: [Heads; 4] = [
    ("siglip-so400m", 16, 16, 72, false),
    ("internvit-300m", 16, 16, 64, false),
    ("internvit-6b", 25, 25, 128, false),
    ("qwen2-vl", 16, 16, 80, false),
];
const AUDIO: Heads = ("whisper-large", 20, 20, 64, false);

/// Returns all buckets.
pub(crate) fn all(is_tiny: bool) -> Vec<Bucket> {
    let mut long_and_short = vec![4096];
    long_and_short.resize(1 + 64, 64);
    let text = [
        ("one", vec![8192]),
        ("even", vec![1024; 8]),
        ("short", vec![64; 128]),
        ("long-and-short", long_and_short),
        ("uneven", vec![2900, 1700, 1100, 800, 600, 400, 300, 200, 120, 72]),
    ];
    let images = [
        ("256", vec![256; 32]),
        ("1025", vec![1025; 8]),
        ("4096", vec![4096; 2]),
        ("mixed", vec![4096, 256, 1296, 576, 256, 1024, 688]),
    ];
    let mut found = Vec::new();
    for heads in TEXT {
        found.extend(text.iter().map(|(mix, lengths)| bucket(heads, mix, lengths, is_tiny)));
    }
    for heads in IMAGES {
        found.extend(images.iter().map(|(mix, lengths)| bucket(heads, mix, lengths, is_tiny)));
    }
    found.push(bucket(AUDIO, "1500", &[1500; 5], is_tiny));
    found
}

fn bucket(heads: Heads, mix: &str, lengths: &[usize], is_tiny: bool) -> Bucket {
    let (module, heads, kv_heads, head_dim, is_causal) = heads;
    let scale = (head_dim as f64).powf(-0.5);
    let mut shape = AttentionShape { heads, kv_heads, head_dim, scale, is_causal };
    let mut lengths = lengths.to_vec();
    if is_tiny {
        // one key head with its queries, and lengths on both sides of a row block
        shape = AttentionShape { heads: (heads / kv_heads).min(2), kv_heads: 1, ..shape };
        lengths.truncate(3);
        for length in &mut lengths {
            *length = (*length / 64).clamp(3, 70);
        }
    }
    Bucket { name: format!("{module} {mix}"), shape, lengths }
}

impl Bucket {
    pub(crate) fn rows(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// First row of every segment, then the number of rows.
    pub(crate) fn starts(&self) -> Vec<u32> {
        let ends = self.lengths.iter().scan(0, |end, &length| {
            *end += length as u32;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// Floating-point operations in the forward pass: two products for each visible pair of rows.
    pub(crate) fn flops(&self) -> f64 {
        let pairs = |&length: &usize| {
            if self.shape.is_causal { length * (length + 1) / 2 } else { length * length }
        };
        4.0 * (self.shape.heads * self.shape.head_dim) as f64
            * self.lengths.iter().map(pairs).sum::<usize>() as f64
    }

    fn to_json(&self) -> Value {
        let AttentionShape { heads, kv_heads, head_dim, scale, is_causal } = self.shape;
        json!({"name": self.name, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": scale,
            "is_causal": is_causal, "lengths": self.lengths})
    }
}

/// Prints all buckets and products, for the PyTorch side.
pub(crate) fn run(arguments: &Arguments) -> Outcome {
    let buckets: Vec<Value> = all(arguments.is_tiny).iter().map(Bucket::to_json).collect();
    let products: Vec<Value> = crate::gemm::all(arguments.is_tiny).iter().map(Linear::to_json).collect();
    let count = buckets.len();
    report::result("buckets", json!({"attention": buckets, "gemm": products}));
    report::summary("buckets", Outcome::Passed, &format!("{count} buckets"), "a list")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_have_about_8192_rows_and_tiny_ones_few() {
        for bucket in all(false) {
            assert!((7000..=8300).contains(&bucket.rows()), "{}: {}", bucket.name, bucket.rows());
            assert_eq!(bucket.starts().last(), Some(&(bucket.rows() as u32)));
        }
        assert!(all(true).iter().all(|bucket| bucket.rows() <= 210));
    }

    #[test]
    fn a_causal_mask_leaves_half_of_the_products() {
        let heads = ("", 2, 1, 8, true);
        let causal = bucket(heads, "", &[100, 10], false).flops();
        assert!((causal - 4.0 * 16.0 * 5105.0).abs() < 1e-6);
    }
}
