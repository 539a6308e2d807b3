//! Summarizes a dataset's shapes, tokens and predicted costs.
//!
//! Memory is bounded for any number of samples: quantities go into [`QuantileSketch`]es, whose quantiles are
//! off by at most [`crate::SKETCH_ERROR`]; only the most expensive samples are kept. Statistics for parts
//! merge to the statistics for the whole dataset. The paper calls them the data profile.
//!
//! # Source
//! An et al., PACMMOD 2026, arXiv:2603.25120, section 3.2.1: empirical shape histograms over random samples.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Serialize;

use crate::predict::{CostModel, SampleCost};
use crate::quantiles::{Histogram, QuantileSketch, Quantiles};
use crate::{Module, SampleShape};

/// Maximum number of samples listed as outliers.
const OUTLIERS_MAX: usize = 20;
/// Interquartile ranges above the third quartile where outliers start: Tukey's "far out".
const FENCE_RANGES: f64 = 3.0;

/// Names of the quantities before module costs, in column order.
const FIXED: [&str; 12] = [
    "image_width",
    "image_height",
    "images",
    "audio_seconds",
    "text_tokens",
    "target_tokens",
    "encoder_items",
    "encoder_tokens",
    "tokens",
    "video_frames",
    "encoder_to_llm_ratio",
    "cost_seconds",
];
const RATIO: usize = 10;
const COST: usize = 11;

/// Collects samples and summarizes them.
#[derive(Debug, Clone)]
pub struct DatasetStatistics {
    modules: Vec<Module>,
    names: Vec<String>,
    columns: Vec<QuantileSketch>,
    module_ns: Vec<u128>,
    /// The most expensive samples, with the least expensive on top.
    most_expensive: BinaryHeap<Reverse<ExpensiveSample>>,
}

/// Sample among the most expensive; in case of equal costs, the sample with the lower number ranks higher.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ExpensiveSample {
    total_ns: u64,
    number: Reverse<u64>,
    module_ns: Vec<u64>,
}

/// Sample that costs far more than others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outlier {
    /// Sample number, as given to [`DatasetStatistics::add`].
    pub number: u64,
    /// Predicted seconds over all modules.
    pub cost_seconds: f64,
    /// Cost divided by the median cost.
    pub times_median: f64,
    /// Predicted seconds per module.
    pub module_seconds: Vec<f64>,
}

impl DatasetStatistics {
    /// Creates empty statistics for a model's modules.
    #[must_use]
    pub fn new(model: &CostModel) -> Self {
        let modules = model.modules().to_vec();
        let costs = modules.iter().map(|module| format!("{module}_cost_seconds"));
        let names: Vec<String> = FIXED.into_iter().map(str::to_owned).chain(costs).collect();
        Self {
            columns: vec![QuantileSketch::default(); names.len()],
            module_ns: vec![0; modules.len()],
            modules,
            names,
            most_expensive: BinaryHeap::new(),
        }
    }

    /// Adds a sample. Widths, heights, seconds and frames are counted per medium, the rest per sample.
    ///
    /// - `number`: identifies the sample if it is an [`Outlier`]
    pub fn add(&mut self, number: u64, shape: &SampleShape, cost: &SampleCost) {
        for image in &shape.images {
            self.columns[0].insert(f64::from(image.width));
            self.columns[1].insert(f64::from(image.height));
        }
        self.columns[2].insert(shape.images.len() as f64);
        for clip in &shape.audio {
            self.columns[3].insert(clip.frames as f64 / f64::from(clip.sample_rate_hz.max(1)));
        }
        let counts =
            [shape.text_tokens, shape.target_tokens, cost.encoder_items, cost.encoder_tokens, cost.tokens];
        for (column, count) in (4..).zip(counts) {
            self.columns[column].insert(f64::from(count));
        }
        for video in &shape.videos {
            self.columns[9].insert(f64::from(video.frames));
        }
        self.add_times(number, cost.module_ns.as_slice());
    }

