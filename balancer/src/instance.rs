//! Partition problem: items, groups, modules and times, and hard group limits in tokens and bytes.
//!
//! An *item* is a global-batch sample, identified only by number. A *module* is a model part (encoder, LLM)
//! on separate devices; every item has a time in each module. A *group* is a microbatch on some DP rank. An
//! [`Instance`] is checked once, when it is built; all code that accepts an instance relies on that.
//!
//! A cap is a guarantee: no result with a group above the cap is ever returned. Caps are compared in
//! integers.

use super::error::{Error, Result};
use dflop_costmodel::{MicrobatchConstants, random};
use serde::Deserialize;

/// Maximum total of an instance, so that load differences fit `i64`.
const SUM_MAX: u64 = i64::MAX as u64;

/// Checked partition problem.
///
/// # Examples
/// ```
/// // three items, two groups, two modules
/// let instance = dflop_balancer::Instance::new(2, 2, vec![10, 1, 10, 2, 10, 3])?;
/// assert_eq!(instance.items(), 3);
/// assert_eq!(instance.times_ns(2), [10, 3]);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    name: String,
    items: usize,
    groups: usize,
    modules: usize,
    times_ns: Vec<u64>,
    /// Constants by module; empty without constants.
    constants: Vec<MicrobatchConstants>,
    /// `constants` that apply to every microbatch.
    common_constants: Vec<MicrobatchConstants>,
    tokens: Option<Vec<u64>>,
    bytes: Option<Vec<u64>>,
}

/// The instance file, field by field.
#[derive(Deserialize)]
struct InstanceFile {
    #[serde(default)]
    name: String,
    n: usize,
    m: usize,
    c: usize,
    d: Vec<Vec<i64>>,
    tok: Option<Vec<i64>>,
    bytes: Option<Vec<i64>>,
}

impl Instance {
    /// Checks a problem in which every group gets an item.
    ///
    /// - `groups`: at least 1, at most the number of items
    /// - `modules`: at least 1
    /// - `times_ns`: `[items * modules]`, row-major by item, nanoseconds; zeros are valid
    ///
    /// # Errors
    /// [`Error::Config`] if `groups` or `modules` is 0 or too large; [`Error::Length`] if the length of
    /// `times_ns` is not a multiple of `modules`; [`Error::TooFewItems`]; [`Error::Overflow`] if the sum of
    /// all times does not fit 63 bits.
    pub fn new(groups: usize, modules: usize, times_ns: Vec<u64>) -> Result<Self> {
        let instance = Self::with_empty_groups(groups, modules, times_ns)?;
        if instance.items < groups {
            return Err(Error::TooFewItems { items: instance.items, groups });
        }
        Ok(instance)
    }

    /// Checks a problem that may have fewer items than groups, like the short last batch of an epoch.
    ///
    /// Groups stay empty only then: with at least as many items as groups, each group gets an item.
    ///
    /// # Errors
    /// The errors of [`Instance::new`], except [`Error::TooFewItems`].
    pub fn with_empty_groups(groups: usize, modules: usize, times_ns: Vec<u64>) -> Result<Self> {
        check_count("groups", groups)?;
        check_count("modules", modules)?;
        let items = times_ns.len() / modules;
        if !times_ns.len().is_multiple_of(modules) {
            let expected = (items + 1) * modules;
            return Err(Error::Length { field: "times_ns", found: times_ns.len(), expected });
        }
        // Groups store items as 32-bit numbers.
        if u32::try_from(items).is_err() {
            return Err(Error::Config { setting: "items", reason: format!("{items} is above 2^32 - 1") });
        }
        // Every later sum is over some of these times, so checking the total is enough.
        check_sum("times_ns", times_ns.chunks_exact(modules))?;
        Ok(Self {
            name: String::new(),
            items,
            groups,
            modules,
            times_ns,
            constants: Vec::new(),
            common_constants: Vec::new(),
            tokens: None,
            bytes: None,
        })
    }

