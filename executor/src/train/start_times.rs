//! Divides the time from a rank's start to the end of its first step into parts.
//!
//! [`StartTimes`] runs like a stopwatch with laps: the time since the last lap belongs to the part that the
//! lap ends, so the parts add up to the whole. Kernels are loaded and devices are connected within other
//! parts; devices count the time for both, which is moved to [`StartPart::Kernels`] and
//! [`StartPart::Communicators`].

use std::fmt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::Result;
use dflop_comm::StepContext;
use dflop_device::{Device, DeviceComm, KernelLoads};

/// Environment variable with the launching process's times, see [`StartTimes::to_variable`].
pub(crate) const START_VARIABLE: &str = "DFLOP_START";
/// Fraction of the whole below which a part is printed with the rest.
const PRINTED_MIN: f64 = 0.01;
/// Fraction of the whole by which a part on another rank must be longer to be printed.
const SLOWER_MIN: f64 = 0.05;

/// Part of a start, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartPart {
    /// Start of this rank's process by the process that starts all ranks.
    Launch,
    /// Configuration and model files read, dataset generated if it is configured; the launching process
    /// included.
    Files,
    /// Shards listed, dataset index read or built; the launching process included.
    Index,
    /// Rendezvous, comparison of settings, other waits for ranks.
    Ranks,
    /// Device opened.
    Device,
    /// Peak FLOP/s measured.
    Peak,
    /// NCCL communicators created, those for messages included.
    Communicators,
    /// Kernels compiled or read from the cache, and loaded.
    Kernels,
    /// Weights and optimizer state drawn, loaded or restored, and copied to the device.
    Weights,
    /// Loader workers started; wait for the inputs of the first step.
    Inputs,
    /// First step after its inputs were there, without kernels and communicators.
    FirstStep,
    /// Everything else, such as checkpoint and record files.
    Other,
}

/// Number of parts.
const PARTS: usize = StartPart::ALL.len();

impl StartPart {
    /// All parts, in order.
    pub const ALL: [Self; 12] = [
        Self::Launch,
        Self::Files,
        Self::Index,
        Self::Ranks,
        Self::Device,
        Self::Peak,
        Self::Communicators,
        Self::Kernels,
        Self::Weights,
        Self::Inputs,
        Self::FirstStep,
        Self::Other,
    ];

    /// Returns the name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Files => "files",
            Self::Index => "index",
            Self::Ranks => "ranks",
            Self::Device => "device",
            Self::Peak => "peak",
            Self::Communicators => "communicators",
            Self::Kernels => "kernels",
            Self::Weights => "weights",
            Self::Inputs => "inputs",
            Self::FirstStep => "first step",
            Self::Other => "other",
        }
    }
}

/// Times of a rank's start so far.
#[derive(Debug, Clone)]
pub struct StartTimes {
    spent: [Duration; PARTS],
    /// End of the last part.
    ended: Instant,
    /// Time for kernels and for connections up to then, as devices count it.
    kernels: Duration,
    connections: Duration,
}

impl StartTimes {
    /// Begins now.
    #[must_use]
    pub fn begin() -> Self {
        let (kernels, connections) = (Duration::ZERO, Duration::ZERO);
        Self { spent: [Duration::ZERO; PARTS], ended: Instant::now(), kernels, connections }
    }

    /// Ends a part.
    pub fn end(&mut self, part: StartPart) {
        self.end_at(part, Instant::now(), [self.kernels, self.connections]);
    }

    /// Ends a part in which a device may have loaded kernels and connected to other devices.
    pub fn end_on<D: Device>(&mut self, part: StartPart, device: &D, comm: &dyn DeviceComm<D>) {
        self.end_at(part, Instant::now(), [device.kernel_loads().time, comm.connect_time()]);
    }

    fn end_at(&mut self, part: StartPart, now: Instant, [kernels, connections]: [Duration; 2]) {
        let elapsed = now.saturating_duration_since(self.ended);
        let connected = connections.saturating_sub(self.connections).min(elapsed);
        let rest = elapsed.saturating_sub(connected);
        // other threads may load kernels meanwhile
        let loaded = kernels.saturating_sub(self.kernels).min(rest);
        self.spent[StartPart::Communicators as usize] += connected;
        self.spent[StartPart::Kernels as usize] += loaded;
        self.spent[part as usize] += rest.saturating_sub(loaded);
        (self.ended, self.kernels, self.connections) = (now, kernels, connections);
    }

    /// Returns the times for a rank's process on the same machine, which goes on from here.
    pub(crate) fn to_variable(&self) -> String {
        let spent = self.spent.iter().map(Duration::as_nanos);
        let all = std::iter::once(unix_time().as_nanos()).chain(spent);
        all.map(|nanoseconds| nanoseconds.to_string()).collect::<Vec<_>>().join(",")
    }

