//! Collectives: sums, parts, splits.

use dflop_comm::even_parts;

use super::{Case, Rank, at, fractions, numbers};
use crate::error::Error;
use crate::ops::Device;
use crate::runtime::{Dtype, Lane, Tensor};

const SIZES: &[usize] = &[1, 2, 3, 4];

pub(super) fn cases<D: Device>() -> Vec<Case<D>> {
    vec![
        Case { name: "sums_are_equal_on_all_ranks", sizes: SIZES, run: sums },
        Case { name: "sums_that_overlap_have_the_bits_of_others", sizes: SIZES, run: overlapped },
        Case { name: "sums_of_bf16_are_rounded_once", sizes: &[2, 3, 4], run: sums_of_bf16 },
        Case { name: "parts_are_summed_and_gathered", sizes: SIZES, run: parts },
        Case { name: "collectives_keep_the_order_of_calls", sizes: &[2, 3], run: in_order },
        Case { name: "splits_have_their_own_ranks", sizes: &[2, 4], run: splits },
        Case { name: "parts_that_do_not_fit_are_refused", sizes: &[2], run: wrong_parts },
    ]
}

fn is_close(found: &[f32], expected: &[f64], tolerance: f64) -> bool {
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(&found, &expected)| {
            (f64::from(found) - expected).abs() <= tolerance * (1.0 + expected.abs())
        })
}

/// Sum over all ranks.
fn sum(size: usize, len: usize) -> Vec<f64> {
    let ranks: Vec<Vec<f32>> = (0..size).map(|rank| fractions(rank, len)).collect();
    (0..len).map(|index| ranks.iter().map(|rank| f64::from(rank[index])).sum()).collect()
}

/// Checks that all ranks have the same bits.
fn check_equal<D: Device>(rank: &Rank<'_, D>, values: &[f32]) {
    let mix = |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
    let hash = values.iter().fold(0xcbf2_9ce4_8422_2325, mix);
    let hashes = rank.comm.host().gather(at(7), &[hash]).expect("the job goes on");
    assert!(hashes.iter().all(|&other| other == hash), "all ranks have the same bits");
}

fn sums<D: Device>(rank: &Rank<'_, D>) {
    for (dtype, tolerance) in [(Dtype::F32, 1e-6), (Dtype::F64, 1e-7)] {
        for len in [1, 3, 1000, 40_000] {
            let mut values = rank.upload(dtype, &fractions(rank.rank(), len));
            rank.comm.all_reduce(at(1), &mut values).expect("the job goes on");
            let found = rank.download(&values);
            assert!(is_close(&found, &sum(rank.size(), len), tolerance), "{dtype:?}, {len} elements");
            check_equal(rank, &found);
        }
    }
    rank.stay();
}

fn overlapped<D: Device>(rank: &Rank<'_, D>) {
    let len = 3000;
    let mut blocking = rank.upload(Dtype::F32, &fractions(rank.rank(), len));
    rank.comm.all_reduce(at(1), &mut blocking).expect("the job goes on");
    let sums = (0..3).map(|factor| {
        let mut values = rank.upload(Dtype::F32, &fractions(rank.rank(), len));
        rank.device.scale(f32::from(2_u8.pow(factor)), &mut values).expect("the device works");
        rank.comm.start_all_reduce(at(2), values, &rank.now()).expect("the job goes on")
    });
    let sums: Vec<_> = sums.collect();
    // operations continue meanwhile
    let mut other = rank.upload(Dtype::F32, &numbers(1, len));
    rank.device.scale(3.0, &mut other).expect("the device works");
    let blocking = rank.download(&blocking);
    for (factor, sum) in sums.into_iter().enumerate() {
        let expected: Vec<f32> = blocking.iter().map(|value| value * (1 << factor) as f32).collect();
        assert_eq!(rank.received(sum), expected, "powers of two keep the bits");
    }
    rank.stay();
}

fn sums_of_bf16<D: Device>(rank: &Rank<'_, D>) {
    let len = 2000;
    let rounded = |seed: usize| {
        let values = rank.upload(Dtype::Bf16, &fractions(seed, len));
        rank.download(&values)
    };
    let ranks: Vec<Vec<f32>> = (0..rank.size()).map(rounded).collect();
    let exact: Vec<f64> =
        (0..len).map(|index| ranks.iter().map(|rank| f64::from(rank[index])).sum()).collect();
    let own = &ranks[rank.rank()];
    let mut blocking = rank.upload(Dtype::Bf16, own);
    rank.comm.all_reduce(at(1), &mut blocking).expect("the job goes on");
    let overlapped = rank.upload(Dtype::Bf16, own);
    let overlapped = rank.comm.start_all_reduce(at(2), overlapped, &rank.now()).expect("the job goes on");
    let blocking = rank.download(&blocking);
    // half a unit in the last place of 8 bits, and what a sum in f32 adds
    assert!(is_close(&blocking, &exact, 1.0 / 256.0), "one rounding");
    assert_eq!(rank.received(overlapped), blocking);
    check_equal(rank, &blocking);
    rank.stay();
}