    /// Adds the samples from other statistics for the same model.
    pub fn merge(&mut self, other: Self) {
        self.columns.iter_mut().zip(&other.columns).for_each(|(own, added)| own.merge(added));
        self.module_ns.iter_mut().zip(&other.module_ns).for_each(|(own, added)| *own += added);
        for Reverse(sample) in other.most_expensive {
            self.keep(sample);
        }
    }

    /// Returns name, quantiles and histogram for every quantity that has a value.
    ///
    /// - `classes`: number of classes in each histogram, at least 1
    ///
    /// # Panics
    /// If `classes` is 0.
    #[must_use]
    pub fn summarize(&self, classes: usize) -> Vec<(String, Quantiles, Histogram)> {
        let filled = self.names.iter().zip(&self.columns).filter(|(_, sketch)| !sketch.is_empty());
        filled.map(|(name, sketch)| (name.clone(), sketch.quantiles(), sketch.histogram(classes))).collect()
    }

    /// Returns predicted seconds for all encoders divided by predicted seconds for the LLM, over all samples;
    /// 0 without LLM time.
    #[must_use]
    pub fn encoder_to_llm_ratio(&self) -> f64 {
        match self.module_ns.split_last() {
            Some((llm, encoders)) if *llm > 0 => encoders.iter().sum::<u128>() as f64 / *llm as f64,
            _ => 0.0,
        }
    }

    /// Returns the most expensive samples above the fence, at most 20, descending; and the total number above
    /// it.
    ///
    /// The fence is 3 interquartile ranges above the third quartile of predicted cost.
    ///
    /// # Source
    /// Tukey, "Exploratory Data Analysis", 1977: values that are "far out".
    #[must_use]
    pub fn outliers(&self) -> (Vec<Outlier>, u64) {
        let costs = &self.columns[COST];
        let [first, third] = [25, 75].map(|percent| costs.quantile(percent));
        let fence_seconds = third + FENCE_RANGES * (third - first);
        let mut named = self.most_expensive();
        named.retain(|sample| sample.cost_seconds > fence_seconds);
        // With fewer outliers than are kept, the kept samples are exact; the sketch counts the rest within
        // its error.
        let above = costs.above(fence_seconds);
        let count =
            if named.len() < OUTLIERS_MAX { named.len() as u64 } else { above.max(named.len() as u64) };
        (named, count)
    }

    /// Returns the most expensive samples, at most 20, descending, whether or not they are outliers.
    #[must_use]
    pub fn most_expensive(&self) -> Vec<Outlier> {
        let median = self.columns[COST].quantile(50);
        let mut most_expensive: Vec<&ExpensiveSample> =
            self.most_expensive.iter().map(|Reverse(sample)| sample).collect();
        most_expensive.sort_by(|a, b| b.cmp(a));
        let outlier = |sample: &ExpensiveSample| Outlier {
            number: sample.number.0,
            cost_seconds: seconds(sample.total_ns),
            times_median: if median > 0.0 { seconds(sample.total_ns) / median } else { 0.0 },
            module_seconds: sample.module_ns.iter().copied().map(seconds).collect(),
        };
        most_expensive.into_iter().map(outlier).collect()
    }

    /// Returns the modules whose costs are collected.
    #[must_use]
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    fn add_times(&mut self, number: u64, module_ns: &[u64]) {
        let total_ns = module_ns.iter().fold(0_u64, |sum, ns| sum.saturating_add(*ns));
        for (module, ns) in module_ns.iter().enumerate() {
            self.columns[FIXED.len() + module].insert(seconds(*ns));
            self.module_ns[module] += u128::from(*ns);
        }
        if let Some((llm, encoders)) = module_ns.split_last()
            && *llm > 0
        {
            let encoders_ns = encoders.iter().fold(0_u64, |sum, ns| sum.saturating_add(*ns));
            self.columns[RATIO].insert(encoders_ns as f64 / *llm as f64);
        }
        self.columns[COST].insert(seconds(total_ns));
        let is_expensive = self.most_expensive.len() < OUTLIERS_MAX
            || self
                .most_expensive
                .peek()
                .is_some_and(|Reverse(least)| (total_ns, Reverse(number)) > (least.total_ns, least.number));
        if is_expensive {
            self.keep(ExpensiveSample { total_ns, number: Reverse(number), module_ns: module_ns.to_vec() });
        }
    }

