//! Makes keys that readers return unchanged, each used once.

use std::collections::HashMap;

use crate::shard::is_metadata;

/// Longest key that is made of a name; entry names have to hold it and an extension.
const KEY_BYTES_MAX: usize = 2048;

/// Hands out keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// Every key handed out, and the suffix to try next where it is wanted again.
    given: HashMap<String, u64>,
}

impl Keys {
    /// Returns the key nearest to `name`, or to `number` in nine digits if there is none.
    pub(super) fn give(&mut self, name: Option<&str>, number: u64) -> String {
        let wanted = wanted_key(name, number);
        let Some(next) = self.given.get(&wanted).copied() else {
            self.given.insert(wanted.clone(), 1);
            return wanted;
        };
        for suffix in next.. {
            let key = format!("{wanted}_{suffix}");
            if !self.given.contains_key(&key) {
                self.given.insert(wanted, suffix + 1);
                self.given.insert(key.clone(), 1);
                return key;
            }
        }
        unreachable!("there are more suffixes than keys")
    }
}

/// The key that an entry asks for.
pub(super) fn wanted_key(name: Option<&str>, number: u64) -> String {
    name.and_then(safe_key).unwrap_or_else(|| format!("{number:09}"))
}

/// Makes a name safe: dots in its base name and control characters become `_`, parts that are empty, `.` or
/// `..` go, and what would read as metadata gets an `x` in front. `None` if nothing is left, or too much.
fn safe_key(name: &str) -> Option<String> {
    let is_odd = |part: &&str| matches!(*part, "" | "." | "..");
    let parts: Vec<&str> = name.trim().split('/').filter(|part| !is_odd(part)).collect();
    let (base, directories) = parts.split_last()?;
    let base = base.replace('.', "_");
    let joined: Vec<&str> = directories.iter().copied().chain([base.as_str()]).collect();
    let key = joined.join("/").replace(char::is_control, "_");
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
        let given = names.map(|name| keys.give(Some(name), 0));
        assert_eq!(given, ["a", "a_1", "a_1_1", "a_2", "a_1_2", "b", "a_3"]);
        assert_eq!([keys.give(None, 7), keys.give(Some(".."), 7)], ["000000007", "000000007_1"]);
    }
}
