//! Shares equal values for the rest of the process, so that plain data can contain long lists.
//!
//! A model specification is copied freely and compared by value. Counted layers and token tables, whose
//! lengths differ between models, are stored once, and a specification holds a reference.

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Maximum number of different values of a type in a process.
const VALUES_MAX: usize = 1024;

/// Values of a type that were interned, in order.
#[derive(Debug)]
pub struct Pool<T: 'static> {
    values: Mutex<Vec<&'static T>>,
}

impl<T> Pool<T> {
    /// Creates an empty pool.
    pub(crate) const fn new() -> Self {
        Self { values: Mutex::new(Vec::new()) }
    }
}

/// Type whose values can be interned.
pub trait Intern: Eq + Sized + Send + Sync + 'static {
    /// Returns the pool for the type.
    fn pool() -> &'static Pool<Self>;
}

/// Reference to an interned value.
///
/// Equal values have the same reference. A value is never freed; a process holds at most 1,024 different
/// values of a type.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Interned<T: 'static>(&'static T);

impl<T> Clone for Interned<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Interned<T> {}

impl<T> Interned<T> {
    /// Returns the value.
    #[must_use]
    pub const fn get(self) -> &'static T {
        self.0
    }
}

impl<T: Intern> Interned<T> {
    /// Interns a value; `None` if the process already has the maximum number of different values.
    #[must_use]
    pub fn new(value: T) -> Option<Self> {
        let mut values = T::pool().values.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = values.iter().find(|known| ***known == value) {
            return Some(Self(known));
        }
        if values.len() >= VALUES_MAX {
            return None;
        }
        let kept: &'static T = Box::leak(Box::new(value));
        values.push(kept);
        Some(Self(kept))
    }
}

impl<T> Deref for Interned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

impl<T: Serialize> Serialize for Interned<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Intern + Deserialize<'de>> Deserialize<'de> for Interned<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let too_many = || de::Error::custom(format!("more than {VALUES_MAX} different descriptions"));
        Self::new(T::deserialize(deserializer)?).ok_or_else(too_many)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    struct Numbers(Vec<usize>);

    static NUMBERS: Pool<Numbers> = Pool::new();

    impl Intern for Numbers {
        fn pool() -> &'static Pool<Self> {
            &NUMBERS
        }
    }

    #[test]
    fn equal_values_are_shared_and_their_number_is_bounded() {
        let [one, other] = [7, 7].map(|number| Interned::new(Numbers(vec![number])).unwrap());
        assert!(std::ptr::eq(one.get(), other.get()));
        let json = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<Interned<Numbers>>(&json).unwrap(), one);
        let kept = (0..2 * VALUES_MAX).filter(|&number| Interned::new(Numbers(vec![number, 0])).is_some());
        assert_eq!(kept.count(), VALUES_MAX - 1);
        assert_eq!(Interned::new(Numbers(vec![7])), Some(one));
        assert!(serde_json::from_str::<Interned<Numbers>>("[1, 2, 3]").is_err());
    }
}
