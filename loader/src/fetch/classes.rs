//! Reads the class of each sample from a column: a field, or an entry in the JSON documents.

use serde_json::Value;

use super::SampleReader;
use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// Number of samples whose fields are requested together.
const READ_TOGETHER: u64 = 1 << 10;
/// Maximum length of a class, in bytes.
const CLASS_BYTES_MAX: usize = 256;
/// Field with the columns of a packed table.
const DOCUMENT: &str = "json";

/// Reads the class of each dataset sample, in dataset order, for
/// [`Mixture::by_class`](crate::order::Mixture::by_class).
///
/// - `column`: extension of a field whose text is the class, such as `cls`; if no sample has such a field,
///   key of a text, a number or a Boolean in the field `json`, which has the columns of a packed table
///
/// # Errors
/// [`Error::Config`] if a sample has no such field or key, or a value that is no class: longer than 256
/// bytes, not UTF-8, a list or an object; the errors of [`SampleReader::fields`].
pub async fn read_classes(dataset: &Dataset, column: &str) -> Result<Vec<String>> {
    let is_field = dataset.index().extensions().any(|extension| extension == column);
    let extension = if is_field { column } else { DOCUMENT };
    let mut reader = SampleReader::new(dataset.index().clone());
    let (mut classes, mut place) = (Vec::new(), 0);
    while place < dataset.len() {
        let end = dataset.len().min(place + READ_TOGETHER);
        let numbers: Vec<u64> = (place..end).map(|place| dataset.sample_number(place)).collect();
        let contents = reader.fields(&numbers, extension).await?;
        for (&number, content) in numbers.iter().zip(contents) {
            let class = match (content, is_field) {
                (None, _) => Err(format!("has no field `{extension}`")),
                (Some(content), true) => text(&content),
                (Some(content), false) => entry(&content, column),
            };
            classes.push(class.map_err(|fault| Error::Config {
                setting: "by_class",
                reason: format!("sample `{}` {fault}", dataset.index().sample(number).key()),
            })?);
        }
        place = end;
    }
    Ok(classes)
}

/// Returns the text of a field without the white space around it.
fn text(content: &[u8]) -> std::result::Result<String, String> {
    let text = std::str::from_utf8(content).map_err(|_| "has a class that is not UTF-8".to_owned())?;
    short(text.trim())
}

/// Returns the value under a key in a JSON document.
fn entry(content: &[u8], key: &str) -> std::result::Result<String, String> {
    let document: Value = serde_json::from_slice(content)
        .map_err(|error| format!("has a document that is no JSON: {error}"))?;
    match document.get(key) {
        Some(Value::String(text)) => short(text),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
        Some(_) => Err(format!("has no text, number or Boolean under `{key}`")),
        None => Err(format!("has neither a field nor a key `{key}`")),
    }
}

fn short(class: &str) -> std::result::Result<String, String> {
    if class.len() > CLASS_BYTES_MAX {
        return Err(format!("has a class of {} bytes, over {CLASS_BYTES_MAX}", class.len()));
    }
    Ok(class.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Index, IndexOptions};
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;
    use std::sync::Arc;

    #[tokio::test]
    async fn a_column_is_a_field_or_a_key_of_the_document() {
        let directory = tempfile::tempdir().unwrap();
        let shards = directory.path().join("shards");
        let mut writer = ShardWriter::builder(&shards).build().unwrap();
        let documents: [&[u8]; 3] =
            [br#"{"kind": "bird", "n": 1}"#, br#"{"kind": "fish", "n": [2]}"#, br#"{"n": 3}"#];
        for (number, document) in documents.into_iter().enumerate() {
            let class = format!("{}\n", number % 2);
            writer.write(&format!("{number}"), &[("cls", class.as_bytes()), ("json", document)]).unwrap();
        }
        writer.finish().unwrap();
        let shards = expand_shards(&[shards.to_str().unwrap()]).unwrap();
        let all = Dataset::from(Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap()));
        assert_eq!(read_classes(&all, "cls").await.unwrap(), ["0", "1", "0"]);
        let two = all.clone().at_places(&[0, 1]);
        assert_eq!(read_classes(&two, "kind").await.unwrap(), ["bird", "fish"]);
        for (set, column, reason) in [
            (&all, "kind", "sample `2` has neither a field nor a key `kind`"),
            (&two, "n", "sample `1` has no text, number or Boolean under `n`"),
        ] {
            let refused = read_classes(set, column).await.unwrap_err().to_string();
            assert!(refused.contains(reason), "{refused}");
        }
    }
}
