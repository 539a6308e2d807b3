//! Driver calls in progress that may wait for device work: for reports about a driver that does not answer.
//!
//! Every thread has a slot for the current call, which different threads read only for a report: recording a
//! call costs tens of nanoseconds, also during concurrent calls.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Call in progress: name and start time.
type Call = Option<(&'static str, Instant)>;

/// Current call on a thread.
struct Place {
    thread: Thread,
    call: Mutex<Call>,
}

impl Place {
    fn set(&self, call: Call) -> Call {
        std::mem::replace(&mut *self.call.lock().unwrap_or_else(PoisonError::into_inner), call)
    }
}

/// Slots for all live threads that have recorded a call.
static PLACES: Mutex<Vec<Weak<Place>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: Arc<Place> = register();
}

fn register() -> Arc<Place> {
    let own = Arc::new(Place { thread: std::thread::current(), call: Mutex::default() });
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    places.retain(|place| place.strong_count() > 0);
    places.push(Arc::downgrade(&own));
    own
}

/// Guard that restores the enclosing call when a nested call ends.
struct Ended(Call);

impl Drop for Ended {
    fn drop(&mut self) {
        // a thread that ends has no place any more
        let _ = OWN.try_with(|own| own.set(self.0.take()));
    }
}

/// Runs a call that may take long.
pub(crate) fn during<R>(name: &'static str, call: impl FnOnce() -> R) -> R {
    let begun = Some((name, Instant::now()));
    let around = OWN.try_with(|own| own.set(begun)).unwrap_or_default();
    let _ended = Ended(around);
    call()
}

/// Returns names and threads for calls that have lasted at least `time`; `None` if there are none.
pub(crate) fn lasting(time: Duration) -> Option<String> {
    let places = PLACES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let named = places.iter().filter_map(Weak::upgrade).filter_map(|place| {
        let call = *place.call.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, _) = call.filter(|(_, begin)| begin.elapsed() >= time)?;
        Some(format!("{name} (thread {})", place.thread.name().unwrap_or("without a name")))
    });
    Some(named.collect::<Vec<_>>().join(", ")).filter(|named| !named.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(call: &str) -> bool {
        lasting(Duration::ZERO).is_some_and(|calls| calls.contains(call))
    }

    #[test]
    fn calls_are_named_while_they_last() {
        during("outer", || {
            during("inner", || assert!(named("inner") && !named("outer")));
            assert!(named("outer") && !named("inner"));
            let (other, this) = std::thread::scope(|scope| {
                let look =
                    scope.spawn(|| during("of another thread", || (named("of another"), named("outer"))));
                look.join().expect("the thread ends")
            });
            assert!(other && this);
        });
        assert!(!named("outer") && !named("of another"));
        assert!(lasting(Duration::from_hours(1)).is_none());
    }

    #[test]
    #[ignore = "prints a time"]
    #[expect(clippy::print_stdout, reason = "shows the time")]
    fn a_call_costs_nanoseconds() {
        const CALLS: u32 = 1_000_000;
        let begin = Instant::now();
        for _ in 0..CALLS {
            during("call", || std::hint::black_box(0));
        }
        println!("{:?} a call", begin.elapsed() / CALLS);
    }
}
