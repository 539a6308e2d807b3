//! Compares all readers on random archives, whole and damaged.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use proptest::prelude::*;
use tokio::io::{AsyncRead, ReadBuf};

use super::entries::{Archive, RangedEntries};
use super::header::BLOCK_BYTES;
use super::stream::{StreamEntries, StreamFault};
use super::{Entry, SliceEntries, padded};
use crate::error::ArchiveFault;

/// Entries with payload beginnings, and the fault after the last entry.
type Walk = (Vec<(Entry, Bytes)>, Option<ArchiveFault>);

/// Archive that is read by range, and rejects ranges outside it.
struct InMemory(Bytes);

impl Archive for InMemory {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&mut self, range: Range<u64>) -> io::Result<Bytes> {
        let is_inside = range.start <= range.end && range.end <= self.0.len() as u64;
        is_inside
            .then(|| self.0.slice(range.start as usize..range.end as usize))
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

/// Stream that returns at most a few bytes at a time.
struct Trickle(Bytes, usize);

impl AsyncRead for Trickle {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let bytes = self.0.len().min(self.1).min(buffer.remaining());
        buffer.put_slice(&self.0.split_to(bytes));
        Poll::Ready(Ok(()))
    }
}

fn from_slice(archive: &Bytes) -> Walk {
    let mut walk = (Vec::new(), None);
    let mut entries = SliceEntries::new(archive.clone());
    for entry in entries.by_ref() {
        match entry {
            Ok(entry) => walk.0.push(entry),
            Err(fault) => walk.1 = Some(fault),
        }
    }
    assert!(entries.next().is_none(), "a walk ends once");
    walk
}

/// Reads at most `wanted` payload bytes.
fn from_ranges(archive: &Bytes, wanted: u64) -> Walk {
    let mut walk = (Vec::new(), None);
    for entry in RangedEntries::new(InMemory(archive.clone()), Box::new(move |_| wanted)) {
        match entry {
            Ok(entry) => walk.0.push(entry),
            Err(StreamFault::Archive(fault)) => walk.1 = Some(fault),
            Err(StreamFault::Read { offset, source }) => {
                panic!("a range outside the archive at {offset}: {source}")
            }
        }
    }
    walk
}

/// Reads payloads up to `wanted` bytes, and skips longer payloads.
fn from_stream(archive: &Bytes, wanted: u64, step: usize) -> Walk {
    let mut walk = (Vec::new(), None);
    let mut entries = StreamEntries::new(Trickle(archive.clone(), step), wanted);
    loop {
        match futures::executor::block_on(entries.next()) {
            Ok(Some((entry, payload))) => walk.0.push((entry, payload.unwrap_or_default())),
            Ok(None) => return walk,
            Err(StreamFault::Archive(fault)) => walk.1 = Some(fault),
            Err(StreamFault::Read { source, .. }) => panic!("memory cannot fail: {source}"),
        }
    }
}

fn member(name: &[u8], kind: u8, payload: &[u8]) -> Vec<u8> {
    member_of_size(name, kind, payload, payload.len() as u64)
}

/// Builds a member whose header states a size.
fn member_of_size(name: &[u8], kind: u8, payload: &[u8], size: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    block[..name.len()].copy_from_slice(name);
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[156] = kind;
    block[257..263].copy_from_slice(b"ustar\0");
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block.extend(payload);
    block.resize(BLOCK_BYTES + padded(payload.len() as u64).unwrap() as usize, 0);
    block
}

