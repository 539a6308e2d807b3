//! Holds parameter values and gradients for a stage, and reads and writes weights.
//!
//! Collects the parameters that stage blocks declare.
//!
//! Trained parameters are in *buckets*, the last parameter first: an allocation has the values for several
//! parameters and a second allocation the gradients in the same order, so that one message sums all gradients
//! and one operation updates all values. A parameter that two blocks use has a separate bucket.
//!
//! Bucket values may still be in transfer from replicas. Every method that returns values waits for them, so
//! a reader never sees a partial update; a pass waits for the parameters of a single block at a time
//! ([`Parameters::wait_values`]).

mod bucket;
mod weight_gradients;
pub mod weights;

use super::error::{Error, Result};
use dflop_device::{Bucket, Device, Dtype, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use weights::{AxisPartition, Init, ParameterId, ParameterSpec, TensorShard, TpRank, WeightSource};

pub use bucket::{GatherTimes, ParameterBucket};
pub use weight_gradients::{LayerWeights, PendingWeights, WeightGradients, WeightMatrix};

/// Default bucket size in elements: 4 MiB of gradients.
pub const BUCKET_ELEMENTS: usize = 1 << 20;

/// Checks that a source returned as many values as this rank holds.
fn checked(spec: &ParameterSpec, values: Vec<f32>) -> Result<Vec<f32>> {
    if values.len() == spec.elements() {
        return Ok(values);
    }
    let (tensor, expected, found) = (spec.name.clone(), spec.held_shape(), vec![values.len()]);
    Err(Error::TensorShape { tensor, expected, found })
}

/// Parameter location.
enum Place<D: Device> {
    /// Bucket, and position in the bucket.
    Bucket(usize, usize),
    /// Tensor that is never trained.
    Frozen(Tensor<D>),
    /// Parameter that uses the values of another parameter; its separate gradient is added to the owner's
    /// gradient at the end of a step.
    Shared(Option<Tensor<D>>),
}

/// Values and gradients of stage parameters.
///
/// Value and gradient of a parameter have the same index; frozen parameters have no gradient.
pub struct Parameters<D: Device> {
    specs: Vec<ParameterSpec>,
    places: Vec<Place<D>>,
    buckets: Vec<ParameterBucket<D>>,
}

impl<D: Device> Parameters<D> {
    /// Loads values from a checkpoint or a seed; gradients are zero.
    ///
    /// - `bucket_elements`: bucket size in elements; a larger parameter has a separate bucket
    ///
    /// # Errors
    /// Errors from the source; [`Error::TensorShape`] if the source returns a different number of values than
    /// this rank holds; [`Error::Device`].
    pub fn new(
        device: &D,
        specs: Vec<ParameterSpec>,
        source: &dyn WeightSource,
        bucket_elements: usize,
    ) -> Result<Self> {
        let named = |spec: &ParameterSpec| {
            let name = spec.name.clone();
            move |error: dflop_device::Error| error.while_allocating(|| format!("tensor `{name}`"))
        };
        let mut buckets: Vec<ParameterBucket<D>> = Vec::new();
        let mut in_buckets = BTreeMap::new();
        for group in groups(&specs, bucket_elements) {
            let lens: Vec<usize> = group.iter().map(|&index| specs[index].elements()).collect();
            let len = lens.iter().sum();
            let first = &specs[group[0]];
            let values = device.zeros_as(device.storage(), len).map_err(named(first))?;
            // `f32` on every device, because many small gradients are added
            let gradients = device.zeros_as(Dtype::F32, len).map_err(named(first))?;
            in_buckets.extend(group.iter().enumerate().map(|(part, &index)| (index, (buckets.len(), part))));
            let (values, gradients) = (Bucket::new(values, &lens), Bucket::new(gradients, &lens));
            buckets.push(ParameterBucket::new(group, values, gradients));
        }
        let mut places = Vec::with_capacity(specs.len());
        // in declaration order, which is also the order in checkpoints
        for (index, spec) in specs.iter().enumerate() {
            let load = || checked(spec, source.values(spec)?);
            places.push(match (in_buckets.get(&index), spec.shares) {
                (Some(&(bucket, part)), _) => {
                    let values = &mut buckets[bucket].values_mut().parts_mut()[part];
                    device.write(&load()?, values).map_err(named(spec))?;
                    Place::Bucket(bucket, part)
                }
                (None, Some(_)) => {
                    let gradient = spec.is_trained.then(|| device.zeros_as(Dtype::F32, spec.elements()));
                    Place::Shared(gradient.transpose().map_err(named(spec))?)
                }
                (None, None) => Place::Frozen(device.upload(&load()?).map_err(named(spec))?),
            });
        }
        Ok(Self { specs, places, buckets })
    }

    /// Returns parameter values.
    ///
    /// # Panics
    /// If the parameter belongs to a different stage.
    #[must_use]
    pub fn value(&self, id: ParameterId) -> &Tensor<D> {
        let owner = self.specs[id.0].shares.unwrap_or(id);
        self.own_value(owner.0).expect("a shared parameter shares one that has values")
    }

    fn own_value(&self, index: usize) -> Option<&Tensor<D>> {
        match &self.places[index] {
            &Place::Bucket(bucket, part) => Some(&self.buckets[bucket].values().parts()[part]),
            Place::Frozen(values) => Some(values),
            Place::Shared(_) => None,
        }
    }

    /// Returns the gradient of a parameter, if it is trained.
    pub fn gradient_mut(&mut self, id: ParameterId) -> Option<&mut Tensor<D>> {
        self.gradient_at_mut(id.0)
    }

    /// Returns the values and gradient of a parameter.
    ///
    /// # Panics
    /// If the parameter belongs to a different stage.
    pub fn both(&mut self, id: ParameterId) -> (&Tensor<D>, Option<&mut Tensor<D>>) {
        let owner = self.specs[id.0].shares.unwrap_or(id);
        if owner != id {
            let [owner, own] = self.places.get_disjoint_mut([owner.0, id.0]).expect("owner and user are two");
            let gradient = if let Place::Shared(gradient) = own { gradient.as_mut() } else { None };
            let values = match owner {
                &mut Place::Bucket(bucket, part) => &self.buckets[bucket].values().parts()[part],
                Place::Frozen(values) => values,
                Place::Shared(_) => unreachable!("a shared parameter shares one that has values"),
            };
            return (values, gradient);
        }
        match &mut self.places[id.0] {
            &mut Place::Bucket(bucket, part) => {
                let (values, gradients) = self.buckets[bucket].both();
                (&values.parts()[part], Some(&mut gradients.parts_mut()[part]))
            }
            Place::Frozen(values) => (values, None),
            Place::Shared(_) => unreachable!("it owns its values"),
        }
    }

    /// Returns the weight values, and the gradients of weight and bias, if they are trained.
    ///
    /// # Panics
    /// If both gradients belong to the same parameter.
    pub fn norm(
        &mut self,
        weight: ParameterId,
        bias: ParameterId,
    ) -> (&Tensor<D>, [Option<&mut Tensor<D>>; 2]) {
        self.value_and_gradients(weight, bias)
    }

    /// Returns the gradients of two parameters, if they are trained.
    ///
    /// # Panics
    /// If both are the same parameter.
    pub fn gradients_mut(
        &mut self,
        first: ParameterId,
        second: ParameterId,
    ) -> (Option<&mut Tensor<D>>, Option<&mut Tensor<D>>) {
        let (_, [first, second]) = self.value_and_gradients(first, second);
        (first, second)
    }

    /// Returns the values of the first parameter (it shares nothing) and both gradients.
    fn value_and_gradients(
        &mut self,
        first: ParameterId,
        second: ParameterId,
    ) -> (&Tensor<D>, [Option<&mut Tensor<D>>; 2]) {
        assert_ne!(first, second, "two parameters");
        let place = |id: ParameterId| match &self.places[id.0] {
            &Place::Bucket(bucket, part) => Some((bucket, part)),
            _ => None,
        };
        match (place(first), place(second)) {
            (Some((bucket, part)), Some((other, other_part))) if bucket == other => {
                let (values, gradients) = self.buckets[bucket].both();
                let pair =
                    gradients.parts_mut().get_disjoint_mut([part, other_part]).expect("two parameters");
                (&values.parts()[part], pair.map(Some))
            }
            (Some((bucket, part)), Some((other, other_part))) => {
                let [own, other] = self.buckets.get_disjoint_mut([bucket, other]).expect("two buckets");
                let (values, d_own) = own.both();
                let d_own = &mut d_own.parts_mut()[part];
                (&values.parts()[part], [Some(d_own), Some(&mut other.gradients.parts_mut()[other_part])])
            }
            (Some((bucket, part)), None) => {
                let (values, gradients) = self.buckets[bucket].both();
                (&values.parts()[part], [Some(&mut gradients.parts_mut()[part]), None])
            }
            (None, second) => {
                let Place::Frozen(values) = &self.places[first.0] else {
                    panic!("the first parameter shares nothing")
                };
                let gradient =
                    second.map(|(bucket, part)| &mut self.buckets[bucket].gradients.parts_mut()[part]);
                (values, [None, gradient])
            }
        }
    }

    /// Returns the specifications for all parameters.
    #[must_use]
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// Returns the trained parameter buckets that own values, in the order in which a backward pass completes
    /// the gradients.
    #[must_use]
    pub fn buckets(&self) -> &[ParameterBucket<D>] {
        &self.buckets
    }

    /// Returns the mutable trained parameter buckets that own values.
    pub fn buckets_mut(&mut self) -> &mut [ParameterBucket<D>] {
        &mut self.buckets
    }

    /// Orders the compute lane after the gathers of some parameter values, by parameter index.
    ///
    /// # Errors
    /// [`Error::Comm`] if the job has ended; the values are lost then.
    pub fn wait_values(&self, parameters: Range<usize>) -> Result<()> {
        for index in parameters {
            let owner = self.specs[index].shares.map_or(index, |owner| owner.0);
            if let Place::Bucket(bucket, _) = self.places[owner] {
                self.buckets[bucket].wait_values()?;
            }
        }
        Ok(())
    }

    /// Orders the compute lane after all value gathers.
    ///
    /// # Errors
    /// As [`wait_values`](Self::wait_values).
    pub fn wait_all_values(&self) -> Result<()> {
        self.buckets.iter().try_for_each(ParameterBucket::wait_values)
    }

    /// Returns whether a value gather is not waited for yet.
    #[must_use]
    pub fn is_gathering(&self) -> bool {
        self.buckets.iter().any(ParameterBucket::is_gathering)
    }

    /// Adds shared parameter gradients to the gradients of the parameters that own the values.
    ///
    /// Called once after the last backward in a step. Until then the two uses are summed separately, as on a
    /// pipeline that has them on two stages, so that both give the same bits.
    pub fn fold_shared_gradients(&mut self, device: &D) -> Result<()> {
        let Self { specs, places, buckets } = self;
        for index in 0..specs.len() {
            let Some(owner) = specs[index].shares else { continue };
            let &Place::Bucket(bucket, part) = &places[owner.0] else { continue };
            if let Place::Shared(Some(shared)) = &mut places[index] {
                device.add(shared, &mut buckets[bucket].gradients.parts_mut()[part])?;
                device.zero(shared)?;
            }
        }
        Ok(())
    }

    /// Sets all gradients to zero.
    pub fn zero_gradients(&mut self, device: &D) -> Result<()> {
        // a bucket is empty if a step failed while the bucket gradients were summed
        for bucket in self.buckets.iter_mut().filter(|bucket| !bucket.gradients.is_empty()) {
            bucket.gradients.with_whole(|gradients| device.zero(gradients))?;
            bucket.summed = 0..bucket.len();
        }
        for place in &mut self.places {
            if let Place::Shared(Some(gradient)) = place {
                device.zero(gradient)?;
            }
        }
        Ok(())
    }

    /// Iterates over trained parameters that own values: specification, values, gradient.
    pub fn trained_mut(&mut self) -> impl Iterator<Item = (&ParameterSpec, &mut Tensor<D>, &mut Tensor<D>)> {
        let mut all: Vec<_> = self
            .buckets
            .iter_mut()
            .flat_map(|bucket| {
                let (parameters, values, gradients) = bucket.all_mut();
                parameters.iter().zip(values.parts_mut().iter_mut().zip(gradients.parts_mut()))
            })
            .map(|(&index, (values, gradient))| (index, values, gradient))
            .collect();
        all.sort_by_key(|&(index, ..)| index);
        let specs = &self.specs;
        all.into_iter().map(move |(index, values, gradient)| (&specs[index], values, gradient))
    }

    /// Iterates over trained parameters that own values: index in the stage, specification, gradient.
    pub fn trained(&self) -> impl Iterator<Item = (usize, &ParameterSpec, &Tensor<D>)> {
        let all = self.specs.iter().zip(&self.places).enumerate();
        all.filter_map(|(index, (spec, place))| match place {
            &Place::Bucket(bucket, part) => {
                Some((index, spec, &self.buckets[bucket].gradients.parts()[part]))
            }
            _ => None,
        })
    }

    /// Returns the gradient of a parameter by index, if it is trained.
    #[must_use]
    pub fn gradient_at(&self, index: usize) -> Option<&Tensor<D>> {
        match self.places.get(index)? {
            &Place::Bucket(bucket, part) => Some(&self.buckets[bucket].gradients.parts()[part]),
            Place::Shared(gradient) => gradient.as_ref(),
            Place::Frozen(_) => None,
        }
    }

    /// Returns the mutable gradient of a parameter by index, if it is trained.
    pub fn gradient_at_mut(&mut self, index: usize) -> Option<&mut Tensor<D>> {
        match self.places.get_mut(index)? {
            &mut Place::Bucket(bucket, part) => Some(&mut self.buckets[bucket].gradients.parts_mut()[part]),
            Place::Shared(gradient) => gradient.as_mut(),
            Place::Frozen(_) => None,
        }
    }

    /// Iterates over parameters that own values.
    pub fn owned(&self) -> impl Iterator<Item = (&ParameterSpec, &Tensor<D>)> {
        self.specs.iter().enumerate().filter_map(|(index, spec)| Some((spec, self.own_value(index)?)))
    }

    /// Downloads all gradients by name. Two uses of the same parameter are summed.
    pub fn gradients(&self, device: &D) -> Result<BTreeMap<String, Vec<f32>>> {
        let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for (index, spec) in self.specs.iter().enumerate() {
            let Some(gradient) = self.gradient_at(index) else { continue };
            let gradient = device.download(gradient)?;
            match all.get_mut(&spec.name) {
                Some(sum) => sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value),
                None => drop(all.insert(spec.name.clone(), gradient)),
            }
        }
        Ok(all)
    }

    /// Returns the size of values and gradients in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let gradients = self.buckets.iter().flat_map(|bucket| bucket.gradients.parts()).map(Tensor::bytes);
        let values = self.buckets.iter().map(ParameterBucket::value_bytes);
        let others = self.places.iter().map(|place| match place {
            Place::Bucket(..) => 0,
            Place::Frozen(values) => values.bytes(),
            Place::Shared(gradient) => gradient.as_ref().map_or(0, Tensor::bytes),
        });
        gradients.chain(values).chain(others).sum()
    }
}

