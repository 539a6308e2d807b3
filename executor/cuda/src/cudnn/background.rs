//! Builds values in a thread and keeps the most recently used values.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::library::{Error, Result};

/// Value state.
pub enum Lookup<T> {
    /// The value can be used.
    Ready(Arc<T>),
    /// The value waits for the thread, or the thread builds it.
    Building,
    /// The value could not be built; it is not tried again.
    Failed(Arc<Error>),
}

/// Values by key, built sequentially in a thread.
pub(super) struct Background<K, T> {
    shared: Arc<Shared<K, T>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<K, T> {
    state: Mutex<State<K, T>>,
    changed: Condvar,
    ready_max: NonZeroUsize,
}

struct State<K, T> {
    values: HashMap<K, Value<T>>,
    queue: VecDeque<K>,
    /// Number of look-ups, which gives the order of use.
    uses: u64,
    is_closed: bool,
}

enum Value<T> {
    Building,
    Ready { value: Arc<T>, used: u64 },
    Failed(Arc<Error>),
}

impl<K: Copy + Eq + Hash + Send + 'static, T: Send + Sync + 'static> Background<K, T> {
    /// Starts the thread.
    ///
    /// - `ready_max`: maximum number of values kept (LRU)
    pub(super) fn start(
        ready_max: NonZeroUsize,
        build: impl Fn(&K) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let state = State { values: HashMap::new(), queue: VecDeque::new(), uses: 0, is_closed: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), ready_max });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("attention plans".to_owned())
            .spawn(move || of_thread.run(build))
            .map_err(|source| Error::Thread { source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Returns the state of a value without waiting; requests the value if nobody did.
    pub(super) fn get(&self, key: &K) -> Lookup<T> {
        self.shared.look_up(&mut self.shared.lock(), key)
    }

    /// Returns a value as soon as it is built; requests it if nobody did.
    pub(super) fn wait(&self, key: &K) -> std::result::Result<Arc<T>, Arc<Error>> {
        let mut state = self.shared.lock();
        loop {
            match self.shared.look_up(&mut state, key) {
                Lookup::Ready(value) => return Ok(value),
                Lookup::Failed(error) => return Err(error),
                Lookup::Building => {
                    state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

impl<K: Copy + Eq + Hash, T> Shared<K, T> {
    fn lock(&self) -> MutexGuard<'_, State<K, T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_up(&self, state: &mut State<K, T>, key: &K) -> Lookup<T> {
        state.uses += 1;
        match state.values.get_mut(key) {
            Some(Value::Ready { value, used }) => {
                *used = state.uses;
                Lookup::Ready(Arc::clone(value))
            }
            Some(Value::Failed(error)) => Lookup::Failed(Arc::clone(error)),
            Some(Value::Building) => Lookup::Building,
            None => {
                state.values.insert(*key, Value::Building);
                state.queue.push_back(*key);
                self.changed.notify_all();
                Lookup::Building
            }
        }
    }

    /// Builds requested values until the owner is dropped.
    fn run(&self, build: impl Fn(&K) -> Result<T>) {
        while let Some(key) = self.next() {
            let built = build(&key);
            let mut state = self.lock();
            let value = match built {
                Ok(value) => Value::Ready { value: Arc::new(value), used: state.uses },
                Err(error) => Value::Failed(Arc::new(error)),
            };
            state.values.insert(key, value);
            state.forget_unused(self.ready_max, &key);
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<K> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(key) = state.queue.pop_front() {
                return Some(key);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<K: Copy + Eq + Hash, T> State<K, T> {
    /// Drops the least recently used values, but never the value that was just built.
    fn forget_unused(&mut self, ready_max: NonZeroUsize, built: &K) {
        let mut ready: Vec<(u64, K)> = Vec::new();
        for (key, value) in &self.values {
            if let Value::Ready { used, .. } = value
                && key != built
            {
                ready.push((*used, *key));
            }
        }
        ready.sort_unstable_by_key(|&(used, _)| used);
        let too_many = (ready.len() + 1).saturating_sub(ready_max.get());
        for (_, key) in &ready[..too_many.min(ready.len())] {
            self.values.remove(key);
        }
    }
}

impl<K, T> Drop for Background<K, T> {
    /// Waits for the value being built: the library must not be closed while the thread uses it.
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has reported it already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn failure() -> Error {
        Error::Shape { setting: "key", reason: "odd".to_owned() }
    }

    #[test]
    fn values_are_built_once_and_failures_are_kept() {
        let builds = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&builds);
        let values = Background::start(NonZeroUsize::MIN.saturating_add(7), move |key: &u32| {
            counted.fetch_add(1, Ordering::Relaxed);
            if key.is_multiple_of(2) { Ok(key * 10) } else { Err(failure()) }
        })
        .unwrap();
        for _ in 0..3 {
            assert_eq!(*values.wait(&4).unwrap(), 40);
            assert!(values.wait(&5).is_err());
        }
        assert!(matches!(values.get(&4), Lookup::Ready(value) if *value == 40));
        assert!(matches!(values.get(&5), Lookup::Failed(_)));
        assert_eq!(builds.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn get_does_not_wait_for_the_thread() {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let values = Background::start(NonZeroUsize::MIN, move |key: &u32| {
            released.recv().unwrap();
            Ok(*key)
        })
        .unwrap();
        assert!(matches!(values.get(&1), Lookup::Building));
        assert!(matches!(values.get(&1), Lookup::Building));
        release.send(()).unwrap();
        assert_eq!(*values.wait(&1).unwrap(), 1);
    }

    #[test]
    fn the_value_that_was_not_used_for_longest_goes_first() {
        let builds = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&builds);
        let two = NonZeroUsize::MIN.saturating_add(1);
        let values = Background::start(two, move |key: &u32| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(*key)
        })
        .unwrap();
        for key in [1, 2, 1, 3] {
            values.wait(&key).unwrap();
        }
        assert!(matches!(values.get(&1), Lookup::Ready(_)));
        assert!(matches!(values.get(&2), Lookup::Building));
        values.wait(&2).unwrap();
        assert_eq!(builds.load(Ordering::Relaxed), 4);
    }
}
