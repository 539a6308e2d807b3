//! Reads the JSON file that webshart writes for each shard.
//!
//! `{"path": "a.tar", "filesize": …, "files": {NAME: {"offset", "length", …}}}`. Offsets are those of
//! payloads. Only the locations are used: repeated names are missing, there are no samples, and `width` and
//! `height` ignore the EXIF orientation.

use std::collections::BTreeMap;

/// Locations of the payloads of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payloads {
    /// Base name of the shard.
    pub shard: String,
    /// Length of the shard.
    pub filesize: u64,
    /// Offset after the padding of each payload, where the next header starts; ascending.
    pub ends: Vec<u64>,
}

#[derive(serde::Deserialize)]
struct Document {
    path: String,
    filesize: u64,
    files: BTreeMap<String, Member>,
}

#[derive(serde::Deserialize)]
struct Member {
    offset: u64,
    length: u64,
}

/// Reads the JSON of one shard.
///
/// # Errors
/// The reason why it is invalid, or the member outside of the shard.
pub fn parse_payloads(bytes: &[u8]) -> Result<Payloads, String> {
    let document: Document = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let end = |(name, member): (&String, &Member)| {
        let end = member.offset.checked_add(member.length).filter(|&end| end <= document.filesize);
        let end = end.and_then(crate::shard::tar::padded);
        end.map(|end| end.min(document.filesize)).ok_or_else(|| {
            format!("`{name}` at {} + {} lies outside the shard", member.offset, member.length)
        })
    };
    let mut ends = document.files.iter().map(end).collect::<Result<Vec<_>, _>>()?;
    ends.sort_unstable();
    ends.dedup();
    let shard = document.path.rsplit('/').next().unwrap_or_default().to_owned();
    Ok(Payloads { shard, filesize: document.filesize, ends })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_rise_and_are_padded() {
        let text = br#"{"path": "d/a.tar", "filesize": 4000, "includes_image_geometry": true, "files": {
            "b.txt": {"path": "b.txt", "offset": 1536, "length": 2464},
            "a.jpg": {"offset": 512, "length": 3, "width": 9, "json_metadata": {"x": [1]}}}}"#;
        let payloads = parse_payloads(text).unwrap();
        assert_eq!(payloads, Payloads { shard: "a.tar".into(), filesize: 4000, ends: vec![1024, 4000] });
    }

    #[test]
    fn members_outside_the_shard_are_refused() {
        for member in [r#""offset": 512, "length": 3489"#, r#""offset": 18446744073709551615, "length": 2"#] {
            let text =
                format!(r#"{{"path": "a.tar", "filesize": 4000, "files": {{"a.jpg": {{{member}}}}}}}"#);
            assert!(parse_payloads(text.as_bytes()).unwrap_err().contains("outside"));
        }
    }
}
