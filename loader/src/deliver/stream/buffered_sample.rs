//! Serializes the samples that wait in the shuffle buffer.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::shard::{ItemPosition, RawField, RawSample, Shard};

/// A buffered sample: the location from which it is read again, or the bytes.
#[derive(Debug, Clone)]
pub(super) struct BufferedSample {
    pub(super) shard: usize,
    pub(super) item: u64,
    pub(super) offset: u64,
    /// The sample itself, if the shard cannot be read again; the bytes are shared with the buffer.
    pub(super) sample: Option<RawSample>,
}

impl BufferedSample {
    pub(super) fn new(place: &ItemPosition, sample: &RawSample, is_rereadable: bool) -> Self {
        let kept = (!is_rereadable).then(|| sample.clone());
        Self { shard: place.shard, item: place.behind.items - 1, offset: sample.offset, sample: kept }
    }

    /// Payload bytes that a state has to write out.
    pub(super) fn stored_bytes(&self) -> Option<u64> {
        self.sample.as_ref().map(RawSample::bytes)
    }

    pub(super) fn write(&self) -> BufferedSampleState {
        let sample = self.sample.as_ref().map(StoredSample::write);
        BufferedSampleState { shard: self.shard, item: self.item, offset: self.offset, sample }
    }
}

/// Serialized form of [`BufferedSample`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BufferedSampleState {
    pub(super) shard: usize,
    pub(super) item: u64,
    /// Offset of the sample's first header, to verify that the shard is the same.
    pub(super) offset: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sample: Option<StoredSample>,
}

/// Serialized form of a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredSample {
    key: String,
    url: String,
    offset: u64,
    epoch: u64,
    fields: Vec<StoredField>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StoredField {
    extension: String,
    offset: u64,
    /// The payload in base64.
    payload: String,
}

impl BufferedSampleState {
    pub(super) fn read(&self) -> Result<BufferedSample> {
        let sample = self.sample.as_ref().map(StoredSample::read).transpose()?;
        Ok(BufferedSample { shard: self.shard, item: self.item, offset: self.offset, sample })
    }

    /// Returns the error for a shard that no longer holds the sample.
    pub(super) fn is_gone(&self, shards: &[Shard]) -> Error {
        let (shard, item, offset) = (&shards[self.shard].url, self.item, self.offset);
        let reason = format!("shard `{shard}` has changed: item {item} is no sample at offset {offset}");
        Error::State { reason }
    }
}

impl StoredSample {
    fn write(sample: &RawSample) -> Self {
        let field = |field: &RawField| StoredField {
            extension: field.extension.to_string(),
            offset: field.offset,
            payload: STANDARD.encode(field.payload.as_deref().unwrap_or_default()),
        };
        Self {
            key: sample.key.clone(),
            url: sample.shard.to_string(),
            offset: sample.offset,
            epoch: sample.epoch,
            fields: sample.fields.iter().map(field).collect(),
        }
    }

    fn read(&self) -> Result<RawSample> {
        let field = |field: &StoredField| {
            let payload = STANDARD.decode(&field.payload).map_err(|error| Error::State {
                reason: format!("field `{}` of sample `{}` is no base64: {error}", field.extension, self.key),
            })?;
            let (extension, offset, bytes) =
                (field.extension.as_str().into(), field.offset, payload.len() as u64);
            Ok(RawField { extension, offset, bytes, payload: Some(Bytes::from(payload)), size: None })
        };
        let fields = self.fields.iter().map(field).collect::<Result<_>>()?;
        let (shard, offset, epoch) = (self.url.as_str().into(), self.offset, self.epoch);
        Ok(RawSample { key: self.key.clone(), shard, offset, epoch, fields })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> BufferedSampleState {
        let payload = Some(Bytes::from_static(&[0, 255, 10]));
        let field = RawField { extension: "a.bin".into(), offset: 512, bytes: 3, payload, size: None };
        let (key, shard) = ("k".to_owned(), "-".into());
        let sample = RawSample { key, shard, offset: 0, epoch: 2, fields: vec![field] };
        BufferedSample { shard: 0, item: 7, offset: 0, sample: Some(sample) }.write()
    }

    #[test]
    fn a_stored_sample_comes_back_as_it_was() {
        let text = serde_json::to_string(&held()).unwrap();
        let back: BufferedSampleState = serde_json::from_str(&text).unwrap();
        assert_eq!(back.read().unwrap().write(), held());
        assert_eq!(back.read().unwrap().stored_bytes(), Some(3));
    }

    #[test]
    fn damaged_bytes_are_an_error_that_names_the_sample() {
        let mut damaged = held();
        damaged.sample.as_mut().unwrap().fields[0].payload = "*".into();
        assert!(damaged.read().unwrap_err().to_string().contains("sample `k`"));
    }
}
