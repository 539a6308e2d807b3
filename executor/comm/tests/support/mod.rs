//! Runs job ranks as test threads, over each transport.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test binary uses its part")]

pub use dflop_comm::conformance::{floats, ring_sum};
use dflop_comm::{
    Comm, Communicator, JobToken, RankIdentity, RendezvousConfig, RendezvousServer, Settings, tcp, threads,
};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Transports that conformance tests run over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Queues between threads.
    Threads,
    /// Sockets.
    Tcp,
}

/// All transports.
pub const ALL: [Transport; 2] = [Transport::Threads, Transport::Tcp];

/// Runs a thread per rank and returns the results in order.
pub fn run<T: Send>(
    transport: Transport,
    size: usize,
    settings: Settings,
    rank: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    match transport {
        Transport::Threads => {
            let ranks = threads::world(size, settings).unwrap();
            std::thread::scope(|scope| {
                let rank = &rank;
                let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            })
        }
        Transport::Tcp => {
            let job = TcpJob::new(size);
            job.run(settings, |session| rank(session.comm))
        }
    }
}

/// TCP job whose ranks are threads in this process.
pub struct TcpJob {
    /// Rendezvous server for the ranks.
    pub host: RendezvousServer,
    /// Token that ranks present to the server.
    pub token: JobToken,
    /// Number of ranks.
    pub size: usize,
}

impl TcpJob {
    /// Starts a job on the loopback interface.
    pub fn new(size: usize) -> Self {
        Self::at(size, Ipv4Addr::LOCALHOST.into())
    }

    /// Starts a job at an address.
    pub fn at(size: usize, address: IpAddr) -> Self {
        let token = JobToken::random().unwrap();
        let host = RendezvousServer::start(&[SocketAddr::new(address, 0)], size, token.clone()).unwrap();
        Self { host, token, size }
    }

    /// Returns the identity of a rank.
    pub fn identity(&self, rank: usize) -> RankIdentity {
        let rendezvous = RendezvousConfig {
            host: self.host.address().ip().to_string(),
            port: self.host.address().port(),
            token: Some(self.token.clone()),
            is_hosted_by_launcher: true,
            listen: None,
        };
        let rendezvous = (self.size > 1).then_some(rendezvous);
        RankIdentity { rank, size: self.size, local_rank: rank, rendezvous }
    }

    /// Runs a thread per rank and returns the results in order.
    pub fn run<T: Send>(&self, settings: Settings, rank: impl Fn(tcp::Session) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let rank = &rank;
            let start = |of: usize| {
                let identity = self.identity(of);
                scope.spawn(move || rank(tcp::connect(&identity, settings).unwrap()))
            };
            let threads: Vec<_> = (0..self.size).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// Returns time limits for tests that do not reach any limit.
pub fn patient() -> Settings {
    Settings::default().wait(Duration::from_secs(20)).rendezvous(Duration::from_secs(20))
}

/// Returns the job failure, and the error text on one rank.
pub fn failure<T: std::fmt::Debug>(result: dflop_comm::Result<T>) -> (dflop_comm::Failure, String) {
    let error = result.unwrap_err();
    (error.failure().expect("the job is over").clone(), error.to_string())
}

/// Creates a flat f32 payload.
pub fn row(elements: &[f32]) -> dflop_comm::Payload {
    dflop_comm::Payload::f32(1, elements.len(), elements.to_vec()).unwrap()
}

/// Keeps a rank in the job until all ranks are done.
pub fn stay(comm: &dyn Comm) {
    comm.barrier(dflop_comm::StepContext::step(99, "end of test")).unwrap();
}
