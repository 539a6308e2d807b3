use super::*;
use crate::cpu::Cpu;
use crate::ops::every_operation;
use crate::ops::head_norm::HeadColumns;

#[test]
fn operations_have_the_bits_of_the_inner_device_in_every_order() {
    let cpu = Cpu::new(1).unwrap();
    let expected = every_operation::all(&cpu).unwrap();
    for number in 0..Order::NUMBER {
        let device = Deferred::new(cpu.clone(), Order::numbered(number));
        let found = every_operation::all(&device).unwrap();
        for ((name, expected), (_, found)) in expected.iter().zip(&found) {
            assert_eq!(expected, found, "{name}, order {number}");
        }
        device.drain().unwrap();
    }
    assert_eq!(cpu.memory_used_bytes(), 0, "all memory was freed");
}

/// Normalizes, and computes gradients, with and without a weight, an input gradient and a weight gradient.
fn normalized<D: Device>(device: &D, [has_weight, has_dx, has_d_weight]: [bool; 3]) -> Result<[Vec<f32>; 4]> {
    let heads = HeadColumns { first: 0, heads: 1, head_dim: 2, stride: 2 };
    let (x, dy) = (device.upload(&[1.0, 2.0, 3.0, -1.0])?, device.upload(&[0.5, 0.25, -1.0, 2.0])?);
    let (weight, mut y) = (device.upload(&[0.5, -2.0])?, device.copy(&x)?);
    let mut inverse = device.alloc_as(Dtype::F32, 2)?;
    let (mut dx, mut d_weight) = (device.zeros(4)?, device.zeros(2)?);
    device.head_norm(heads, (has_weight.then_some(&weight), 1.0), 1e-5, &mut y, &mut inverse)?;
    let (to_dx, to_weight) = (has_dx.then_some(&mut dx), has_d_weight.then_some(&mut d_weight));
    device.rms_norm_backward(&dy, &x, (&weight, 0.0), &inverse, to_dx, to_weight)?;
    let results = [&y, &inverse, &dx, &d_weight].map(|tensor| device.download(tensor));
    let [y, inverse, dx, d_weight] = results;
    Ok([y?, inverse?, dx?, d_weight?])
}

#[test]
fn operands_that_are_absent_are_neither_read_nor_written() {
    let cpu = Cpu::new(1).unwrap();
    for given in 0..8 {
        let given = [0, 1, 2].map(|operand| given >> operand & 1 == 1);
        let expected = normalized(&cpu, given).unwrap();
        assert_eq!(given[1], expected[2] != [0.0; 4], "{given:?}");
        assert_eq!(given[2], expected[3] != [0.0; 2], "{given:?}");
        for number in 0..Order::NUMBER {
            let device = Deferred::new(cpu.clone(), Order::numbered(number));
            assert_eq!(normalized(&device, given).unwrap(), expected, "{given:?}, order {number}");
        }
    }
}

/// Adds 1 to the input.
struct Increment(Option<Buffer>);

impl HostTask for Increment {
    fn start(&mut self, input: Option<Buffer>) -> Result<()> {
        self.0 = input;
        Ok(())
    }
    fn is_ready(&self) -> bool {
        true
    }
    fn finish(self: Box<Self>) -> Result<Option<Buffer>> {
        let Some(Buffer::F32(values)) = self.0 else { return Ok(None) };
        Ok(Some(Buffer::F32(values.into_iter().map(|value| value + 1.0).collect())))
    }
    fn adds(&self) -> bool {
        false
    }
    fn run(self: Box<Self>, _: dflop_comm::Slice<'_>) -> Result<()> {
        Ok(())
    }
}

fn device(order: Order) -> Deferred<Cpu> {
    Deferred::new(Cpu::new(1).unwrap(), order)
}

