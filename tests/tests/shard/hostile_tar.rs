//! Checks archives with random damage: the two readers never panic and always agree.

use dflop_loader::shard::{MappedSamples, ShardItem, StreamedSamples};
use dflop_tests::tar::TarBytes;
use proptest::prelude::*;

const FIELD_BYTES_MAX: u64 = 4_096;

fn archive() -> Vec<u8> {
    TarBytes::new()
        .file("a.txt", b"some text")
        .file("a.jpg", &[1; 700])
        .pax(&[("path", "long/name.b.txt"), ("size", "600")])
        .file("x", &[2; 600])
        .gnu_long_name("another/long.name.bin")
        .file("y", &[3; 5_000])
        .empty("d/", b'5')
        .file("c.cls", b"3")
        .finish()
}

fn mapped(archive: &[u8]) -> Vec<ShardItem> {
    MappedSamples::new("s".into(), archive.to_vec().into(), FIELD_BYTES_MAX).collect()
}

fn streamed(archive: &[u8]) -> Vec<ShardItem> {
    dflop_tests::run(async {
        let mut samples = StreamedSamples::new("s".into(), archive, FIELD_BYTES_MAX);
        let mut items = Vec::new();
        while let Some(item) = samples.next().await {
            items.push(item);
        }
        items
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_damage_is_read_alike_from_memory_and_from_a_stream(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        length in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        let mut bytes = archive();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if is_cut {
            bytes.truncate(length.index(bytes.len()) + 1);
        }
        prop_assert_eq!(mapped(&bytes), streamed(&bytes));
    }

    #[test]
    fn a_sample_is_whole_or_not_delivered(length in any::<prop::sample::Index>()) {
        let whole = archive();
        let cut = &whole[..=length.index(whole.len())];
        let all = mapped(&whole);
        for item in mapped(cut) {
            if let ShardItem::Sample(sample) = item {
                let original = all.iter().find_map(|item| match item {
                    ShardItem::Sample(original) if original.key == sample.key => Some(original),
                    _ => None,
                });
                // Fields that the damage removed completely cannot be missed; delivered fields are complete.
                let original = original.expect("no sample is made up");
                for field in &sample.fields {
                    prop_assert_eq!(Some(field), original.field(&field.extension));
                }
            }
        }
    }
}
