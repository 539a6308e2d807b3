//! Tensor collectives that run while operations continue: same bits as blocking collectives, and times.

use std::sync::Arc;

use dflop_comm::{Settings, StepContext, even_parts, threads};
use dflop_device::deferred::{Deferred, Order};
use dflop_device::{Cpu, Device, DeviceComm, Lane, Staged};

const RANKS: usize = 3;
const ELEMENTS: usize = 1000;

/// Downloaded results on a rank: part of a sum, and the gathered parts.
type Results = (Vec<f32>, Vec<f32>);

fn numbers(rank: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|index| (index as f32 + 0.1).sin() * (rank as f32 + 1.3)).collect()
}

/// Runs both halves of a sum on a rank, either blocking or in progress one after another.
fn halves<D: Device>(device: &D, comm: threads::ThreadComm, is_started: bool) -> Results {
    let rank = dflop_comm::Comm::rank(&comm);
    let (staged, at) = (Staged::new(device.clone(), Arc::new(comm)), StepContext::step(0, "test"));
    let parts = even_parts(ELEMENTS, RANKS);
    let mut sum = device.upload(&numbers(rank)).unwrap();
    let mut whole = device.upload(&numbers(rank)).unwrap();
    // An operation that must run before the collectives.
    device.scale(2.0, &mut sum).unwrap();
    device.scale(2.0, &mut whole).unwrap();
    if is_started {
        let after = device.mark(Lane::Compute).unwrap();
        let first = staged.start_reduce_scatter(at, sum, &parts, &after).unwrap();
        let second = staged.start_all_gather(at, whole, &parts, &after).unwrap();
        let spans = [first.span(), second.span()];
        sum = first.wait(Lane::Compute).unwrap().unwrap();
        whole = second.wait(Lane::Compute).unwrap().unwrap();
        device.scale(0.5, &mut sum).unwrap();
        device.scale(0.5, &mut whole).unwrap();
        device.download(&sum).unwrap();
        for span in spans {
            let [start, end] = span.get().expect("the device has done it");
            assert!(device.elapsed_ns(&after, start).unwrap() >= 0);
            assert!(device.elapsed_ns(start, end).unwrap() >= 0);
        }
    } else {
        staged.reduce_scatter(at, &mut sum, &parts).unwrap();
        staged.all_gather(at, &mut whole, &parts).unwrap();
        device.scale(0.5, &mut sum).unwrap();
        device.scale(0.5, &mut whole).unwrap();
    }
    let first: usize = parts[..rank].iter().sum();
    (device.download(&sum).unwrap()[first..][..parts[rank]].to_vec(), device.download(&whole).unwrap())
}

fn run<D: Device>(device: impl Fn() -> D + Sync, is_started: bool) -> Vec<Results> {
    let ranks = threads::world(RANKS, Settings::default()).unwrap();
    std::thread::scope(|scope| {
        let device = &device;
        let of = |comm| scope.spawn(move || halves(&device(), comm, is_started));
        let ranks: Vec<_> = ranks.into_iter().map(of).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn halves_of_a_sum_in_progress_have_the_bits_of_those_that_are_waited_for() {
    let expected = run(|| Cpu::new(1).unwrap(), false);
    for (rank, (_, whole)) in expected.iter().enumerate() {
        assert_eq!(whole, &expected[0].1, "rank {rank} has all parts");
    }
    assert_eq!(run(|| Cpu::new(1).unwrap(), true), expected);
    for number in 0..Order::NUMBER {
        let device = || Deferred::new(Cpu::new(1).unwrap(), Order::numbered(number));
        assert_eq!(run(device, true), expected, "{:?}", Order::numbered(number));
    }
}
