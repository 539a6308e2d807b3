//! Which medium of a sample belongs to which placeholder.

use serde_json::Value;

use super::error::PrepareError;
use crate::batch::Sample;
use crate::decode::Media;
use crate::text::MediumSlot;

/// The media of one kind, in the order in which placeholders take them.
#[derive(Debug, Clone)]
pub(super) struct SampleMedia<'a> {
    slot: MediumSlot,
    key: &'a str,
    /// Place in the sample's fields and extension.
    fields: Vec<(usize, &'a str)>,
}

impl<'a> SampleMedia<'a> {
    /// Nothing, for a model that does not take this kind.
    pub(super) fn none(slot: MediumSlot) -> Self {
        Self { slot, key: "", fields: Vec::new() }
    }

    /// The media of a kind: by number where all are numbered (`0.jpg`, `1.jpg`, …, `10.jpg`), else as they stand in
    /// the shard.
    pub(super) fn of(sample: &'a Sample, slot: MediumSlot) -> Self {
        let is_wanted = |media: &Media| match slot {
            MediumSlot::Image => matches!(media, Media::Image(_)),
            MediumSlot::Audio => matches!(media, Media::Audio(_)),
        };
        let fields = sample.fields.iter().enumerate().filter(|(_, field)| is_wanted(&field.media));
        let mut fields: Vec<_> = fields.map(|(place, field)| (place, &*field.extension)).collect();
        if fields.iter().all(|(_, extension)| number(extension).is_some()) {
            fields.sort_by_key(|(_, extension)| number(extension));
        }
        Self { slot, key: &sample.key, fields }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.fields.len()
    }

    /// Places in the sample's fields, one for each placeholder; all of them if there is no placeholder.
    pub(super) fn in_order(
        &self,
        names: &[Option<String>],
        json: Option<&Value>,
    ) -> Result<Vec<usize>, PrepareError> {
        let (placeholders, media) = (names.len(), self.fields.len());
        if placeholders != 0 && placeholders != media {
            return Err(PrepareError::Placeholders { field: None, slot: self.slot, placeholders, media });
        }
        let named = names.iter().flatten().map(String::as_str).collect::<Vec<_>>();
        let listed = json.map(|json| listed(json, self.slot)).unwrap_or_default();
        for names in [named, listed] {
            if let Some(order) = self.by_names(&names) {
                return order;
            }
        }
        Ok(self.fields.iter().map(|(place, _)| *place).collect())
    }

    /// `None` if the names are no names of fields, such as the paths that the media were packed from.
    fn by_names(&self, names: &[&str]) -> Option<Result<Vec<usize>, PrepareError>> {
        let places: Vec<_> = names.iter().map(|name| self.place(name)).collect();
        if places.iter().all(Option::is_none) {
            return None;
        }
        let mut order: Vec<usize> = places.into_iter().flatten().collect();
        let given = order.clone();
        order.sort_unstable();
        order.dedup();
        if order.len() == self.fields.len() && given.len() == names.len() && given.len() == order.len() {
            return Some(Ok(given));
        }
        let (matched, named, media) = (order.len(), names.len(), self.fields.len());
        let reason = format!("{named} names match {matched} of {media} fields");
        Some(Err(PrepareError::conversation(None, reason)))
    }

    /// The field that a name means: its extension, or its whole entry name, with or without folders.
    fn place(&self, name: &str) -> Option<usize> {
        let base = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let means = |extension: &str| {
            name.eq_ignore_ascii_case(extension)
                || base(name).eq_ignore_ascii_case(&format!("{}.{extension}", base(self.key)))
        };
        self.fields.iter().find(|(_, extension)| means(extension)).map(|(place, _)| *place)
    }
}

/// The number that an extension such as `10.jpg` begins with.
fn number(extension: &str) -> Option<u64> {
    extension.split_once('.')?.0.parse().ok()
}

/// The names that the JSON lists, under the keys that data sets use.
fn listed(json: &Value, slot: MediumSlot) -> Vec<&str> {
    let keys = match slot {
        MediumSlot::Image => ["images", "image"],
        MediumSlot::Audio => ["audios", "audio"],
    };
    match keys.iter().find_map(|key| json.get(key)) {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        Some(Value::String(name)) => vec![name],
        _ => Vec::new(),
    }
}
