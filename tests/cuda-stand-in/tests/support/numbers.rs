//! Vectors with numbers in either type.

use cudarc::driver::{CudaSlice, CudaStream};
use std::sync::Arc;

#[derive(Debug, Clone)]
pub(crate) enum Numbers {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

/// Rounds to bf16 by cutting; tests need some bf16, not the nearest.
fn cut(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

fn widen(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

impl Numbers {
    /// Numbers in -1..1.
    pub(crate) fn random(is_bf16: bool, length: usize, seed: u32) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        if is_bf16 {
            Self::Bf16((0..length).map(|_| cut(next())).collect())
        } else {
            Self::F32((0..length).map(|_| next()).collect())
        }
    }

    pub(crate) fn at(&self, i: usize) -> f64 {
        match self {
            Self::F32(numbers) => f64::from(numbers[i]),
            Self::Bf16(numbers) => f64::from(widen(numbers[i])),
        }
    }

    /// Copies the bytes to the device.
    pub(crate) fn upload(&self, stream: &Arc<CudaStream>) -> CudaSlice<u8> {
        let bytes: Vec<u8> = match self {
            Self::F32(numbers) => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::Bf16(numbers) => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        stream.clone_htod(&bytes).expect("the device has memory")
    }

    pub(crate) fn download(is_bf16: bool, stream: &Arc<CudaStream>, buffer: &CudaSlice<u8>) -> Self {
        let bytes = stream.clone_dtoh(buffer).expect("the device works");
        if is_bf16 {
            Self::Bf16(bytes.chunks_exact(2).map(|x| u16::from_le_bytes([x[0], x[1]])).collect())
        } else {
            Self::F32(bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect())
        }
    }
}
