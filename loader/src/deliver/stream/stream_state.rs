//! Saves the position of a stream as small JSON, from which a new loader resumes exactly.
//!
//! A state describes the last *delivered* batch, regardless of read-ahead: every batch carries the reading
//! and shuffling progress, and a [`Tracker`] replays it on delivery. Samples in the shuffle buffer are
//! written as (shard, item) and read again. Samples from pipes and standard input, which cannot be read
//! again, are written in base64, up to [`HELD_BYTES_MAX`].

use crate::error::{Error, Result, Skipped};
use crate::order::ShuffleBuffer;
use crate::shard::{
    ItemPosition, KnownShards, Position, RawField, RawSample, Shard, ShardIdentity, ShardOrder, ShardPasses,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use dflop_samples::media::VideoSampling;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::Xxh3;

/// Maximum sample payload bytes in a state; bounds a shuffle buffer over streams.
pub const HELD_BYTES_MAX: u64 = 256 << 20;

/// Largest number in a state; far from where sums overflow.
const COUNT_MAX: u64 = 1 << 62;

/// JSON format version.
const VERSION: u32 = 2;

/// Stream position, as JSON by `serde`.
///
/// It fits a loader over shards with the same names, in the same order, with the same rank, shuffle buffer,
/// shard shuffle and, where videos are decoded, video frames; directories, workers, decoding and batch size
/// may change. A required shard with a different length or first header is rejected when the stream reaches
/// it.
///
/// Resuming costs a walk over the headers of the shard that was being read and of every shard with buffered
/// samples; a compressed shard is unpacked that far, and earlier input from a pipe or standard input is read
/// again and passed over, unless [`crate::deliver::RestoredInput::Rest`] declares that it begins after that
/// input. A stream that was cut in the middle of a batch, by [`crate::deliver::LoaderBuilder::samples_max`],
/// continues with the next sample in a full batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StreamState {
    version: u32,
    /// Digest of the remaining fields, so that an edited or damaged state is rejected.
    check: String,
    /// Number of shards in the list, and a digest of the base names.
    shards: usize,
    names: String,
    order: ShardOrder,
    /// Whether a short last batch is dropped.
    #[serde(default, skip_serializing_if = "is_false")]
    drops_last: bool,
    shuffle: Option<ShuffleBuffer>,
    /// Sampling of the delivered videos; none where videos were not decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    video_sampling: Option<VideoSampling>,
    /// The epoch that the first stream began with.
    #[serde(default, skip_serializing_if = "is_zero")]
    first_epoch: u64,
    /// Everything before was consumed.
    position: Position,
    /// Samples that left the shuffle buffer in this epoch.
    drawn: u64,
    /// Samples in the shuffle buffer, in buffer order.
    buffer: Vec<BufferedSampleState>,
    /// Shards that are needed again, by number, as they were.
    opened: BTreeMap<usize, ShardIdentity>,
    delivered: u64,
    skipped: u64,
    first_skipped: Option<Skipped>,
}

