//! Checks NCCL on a single device: all communicator calls, on a single rank.

use std::time::{Duration, Instant};

use dflop_device::{Dtype, Error, Result, Runtime, Tensor};

use super::communicator::Communicator;
use super::library::Nccl;
use crate::device::Cuda;
use crate::libraries::SearchPath;

/// Maximum wait for a single-rank communicator.
const READY_WAIT: Duration = Duration::from_mins(1);

/// Creates a single-rank communicator and checks the results from all calls: sums, parts, a message to the
/// rank itself, a split. Returns the library and the call names.
///
/// # Errors
/// [`Error::Failed`] with the call that failed or gave wrong numbers.
pub fn check_alone(device: &Cuda, search: &SearchPath) -> Result<(Nccl, Vec<&'static str>)> {
    let nccl = Nccl::open(search)?;
    let context = &device.shared().context;
    let id = Communicator::new_id(&nccl)?;
    let whole = Communicator::start(&nccl, context, id, (0, 1), "one rank".to_owned())?;
    let checked = ready(&whole).and_then(|()| check_calls(device, &whole));
    let part = checked.and_then(|mut calls| {
        let part = whole.split(0, "a split of one rank".to_owned())?;
        calls.push("split");
        let checked = ready(&part).and_then(|()| check_calls(device, &part));
        end(&part);
        checked.map(|_| calls)
    });
    end(&whole);
    part.map(|calls| (nccl, calls))
}

fn ready(communicator: &Communicator) -> Result<()> {
    communicator.ready(|waited| {
        if waited < READY_WAIT {
            return Ok(());
        }
        Err(Error::Failed { reason: format!("{} was not ready after {waited:?}", communicator.name()) })
    })
}

fn end(communicator: &Communicator) {
    communicator.finalize();
    communicator.destroy(Instant::now() + READY_WAIT);
}

fn check_calls(device: &Cuda, communicator: &Communicator) -> Result<Vec<&'static str>> {
    let stream = &device.shared().compute;
    let numbers: Vec<f32> = (0..1000).map(|index| index as f32 - 500.0).collect();
    let mut calls = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F64] {
        let upload = || device.upload_as(dtype, &numbers);
        let expected = device.download(&upload()?)?;
        let mut check = |call: &'static str, values: &Tensor<Cuda>| -> Result<()> {
            if device.download(values)? != expected {
                return Err(Error::Failed { reason: format!("{call} of {dtype:?} gave wrong numbers") });
            }
            if dtype == Dtype::F32 {
                calls.push(call);
            }
            Ok(())
        };
        let values = upload()?;
        communicator.all_reduce(stream, &values)?;
        check("all-reduce", &values)?;
        communicator.reduce_scatter(stream, &values, &[numbers.len()])?;
        check("reduce-scatter", &values)?;
        communicator.all_gather(stream, &values, &[numbers.len()])?;
        check("all-gather", &values)?;
        let received = device.zeros_as(dtype, numbers.len())?;
        communicator.exchange_alone(stream, &values, &received)?;
        check("send and receive", &received)?;
    }
    Ok(calls)
}
