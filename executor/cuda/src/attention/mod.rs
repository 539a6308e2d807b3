//! Attention engines: allowed engines, and cuDNN where measured times are shorter.

mod cudnn_engine;

pub use cudnn_engine::AttentionChoice;
pub(crate) use cudnn_engine::{Call, CudnnEngine};

/// Engines that compute attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttentionEngines {
    /// Only the kernels in this crate: the same bits in every run.
    #[default]
    Own,
    /// The faster engine on each shape (these kernels or cuDNN), by measured time. The last digits in results
    /// depend on the choice and on the time of the choice.
    Fastest,
}

/// Number of first runs with each engine that are not counted: they load code.
const WARM_UP: usize = 1;
/// Number of runs with each engine, including these.
const RUNS: usize = WARM_UP + 5;

/// Attention engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    /// Kernels in this crate.
    Own,
    /// cuDNN.
    Cudnn,
}

/// Times for both engines on a shape, and the resulting choice.
#[derive(Debug, Default)]
struct EngineChoice {
    started: [usize; 2],
    /// Times of finished runs in nanoseconds, in order.
    taken: [Vec<u64>; 2],
    chosen: Option<Engine>,
}

impl EngineChoice {
    /// Returns the engine for the next run: alternates until both are measured, then the faster engine.
    fn next(&mut self) -> Engine {
        if let Some(chosen) = self.chosen {
            return chosen;
        }
        let engine = if self.started[0] <= self.started[1] { Engine::Own } else { Engine::Cudnn };
        self.started[engine as usize] += 1;
        engine
    }

    /// Returns whether runs are still timed.
    const fn is_open(&self) -> bool {
        self.chosen.is_none()
    }

    /// Adds a run time.
    fn add(&mut self, engine: Engine, nanoseconds: u64) {
        self.taken[engine as usize].push(nanoseconds);
        if self.taken.iter().any(|taken| taken.len() < RUNS) {
            return;
        }
        let [own, cudnn] = self.medians();
        let is_own_faster = own <= cudnn;
        self.chosen = Some(if is_own_faster { Engine::Own } else { Engine::Cudnn });
    }

    /// Returns both engines' median times so far, in nanoseconds; `None` before the runs that count.
    fn medians(&self) -> [Option<u64>; 2] {
        self.taken.each_ref().map(|taken| {
            let mut counted = taken.get(WARM_UP..)?.to_vec();
            counted.sort_unstable();
            counted.get(counted.len() / 2).copied()
        })
    }

    /// Returns the chosen engine, if any.
    const fn chosen(&self) -> Option<Engine> {
        self.chosen
    }

    /// Excludes cuDNN, because it failed.
    const fn exclude_cudnn(&mut self) {
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
                // an engine's first run takes long, and so does a later run
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
