//! Checks grouping, names and damage against webdataset 1.0.2, except where it loses data silently.
//!
//! Every case is read mapped, through a pipe, with gzip and with Zstandard: the four ways must agree.

use dflop_loader::shard::ShardItem;
use dflop_tests::dataset::{Compression, compress};
use dflop_tests::scan;
use dflop_tests::tar::{BLOCK, TarBytes};

/// Formats each sample as `key[ext ext]`, and each skipped sample as `!reason`.
fn shown(items: &[ShardItem]) -> Vec<String> {
    let show = |item: &ShardItem| match item {
        ShardItem::Sample(sample) => {
            let fields: Vec<_> = sample.fields.iter().map(|field| &*field.extension).collect();
            format!("{}[{}]", sample.key, fields.join(" "))
        }
        ShardItem::Skipped(skipped) => format!("!{}", skipped.reason),
    };
    items.iter().map(show).collect()
}

fn read_all_ways(archive: &[u8]) -> Vec<ShardItem> {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("plain.tar"), archive).unwrap();
    std::fs::write(path("gzip.tar"), compress(archive, Compression::Gzip)).unwrap();
    std::fs::write(path("zstd.tar"), compress(archive, Compression::Zstd)).unwrap();
    let mapped = scan(&path("plain.tar"));
    for other in [format!("pipe:cat {}", path("plain.tar")), path("gzip.tar"), path("zstd.tar")] {
        assert_eq!(shown(&scan(&other)), shown(&mapped), "{other}");
    }
    mapped
}

/// Writes entries without payloads; names that end in `/` are directories.
fn members(names: &[&str]) -> TarBytes {
    names.iter().fold(TarBytes::new(), |tar, name| match name.strip_suffix('/') {
        Some(_) => tar.empty(name, b'5'),
        None => tar.file(name, name.as_bytes()),
    })
}

#[test]
fn members_group_as_in_webdataset() {
    let table: &[(&[&str], &[&str])] = &[
        (&["a.jpg", "a.txt", "b.jpg"], &["a[jpg txt]", "b[jpg]"]),
        (&["a.b.c.jpg", "a.txt"], &["a[b.c.jpg txt]"]),
        (&["./a.jpg", "./a.txt"], &["./a[jpg txt]"]),
        (&["d.1/e.v2/a.seg.png", "d.1/e.v2/a.txt", "d.2/a.txt"], &["d.1/e.v2/a[seg.png txt]", "d.2/a[txt]"]),
        (&["README", "a.jpg", "LICENSE", "a.txt"], &["a[jpg txt]"]),
        (&[".DS_Store", "a.jpg", "._a.jpg", "a.txt"], &["a[jpg txt]"]),
        (&["d/.hid.jpg", "d/a.jpg"], &["d/[hid.jpg]", "d/a[jpg]"]),
        (
            &["__meta__", "__dir__/x.json", "__m__.json", "d/__m__", "a.jpg", "__x.jpg"],
            &["__m__[json]", "a[jpg]", "__x[jpg]"],
        ),
        (&["a.JPG", "a.Txt"], &["a[jpg txt]"]),
        (&["A.jpg", "a.txt"], &["A[jpg]", "a[txt]"]),
        (&["a.jpg", "b.jpg", "a.txt"], &["a[jpg]", "b[jpg]", "a[txt]"]),
        (&["a.jpg", "b.jpg", "a.txt", "b.txt"], &["a[jpg]", "b[jpg]", "a[txt]", "b[txt]"]),
        (&["a.", "a.jpg"], &["a[ jpg]"]),
        (&["a bé.jpg", "a bé.txt"], &["a bé[jpg txt]"]),
        (&["../../x.jpg", "../../x.txt"], &["../../x[jpg txt]"]),
        (&["a.jpg", "a.JPG", "b.jpg"], &["!duplicate field `jpg`", "b[jpg]"]),
        (&["a.jpg", "a.jpg", "b.jpg"], &["!duplicate field `jpg`", "b[jpg]"]),
        (&["README"], &[]),
    ];
    for (names, expected) in table {
        assert_eq!(shown(&read_all_ways(&members(names).finish())), *expected, "{names:?}");
    }
}

