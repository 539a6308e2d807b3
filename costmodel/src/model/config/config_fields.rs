//! Finds a checkpoint's fields in its files, and reads them typed, with errors that name file, field and
//! value.

use serde_json::{Map, Value};

use super::{CONFIG_FILE, DESCRIBED, Documents, PREPROCESSOR_FILE, PROCESSOR_FILE, VIDEO_PREPROCESSOR_FILE};
use crate::error::{Error, Result};

/// Maximum length of a value excerpt in an error, in characters.
const EXCERPT_CHARS: usize = 60;

/// Object in a JSON document, with the file and path for errors.
///
/// The only reader for `config.json` and processor files in all crates. Fields that are `null` count as
/// missing, except in [`is_null`](Self::is_null). Fields that nobody reads may hold anything.
///
/// # Examples
/// ```
/// use dflop_costmodel::config::{CONFIG_FILE, ConfigFields};
///
/// # fn main() -> dflop_costmodel::Result<()> {
/// let document = serde_json::json!({"vision_config": {"hidden_size": 0}});
/// let vision = ConfigFields::new(CONFIG_FILE, &document)?.child_or_empty("vision_config")?;
/// assert_eq!(vision.count("depth", 32)?, 32);
/// let message = vision.count("hidden_size", 1280).unwrap_err().to_string();
/// assert_eq!(message, "`config.json`: `vision_config.hidden_size` must be at least 1, found 0");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ConfigFields<'a> {
    file: &'static str,
    /// Path to the object in the document, with a trailing dot.
    path: String,
    object: Option<&'a Map<String, Value>>,
}

impl<'a> ConfigFields<'a> {
    /// Creates the reader for a file's document; errors name the file.
    ///
    /// # Errors
    /// [`Error::Configuration`] if the document is not an object.
    pub fn new(file: &'static str, document: &'a Value) -> Result<Self> {
        let path = String::new();
        match document {
            Value::Object(object) => Ok(Self { file, path, object: Some(object) }),
            found => Err(Error::Configuration {
                file,
                field: "the document".to_owned(),
                problem: format!("must be an object, found {}", excerpt(found)),
            }),
        }
    }

    /// Creates the reader for a missing object, in which every field has the default value.
    #[must_use]
    pub const fn empty(file: &'static str) -> Self {
        Self { file, path: String::new(), object: None }
    }