impl StreamState {
    /// Returns the epoch that is being read, from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.position.epoch
    }

    /// Returns the epoch that the first stream began with.
    #[must_use]
    pub fn first_epoch(&self) -> u64 {
        self.first_epoch
    }

    /// Returns how many samples were delivered since the first stream began, over all restores.
    #[must_use]
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Returns how many samples were skipped since then.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The first sample that was skipped.
    pub(super) fn first_skipped(&self) -> Option<&Skipped> {
        self.first_skipped.as_ref()
    }

    /// Returns the digest over everything except the digest.
    fn digest(&self) -> String {
        let unchecked = Self { check: String::new(), ..self.clone() };
        let document = serde_json::to_vec(&unchecked).expect("numbers and text can be written");
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&document))
    }

    pub(super) fn held(&self) -> &[BufferedSampleState] {
        &self.buffer
    }

    pub(super) fn drawn(&self) -> u64 {
        self.drawn
    }

    pub(super) fn known(&self) -> KnownShards {
        KnownShards::expecting(self.opened.clone())
    }

    /// Returns the passes that are left to read.
    pub(super) fn passes(&self, end_epoch: u64, is_remainder: bool) -> ShardPasses {
        let mut again: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for held in self.buffer.iter().filter(|held| held.sample.is_none()) {
            again.entry(held.shard).or_default().push(held.item);
        }
        for items in again.values_mut() {
            items.sort_unstable();
        }
        ShardPasses { order: self.order, end_epoch, start: self.position, again, is_remainder }
    }

    /// Checks that the state belongs to a stream.
    pub(super) fn check(&self, stream: &StreamKind<'_>) -> Result<()> {
        let refuse = |reason: String| Err(Error::State { reason });
        if self.version != VERSION {
            return refuse(format!("it has version {}, and this is {VERSION}", self.version));
        }
        if self.shards != stream.shards.len() {
            return refuse(format!("it is of {} shards, not of {}", self.shards, stream.shards.len()));
        }
        if self.names != names_digest(stream.shards) {
            return refuse("the shards have other names, or another order".into());
        }
        if self.order != stream.order {
            return refuse(format!("shards were dealt {}, and now {}", self.order, stream.order));
        }
        if self.drops_last != stream.drops_last {
            let (saved, asked) = (self.drops_last, stream.drops_last);
            return refuse(format!("it has `drop_last` {saved}, and this loader has {asked}"));
        }
        if self.shuffle != stream.shuffle {
            let shown = |buffer: Option<ShuffleBuffer>| buffer.map_or("nothing".into(), |b| b.to_string());
            let (saved, asked) = (shown(self.shuffle), shown(stream.shuffle));
            return refuse(format!("samples were shuffled by {saved}, and now by {asked}"));
        }
        if let (Some(before), Some(now)) = (self.video_sampling, stream.video_sampling)
            && before != now
        {
            return refuse(format!("videos were sampled as {before}, and are now as {now}"));
        }
        let counts = [self.position.epoch, self.position.items, self.drawn, self.delivered, self.skipped];
        if counts.iter().any(|&count| count > COUNT_MAX) {
            return refuse("its numbers are absurdly large; it was edited".into());
        }
        if self.first_epoch > self.position.epoch {
            return refuse("it begins behind where it stands; it was edited".into());
        }
        let places = self.order.places(self.shards);
        let held = self.buffer.iter().map(|held| held.shard).max();
        if self.position.place >= places || held.is_some_and(|shard| shard >= self.shards) {
            return refuse("it points behind the last shard".into());
        }
        if self.check != self.digest() {
            return refuse("its check does not fit it; it was edited or damaged".into());
        }
        Ok(())
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Properties that two streams must share to share a state.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamKind<'a> {
    pub(super) shards: &'a [Shard],
    pub(super) order: ShardOrder,
    pub(super) drops_last: bool,
    pub(super) shuffle: Option<ShuffleBuffer>,
    /// `None` where videos are not decoded.
    pub(super) video_sampling: Option<VideoSampling>,
}

/// Directories may change, names may not.
fn names_digest(shards: &[Shard]) -> String {
    let mut digest = Xxh3::new();
    for shard in shards {
        digest.update(shard.portable_name().as_bytes());
        digest.update(b"\n");
    }
    format!("{:016x}", digest.digest())
}

/// Change in the shuffle buffer.
#[derive(Debug)]
pub(super) enum Change {
    /// Began an epoch, empty.
    Epoch,
    /// Took a sample in.
    Push(BufferedSample),
    /// Removed the sample at this position.
    Draw(usize),
}

/// Reading and shuffling progress since the previous batch.
#[derive(Debug, Default)]
pub(super) struct Progressed {
    pub(super) position: Position,
    pub(super) changes: Vec<Change>,
    pub(super) skipped: Vec<Skipped>,
}

/// Consumer position, which is before the reader position.
#[derive(Debug, Default)]
pub(super) struct Tracker {
    first_epoch: u64,
    position: Position,
    drawn: u64,
    held: Vec<BufferedSample>,
    delivered: u64,
    skipped: u64,
    first_skipped: Option<Skipped>,
}

impl Tracker {
    /// Begins with the first sample of an epoch.
    pub(super) fn begin(first_epoch: u64) -> Self {
        let position = Position { epoch: first_epoch, ..Position::default() };
        Self { first_epoch, position, ..Self::default() }
    }

    /// Resumes at a state.
    pub(super) fn restore(state: &StreamState) -> Result<Self> {
        Ok(Self {
            first_epoch: state.first_epoch,
            position: state.position,
            drawn: state.drawn,
            held: state.buffer.iter().map(BufferedSampleState::read).collect::<Result<_>>()?,
            delivered: state.delivered,
            skipped: state.skipped,
            first_skipped: state.first_skipped.clone(),
        })
    }

    /// Advances by a batch.
    pub(super) fn advance(&mut self, progressed: Progressed, delivered: u64, skipped: u64) {
        self.position = progressed.position;
        for change in progressed.changes {
            match change {
                Change::Epoch => self.drawn = 0,
                Change::Push(held) => self.held.push(held),
                Change::Draw(at) => {
                    self.held.swap_remove(at);
                    self.drawn += 1;
                }
            }
        }
        self.delivered += delivered;
        self.skipped += skipped;
    }

    /// Notes the first sample that was skipped, if it has none.
    pub(super) fn note_first(&mut self, first: Option<Skipped>) {
        if self.first_skipped.is_none() {
            self.first_skipped = first;
        }
    }

