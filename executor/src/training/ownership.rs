//! Which rank answers for which parameter.
//!
//! A parameter can be on several ranks: on every data-parallel replica, and a tied embedding on the first and the last
//! stage. One of them counts it in the norm of the gradients and writes it to checkpoints: the lowest. The ranks agree on
//! that once, by the names that each has, so that no one has to know the layout.

use std::collections::{BTreeMap, BTreeSet};

use crate::comm::{Comm, StepContext};
use crate::device::Device;
use crate::error::Result;
use crate::stage::Stage;
use crate::weights::ParameterSpec;

/// Separates names in a message; no tensor has it in its name.
const SEPARATOR: u8 = b'\n';
/// Separates a name from the rank whose part is meant.
const PART: char = '\t';

/// All parameters of a job by name, and the rank that answers for each.
///
/// The order is that of the names, so it is the same whatever the stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    /// Name, of a part with its number, to index and owner.
    owners: BTreeMap<String, (usize, usize)>,
    rank: usize,
}

impl Ownership {
    /// Agrees on an owner of every parameter; all ranks of `comm` call it.
    ///
    /// Parts of a tensor that a tensor-parallel group shares have an owner each.
    ///
    /// # Errors
    /// [`crate::Error::Comm`].
    pub fn agree<'a, D: Device>(
        comm: &dyn Comm,
        stages: impl IntoIterator<Item = &'a Stage<D>>,
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
                // ranks come in order: the lowest stays
                owners.entry(String::from_utf8_lossy(name).into_owned()).or_insert((0, rank));
            }
        }
        for (index, (place, _)) in owners.values_mut().enumerate() {
            *place = index;
        }
        Ok(Self { owners, rank: comm.rank() })
    }

    /// Returns the number of parameters of the job.
    #[must_use]
    pub fn len(&self) -> usize {
        self.owners.len()
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns the index of a parameter, or of its part that this rank has, if this rank answers for it.
    #[must_use]
    pub fn own(&self, spec: &ParameterSpec) -> Option<usize> {
        let &(index, owner) = self.owners.get(&key(spec))?;
        (owner == self.rank).then_some(index)
    }

    /// Returns names of tensors, ascending, with the ranks that write them: those that answer for the first parts.
    pub fn writers(&self) -> impl Iterator<Item = (&str, usize)> {
        self.owners.iter().filter_map(|(key, &(_, owner))| match key.split_once(PART) {
            Some((name, part)) => (part == "0").then_some((name, owner)),
            None => Some((key.as_str(), owner)),
        })
    }
}

/// What a parameter is counted under: its name, or that of its part.
fn key(spec: &ParameterSpec) -> String {
    if spec.shard.is_whole() {
        return spec.name.clone();
    }
    format!("{}{PART}{}", spec.name, spec.shard.original(spec.shard.tp_rank().rank))
}

/// Brings bytes of every rank, in any number, to all.
pub(super) fn gather_bytes(comm: &dyn Comm, at: StepContext, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut lengths = vec![0_u64; comm.size()];
    lengths[comm.rank()] = own.len() as u64;
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
