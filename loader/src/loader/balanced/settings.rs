//! Settings for a [`BalancedLoader`](super::BalancedLoader), with checks.

use std::sync::Arc;

use dflop_samples::inputs::SampleProcessor;
use dflop_samples::media::VideoSampling;

use crate::dataset::Dataset;
use crate::decode::Decode;
use crate::error::{Error, Result, check_at_most};
use crate::fetch::{DpShare, Share};
use crate::loader::field_check::check_indexed;
use crate::loader::settings::LoaderSettings;
use crate::order::LoaderState;
use crate::plan::StepPlanner;

/// Maximum number of planned steps kept ahead.
const STEPS_AHEAD_MAX: u64 = 1 << 16;
/// Decoded bytes that may wait, by default.
const BUFFERED_BYTES_MAX: u64 = 256 << 20;

/// Settings for a balanced loader; checked inside a [`BalancedLoader`](super::BalancedLoader).
#[derive(Debug, Clone)]
pub(super) struct BalancedSettings {
    pub(super) shared: LoaderSettings,
    pub(super) planner: StepPlanner,
    pub(super) dp_rank: usize,
    pub(super) share: Arc<dyn Share>,
    pub(super) from_step: u64,
    pub(super) state: Option<LoaderState>,
    pub(super) steps: Option<u64>,
    pub(super) steps_ahead: usize,
    pub(super) unpacked_bytes_max: u64,
    pub(super) microbatch_bytes_max: Option<u64>,
    pub(super) preparer: Option<Arc<dyn SampleProcessor>>,
    pub(super) is_packed: bool,
    /// Video sampling in the indexes: plans count these frames.
    pub(super) video_sampling: Option<VideoSampling>,
}

impl BalancedSettings {
    pub(super) fn new(planner: StepPlanner, dp_rank: usize) -> Self {
        Self {
            shared: LoaderSettings::default(),
            from_step: planner.first_step(),
            state: None,
            planner,
            dp_rank,
            share: Arc::new(DpShare(dp_rank)),
            steps: None,
            steps_ahead: 2,
            unpacked_bytes_max: 1 << 30,
            microbatch_bytes_max: None,
            preparer: None,
            is_packed: true,
            video_sampling: None,
        }
    }

    /// Returns the decoded bytes that may wait.
    pub(super) fn buffered_bytes_max(&self) -> u64 {
        self.shared.buffered_bytes_max.unwrap_or(BUFFERED_BYTES_MAX)
    }

    /// Checks all settings and fills in values from the planner.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Selection`]; [`Error::State`] if a state is from a different run.
    pub(super) fn checked(mut self) -> Result<Self> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let dp_size = self.planner.dp_size();
        if self.dp_rank >= dp_size {
            return invalid("dp_rank", format!("{} is not below the DP size of {dp_size}", self.dp_rank));
        }
        if self.steps_ahead == 0 {
            return invalid("steps_ahead", "must be at least 1".into());
        }
        check_at_most("steps_ahead", self.steps_ahead as u64, STEPS_AHEAD_MAX)?;
        if matches!(self.shared.decode, Decode::Pixels { .. }) {
            return invalid("decode", "a balanced loader delivers `Raw` or `Media`".into());
        }
        self.shared = self.shared.seeded(self.planner.seed());
        self.shared.check()?;
        check_indexed(self.planner.datasets(), &self.shared.fields, &self.shared.transforms)?;
        if self.preparer.is_some() && self.shared.decode != Decode::Media {
            return invalid("preparer", "it needs decoded samples".into());
        }
        if let (Some(preparer), Some(tokens_max)) = (&mut self.preparer, self.planner.caps().tokens_max) {
            *preparer = preparer.limited(Some(tokens_max), None);
        }
        if let Some(preparer) = &mut self.preparer {
            pad_as_planned(preparer, &self.planner)?;
        }
        if let Some(state) = self.state.take() {
            self.from_step = self.planner.saved_step(&state)?;
        }
        self.video_sampling = common_video_sampling(self.planner.datasets())?;
        Ok(self)
    }
}

/// Lets a preparer pad to the length that was planned for.
fn pad_as_planned(preparer: &mut Arc<dyn SampleProcessor>, planner: &StepPlanner) -> Result<()> {
    let Some(to) = planner.pad_to() else { return Ok(()) };
    if to.layout.is_packed() != preparer.layout().is_packed() {
        let reason =
            format!("planned for {:?}, but the layout of the preparer is {:?}", to.layout, preparer.layout());
        return Err(Error::Config { setting: "pad_to_tokens", reason });
    }
    if preparer.has_buckets() {
        let reason = "microbatches of a fixed length have no buckets and no multiples: drop one of the two";
        return Err(Error::Config { setting: "pad_to_tokens", reason: reason.into() });
    }
    *preparer = preparer.limited(Some(to.room()), Some(to.tokens as usize));
    Ok(())
}

/// Returns the video sampling that all indexes share.
fn common_video_sampling(datasets: &[Dataset]) -> Result<Option<VideoSampling>> {
    let mut samplings = datasets.iter().filter_map(|set| set.index().video_sampling());
    let first = samplings.next();
    if samplings.any(|other| Some(other) != first) {
        let reason = "the indexes of the datasets were made for different frames of videos".into();
        return Err(Error::Config { setting: "video_sampling", reason });
    }
    Ok(first)
}
