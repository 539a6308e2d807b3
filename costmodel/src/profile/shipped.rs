//! Profiles shipped with the crate, selected by name and model.
//!
//! Each profile was measured for a few models. Models with equal widths are the same to a profile, whatever
//! the model name, so a checkpoint selects the files for the matching preset.

use super::{ModuleWidths, Profile};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::module::Module;

/// Names of all profiles shipped with the crate.
const NAMES: [&str; 1] = ["h200-torch"];

/// Files for a model in a profile.
struct ShippedModel {
    profile: &'static str,
    model: &'static str,
    /// Names and texts.
    files: [(&'static str, &'static str); 2],
}

/// Embeds a file with its name.
macro_rules! file {
    ($name:literal) => {
        ($name, include_str!(concat!("../../profiles/", $name)))
    };
}

/// All models in all profiles.
const MODELS: [ShippedModel; 2] = [
    ShippedModel {
        profile: "h200-torch",
        model: "qwen2.5-vl-3b",
        files: [file!("h200-torch/qwen2.5-vl-3b/vision.csv"), file!("h200-torch/qwen2.5-vl-3b/llm.csv")],
    },
    ShippedModel {
        profile: "h200-torch",
        model: "qwen2.5-vl-7b",
        files: [file!("h200-torch/qwen2.5-vl-7b/vision.csv"), file!("h200-torch/qwen2.5-vl-7b/llm.csv")],
    },
];

impl Profile {
    /// Returns the names that [`Profile::shipped`] accepts.
    #[must_use]
    pub const fn shipped_names() -> &'static [&'static str] {
        &NAMES
    }

    /// Returns a shipped profile's data for a model; `None` if there is no such profile.
    ///
    /// # Errors
    /// [`Error::ProfileLacks`] with the measured models if the model has a module with other widths.
    ///
    /// # Examples
    /// ```
    /// use dflop_costmodel::{ModelSpec, Profile};
    ///
    /// # fn main() -> dflop_costmodel::Result<()> {
    /// let profile = Profile::shipped("h200-torch", &ModelSpec::preset("qwen2.5-vl-7b")?)?;
    /// assert_eq!(profile.expect("it comes with the crate").device(), Some("NVIDIA H200"));
    /// assert!(Profile::shipped("h200-torch", &ModelSpec::preset("omni-7b")?).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn shipped(name: &str, spec: &ModelSpec) -> Result<Option<Self>> {
        let mut measured = Vec::new();
        for shipped in MODELS.iter().filter(|shipped| shipped.profile == name) {
            let profile = Self::parse(shipped.files)?;
            if profile.has_modules(spec) {
                return Ok(Some(profile));
            }
            measured.push(shipped.model);
        }
        if measured.is_empty() {
            return Ok(None);
        }
        let needed = format!("model `{}`: `{name}` was measured for {}", spec.name, measured.join(", "));
        Err(Error::ProfileLacks { needed })
    }

    /// Returns whether every module in a model was measured with the model's widths.
    fn has_modules(&self, spec: &ModelSpec) -> bool {
        Module::ALL.into_iter().all(|module| {
            let Some(wanted) = ModuleWidths::from_spec(spec, module) else { return true };
            self.files.iter().any(|file| file.widths.get(&module).is_some_and(|widths| widths.fits(&wanted)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped(model: &str) -> Result<Profile> {
        let profile = Profile::shipped("h200-torch", &ModelSpec::preset(model).unwrap())?;
        Ok(profile.expect("it comes with the crate"))
    }

    #[test]
    fn a_model_gets_the_files_that_were_measured_for_it() {
        for model in ["qwen2.5-vl-3b", "qwen2.5-vl-7b"] {
            let profile = shipped(model).unwrap();
            let names: Vec<_> = profile.files().iter().map(|file| file.name.as_str()).collect();
            assert_eq!(names, ["vision", "llm"].map(|module| format!("h200-torch/{model}/{module}.csv")));
            for key in ["driver", "torch", "transformers", "date", "attention", "ran", "recompute"] {
                assert!(profile.files().iter().all(|file| file.metadata(key).is_some()), "{key}");
            }
        }
        // A checkpoint with the same sizes has a different name.
        let mut spec = ModelSpec::preset("qwen2.5-vl-3b").unwrap();
        spec.name = "my-fine-tuned-model".to_owned();
        let own = Profile::shipped("h200-torch", &spec).unwrap();
        assert_eq!(own, Some(shipped("qwen2.5-vl-3b").unwrap()));
        // The LLM without the encoder was measured, too.
        spec.vision = None;
        assert_eq!(Profile::shipped("h200-torch", &spec).unwrap(), own);
    }

    #[test]
    fn another_model_is_refused_with_the_measured_ones() {
        let other = shipped("llava-ov-qwen2.5-7b").unwrap_err().to_string();
        let expected = "the profile lacks model `llava-ov-qwen2.5-7b`: `h200-torch` was measured for \
                        qwen2.5-vl-3b, qwen2.5-vl-7b";
        assert_eq!(other, expected);
        let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
        assert_eq!(Profile::shipped("tpu", &spec).unwrap(), None);
        assert!(Profile::shipped_names().iter().all(|name| Profile::shipped(name, &spec).is_ok()));
    }
}
