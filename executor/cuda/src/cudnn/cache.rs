//! Plans by key: in memory, on disk, or built in a thread.

use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::background::{Background, Lookup};
use super::device_properties::DeviceProperties;
use super::graph::Form;
use super::library::{Error, Library, PlanKey, Result, Version};
use super::plan::Plan;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cudnn::library::Heads;

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
}
