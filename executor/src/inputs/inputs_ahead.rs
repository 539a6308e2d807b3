//! Prepares the inputs for the next step on a thread, while the device computes the current step.
//!
//! The thread waits for samples, agrees with all ranks on the samples, and packs and copies them, so that a
//! step finds all inputs on the device. It has a separate communicator. One step waits at a time: a device
//! holds the inputs for two steps.
//!
//! A failure belongs to the step whose inputs it concerns, and ends no earlier step: it is kept until that
//! step requests its inputs. A rank that cannot read takes part in the exchange and reports it, and no rank
//! continues. All threads perform the same exchanges, also if the run is stopped.
//!
//! Digests from all ranks are compared by sums, so that every rank finds the same answer with one exchange.
//! Numbers are equal if and only if the square of their sum equals their count times the sum of their squares
//! (Cauchy and Schwarz). Digests are compared in 16-bit parts, whose sums stay exact.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dflop_comm::{Buffer, Comm, Handle, StepContext};
use dflop_device::Device;
use dflop_loader::{BalancedLoader, LoaderState, StepPlanner};
use futures::channel::oneshot;

use super::Stop;
use super::input_reader::{InputReader, RankSamples, StepInputs};
use super::predicted_times::TokenCounts;
use crate::error::{Error, Result};

/// Polling interval for an exchange that no step waits for.
const POLL: Duration = Duration::from_micros(200);

/// Inputs of the next step, or why there are none; all ranks have inputs or none has.
pub(crate) enum Taken<D: Device> {
    /// Inputs of the step.
    Step(Box<StepInputs<D>>),
    /// The run has no more steps, or inputs failed: [`InputsAhead::resolve`] tells.
    Other(Ending<D>),
}

/// Why there are no inputs.
pub(crate) struct Ending<D: Device>(Option<Prepared<D>>);

/// Inputs of the next step, or why there are none.
enum Prepared<D: Device> {
    Step(Box<StepInputs<D>>),
    Failed(Error),
    /// This rank has no samples, and all ranks know it.
    Unread(Error),
    /// Another rank has no samples.
    Elsewhere,
    /// Ranks have different plans for this step; the digest belongs to this rank.
    Different {
        step: u64,
        digest: u64,
    },
}

/// Result passed by the thread, and the times at which it began to wait for samples and received them.
struct Handed<D: Device> {
    prepared: Prepared<D>,
    reading: [Instant; 2],
}

