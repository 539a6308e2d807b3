//! Enumerates the families in a space with their encoder shapes and ranks.

use super::shape::StageShape;
use super::{Candidate, Family, SearchSpace, SearchSpaceOptions};
use crate::cluster::Placement;
use crate::workload::ENCODERS_MAX;
use dflop_balancer::schedule::ScheduleKind;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

impl SearchSpace<'_> {
    /// Calls `visit` with every family.
    pub(crate) fn visit(&self, mut visit: impl FnMut(&Family)) {
        self.visit_llms(|llm, llm_dp| self.visit_encoders(llm, llm_dp, &mut visit));
        self.joint_families().for_each(|family| visit(&family));
    }

    /// Counts the plans: numbers of microbatches, over all families.
    pub(crate) fn count_plans(&self) -> u64 {
        let mut plans = 0;
        let [encoder] = &self.encoders[..] else {
            self.visit(|family| plans += u64::from(self.microbatches_max(family)));
            return plans;
        };
        // Shapes without room next to more ranks of the same LLM.
        let mut without_room: (usize, Vec<&StageShape>) = (usize::MAX, Vec::new());
        self.visit_llms(|llm, llm_dp| {
            if without_room.0 != llm {
                without_room = (llm, encoder.shapes.iter().collect());
            }
            let shape = &self.llm.shapes[llm];
            let mut families = self.colocated_parts(llm, llm_dp).len();
            if self.options.is_disaggregated {
                without_room.1.retain(|encoder| !self.has_room_for_one(encoder, 1, shape, llm_dp));
                families += encoder.shapes.len() - without_room.1.len();
            }
            plans += families as u64 * u64::from(self.workload.global_batch() / llm_dp);
        });
        let joint = self.joint_families().map(|family| u64::from(self.microbatches_max(&family)));
        plans + joint.sum::<u64>()
    }

    /// Lists the joint families: more ranks are never slower, so each shape has as many as fit.
    pub(crate) fn joint_families(&self) -> impl Iterator<Item = Family> + '_ {
        (0..self.joint.len()).filter_map(|index| {
            let shape = &self.joint[index].llm;
            let llm_dp = (self.cluster.gpus / shape.gpus()).min(self.workload.global_batch());
            (llm_dp > 0).then(|| self.joint_family(index, llm_dp))
        })
    }

    fn joint_family(&self, index: usize, llm_dp: u32) -> Family {
        let part = EncoderPart { shape: index as u32, dp: llm_dp * self.joint[index].llm.tp };
        let encoders = EncoderParts::alike(part, self.encoders.len());
        let placement = Placement::Joint;
        Family { placement, encoders, llm: index, llm_dp, schedule: self.schedule_in(placement) }
    }

    /// Calls `visit` with every LLM that runs under the searched schedule: the shape index, and rank counts
    /// in descending order.
    pub(crate) fn visit_llms(&self, mut visit: impl FnMut(usize, u32)) {
        let chunks = self.options.schedule.chunks();
        for llm in (0..self.llm.shapes.len()).filter(|llm| self.llm.shapes[*llm].chunks == chunks) {
            let ranks_max =
                (self.cluster.gpus / self.llm.shapes[llm].gpus()).min(self.workload.global_batch());
            let groups_max = ranks_max / self.expert_parallel;
            for groups in (1..=groups_max).rev() {
                visit(llm, groups * self.expert_parallel);
            }
        }
    }

    /// Calls `visit` with the families for an LLM.
    pub(crate) fn visit_encoders(&self, llm: usize, llm_dp: u32, visit: &mut impl FnMut(&Family)) {
        let family = |placement, encoders: EncoderParts| {
            let schedule = self.schedule_in(placement);
            Family { placement, encoders, llm, llm_dp, schedule }
        };
        if let [encoder] = &self.encoders[..] {
            for shape in 0..encoder.shapes.len() {
                if let Some(ranks) = self.encoder_ranks(shape, llm, llm_dp) {
                    visit(&family(Placement::Disaggregated, EncoderParts::one(shape, ranks)));
                }
            }
        } else {
            let mut visit_shares =
                |encoders: EncoderParts| visit(&family(Placement::Disaggregated, encoders));
            self.visit_shares(llm, llm_dp, &mut visit_shares);
        }
        for encoders in self.colocated_parts(llm, llm_dp).iter() {
            visit(&family(Placement::Colocated, *encoders));
        }
    }

    /// Calls `visit` with the GPU shares for several encoders on the GPUs that an LLM leaves free.
    fn visit_shares(&self, llm: usize, llm_dp: u32, visit: &mut impl FnMut(EncoderParts)) {
        let used = self.llm.shapes[llm].gpus().checked_mul(llm_dp);
        let left = used.and_then(|used| self.cluster.gpus.checked_sub(used)).unwrap_or(0);
        let has_room = |shares: &&EncoderParts| self.has_room(llm, llm_dp, shares);
        // Nodes may leave gaps that no tensor-parallel group fits.
        let fewer = (left.saturating_sub(self.cluster.gpus_per_node)..=left).rev();
        let found = fewer
            .map(|gpus| self.gpu_shares.of(gpus))
            .find(|shares| shares.iter().any(|shares| has_room(&shares)));
        found.unwrap_or(&[]).iter().filter(has_room).for_each(|shares| visit(*shares));
    }

    /// Whether encoders fit into the nodes next to an LLM.
    fn has_room(&self, llm: usize, llm_dp: u32, encoders: &EncoderParts) -> bool {
        let groups = |shape: &StageShape, dp: u32| (shape.tp, u64::from(shape.pp) * u64::from(dp));
        let mut all = [(1, 0); ENCODERS_MAX + 1];
        all[0] = groups(&self.llm.shapes[llm], llm_dp);
        for (encoder, part) in encoders.iter().enumerate() {
            let Some(shape) = self.part_shape(encoder, *part) else { return false };
            all[encoder + 1] = groups(shape, part.dp);
        }
        self.cluster.has_room(&all[..=encoders.len()])
    }

    /// Whether a plan composed by a search belongs to this space.
    pub(crate) fn contains(&self, candidate: &Candidate) -> bool {
        let Family { placement, encoders, llm, llm_dp, schedule } = candidate.family;
        if !self.has_schedule(placement, schedule) {
            return false;
        }
        let shape = match placement {
            Placement::Joint => self.joint.get(llm).map(|shape| &shape.llm),
            Placement::Disaggregated | Placement::Colocated => self.llm.shapes.get(llm),
        };
        if shape.is_none_or(|shape| shape.chunks != schedule.chunks()) {
            return false;
        }
        let items = u64::from(self.workload.global_batch());
        if llm_dp == 0 || encoders.iter().any(|part| part.dp == 0) || candidate.microbatches == 0 {
            return false;
        }
        if u64::from(candidate.microbatches) * u64::from(llm_dp) > items {
            return false;
        }
        if !llm_dp.is_multiple_of(self.expert_parallel) {
            return false;
        }
        match placement {
            Placement::Disaggregated => {
                self.options.is_disaggregated
                    && llm < self.llm.shapes.len()
                    && self.has_room(llm, llm_dp, &encoders)
            }
            Placement::Joint => {
                let gpus = self.joint.get(llm).and_then(|shape| shape.llm.gpus().checked_mul(llm_dp));
                gpus.is_some_and(|gpus| gpus <= self.cluster.gpus)
                    && Family { schedule, ..self.joint_family(llm, llm_dp) } == candidate.family
            }
            // A colocated encoder uses all of the LLM's GPUs, never fewer.
            Placement::Colocated => self.colocated_gpus(llm, llm_dp).is_some_and(|gpus| {
                encoders.iter().enumerate().all(|(encoder, part)| {
                    self.colocated_ranks(encoder, part.shape as usize, gpus) == Some(part.dp)
                })
            }),
        }
    }

    /// Returns the searched schedule in a placement: only encoders on GPUs of their own run ahead.
    fn schedule_in(&self, placement: Placement) -> ScheduleKind {
        match self.options.schedule {
            ScheduleKind::EncoderAhead { .. } if placement != Placement::Disaggregated => {
                ScheduleKind::OneForwardOneBackward
            }
            schedule => schedule,
        }
    }

    /// Whether the space has plans in a placement under a schedule.
    fn has_schedule(&self, placement: Placement, schedule: ScheduleKind) -> bool {
        let SearchSpaceOptions { has_encoder_ahead, has_other_schedules, .. } = self.options;
        schedule == self.schedule_in(placement)
            || match schedule {
                ScheduleKind::EncoderAhead { .. } => {
                    has_encoder_ahead && placement == Placement::Disaggregated
                }
                ScheduleKind::Interleaved { .. } => has_other_schedules && placement == Placement::Colocated,
                ScheduleKind::ZeroBubble => has_other_schedules,
                _ => false,
            }
    }

    /// Returns the maximum number of ranks for a single encoder next to an LLM.
    fn encoder_ranks(&self, encoder: usize, llm: usize, llm_dp: u32) -> Option<u32> {
        if !self.options.is_disaggregated {
            return None;
        }
        let (encoder, llm) = (&self.encoders[0].shapes[encoder], &self.llm.shapes[llm]);
        let left = self.cluster.gpus.checked_sub(llm.gpus().checked_mul(llm_dp)?)?;
        let most = left / encoder.gpus();
        let has_room = |ranks: u32| self.has_room_for_one(encoder, ranks, llm, llm_dp);
        if most == 0 || has_room(most) {
            return (most > 0).then_some(most);
        }
        // Nodes may leave gaps that no tensor-parallel group fits; fewer ranks need no more room.
        let (mut fits, mut exceeds) = (0, most);
        while exceeds - fits > 1 {
            let middle = fits + (exceeds - fits) / 2;
            if has_room(middle) { fits = middle } else { exceeds = middle }
        }
        (fits > 0).then_some(fits)
    }

    /// Whether an encoder's ranks fit into the nodes next to an LLM.
    fn has_room_for_one(&self, encoder: &StageShape, ranks: u32, llm: &StageShape, llm_dp: u32) -> bool {
        let groups = |shape: &StageShape, dp: u32| (shape.tp, u64::from(shape.pp) * u64::from(dp));
        self.cluster.has_room(&[groups(llm, llm_dp), groups(encoder, ranks)])
    }

    /// Returns an LLM's GPUs, which colocated encoders use as well; `None` if the LLM does not fit into the
    /// nodes.
    fn colocated_gpus(&self, llm: usize, llm_dp: u32) -> Option<u32> {
        if !self.options.is_colocated {
            return None;
        }
        let llm = self.llm.shapes.get(llm)?;
        let gpus = llm.gpus().checked_mul(llm_dp).filter(|gpus| *gpus <= self.cluster.gpus)?;
        self.cluster.has_room(&[(llm.tp, u64::from(gpus / llm.tp))]).then_some(gpus)
    }

    /// Returns the number of encoder ranks on these GPUs: all of them, divided into tensor-parallel groups.
    fn colocated_ranks(&self, encoder: usize, shape: usize, gpus: u32) -> Option<u32> {
        let shape = self.encoders[encoder].shapes.get(shape)?;
        (shape.pp == 1 && gpus.is_multiple_of(shape.tp)).then_some(gpus / shape.tp)
    }

    /// Lists encoders on an LLM's GPUs, with every shape combination.
    fn colocated_parts(&self, llm: usize, llm_dp: u32) -> Arc<[EncoderParts]> {
        let Some(gpus) = self.colocated_gpus(llm, llm_dp) else { return Arc::default() };
        self.colocated.get_or_insert(gpus, || self.parts_on(gpus).into())
    }

    fn parts_on(&self, gpus: u32) -> Vec<EncoderParts> {
        let mut all = vec![EncoderParts::default()];
        for (encoder, module) in self.encoders.iter().enumerate() {
            let part = |shape: &u32| {
                let dp = self.colocated_ranks(encoder, *shape as usize, gpus)?;
                Some(EncoderPart { shape: *shape, dp })
            };
            let parts: Vec<EncoderPart> = module.single_stages.iter().filter_map(part).collect();
            let with = |before: &EncoderParts| {
                let before = *before;
                parts.iter().map(move |part| before.iter().copied().chain([*part]).collect())
            };
            all = all.iter().flat_map(with).collect();
        }
        all
    }
}

