//! Declares the parameters of a stage, and holds their values and gradients.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::weights::{AxisPartition, Init, ParameterId, ParameterSpec, TensorShard, TpRank, WeightSource};
use dflop_device::{Buffer, Device};

/// Collects the parameters that the blocks of a stage declare.
#[derive(Debug, Default)]
pub struct Declaration {
    specs: Vec<ParameterSpec>,
    is_frozen: bool,
    tp_rank: TpRank,
}

impl Declaration {
    /// Starts a declaration for a rank of a tensor-parallel group.
    #[must_use]
    pub fn for_rank(tp_rank: TpRank) -> Self {
        Self { tp_rank, ..Self::default() }
    }

    /// Rank whose parameters are declared.
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
        });
        ParameterId(self.specs.len() - 1)
    }

    /// Declares a parameter that is never trained.
    pub fn add_frozen(&mut self, name: impl Into<String>, shape: &[usize], init: Init) -> ParameterId {
        let id = self.add(name, shape, init);
        self.specs[id.0].is_trained = false;
        id
    }

    /// Declares a parameter that is sharded along one axis.
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
        id
    }

    /// Returns whether a parameter declared since `start` is trained.
    #[must_use]
    pub fn has_trained_since(&self, start: usize) -> bool {
        self.specs[start..].iter().any(|spec| spec.is_trained)
    }

    /// Number of declared parameters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Returns whether no parameter is declared.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Returns the specifications of the declared parameters.
    #[must_use]
    pub fn into_specs(self) -> Vec<ParameterSpec> {
        self.specs
    }
}

/// Checks that a source returned as many values as this rank holds.
fn checked(spec: &ParameterSpec, values: Vec<f32>) -> Result<Vec<f32>> {
    if values.len() == spec.elements() {
        return Ok(values);
    }
    let (tensor, expected, found) = (spec.name.clone(), spec.held_shape(), vec![values.len()]);
    Err(Error::TensorShape { tensor, expected, found })
}

/// Gradients of the two parameters of a norm, if they are trained.
pub type GradientPair<'a, D> = Option<(&'a mut <D as Device>::Floats, &'a mut <D as Device>::Floats)>;

/// Values and gradients of the parameters of a stage.
///
/// Value and gradient of a parameter have the same index; frozen parameters have no gradient.
pub struct Parameters<D: Device> {
    specs: Vec<ParameterSpec>,
    /// Values; `None` for a parameter that shares another's.
    values: Vec<Option<D::Floats>>,
    gradients: Vec<Option<D::Floats>>,
}

impl<D: Device> Parameters<D> {
    /// Loads values from a checkpoint or a seed; gradients are zero.
    ///
    /// # Errors
    /// The errors of the source; [`Error::TensorShape`] if it returns another number of values than this rank
    /// holds; [`Error::Device`].
    pub fn new(device: &D, specs: Vec<ParameterSpec>, source: &dyn WeightSource) -> Result<Self> {
        let mut values = Vec::with_capacity(specs.len());
        let mut gradients = Vec::with_capacity(specs.len());
        for spec in &specs {
            let named =
                |error: dflop_device::Error| error.while_allocating(|| format!("tensor `{}`", spec.name));
            let value = match spec.shares {
                Some(_) => None,
                None => Some(device.upload(&checked(spec, source.values(spec)?)?).map_err(named)?),
            };
            values.push(value);
            // `f32` on every device, because many small gradients are added
            let gradient = spec.is_trained.then(|| device.zeros_f32(spec.elements()));
            gradients.push(gradient.transpose().map_err(named)?);
        }
        Ok(Self { specs, values, gradients })
    }

    /// Values of a parameter.
    ///
    /// # Panics
    /// If the parameter belongs to another stage.
    #[must_use]
    pub fn value(&self, id: ParameterId) -> &D::Floats {
        let owner = self.specs[id.0].shares.unwrap_or(id);
        self.values[owner.0].as_ref().expect("a shared parameter shares one that has values")
    }

    /// Gradient of a parameter, if it is trained.
    pub fn gradient_mut(&mut self, id: ParameterId) -> Option<&mut D::Floats> {
        self.gradients[id.0].as_mut()
    }

