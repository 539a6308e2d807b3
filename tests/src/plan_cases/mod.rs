//! Defines seven planning problems from the reference implementation, and other planners' rules for them.
//!
//! Profiles are synthetic, in the reference's file format, from FLOPs and A100 efficiency curves; shapes are
//! synthetic as well, or read from real tables where they are next to the checkout.

mod profile;
pub mod rules;

use std::path::PathBuf;

use dflop_costmodel::profile::{Profile, reference_model};
use dflop_planner::{Cluster, ItemSize, ModelCosts, ModelCostsBuilder, PlannedModel, Workload};

pub use profile::files;

/// A100 memory, in bytes.
pub const MEMORY_BYTES: u64 = 80 << 30;
/// Number of GPUs per node.
pub const NODE: u32 = 8;

/// Planning problem.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Name in messages.
    pub name: &'static str,
    /// `llavaov` or `internvl`.
    pub family: &'static str,
    /// Encoder name and size in file names.
    pub encoder: (&'static str, &'static str),
    /// LLM name and size in file names.
    pub llm: (&'static str, &'static str),
    /// Number of GPUs.
    pub gpus: u32,
    /// Number of samples in a global batch.
    pub global_batch: u32,
    /// Source of the shapes.
    pub shapes: Shapes,
}

/// Source of the shapes in a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shapes {
    /// Synthetic text, images and videos.
    Mixed,
    /// Document pages: `internvl_doc_mix.shapes.csv` if it is there.
    Documents,
    /// Mostly videos: `llavaov_real.shapes.csv` if it is there.
    Videos,
}

/// All cases.
pub const CASES: [Case; 7] = [
    case("siglip 400m + qwen2.5 7b", ("siglip", "400m"), ("qwen2.5", "7b"), (32, 128), Shapes::Mixed),
    case("siglip 400m + llama3 8b", ("siglip", "400m"), ("llama3", "8b"), (32, 256), Shapes::Mixed),
    case("siglip 400m + qwen2.5 32b", ("siglip", "400m"), ("qwen2.5", "32b"), (32, 256), Shapes::Mixed),
    case("siglip 6b + qwen2.5 72b", ("siglip", "6b"), ("qwen2.5", "72b"), (64, 256), Shapes::Mixed),
    case("siglip 1b + qwen2.5 7b", ("siglip", "1b"), ("qwen2.5", "7b"), (64, 512), Shapes::Mixed),
    case("internvit 6b + qwen2.5 72b", ("internvit", "6b"), ("qwen2.5", "72b"), (64, 256), Shapes::Documents),
    case(
        "siglip 400m + qwen2.5 7b, videos",
        ("siglip", "400m"),
        ("qwen2.5", "7b"),
        (32, 128),
        Shapes::Videos,
    ),
];

const fn case(
    name: &'static str,
    encoder: (&'static str, &'static str),
    llm: (&'static str, &'static str),
    (gpus, global_batch): (u32, u32),
    shapes: Shapes,
) -> Case {
    let family = if matches!(shapes, Shapes::Documents) { "internvl" } else { "llavaov" };
    Case { name, family, encoder, llm, gpus, global_batch, shapes }
}

/// Case with everything that planning needs.
#[derive(Debug)]
pub struct Prepared {
    /// Synthetic profile.
    pub profile: Profile,
    /// Encoder and LLM costs.
    pub model: PlannedModel,
    /// All samples.
    pub sizes: Vec<ItemSize>,
    /// GPUs and the links between them.
    pub cluster: Cluster,
}

impl Case {
    /// Creates profile, costs and shapes for the case.
    ///
    /// # Panics
    /// Never: synthetic profiles are complete.
    #[must_use]
    pub fn prepare(&self) -> Prepared {
        let files = files(self);
        let profile =
            Profile::parse(files.iter().map(|(name, text)| (name.as_str(), text.as_str()))).unwrap();
        let spec = reference_model(&profile).unwrap().unwrap();
        let model = ModelCostsBuilder::new(&spec).profile(&profile).build().unwrap();
        let cluster =
            Cluster { gpus: self.gpus, gpus_per_node: NODE, memory_bytes: MEMORY_BYTES, links: None };
        Prepared { model, sizes: self.shapes.sizes(), cluster, profile }
    }
}

impl Prepared {
    /// Returns the costs of the only encoder.
    #[must_use]
    pub fn encoder(&self) -> &ModelCosts {
        &self.model.encoders[0]
    }

    /// Draws the batches that plans are compared on.
    ///
    /// # Panics
    /// If there are no batches or no samples.
    #[must_use]
    pub fn workload(&self, global_batch: u32, batches: usize) -> Workload {
        Workload::draw(&self.sizes, global_batch, batches, 0).unwrap()
    }
}

impl Shapes {
    /// Returns the samples, synthetic where there is no table.
    #[must_use]
    pub fn sizes(self) -> Vec<ItemSize> {
        let file = match self {
            Self::Mixed => None,
            Self::Documents => Some("internvl_doc_mix.shapes.csv"),
            Self::Videos => Some("llavaov_real.shapes.csv"),
        };
        let read = file.and_then(|name| std::fs::read_to_string(shared().join("shapes").join(name)).ok());
        let real = read.map(|text| {
            let row = |line: &str| {
                let mut cells = line.split(',');
                let mut number = || cells.next()?.trim().parse().ok();
                Some(ItemSize::from_tiles(number()?, number()?))
            };
            text.lines().skip(1).filter_map(row).collect::<Vec<ItemSize>>()
        });
        real.unwrap_or_else(|| (0..6000).map(|at| self.synthetic(at)).collect())
    }

    /// Creates a synthetic sample: 729 tokens per image and 196 per frame, or 256 per page tile.
    fn synthetic(self, at: u32) -> ItemSize {
        let draw = |salt: u32, below: u32| {
            let mixed =
                (at.wrapping_mul(0x9e37_79b1) ^ salt.wrapping_mul(0x85eb_ca6b)).wrapping_mul(0xc2b2_ae35);
            (mixed ^ (mixed >> 15)).wrapping_mul(0x2c1b_3c6d) % below
        };
        let text = 40 + draw(1, 200) * draw(2, 200) / 70;
        let video = |frames: u32| ItemSize::from_tiles(frames, frames * 196 + 1 + text);
        let kind = draw(3, 100);
        match self {
            Self::Documents => {
                let tiles = [1, 3, 5, 5][draw(4, 4) as usize];
                ItemSize::from_tiles(tiles, tiles * 256 + 2 + text)
            }
            Self::Videos if kind < 70 => video(16 + draw(4, 17)),
            Self::Videos => ItemSize::from_tiles(5, 2200 + text),
            Self::Mixed if kind < 20 => ItemSize::from_tiles(0, 300 + text * 2),
            Self::Mixed if kind < 65 => {
                let tiles = 2 + draw(4, 9);
                ItemSize::from_tiles(tiles, tiles.min(10) * 729 + text)
            }
            Self::Mixed if kind < 80 => {
                let tiles = 2 + draw(4, 7);
                ItemSize::from_tiles(tiles, tiles * 730 + text)
            }
            Self::Mixed => video(8 + draw(4, 25)),
        }
    }
}

/// Returns the directory with real tables.
fn shared() -> PathBuf {
    std::env::var_os("DFLOP_SHARED")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from)
}
