//! Two ranks on one device that NCCL regards as two machines.
//!
//! NCCL rejects two ranks on the same device and machine before 2.30. For NCCL, ranks with a different
//! `NCCL_HOSTID` are on a different machine: it connects them over sockets, as machines are connected, in any
//! version.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use dflop_comm::launch::{Launcher, identity_from_environment};
use dflop_comm::{Comm, Settings, StepContext, tcp};
use dflop_cuda::{Cuda, Error as CudaError, NCCL_VARIABLES, Nccl, NcclComm, SearchPath};
use dflop_device::{DeviceComm, Dtype, Lane, MessageLane, RowShape, Runtime};
use serde_json::json;

use crate::arguments::Arguments;
use crate::nccl::{Transport, difference, stages, train_rank};
use crate::report::{self, Outcome};
use crate::{Result, device};

/// Part name.
const PART: &str = "machines";
/// Variable that names a machine to NCCL.
const HOST: &str = "NCCL_HOSTID";
const RANKS: usize = 2;
/// Sizes of the uneven tensor parts, by rank.
const PARTS: [usize; RANKS] = [3, 997];
/// Longest wait for the other rank.
const WAIT: Duration = Duration::from_mins(1);
const TOLERANCE: f64 = 1e-5;

/// Starts both ranks, or runs as one of them.
pub(crate) fn run(_: &Arguments) -> Result<Outcome> {
    let identity = identity_from_environment()?;
    if identity.rendezvous.is_some() {
        return rank(&identity);
    }
    if let Err(error @ CudaError::LibraryNotFound { .. }) = Nccl::open(&SearchPath::from_environment()) {
        return Ok(report::summary(PART, Outcome::Skipped, &error.to_string(), "NCCL"));
    }
    // in truth a single machine: loopback sockets only, no adapters
    let launcher = Launcher::new(std::env::current_exe()?, RANKS)?.args([PART]).first_rank_prints_plainly();
    let launcher = launcher.variable("NCCL_SOCKET_IFNAME", "lo").variable("NCCL_IB_DISABLE", "1");
    match launcher.run()?.failed {
        None => Ok(Outcome::Passed),
        Some(failed) => {
            let figure = format!("rank {} ended with {}", failed.rank, failed.status);
            Ok(report::summary(PART, Outcome::Failed, &figure, "right numbers"))
        }
    }
}

fn rank(identity: &dflop_comm::RankIdentity) -> Result<Outcome> {
    if std::env::var_os(HOST).is_none() {
        let mut again = Command::new(std::env::current_exe()?);
        again.args(std::env::args_os().skip(1)).envs(NCCL_VARIABLES);
        return Err(again.env(HOST, format!("machine-{}", identity.rank)).exec().into());
    }
    let session = tcp::connect(identity, Settings::default().wait(WAIT))?;
    let host: Arc<dyn Comm> = Arc::new(session.comm);
    let cuda = device::cuda(Dtype::F32)?;
    let values = values(&cuda, &host)?;
    let job = stages(RANKS)?;
    let losses = [Transport::Host, Transport::Nccl].map(|transport| train_rank(&job, &host, transport));
    let [through_host, over_nccl] = losses;
    let worst = difference(&through_host?, &over_nccl?);
    host.barrier(StepContext::step(0, "end"))?;
    if identity.rank > 0 {
        return Ok(if worst <= TOLERANCE { Outcome::Passed } else { Outcome::Failed });
    }
    report::result(PART, json!({"machines": RANKS, "right": values, "difference": worst}));
    let outcome = if worst <= TOLERANCE { Outcome::Passed } else { Outcome::Failed };
    let figure =
        format!("{} calls right by value; losses within {worst:.1e} of those through the host", values.len());
    Ok(report::summary(PART, outcome, &figure, &format!("{TOLERANCE:.0e}")))
}

/// Compares the results of calls with numbers; returns the call names.
fn values(cuda: &Cuda, host: &Arc<dyn Comm>) -> Result<Vec<String>> {
    let comm = NcclComm::join(cuda, Arc::clone(host), &SearchPath::from_environment())?;
    let (rank, at) = (host.rank(), StepContext::step(0, "compare values"));
    comm.open_lanes(at, &BTreeSet::from([MessageLane { from: 0, to: 1, flow: 0 }]))?;
    let len: usize = PARTS.iter().sum();
    let of =
        |rank: usize| -> Vec<f32> { (0..len).map(|index| ((index * 7 + rank * 13) % 31) as f32).collect() };
    let sums: Vec<f32> = of(0).iter().zip(of(1)).map(|(a, b)| a + b).collect();
    let ranges = [0..PARTS[0], PARTS[0]..len];
    let mut right = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F64] {
        let mut check = |call: &str, found: &[f32], expected: &[f32]| -> Result<()> {
            if found != expected {
                return Err(format!("rank {rank}: {call} of {dtype:?} gave wrong numbers").into());
            }
            right.push(format!("{call} of {dtype:?}"));
            Ok(())
        };
        let mut values = cuda.upload_as(dtype, &of(rank))?;
        comm.all_reduce(at, &mut values)?;
        check("all-reduce", &cuda.download(&values)?, &sums)?;
        let mut values = cuda.upload_as(dtype, &of(rank))?;
        comm.reduce_scatter(at, &mut values, &PARTS)?;
        let own = ranges[rank].clone();
        check("uneven reduce-scatter", &cuda.download(&values)?[own.clone()], &sums[own])?;
        let mut values = cuda.upload_as(dtype, &of(rank))?;
        comm.all_gather(at, &mut values, &PARTS)?;
        let gathered = [&of(0)[ranges[0].clone()], &of(1)[ranges[1].clone()]].concat();
        check("uneven all-gather", &cuda.download(&values)?, &gathered)?;
        if dtype == Dtype::F64 {
            continue;
        }
        let now = cuda.mark(Lane::Compute)?;
        if rank == 0 {
            let sent = comm.send(1, 0, at, cuda.upload_as(dtype, &of(0))?, len, &now)?;
            drop(sent.wait(Lane::Compute)?);
        } else {
            let received = comm.recv(0, 0, at, RowShape { dtype, rows: 1, cols: len }, &now)?;
            let rows = received.wait(Lane::Compute)?.ok_or("a receive has rows")?;
            check("message", &cuda.download(&rows)?, &of(0))?;
        }
    }
    host.barrier(at)?;
    Ok(right)
}
