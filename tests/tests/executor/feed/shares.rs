//! Checks which part of the dataset each rank reads.

use dflop_executor::models::ModuleKind;
use dflop_loader::flow::LoaderStage;

use super::corpus::{Corpus, Family, mixed};
use super::job::{RankSeen, Setting, run};

/// Samples and bytes that a rank read.
fn read(rank: &RankSeen) -> (u64, u64) {
    let stage = rank.metrics.stage(LoaderStage::Read);
    (stage.items, stage.bytes)
}

#[test]
fn ranks_of_the_llm_read_texts_of_their_own_samples_and_no_image() {
    for family in [Family::InternVl, Family::LlavaOneVision, Family::Qwen25Vl] {
        let corpus = Corpus::new(family, &mixed(24));
        let ran = run(&corpus, &Setting { encoder: [2, 1], llm: [2, 2], ..Setting::new(12, 2) });
        for rank in ran.ranks.iter().filter(|rank| rank.place.module == ModuleKind::Llm) {
            let own = ran.steps.iter().flat_map(|step| {
                let places = step.ranks[rank.place.replica].iter().flatten();
                places.map(|&place| step.samples[place as usize])
            });
            let own: Vec<u64> = own.collect();
            let texts = own.iter().map(|&sample| corpus.bytes(sample, Some("txt"))).sum();
            assert_eq!(read(rank), (own.len() as u64, texts), "{family:?}: {:?}", rank.place);
        }
    }
}

#[test]
fn replicas_of_an_encoder_share_the_samples_with_its_media() {
    for family in Family::ALL {
        let corpus = Corpus::new(family, &mixed(24));
        for replicas in [1, 2, 3] {
            let setting = Setting { encoder: [replicas, 2], llm: [2, 1], ..Setting::new(12, 2) };
            let ran = run(&corpus, &setting);
            let with_media: Vec<u64> = (0..24).filter(|&sample| corpus.has_media(sample)).collect();
            let bytes: u64 = with_media.iter().map(|&sample| corpus.bytes(sample, None)).sum();
            let encoders: Vec<&RankSeen> =
                ran.ranks.iter().filter(|rank| rank.place.module != ModuleKind::Llm).collect();
            assert_eq!(encoders.len(), 2 * replicas);
            // Both stages in a replica know the replica's media.
            let sum =
                |figure: fn((u64, u64)) -> u64| encoders.iter().map(|rank| figure(read(rank))).sum::<u64>();
            assert_eq!(sum(|(samples, _)| samples), 2 * with_media.len() as u64, "{family:?}");
            assert_eq!(sum(|(_, bytes)| bytes), 2 * bytes, "{family:?}");
            assert!(encoders.iter().all(|rank| read(rank).0 > 0), "{family:?}: {replicas} replicas share");
        }
    }
}
