//! Records the dataset shards in a saved state: folded base names, with a digest for each.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::index::Index;

/// Number of hex digits in a digest.
const DIGITS: usize = 16;
/// Maximum number of digits in a folded number in a name.
const NUMBER_DIGITS_MAX: usize = 18;

/// Shard names and digests, in order. A thousand numbered shards need 16 kB.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShardList {
    names: Vec<Names>,
    /// 16 hex digits for each shard.
    digests: String,
}

/// A single base name, or multiple names that differ in a number that counts up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    Counted { before: String, from: u64, count: u64, digits: usize, after: String },
}

impl Names {
    /// Splits a name at the last number, which has at most [`NUMBER_DIGITS_MAX`] digits.
    fn of(name: &str) -> Self {
        let one = || Self::One(name.to_owned());
        let Some(end) = name.rfind(|c: char| c.is_ascii_digit()).map(|at| at + 1) else { return one() };
        let start = name[..end].rfind(|c: char| !c.is_ascii_digit());
        let start = start.map_or(0, |at| at + name[at..].chars().next().map_or(1, char::len_utf8));
        let number = &name[start..end];
        match number.parse() {
            Ok(from) if number.len() <= NUMBER_DIGITS_MAX => {
                let (before, after) = (name[..start].to_owned(), name[end..].to_owned());
                Self::Counted { before, from, count: 1, digits: number.len(), after }
            }
            _ => one(),
        }
    }

    /// Appends the next name; returns whether it continues the count.
    fn extend(&mut self, next: &str) -> bool {
        let Self::Counted { before, from, count, digits, after } = self else { return false };
        let is_next = format!("{before}{:0digits$}{after}", *from + *count, digits = *digits) == next;
        *count += u64::from(is_next);
        is_next
    }

    fn expand(&self, names: &mut Vec<String>) {
        match self {
            Self::One(name) => names.push(name.clone()),
            Self::Counted { before, from, count, digits, after } => {
                let name = |at: u64| {
                    format!("{before}{:0digits$}{after}", from.saturating_add(at), digits = *digits)
                };
                names.extend((0..*count).map(name));
            }
        }
    }

    /// Returns the number of names; `None` if no name has as many digits.
    fn count(&self) -> Option<u64> {
        match self {
            Self::One(_) => Some(1),
            Self::Counted { count, digits, .. } => (*digits <= NUMBER_DIGITS_MAX).then_some(*count),
        }
    }
}

impl ShardList {
    pub(super) fn new(index: &Index) -> Self {
        let mut list = Self { names: Vec::new(), digests: String::new() };
        for shard in index.indexed_shards() {
            list.push(&shard.name, shard.digest);
        }
        list
    }

    fn push(&mut self, name: &str, digest: u64) {
        if !self.names.last_mut().is_some_and(|last| last.extend(name)) {
            self.names.push(Names::of(name));
        }
        self.digests.extend(format!("{digest:016x}").chars());
    }

    /// Returns the names with digests; `None` if the counts of names and digests differ, after an edit.
    fn pairs(&self) -> Option<Vec<(String, &str)>> {
        let is_hex = self.digests.bytes().all(|digit| digit.is_ascii_hexdigit());
        let counted = self.names.iter().try_fold(0u64, |sum, run| sum.checked_add(run.count()?))?;
        if !is_hex || counted.checked_mul(DIGITS as u64) != Some(self.digests.len() as u64) {
            return None;
        }
        let mut names = Vec::new();
        self.names.iter().for_each(|run| run.expand(&mut names));
        let digest = |at: usize| &self.digests[at * DIGITS..(at + 1) * DIGITS];
        Some(names.into_iter().enumerate().map(|(at, name)| (name, digest(at))).collect())
    }

    /// Describes shard changes since `self` was saved, a message per shard.
    pub(super) fn changes(&self, now: &Self) -> Vec<String> {
        let (Some(before), Some(now)) = (self.pairs(), now.pairs()) else {
            return vec!["the list of shards in the state is damaged".into()];
        };
        if before == now {
            return Vec::new();
        }
        let changes = renames_and_replacements(&before, &now);
        if !changes.is_empty() {
            return changes;
        }
        let moved = before.iter().zip(&now).enumerate().find(|(_, (before, now))| before != now);
        let moved = moved.map(|(place, (before, _))| {
            let goes = now.iter().rposition(|pair| pair == before).map_or(0, |at| at + 1);
            format!("shard `{}` is now at place {goes} instead of {}", before.0, place + 1)
        });
        moved.into_iter().collect()
    }
}

type Pair<'a> = (String, &'a str);

/// Groups the digests by base name; a name may occur more than once.
fn by_name<'a>(pairs: &'a [Pair<'a>]) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, digest) in pairs {
        names.entry(name).or_default().push(digest);
    }
    for digests in names.values_mut() {
        digests.sort_unstable();
    }
    names
}

