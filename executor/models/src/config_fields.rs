//! Reads fields of a `config.json`, with errors that name the field.
//!
//! Dimensions come from [`dflop_costmodel::config`], which refuses unknown models. This module reads fields
//! that do not affect cost but change results: epsilons, activations, rotation frequencies.

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use dflop_device::ops::activation::Activation;

/// JSON object of a configuration; `null` fields count as missing.
#[derive(Debug, Clone)]
pub(crate) struct ConfigFields<'a> {
    path: String,
    fields: Option<&'a Map<String, Value>>,
}

impl<'a> ConfigFields<'a> {
    /// Wraps the whole document.
    pub(crate) fn new(document: &'a Value) -> Self {
        Self { path: String::new(), fields: document.as_object() }
    }

    /// Object of a field; empty if the field is missing.
    pub(crate) fn child(&self, key: &str) -> Self {
        let fields = self.value(key).and_then(Value::as_object);
        Self { path: format!("{}{key}.", self.path), fields }
    }

    /// Returns whether the field exists.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.fields?.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn refused(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::ModelConfig { field: format!("{}{key}", self.path), problem: problem.into() }
    }

    fn read<T>(&self, key: &str, what: &str, of: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match of(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.refused(key, format!("must be {what}, found {value}"))),
        }
    }

    pub(crate) fn number(&self, key: &str, default: f64) -> Result<f64> {
        let positive = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
        Ok(self.read(key, "a number above 0", positive)?.unwrap_or(default))
    }

    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>> {
        let count = |value: &Value| value.as_u64().filter(|&count| count > 0);
        Ok(self.read(key, "a whole number above 0", count)?.map(|count| count as usize))
    }

    /// Reads an integer, or a list of two equal ones.
    pub(crate) fn side(&self, key: &str, default: usize) -> Result<usize> {
        let side = |value: &Value| match value.as_array().map(Vec::as_slice) {
            Some([height, width]) if height == width => height.as_u64(),
            Some(_) => None,
            None => value.as_u64(),
        };
        let side = self.read(key, "the side of a square", |value| side(value).filter(|&side| side > 0))?;
        Ok(side.map_or(default, |side| side as usize))
    }

    /// Reads a list of integers, which may be 0.
    pub(crate) fn counts(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let counts = |value: &Value| {
            let numbers = value.as_array()?.iter().map(|number| number.as_u64().map(|n| n as usize));
            numbers.collect::<Option<Vec<_>>>()
        };
        self.read(key, "a list of whole numbers", counts)
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.read(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn activation(&self, key: &str, default: Activation) -> Result<Activation> {
        match self.text(key)? {
            None => Ok(default),
            Some("gelu") => Ok(Activation::GeluExact),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
            Some("quick_gelu") => Ok(Activation::GeluQuick),
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some(other) => Err(self.refused(key, format!("= \"{other}\" is not a supported activation"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_name_the_field() {
        let document = json!({"vision_config": {"eps": -1, "act": "relu", "n": 0, "sides": [1, 2], "on": 3}});
        let object = ConfigFields::new(&document).child("vision_config");
        let message = |error: Error| error.to_string();
        assert_eq!(
            message(object.number("eps", 1.0).unwrap_err()),
            "`config.json`: `vision_config.eps` must be a number above 0, found -1"
        );
        assert!(
            message(object.activation("act", Activation::Silu).unwrap_err()).contains("vision_config.act")
        );
        assert!(message(object.count("n").unwrap_err()).contains("above 0, found 0"));
        assert_eq!(object.count("m").unwrap(), None);
        assert!(message(object.side("sides", 1).unwrap_err()).contains("found [1,2]"));
        assert!(message(object.flag("on", true).unwrap_err()).contains("found 3"));
        assert_eq!(object.side("none", 4).unwrap(), 4);
    }
}
