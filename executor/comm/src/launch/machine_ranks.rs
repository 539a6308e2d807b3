//! Parses Slurm task lists by machine.

/// Returns the number of ranks on a machine from a list such as `4(x2),1`; `None` if the list is invalid or
/// too short.
pub(super) fn ranks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in list.split(',') {
        let (ranks, machines) = match part.split_once("(x") {
            Some((ranks, machines)) => (ranks, machines.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        let ranks = ranks.parse().ok()?;
        before += machines;
        if node < before {
            return Some(ranks);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_machine_are_counted_through() {
        let ranks = |node| ranks_of_node("4(x2),1,3", node);
        assert_eq!([0, 1, 2, 3, 4].map(ranks), [Some(4), Some(4), Some(1), Some(3), None]);
        for bad in ["", "x", "2(x", "2(x3", "2(xa)"] {
            assert_eq!(ranks_of_node(bad, 0), None, "{bad}");
        }
    }
}
