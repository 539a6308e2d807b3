//! Attention shapes from models, with microbatch segments.

use dflop_cuda::cudnn::{Heads, PlanKey};

/// Model attention shape.
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) heads: Heads,
    /// Rows per segment, with the number of such segments.
    pub(crate) segments: &'static [(u32, usize)],
    /// Maximum workspace of a backward plan, in MB: packed, padded.
    pub(crate) backward_mb_max: (u64, u64),
}

const fn heads(heads: u32, kv_heads: u32, head_dim: u32, is_causal: bool) -> Heads {
    Heads { heads, kv_heads, head_dim, is_causal }
}

/// Rows per segment, with the number of such segments: a long document and short documents.
const DOCUMENTS: &[(u32, usize)] = &[(4096, 1), (1000, 2), (300, 6)];

/// Shapes that plans are checked for.
pub(crate) const SHAPES: [Shape; 8] = [
    Shape {
        name: "Qwen2.5 7B",
        heads: heads(28, 4, 128, true),
        segments: DOCUMENTS,
        backward_mb_max: (290, 5670),
    },
    Shape {
        name: "Llama 3 8B",
        heads: heads(32, 8, 128, true),
        segments: DOCUMENTS,
        backward_mb_max: (375, 6480),
    },
    Shape {
        name: "28 heads without groups",
        heads: heads(28, 28, 128, true),
        segments: DOCUMENTS,
        backward_mb_max: (360, 3790),
    },
    Shape {
        name: "SigLIP so400m",
        heads: heads(16, 16, 72, false),
        segments: &[(729, 11)],
        backward_mb_max: (160, 310),
    },
    Shape {
        name: "Whisper large",
        heads: heads(20, 20, 64, false),
        segments: &[(1500, 5)],
        backward_mb_max: (130, 172),
    },
    Shape {
        name: "ViT of Qwen2.5-VL",
        heads: heads(16, 16, 80, false),
        segments: &[(64, 128)],
        backward_mb_max: (130, 90),
    },
    Shape {
        name: "InternViT 300M",
        heads: heads(16, 16, 64, false),
        segments: &[(1025, 7)],
        backward_mb_max: (110, 140),
    },
    Shape {
        name: "Qwen2.5 1.5B",
        heads: heads(12, 2, 128, true),
        segments: DOCUMENTS,
        backward_mb_max: (130, 2430),
    },
];

impl Shape {
    /// Returns the first row in every segment, then the number of rows.
    pub(crate) fn starts(&self) -> Vec<u32> {
        let mut starts = vec![0];
        for &(rows, count) in self.segments {
            for _ in 0..count {
                starts.push(starts.last().copied().unwrap_or(0) + rows);
            }
        }
        starts
    }

    pub(crate) fn forward(&self) -> PlanKey {
        PlanKey::forward(self.heads, &self.starts())
    }

    pub(crate) fn backward(&self, is_deterministic: bool) -> PlanKey {
        PlanKey::backward(self.heads, &self.starts(), is_deterministic)
    }
}
