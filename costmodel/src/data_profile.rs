//! The data profile: how shapes, tokens and predicted costs are spread over a data set.
//!
//! Values are kept, so quantiles are exact; a sample takes a few dozen bytes.

use serde::Serialize;

use crate::module::Module;
use crate::predict::{CostModel, SampleCost};
use crate::shape::SampleShape;

/// Collects samples and summarises them.
#[derive(Debug, Clone)]
pub struct DataProfile {
    modules: Vec<Module>,
    columns: Vec<(String, Vec<f64>)>,
}

/// How one quantity is spread.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Quantiles {
    /// Number of values.
    pub n: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Least value.
    pub min: f64,
    /// 5 % of the values are at most this.
    pub p5: f64,
    /// First quartile.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// Third quartile.
    pub p75: f64,
    /// 95 % of the values are at most this.
    pub p95: f64,
    /// 99 % of the values are at most this.
    pub p99: f64,
    /// Greatest value.
    pub max: f64,
}

/// Values counted in classes of equal width.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Histogram {
    /// Where the first class begins.
    pub min: f64,
    /// Where the last class ends.
    pub max: f64,
    /// Values in each class.
    pub counts: Vec<u64>,
}

impl DataProfile {
    /// Starts a profile for the modules of a model.
    #[must_use]
    pub fn new(model: &CostModel) -> Self {
        let modules = model.modules().to_vec();
        let fixed =
            ["image_width", "image_height", "images", "audio_seconds", "text_tokens", "target_tokens"];
        let fixed = fixed.into_iter().chain(["encoder_items", "encoder_tokens", "tokens"]).map(str::to_owned);
        let costs = modules.iter().map(|module| format!("{module}_cost_seconds"));
        let columns = fixed.chain(costs).map(|name| (name, Vec::new())).collect();
        Self { modules, columns }
    }

    /// Adds a sample. Widths, heights and seconds are counted per medium, the rest per sample.
    pub fn add(&mut self, shape: &SampleShape, cost: &SampleCost) {
        for image in &shape.images {
            self.push(0, f64::from(image.width));
            self.push(1, f64::from(image.height));
        }
        self.push(2, shape.images.len() as f64);
        for clip in &shape.audio {
            self.push(3, clip.frames as f64 / f64::from(clip.sample_rate_hz.max(1)));
        }
        let counts =
            [shape.text_tokens, shape.target_tokens, cost.encoder_items, cost.encoder_tokens, cost.tokens];
        for (column, count) in (4..).zip(counts) {
            self.push(column, f64::from(count));
        }
        for (column, ns) in (9..).zip(cost.module_ns.as_slice()) {
            self.push(column, *ns as f64 / 1e9);
        }
    }

    /// Returns name, quantiles and a histogram of every quantity that has a value.
    ///
    /// - `classes`: number of classes of each histogram, at least 1
    ///
    /// # Panics
    /// If `classes` is 0.
    #[must_use]
    pub fn summarize(&self, classes: usize) -> Vec<(String, Quantiles, Histogram)> {
        assert!(classes > 0, "a histogram has at least one class");
        let filled = self.columns.iter().filter(|(_, values)| !values.is_empty());
        filled.map(|(name, values)| (name.clone(), quantiles(values), histogram(values, classes))).collect()
    }

    /// Returns predicted seconds of all encoders over those of the LLM, 0 where there is no LLM time.
    #[must_use]
    pub fn encoder_to_llm_ratio(&self) -> f64 {
        let total = |module: usize| self.columns[9 + module].1.iter().sum::<f64>();
        let totals: Vec<f64> = (0..self.modules.len()).map(total).collect();
        match totals.split_last() {
            Some((llm, encoders)) if *llm > 0.0 => encoders.iter().sum::<f64>() / llm,
            _ => 0.0,
        }
    }

    fn push(&mut self, column: usize, value: f64) {
        self.columns[column].1.push(value);
    }
}

/// Quantile `q` is the least value that at least `q * n` values do not exceed.
fn quantiles(values: &[f64]) -> Quantiles {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
    Quantiles {
        n: sorted.len(),
        mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
        min: at(0),
        p5: at(5),
        p25: at(25),
        p50: at(50),
        p75: at(75),
        p95: at(95),
        p99: at(99),
        max: at(100),
    }
}

fn histogram(values: &[f64], classes: usize) -> Histogram {
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut counts = vec![0; classes];
    for value in values {
        let place = if max > min { (value - min) / (max - min) * classes as f64 } else { 0.0 };
        counts[(place as usize).min(classes - 1)] += 1;
    }
    Histogram { min, max, counts }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;
    use crate::predict::DeviceRate;
    use crate::shape::ImageSize;

    #[test]
    fn quantiles_of_one_to_hundred_are_their_own_percent() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let quantiles = quantiles(&values);
        let shown =
            [quantiles.min, quantiles.p5, quantiles.p50, quantiles.p99, quantiles.max, quantiles.mean];
        assert_eq!(shown.map(|value| (value * 10.0) as u32), [10, 50, 500, 990, 1000, 505]);
    }

    #[test]
    fn a_histogram_counts_every_value_once() {
        let histogram = histogram(&[0.0, 1.0, 2.0, 3.0, 4.0], 2);
        assert_eq!((histogram.min as u32, histogram.max as u32, histogram.counts), (0, 4, vec![2, 3]));
    }

    #[test]
    fn a_quantity_without_values_is_left_out_and_the_ratio_weighs_modules() {
        let spec = ModelSpec::preset("omni-7b").unwrap();
        let model = CostModel::new(spec, DeviceRate::preset("h100").unwrap());
        let mut profile = DataProfile::new(&model);
        let image = ImageSize { width: 640, height: 480 };
        let shape = SampleShape { text_tokens: 20, images: vec![image], ..SampleShape::default() };
        let cost = model.annotate(&shape).unwrap();
        profile.add(&shape, &cost);
        let names: Vec<_> = profile.summarize(4).into_iter().map(|(name, ..)| name).collect();
        assert!(names.contains(&"image_width".to_owned()) && !names.contains(&"audio_seconds".to_owned()));
        let [vision, _, llm] = *cost.module_ns.as_slice() else { panic!("three modules") };
        assert!((profile.encoder_to_llm_ratio() - vision as f64 / llm as f64).abs() < 1e-12);
    }
}