    /// Reads an instance file: `{"name", "n", "m", "c", "d": [[ns per module] per item], "tok": [tokens]}`.
    ///
    /// `name`, `tok` and `bytes` (per item, like `tok`) may be absent; other fields are ignored. Numbers
    /// are integers and fit `i64`.
    ///
    /// # Errors
    /// [`Error::NotWhole`] if an item's number is a fraction or too large, [`Error::Json`] if the text is not
    /// such an object for a different reason; [`Error::Length`], [`Error::ItemLength`] and
    /// [`Error::Negative`] if the columns do not fit; then the errors of [`Instance::new`].
    pub fn from_json(text: &str) -> Result<Self> {
        let file: InstanceFile =
            // serde reports a line and a column; the item and its number help more.
            serde_json::from_str(text).map_err(|source| not_whole(text).unwrap_or(Error::Json { source }))?;
        if file.d.len() != file.n {
            return Err(Error::Length { field: "d", found: file.d.len(), expected: file.n });
        }
        if let Some(item) = file.d.iter().position(|row| row.len() != file.c) {
            return Err(Error::ItemLength { item, found: file.d[item].len(), expected: file.c });
        }
        check_count("c", file.c)?;
        let times_ns = to_unsigned("d", file.c, file.d.concat())?;
        let mut instance = Self::new(file.m, file.c, times_ns)?;
        instance.name = file.name;
        if let Some(tokens) = file.tok {
            instance = instance.tokens(to_unsigned("tok", 1, tokens)?)?;
        }
        if let Some(bytes) = file.bytes {
            instance = instance.bytes(to_unsigned("bytes", 1, bytes)?)?;
        }
        Ok(instance)
    }

    /// Sets the extra time that a microbatch takes in every module in addition to the items, `[modules]`.
    /// Default: none.
    ///
    /// Pipelines count it; a plain partition, whose groups all have equal constants, does not.
    ///
    /// # Errors
    /// [`Error::Length`], or [`Error::Overflow`] if times and constants do not fit 63 bits.
    pub fn constants(mut self, constants: Vec<MicrobatchConstants>) -> Result<Self> {
        if constants.len() != self.modules {
            let (found, expected) = (constants.len(), self.modules);
            return Err(Error::Length { field: "constants", found, expected });
        }
        let of_groups = |constants: &MicrobatchConstants| {
            let both = u128::from(constants.floor_ns) + u128::from(constants.base_ns);
            both * self.groups as u128
        };
        let times = self.times_ns.iter().map(|time| u128::from(*time)).sum::<u128>();
        if times + constants.iter().map(of_groups).sum::<u128>() > u128::from(SUM_MAX) {
            return Err(Error::Overflow { field: "constants", item: 0 });
        }
        let is_common =
            |module: usize| self.items >= self.groups && self.module_ns(module).all(|time| time > 0);
        let common = |(module, constants): (usize, &MicrobatchConstants)| {
            if is_common(module) { *constants } else { MicrobatchConstants::default() }
        };
        self.common_constants = constants.iter().enumerate().map(common).collect();
        self.constants = constants;
        Ok(self)
    }

    /// Sets the constants from an instance with the same modules.
    ///
    /// # Errors
    /// The errors of [`Instance::constants`].
    pub fn like(self, other: &Self) -> Result<Self> {
        if other.constants.is_empty() { Ok(self) } else { self.constants(other.constants.clone()) }
    }

    /// Sets the tokens of every item, `[items]`; needed by [`Caps::tokens_max`](crate::Caps::tokens_max).
    ///
    /// # Errors
    /// [`Error::Length`], or [`Error::Overflow`] if the sum does not fit 63 bits.
    pub fn tokens(mut self, tokens: Vec<u64>) -> Result<Self> {
        self.check_column("tokens", &tokens)?;
        self.tokens = Some(tokens);
        Ok(self)
    }

    /// Returns a quarter above the mean tokens in a group, or the mean plus the longest item: any list
    /// schedule meets it. `None` without tokens.
    ///
    /// # Source
    /// Graham, "Bounds on multiprocessing timing anomalies", 1969: no list schedule exceeds the mean by more
    /// than the longest item.
    #[must_use]
    pub fn near_mean_tokens(&self) -> Option<u64> {
        let tokens = self.tokens.as_ref()?;
        let mean = tokens.iter().sum::<u64>().div_ceil(self.groups as u64);
        let longest = tokens.iter().copied().max().unwrap_or(0);
        Some((mean + mean / 4).max(mean + longest))
    }

    /// Sets the memory of every item, `[items]` bytes; needed by [`Caps::bytes_max`](crate::Caps::bytes_max).
    ///
    /// # Errors
    /// [`Error::Length`], or [`Error::Overflow`] if the sum does not fit 63 bits.
    pub fn bytes(mut self, bytes: Vec<u64>) -> Result<Self> {
        self.check_column("bytes", &bytes)?;
        self.bytes = Some(bytes);
        Ok(self)
    }

    /// Returns the name in the instance file, empty if it has none.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of items.
    #[must_use]
    pub fn items(&self) -> usize {
        self.items
    }

    /// Returns the number of groups, at least 1.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the number of modules, at least 1.
    #[must_use]
    pub fn modules(&self) -> usize {
        self.modules
    }

    /// Returns an item's times, `[modules]` nanoseconds.
    ///
    /// # Panics
    /// If there is no such item.
    #[must_use]
    pub fn times_ns(&self, item: u32) -> &[u64] {
        let start = item as usize * self.modules;
        &self.times_ns[start..start + self.modules]
    }

