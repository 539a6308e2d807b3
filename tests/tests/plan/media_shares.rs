//! Checks the microbatch media shares in a tensor-parallel group.

use std::collections::BTreeSet;

use dflop_balancer::Strategy;
use dflop_costmodel::{Module, SampleShape};
use dflop_loader::media::Modality;
use dflop_loader::{ExchangedMedium, SampleMedium};
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

#[test]
fn ranks_that_exchange_media_encode_equal_shares_of_all_media() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    // Dealt without regard to cost, so that ranks have unequal media.
    let builder = loaders::builder(data.index(), 24, 4).strategy(Strategy::ROUND_ROBIN);
    let planner = builder.microbatches(2).build().unwrap();
    let plan = planner.plan(0).unwrap();
    let mut moved = 0;
    for microbatch in 0..2 {
        for ranks in [0..4, 0..2, 2..4, 3..4] {
            let exchange = || planner.media_exchange(&plan, microbatch, ranks.clone(), Module::Vision);
            let media = exchange();
            assert_eq!(media, exchange());
            assert!(media.is_sorted_by_key(|medium| medium.rank));
            let own =
                ranks.clone().flat_map(|rank| planner.media_shares(&plan, [rank, microbatch], 1).concat());
            let expected: BTreeSet<SampleMedium> =
                own.filter(|medium| medium.modality != Modality::Audio).collect();
            let found: BTreeSet<SampleMedium> = media.iter().map(|medium| medium.medium).collect();
            assert_eq!((&found, found.len()), (&expected, media.len()));
            let mut loads = vec![0; ranks.len()];
            for ExchangedMedium { medium, rank, encoder_rank, items, grid } in &media {
                assert!(ranks.contains(rank) && ranks.contains(encoder_rank));
                assert!(plan.ranks[*rank][microbatch].contains(&medium.place));
                assert!(*items > 0 && grid.is_none_or(|grid| grid.iter().product::<u64>() == *items));
                loads[encoder_rank - ranks.start] += medium.cost_ns;
                moved += usize::from(rank != encoder_rank);
            }
            let longest = media.iter().map(|medium| medium.medium.cost_ns).max().unwrap_or(0);
            let mean = loads.iter().sum::<u64>() / loads.len() as u64;
            assert!(loads.iter().all(|load| *load <= mean + longest), "{loads:?}");
        }
        assert!(planner.media_exchange(&plan, microbatch, 0..4, Module::Llm).is_empty());
    }
    assert!(moved > 0);
}
