//! Identifies model families: every crate finds its part of a family by a [`FamilyId`].

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Model family name, such as `qwen2_vl`: the `model_type` in the family's checkpoints.
///
/// Readers and presets set it, and [`ModelSpec`](crate::ModelSpec) stores it: nothing else about a model
/// decides the family. Any name is possible, so that families can be added outside this crate.
///
/// # Examples
/// ```
/// use dflop_costmodel::{FamilyId, ModelSpec};
///
/// const OWN: FamilyId = FamilyId::new("my_vlm");
/// assert_eq!(OWN.as_str(), "my_vlm");
/// assert_ne!(ModelSpec::preset("qwen2-vl-7b").unwrap().family, OWN);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FamilyId {
    bytes: [u8; Self::BYTES_MAX],
    len: u8,
}

impl FamilyId {
    /// Maximum name length in bytes.
    pub const BYTES_MAX: usize = 32;
    /// Family for a specification that was written without a family.
    pub const UNKNOWN: Self = Self::new("");
    /// Family for a model whose encoders belong to several families.
    pub const COMPOSED: Self = Self::new("composed");

    /// Creates the id for a name.
    ///
    /// # Panics
    /// If the name has more than [`BYTES_MAX`](Self::BYTES_MAX) bytes; a constant then does not compile.
    #[must_use]
    pub const fn new(name: &str) -> Self {
        assert!(name.len() <= Self::BYTES_MAX, "the name of a model family has at most 32 bytes");
        let mut bytes = [0; Self::BYTES_MAX];
        let mut at = 0;
        while at < name.len() {
            bytes[at] = name.as_bytes()[at];
            at += 1;
        }
        Self { bytes, len: name.len() as u8 }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl Default for FamilyId {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

impl fmt::Display for FamilyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for FamilyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FamilyId({:?})", self.as_str())
    }
}

impl Serialize for FamilyId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for FamilyId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if name.len() > Self::BYTES_MAX {
            let problem = format!("the name of a model family has at most {} bytes", Self::BYTES_MAX);
            return Err(de::Error::custom(problem));
        }
        Ok(Self::new(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_survives_json_and_a_long_name_is_an_error() {
        let family = FamilyId::new("qwen2_5_vl");
        let json = serde_json::to_string(&family).unwrap();
        assert_eq!(json, "\"qwen2_5_vl\"");
        assert_eq!(serde_json::from_str::<FamilyId>(&json).unwrap(), family);
        assert!(serde_json::from_str::<FamilyId>(&format!("\"{}\"", "x".repeat(33))).is_err());
        assert_eq!(
            (format!("{family}"), format!("{family:?}")),
            ("qwen2_5_vl".into(), r#"FamilyId("qwen2_5_vl")"#.into())
        );
    }
}
