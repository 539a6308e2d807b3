//! Sums over all ranks.

use super::{Case, at, floats, ring_sum, stay};
use crate::api::Comm;
use crate::error::Error;
use crate::message::{Buffer, even_parts};

pub(super) const CASES: &[Case] = &[
    Case { name: "sums_are_close_and_equal_on_all_ranks", sizes: SIZES, run: close_sums, needs: |_| true },
    Case {
        name: "sums_have_the_order_of_the_ring",
        sizes: SIZES,
        run: ring,
        needs: |has| has.has_ring_order,
    },
    Case { name: "sums_of_every_type_are_right", sizes: &[3], run: all_types, needs: |_| true },
    Case {
        name: "reduce_scatter_and_all_gather_are_the_halves_of_a_sum",
        sizes: SIZES,
        run: halves,
        needs: |has| has.has_ring_order,
    },
    Case { name: "sums_overlap_with_computation", sizes: &[3], run: overlapped, needs: |_| true },
    Case {
        name: "halves_of_sums_overlap_with_computation_and_keep_their_order",
        sizes: SIZES,
        run: overlapped_halves,
        needs: |_| true,
    },
];

const SIZES: &[usize] = &[1, 2, 3, 4, 5];
const ELEMENTS: [usize; 8] = [0, 1, 2, 3, 7, 1000, 4099, 70_001];

fn close_sums(comm: &dyn Comm) {
    for elements in ELEMENTS {
        let mut values = floats(comm.rank(), elements);
        comm.all_reduce(at(1), values.as_mut_slice().into()).unwrap();
        for (found, expected) in values.iter().zip(ring_sum(comm.size(), elements)) {
            // inputs are below 1000, so the rounding error for a few terms is below 1e-3
            assert!((found - expected).abs() < 1e-2, "{found}, expected {expected}");
        }
        let mut of_root = values.clone();
        comm.broadcast(at(2), 0, of_root.as_mut_slice().into()).unwrap();
        assert_eq!(values, of_root, "rank {} has the bits of rank 0", comm.rank());
    }
}

fn ring(comm: &dyn Comm) {
    for elements in ELEMENTS {
        let mut values = floats(comm.rank(), elements);
        comm.all_reduce(at(1), values.as_mut_slice().into()).unwrap();
        assert_eq!(values, ring_sum(comm.size(), elements), "{} ranks, {elements}", comm.size());
    }
}

fn all_types(comm: &dyn Comm) {
    let one = comm.rank() + 1;
    let mut counts = [one as u64, u64::MAX, 5];
    let mut norms = [one as f64 / 8.0, 1e300];
    comm.all_reduce(at(0), counts.as_mut_slice().into()).unwrap();
    comm.all_reduce(at(0), norms.as_mut_slice().into()).unwrap();
    assert_eq!(counts, [6, u64::MAX - 2, 15]);
    assert_eq!(norms, [0.75, 1e300 + 1e300 + 1e300]);
}

/// For even and uneven parts: every element is summed in `all_reduce` order.
fn halves(comm: &dyn Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    for elements in [0, 3, 1000, 4099, 70_001] {
        let mut all_in_last = vec![0; size];
        all_in_last[size - 1] = elements;
        // parts that grow with the rank, as model tensors do not divide evenly
        let mut growing: Vec<usize> = (0..size).map(|part| elements * part / (size * size)).collect();
        growing[0] += elements - growing.iter().sum::<usize>();
        for parts in [even_parts(elements, size), all_in_last, growing] {
            let begin: usize = parts[..rank].iter().sum();
            let mut values = floats(rank, elements);
            comm.reduce_scatter(at(0), values.as_mut_slice().into(), &parts).unwrap();
            let mut sum = floats(rank, elements);
            comm.all_reduce(at(0), sum.as_mut_slice().into()).unwrap();
            assert_eq!(values[begin..][..parts[rank]], sum[begin..][..parts[rank]], "{parts:?}");
            comm.all_gather(at(0), values.as_mut_slice().into(), &parts).unwrap();
            assert_eq!(values, sum, "{parts:?}");
        }
    }
}

fn overlapped(comm: &dyn Comm) {
    let sizes = [70_001, 1, 4099];
    let begin =
        |&elements: &usize| comm.start_all_reduce(at(0), floats(comm.rank(), elements).into()).unwrap();
    let handles: Vec<_> = sizes.iter().map(begin).collect();
    let mut values = floats(comm.rank(), 1000);
    comm.all_reduce(at(0), values.as_mut_slice().into()).unwrap();
    for (elements, handle) in sizes.into_iter().zip(handles) {
        let mut sum = floats(comm.rank(), elements);
        comm.all_reduce(at(1), sum.as_mut_slice().into()).unwrap();
        assert_eq!(handle.wait().unwrap(), Buffer::F32(sum));
    }
    stay(comm);
}

/// All halves are in progress at once, and have the same bits as blocking halves.
fn overlapped_halves(comm: &dyn Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    let parts_of = |elements: usize| {
        let mut all_in_last = vec![0; size];
        all_in_last[size - 1] = elements;
        [even_parts(elements, size), all_in_last]
    };
    let own_of = |parts: &[usize]| {
        let begin: usize = parts[..rank].iter().sum();
        begin..begin + parts[rank]
    };
    let mut started = Vec::new();
    for elements in [70_001, 0, 4099] {
        for parts in parts_of(elements) {
            let values = floats(rank, elements);
            let sum = comm.start_reduce_scatter(at(0), values.clone().into(), &parts).unwrap();
            let whole = comm.start_all_gather(at(0), values.into(), &parts).unwrap();
            started.push((elements, parts, sum, whole));
        }
    }
    for (elements, parts, sum, whole) in started {
        let own = own_of(&parts);
        let mut expected = floats(rank, elements);
        comm.reduce_scatter(at(1), expected.as_mut_slice().into(), &parts).unwrap();
        let Buffer::F32(sum) = sum.wait().unwrap() else { panic!("sums keep their type") };
        assert_eq!(sum[own.clone()], expected[own], "{parts:?}");
        let mut expected = floats(rank, elements);
        comm.all_gather(at(1), expected.as_mut_slice().into(), &parts).unwrap();
        assert_eq!(whole.wait().unwrap(), Buffer::F32(expected), "{parts:?}");
    }
    let refused = [
        comm.start_reduce_scatter(at(2), vec![0.0_f32; 7].into(), &vec![1; size]),
        comm.start_all_gather(at(2), vec![0.0_f32; 7].into(), &vec![1; size]),
    ];
    for refused in refused {
        assert!(matches!(refused, Err(Error::Parts { .. })), "parts are checked before anything is sent");
    }
    stay(comm);
}
