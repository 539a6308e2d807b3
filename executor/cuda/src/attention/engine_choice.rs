//! Choice between two engines by their measured times.

/// First runs of each engine that are not counted: they load code.
const WARM_UP: usize = 1;
/// Runs of each engine, those included.
const RUNS: usize = WARM_UP + 5;

/// Engine that computes an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Engine {
    /// Kernels of this crate.
    Own,
    /// cuDNN.
    Cudnn,
}

/// Times of both engines on one shape, and the choice that follows.
#[derive(Debug, Default)]
pub(super) struct EngineChoice {
    started: [usize; 2],
    /// Nanoseconds of finished runs, in order.
    taken: [Vec<u64>; 2],
    chosen: Option<Engine>,
}

impl EngineChoice {
    /// Returns the engine of the next run: in turns until both are measured, then the faster one.
    pub(super) fn next(&mut self) -> Engine {
        if let Some(chosen) = self.chosen {
            return chosen;
        }
        let engine = if self.started[0] <= self.started[1] { Engine::Own } else { Engine::Cudnn };
        self.started[engine as usize] += 1;
        engine
    }

    /// Returns whether runs are still timed.
    pub(super) const fn is_open(&self) -> bool {
        self.chosen.is_none()
    }

    /// Adds the time of a run.
    pub(super) fn add(&mut self, engine: Engine, nanoseconds: u64) {
        self.taken[engine as usize].push(nanoseconds);
        if self.taken.iter().any(|taken| taken.len() < RUNS) {
            return;
        }
        let [own, cudnn] = self.medians();
        let is_own_faster = own <= cudnn;
        self.chosen = Some(if is_own_faster { Engine::Own } else { Engine::Cudnn });
    }

    /// Median nanoseconds of both engines so far, `None` before the runs that count.
    pub(super) fn medians(&self) -> [Option<u64>; 2] {
        self.taken.each_ref().map(|taken| {
            let mut counted = taken.get(WARM_UP..)?.to_vec();
            counted.sort_unstable();
            counted.get(counted.len() / 2).copied()
        })
    }

    /// The engine that is chosen, if it is.
    pub(super) const fn chosen(&self) -> Option<Engine> {
        self.chosen
    }

    /// Leaves an engine out: it failed.
    pub(super) const fn exclude_cudnn(&mut self) {
        self.chosen = Some(Engine::Own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_take_turns_until_the_faster_one_is_known() {
        for (own, cudnn, expected) in [(10, 20, Engine::Own), (20, 10, Engine::Cudnn)] {
            let mut choice = EngineChoice::default();
            for _ in 0..RUNS {
                assert!(choice.is_open());
                assert_eq!((choice.next(), choice.next()), (Engine::Own, Engine::Cudnn));
            }
            for run in 0..RUNS {
                // the first run of an engine takes long, and one of the others, too
                let outlier = if run == 0 || run == 3 { 1000 } else { 0 };
                choice.add(Engine::Cudnn, cudnn + outlier);
                choice.add(Engine::Own, own + outlier);
            }
            assert_eq!((choice.is_open(), choice.next()), (false, expected));
        }
    }

    #[test]
    fn an_engine_that_failed_is_left_out() {
        let mut choice = EngineChoice::default();
        choice.exclude_cudnn();
        assert_eq!(choice.next(), Engine::Own);
        choice.add(Engine::Cudnn, 1);
        assert_eq!(choice.next(), Engine::Own);
    }
}