    fn keep(&mut self, sample: ExpensiveSample) {
        self.most_expensive.push(Reverse(sample));
        if self.most_expensive.len() > OUTLIERS_MAX {
            self.most_expensive.pop();
        }
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ImageSize;
    use crate::model::ModelSpec;
    use crate::predict::DeviceRate;

    fn omni() -> CostModel {
        let spec = ModelSpec::preset("omni-7b").unwrap();
        CostModel::new(spec, DeviceRate::preset("h100").unwrap())
    }

    fn text(tokens: u32) -> SampleShape {
        SampleShape { text_tokens: tokens, ..SampleShape::default() }
    }

    /// Collects texts with numbers from `first` on.
    fn profile(model: &CostModel, first: u64, lengths: &[u32]) -> DatasetStatistics {
        let mut profile = DatasetStatistics::new(model);
        for (number, tokens) in (first..).zip(lengths) {
            let shape = text(*tokens);
            profile.add(number, &shape, &model.predict(&shape).unwrap());
        }
        profile
    }

    #[test]
    fn a_quantity_without_values_is_left_out_and_the_ratio_weighs_modules() {
        let model = omni();
        let mut profile = DatasetStatistics::new(&model);
        let image = ImageSize { width: 640, height: 480 };
        let shape = SampleShape { text_tokens: 20, images: vec![image], ..SampleShape::default() };
        let cost = model.predict(&shape).unwrap();
        profile.add(0, &shape, &cost);
        let names: Vec<_> = profile.summarize(4).into_iter().map(|(name, ..)| name).collect();
        assert!(names.contains(&"image_width".to_owned()) && !names.contains(&"audio_seconds".to_owned()));
        let [vision, _, llm] = *cost.module_ns.as_slice() else { panic!("three modules") };
        assert!((profile.encoder_to_llm_ratio() - vision as f64 / llm as f64).abs() < 1e-12);
    }

    #[test]
    fn far_out_samples_are_named_the_most_expensive_first() {
        let mut lengths: Vec<u32> = (0..500).map(|at| 100 + at % 50).collect();
        lengths[77] = 60_000;
        lengths[400] = 90_000;
        let (outliers, count) = profile(&omni(), 0, &lengths).outliers();
        assert_eq!(outliers.iter().map(|outlier| outlier.number).collect::<Vec<_>>(), [400, 77]);
        assert_eq!(count, 2);
        assert!(outliers[0].times_median > 100.0 && outliers[0].module_seconds.len() == 3);
        assert!(profile(&omni(), 0, &[100; 300]).outliers().0.is_empty());
    }

    #[test]
    fn profiles_of_parts_add_up() {
        let model = omni();
        let lengths: Vec<u32> = (0..900).map(|at| 50 + at * at % 7_919).collect();
        let whole = profile(&model, 0, &lengths);
        let mut parts = profile(&model, 0, &lengths[..400]);
        parts.merge(profile(&model, 400, &lengths[400..]));
        assert_eq!(parts.outliers(), whole.outliers());
        assert!((parts.encoder_to_llm_ratio() - whole.encoder_to_llm_ratio()).abs() < 1e-12);
        for ((name, a, _), (_, b, _)) in parts.summarize(8).into_iter().zip(whole.summarize(8)) {
            assert_eq!(a.n, b.n, "{name}");
            assert!((a.p95 - b.p95).abs() <= 1e-9 * b.p95, "{name}");
        }
    }
}