/// Builds a sparse member in GNU's old format; the map may be invalid.
fn sparse_member(holes_and_bytes: &[(u64, u64)], hole_behind: u64, payload: &[u8]) -> Vec<u8> {
    let mut at = 0;
    let places = holes_and_bytes.iter().map(|(hole, bytes)| {
        at += hole;
        let place = format!("{at:011o}\0{bytes:011o}\0");
        at += bytes;
        place.into_bytes()
    });
    let places: Vec<Vec<u8>> = places.collect();
    let fitting = at;
    let stored: u64 = holes_and_bytes.iter().map(|(_, bytes)| bytes).sum();
    let payload: Vec<u8> =
        payload.iter().copied().chain(std::iter::repeat(7)).take(stored as usize).collect();
    let mut blocks = vec![vec![0; BLOCK_BYTES]];
    let (first, others) = places.split_at(places.len().min(4));
    blocks[0][386..386 + 24 * first.len()].copy_from_slice(&first.concat());
    blocks[0][482] = u8::from(!others.is_empty());
    blocks[0][483..495].copy_from_slice(format!("{:011o}\0", fitting + hole_behind).as_bytes());
    for (number, part) in others.chunks(21).enumerate() {
        let mut block = vec![0; BLOCK_BYTES];
        block[..24 * part.len()].copy_from_slice(&part.concat());
        block[504] = u8::from(others.len() > 21 * (number + 1));
        blocks.push(block);
    }
    let header = &mut blocks[0];
    header[..5].copy_from_slice(b"s.npy");
    header[124..136].copy_from_slice(format!("{stored:011o}\0").as_bytes());
    header[156] = b'S';
    header[257..265].copy_from_slice(b"ustar  \0");
    header[148..156].fill(b' ');
    let sum: u64 = header.iter().map(|&byte| u64::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut member = blocks.concat();
    member.extend(&payload);
    member.resize(member.len().next_multiple_of(BLOCK_BYTES), 0);
    member
}

/// A member, or an extension header before the next member.
fn any_member() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop::collection::vec(any::<u8>(), 0..1_500);
    prop_oneof![
        6 => ("[a-z/]{1,30}", payload.clone()).prop_map(|(name, payload)| member(name.as_bytes(), b'0', &payload)),
        1 => "[a-z/]{1,30}".prop_map(|name| member(name.as_bytes(), b'5', b"")),
        1 => payload.clone().prop_map(|payload| member(b"unknown", b'?', &payload)),
        1 => (prop::sample::select(vec![b'0', b'?', b'x', b'L']), 0..8_000_u64)
            .prop_map(|(kind, size)| member_of_size(b"false", kind, b"short", size)),
        1 => "[a-z/]{1,300}".prop_map(|name| member(b"long", b'L', format!("{name}\0").as_bytes())),
        1 => payload.clone().prop_map(|payload| member(b"link", b'K', &payload)),
        1 => payload.clone().prop_map(|payload| member(b"hard", b'1', &payload)),
        2 => (prop::collection::vec((0..900_u64, 0..500_u64), 0..30), 0..2_000_u64, payload)
            .prop_map(|(pieces, bytes, payload)| sparse_member(&pieces, bytes, &payload)),
        2 => (b'a'..=b'z', 0..3_000_u32, prop::sample::select(vec![b'x', b'g'])).prop_map(|(name, size, kind)| {
            // Four digits, so that the lengths of both records are known.
            let records = format!("12 path=d/{}\n13 size={size:04}\n", char::from(name));
            member(b"pax", kind, records.as_bytes())
        }),
        1 => prop::sample::select(vec![&b"9 path=\n"[..], b"22 GNU.sparse.major=1\n", b"6 a=b\n", b""])
            .prop_map(|record| member(b"pax", b'x', record)),
    ]
}