fn parts<D: Device>(rank: &Rank<'_, D>) {
    let (own, size) = (rank.rank(), rank.size());
    let uneven: Vec<usize> = (0..size).map(|rank| [700, 0, 33, 1][rank % 4]).collect();
    for parts in [even_parts(64 * size, size), even_parts(1001, size), uneven] {
        let len: usize = parts.iter().sum();
        let first: usize = parts[..own].iter().sum();
        let range = first..first + parts[own];
        let expected = sum(size, len);
        let values = || rank.upload(Dtype::F32, &fractions(own, len));
        let mut blocking = values();
        rank.comm.reduce_scatter(at(1), &mut blocking, &parts).expect("the job goes on");
        let sums = rank.comm.start_reduce_scatter(at(2), values(), &parts, &rank.now());
        let sums = sums.expect("the job goes on").wait(Lane::Compute).expect("the job goes on");
        let mut sums = sums.expect("a sum returns its tensor");
        for scattered in [&blocking, &sums] {
            let found = &rank.download(scattered)[range.clone()];
            assert!(is_close(found, &expected[range.clone()], 1e-6), "{parts:?}");
        }
        rank.comm.all_gather(at(3), &mut sums, &parts).expect("the job goes on");
        let gathered = rank.comm.start_all_gather(at(4), blocking, &parts, &rank.now());
        let gathered = rank.received(gathered.expect("the job goes on"));
        assert!(is_close(&gathered, &expected, 1e-6), "{parts:?}");
        assert_eq!(gathered, rank.download(&sums));
        check_equal(rank, &gathered);
    }
    rank.stay();
}

/// Overlapping and blocking collectives alternate on one communicator.
fn in_order<D: Device>(rank: &Rank<'_, D>) {
    let (own, size, len) = (rank.rank(), rank.size(), 512);
    let whole = |seed: usize| -> Vec<f32> {
        (0..len).map(|index| (0..size).map(|rank| numbers(rank + seed, len)[index]).sum()).collect()
    };
    let upload = |seed: usize| rank.upload(Dtype::F32, &numbers(own + seed, len));
    let begin =
        |seed: usize| rank.comm.start_all_reduce(at(1), upload(seed), &rank.now()).expect("the job goes on");
    for round in 0..5 {
        let first = begin(round);
        let mut second: Tensor<D> = upload(round + 1);
        rank.comm.all_reduce(at(1), &mut second).expect("the job goes on");
        let third = begin(round + 2);
        assert_eq!(rank.download(&second), whole(round + 1));
        assert_eq!(rank.received(third), whole(round + 2));
        assert_eq!(rank.received(first), whole(round));
    }
    rank.stay();
}

fn splits<D: Device>(rank: &Rank<'_, D>) {
    let (own, size) = (rank.rank(), rank.size());
    // even and odd ranks, in reverse order
    let group = rank.comm.split(at(0), Some(own as u64 % 2), (size - own) as u64).expect("the job goes on");
    let group = group.expect("every rank has a color");
    assert_eq!(group.host().size(), size / 2);
    assert_eq!(group.host().world_rank(group.host().rank()), own);
    let mut values = rank.upload(Dtype::F32, &numbers(own, 100));
    group.all_reduce(at(1), &mut values).expect("the job goes on");
    let members = (0..size).filter(|other| other % 2 == own % 2);
    let members: Vec<Vec<f32>> = members.map(|member| numbers(member, 100)).collect();
    let expected = (0..100).map(|index| members.iter().map(|member| member[index]).sum::<f32>());
    assert_eq!(rank.download(&values), expected.collect::<Vec<_>>());
    let alone = rank.comm.split(at(2), (own == 0).then_some(0), 0).expect("the job goes on");
    assert_eq!(alone.map(|alone| alone.host().size()), (own == 0).then_some(1));
    rank.stay();
}

fn wrong_parts<D: Device>(rank: &Rank<'_, D>) {
    let mut values = rank.upload(Dtype::F32, &numbers(0, 10));
    for parts in [vec![4, 5], vec![10], vec![5, 5, 0]] {
        let refused = rank.comm.all_gather(at(1), &mut values, &parts).expect_err("the parts do not fit");
        assert!(matches!(refused, Error::Comm(dflop_comm::Error::Parts { .. })), "{refused}");
    }
    // rejected calls have no effect
    rank.comm.all_gather(at(1), &mut values, &[5, 5]).expect("the parts fit");
    assert_eq!(rank.download(&values), numbers(0, 10));
    rank.stay();
}