#[test]
fn what_is_no_regular_file_is_passed_over_and_splits_nothing() {
    let archive = TarBytes::new()
        .empty("d/", b'5')
        .file("a.jpg", b"1")
        .empty("a.lnk", b'2')
        .empty("a.hl", b'1')
        .empty("a.dev", b'3')
        .file("a.txt", b"2");
    assert_eq!(shown(&read_all_ways(&archive.finish())), ["a[jpg txt]"]);
}

#[test]
fn empty_members_stay_as_zero_bytes() {
    let items = read_all_ways(&TarBytes::new().file("a.jpg", b"").file("a.txt", b"x").finish());
    let ShardItem::Sample(sample) = &items[0] else { panic!("{items:?}") };
    assert_eq!(sample.field("jpg").unwrap().payload.as_deref(), Some(b"".as_slice()));
}

#[test]
fn long_names_work_in_gnu_and_pax() {
    let stem = format!("{}/{}", "d".repeat(150), "k".repeat(60));
    let name = |extension: &str| format!("{stem}.{extension}");
    let gnu = TarBytes::new()
        .gnu_long_name(&name("jpg"))
        .file("x", b"1")
        .gnu_long_name(&name("txt"))
        .file("x", b"2");
    let pax = TarBytes::new()
        .pax(&[("path", &name("jpg"))])
        .file("x", b"1")
        .pax(&[("path", &name("txt"))])
        .file("x", b"2");
    for archive in [gnu, pax] {
        assert_eq!(shown(&read_all_ways(&archive.finish())), [format!("{stem}[jpg txt]")]);
    }
    let unicode = TarBytes::new()
        .pax(&[("path", "日本.jpg")])
        .file("x.jpg", b"1")
        .pax(&[("path", "日本.txt")])
        .file("y", b"");
    assert_eq!(shown(&read_all_ways(&unicode.finish())), ["日本[jpg txt]"]);
}

#[test]
fn a_pax_size_overrides_the_header_so_nothing_is_smuggled() {
    let hidden = TarBytes::new().file("smuggled.txt", b"x").without_end();
    let archive = TarBytes::new()
        .pax(&[("size", &hidden.len().to_string())])
        .member("a.bin", b'0', 0, &hidden)
        .file("b.txt", b"y");
    assert_eq!(shown(&read_all_ways(&archive.finish())), ["a[bin]", "b[txt]"]);
}

#[test]
fn a_pax_header_with_a_wrong_length_is_an_error() {
    let archive =
        TarBytes::new().file("a.txt", b"1").member("h", b'x', 9, b"99 path=b").file("b.txt", b"2").finish();
    assert_eq!(shown(&read_all_ways(&archive)), ["a[txt]", "!bad PAX record length"]);
}

#[test]
fn an_archive_without_an_end_mark_is_fine() {
    let archive = members(&["a.jpg", "b.jpg"]).without_end();
    assert_eq!(shown(&read_all_ways(&archive)), ["a[jpg]", "b[jpg]"]);
}

#[test]
fn an_empty_file_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("empty.tar");
    std::fs::write(&path, b"").unwrap();
    assert_eq!(shown(&scan(path.to_str().unwrap())), ["!the file is empty"]);
}

#[test]
fn a_truncated_member_is_named_and_the_samples_before_it_are_delivered() {
    let mut archive = TarBytes::new().file("a.bin", &[1; 5_000]).file("b.bin", &[2; 5_000]).finish();
    archive.truncate(7_500);
    let items = read_all_ways(&archive);
    assert_eq!(shown(&items), ["a[bin]", "!truncated: 3644 bytes are missing"]);
    let ShardItem::Skipped(skipped) = &items[1] else { panic!("{items:?}") };
    let place = (skipped.offset, skipped.key.as_deref(), skipped.field.as_deref());
    assert_eq!(place, (5_632, Some("b"), Some("bin")));
}

