//! Combines nearby ranges in an object into few requests.

use std::ops::Range;

/// Limits for combined requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CoalesceLimits {
    /// Maximum number of unwanted bytes that are read to save a request.
    pub(crate) gap_bytes_max: u64,
    /// Maximum size of a combined request in bytes; a single longer range is still one request.
    pub(crate) request_bytes_max: u64,
}

/// Request with the wanted ranges inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// Range to read.
    pub(crate) range: Range<u64>,
    /// Indices into the list of wanted ranges.
    pub(crate) wanted: Vec<usize>,
}

/// Combines wanted ranges in an object into few requests, in offset order. Empty ranges need no request.
pub(crate) fn coalesce(wanted: &[Range<u64>], limits: CoalesceLimits) -> Vec<Request> {
    let mut order: Vec<usize> = (0..wanted.len()).filter(|&at| !wanted[at].is_empty()).collect();
    order.sort_by_key(|&at| (wanted[at].start, wanted[at].end));
    let mut requests: Vec<Request> = Vec::new();
    for at in order {
        let next = &wanted[at];
        if let Some(last) = requests.last_mut() {
            let end = last.range.end.max(next.end);
            let is_near = next.start <= last.range.end.saturating_add(limits.gap_bytes_max);
            let is_inside = next.end <= last.range.end;
            if is_inside || (is_near && end - last.range.start <= limits.request_bytes_max) {
                last.range.end = end;
                last.wanted.push(at);
                continue;
            }
        }
        requests.push(Request { range: next.clone(), wanted: vec![at] });
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: CoalesceLimits = CoalesceLimits { gap_bytes_max: 10, request_bytes_max: 100 };

    #[test]
    fn near_ranges_share_a_request_and_far_ones_do_not() {
        let requests = coalesce(&[50..60, 0..20, 30..45, 200..210, 7..7], LIMITS);
        let expected =
            [Request { range: 0..60, wanted: vec![1, 2, 0] }, Request { range: 200..210, wanted: vec![3] }];
        assert_eq!(requests, expected);
    }

    #[test]
    fn a_request_is_bounded_unless_one_range_is_longer() {
        let requests = coalesce(&[0..60, 60..120, 120..400, 130..140], LIMITS);
        let ranges: Vec<_> = requests.iter().map(|request| request.range.clone()).collect();
        assert_eq!(ranges, [0..60, 60..120, 120..400]);
        assert_eq!(requests[2].wanted, [2, 3]);
    }

    proptest::proptest! {
        #[test]
        fn every_wanted_range_is_in_one_request_and_gaps_are_small(
            wanted in proptest::collection::vec((0u64..2_000, 0u64..150), 0..40)
        ) {
            let wanted: Vec<Range<u64>> = wanted.into_iter().map(|(start, bytes)| start..start + bytes).collect();
            let requests = coalesce(&wanted, LIMITS);
            let mut seen = vec![0; wanted.len()];
            for request in &requests {
                let longest = request.wanted.iter().map(|&at| wanted[at].end - wanted[at].start).max().unwrap();
                let bytes = request.range.end - request.range.start;
                proptest::prop_assert!(bytes <= LIMITS.request_bytes_max || bytes == longest);
                let mut covered = request.range.start;
                for &at in &request.wanted {
                    seen[at] += 1;
                    proptest::prop_assert!(request.range.start <= wanted[at].start);
                    proptest::prop_assert!(wanted[at].end <= request.range.end);
                    proptest::prop_assert!(wanted[at].start <= covered + LIMITS.gap_bytes_max);
                    covered = covered.max(wanted[at].end);
                }
                proptest::prop_assert_eq!(covered, request.range.end);
            }
            for (at, range) in wanted.iter().enumerate() {
                proptest::prop_assert_eq!(seen[at], usize::from(!range.is_empty()));
            }
        }
    }
}
