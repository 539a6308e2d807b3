//! Reads a checkpoint directory as downloaded from Hugging Face.
//!
//! Only the small JSON files are read: `config.json` and, where they exist, `preprocessor_config.json`,
//! `video_preprocessor_config.json` and `processor_config.json`. [`dflop_costmodel::config`] interprets them.
//! Where no family reads `config.json`, `model.json` describes the model. Nothing is fetched.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use dflop_costmodel::ModelSpec;
use dflop_costmodel::config::{
    CONFIG_FILE, DESCRIBED, Documents, PREPROCESSOR_FILE, PROCESSOR_FILE, PartialModelSpec,
    VIDEO_PREPROCESSOR_FILE, parse_json,
};
use dflop_costmodel::model::description::{DESCRIPTION_FILE, Description};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::store::file;

/// Maximum file size in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The files in a checkpoint directory.
#[derive(Debug, Clone)]
pub struct ModelDirectory {
    path: PathBuf,
    /// Name of the file that describes the model, if it is not `config.json`.
    file: Option<&'static str>,
    documents: Documents,
}

impl ModelDirectory {
    /// Reads a directory, the `config.json` in it, or a description.
    ///
    /// In a directory with a description, `model.json`, this is read if there is no `config.json`, or none
    /// that a family reads.
    ///
    /// # Errors
    /// [`Error::Storage`] if a file cannot be read, [`Error::Config`] if it is not JSON, or if the
    /// description is that of a different `config.json`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let description = path.join(DESCRIPTION_FILE);
        if !path.is_dir() || !description.is_file() {
            return Self::open_config(path);
        }
        let has_config = path.join(CONFIG_FILE).is_file();
        if has_config {
            let by_family = Self::open_config(path)?;
            if PartialModelSpec::from_hugging_face(&by_family.documents).is_ok() {
                return Ok(by_family);
            }
        }
        let config = read_json(&description)?;
        if has_config {
            check_described(&config, path)?;
        }
        let documents = Documents { config, ..Documents::default() };
        Ok(Self { path: path.to_owned(), file: Some(DESCRIPTION_FILE), documents })
    }

    fn open_config(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join(CONFIG_FILE) } else { path.to_owned() };
        let beside = |name: &str| {
            let file = file.with_file_name(name);
            if file.is_file() { read_json(&file).map(Some) } else { Ok(None) }
        };
        let documents = Documents {
            config: read_json(&file)?,
            preprocessor: beside(PREPROCESSOR_FILE)?,
            video_preprocessor: beside(VIDEO_PREPROCESSOR_FILE)?,
            processor: beside(PROCESSOR_FILE)?,
        };
        Ok(Self { path: path.to_owned(), file: None, documents })
    }

    /// Parses a model description as JSON, in place of a file.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not JSON.
    pub fn described(text: &str) -> Result<Self> {
        let refused = |error| Error::Config { setting: "model", reason: format!("the description: {error}") };
        let config = parse_json(text).map_err(refused)?;
        let documents = Documents { config, ..Documents::default() };
        Ok(Self { path: PathBuf::from("described"), file: None, documents })
    }

    /// Returns the parsed files.
    #[must_use]
    pub fn documents(&self) -> &Documents {
        &self.documents
    }

    /// Returns the names of the files that were read, or `description` for JSON text.
    #[must_use]
    pub fn files(&self) -> Vec<String> {
        let Documents { preprocessor, video_preprocessor, processor, .. } = &self.documents;
        let config = match self.path.file_name().filter(|_| self.path.is_file()) {
            Some(file) => file.to_string_lossy().into_owned(),
            None if self.path.is_dir() => self.file.unwrap_or(CONFIG_FILE).to_owned(),
            None => "description".to_owned(),
        };
        let others = [
            (PREPROCESSOR_FILE, preprocessor),
            (VIDEO_PREPROCESSOR_FILE, video_preprocessor),
            (PROCESSOR_FILE, processor),
        ];
        let others = others.into_iter().filter(|(_, document)| document.is_some());
        [config].into_iter().chain(others.map(|(name, _)| name.to_owned())).collect()
    }

    /// Returns the directory name, or the path if it has no name; for a description, `name` or the file name.
    #[must_use]
    pub fn name(&self) -> String {
        let config = &self.documents.config;
        let is_described = config.get("model_type").is_some_and(|found| found == DESCRIBED)
            || Description::is_format(config);
        if let Some(name) = config.get("name").and_then(Value::as_str).filter(|_| is_described) {
            return name.to_owned();
        }
        if let Some(stem) =
            self.path.file_stem().filter(|_| self.path.is_file() && !self.path.ends_with(CONFIG_FILE))
        {
            return stem.to_string_lossy().into_owned();
        }
        let directory = match self.path.parent() {
            Some(parent) if self.path.is_file() && parent.file_name().is_some() => parent,
            _ => &self.path,
        };
        let name = directory.file_name().unwrap_or(directory.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// Reads the model part in the checkpoint.
    ///
    /// # Errors
    /// [`Error::Config`] with the directory, the file and the invalid field.
    pub fn part(&self) -> Result<PartialModelSpec> {
        PartialModelSpec::from_hugging_face(&self.documents).map_err(|error| self.refused(&error))
    }

    /// Reads the model, named after the directory.
    ///
    /// # Errors
    /// The errors of [`ModelDirectory::part`]; also if the checkpoint is only an encoder.
    pub fn spec(&self) -> Result<ModelSpec> {
        ModelSpec::from_hugging_face(&self.name(), &self.documents).map_err(|error| self.refused(&error))
    }

    fn refused(&self, error: &dflop_costmodel::Error) -> Error {
        Error::Config { setting: "model", reason: format!("{}: {error}", self.path.display()) }
    }
}

/// Returns the SHA-256 digest as hex digits.
fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut digits, byte| {
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}

/// Checks that a description belongs to the `config.json` in its directory.
fn check_described(description: &Value, directory: &Path) -> Result<()> {
    let path = directory.join(CONFIG_FILE);
    let bytes = file::read(&path).map_err(|source| Error::file(&path, source))?;
    let digest = digest(&bytes);
    if description.get("config_sha256").and_then(Value::as_str) == Some(&digest) {
        return Ok(());
    }
    let shown = directory.display();
    let reason = format!(
        "{shown}: `{DESCRIPTION_FILE}` describes another `{CONFIG_FILE}`: run `dflop describe {shown} -o \
         {shown}/{DESCRIPTION_FILE}` again"
    );
    Err(Error::Config { setting: "model", reason })
}

fn read_json(path: &Path) -> Result<Value> {
    let failed = |source| Error::file(path, source);
    let refused = |reason| Error::Config { setting: "model", reason };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        let reason = format!("{} has {bytes} bytes, more than {FILE_BYTES_MAX}", path.display());
        return Err(refused(reason));
    }
    let text = file::read_text(path).map_err(failed)?;
    parse_json(&text).map_err(|error| refused(format!("{}: {error}", path.display())))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::model) const SIGLIP: &str =
        r#"{"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 384}"#;

    pub(in crate::model) fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    #[test]
    fn a_directory_and_its_configuration_are_the_same_model() {
        let config = r#"{"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vision_config": {}}"#;
        let pixels = r#"{"min_pixels": 3136, "max_pixels": 501760}"#;
        let directory = directory(&[("config.json", config), ("preprocessor_config.json", pixels)]);
        let model = directory.path().join("my-model");
        std::fs::create_dir(&model).unwrap();
        for file in ["config.json", "preprocessor_config.json"] {
            std::fs::copy(directory.path().join(file), model.join(file)).unwrap();
        }
        let spec = ModelDirectory::open(&model).unwrap().spec().unwrap();
        assert_eq!(spec.name, "my-model");
        assert_eq!(ModelDirectory::open(model.join("config.json")).unwrap().spec().unwrap(), spec);
        let dflop_costmodel::tokens::VisionRule::Native(rule) = spec.vision.unwrap().rule else {
            panic!("{:?}", spec.vision)
        };
        assert_eq!(rule.image.max, 501_760);
    }

    #[test]
    fn a_description_is_a_model_by_its_file_or_its_text() {
        let text = r#"{"model_type": "described", "llm": {"num_hidden_layers": 3}}"#;
        let directory = directory(&[("kite.json", text)]);
        let in_file = ModelDirectory::open(directory.path().join("kite.json")).unwrap().spec().unwrap();
        assert_eq!((in_file.name.as_str(), in_file.llm.layers), ("kite", 3));
        let named = text.replace("\"llm\"", "\"name\": \"mine\", \"llm\"");
        assert_eq!(ModelDirectory::described(&named).unwrap().spec().unwrap().name, "mine");
        let error = ModelDirectory::described("{").unwrap_err().to_string();
        assert!(error.contains("the description: EOF"), "{error}");
    }

    #[test]
    fn numbers_that_are_not_finite_are_read() {
        let config =
            r#"{"model_type": "llama", "num_hidden_layers": 3, "limits": [0.0, Infinity], "x": NaN}"#;
        let directory = directory(&[("config.json", config)]);
        assert_eq!(ModelDirectory::open(directory.path()).unwrap().spec().unwrap().llm.layers, 3);
    }

    #[test]
    fn errors_name_the_file() {
        let missing = directory(&[]);
        let error = ModelDirectory::open(missing.path()).unwrap_err().to_string();
        assert!(error.contains("config.json"), "{error}");
        let broken = directory(&[("config.json", "{")]);
        let error = ModelDirectory::open(broken.path()).unwrap_err().to_string();
        assert!(error.contains("config.json: EOF"), "{error}");
        let unknown = directory(&[("config.json", r#"{"model_type": "gpt2"}"#)]);
        let error = ModelDirectory::open(unknown.path()).unwrap().spec().unwrap_err().to_string();
        assert!(error.contains("`config.json`: `model_type` = \"gpt2\" is unknown"), "{error}");
        let encoder = directory(&[("config.json", SIGLIP)]);
        let error = ModelDirectory::open(encoder.path()).unwrap().spec().unwrap_err().to_string();
        assert!(error.contains("join it with a language model"), "{error}");
    }

    /// A text model as `dflop describe` writes it, whose layers no family has.
    const DESCRIPTION: &str = r#"{"format": "dflop model", "version": 1, "name": "kite", "model_type": "kite",
        "config_sha256": "SHA", "made_with": {"torch": "2.8.0"}, "parameters": 130,
        "parameters_beside_modules": 0, "modules": [{"module": "llm", "path": "model", "layers_path": "model.layers", "unit": "tokens",
            "parameters": 130, "sizes": {"hidden": 4, "heads": 2, "kv_heads": 2, "head_dim": 2, "ffn": 8},
            "layer_runs": [{"first": 0, "count": 3, "parameters": 30, "message_width": 4,
                "flops_forward": {"per_token": 60}, "flops_backward": {"per_token": 120},
                "attention": {"pattern": "linear", "window": null}}],
            "outside_layers": {"flops_forward": {}, "flops_backward": {}},
            "embedding": {"width": 4, "parameters": 20},
            "head": {"parameters": 20, "is_tied": false, "vocabulary": 5, "flops_forward": {"per_token": 40},
                "flops_backward": {"per_token": 80}}}]}"#;

    #[test]
    fn a_description_in_the_directory_stands_in_for_a_missing_family() {
        let config = r#"{"model_type": "kite"}"#;
        let text = DESCRIPTION.replace("SHA", &digest(config.as_bytes()));
        let both = directory(&[("config.json", config), ("model.json", &text)]);
        let model = ModelDirectory::open(both.path()).unwrap();
        let spec = model.spec().unwrap();
        assert_eq!((spec.name.as_str(), spec.parameters(), spec.llm.layers), ("kite", 130, 3));
        assert_eq!(model.files(), ["model.json"]);
        let alone = directory(&[("model.json", &text)]);
        assert_eq!(ModelDirectory::open(alone.path()).unwrap().spec().unwrap(), spec);
        assert_eq!(ModelDirectory::open(alone.path().join("model.json")).unwrap().spec().unwrap(), spec);
        // A family has precedence, and the description of a changed configuration is refused.
        let known = r#"{"model_type": "llama", "num_hidden_layers": 7}"#;
        let by_family = directory(&[("config.json", known), ("model.json", &text)]);
        assert_eq!(ModelDirectory::open(by_family.path()).unwrap().spec().unwrap().llm.layers, 7);
        let changed = directory(&[("config.json", "{\"model_type\": \"kites\"}"), ("model.json", &text)]);
        let error = ModelDirectory::open(changed.path()).unwrap_err().to_string();
        assert!(error.contains("describes another `config.json`: run `dflop describe"), "{error}");
        let wrong = text.replace("\"version\": 1", "\"version\": 9");
        let error = ModelDirectory::described(&wrong).unwrap().spec().unwrap_err().to_string();
        assert!(error.contains("`model.json`: `version` = 9 is unknown"), "{error}");
    }
}
