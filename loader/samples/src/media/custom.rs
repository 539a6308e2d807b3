//! Holds values that replace decoded fields, created by user code.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Opaque value that replaces a decoded field; created and read by user code.
///
/// Clones share the value. Two values are equal if they are the same object in memory.
///
/// # Examples
/// ```
/// use dflop_samples::media::CustomMedia;
/// let media = CustomMedia::new(vec![1.5, 2.5]);
/// assert_eq!(media.value::<Vec<f64>>().unwrap()[1], 2.5);
/// assert_eq!(media, media.clone());
/// assert!(media.value::<String>().is_none());
/// ```
#[derive(Clone)]
pub struct CustomMedia(Arc<dyn Any + Send + Sync>);

impl CustomMedia {
    /// Wraps a value.
    #[must_use]
    pub fn new(value: impl Any + Send + Sync) -> Self {
        Self(Arc::new(value))
    }

    /// Returns the value, if it has this type.
    #[must_use]
    pub fn value<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl From<Arc<dyn Any + Send + Sync>> for CustomMedia {
    fn from(value: Arc<dyn Any + Send + Sync>) -> Self {
        Self(value)
    }
}

impl PartialEq for CustomMedia {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

impl fmt::Debug for CustomMedia {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("CustomMedia").field(&Arc::as_ptr(&self.0)).finish()
    }
}
