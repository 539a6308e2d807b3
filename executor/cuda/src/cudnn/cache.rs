//! Plans by key: in memory, on disk, or built in a thread.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use super::background::{Background, Lookup};
use super::device_properties::DeviceProperties;
use super::error::{Error, Result};
use super::library::Library;
use super::plan::Plan;
use super::plan_key::PlanKey;
use super::store::Store;

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