#[test]
fn a_truncated_member_takes_its_own_sample_along() {
    let mut archive = members(&["a.jpg", "b.jpg"]).file("b.txt", &[1; 600]).without_end();
    archive.truncate(4 * BLOCK + BLOCK + 100);
    assert_eq!(shown(&read_all_ways(&archive)), ["a[jpg]", "!truncated: 500 bytes are missing"]);
}

#[test]
fn a_bad_checksum_ends_the_shard_aloud() {
    let mut archive = members(&["a.jpg", "b.jpg"]).finish();
    archive[2 * BLOCK + 5] ^= 1;
    let items = read_all_ways(&archive);
    assert_eq!(shown(&items), ["a[jpg]", "!bad checksum"]);
    let ShardItem::Skipped(skipped) = &items[1] else { panic!("{items:?}") };
    assert_eq!(skipped.offset, 2 * BLOCK as u64);
}

#[test]
fn only_the_first_of_two_archives_is_read_and_the_second_is_reported() {
    let archive = [members(&["a.jpg"]).finish(), members(&["b.jpg"]).finish()].concat();
    let items = read_all_ways(&archive);
    assert_eq!(shown(&items)[0], "a[jpg]");
    assert!(shown(&items)[1].contains("after the end mark"), "{items:?}");
}

#[test]
fn sparse_members_are_refused() {
    let archive = TarBytes::new().file("a.txt", b"1").member("s.bin", b'S', 4, b"data").finish();
    assert!(shown(&read_all_ways(&archive))[1].contains("sparse"));
}

#[test]
fn sizes_in_base_256_are_read() {
    let mut archive = TarBytes::new().file("a.bin", &[7; 700]).finish();
    archive[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0xbc]);
    archive[148..156].fill(b' ');
    let sum: u64 = archive[..BLOCK].iter().map(|&byte| u64::from(byte)).sum();
    archive[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let items = read_all_ways(&archive);
    let ShardItem::Sample(sample) = &items[0] else { panic!("{items:?}") };
    assert_eq!(sample.bytes(), 700);
}

#[test]
fn names_that_are_not_utf8_stay_apart() {
    let mut archive = members(&["a1.jpg", "a2.jpg"]).finish();
    for (header, byte) in [(0, 0xe9), (2 * BLOCK, 0xe8)] {
        archive[header + 1] = byte;
        let block = &mut archive[header..header + BLOCK];
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    assert_eq!(shown(&read_all_ways(&archive)), ["a\\xe9[jpg]", "a\\xe8[jpg]"]);
}

#[test]
fn compressions_that_are_not_read_are_named() {
    let directory = tempfile::tempdir().unwrap();
    for (first, format) in [(b"BZh91AY".as_slice(), "bzip2"), (b"\xfd7zXZ\0\0", "xz")] {
        let path = directory.path().join("x.tar");
        std::fs::write(&path, first).unwrap();
        let shown = shown(&scan(path.to_str().unwrap()));
        assert!(shown[0].contains(format), "{shown:?}");
    }
}

#[test]
fn the_same_shard_twice_gives_its_samples_twice() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.tar").to_str().unwrap().to_owned();
    std::fs::write(&path, members(&["a.jpg", "b.jpg"]).finish()).unwrap();
    assert_eq!(shown(&scan(&format!("{path}::{path}"))), ["a[jpg]", "b[jpg]", "a[jpg]", "b[jpg]"]);
}

#[test]
fn what_breaks_behind_the_end_mark_costs_no_sample() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.tar.gz");
    let whole = compress(&members(&["a.jpg", "b.jpg"]).finish(), Compression::Gzip);
    let junk = [&whole[..], b"junk behind it"].concat();
    for bytes in [&whole[..whole.len() - 6], &junk[..]] {
        std::fs::write(&path, bytes).unwrap();
        let shown = shown(&scan(path.to_str().unwrap()));
        assert_eq!(shown[..2], ["a[jpg]", "b[jpg]"]);
        assert!(shown[2].contains("after the end mark"), "{shown:?}");
    }
}
