//! Allocation ranges: split, joined, in a bucket.

use dflop_device::prelude::*;
use dflop_device::{Bucket, Cpu, Dtype, Tensor};

fn tensor(device: &Cpu) -> Tensor<Cpu> {
    device.upload(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap()
}

#[test]
fn ranges_are_written_apart_and_united_again() {
    let device = Cpu::new(1).unwrap();
    let mut parts = tensor(&device).split(&[2, 0, 3, 1]);
    // All tensors are borrowed at the same time.
    let [first, empty, third, last] = parts.get_disjoint_mut([0, 1, 2, 3]).unwrap();
    device.write(&[7.0, 8.0], first).unwrap();
    device.write(&[], empty).unwrap();
    device.write(&[9.0; 3], third).unwrap();
    assert_eq!(device.download(last).unwrap(), [5.0]);
    let whole = Tensor::join(parts);
    assert_eq!(device.download(&whole).unwrap(), [7.0, 8.0, 9.0, 9.0, 9.0, 5.0]);
    assert_eq!((whole.len(), whole.bytes(), whole.dtype()), (6, 24, Dtype::F32));
}

#[test]
fn an_allocation_leaves_the_device_only_as_a_whole() {
    let device = Cpu::new(1).unwrap();
    let mut parts = tensor(&device).split(&[2, 4]);
    let first = parts.remove(0);
    let first = first.into_memory().err().expect("another tensor is in the allocation");
    assert!(Tensor::join(vec![first, parts.remove(0)]).into_memory().is_ok());
}

#[test]
#[should_panic(expected = "follow each other in one allocation")]
fn ranges_of_two_allocations_are_not_united() {
    let device = Cpu::new(1).unwrap();
    drop(Tensor::join(vec![tensor(&device), tensor(&device)]));
}

#[test]
fn a_bucket_is_one_tensor_while_it_is_open() {
    let device = Cpu::new(1).unwrap();
    let mut bucket = Bucket::new(tensor(&device), &[1, 5]);
    let (whole, lens) = bucket.open();
    assert!(bucket.is_empty() && whole.len() == 6 && lens == [1, 5]);
    bucket.close(whole, &lens);
    bucket.with_whole(|whole| device.write(&[1.0; 6], whole)).unwrap();
    assert_eq!(device.download(&bucket.parts()[1]).unwrap(), [1.0; 5]);
    assert_eq!(bucket.len(), 6);
}