fn any_archive() -> impl Strategy<Value = Vec<u8>> {
    let members = prop::collection::vec(any_member(), 0..8);
    let tail = prop::sample::select(vec![&[][..], &[0; 1024], &[0; 20_000], &[0; 700], b"\0\0\0tail"]);
    (members, 0..3_usize, tail).prop_map(|(members, marks, tail)| {
        let mut archive = members.concat();
        archive.extend(vec![0; marks * BLOCK_BYTES]);
        archive.extend(tail);
        archive
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn every_reader_finds_the_same_entries_and_the_same_fault(
        mut archive in any_archive(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in prop::option::of(any::<prop::sample::Index>()),
        wanted in 0..2_000_u64,
        step in 1..3_000_usize,
    ) {
        for (at, value) in changes {
            if !archive.is_empty() {
                let at = at.index(archive.len());
                archive[at] = value;
            }
        }
        if let Some(cut) = cut {
            archive.truncate(cut.index(archive.len() + 1));
        }
        let archive = Bytes::from(archive);
        let whole = from_slice(&archive);
        prop_assert_eq!(&from_ranges(&archive, u64::MAX), &whole);
        prop_assert_eq!(&from_stream(&archive, u64::MAX, step), &whole);
        let begun = |(entry, payload): &(Entry, Bytes)| {
            (entry.clone(), payload.slice(..payload.len().min(wanted as usize)))
        };
        prop_assert_eq!(from_ranges(&archive, wanted), (whole.0.iter().map(begun).collect(), whole.1.clone()));
        let short = |(entry, payload): &(Entry, Bytes)| {
            let is_short = payload.len() as u64 <= wanted;
            (entry.clone(), if is_short { payload.clone() } else { Bytes::new() })
        };
        prop_assert_eq!(from_stream(&archive, wanted, step), (whole.0.iter().map(short).collect(), whole.1));
    }
}

fn pax(records: &str) -> Vec<u8> {
    member(b"pax", b'x', records.as_bytes())
}

/// Formats a PAX record, whose length includes itself.
fn record(key: &str, value: &str) -> String {
    let body = format!(" {key}={value}\n");
    let digits = (1..6).find(|&digits| (body.len() + digits).to_string().len() == digits).expect("it ends");
    format!("{}{body}", body.len() + digits)
}

#[test]
fn sparse_members_of_every_format_are_filled_with_zeros() {
    let stored = b"headtail";
    let expanded = [&b"head"[..], &[0; 96], b"tail", &[0; 20]].concat();
    let size = |key| record(&format!("GNU.sparse.{key}"), "124");
    let version_0_0 = [
        size("size"),
        record("GNU.sparse.numblocks", "2"),
        record("GNU.sparse.offset", "0"),
        record("GNU.sparse.numbytes", "4"),
        record("GNU.sparse.offset", "100"),
        record("GNU.sparse.numbytes", "4"),
    ];
    let version_0_1 =
        [size("size"), record("GNU.sparse.name", "s.npy"), record("GNU.sparse.map", "0,4,100,4")];
    let version_1_0 = [
        record("GNU.sparse.major", "1"),
        record("GNU.sparse.minor", "0"),
        record("GNU.sparse.name", "s.npy"),
        size("realsize"),
    ];
    let mut mapped = b"2\n0\n4\n100\n4\n".to_vec();
    mapped.resize(BLOCK_BYTES, 0);
    mapped.extend(stored);
    let many: Vec<(u64, u64)> = (0..60).map(|_| (1, 1)).collect();
    let every_second: Vec<u8> = (0..60u8).flat_map(|number| [0, number]).collect();
    let numbers: Vec<u8> = (0..60).collect();
    for (form, sparse, expected) in [
        ("GNU", sparse_member(&[(0, 4), (96, 4)], 20, stored), &expanded),
        ("GNU with blocks", sparse_member(&many, 0, &numbers), &every_second),
        ("0.0", [pax(&version_0_0.concat()), member(b"s.npy", b'0', stored)].concat(), &expanded),
        (
            "0.1",
            [pax(&version_0_1.concat()), member(b"GNUSparseFile.0/s.npy", b'0', stored)].concat(),
            &expanded,
        ),
        (
            "1.0",
            [pax(&version_1_0.concat()), member(b"GNUSparseFile.0/s.npy", b'0', &mapped)].concat(),
            &expanded,
        ),
        ("no piece", sparse_member(&[], 9, b""), &vec![0; 9]),
    ] {
        let archive: Bytes = [sparse, member(b"t.txt", b'0', b"x"), vec![0; 1024]].concat().into();
        for walk in
            [from_slice(&archive), from_ranges(&archive, u64::MAX), from_stream(&archive, u64::MAX, 100)]
        {
            assert_eq!(walk.1, None, "{form}");
            let found = walk.0.iter().map(|(entry, payload)| (entry.name.as_str(), payload.as_ref()));
            assert_eq!(found.collect::<Vec<_>>(), [("s.npy", &expected[..]), ("t.txt", b"x")], "{form}");
        }
    }
}

#[test]
fn a_bad_sparse_map_costs_its_member_alone() {
    let unknown = [record("GNU.sparse.major", "2"), record("GNU.sparse.realsize", "9")].concat();
    let short = [record("GNU.sparse.major", "1"), record("GNU.sparse.realsize", "9")].concat();
    let mut overlapping = sparse_member(&[(5, 4), (0, 4)], 20, b"headtail");
    // The second piece starts before the first one ends; the sum is kept.
    overlapping.swap(386 + 9, 386 + 24 + 9);
    for sparse in [
        [pax(&unknown), member(b"s.npy", b'0', b"12345678")].concat(),
        [pax(&short), member(b"s.npy", b'0', b"3\n0\n4\n")].concat(),
        [pax(&short), member(b"s.npy", b'0', b"")].concat(),
        overlapping,
    ] {
        let archive: Bytes = [sparse, member(b"t.txt", b'0', b"x")].concat().into();
        for walk in
            [from_slice(&archive), from_ranges(&archive, u64::MAX), from_stream(&archive, u64::MAX, 100)]
        {
            assert_eq!(walk.1, None);
            let (entry, payload) = &walk.0[0];
            assert!(entry.sparse.as_ref().unwrap().fault().is_some() && payload.is_empty(), "{entry:?}");
            assert_eq!(walk.0[1].0.name, "t.txt");
        }
    }
}

#[test]
fn a_link_may_have_a_payload_or_only_a_size() {
    for payload in [&[7; 50][..], &[7; 512], &[7; 1300], b""] {
        let link = member_of_size(b"link.txt", b'1', payload, 50.max(payload.len() as u64));
        let archive: Bytes = [link, member(b"t.txt", b'0', b"x"), vec![0; 1024]].concat().into();
        for walk in
            [from_slice(&archive), from_ranges(&archive, u64::MAX), from_stream(&archive, u64::MAX, 100)]
        {
            assert_eq!((walk.0[0].0.name.as_str(), walk.0.len(), walk.1), ("t.txt", 1, None));
        }
    }
}

#[test]
fn the_pax_path_wins_over_a_gnu_name_in_any_order() {
    let (path, long) = (pax(&record("path", "right.txt")), member(b"long", b'L', b"wrong.txt\0"));
    for extensions in [[path.clone(), long.clone()], [long, path]] {
        let archive: Bytes = [extensions.concat(), member(b"short.txt", b'0', b"x")].concat().into();
        assert_eq!(from_slice(&archive).0[0].0.name, "right.txt");
    }
}

#[test]
fn only_the_first_block_names_another_format() {
    let page = b"<!DOCTYPE html><html>";
    let fault = |archive: &[u8]| from_slice(&archive.to_vec().into()).1.unwrap().fault.to_string();
    assert!(fault(page).starts_with("this is an HTML page, not a tar; "), "{}", fault(page));
    let mut longer = page.to_vec();
    longer.resize(2_000, b' ');
    assert!(fault(&longer).starts_with("this is an HTML page"));
    assert_eq!(fault(&[member(b"t.txt", b'0', b"x"), longer].concat()), "bad checksum");
}
