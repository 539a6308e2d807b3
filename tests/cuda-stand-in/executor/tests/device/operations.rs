//! Compares every operation on the CUDA device with the CPU device, on the stand-in: fresh random inputs,
//! whole outputs, and the same bits for every thread order.

use dflop_cuda::Cuda;
use dflop_cuda_tests::cuda;
use dflop_device::{Cpu, Device, Dtype, Result};

use crate::cases::{self, Cases, Results};
use crate::random;

/// Thread and block orders: ascending, descending, random.
const ORDERS: [u64; 5] = [0, 1, 2, 3, 4];

/// Operation group.
macro_rules! group {
    ($name:ident, $method:ident, $exact:expr, $half:expr) => {
        #[test]
        fn $name() {
            fn run<D: Device>(device: &D, seed: u64) -> Result<Results> {
                let mut cases = Cases::new(device, seed);
                cases.$method()?;
                Ok(cases.results)
            }
            compare(run::<Cpu>, run::<Cuda>, [$exact, $half]);
        }
    };
}

group!(element_wise_operations, element_wise, 1e-5, 6e-3);
group!(operations_on_columns, columns, 1e-5, 6e-3);
group!(copies_and_selections, selections, 1e-5, 6e-3);
group!(norms, norms, 2e-5, 6e-3);
group!(norms_of_heads, head_norms, 2e-5, 6e-3);
group!(sinks_of_attention, sinks, 2e-5, 6e-3);
group!(rotations, rotations, 1e-5, 6e-3);
group!(products, products, 1e-5, 6e-3);
group!(losses, losses, 1e-5, 6e-3);
group!(experts_of_tokens, experts, 1e-5, 6e-3);
group!(heads_of_latent_attention, latent_heads, 1e-5, 6e-3);
group!(optimizer, optimizer, 1e-5, 6e-3);
group!(attention_within_segments, attention, 1e-5, 1e-2);

/// Runs operations in both storage types, in all orders, and compares them with the CPU.
fn compare(
    on_cpu: fn(&Cpu, u64) -> Result<Results>,
    on_cuda: fn(&Cuda, u64) -> Result<Results>,
    bounds: [f64; 2],
) {
    let _turn = cuda::turn();
    for (dtype, bound) in [Dtype::F32, Dtype::Bf16].into_iter().zip(bounds) {
        let seed = random::seed();
        let expected = on_cpu(&Cpu::new(1).unwrap().store(dtype).unwrap(), seed).unwrap();
        let mut first: Option<Results> = None;
        for order in ORDERS {
            cuda::stand_in().set_order(order);
            let found = on_cuda(&cuda::with_storage(dtype), seed).unwrap();
            assert_eq!(found.len(), expected.len());
            for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                let error = cases::relative_error(found, expected);
                assert!(error < bound, "{name}, {dtype:?}, order {order}, seed {seed}: error {error:.2e}");
            }
            let first = &*first.get_or_insert_with(|| found.clone());
            for ((name, found), (_, first)) in found.iter().zip(first) {
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert!(
                    bits(found) == bits(first),
                    "{name}, {dtype:?}, order {order}, seed {seed}: other bits"
                );
            }
        }
    }
}