    /// Returns the object under a key, if there is one.
    ///
    /// # Errors
    /// [`Error::Configuration`] if the field is not an object.
    pub fn child(&self, key: &str) -> Result<Option<Self>> {
        let path = format!("{}{key}.", self.path);
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { file: self.file, path, object: Some(object) })),
            Some(found) => Err(self.invalid(key, format!("must be an object, found {}", excerpt(found)))),
        }
    }

    /// Returns the object under a key; an empty one if it is missing.
    ///
    /// # Errors
    /// [`Error::Configuration`] if the field is not an object.
    pub fn child_or_empty(&self, key: &str) -> Result<Self> {
        let path = format!("{}{key}.", self.path);
        Ok(self.child(key)?.unwrap_or(Self { file: self.file, path, object: None }))
    }

    /// Returns the value of a field, if there is one.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        self.object?.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether there is a value.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// Returns whether the field is present and `null`.
    #[must_use]
    pub fn is_null(&self, key: &str) -> bool {
        self.object.is_some_and(|object| object.get(key).is_some_and(Value::is_null))
    }

    /// Reads a whole number, at least 1; `default` if it is missing.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn count(&self, key: &str, default: u32) -> Result<u32> {
        Ok(self.optional_count(key)?.unwrap_or(default))
    }

    /// Reads a whole number, at least 1, if it is present.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn optional_count(&self, key: &str) -> Result<Option<u32>> {
        self.value(key).map(|value| self.whole_number(key, value, 1)).transpose()
    }

    /// Reads a value in the field `key` as a whole number from `least` to `u32::MAX`.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn whole_number(&self, key: &str, value: &Value, least: u32) -> Result<u32> {
        let invalid =
            |must: String| Err(self.invalid(key, format!("must be {must}, found {}", excerpt(value))));
        if value.as_f64() == Some(f64::MAX) {
            return Ok(u32::MAX); // an infinity, as `parse_json` reads it
        }
        // A negative number is an integer, but not a `u64`.
        match (value.as_u64(), value.is_i64() || value.is_u64()) {
            (Some(number), _) if number < u64::from(least) => invalid(format!("at least {least}")),
            (Some(number), _) => u32::try_from(number).or_else(|_| invalid(format!("at most {}", u32::MAX))),
            (None, true) => invalid("positive".to_owned()),
            (None, false) => invalid("a whole number".to_owned()),
        }
    }

    /// Reads `true` or `false`; `default` if it is missing.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(found) => Err(self.invalid(key, format!("must be true or false, found {}", excerpt(found)))),
        }
    }

    /// Reads a number above 0; `default` if it is missing.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.value(key) else { return Ok(default) };
        match value.as_f64() {
            Some(ratio) if ratio > 0.0 && ratio.is_finite() => Ok(ratio),
            _ => Err(self.invalid(key, format!("must be a number above 0, found {}", excerpt(value)))),
        }
    }

    /// Reads a string, if there is one.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(found) => Err(self.invalid(key, format!("must be a string, found {}", excerpt(found)))),
        }
    }

    /// Reads a square's side, a number or a list of two equal numbers; `default` if it is missing.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn square_side(&self, key: &str, default: u32) -> Result<u32> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Array(sides)) => {
                let [height, width] = sides.as_slice() else {
                    return Err(self.invalid(key, format!("has {} sides, not 2", sides.len())));
                };
                let side = self.whole_number(key, height, 1)?;
                if self.whole_number(key, width, 1)? != side {
                    return Err(self.invalid(key, format!("must be a square, found {height} x {width}")));
                }
                Ok(side)
            }
            Some(side) => self.whole_number(key, side, 1),
        }
    }

    /// Reads a list of whole numbers, at least 0, if it is present.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is anything else.
    pub fn whole_numbers(&self, key: &str) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let Some(listed) = value.as_array() else {
            return Err(
                self.invalid(key, format!("must be a list of whole numbers, found {}", excerpt(value)))
            );
        };
        listed.iter().map(|number| self.whole_number(key, number, 0)).collect::<Result<_>>().map(Some)
    }

    /// Reads a whole number from 0 to `u64::MAX`, which has to be present.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is missing or anything else.
    pub(crate) fn required_number(&self, key: &str) -> Result<u64> {
        let Some(value) = self.value(key) else { return Err(self.invalid(key, "is missing")) };
        value.as_u64().ok_or_else(|| {
            self.invalid(key, format!("must be a whole number of at least 0, found {}", excerpt(value)))
        })
    }

    /// Reads a list of objects, which has to be present.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is missing or anything else.
    pub(crate) fn objects(&self, key: &str) -> Result<Vec<Self>> {
        let Some(value) = self.value(key) else { return Err(self.invalid(key, "is missing")) };
        let invalid = |key: &str, found: &Value, must: &str| {
            self.invalid(key, format!("must be {must}, found {}", excerpt(found)))
        };
        let listed = value.as_array().ok_or_else(|| invalid(key, value, "a list of objects"))?;
        let read = |(at, element): (usize, &'a Value)| {
            let key = format!("{key}[{at}]");
            let object = element.as_object().ok_or_else(|| invalid(&key, element, "an object"))?;
            Ok(Self { file: self.file, path: format!("{}{key}.", self.path), object: Some(object) })
        };
        listed.iter().enumerate().map(read).collect()
    }

    /// Reads an object, which has to be present.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is missing or anything else.
    pub(crate) fn required_child(&self, key: &str) -> Result<Self> {
        self.child(key)?.ok_or_else(|| self.invalid(key, "is missing"))
    }

    /// Reads a string, which has to be present.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it is missing or anything else.
    pub(crate) fn required_text(&self, key: &str) -> Result<&'a str> {
        self.text(key)?.ok_or_else(|| self.invalid(key, "is missing"))
    }

    /// Iterates over the keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.object.into_iter().flat_map(Map::keys).map(String::as_str)
    }

    /// Checks that `divisor`, the value of field `of`, divides `value`, the value of field `key`.
    ///
    /// # Errors
    /// [`Error::Configuration`] if it does not.
    pub fn require_multiple(&self, key: &str, value: u32, of: &str, divisor: u32) -> Result<()> {
        if value.is_multiple_of(divisor) {
            return Ok(());
        }
        let of_path = format!("{}{of}", self.path);
        Err(self.invalid(key, format!("= {value} must be a multiple of `{of_path}` = {divisor}")))
    }

    /// Checks that there are no fields except these, for documents in our own format.
    ///
    /// # Errors
    /// [`Error::Configuration`] that names the first unknown field.
    pub(crate) fn refuse_others(&self, known: &[&str]) -> Result<()> {
        match self.object.into_iter().flat_map(Map::keys).find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(self.invalid(key, format!("is unknown, known are {}", known.join(", ")))),
            None => Ok(()),
        }
    }

    /// Creates a field error; `problem` follows the field name: "must be even, found 7".
    #[must_use]
    pub fn invalid(&self, key: &str, problem: impl Into<String>) -> Error {
        let field = format!("{}{key}", self.path);
        Error::Configuration { file: self.file, field, problem: problem.into() }
    }
}

/// Formats a value as JSON, cut short.
pub(crate) fn excerpt(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Fields in a checkpoint's files, from which a family is read.
#[derive(Debug, Clone)]
pub struct CheckpointFields<'a> {
    /// `config.json`.
    pub config: ConfigFields<'a>,
    /// Image processor or feature extractor; `None` if no file has it.
    pub preprocessor: Option<ConfigFields<'a>>,
    /// Video processor; `None` if no file has it.
    pub video_preprocessor: Option<ConfigFields<'a>>,
    /// `processor_config.json`; empty if there is no such file.
    pub processor: ConfigFields<'a>,
}

