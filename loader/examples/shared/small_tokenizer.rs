//! A tokenizer for the examples: each byte is a token, plus special tokens for turns and media.

use dflop_processors::Tokenizer;
use serde_json::{Map, Value, json};

const TOKENS: [&str; 6] =
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"];

/// Byte-level byte-pair encoding without a single merge, as a `tokenizer.json` says it.
pub(crate) fn small_tokenizer() -> dflop_loader::Result<Tokenizer> {
    let alphabet: Map<String, Value> = byte_letters().into_iter().zip((0..256).map(Value::from)).collect();
    let token = |(number, content): (usize, &&str)| {
        json!({"id": 256 + number, "content": content, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false})
    };
    let added: Vec<Value> = TOKENS.iter().enumerate().map(token).collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "added_tokens": added, "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    });
    let tokenizer = Tokenizer::from_json(tokenizer.to_string().as_bytes())?;
    Ok(tokenizer.special_token("eos_token", "<|im_end|>").special_token("pad_token", "<|endoftext|>"))
}

/// Letters that byte-level tokenizers use for the 256 bytes: a printable byte maps to the same character.
fn byte_letters() -> Vec<String> {
    let mut others = 256u32..;
    let letter = |byte: u32| match byte {
        33..=126 | 161..=172 | 174..=255 => Some(byte),
        _ => others.next(),
    };
    (0..256)
        .map(letter)
        .map(|letter| letter.and_then(char::from_u32).unwrap_or_default().to_string())
        .collect()
}
