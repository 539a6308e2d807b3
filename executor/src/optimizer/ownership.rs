//! Assigns every parameter to one rank, which counts it in the gradient norm and writes it to checkpoints.
//!
//! A parameter can be on several ranks: on every data-parallel replica, and a tied embedding on the first and
//! the last stage. The lowest such rank owns it. The ranks agree on owners once, by exchanging parameter
//! names, so that no rank has to know the layout.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Result;
use dflop_comm::{Comm, StepContext};
use dflop_device::Device;
use dflop_models::Stage;
use dflop_models::weights::ParameterSpec;

/// Separates names in a message; no tensor name contains it.
const SEPARATOR: u8 = b'\n';
/// Separates a name from a part number.
const PART: char = '\t';

/// Owner of every parameter in a job, by name.
///
/// Parameters are in name order, so the indices do not depend on the stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    /// Maps names, or names with part numbers, to index and owner.
    owners: BTreeMap<String, (usize, usize)>,
    rank: usize,
}

impl Ownership {
    /// Agrees on an owner for every parameter; all ranks in `comm` call it.
    ///
    /// Each part of a tensor that a tensor-parallel group shares has an owner.
    ///
    /// # Errors
    /// [`crate::Error::Comm`].
    pub fn agree<'a, D: Device, S: Stage<D> + ?Sized + 'a>(
        comm: &dyn Comm,
        stages: impl IntoIterator<Item = &'a S>,
    ) -> Result<Self> {
        let mut own = BTreeSet::new();
        for stage in stages {
            own.extend(stage.parameters().owned().map(|(spec, _)| key(spec)));
        }
        let mut bytes = Vec::new();
        for key in &own {
            bytes.extend_from_slice(key.as_bytes());
            bytes.push(SEPARATOR);
        }
        let mut owners = BTreeMap::new();
        for (rank, names) in
            gather_bytes(comm, StepContext::step(0, "agree on parameters"), &bytes)?.iter().enumerate()
        {
            for name in names.split(|&byte| byte == SEPARATOR).filter(|name| !name.is_empty()) {
                // Ranks come in ascending order, so the lowest rank stays.
                owners.entry(String::from_utf8_lossy(name).into_owned()).or_insert((0, rank));
            }
        }
        for (index, (place, _)) in owners.values_mut().enumerate() {
            *place = index;
        }
        Ok(Self { owners, rank: comm.rank() })
    }

    /// Returns the number of parameters in the job.
    #[must_use]
    pub fn len(&self) -> usize {
        self.owners.len()
    }

    /// Returns whether there are no parameters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns the index of a parameter, or of this rank's part, if this rank owns it.
    #[must_use]
    pub fn own(&self, spec: &ParameterSpec) -> Option<usize> {
        let (index, owner) = self.place(spec)?;
        (owner == self.rank).then_some(index)
    }

    /// Returns the index of a parameter, or of this rank's part, and the owner rank.
    pub(super) fn place(&self, spec: &ParameterSpec) -> Option<(usize, usize)> {
        self.owners.get(&key(spec)).copied()
    }

    /// Returns tensor names, ascending, with the ranks that write them: the owners of the first parts.
    pub fn writers(&self) -> impl Iterator<Item = (&str, usize)> {
        self.owners.iter().filter_map(|(key, &(_, owner))| match key.split_once(PART) {
            Some((name, part)) => (part == "0").then_some((name, owner)),
            None => Some((key.as_str(), owner)),
        })
    }
}

/// Returns the map key for a parameter: the name, with the part number if it is sharded.
fn key(spec: &ParameterSpec) -> String {
    if spec.shard.is_whole() {
        return spec.name.clone();
    }
    format!("{}{PART}{}", spec.name, spec.shard.original(spec.shard.tp_rank().rank))
}

/// Gathers bytes from all ranks on all ranks; lengths may differ.
pub(crate) fn gather_bytes(comm: &dyn Comm, at: StepContext, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut lengths = vec![0_u64; comm.size()];
    lengths[comm.rank()] = own.len() as u64;
    // Lengths first: every rank needs the sizes of all parts to receive them.
    comm.all_gather(at, lengths.as_mut_slice().into(), &vec![1; comm.size()])?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let mut all = vec![0_u8; lengths.iter().sum()];
    let start: usize = lengths[..comm.rank()].iter().sum();
    all[start..start + own.len()].copy_from_slice(own);
    comm.all_gather(at, all.as_mut_slice().into(), &lengths)?;
    let mut rest = all.as_slice();
    Ok(lengths
        .into_iter()
        .map(|length| {
            let (bytes, behind) = rest.split_at(length);
            rest = behind;
            bytes.to_vec()
        })
        .collect())
}