    /// Returns the summed times for a group of items, `[modules]` nanoseconds.
    ///
    /// # Panics
    /// If there is no such item.
    #[must_use]
    pub fn load_ns(&self, group: &[u32]) -> Vec<u64> {
        let mut load_ns = vec![0; self.modules];
        for &item in group {
            for (load, time) in load_ns.iter_mut().zip(self.times_ns(item)) {
                *load += time;
            }
        }
        load_ns
    }

    /// Returns a microbatch's time in a module, from the sum over item times.
    pub(crate) fn microbatch_ns(&self, module: usize, items_ns: u64) -> u64 {
        self.constants.get(module).map_or(items_ns, |constants| constants.microbatch_ns(items_ns))
    }

    /// Returns the time that every microbatch takes in a module in addition to the items; nothing if a
    /// microbatch may have no work in the module.
    pub(crate) fn common_constants(&self, module: usize) -> MicrobatchConstants {
        self.common_constants.get(module).copied().unwrap_or_default()
    }

    /// Returns all times, `[items * modules]`.
    pub(crate) fn rows_ns(&self) -> &[u64] {
        &self.times_ns
    }

    /// Lists a module's times, `[items]`.
    pub(crate) fn module_ns(&self, module: usize) -> impl Iterator<Item = u64> + '_ {
        self.times_ns.iter().skip(module).step_by(self.modules).copied()
    }

    /// Lists the columns that a cap may bound, with units.
    pub(crate) fn capped_columns(&self) -> [(&'static str, Option<&[u64]>); 2] {
        [("tokens", self.tokens.as_deref()), ("bytes", self.bytes.as_deref())]
    }

    /// Returns a number that equal problems share: the seed for all random choices.
    pub(crate) fn seed(&self) -> u64 {
        // The name and the capped columns are left out: equal times draw equal numbers.
        let shape = [self.items as u64, self.groups as u64, self.modules as u64];
        random::seed_from(shape.into_iter().chain(self.times_ns.iter().copied()))
    }

    fn check_column(&self, field: &'static str, column: &[u64]) -> Result<()> {
        if column.len() != self.items {
            return Err(Error::Length { field, found: column.len(), expected: self.items });
        }
        check_sum(field, column.chunks_exact(1))
    }
}

/// Finds the first item with a number that is not an integer, in a file that failed to parse.
fn not_whole(text: &str) -> Option<Error> {
    let file: serde_json::Value = serde_json::from_str(text).ok()?;
    for field in ["d", "tok", "bytes"] {
        for (item, value) in file.get(field)?.as_array()?.iter().enumerate() {
            let row = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            if let Some(value) = row.iter().find(|value| value.is_number() && !value.is_i64()) {
                return Some(Error::NotWhole { field, item, value: value.to_string() });
            }
        }
    }
    None
}

/// Rejects a count that is 0 or does not fit 32 bits.
fn check_count(setting: &'static str, count: usize) -> Result<()> {
    if count == 0 || u32::try_from(count).is_err() {
        return Err(Error::Config { setting, reason: format!("{count} is not in 1..=2^32 - 1") });
    }
    Ok(())
}

/// Rejects rows whose total sum is too large.
fn check_sum<'a>(field: &'static str, rows: impl Iterator<Item = &'a [u64]>) -> Result<()> {
    let mut sum = 0_u64;
    for (item, row) in rows.enumerate() {
        for value in row {
            sum = match sum.checked_add(*value) {
                Some(sum) if sum <= SUM_MAX => sum,
                _ => return Err(Error::Overflow { field, item }),
            };
        }
    }
    Ok(())
}

