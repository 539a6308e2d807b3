//! Writes shards to memory and to disk.

use std::path::Path;

use dflop_loader::write::ShardWriter;

use crate::random::Random;
use crate::shapes::image_size;

/// Maximum shard size on disk, in bytes.
const SHARD_BYTES: u64 = 10 << 20;
/// Period of samples without an image: every fifth sample.
const TEXT_ONLY_PERIOD: usize = 5;

/// Creates a tar archive with `samples` samples, each a `.jpg` with `image_bytes` zeros, a `.txt` and a
/// `.json`.
///
/// # Panics
/// Never: writes to memory succeed.
#[must_use]
pub fn archive(samples: usize, image_bytes: usize) -> Vec<u8> {
    let image = vec![0; image_bytes];
    let mut archive = tar::Builder::new(Vec::new());
    for sample in 0..samples {
        let fields: [(&str, &[u8]); 3] =
            [("jpg", &image), ("txt", b"a red kite over the sea"), ("json", b"{}")];
        for (extension, payload) in fields {
            let mut header = tar::Header::new_ustar();
            header.set_size(payload.len() as u64);
            header.set_mode(0o644);
            let name = format!("{sample:06}.{extension}");
            archive.append_data(&mut header, name, payload).expect("memory can be written");
        }
    }
    archive.into_inner().expect("memory can be written")
}

/// Writes shards with small samples: a short text and, in four out of five samples, an image header without
/// pixels, which is all that an index reads.
///
/// # Panics
/// If the directory cannot be written or already contains shards.
pub fn write_headers_only(directory: &Path, samples: usize) {
    let mut random = Random::new(41);
    let mut writer = ShardWriter::builder(directory)
        .shard_bytes(SHARD_BYTES)
        .index(false)
        .build()
        .expect("an empty directory");
    for sample in 0..samples {
        let text = "a kite over the sea ".repeat(1 + random.log_normal(4.0, 0.6).min(24.0) as usize);
        let image = png_header(&mut random);
        let mut fields = vec![("txt", text.as_bytes())];
        if sample % TEXT_ONLY_PERIOD != 0 {
            fields.push(("png", &image));
        }
        writer.write(&format!("{sample:06}"), &fields).expect("the directory can be written");
    }
    writer.finish().expect("the directory can be written");
}

/// Creates a PNG signature and IHDR chunk, with a zero checksum.
fn png_header(random: &mut Random) -> Vec<u8> {
    let size = image_size(random);
    let mut header = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    header.extend(size.width.to_be_bytes());
    header.extend(size.height.to_be_bytes());
    header.extend([8, 2, 0, 0, 0, 0, 0, 0, 0]);
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::index::{Index, IndexOptions};
    use dflop_loader::shard::expand_shards;
    use dflop_loader::shard::tar::SliceEntries;

    #[test]
    fn archives_hold_three_entries_a_sample() {
        let entries = SliceEntries::new(archive(7, 1_000).into());
        assert_eq!(entries.filter_map(Result::ok).count(), 21);
    }

    #[test]
    fn headers_are_enough_for_the_index() {
        let directory = tempfile::tempdir().unwrap();
        write_headers_only(directory.path(), 50);
        let shards = expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
        let index = Index::open_or_build(shards, &IndexOptions::default()).unwrap();
        assert_eq!((index.len(), index.skipped().len()), (50, 0));
        assert_eq!(index.sample(1).fields().count(), 2);
    }
}
