//! Creates unique keys that readers return unchanged.

use std::collections::{HashMap, HashSet};

use xxhash_rust::xxh3::xxh3_128;

use dflop_loader::shard::is_metadata;

/// Maximum length of a key created from a name, which leaves room for an extension in an entry name.
const KEY_BYTES_MAX: usize = 2048;

/// Assigns unique keys.
///
/// Keys are remembered as 128-bit digests, a quarter of the memory. Should two digests ever be equal, a key
/// has an unnecessary suffix.
#[derive(Debug, Default)]
pub(super) struct Keys {
    assigned: HashSet<u128>,
    /// Next suffix to try for keys that were requested again.
    next_suffixes: HashMap<u128, u64>,
}

impl Keys {
    /// Returns the key closest to `name`, or to `number` in nine digits without a usable name.
    pub(super) fn assign(&mut self, name: Option<&str>, number: u64) -> String {
        let wanted = requested_key(name, number);
        let digest = xxh3_128(wanted.as_bytes());
        if self.assigned.insert(digest) {
            return wanted;
        }
        let next = self.next_suffixes.get(&digest).copied().unwrap_or(1);
        // The suffixed key may itself be the name of a different entry.
        for suffix in next.. {
            let key = format!("{wanted}_{suffix}");
            if self.assigned.insert(xxh3_128(key.as_bytes())) {
                self.next_suffixes.insert(digest, suffix + 1);
                return key;
            }
        }
        unreachable!("there are more suffixes than keys")
    }
}

/// Returns the key that an entry requests.
pub(super) fn requested_key(name: Option<&str>, number: u64) -> String {
    name.and_then(safe_key).unwrap_or_else(|| format!("{number:09}"))
}

/// Sanitizes a name: dots in the base name and control characters become `_`; parts that are empty, `.` or
/// `..` are removed; a name that would be read as metadata has the prefix `x`. `None` if nothing, or too
/// much, is left.
fn safe_key(name: &str) -> Option<String> {
    let is_odd = |part: &&str| matches!(*part, "" | "." | "..");
    let parts: Vec<&str> = name.trim().split('/').filter(|part| !is_odd(part)).collect();
    let (base, directories) = parts.split_last()?;
    let base = base.replace('.', "_");
    let joined: Vec<&str> = directories.iter().copied().chain([base.as_str()]).collect();
    let key = joined.join("/").replace(char::is_control, "_");
    // With an extension, because the metadata rule concerns complete entry names.
    let key = if is_metadata(&format!("{key}.x")) { format!("x{key}") } else { key };
    (key.len() <= KEY_BYTES_MAX).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_safe_keys() {
        let table = [
            ("000000525439", Some("000000525439")),
            ("a/b.c/d.e.f", Some("a/b.c/d_e_f")),
            ("/etc/../x.y/", Some("etc/x_y")),
            ("__meta__/a", Some("x__meta__/a")),
            ("__a__", Some("__a__")),
            ("a\nb\0", Some("a_b_")),
            ("日本.語", Some("日本_語")),
            ("..", None),
            (" ", None),
        ];
        for (name, key) in table {
            assert_eq!(safe_key(name).as_deref(), key, "{name}");
        }
        assert_eq!(safe_key(&"k".repeat(3000)), None);
    }

    #[test]
    fn no_key_is_given_twice() {
        let mut keys = Keys::default();
        let names = ["a", "a", "a_1", "a", "a.1", "b", "a"];
        let assigned = names.map(|name| keys.assign(Some(name), 0));
        assert_eq!(assigned, ["a", "a_1", "a_1_1", "a_2", "a_1_2", "b", "a_3"]);
        assert_eq!([keys.assign(None, 7), keys.assign(Some(".."), 7)], ["000000007", "000000007_1"]);
    }
}