    /// Adds the times of the process that started this one, and the time since then. Does nothing if the
    /// value has a different form.
    pub(crate) fn add_launch(&mut self, variable: &str) {
        let since_launch = unix_time().saturating_sub(self.ended.elapsed());
        let numbers: Vec<Duration> =
            variable.split(',').filter_map(|number| number.parse().ok()).map(Duration::from_nanos).collect();
        let [launched, spent @ ..] = &numbers[..] else { return };
        if spent.len() == PARTS {
            self.spent.iter_mut().zip(spent).for_each(|(own, before)| *own += *before);
            self.spent[StartPart::Launch as usize] += since_launch.saturating_sub(*launched);
        }
    }

    /// Ends the first step, and reports the start. Collective: every rank must call it.
    ///
    /// # Errors
    /// [`crate::Error::Comm`].
    pub(super) fn finish<D: Device>(
        mut self,
        step: u64,
        device: &D,
        comm: &dyn DeviceComm<D>,
    ) -> Result<StartReport> {
        self.end_on(StartPart::FirstStep, device, comm);
        let own = self.spent.map(|part| part.as_nanos() as u64);
        let all = comm.host().gather(StepContext::step(step, "compare start times"), &own)?;
        Ok(StartReport::new(&all, device.kernel_loads()))
    }
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Time from a rank's start to the end of its first step. The same on all ranks, except for kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartReport {
    /// Time on rank 0, the sum of its parts.
    pub seconds: f64,
    /// All parts, in order.
    pub parts: Vec<StartPartTime>,
    /// Number of kernel modules that the device has loaded; 0 on CPUs.
    pub kernel_modules: u64,
    /// Number of these modules that were compiled; the others were in the kernel cache.
    pub compiled_modules: u64,
}

/// Time of a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartPartTime {
    /// Part.
    pub part: StartPart,
    /// Time on rank 0.
    pub seconds: f64,
    /// Time on the slowest rank.
    pub slowest_seconds: f64,
    /// Slowest rank; the first if there are several.
    pub slowest_rank: usize,
}

impl StartReport {
    /// - `spent_ns`: parts of every rank in nanoseconds, in rank order
    fn new(spent_ns: &[u64], kernels: KernelLoads) -> Self {
        let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
        let part = |(place, part): (usize, StartPart)| {
            let ranks = spent_ns.iter().skip(place).step_by(PARTS).copied();
            let slowest = ranks.enumerate().rev().max_by_key(|&(_, spent)| spent);
            let (slowest_rank, slowest) = slowest.unwrap_or_default();
            let own = spent_ns.get(place).copied().unwrap_or_default();
            StartPartTime { part, seconds: seconds(own), slowest_seconds: seconds(slowest), slowest_rank }
        };
        Self {
            seconds: seconds(spent_ns.iter().take(PARTS).sum()),
            parts: StartPart::ALL.into_iter().enumerate().map(part).collect(),
            kernel_modules: kernels.modules,
            compiled_modules: kernels.compiled,
        }
    }
}

