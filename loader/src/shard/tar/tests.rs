//! Compares all readers on random archives, whole and damaged.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use proptest::prelude::*;
use tokio::io::{AsyncRead, ReadBuf};

use super::header::BLOCK_BYTES;
use super::ranged::{Archive, RangedEntries};
use super::slice::SliceEntries;
use super::stream::{StreamEntries, StreamFault};
use super::{Entry, padded};
use crate::error::ArchiveFault;

/// Entries with the beginnings of their payloads, and the fault after the last one.
type Walk = (Vec<(Entry, Bytes)>, Option<ArchiveFault>);

/// Archive that is read by range, and refuses ranges outside it.
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

/// Stream that gives at most some bytes at a time.
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

/// Reads at most `wanted` bytes of a payload.
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

/// Reads payloads of at most `wanted` bytes, and skips longer ones.
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

/// A member, or an extension header in front of the next one.
fn any_member() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop::collection::vec(any::<u8>(), 0..1_500);
    prop_oneof![
        6 => ("[a-z/]{1,30}", payload.clone()).prop_map(|(name, payload)| member(name.as_bytes(), b'0', &payload)),
        1 => "[a-z/]{1,30}".prop_map(|name| member(name.as_bytes(), b'5', b"")),
        1 => payload.clone().prop_map(|payload| member(b"unknown", b'?', &payload)),
        1 => (prop::sample::select(vec![b'0', b'?', b'x', b'L']), 0..8_000_u64)
            .prop_map(|(kind, size)| member_of_size(b"false", kind, b"short", size)),
        1 => "[a-z/]{1,300}".prop_map(|name| member(b"long", b'L', format!("{name}\0").as_bytes())),
        1 => payload.prop_map(|payload| member(b"link", b'K', &payload)),
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
