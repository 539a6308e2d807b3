//! Selects the open handshake to end when a new caller connects.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// Maximum number of open handshakes per listener.
pub(super) const GREETINGS_MAX: usize = 256;
/// Maximum number of open handshakes per listener and source.
pub(super) const SOURCE_GREETINGS_MAX: usize = 128;

/// Open handshake properties that determine the precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Caller {
    /// [`machine_address`] for the caller address.
    pub(super) source: IpAddr,
    /// Whether the first message has arrived completely.
    pub(super) has_introduction: bool,
}

/// Returns the address under which callers from the same machine are counted: an IPv6 address without the
/// last 64 bits, which a machine may choose freely.
pub(super) fn machine_address(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// Returns the position of the handshake to end before the handshake with a new caller begins; `None` if
/// there is room.
///
/// - `callers`: open handshakes, oldest first
///
/// A source at its limit loses one of its own handshakes; at the listener limit, the source with the most
/// handshakes loses one. The slowest caller from that source is the oldest caller that waits for the same
/// message as the majority: neither a crowd that sends nothing nor a crowd that stops halfway displaces a
/// caller that proceeds.
pub(super) fn to_end(callers: &[Caller], newcomer: IpAddr) -> Option<usize> {
    let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for caller in callers {
        *counts.entry(caller.source).or_default() += 1;
    }
    let source = if counts.get(&newcomer).is_some_and(|&count| count >= SOURCE_GREETINGS_MAX) {
        newcomer
    } else if callers.len() >= GREETINGS_MAX {
        counts.into_iter().max_by_key(|&(_, count)| count)?.0
    } else {
        return None;
    };
    let of_source = || callers.iter().filter(|caller| caller.source == source);
    let introduced = of_source().filter(|caller| caller.has_introduction).count();
    let slowest = Caller { source, has_introduction: 2 * introduced > of_source().count() };
    callers.iter().position(|caller| *caller == slowest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const SILENT: bool = false;
    const INTRODUCED: bool = true;

    fn caller(machine: u8, has_introduction: bool) -> Caller {
        Caller { source: address(machine), has_introduction }
    }

    fn address(machine: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, machine).into()
    }

    #[test]
    fn a_source_at_its_bound_gives_way_to_itself() {
        let mut callers = vec![caller(2, SILENT)];
        callers.extend([caller(1, SILENT); SOURCE_GREETINGS_MAX - 1]);
        assert_eq!(to_end(&callers, address(1)), None);
        callers.push(caller(1, SILENT));
        assert_eq!(to_end(&callers, address(1)), Some(1), "the oldest of the source");
        assert_eq!(to_end(&callers, address(2)), None);
    }

    #[test]
    fn at_the_bound_of_the_listener_the_largest_source_gives_way() {
        let mut callers = vec![caller(9, SILENT)];
        callers.extend([caller(1, SILENT); 100]);
        callers.extend([caller(2, SILENT); 101]);
        callers.extend((0..54).map(|machine| caller(100 + machine, SILENT)));
        assert_eq!(callers.len(), GREETINGS_MAX);
        assert_eq!(to_end(&callers, address(9)), Some(101), "the oldest caller of machine 2");
    }

    #[test]
    fn callers_that_proceed_stay() {
        let mut silent = vec![caller(1, INTRODUCED)];
        silent.extend([caller(1, SILENT); SOURCE_GREETINGS_MAX]);
        assert_eq!(to_end(&silent, address(1)), Some(1));
        let mut halfway = vec![caller(1, SILENT)];
        halfway.extend([caller(1, INTRODUCED); SOURCE_GREETINGS_MAX]);
        assert_eq!(to_end(&halfway, address(1)), Some(1));
    }

    #[test]
    fn a_network_of_ipv6_is_one_source() {
        let source = |text: &str| machine_address(text.parse().unwrap());
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), address(1));
        assert_ne!(source("10.0.0.2"), address(1));
    }
}