/// Prints the whole, and the parts on rank 0 that matter, with ranks that take clearly longer.
impl fmt::Display for StartReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} s", self.seconds)?;
        let (mut rest, mut separator) = (self.seconds, ": ");
        for StartPartTime { part, seconds, slowest_seconds, slowest_rank } in &self.parts {
            let is_slower = slowest_seconds - seconds > SLOWER_MIN * self.seconds;
            if *part == StartPart::Other || (*seconds < PRINTED_MIN * self.seconds && !is_slower) {
                continue;
            }
            rest -= seconds;
            write!(f, "{separator}{} {seconds:.3} s", part.name())?;
            separator = ", ";
            let mut notes = Vec::new();
            if *part == StartPart::Kernels {
                notes.push(format!("{} modules, {} compiled", self.kernel_modules, self.compiled_modules));
            }
            if is_slower {
                notes.push(format!("rank {slowest_rank}: {slowest_seconds:.3} s"));
            }
            if !notes.is_empty() {
                write!(f, " ({})", notes.join("; "))?;
            }
        }
        write!(f, "{separator}{} {:.3} s", StartPart::Other.name(), rest.max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn milliseconds(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    /// Returns times after these parts, in milliseconds, with the time for kernels and connections up to the
    /// end of each part.
    fn after(parts: &[(StartPart, u64, [u64; 2])]) -> (StartTimes, u64) {
        let mut times = StartTimes::begin();
        let (begin, mut end) = (times.ended, 0);
        for &(part, spent, counted) in parts {
            end += spent;
            times.end_at(part, begin + milliseconds(end), counted.map(milliseconds));
        }
        (times, end)
    }

    fn spent(times: &StartTimes, part: StartPart) -> u64 {
        times.spent[part as usize].as_millis() as u64
    }

    #[test]
    fn parts_add_up_and_kernels_and_connections_are_moved_out_of_them() {
        let (times, end) = after(&[
            (StartPart::Files, 30, [0, 0]),
            (StartPart::Communicators, 200, [50, 140]),
            (StartPart::Weights, 500, [50, 150]),
            (StartPart::Other, 7, [50, 150]),
            // more than passed: another thread loaded kernels as well
            (StartPart::FirstStep, 100, [190, 170]),
        ]);
        assert_eq!(times.spent.iter().sum::<Duration>(), milliseconds(end));
        let found = StartPart::ALL.map(|part| spent(&times, part));
        assert_eq!(found, [0, 30, 0, 0, 0, 0, 150 + 10 + 20, 50 + 80, 490, 0, 0, 7]);
    }

    #[test]
    fn parts_of_a_launching_process_go_on_in_its_ranks() {
        let (launcher, _) = after(&[(StartPart::Files, 20, [0; 2]), (StartPart::Index, 300, [0; 2])]);
        let variable = launcher.to_variable();
        std::thread::sleep(milliseconds(15));
        let mut rank = StartTimes::begin();
        rank.add_launch(&variable);
        let (launch, begin) = (spent(&rank, StartPart::Launch), rank.ended);
        assert!((14..10_000).contains(&launch), "{launch}");
        assert_eq!((spent(&rank, StartPart::Files), spent(&rank, StartPart::Index)), (20, 300));
        rank.end_at(StartPart::Index, begin + milliseconds(4), [Duration::ZERO; 2]);
        assert_eq!(spent(&rank, StartPart::Index), 304);
        for other in ["", "7", "a,b", &variable[1..].replace(',', ";"), &format!("{variable},1")] {
            let mut rank = StartTimes::begin();
            rank.add_launch(other);
            assert_eq!(rank.spent, [Duration::ZERO; PARTS], "{other}");
        }
    }

    #[test]
    fn the_slowest_rank_of_every_part_is_named() {
        let ranks = [
            after(&[(StartPart::Weights, 600, [0; 2]), (StartPart::Ranks, 390, [0; 2])]),
            after(&[(StartPart::Weights, 980, [0; 2]), (StartPart::Ranks, 4, [0; 2])]),
            after(&[(StartPart::Weights, 980, [0; 2]), (StartPart::Files, 9, [0; 2])]),
        ];
        let all: Vec<u64> =
            ranks.iter().flat_map(|(times, _)| times.spent.map(|part| part.as_nanos() as u64)).collect();
        let kernels = KernelLoads { modules: 9, compiled: 4, time: Duration::ZERO };
        let report = StartReport::new(&all, kernels);
        assert_eq!(report.parts.len(), PARTS);
        let part = |part: StartPart| report.parts.iter().find(|time| time.part == part).unwrap();
        let weights = part(StartPart::Weights);
        assert_eq!((weights.seconds, weights.slowest_seconds, weights.slowest_rank), (0.6, 0.98, 1));
        assert_eq!(part(StartPart::Files).slowest_rank, 2);
        assert_eq!(part(StartPart::Launch).slowest_rank, 0);
        let sum: f64 = report.parts.iter().map(|time| time.seconds).sum();
        assert!((report.seconds - 0.99).abs() < 1e-9 && (sum - report.seconds).abs() < 1e-9, "{report:?}");
        assert_eq!(
            report.to_string(),
            "0.990 s: ranks 0.390 s, weights 0.600 s (rank 1: 0.980 s), other 0.000 s"
        );
        let text = serde_json::to_string(&report).unwrap();
        assert!(text.contains(r#"{"part":"first_step","seconds":0.0,"#), "{text}");
        assert_eq!(serde_json::from_str::<StartReport>(&text).unwrap(), report);
    }

    #[test]
    fn printed_parts_and_the_rest_are_the_whole() {
        let (times, _) = after(&[
            (StartPart::Files, 3, [0; 2]),
            (StartPart::FirstStep, 995, [400, 0]),
            (StartPart::Other, 2, [400, 0]),
        ]);
        let all = times.spent.map(|part| part.as_nanos() as u64);
        let kernels = KernelLoads { modules: 31, compiled: 0, time: milliseconds(400) };
        assert_eq!(
            StartReport::new(&all, kernels).to_string(),
            "1.000 s: kernels 0.400 s (31 modules, 0 compiled), first step 0.595 s, other 0.005 s"
        );
    }
}
