//! Collects the parameters that stage blocks declare.

use super::weights::{AxisPartition, Init, ParameterId, ParameterSpec, TensorShard, TpRank};

/// Collects the parameters that stage blocks declare.
#[derive(Debug, Default)]
pub struct Declaration {
    specs: Vec<ParameterSpec>,
    is_frozen: bool,
    tp_rank: TpRank,
}

impl Declaration {
    /// Starts a declaration for a tensor-parallel rank.
    #[must_use]
    pub fn for_rank(tp_rank: TpRank) -> Self {
        Self { tp_rank, ..Self::default() }
    }

    /// Returns the rank whose parameters are declared.
    #[must_use]
    pub fn tp_rank(&self) -> TpRank {
        self.tp_rank
    }

    /// Freezes or trains the parameters that are declared from now on.
    pub fn freeze(&mut self, is_frozen: bool) {
        self.is_frozen = is_frozen;
    }

    /// Declares a parameter.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize], init: Init) -> ParameterId {
        self.specs.push(ParameterSpec {
            name: name.into(),
            shape: shape.to_vec(),
            shard: TensorShard::whole(self.tp_rank),
            init,
            is_trained: !self.is_frozen,
            shares: None,
            is_tied: false,
        });
        ParameterId(self.specs.len() - 1)
    }

    /// Marks a parameter that another block also uses, in this or another stage.
    pub fn tie(&mut self, id: ParameterId) {
        self.specs[id.0].is_tied = true;
    }

    /// Declares a parameter that is never trained.
    pub fn add_frozen(&mut self, name: impl Into<String>, shape: &[usize], init: Init) -> ParameterId {
        let id = self.add(name, shape, init);
        self.specs[id.0].is_trained = false;
        id
    }

    /// Declares a parameter that is sharded along an axis.
    pub fn add_cut(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        init: Init,
        (axis, parts): (usize, &AxisPartition),
    ) -> ParameterId {
        let id = self.add(name, shape, init);
        self.specs[id.0].shard = TensorShard::cut(self.tp_rank, axis, parts);
        id
    }

    /// Declares a second use of a parameter if this stage has it, or a copy if another stage does.
    pub fn add_shared(
        &mut self,
        name: &str,
        shape: &[usize],
        init: Init,
        cut: (usize, &AxisPartition),
    ) -> ParameterId {
        // not found if another stage has the embedding: then the values are loaded a second time
        let shares = self.specs.iter().position(|spec| spec.name == name).map(ParameterId);
        let id = self.add_cut(name, shape, init, cut);
        self.specs[id.0].shares = shares;
        self.tie(id);
        id
    }

    /// Returns whether a parameter declared since `start` is trained.
    #[must_use]
    pub fn has_trained_since(&self, start: usize) -> bool {
        self.specs[start..].iter().any(|spec| spec.is_trained)
    }

    /// Returns the number of declared parameters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Returns whether no parameter is declared.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Returns all parameter specifications.
    #[must_use]
    pub fn into_specs(self) -> Vec<ParameterSpec> {
        self.specs
    }
}