    /// Values and gradient of a parameter.
    ///
    /// # Panics
    /// If the parameter belongs to another stage.
    pub fn both(&mut self, id: ParameterId) -> (&D::Floats, Option<&mut D::Floats>) {
        let owner = self.specs[id.0].shares.unwrap_or(id);
        let value = self.values[owner.0].as_ref().expect("a shared parameter shares one that has values");
        (value, self.gradients[id.0].as_mut())
    }

    /// Values of one parameter and gradients of two.
    ///
    /// # Panics
    /// If both gradients belong to the same parameter.
    pub fn norm(&mut self, weight: ParameterId, bias: ParameterId) -> (&D::Floats, GradientPair<'_, D>) {
        let value = self.values[weight.0].as_ref().expect("norms share nothing");
        let [weight, bias] =
            self.gradients.get_disjoint_mut([weight.0, bias.0]).expect("a norm has two parameters");
        (value, weight.as_mut().zip(bias.as_mut()))
    }

    /// Specifications of all parameters.
    #[must_use]
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// Adds the gradients of shared parameters to those of the parameters that own the values.
    ///
    /// Called once after the last backward of a step. Until then the two uses are summed separately, as on a
    /// pipeline that has them on two stages, so that both give the same bits.
    ///
    /// # Panics
    /// Never: a parameter does not share its own values.
    pub fn fold_shared_gradients(&mut self, device: &D) -> Result<()> {
        for index in 0..self.specs.len() {
            let Some(owner) = self.specs[index].shares else { continue };
            let [owner, shared] =
                self.gradients.get_disjoint_mut([owner.0, index]).expect("owner and user are two");
            if let (Some(owner), Some(shared)) = (owner, shared) {
                device.add(shared, owner)?;
                device.zero(shared)?;
            }
        }
        Ok(())
    }

    /// Sets all gradients to zero.
    pub fn zero_gradients(&mut self, device: &D) -> Result<()> {
        Ok(self.gradients.iter_mut().flatten().try_for_each(|gradient| device.zero(gradient))?)
    }

    /// Iterates over trained parameters that own their values: specification, values, gradient.
    pub fn trained_mut(&mut self) -> impl Iterator<Item = (&ParameterSpec, &mut D::Floats, &mut D::Floats)> {
        let all = self.specs.iter().zip(&mut self.values).zip(&mut self.gradients);
        all.filter_map(|((spec, value), gradient)| Some((spec, value.as_mut()?, gradient.as_mut()?)))
    }

    /// Iterates over trained parameters that own their values: index in the stage, specification, gradient.
    pub fn trained(&self) -> impl Iterator<Item = (usize, &ParameterSpec, &D::Floats)> {
        let all = self.specs.iter().zip(&self.values).zip(&self.gradients).enumerate();
        all.filter_map(|(index, ((spec, value), gradient))| {
            value.as_ref()?;
            Some((index, spec, gradient.as_ref()?))
        })
    }

    /// Gradient of a parameter by index, if it is trained.
    #[must_use]
    pub fn gradient_at(&self, index: usize) -> Option<&D::Floats> {
        self.gradients.get(index)?.as_ref()
    }

    /// Mutable gradient of a parameter by index, if it is trained.
    pub fn gradient_at_mut(&mut self, index: usize) -> Option<&mut D::Floats> {
        self.gradients.get_mut(index)?.as_mut()
    }

    /// Iterates over parameters that own their values.
    pub fn owned(&self) -> impl Iterator<Item = (&ParameterSpec, &D::Floats)> {
        self.specs.iter().zip(&self.values).filter_map(|(spec, value)| Some((spec, value.as_ref()?)))
    }

    /// Downloads all gradients by name. Two uses of one parameter are summed.
    pub fn gradients(&self, device: &D) -> Result<BTreeMap<String, Vec<f32>>> {
        let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for (spec, gradient) in self.specs.iter().zip(&self.gradients) {
            let Some(gradient) = gradient else { continue };
            let gradient = device.download(gradient)?;
            match all.get_mut(&spec.name) {
                Some(sum) => sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value),
                None => drop(all.insert(spec.name.clone(), gradient)),
            }
        }
        Ok(all)
    }

    /// Size of values and gradients, at 4 bytes per element.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let buffers = self.values.iter().chain(&self.gradients).flatten();
        buffers.map(|buffer| 4 * buffer.len() as u64).sum()
    }
}