/// Groups the trained parameters that own values: the last parameter first, in groups with at most
/// `bucket_elements`; then parameters that two blocks use, each in a separate group, because their gradients
/// are complete last.
fn groups(specs: &[ParameterSpec], bucket_elements: usize) -> Vec<Vec<usize>> {
    let is_used_twice = |index: usize| {
        specs[index].is_tied || specs.iter().any(|spec| spec.shares.is_some_and(|owner| owner.0 == index))
    };
    let own =
        (0..specs.len()).rev().filter(|&index| specs[index].is_trained && specs[index].shares.is_none());
    let (twice, once): (Vec<usize>, Vec<usize>) = own.partition(|&index| is_used_twice(index));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut elements = 0;
    for index in once {
        let more = specs[index].elements();
        match groups.last_mut() {
            Some(group) if elements + more <= bucket_elements => group.push(index),
            _ => {
                groups.push(vec![index]);
                elements = 0;
            }
        }
        elements += more;
    }
    groups.extend(twice.into_iter().map(|index| vec![index]));
    groups
}

/// Collects the parameters that stage blocks declare.
#[derive(Debug, Default)]
pub struct Declaration {
    specs: Vec<ParameterSpec>,
    is_frozen: bool,
    /// Names of parameters that are frozen in any case.
    frozen: Arc<BTreeSet<String>>,
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

    /// Freezes the parameters with these names that are declared from now on.
    pub fn freeze_names(&mut self, names: Arc<BTreeSet<String>>) {
        self.frozen = names;
    }

    /// Declares a parameter.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize], init: Init) -> ParameterId {
        let name = name.into();
        self.specs.push(ParameterSpec {
            is_trained: !self.is_frozen && !self.frozen.contains(&name),
            name,
            shape: shape.to_vec(),
            shard: TensorShard::whole(self.tp_rank),
            init,
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