/// Rank inputs, prepared one step ahead.
pub(crate) struct InputsAhead<D: Device> {
    planner: StepPlanner,
    loaders: Vec<Arc<BalancedLoader>>,
    /// State before the first step, if the run has it.
    start: Option<LoaderState>,
    /// Step after the last step returned; the first step before that.
    step: u64,
    prepared: Option<Receiver<Handed<D>>>,
    /// Ends waits for samples when it is dropped.
    stop: Option<oneshot::Sender<()>>,
    is_awaited: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<D: Device> InputsAhead<D> {
    /// Starts to prepare the first step; all ranks call it together.
    ///
    /// - `steps`: maximum number of steps to prepare
    ///
    /// # Errors
    /// [`Error::Comm`]; [`Error::Device`]; [`Error::Runtime`] if the thread cannot be started.
    pub(crate) fn start(mut reader: InputReader<D>, comm: &dyn Comm, steps: u64) -> Result<Self> {
        let at = StepContext::step(0, "split for inputs");
        let own = comm.split(at, Some(0), comm.rank() as u64)?;
        let own = own.ok_or_else(|| comm.abort(at, "there is no communicator for inputs"))?;
        reader.copy_beside()?;
        let (planner, loaders) = (reader.planner().clone(), reader.loaders().cloned().collect());
        let start = reader.state().ok();
        let (stop, stopped) = oneshot::channel();
        let (sender, prepared) = sync_channel(0);
        let is_awaited = Arc::new(AtomicBool::new(false));
        let step = planner.first_step();
        let worker =
            Worker { reader, comm: own, step, stop: Stop::new(stopped), is_awaited: Arc::clone(&is_awaited) };
        let name = "dflop-prepare".to_owned();
        let thread = thread::Builder::new().name(name).spawn(move || worker.run(steps, &sender));
        Ok(Self {
            planner,
            loaders,
            start,
            step,
            prepared: Some(prepared),
            stop: Some(stop),
            is_awaited,
            thread: Some(thread.map_err(Error::Runtime)?),
        })
    }

    /// Takes the inputs of the next step, without a word to other ranks.
    pub(crate) fn take(&mut self) -> Taken<D> {
        let Some(prepared) = &self.prepared else { return Taken::Other(Ending(None)) };
        let asked = Instant::now();
        self.is_awaited.store(true, Ordering::Release);
        let handed = prepared.recv();
        self.is_awaited.store(false, Ordering::Release);
        let Ok(Handed { prepared, reading }) = handed else { return Taken::Other(Ending(None)) };
        match prepared {
            Prepared::Step(mut step) => {
                step.wait = overlap(reading, [asked, Instant::now()]);
                (self.start, self.step) = (None, step.plan.step + 1);
                Taken::Step(step)
            }
            other => Taken::Other(Ending(Some(other))),
        }
    }

    /// Ends the preparation at the end of the run, or fails as the inputs did; all ranks call it together.
    ///
    /// # Errors
    /// Errors from [`InputReader::next`].
    ///
    /// # Panics
    /// If the preparation did.
    pub(crate) fn resolve(&mut self, comm: &dyn Comm, Ending(ending): Ending<D>) -> Result<()> {
        let at = StepContext::step(self.step, "read data");
        match ending {
            None | Some(Prepared::Step(_)) => {
                self.end();
                return Ok(());
            }
            Some(Prepared::Failed(error)) => return Err(error),
            Some(Prepared::Unread(error)) => {
                // The other ranks complete the step before. If they cannot, there is another failure.
                let _ = comm.barrier(at);
                return Err(error);
            }
            Some(Prepared::Elsewhere) => {
                comm.barrier(at)?;
                // The rank without samples ends the job with its own error.
                comm.barrier(at)?;
            }
            Some(Prepared::Different { step, digest }) => comm.check_digest(step, digest)?,
        }
        Err(comm.abort(at, "ranks do not have the same samples").into())
    }

    /// Ends the preparation, and waits until no other rank needs this rank for it.
    ///
    /// # Panics
    /// If the preparation thread panicked.
    pub(crate) fn end(&mut self) {
        (self.stop, self.prepared) = (None, None);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }

    /// Returns the state after the last step that was [taken](Self::take), to resume from; the same on all
    /// ranks.
    ///
    /// # Errors
    /// [`Error::Loader`] if the run has no such step.
    pub(crate) fn state(&self) -> Result<LoaderState> {
        match &self.start {
            Some(start) => Ok(start.clone()),
            None => Ok(self.planner.state(self.step)?),
        }
    }

    /// Iterates over the loaders of this rank, for metrics and lists of skipped samples.
    pub(crate) fn loaders(&self) -> impl Iterator<Item = &BalancedLoader> {
        self.loaders.iter().map(|loader| &**loader)
    }

    /// Returns the planner, for corrections.
    pub(crate) fn planner(&self) -> &StepPlanner {
        &self.planner
    }
}

impl<D: Device> Drop for InputsAhead<D> {
    fn drop(&mut self) {
        (self.stop, self.prepared) = (None, None);
        // Its error or panic concerns a step that nobody requests.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Thread that prepares inputs.
struct Worker<D: Device> {
    reader: InputReader<D>,
    /// Communicator for all ranks, used only by this thread.
    comm: Box<dyn Comm>,
    /// Number of the next step.
    step: u64,
    stop: Stop,
    /// Whether the next step already waits for inputs.
    is_awaited: Arc<AtomicBool>,
}

impl<D: Device> Worker<D> {
    fn run(mut self, steps: u64, prepared: &SyncSender<Handed<D>>) {
        for _ in 0..steps {
            let begin = Instant::now();
            let agreed = self.reader.agree(&*self.comm);
            let read = agreed.and_then(|()| self.reader.read(&mut self.stop));
            let reading = [begin, Instant::now()];
            let next = match self.prepare(read) {
                Ok(Some(next)) => next,
                Ok(None) => return,
                Err(error) => Prepared::Failed(error),
            };
            let is_last = !matches!(next, Prepared::Step(_));
            if prepared.send(Handed { prepared: next, reading }).is_err() || is_last {
                return;
            }
            self.step += 1;
        }
    }

    /// Agrees with all ranks on the samples in a step and builds the inputs; `None` at the end of the run.
    fn prepare(&mut self, read: Result<Option<RankSamples>>) -> Result<Option<Prepared<D>>> {
        let digest = read.as_ref().ok().and_then(Option::as_ref).map(|samples| samples.plan.digest.to_u64());
        let at = StepContext::step(self.step, "check digest");
        let sums = self.sum(at, SameDigests::words(digest))?;
        // After the exchange, which the other ranks wait for.
        let samples = match read {
            Ok(Some(samples)) => samples,
            Ok(None) => return Ok(None),
            Err(error) => return Ok(Some(Prepared::Unread(error))),
        };
        let (step, digest) = (samples.plan.step, samples.plan.digest.to_u64());
        match SameDigests::from_sums(&sums, self.comm.size()) {
            SameDigests::Missing => return Ok(Some(Prepared::Elsewhere)),
            SameDigests::No => return Ok(Some(Prepared::Different { step, digest })),
            SameDigests::Yes => {}
        }
        let counts = self.sum(TokenCounts::at(step), self.reader.count(&samples))?;
        let built = self.reader.build(samples, counts);
        let failed = self.sum(StepContext::step(step, "build inputs"), vec![u64::from(built.is_err())])?;
        let built = Prepared::Step(Box::new(built?));
        Ok(Some(if failed.iter().all(|&ranks| ranks == 0) { built } else { Prepared::Elsewhere }))
    }

    /// Adds up numbers from all ranks, while the ranks compute: no rank waits for another here before a step
    /// waits for inputs.
    fn sum(&self, at: StepContext, own: Vec<u64>) -> Result<Vec<u64>> {
        if self.comm.size() == 1 {
            return Ok(own);
        }
        let sum: Handle<Buffer> = self.comm.start_all_reduce(at, Buffer::U64(own))?;
        while !sum.is_complete() && !self.is_awaited.load(Ordering::Acquire) {
            thread::sleep(POLL);
        }
        match sum.wait()? {
            Buffer::U64(sums) => Ok(sums),
            _ => Err(self.comm.abort(at, "a sum has another type than its terms").into()),
        }
    }
}

/// Returns the time that two spans have in common.
fn overlap([begin, end]: [Instant; 2], [other_begin, other_end]: [Instant; 2]) -> Duration {
    end.min(other_end).saturating_duration_since(begin.max(other_begin))
}

/// Number of parts in a digest.
const PARTS: usize = 4;

/// Whether all ranks have the same digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SameDigests {
    Yes,
    No,
    /// A rank has none.
    Missing,
}

impl SameDigests {
    /// Returns the numbers that a rank contributes to the sum.
    pub(super) fn words(digest: Option<u64>) -> Vec<u64> {
        let mut words = vec![u64::from(digest.is_some())];
        let parts: [u64; PARTS] = std::array::from_fn(|part| digest.unwrap_or(0) >> (16 * part) & 0xffff);
        words.extend(parts);
        words.extend(parts.map(|part| part * part));
        words
    }

