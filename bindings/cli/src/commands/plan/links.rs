//! Reads link bandwidths and latencies from a JSON or CSV file.
//!
//! JSON: `{"nvlink": {"gigabytes_per_second": 300, "latency_microseconds": 3}, "infiniband": {...}}`; or CSV
//! with the columns `link,gigabytes_per_second,latency_microseconds`. A gigabyte is 10⁹ bytes; bandwidth is
//! per GPU and direction.

use std::path::Path;

use csv::{ReaderBuilder, Trim};
use dflop_planner::{Link, Links};
use serde::Deserialize;

use crate::failure::Failure;
use dflop_loader::store::file;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksFile {
    nvlink: LinkFields,
    infiniband: LinkFields,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFields {
    gigabytes_per_second: f64,
    latency_microseconds: f64,
}

/// A line in the CSV form.
#[derive(Debug, Deserialize)]
struct Row {
    link: String,
    gigabytes_per_second: f64,
    latency_microseconds: f64,
}

/// Reads both links; the planner checks the values.
pub(crate) fn read(path: &Path) -> Result<Links, Failure> {
    let text = file::read_named_text(path).map_err(|error| Failure::from(error).in_file(path))?;
    let parsed = if text.trim_start().starts_with('{') { parse_json(&text) } else { parse_csv(&text) };
    parsed.map_err(|message| Failure::Failed(message).in_file(path))
}

fn parse_json(text: &str) -> Result<Links, String> {
    let file: LinksFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(Links { nvlink: file.nvlink.link(), infiniband: file.infiniband.link() })
}

fn parse_csv(text: &str) -> Result<Links, String> {
    const COLUMNS: &str = "link,gigabytes_per_second,latency_microseconds";
    let mut reader = ReaderBuilder::new().trim(Trim::All).from_reader(text.as_bytes());
    if reader.headers().is_ok_and(|header| !header.iter().eq(COLUMNS.split(','))) {
        return Err(format!("expected JSON, or CSV with the header `{COLUMNS}`"));
    }
    let (mut nvlink, mut infiniband) = (None, None);
    for row in reader.deserialize::<Row>() {
        let Row { link, gigabytes_per_second, latency_microseconds } =
            row.map_err(|error| error.to_string())?;
        let place = match link.as_str() {
            "nvlink" => &mut nvlink,
            "infiniband" => &mut infiniband,
            other => return Err(format!("`{other}` is neither `nvlink` nor `infiniband`")),
        };
        if place.replace(LinkFields { gigabytes_per_second, latency_microseconds }.link()).is_some() {
            return Err(format!("`{link}` has two lines"));
        }
    }
    let missing = |name: &str| format!("`{name}` has no line");
    Ok(Links {
        nvlink: nvlink.ok_or_else(|| missing("nvlink"))?,
        infiniband: infiniband.ok_or_else(|| missing("infiniband"))?,
    })
}

impl LinkFields {
    fn link(self) -> Link {
        Link {
            bytes_per_second: self.gigabytes_per_second * 1e9,
            latency_seconds: self.latency_microseconds / 1e6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_csv_say_the_same() {
        let json = r#"{"nvlink": {"gigabytes_per_second": 300, "latency_microseconds": 3},
            "infiniband": {"gigabytes_per_second": 25, "latency_microseconds": 10}}"#;
        let csv = "link,gigabytes_per_second,latency_microseconds\ninfiniband,25,10\nnvlink, 300,3\n";
        let found = parse_json(json).unwrap();
        assert_eq!(found, parse_csv(csv).unwrap());
        assert!((found.nvlink.bytes_per_second - 3e11).abs() < 1.0);
        assert!((found.infiniband.latency_seconds - 1e-5).abs() < 1e-12);
    }

    #[test]
    fn bad_files_are_named() {
        assert!(parse_json(r#"{"nvlink": 3}"#).is_err());
        let header = "link,gigabytes_per_second,latency_microseconds\n";
        let message = |rows: &str| parse_csv(&format!("{header}{rows}")).unwrap_err();
        assert_eq!(message("nvlink,1,2\n"), "`infiniband` has no line");
        assert_eq!(message("nvlink,1,2\nnvlink,1,2\n"), "`nvlink` has two lines");
        assert!(message("nvlink,1,2\ninfiniband,x,1\n").contains("line: 3"));
        assert_eq!(message("ethernet,1,2\n"), "`ethernet` is neither `nvlink` nor `infiniband`");
        assert!(parse_csv("a,b\n").unwrap_err().starts_with("expected JSON, or CSV"));
    }
}