    /// Writes the state down.
    pub(super) fn state(&self, stream: &StreamKind<'_>, known: &KnownShards) -> Result<StreamState> {
        let held_bytes: u64 = self.held.iter().filter_map(BufferedSample::stored_bytes).sum();
        if held_bytes > HELD_BYTES_MAX {
            let reason = format!(
                "the shuffle buffer holds {held_bytes} bytes of streams that cannot be read again, over \
                 {HELD_BYTES_MAX}; bound it by its `bytes_max`"
            );
            return Err(Error::State { reason });
        }
        let shards = stream.shards.len();
        let current = stream.order.shard_at(shards, self.position.epoch, self.position.place);
        let needed = self.held.iter().map(|held| held.shard).chain([current]);
        let opened = needed.filter_map(|shard| Some((shard, known.get(shard)?))).collect();
        let state = StreamState {
            version: VERSION,
            check: String::new(),
            shards,
            names: names_digest(stream.shards),
            order: stream.order,
            drops_last: stream.drops_last,
            shuffle: stream.shuffle,
            video_sampling: stream.video_sampling,
            first_epoch: self.first_epoch,
            position: self.position,
            drawn: self.drawn,
            buffer: self.held.iter().map(BufferedSample::write).collect(),
            opened,
            delivered: self.delivered,
            skipped: self.skipped,
            first_skipped: self.first_skipped.clone(),
        };
        Ok(StreamState { check: state.digest(), ..state })
    }
}

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
    use crate::shard::{RawField, RawSample, expand_shards};

    fn held(bytes: u64) -> BufferedSample {
        let field = RawField { extension: "bin".into(), offset: 512, bytes, payload: None, size: None };
        let (key, shard) = ("k".to_owned(), "-".into());
        let sample = RawSample { key, shard, offset: 0, epoch: 0, fields: vec![field] };
        BufferedSample { shard: 0, item: 0, offset: 0, sample: Some(sample) }
    }

    #[test]
    fn a_state_writes_out_so_many_bytes_and_no_more() {
        let shards = expand_shards(&["-"]).unwrap();
        let order = ShardOrder::default();
        let kind =
            StreamKind { shards: &shards, order, drops_last: false, shuffle: None, video_sampling: None };
        for (bytes, is_written) in [(HELD_BYTES_MAX, true), (HELD_BYTES_MAX + 1, false)] {
            let mut tracker = Tracker::default();
            let changes = vec![Change::Push(held(bytes))];
            tracker.advance(Progressed { changes, ..Progressed::default() }, 0, 0);
            let state = tracker.state(&kind, &KnownShards::default());
            assert_eq!(state.is_ok(), is_written, "{bytes}");
        }
    }

    #[test]
    fn a_tracker_repeats_what_the_buffer_did() {
        let mut tracker = Tracker::default();
        let push = |item| Change::Push(BufferedSample { item, ..held(1) });
        let changes = vec![push(0), push(1), push(2), Change::Draw(0), push(3), Change::Draw(1)];
        tracker.advance(Progressed { changes, ..Progressed::default() }, 2, 1);
        let items: Vec<u64> = tracker.held.iter().map(|held| held.item).collect();
        assert_eq!((items, tracker.drawn, tracker.delivered, tracker.skipped), (vec![2, 3], 2, 2, 1));
        let drained = vec![Change::Draw(1), Change::Draw(0), Change::Epoch, push(9)];
        tracker.advance(Progressed { changes: drained, ..Progressed::default() }, 2, 0);
        assert_eq!((tracker.held.len(), tracker.drawn), (1, 0));
    }

    fn stored() -> BufferedSampleState {
        let payload = Some(Bytes::from_static(&[0, 255, 10]));
        let field = RawField { extension: "a.bin".into(), offset: 512, bytes: 3, payload, size: None };
        let (key, shard) = ("k".to_owned(), "-".into());
        let sample = RawSample { key, shard, offset: 0, epoch: 2, fields: vec![field] };
        BufferedSample { shard: 0, item: 7, offset: 0, sample: Some(sample) }.write()
    }

    #[test]
    fn a_stored_sample_comes_back_as_it_was() {
        let text = serde_json::to_string(&stored()).unwrap();
        let back: BufferedSampleState = serde_json::from_str(&text).unwrap();
        assert_eq!(back.read().unwrap().write(), stored());
        assert_eq!(back.read().unwrap().stored_bytes(), Some(3));
    }

    #[test]
    fn damaged_bytes_are_an_error_that_names_the_sample() {
        let mut damaged = stored();
        damaged.sample.as_mut().unwrap().fields[0].payload = "*".into();
        assert!(damaged.read().unwrap_err().to_string().contains("sample `k`"));
    }
}
