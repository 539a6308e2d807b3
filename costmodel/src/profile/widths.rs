//! Compares the widths of a measured module with a model's widths.

use serde::{Deserialize, Serialize};

use crate::model::ModelSpec;
use crate::module::Module;

/// Module widths; an unknown width is `None` and fits every width.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct ModuleWidths {
    /// Name, for messages only.
    pub name: Option<String>,
    /// Token width (hidden size).
    pub hidden: Option<u32>,
    /// Number of query heads.
    pub heads: Option<u32>,
    /// Number of key and value heads.
    pub kv_heads: Option<u32>,
    /// Width between the MLP matrices.
    pub ffn: Option<u32>,
    /// Number of experts per layer; `None` for a module without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<u32>,
    /// Number of experts that a token goes through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts_per_token: Option<u32>,
    /// Width between an expert's matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_ffn: Option<u32>,
}

impl ModuleWidths {
    /// Returns a module's widths in a model; `None` if the model has no such module.
    #[must_use]
    pub fn from_spec(spec: &ModelSpec, module: Module) -> Option<Self> {
        let encoder = match module {
            Module::Vision => spec.vision.as_ref().map(|vision| vision.encoder),
            Module::Audio => spec.audio.as_ref().map(|audio| audio.encoder),
            Module::Llm => {
                let llm = &spec.llm;
                return Some(Self {
                    name: Some(spec.name.clone()),
                    hidden: Some(llm.hidden),
                    heads: Some(llm.heads),
                    kv_heads: Some(llm.kv_heads),
                    ffn: Some(llm.ffn),
                    experts: llm.experts.map(|experts| experts.experts),
                    experts_per_token: llm.experts.map(|experts| experts.experts_per_token),
                    expert_ffn: llm.experts.map(|experts| experts.ffn),
                });
            }
        };
        encoder.map(|encoder| Self {
            name: Some(spec.name.clone()),
            hidden: Some(encoder.hidden),
            heads: Some(encoder.heads),
            kv_heads: None,
            ffn: Some(encoder.ffn),
            ..Self::default()
        })
    }

    /// Returns whether all widths that both know are equal; widths without experts belong to a module without
    /// experts.
    #[must_use]
    pub fn fits(&self, other: &Self) -> bool {
        let agree = |a: Option<u32>, b: Option<u32>| a.is_none() || b.is_none() || a == b;
        agree(self.hidden, other.hidden)
            && agree(self.heads, other.heads)
            && agree(self.kv_heads, other.kv_heads)
            && agree(self.ffn, other.ffn)
            && (!self.is_known() || !other.is_known() || self.expert_widths() == other.expert_widths())
    }

    const fn expert_widths(&self) -> [Option<u32>; 3] {
        [self.experts, self.experts_per_token, self.expert_ffn]
    }

    /// Returns whether the widths can be compared at all.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        self.hidden.is_some()
    }

    /// Parses `hidden=3584 heads=28 kv_heads=4 ffn=18944 name=qwen2.5-7b`, in any order.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut widths = Self::default();
        for pair in text.split_whitespace() {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(format!("`{pair}` is not of the form key=value"));
            };
            let width = || value.parse().map(Some).map_err(|_| format!("`{pair}` is not a whole number"));
            match key {
                "name" => widths.name = Some(value.to_owned()),
                "hidden" => widths.hidden = width()?,
                "heads" => widths.heads = width()?,
                "kv_heads" => widths.kv_heads = width()?,
                "ffn" => widths.ffn = width()?,
                "experts" => widths.experts = width()?,
                "experts_per_token" => widths.experts_per_token = width()?,
                "expert_ffn" => widths.expert_ffn = width()?,
                // The measuring program also writes layers, steps and similar keys, which fit every model.
                _ => {}
            }
        }
        Ok(widths)
    }
}

impl std::fmt::Display for ModuleWidths {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let widths = [
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("ffn", self.ffn),
            ("experts", self.experts),
            ("experts_per_token", self.experts_per_token),
            ("expert_ffn", self.expert_ffn),
        ];
        let known = widths.into_iter().filter_map(|(key, width)| width.map(|width| format!("{key}={width}")));
        let name = self.name.iter().map(|name| format!("name={name}"));
        formatter.write_str(&known.chain(name).collect::<Vec<_>>().join(" "))
    }
}
