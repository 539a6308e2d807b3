//! Decides what shard names may reach: stores, commands, files outside a list's directory, and environment
//! variables.

use super::braces::Expansion;
use crate::error::{Error, Result, SelectionError};
use crate::store::{Stores, redact, redact_name};

/// Access permissions for shard names.
///
/// A name that is passed to [`expand_shards_in`](super::expand_shards_in) was chosen by the caller; a name
/// that was read from a shard list was chosen by whoever wrote the list. The default trusts neither with a
/// shell: `pipe:` must be allowed explicitly, and only applies to passed names.
#[derive(Debug, Clone, Default)]
pub struct ShardAccess {
    pub(super) stores: Stores,
    pub(super) are_pipes_allowed: bool,
    pub(super) is_outside_allowed: bool,
    are_variables_kept: bool,
}

impl ShardAccess {
    /// Reaches remote shards through `stores`.
    #[must_use]
    pub fn new(stores: &Stores) -> Self {
        Self { stores: stores.clone(), ..Self::default() }
    }

    /// Sets whether a passed name `pipe:COMMAND` runs the command; by default such a name is rejected. Names
    /// in lists never run commands.
    #[must_use]
    pub fn allow_pipe(self, are_pipes_allowed: bool) -> Self {
        Self { are_pipes_allowed, ..self }
    }

    /// Sets whether environment variables are hidden from stores, for patterns that were read from a file. A
    /// pattern that puts `${NAME}` into a store URL is then rejected, because the store would learn the
    /// value. A variable at the start of a pattern may contain the start of a URL.
    #[must_use]
    pub fn keep_variables(self, are_variables_kept: bool) -> Self {
        Self { are_variables_kept, ..self }
    }

    /// Sets whether a shard list may name remote shards and shards outside the list's directory.
    #[must_use]
    pub fn allow_outside(self, is_outside_allowed: bool) -> Self {
        Self { is_outside_allowed, ..self }
    }
}

impl From<&Stores> for ShardAccess {
    fn from(stores: &Stores) -> Self {
        Self::new(stores)
    }
}

/// Maximum number of environment substitution rounds, as in webdataset.
const SUBSTITUTION_ROUNDS: usize = 10;

/// Substitutes environment variables in a pattern, as far as `access` allows.
///
/// # Errors
/// [`crate::Error::Selection`] if a variable is not set, or must not be put into a store URL.
pub(super) fn substituted(pattern: &str, access: &ShardAccess) -> Result<String> {
    let text = substitute_environment(pattern)?;
    let is_inside = pattern.rfind("${").is_some_and(|start| start > 0);
    if access.are_variables_kept && is_inside {
        let mut expansion = Expansion::default();
        expansion.add(&text)?;
        if expansion.into_names().iter().any(|name| access.stores.is_remote(name)) {
            let reason = "a file must not put an environment variable into the URL of a store, which would learn \
                          its value; write the URL in full, or start it with the variable";
            return Err(invalid(pattern, reason));
        }
    }
    Ok(text)
}

fn substitute_environment(pattern: &str) -> Result<String> {
    let mut text = pattern.to_owned();
    for _ in 0..SUBSTITUTION_ROUNDS {
        let Some(start) = text.find("${") else { return Ok(text) };
        let Some(length) = text[start..].find('}') else { return Ok(text) };
        let name = &text[start + 2..start + length];
        let value = std::env::var(name)
            .map_err(|_| invalid(pattern, format!("environment variable `{name}` is not set")))?;
        text.replace_range(start..=start + length, &value);
    }
    Ok(text)
}

/// Returns the error for a list of shards that cannot be read.
pub(super) fn invalid(pattern: &str, reason: impl Into<String>) -> Error {
    Error::Selection(SelectionError::ShardList {
        pattern: redact_name(pattern).into_owned(),
        reason: redact(&reason.into()).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{expand_shards, expand_shards_in};

    #[test]
    fn variables_of_a_file_are_not_put_into_urls_of_stores() {
        let kept = ShardAccess::default().keep_variables(true);
        for pattern in [
            "http://h/${PATH}/a.tar",
            "http://${PATH}@h/a.tar",
            "a.tar::s3://b/${PATH}.tar",
            "{a.tar,https:/{/h,}/${PATH}.tar}",
            "${PATH}${PATH}://h/a.tar::http:/{/h/${PATH},}",
        ] {
            let error = expand_shards_in(&[pattern], &kept).unwrap_err().to_string();
            assert!(error.contains("must not put an environment variable"), "{pattern}: {error}");
            assert!(!error.contains(&std::env::var("PATH").unwrap()), "{error}");
        }
        for pattern in ["d/${PATH}.tar", "${PATH}/a.tar", "http://h/a.tar"] {
            assert!(expand_shards_in(&[pattern], &kept).is_ok(), "{pattern}");
        }
        assert!(expand_shards(&["s3://b/${CARGO_PKG_NAME}.tar"]).is_ok(), "the command line may");
    }

    #[test]
    fn environment_variables_are_substituted_or_named_when_missing() {
        let home = std::env::var("PATH").unwrap().replace("::", ":");
        assert_eq!(&*expand_shards(&["${PATH}.tar"]).unwrap()[0].url, format!("{home}.tar"));
        let error = expand_shards(&["${DFLOP_NOT_SET}/a.tar"]).unwrap_err();
        assert!(error.to_string().contains("DFLOP_NOT_SET"), "{error}");
    }
}
