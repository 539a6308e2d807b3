//! Hard group limits in tokens and bytes.
//!
//! A cap is a guarantee: no result with a group above the cap is ever returned. Caps are compared in
//! integers.

use crate::error::{Error, Result};
use crate::instance::Instance;

/// Token and byte limits per group; unlimited by default.
///
/// # Examples
/// ```
/// let caps = dflop_balancer::Caps { tokens_max: Some(8192), ..Default::default() };
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Caps {
    /// Maximum number of tokens in a group, summed over items.
    pub tokens_max: Option<u64>,
    /// Maximum number of bytes in a group, summed over items.
    pub bytes_max: Option<u64>,
}

/// Capped column in an instance, checked: neither any item nor the mean over the groups is above `max`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capped<'a> {
    /// `[items]`.
    pub(crate) column: &'a [u64],
    pub(crate) max: u64,
}

impl Caps {
    /// Lists the columns that are capped.
    ///
    /// # Errors
    /// [`Error::Config`] if the instance lacks the column; [`Error::CapItem`] and [`Error::CapTotal`] if
    /// certainly no partition fits.
    pub(crate) fn columns<'a>(&self, instance: &'a Instance) -> Result<Vec<Capped<'a>>> {
        let settings = [("tokens_max", self.tokens_max), ("bytes_max", self.bytes_max)];
        let mut capped = Vec::new();
        for ((setting, max), (unit, column)) in settings.into_iter().zip(instance.capped_columns()) {
            let Some(max) = max else { continue };
            let Some(column) = column else {
                return Err(Error::Config {
                    setting,
                    reason: format!("the instance has no {unit} per item"),
                });
            };
            check(unit, column, max, instance.groups())?;
            capped.push(Capped { column, max });
        }
        Ok(capped)
    }
}

/// Rejects a cap that an item, or the mean over the groups, exceeds.
fn check(unit: &'static str, column: &[u64], max: u64, groups: usize) -> Result<()> {
    if let Some(item) = column.iter().position(|&value| value > max) {
        return Err(Error::CapItem { item, unit, value: column[item], max });
    }
    let total: u64 = column.iter().sum();
    // A cap of any size is allowed, so the product needs more than 64 bits.
    if u128::from(total) > u128::from(max) * groups as u128 {
        return Err(Error::CapTotal { unit, total, max, groups });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(caps: Caps) -> String {
        let instance = Instance::new(2, 1, vec![1, 1, 1]).unwrap().tokens(vec![10, 40, 20]).unwrap();
        caps.columns(&instance).unwrap_err().to_string()
    }

    #[test]
    fn an_impossible_cap_names_the_item_or_the_total() {
        let tokens = |max| Caps { tokens_max: Some(max), bytes_max: None };
        assert_eq!(message(tokens(39)), "item 1 alone has 40 tokens, above the cap of 39 per group");
        let instance = Instance::new(1, 1, vec![1, 1]).unwrap().bytes(vec![5, 5]).unwrap();
        let error = Caps { bytes_max: Some(9), tokens_max: None }.columns(&instance).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the items have 10 bytes in total, above the cap of 9 in each of 1 groups"
        );
    }

    #[test]
    fn a_cap_needs_its_column() {
        let caps = Caps { bytes_max: Some(9), tokens_max: None };
        assert_eq!(message(caps), "invalid `bytes_max`: the instance has no bytes per item");
    }
}
