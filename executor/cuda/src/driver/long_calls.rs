//! Calls of the driver that may wait for work of the device, while they last: for reports of a driver that
//! does not answer.
//!
//! Every thread has a place for its call, which other threads look at only for a report: a call costs tens of
//! nanoseconds, also while others are made.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// A call in progress: its name, and when it began.
type Call = Option<(&'static str, Instant)>;

/// The call that a thread is in.
struct Place {
    thread: Thread,
    call: Mutex<Call>,
}

impl Place {
    fn set(&self, call: Call) -> Call {
        std::mem::replace(&mut *self.call.lock().unwrap_or_else(PoisonError::into_inner), call)
    }
}

/// Places of all threads that have made such a call, and have not ended.
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

/// Puts the call around another one back when that ends.
struct Ended(Call);

impl Drop for Ended {
    fn drop(&mut self) {
        // a thread that ends has no place any more
        let _ = OWN.try_with(|own| own.set(self.0.take()));
    }
}

/// Makes a call that may take long.
pub(crate) fn during<R>(name: &'static str, call: impl FnOnce() -> R) -> R {
    let begun = Some((name, Instant::now()));
    let around = OWN.try_with(|own| own.set(begun)).unwrap_or_default();
    let _ended = Ended(around);
    call()
}

/// Names the calls that have lasted for this time, with their threads; `None` if there are none.
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