    /// Reads the sums over a number of ranks.
    pub(super) fn from_sums(sums: &[u64], ranks: usize) -> Self {
        let Some((&present, sums)) = sums.split_first() else { return Self::Missing };
        if present < ranks as u64 {
            return Self::Missing;
        }
        let (parts, squares) = sums.split_at(sums.len() / 2);
        let is_same = |(&sum, &square): (&u64, &u64)| {
            u128::from(sum) * u128::from(sum) == ranks as u128 * u128::from(square)
        };
        if parts.iter().zip(squares).all(is_same) { Self::Yes } else { Self::No }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(digests: &[Option<u64>]) -> SameDigests {
        let mut sums = vec![0; 1 + 2 * PARTS];
        for &digest in digests {
            sums.iter_mut().zip(SameDigests::words(digest)).for_each(|(sum, word)| *sum += word);
        }
        SameDigests::from_sums(&sums, digests.len())
    }

    #[test]
    fn digests_of_any_number_of_ranks_are_compared_bit_by_bit() {
        for digest in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef] {
            for ranks in [1, 2, 3, 1000] {
                let mut all = vec![Some(digest); ranks];
                assert_eq!(compare(&all), SameDigests::Yes);
                for bit in 0..64 {
                    all[ranks - 1] = Some(digest ^ (1 << bit));
                    let expected = if ranks == 1 { SameDigests::Yes } else { SameDigests::No };
                    assert_eq!(compare(&all), expected, "bit {bit} of {ranks} ranks");
                }
                all[0] = None;
                assert_eq!(compare(&all), SameDigests::Missing);
            }
        }
        // Sums that equal the sums of equal digests.
        assert_eq!(compare(&[Some(1), Some(3), Some(2)]), SameDigests::No);
        assert_eq!(compare(&vec![Some(u64::MAX); 1 << 16]), SameDigests::Yes, "no sum overflows");
    }
}