/// Rejects negative values; each item has `width` values.
fn to_unsigned(field: &'static str, width: usize, values: Vec<i64>) -> Result<Vec<u64>> {
    let unsigned =
        |(at, value)| u64::try_from(value).map_err(|_| Error::Negative { field, item: at / width, value });
    values.into_iter().enumerate().map(unsigned).collect()
}

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

    #[test]
    fn a_file_is_read_and_unknown_fields_are_ignored() {
        let text =
            r#"{"name":"x","family":"y","n":2,"m":1,"c":2,"d":[[1,2],[0,4]],"tok":[5,6],"bytes":[7,8]}"#;
        let instance = Instance::from_json(text).unwrap();
        assert_eq!(
            (instance.name(), instance.items(), instance.groups(), instance.modules()),
            ("x", 2, 1, 2)
        );
        assert_eq!(instance.times_ns(1), [0, 4]);
        assert_eq!(instance.load_ns(&[0, 1]), [1, 6]);
        assert_eq!(instance.capped_columns(), [("tokens", Some(&[5, 6][..])), ("bytes", Some(&[7, 8][..]))]);
    }

    #[test]
    fn a_bad_file_is_refused_by_name() {
        let message = |text: &str| Instance::from_json(text).unwrap_err().to_string();
        for (text, expected) in [
            (r#"{"n":1"#, "could not read the instance"),
            (r#"{"n":1,"m":1,"c":1,"d":[["1"]]}"#, "could not read the instance"),
            (r#"{"n":1,"m":1,"c":1,"d":[[1.5]]}"#, "`d` of item 0 must be an integer below 2^63, got 1.5"),
            (
                r#"{"n":2,"m":1,"c":1,"d":[[1],[9223372036854775808]]}"#,
                "`d` of item 1 must be an integer below 2^63, got 9223372036854775808",
            ),
            (
                r#"{"n":2,"m":1,"c":1,"d":[[1],[2]],"tok":[1,0.5]}"#,
                "`tok` of item 1 must be an integer below 2^63, got 0.5",
            ),
            (r#"{"n":2,"m":1,"c":1,"d":[[1]]}"#, "`d` holds 1 values, expected 2"),
            (r#"{"n":2,"m":1,"c":1,"d":[[1],[2,3]]}"#, "item 1 has times for 2 modules, expected 1"),
            (r#"{"n":2,"m":1,"c":2,"d":[[1,1],[2,-3]]}"#, "`d` of item 1 must not be negative, got -3"),
            (
                r#"{"n":1,"m":2,"c":1,"d":[[1]]}"#,
                "1 items cannot fill 2 groups: expected at least one item per group",
            ),
            (r#"{"n":1,"m":0,"c":1,"d":[[1]]}"#, "invalid `groups`: 0 is not in 1..=2^32 - 1"),
            (r#"{"n":1,"m":1,"c":0,"d":[[]]}"#, "invalid `c`: 0 is not in 1..=2^32 - 1"),
            (r#"{"n":1,"m":1,"c":1,"d":[[1]],"tok":[1,2]}"#, "`tokens` holds 2 values, expected 1"),
            (r#"{"n":1,"m":1,"c":1,"d":[[1]],"tok":[-1]}"#, "`tok` of item 0 must not be negative, got -1"),
            (
                r#"{"n":2,"m":1,"c":1,"d":[[9223372036854775807],[1]]}"#,
                "the sum of `times_ns` overflows at item 1: it must be below 2^63",
            ),
        ] {
            assert_eq!(message(text), expected, "{text}");
        }
    }

    #[test]
    fn fewer_items_than_groups_need_the_other_constructor() {
        assert!(matches!(Instance::new(3, 1, vec![1, 2]), Err(Error::TooFewItems { items: 2, groups: 3 })));
        assert_eq!(Instance::with_empty_groups(3, 1, vec![1, 2]).unwrap().items(), 2);
        assert_eq!(Instance::with_empty_groups(3, 1, vec![]).unwrap().items(), 0);
    }

    #[test]
    fn constants_count_where_every_microbatch_has_work() {
        let constants = vec![MicrobatchConstants { floor_ns: 9, base_ns: 2 }; 2];
        let of = |times_ns: Vec<u64>| Instance::new(2, 2, times_ns)?.constants(constants.clone());
        let instance = of(vec![5, 0, 10, 3]).unwrap();
        assert_eq!([5, 10, 0].map(|ns| instance.microbatch_ns(0, ns)), [9, 12, 0]);
        assert_eq!(instance.common_constants(0), constants[0]);
        assert_eq!(instance.common_constants(1), MicrobatchConstants::default(), "an item has no work in it");
        assert!(matches!(
            of(vec![u64::MAX / 2 - 7, 0, 1, 3]),
            Err(Error::Overflow { field: "constants", .. })
        ));
        let short = Instance::new(1, 2, vec![1, 1]).unwrap().constants(constants[..1].to_vec());
        assert!(matches!(short, Err(Error::Length { field: "constants", found: 1, expected: 2 })));
    }

    #[test]
    fn a_ragged_row_is_refused() {
        assert!(matches!(
            Instance::new(1, 2, vec![1, 2, 3]),
            Err(Error::Length { found: 3, expected: 4, .. })
        ));
    }

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

    #[test]
    fn groups_near_the_mean_have_a_quarter_or_the_longest_item_more() {
        let tokens = |tokens: Vec<u64>| {
            let instance = Instance::new(2, 1, vec![1; tokens.len()]).unwrap();
            instance.tokens(tokens).unwrap().near_mean_tokens()
        };
        assert_eq!(tokens(vec![1; 16]), Some(10));
        assert_eq!(tokens(vec![9, 1, 1, 1]), Some(15));
        assert_eq!(Instance::new(2, 1, vec![1; 4]).unwrap().near_mean_tokens(), None);
    }
}