fn renames_and_replacements(before: &[Pair<'_>], now: &[Pair<'_>]) -> Vec<String> {
    let (old, new) = (by_name(before), by_name(now));
    let mut taken = BTreeSet::new();
    let mut changes = Vec::new();
    for (name, digests) in &old {
        match new.get(name) {
            Some(found) if found == digests => {}
            Some(found) if found.len() == digests.len() => {
                changes.push(format!("shard `{name}` was replaced: its samples or its size are others"));
            }
            Some(found) => {
                changes.push(format!(
                    "shard `{name}` is listed {} times instead of {}",
                    found.len(),
                    digests.len()
                ));
            }
            None => {
                let renamed = new.iter().find(|(other, found)| {
                    !old.contains_key(*other) && *found == digests && !taken.contains(*other)
                });
                changes.push(match renamed {
                    Some((other, _)) => {
                        taken.insert(*other);
                        format!("shard `{name}` was renamed to `{other}`")
                    }
                    None => format!("shard `{name}` was removed"),
                });
            }
        }
    }
    let is_added = |name: &&&str| !old.contains_key(**name) && !taken.contains(**name);
    changes.extend(new.keys().filter(is_added).map(|name| format!("shard `{name}` was added")));
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(shards: &[(&str, u64)]) -> ShardList {
        let mut list = ShardList { names: Vec::new(), digests: String::new() };
        for (name, digest) in shards {
            list.push(name, *digest);
        }
        list
    }

    proptest! {
        #[test]
        fn names_come_back_from_their_folded_form(names in prop::collection::vec("[a0-9é.{}]{0,5}", 0..20)) {
            let shards: Vec<_> = names.iter().map(|name| (name.as_str(), 7)).collect();
            let folded = serde_json::to_string(&list(&shards)).unwrap();
            let list: ShardList = serde_json::from_str(&folded).unwrap();
            let expanded: Vec<String> = list.pairs().unwrap().into_iter().map(|(name, _)| name).collect();
            prop_assert_eq!(expanded, names);
        }
    }

    /// Guards against counts that expanded to names until memory was full, and widths that panicked.
    #[test]
    fn numbers_that_nobody_saved_are_damage() {
        let sound = r#"{"names":[{"before":"s-","from":0,"count":2,"digits":3,"after":".tar"}],
            "digests":"00000000000000010000000000000002"}"#;
        let pairs =
            |text: &str| serde_json::from_str::<ShardList>(text).unwrap().pairs().map(|pairs| pairs.len());
        assert_eq!(pairs(sound), Some(2));
        for edited in [r#""count":18446744073709551615"#, r#""count":1099511627776"#, r#""count":1"#] {
            assert_eq!(pairs(&sound.replace(r#""count":2"#, edited)), None, "{edited}");
        }
        assert_eq!(pairs(&sound.replace(r#""digits":3"#, r#""digits":65536"#)), None);
    }

    #[test]
    fn numbered_shards_take_one_entry() {
        let names: Vec<String> = (98..1003).map(|shard| format!("v2-{shard:06}.tar.zst")).collect();
        let list = list(&names.iter().map(|name| (name.as_str(), 1)).collect::<Vec<_>>());
        assert_eq!(list.names.len(), 1);
        assert!(names.iter().eq(list.pairs().unwrap().iter().map(|(name, _)| name)));
    }

    #[test]
    fn every_change_names_its_shard() {
        let saved = [("a.tar", 1), ("b.tar", 2), ("c.tar", 3)];
        let cases = [
            (vec![("a.tar", 1), ("b.tar", 9), ("c.tar", 3)], "shard `b.tar` was replaced"),
            (vec![("a.tar", 1), ("c.tar", 3)], "shard `b.tar` was removed"),
            (vec![("a.tar", 1), ("b.tar", 2), ("c.tar", 3), ("d.tar", 4)], "shard `d.tar` was added"),
            (vec![("a.tar", 1), ("x.tar", 2), ("c.tar", 3)], "shard `b.tar` was renamed to `x.tar`"),
            (vec![("a.tar", 1), ("c.tar", 3), ("b.tar", 2)], "shard `b.tar` is now at place 3 instead of 2"),
            (
                vec![("a.tar", 1), ("b.tar", 2), ("b.tar", 2), ("c.tar", 3)],
                "`b.tar` is listed 2 times instead of 1",
            ),
        ];
        for (now, expected) in cases {
            let changes = list(&saved).changes(&list(&now));
            assert!(changes.len() == 1 && changes[0].contains(expected), "{changes:?}");
        }
        assert!(list(&saved).changes(&list(&saved)).is_empty());
    }
}