impl<'a> CheckpointFields<'a> {
    /// Collects the fields from a checkpoint's files.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a file or a nested processor is not an
    /// object.
    pub fn new(documents: &'a Documents) -> Result<Self> {
        let document = |file, document: &'a Option<Value>| match document {
            None => Ok(None),
            Some(document) => ConfigFields::new(file, document).map(Some),
        };
        let processor = document(PROCESSOR_FILE, &documents.processor)?;
        let processor = processor.unwrap_or_else(|| ConfigFields::empty(PROCESSOR_FILE));
        let or_nested = |own: Option<ConfigFields<'a>>, key: &str| match own {
            Some(own) => Ok(Some(own)),
            None => processor.child(key),
        };
        let own = document(PREPROCESSOR_FILE, &documents.preprocessor)?;
        let preprocessor = or_nested(own, "image_processor")?;
        let preprocessor = or_nested(preprocessor, "feature_extractor")?;
        let own = document(VIDEO_PREPROCESSOR_FILE, &documents.video_preprocessor)?;
        // Older checkpoints have a single file for images and videos; transformers reads it for both.
        let video_preprocessor = or_nested(own, "video_processor")?.or_else(|| preprocessor.clone());
        let is_described = documents.config.get("model_type").is_some_and(|found| found == DESCRIBED);
        let file = if is_described { "the description" } else { CONFIG_FILE };
        let config = ConfigFields::new(file, &documents.config)?;
        Ok(Self { config, preprocessor, video_preprocessor, processor })
    }

    /// Returns the image processor's fields; empty if there is no such file.
    #[must_use]
    pub fn image(&self) -> ConfigFields<'a> {
        self.preprocessor.clone().unwrap_or_else(|| ConfigFields::empty(PREPROCESSOR_FILE))
    }

    /// Returns the number of frames that a video is sampled down to: the video processor's setting, otherwise
    /// the family's.
    ///
    /// # Errors
    /// [`Error::Configuration`] if the setting is invalid.
    pub fn frames_max(&self, default: u32) -> Result<u32> {
        match &self.video_preprocessor {
            Some(video) if video.flag("do_sample_frames", false)? => video.count("num_frames", default),
            _ => Ok(default),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_name_file_field_and_what_was_found() {
        let document = json!({"text_config": {"heads": 0, "hidden": -4, "layers": 4_294_967_296_u64, "ffn": 2.5,
            "vocab": "many", "tied": 1, "ratio": -0.5, "side": [3, 4], "sides": [1, 2, 3], "inner": 7}});
        let fields =
            ConfigFields::new("config.json", &document).unwrap().child("text_config").unwrap().unwrap();
        let long = Value::String("x".repeat(99));
        for (error, message) in [
            (fields.count("heads", 1).map(|_| ()), "`text_config.heads` must be at least 1, found 0"),
            (fields.count("hidden", 1).map(|_| ()), "`text_config.hidden` must be positive, found -4"),
            (
                fields.count("layers", 1).map(|_| ()),
                "`text_config.layers` must be at most 4294967295, found 4294967296",
            ),
            (fields.count("ffn", 1).map(|_| ()), "`text_config.ffn` must be a whole number, found 2.5"),
            (
                fields.count("vocab", 1).map(|_| ()),
                "`text_config.vocab` must be a whole number, found \"many\"",
            ),
            (fields.flag("tied", true).map(|_| ()), "`text_config.tied` must be true or false, found 1"),
            (
                fields.number("ratio", 1.0).map(|_| ()),
                "`text_config.ratio` must be a number above 0, found -0.5",
            ),
            (fields.square_side("side", 1).map(|_| ()), "`text_config.side` must be a square, found 3 x 4"),
            (fields.square_side("sides", 1).map(|_| ()), "`text_config.sides` has 3 sides, not 2"),
            (fields.child("inner").map(|_| ()), "`text_config.inner` must be an object, found 7"),
            (fields.text("inner").map(|_| ()), "`text_config.inner` must be a string, found 7"),
            (
                fields.require_multiple("hidden", 7, "heads", 2),
                "`text_config.hidden` = 7 must be a multiple of `text_config.heads` = 2",
            ),
        ] {
            assert_eq!(error.unwrap_err().to_string(), format!("`config.json`: {message}"));
        }
        assert!(excerpt(&long).chars().count() <= EXCERPT_CHARS + 1);
        let error = ConfigFields::new("config.json", &json!([1])).err().unwrap().to_string();
        assert_eq!(error, "`config.json`: `the document` must be an object, found [1]");
    }

    #[test]
    fn a_missing_field_has_its_default() {
        let document = json!({"nothing": null, "side": [14, 14], "patch": 16});
        let fields = ConfigFields::new("config.json", &document).unwrap();
        assert_eq!(fields.count("nothing", 7), Ok(7));
        assert!(fields.is_null("nothing") && !fields.is_null("missing"));
        assert_eq!((fields.square_side("side", 1), fields.square_side("patch", 1)), (Ok(14), Ok(16)));
        let missing = fields.child_or_empty("missing").unwrap();
        assert_eq!(missing.count("x", 3), Ok(3));
        assert_eq!(missing.invalid("x", "is wrong").to_string(), "`config.json`: `missing.x` is wrong");
    }
}
