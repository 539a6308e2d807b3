//! Plans by key: in memory, on disk, or built in a thread.
//!
//! Builds values in a thread and keeps the most recently used values.

use super::device_properties::DeviceProperties;
use super::graph::Form;
use super::library::{Error, Library, PlanKey, Result, Version};
use super::plan::Plan;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::fs;
use std::hash::Hash;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Plans for a device.
pub struct Plans {
    plans: Background<PlanKey, Plan>,
}

impl Plans {
    /// Starts the thread that reads and builds plans.
    ///
    /// - `directory`: directory in which plans are kept between runs; several processes may share it
    /// - `plans_max`: maximum number of cached plans (LRU)
    ///
    /// # Errors
    /// [`Error::Store`] if the directory cannot be created, [`Error::Thread`].
    pub fn new(
        library: &Arc<Library>,
        device: DeviceProperties,
        directory: Option<&Path>,
        plans_max: NonZeroUsize,
    ) -> Result<Self> {
        let open = |directory| Store::open(directory, library.version(), &device.digest());
        let store = directory.map(open).transpose()?;
        let library = Arc::clone(library);
        let plans =
            Background::start(plans_max, move |key| read_or_build(&library, &device, store.as_ref(), key))?;
        Ok(Self { plans })
    }

    /// Returns the state of a plan without waiting; requests the plan if nobody did.
    #[must_use]
    pub fn get(&self, key: &PlanKey) -> Lookup<Plan> {
        self.plans.get(key)
    }

    /// Returns a plan as soon as it is read or built.
    ///
    /// # Errors
    /// Same as [`Plan::build`].
    pub fn wait(&self, key: &PlanKey) -> std::result::Result<Arc<Plan>, Arc<Error>> {
        self.plans.wait(key)
    }
}

fn read_or_build(
    library: &Arc<Library>,
    device: &DeviceProperties,
    store: Option<&Store>,
    key: &PlanKey,
) -> Result<Plan> {
    if let Some(record) = store.and_then(|store| store.read(key))
        && let Ok(plan) = Plan::from_json(library, device, key, record.form, &record.plan)
    {
        return Ok(plan);
    }
    let plan = Plan::build(library, device, key)?;
    if let Some(store) = store {
        // A plan that cannot be stored can be used; the next run builds it again.
        let _ = plan.to_json().and_then(|json| store.write(key, plan.form(), json));
    }
    Ok(plan)
}

/// Plan files.
pub(super) struct Store {
    directory: PathBuf,
    version: Version,
}

/// File contents.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// cuDNN version that wrote the plan; other versions reject it.
    cudnn: u32,
    key: PlanKey,
    /// Graph form, which determines the call arguments.
    pub(super) form: Form,
    /// Plan as written by cuDNN, with all kernels.
    pub(super) plan: String,
}

impl Store {
    /// Opens the directory for a version and a device model, and creates it if it is missing.
    pub(super) fn open(directory: &Path, version: Version, device: &str) -> Result<Self> {
        let directory = directory.join(format!("cudnn-{version}-{device}"));
        fs::create_dir_all(&directory).map_err(|source| Error::Store { path: directory.clone(), source })?;
        Ok(Self { directory, version })
    }

    /// Reads a plan; `None` if there is no file, or if it is damaged or from a different version.
    pub(super) fn read(&self, key: &PlanKey) -> Option<Record> {
        let text = fs::read(self.file(key)).ok()?;
        let record: Record = serde_json::from_slice(&text).ok()?;
        (record.cudnn == self.version.0 && record.key == *key).then_some(record)
    }

    /// Writes a plan; readers see the complete file or none.
    pub(super) fn write(&self, key: &PlanKey, form: Form, plan: String) -> Result<()> {
        let record = Record { cudnn: self.version.0, key: *key, form, plan };
        let path = self.file(key);
        let failed = |source| Error::Store { path: path.clone(), source };
        let text = serde_json::to_vec(&record).map_err(|error| failed(error.into()))?;
        let mut partial = tempfile::NamedTempFile::new_in(&self.directory).map_err(failed)?;
        partial.write_all(&text).and_then(|()| partial.as_file().sync_all()).map_err(failed)?;
        partial.persist(&path).map(drop).map_err(|refused| failed(refused.error))
    }

    fn file(&self, key: &PlanKey) -> PathBuf {
        self.directory.join(format!("{key}.json"))
    }
}

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
    use super::*;
    use crate::cudnn::library::Heads;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn key() -> PlanKey {
        let heads = Heads { heads: 16, kv_heads: 16, head_dim: 72, is_causal: false };
        PlanKey::forward(heads, &[0, 729])
    }

    #[test]
    fn a_plan_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path(), Version(92_800), "h200").unwrap();
        assert_eq!(store.read(&key()), None);
        store.write(&key(), Form::Single, "{}".to_owned()).unwrap();
        let record = store.read(&key()).unwrap();
        assert_eq!((record.form, record.plan.as_str()), (Form::Single, "{}"));
        let files = fs::read_dir(&store.directory).unwrap().count();
        assert_eq!(files, 1, "no partial file is left");
    }

    #[test]
    fn a_damaged_file_is_no_plan() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path(), Version(92_800), "h200").unwrap();
        store.write(&key(), Form::Single, "{}".to_owned()).unwrap();
        let whole = fs::read(store.file(&key())).unwrap();
        for len in [0, 1, whole.len() / 2, whole.len() - 1] {
            fs::write(store.file(&key()), &whole[..len]).unwrap();
            assert_eq!(store.read(&key()), None, "{len} bytes");
        }
        store.write(&key(), Form::Single, "{}".to_owned()).unwrap();
        assert!(store.read(&key()).is_some());
    }

    #[test]
    fn a_plan_of_another_version_device_or_key_is_no_plan() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path(), Version(92_800), "h200").unwrap();
        store.write(&key(), Form::Single, "{}".to_owned()).unwrap();
        let older = Store::open(directory.path(), Version(91_900), "h200").unwrap();
        assert_eq!(older.read(&key()), None);
        fs::copy(store.file(&key()), older.file(&key())).unwrap();
        assert_eq!(older.read(&key()), None, "the file names the version that wrote it");
        assert_eq!(Store::open(directory.path(), Version(92_800), "a100").unwrap().read(&key()), None);
        let other = PlanKey { longest: 2048, ..key() };
        fs::copy(store.file(&key()), store.file(&other)).unwrap();
        assert_eq!(store.read(&other), None);
    }

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