/// Sends `x` through the host in a second lane, after an event before or after `x` was changed.
fn exchanged(order: Order, is_ordered: bool) -> Result<Vec<f32>> {
    let device = device(order);
    let early = device.mark(Lane::Compute)?;
    let mut x = device.upload(&[1.0, 2.0])?;
    device.scale(10.0, &mut x)?;
    let after = if is_ordered { device.mark(Lane::Compute)? } else { early };
    let lane = Lane::Communication(7);
    let output = Some((Dtype::F32, 2));
    let transfer = device.host_task(lane, &after, Some(x), output, Box::new(Increment(None)))?;
    device.download(&transfer.wait(Lane::Compute)?.expect("it has an output"))
}

#[test]
fn a_missing_event_is_noticed_in_some_order() {
    let mut wrong = 0;
    for number in 0..Order::NUMBER {
        let order = Order::numbered(number);
        assert_eq!(exchanged(order, true).unwrap(), [11.0, 21.0], "{order:?}");
        wrong += usize::from(exchanged(order, false).unwrap() != [11.0, 21.0]);
    }
    assert!(wrong > 0, "no order runs the exchange too early");
}

/// The host owns no part of the exchanged memory: the caller frees it in the compute lane meanwhile.
#[test]
fn memory_that_is_freed_too_early_is_an_error() {
    let device = device(Order::ComputeFirst);
    let x = device.upload(&[1.0]).unwrap();
    let place = Place::of(&x);
    let lane = Lane::Communication(1);
    device.queue.push(lane, Work::Host(HostWork::update(place, Box::new(Increment(None)))));
    drop(x);
    let scalar = device.zeros_as(Dtype::F64, 1).unwrap();
    let error = device.read(&scalar).unwrap_err().to_string();
    assert!(error.contains("freed before work of another lane"), "{error}");
}

/// Previously, the read waited forever.
#[test]
fn a_wait_for_the_event_of_another_device_is_an_error() {
    for number in 0..Order::NUMBER {
        let (one, other) = (device(Order::numbered(number)), device(Order::ComputeFirst));
        let x = one.upload(&[1.0]).unwrap();
        one.after(Lane::Compute, &other.mark(Lane::Communication(9)).unwrap()).unwrap();
        for _ in 0..2 {
            let error = one.download(&x).unwrap_err().to_string();
            assert!(error.contains("lane Compute waits for event 1 of lane Communication(9)"), "{error}");
        }
    }
}

/// Previously, work that an error dropped was never counted as done, and the wait for it did not end.
#[test]
fn a_wait_for_dropped_work_reports_the_error_that_dropped_it() {
    let device = device(Order::ComputeFirst);
    let (x, mut y) = (device.upload(&[1.0]).unwrap(), device.zeros_as(Dtype::F64, 1).unwrap());
    let failing =
        |_: &Cpu, _: &Tensor<Cpu>| Err(Error::InvalidSetting { setting: "x", reason: "of no use".into() });
    enqueue(&device, (), &x, failing).unwrap();
    let event = device.mark(Lane::Compute).unwrap();
    let first = device.read(&y).unwrap_err().to_string();
    assert!(first.contains("lane Compute") && first.contains("of no use"), "{first}");
    device.after(Lane::Communication(1), &event).unwrap();
    device.write_scalars(&[1.0], &mut y).unwrap();
    assert_eq!(device.read(&y).unwrap_err().to_string(), first);
    assert_eq!(device.download(&x).unwrap_err().to_string(), first);
    let inner = device.inner().clone();
    drop((x, y));
    assert_eq!(inner.memory_used_bytes(), 0, "all memory was freed");
}

#[test]
fn nothing_runs_before_a_read_and_reads_are_counted() {
    let device = device(Order::numbered(3));
    let mut x = device.zeros(3).unwrap();
    let y = device.upload(&[1.0, 2.0, 3.0]).unwrap();
    device.add(&y, &mut x).unwrap();
    let before = Place::of(&x).with(&device.inner, Cpu::download).unwrap();
    assert!(before.iter().all(|value| value.is_nan()), "{before:?}");
    assert_eq!((device.reads(), device.download(&x).unwrap()), (0, vec![1.0, 2.0, 3.0]));
    assert_eq!(device.reads(), 1);
}
