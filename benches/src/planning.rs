//! Creates planning inputs: sample shapes, a profile from a formula, and partition problems with the
//! gaps that a search has to reach.

use std::fmt::Write;

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};
use dflop_costmodel::{ImageSize, Profile, SampleShape};

use crate::Random;
use crate::families::Family;

/// Maximum encoder time per item. No item may exceed the group mean, or that single time would be the lower
/// bound and a search would have nothing to do.
const ENCODER_NS_MAX: f64 = 150e6;
/// Maximum LLM time for a text: contexts are finite.
const TEXT_NS_MAX: f64 = 250e6;
/// Batches and lengths for each module in the profile.
const GRIDS: [(&str, &[u32], &[u32]); 3] = [
    ("vision", &[1, 2, 4, 8, 16, 32, 64], &[729, 1024]),
    ("audio", &[1, 2, 4, 8, 16, 32, 64], &[1500]),
    ("llm", &[1], &[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384]),
];

/// Creates a text-only sample.
#[must_use]
pub fn text() -> SampleShape {
    SampleShape { text_tokens: 700, target_tokens: 300, ..SampleShape::default() }
}

/// Creates a sample with text and `images` images with different sizes.
#[must_use]
pub fn with_images(images: usize) -> SampleShape {
    let mut random = Random::new(11);
    SampleShape { images: (0..images).map(|_| image_size(&mut random)).collect(), ..text() }
}

/// Draws samples as in instruction data: a fifth text only, most with one image, some with up to eight.
#[must_use]
pub fn mixture(samples: usize) -> Vec<SampleShape> {
    let mut random = Random::new(12);
    let sample = |_| {
        let text_tokens = random.log_normal(250.0, 0.9) as u32;
        let images = match random.below(10) {
            0 | 1 => 0,
            2..=8 => 1,
            _ => 2 + random.below(7),
        };
        let images = (0..images).map(|_| image_size(&mut random)).collect();
        SampleShape { text_tokens, target_tokens: text_tokens / 2, images, ..SampleShape::default() }
    };
    (0..samples).map(sample).collect()
}

/// Draws an image size; half of the images are below 640 x 480.
pub(crate) fn image_size(random: &mut Random) -> ImageSize {
    let mut side = |median| random.log_normal(median, 0.45).clamp(64.0, 2_048.0) as u32;
    ImageSize { width: side(640.0), height: side(480.0) }
}

/// Creates a profile for all modules: launch costs, linear work, attention.
///
/// # Panics
/// Never: the text is a profile.
#[must_use]
pub fn formula() -> Profile {
    let mut text = "# dflop-profile: 1\n# device: formula\n\
                    module,part,phase,tp,layers,batch,tokens,microseconds\n"
        .to_owned();
    for (module, batches, lengths) in GRIDS {
        for (batch, tokens) in
            batches.iter().flat_map(|batch| lengths.iter().map(move |tokens| (batch, tokens)))
        {
            let (b, s) = (f64::from(*batch), f64::from(*tokens));
            for (phase, factor) in [("forward", 1.0), ("backward", 2.0)] {
                for (part, layers, microseconds) in [
                    ("linear", 1, 30.0 + 0.05 * b * s),
                    ("linear", 3, 3.0 * (30.0 + 0.05 * b * s)),
                    ("attention", 1, 5.0 + 2e-5 * b * s * s),
                    ("ends", 0, 20.0 + 0.1 * b * s),
                ] {
                    let time = microseconds * factor;
                    // Writing to a string never fails.
                    let _ = writeln!(text, "{module},{part},{phase},1,{layers},{batch},{tokens},{time}");
                }
            }
        }
    }
    Profile::parse([("formula.csv", text.as_str())]).expect("the text is a profile")
}

/// Creates a global batch with `items` samples for `groups` microbatches: log-normal encoder and LLM times, a
/// fifth of the samples without encoder work.
///
/// # Panics
/// If there are fewer items than groups, or no group.
#[must_use]
pub fn instance(items: usize, groups: usize) -> Instance {
    let mut random = Random::new(21);
    let times = |_| {
        let encoder_ns =
            if random.below(5) == 0 { 0.0 } else { random.log_normal(30e6, 0.7).min(ENCODER_NS_MAX) };
        // The LLM reads the encoder tokens, so the LLM time follows the encoder time, plus the text.
        let llm_ns = 0.8 * encoder_ns + random.log_normal(40e6, 0.9).min(TEXT_NS_MAX);
        [encoder_ns as u64, llm_ns as u64]
    };
    Instance::new(groups, 2, (0..items).flat_map(times).collect()).expect("each group gets an item")
}

/// Gap that a search has to reach on a problem family at a single size.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Item family.
    pub family: Family,
    /// Number of items.
    pub items: usize,
    /// Number of groups.
    pub groups: usize,
    /// Gap to reach: makespan over lower bound, minus 1.
    pub gap: f64,
}

impl Target {
    /// Returns all targets; `benches/README.md` lists the time that each may take.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut targets = Vec::new();
        for family in Family::REALISTIC {
            for (items, groups, gap) in
                [(512, 64, 1e-4), (2_048, 128, 5e-4), (8_192, 1_024, 6e-3), (8_192, 1_024, 1e-4)]
            {
                targets.push(Self { family, items, groups, gap });
            }
        }
        for (items, groups) in [(128, 16), (512, 64)] {
            targets.push(Self { family: Family::Planted, items, groups, gap: 1e-3 });
        }
        targets.push(Self { family: Family::Opposed, items: 512, groups: 64, gap: 1e-4 });
        for family in [Family::Giant, Family::Pareto, Family::EqualOdd] {
            targets.push(Self { family, items: 512, groups: 64, gap: 0.0 });
        }
        targets
    }

    /// Returns the instance and the minimum work units, doubled in every try, that reach the gap; `None` if
    /// no try does.
    #[must_use]
    pub fn reached(&self) -> Option<(Instance, u64)> {
        let instance = self.family.instance(self.items, self.groups, 0);
        let reaches = |work: &u64| {
            let found = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(*work));
            found.is_ok_and(|found| found.gap() <= self.gap)
        };
        let work = std::iter::once(0).chain((8..22).map(|power| 1 << power)).find(reaches)?;
        Some((instance, work))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_has_work_at_every_measured_size() {
        for (items, groups) in [(512, 64), (2_048, 128), (8_192, 1_024)] {
            let found = balance(
                &instance(items, groups),
                Strategy::SEARCH,
                &Caps::default(),
                &mut Budget::work(20_000),
            );
            let found = found.unwrap();
            assert!(found.work_spent >= 20_000, "{items} items: {} units", found.work_spent);
        }
    }

    #[test]
    fn every_target_is_within_reach() {
        for target in Target::all() {
            assert!(target.reached().is_some(), "{target:?}");
        }
    }
}
