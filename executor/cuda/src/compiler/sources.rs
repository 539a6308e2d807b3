//! Kernel sources, which are part of the program.

/// Headers by include name.
pub(super) const HEADERS: [(&str, &str); 6] = [
    ("intrinsics.cuh", include_str!("../../kernels/intrinsics.cuh")),
    ("device.cuh", include_str!("../../kernels/device.cuh")),
    ("activation.cuh", include_str!("../../kernels/activation.cuh")),
    ("own_columns.cuh", include_str!("../../kernels/own_columns.cuh")),
    ("norm_rows.cuh", include_str!("../../kernels/norm_rows.cuh")),
    ("attention.cuh", include_str!("../../kernels/attention.cuh")),
];

/// Defines sources and files.
macro_rules! sources {
    ($($source:ident, $file:literal;)*) => {
        /// Kernel source for an operation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Source {
            $($source,)*
        }

        impl Source {
            /// Returns the file name.
            pub(crate) const fn file(self) -> &'static str {
                match self {
                    $(Self::$source => $file,)*
                }
            }

            /// Returns the file text.
            pub(crate) const fn text(self) -> &'static str {
                match self {
                    $(Self::$source => include_str!(concat!("../../kernels/", $file)),)*
                }
            }
        }
    };
}

sources! {
    Activation, "activation.cu";
    AdamW, "adamw.cu";
    AttentionBackward, "attention_backward.cu";
    AttentionForward, "attention_forward.cu";
    AttentionGeneral, "attention_general.cu";
    AttentionSinks, "attention_sinks.cu";
    Bias, "bias.cu";
    ClampedGate, "clamped_gate.cu";
    Clip, "clip.cu";
    ColumnSums, "column_sums.cu";
    CopyRanges, "copy_ranges.cu";
    CrossEntropy, "cross_entropy.cu";
    Elementwise, "elementwise.cu";
    Experts, "experts.cu";
    Gate, "gate.cu";
    GatherScatter, "gather_scatter.cu";
    HeadNorm, "head_norm.cu";
    HeadNormBackward, "head_norm_backward.cu";
    LatentHeads, "latent_heads.cu";
    LayerNorm, "layer_norm.cu";
    LayerScale, "layer_scale.cu";
    Losses, "losses.cu";
    RmsNorm, "rms_norm.cu";
    Rope, "rope.cu";
    Transpose, "transpose.cu";
    VocabParallelCrossEntropy, "vocab_parallel_cross_entropy.cu";
}
