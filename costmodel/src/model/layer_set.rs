//! Names some layers of a model.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Number of bits in a set word.
const WORD_BITS: u32 = u64::BITS;
/// Number of words in the set.
const WORDS: usize = 4;

/// Set of layers, counted from 0; written as a list of layer numbers.
///
/// # Examples
/// ```
/// use dflop_costmodel::model::LayerSet;
///
/// // Every sixth layer of 34 has full attention, the others slide.
/// let sliding: LayerSet = (0..34).filter(|layer| (layer + 1) % 6 != 0).collect();
/// assert_eq!((sliding.len(), sliding.contains(4), sliding.contains(5)), (29, true, false));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LayerSet {
    words: [u64; WORDS],
}

impl LayerSet {
    /// Maximum number of layers in a set.
    pub const LAYERS_MAX: u32 = WORD_BITS * WORDS as u32;

    /// Creates the set with the layers `first..end`; layers from [`LAYERS_MAX`](Self::LAYERS_MAX) on are left
    /// out.
    #[must_use]
    pub const fn range(first: u32, end: u32) -> Self {
        let mut words = [0; WORDS];
        let mut layer = first;
        while layer < end && layer < Self::LAYERS_MAX {
            words[(layer / WORD_BITS) as usize] |= 1 << (layer % WORD_BITS);
            layer += 1;
        }
        Self { words }
    }

    /// Adds a layer, if it is below [`LAYERS_MAX`](Self::LAYERS_MAX).
    pub fn insert(&mut self, layer: u32) {
        if let Some(word) = self.words.get_mut((layer / WORD_BITS) as usize) {
            *word |= 1 << (layer % WORD_BITS);
        }
    }

    /// Returns whether a layer is in the set.
    #[must_use]
    pub fn contains(&self, layer: u32) -> bool {
        let word = self.words.get((layer / WORD_BITS) as usize);
        word.is_some_and(|word| word >> (layer % WORD_BITS) & 1 == 1)
    }

    /// Returns the number of layers in the set.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns whether no layer is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of layers in the set for a model with `layers` layers.
    #[must_use]
    pub fn len_below(&self, layers: u32) -> u32 {
        self.iter().take_while(|layer| *layer < layers).fold(0, |count, _| count + 1)
    }

    /// Iterates over the layers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let set = *self;
        (0..Self::LAYERS_MAX).filter(move |layer| set.contains(*layer))
    }
}

impl FromIterator<u32> for LayerSet {
    fn from_iter<T: IntoIterator<Item = u32>>(layers: T) -> Self {
        let mut set = Self::default();
        layers.into_iter().for_each(|layer| set.insert(layer));
        set
    }
}

impl Serialize for LayerSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for LayerSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let layers = Vec::<u32>::deserialize(deserializer)?;
        match layers.iter().find(|layer| **layer >= Self::LAYERS_MAX) {
            Some(layer) => Err(D::Error::custom(format!(
                "layer {layer} is too high, the last possible is {}",
                Self::LAYERS_MAX - 1
            ))),
            None => Ok(layers.into_iter().collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_survives_json_and_a_layer_too_high_is_an_error() {
        let set: LayerSet = [0, 63, 64, 255].into_iter().collect();
        let json = serde_json::to_string(&set).unwrap();
        assert_eq!(json, "[0,63,64,255]");
        assert_eq!(serde_json::from_str::<LayerSet>(&json).unwrap(), set);
        assert!(serde_json::from_str::<LayerSet>("[256]").is_err());
    }

    #[test]
    fn layers_are_counted() {
        let set = LayerSet::range(3, 61);
        assert_eq!((set.len(), set.len_below(10), set.len_below(1000)), (58, 7, 58));
        assert!(!set.contains(2) && set.contains(3) && set.contains(60) && !set.contains(61));
        assert!(!set.contains(u32::MAX) && LayerSet::range(300, 400).is_empty());
    }
}
