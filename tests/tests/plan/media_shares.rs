//! Checks the microbatch media shares in a tensor-parallel group.

use dflop_costmodel::SampleShape;
use dflop_loader::SampleMedium;
use dflop_loader::media::Modality;
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders;

#[test]
fn every_medium_of_a_microbatch_has_one_rank() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    let planner = loaders::builder(data.index(), 24, 2).microbatches(3).build().unwrap();
    let plan = planner.plan(0).unwrap();
    let (mut shape, mut media_in_all) = (SampleShape::default(), 0);
    for (rank, microbatches) in plan.ranks.iter().enumerate() {
        for (microbatch, places) in microbatches.iter().enumerate() {
            let shares = planner.media_shares(&plan, [rank, microbatch], 3);
            assert_eq!(shares, planner.media_shares(&plan, [rank, microbatch], 3));
            assert_eq!(shares.len(), 3);
            let mut found: Vec<SampleMedium> = shares.concat();
            found.sort_unstable();
            let mut expected = Vec::new();
            for &place in places {
                planner.row(plan.samples[place as usize]).read_shape(&mut shape);
                let counts = [
                    (Modality::Image, shape.images.len()),
                    (Modality::Video, shape.videos.len()),
                    (Modality::Audio, shape.audio.len()),
                ];
                for (kind, count) in counts {
                    expected.extend((0..count as u32).map(|index| (place, kind, index)));
                }
            }
            expected.sort_unstable();
            let names = found.iter().map(|medium| (medium.place, medium.modality, medium.index));
            assert!(names.eq(expected.iter().copied()), "{found:?} {expected:?}");
            assert!(found.iter().all(|medium| medium.cost_ns > 0));
            media_in_all += found.len();
            // The shares together cost the planned time, to the rounding of each medium.
            let of_samples: u64 = places
                .iter()
                .map(|place| plan.costs[*place as usize].module_ns.as_slice()[..2].iter().sum::<u64>())
                .sum();
            let of_media: u64 = found.iter().map(|medium| medium.cost_ns).sum();
            assert!(of_media.abs_diff(of_samples) <= 2 * found.len() as u64, "{of_media} {of_samples}");
        }
    }
    assert!(media_in_all > 12, "{media_in_all}");
}