/// Values that threads compute once and share.
#[derive(Debug)]
pub(crate) struct Known<K, V>(RwLock<BTreeMap<K, V>>);

impl<K: Ord, V: Clone> Known<K, V> {
    pub(crate) fn get_or_insert(&self, key: K, compute: impl FnOnce() -> V) -> V {
        if let Some(known) = self.read().get(&key) {
            return known.clone();
        }
        // Two threads may compute a value, which is the same.
        let value = compute();
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(key, value.clone());
        value
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<K, V>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, V> Default for Known<K, V> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<K: Ord + Clone, V: Clone> Clone for Known<K, V> {
    fn clone(&self) -> Self {
        Self(RwLock::new(self.read().clone()))
    }
}

/// Encoder shape and ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EncoderPart {
    /// Shape index; joint shape index if placement is joint.
    pub(crate) shape: u32,
    /// Number of ranks that share the media; every GPU if placement is joint.
    pub(crate) dp: u32,
}

/// Parts for all encoders, in model order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EncoderParts {
    parts: [EncoderPart; ENCODERS_MAX],
    count: u8,
}

impl EncoderParts {
    /// Creates the part for a single encoder.
    pub(crate) const fn one(shape: usize, dp: u32) -> Self {
        let mut parts = [EncoderPart { shape: 0, dp: 0 }; ENCODERS_MAX];
        parts[0] = EncoderPart { shape: shape as u32, dp };
        Self { parts, count: 1 }
    }

    /// Creates equal parts for several encoders.
    pub(crate) fn alike(part: EncoderPart, count: usize) -> Self {
        (0..count).map(|_| part).collect()
    }
}

impl FromIterator<EncoderPart> for EncoderParts {
    fn from_iter<I: IntoIterator<Item = EncoderPart>>(iter: I) -> Self {
        let mut all = Self::default();
        for (own, part) in all.parts.iter_mut().zip(iter) {
            *own = part;
            all.count += 1;
        }
        all
    }
}

impl Deref for EncoderParts {
    type Target = [EncoderPart];

    fn deref(&self) -> &[EncoderPart] {
        &self.parts[..usize::from(self.count)]
    }
}

impl DerefMut for EncoderParts {
    fn deref_mut(&mut self) -> &mut [EncoderPart] {
        &mut self.parts[..usize::from(self.count)]
    }
}
