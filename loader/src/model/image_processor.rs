//! Finds the image processor for a model in the checkpoint files.

use dflop_costmodel::ModelSpec;
use serde_json::Value;

use super::directory::ModelDirectory;
use super::registry::model_directory;
use crate::error::Result;
use dflop_processors::image::ImageProcessor;

/// Returns the image processor, if a directory describes it in more detail than the model family does.
///
/// # Errors
/// See [`ModelDirectory::image_processor`].
pub fn image_processor_from_names<S: AsRef<str>>(
    names: &[S],
    model: &ModelSpec,
) -> Result<Option<ImageProcessor>> {
    for name in names {
        let Some(directory) = model_directory(name.as_ref())? else { continue };
        if directory.part()?.vision.is_some() {
            return directory.image_processor(model);
        }
    }
    Ok(None)
}

impl ModelDirectory {
    /// Returns the pixel value processor for a model with this checkpoint's encoder: the model's token rule
    /// with the filter and the statistics from the image processor file.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if the file names an unknown processor, or switches off a processing step.
    pub fn image_processor(&self, model: &ModelSpec) -> Result<Option<ImageProcessor>> {
        let Some(published) = ImageProcessor::for_model(model) else { return Ok(None) };
        let own = self.documents().preprocessor.as_ref();
        let nested = || self.documents().processor.as_ref()?.get("image_processor");
        let is_named = |json: &&Value| json.get("image_processor_type").is_some_and(Value::is_string);
        match own.or_else(nested).filter(is_named) {
            Some(json) => {
                let in_file = ImageProcessor::from_preprocessor_config(json)?;
                Ok(Some(published.with_pixels_from(&in_file)))
            }
            None => Ok(Some(published)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::directory::tests::{SIGLIP, directory};
    use dflop_costmodel::config::PartialModelSpec;

    #[test]
    fn pixels_are_made_with_the_statistics_of_the_file() {
        let processor = r#"{"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384},
            "resample": 2, "image_mean": [0.1, 0.2, 0.3]}"#;
        let directory = directory(&[("config.json", SIGLIP), ("preprocessor_config.json", processor)]);
        let directory = ModelDirectory::open(directory.path()).unwrap();
        let llm = ModelSpec::preset("tiny").unwrap().llm;
        let llm = PartialModelSpec { llm: Some(llm), ..PartialModelSpec::default() };
        let model = ModelSpec::compose("mine", &[directory.part().unwrap(), llm]).unwrap();
        let processor = directory.image_processor(&model).unwrap().unwrap();
        let image =
            dflop_samples::media::RgbImage { width: 2, height: 2, pixels: vec![0; 12], is_truncated: false };
        let made = processor.images(&[image]).unwrap().remove(0);
        assert_eq!((&made.shape[..], made.tokens), (&[1, 3, 384, 384][..], 729));
        let settings = processor.settings();
        assert_eq!(settings.filter, dflop_processors::image::Filter::Bilinear);
        assert!((settings.normalization.mean[2] - 0.3).abs() < 1e-9);
    }
}
