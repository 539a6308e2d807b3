//! Files that come with a model.

use std::collections::BTreeMap;
use std::time::SystemTime;

use dflop_costmodel::ModelSpec;
use dflop_costmodel::config::Documents;
use dflop_loader::media::Modality;
use dflop_loader::processors::image::ImageProcessor;
use dflop_loader::processors::{
    ChatTemplate, Dialogue, Family, Message, MessagePart, ProcessorFamilies, Tokenizer,
};

use super::with_text;

/// Parses a template and renders a short conversation.
pub(super) fn chat_template(bytes: &[u8]) {
    with_text(bytes, |source| {
        let spec = ModelSpec::preset("qwen2-vl-7b").expect("a known model");
        let family = Family::for_model(&ProcessorFamilies::default(), &spec).expect("a built-in family");
        let parsed = ChatTemplate::parse(source, BTreeMap::new(), &family, SystemTime::UNIX_EPOCH);
        if let Ok(template) = parsed {
            let content = vec![MessagePart::Medium(Modality::Image), MessagePart::Text("A kite?".to_owned())];
            let turns = ["user", "assistant"].map(|role| Message::new(role, content.clone()));
            let _rendered = template.render(&Dialogue::new(turns.to_vec()), true);
        }
    });
}

/// Parses a tokenizer, and encodes and decodes a text.
pub(super) fn tokenizer(bytes: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::from_json(bytes)
        && let Ok(encoded) = tokenizer.encode("A kite over the sea.", true)
    {
        let _text = tokenizer.decode(&encoded.ids);
    }
}

/// Reads an image processor.
pub(super) fn preprocessor(bytes: &[u8]) {
    if let Ok(json) = serde_json::from_slice(bytes)
        && let Ok(processor) = ImageProcessor::from_preprocessor_config(&json)
    {
        let _described = format!("{processor:?}");
    }
}

/// Reads model sizes.
pub(super) fn model_config(bytes: &[u8]) {
    if let Ok(config) = serde_json::from_slice(bytes) {
        let documents = Documents { config, ..Documents::default() };
        let _spec = ModelSpec::from_hugging_face("fuzz", &documents);
    }
}
