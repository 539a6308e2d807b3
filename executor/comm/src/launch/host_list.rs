//! Parses Slurm host lists.

/// Returns the first host in a list such as `gpu[007-009,12],big`; `None` if the list is invalid.
pub(super) fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    if !rest.starts_with('[') {
        return (!prefix.is_empty()).then(|| prefix.to_owned());
    }
    let (numbers, rest) = rest[1..].split_once(']')?;
    let first = numbers.split([',', '-']).next().filter(|number| !number.is_empty())?;
    // a bracket may be followed by a suffix, which may contain brackets itself
    let suffix = if rest.is_empty() || rest.starts_with(',') { String::new() } else { first_host(rest)? };
    Some(format!("{prefix}{first}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        let first = |list| first_host(list).unwrap();
        assert_eq!(first("node"), "node");
        assert_eq!(first("a,b"), "a");
        assert_eq!(first("gpu[007-009,12],big"), "gpu007");
        assert_eq!(first("r[1-2]n[3,4].cluster,x"), "r1n3.cluster");
        for bad in ["", ",a", "a[1-2", "a[]"] {
            assert_eq!(first_host(bad), None, "{bad}");
        }
    }
}
